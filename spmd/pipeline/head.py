"""The loss of the output of the last stage, computed by this stage alone or by all.

The logits of a large vocabulary cost as much as several layers. All stages wait for the slowest, so
a model that leaves the logits to its loss (`LazyLogits`) has them computed by all stages, each for
some of the words (vocabulary parallelism, Yeung et al., arXiv:2411.05288):

```
output of the last stage ──▶ to all stages ──▶ logits of a stage's words ──▶ loss, as on one device
                                                          │
gradient of that output ◀── sum over the words ◀──────────┴──▶ gradient of the kernel's own words
```

The gradient of the logits' input is whole, and the last stage's alone. So whatever is between the
output and the logits, such as a norm, has the gradients of one device.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmd.gradients.losses import Sums
from spmd.pipeline.branches import cond
from spmd.pipeline.interleave import AXIS
from spmd.pipeline.partition import StageModel, Stream
from spmd.pipeline.transfers import sum_of_stages


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """The loss of the output of the last stage, on one stage.

    Attributes:
        axis: The axis of the stages if all of them compute logits; None if the last one does.
        is_last: Whether this is the last stage, on its devices.
    """

    model: StageModel
    axis: str | None
    is_last: jax.Array

    @classmethod
    def of(cls, model: StageModel, shared: Any, output: Stream) -> "Head":
        """Return the head of all stages if the model leaves the logits to its loss.

        Args:
            shared: Parameters other than those of layers; only shapes count, as of the output.
        """
        axis = None
        if model.divides_words(shared, output):
            axis = AXIS
        return cls(model, axis, jax.lax.axis_index(AXIS) == model.split.stages - 1)

    @property
    def of_last_stage(self) -> "Head":
        """The head of the last stage alone."""
        return dataclasses.replace(self, axis=None)

    def run(
        self, is_due: jax.Array, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any
    ) -> Any:
        """Apply a branch to the operands: `yes` on the stages with logits to compute, if they are due.

        Args:
            is_due: Equal on all stages.
        """

        def head(*operands: Any) -> Any:
            return yes(*operands)

        def last_stage_head(*operands: Any) -> Any:
            return yes(*operands)

        if self.axis is None:
            return cond(is_due & self.is_last, last_stage_head, no, *operands)
        return cond(is_due, head, no, *operands)

    def sums(self, shared: Any, output: Stream, i: jax.Array) -> Sums:
        """Return the sums of a microbatch; on other stages than the last, zeros."""
        _, found = self._loss(shared, self._on_all_stages(output), i)
        return self._zero_elsewhere(found)

    def gradients(
        self, shared: Any, output: Stream, i: jax.Array, scale: jax.Array
    ) -> tuple[Any, Stream, Sums]:
        """Return the gradients of `shared`, of the output, and the sums of a microbatch.

        On other stages than the last, the first gradients are those of the stage's own words in the
        kernel of the logits, and all else is zero.

        Args:
            scale: Factor of the loss.
        """

        def loss(shared: Any, output: Stream) -> tuple[jax.Array, Sums]:
            return self._loss(shared, output, i)

        _, pull, found = jax.vjp(loss, shared, self._on_all_stages(output), has_aux=True)
        d_shared, d_output = pull(self._zero_elsewhere(scale))  # the loss of the last stage counts
        return d_shared, d_output, self._zero_elsewhere(found)

    def _loss(self, shared: Any, output: Stream, i: jax.Array) -> tuple[jax.Array, Sums]:
        return self.model.head(shared, output, i, over=self.axis)

    def _on_all_stages(self, output: Stream) -> Stream:
        """Return the output of the last stage, if all stages compute logits."""
        if self.axis is None:
            return output
        return sum_of_stages(self._zero_elsewhere(output), "output of the last stage")

    def _zero_elsewhere(self, arrays: Any) -> Any:
        """Return arrays of the last stage, and zeros on other stages with logits."""
        if self.axis is None:
            return arrays
        return jax.tree.map(lambda x: jnp.where(self.is_last, x, jnp.zeros_like(x)), arrays)
