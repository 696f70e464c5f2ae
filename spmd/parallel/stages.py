"""Where a model's layers begin and end, said by the model, so that a pipeline may cut it into stages.

A model runs its stacked layers through `through_layers`. Outside a pipeline that is a plain call. A pipeline
(`spmd.gradients.pipeline`) traces the same loss function three times, and each time answers the call in another way:

```
enter    loss_fn ──▶ embedding ──▶ through_layers                     the stream as it enters the first layer
inside   loss_fn ──────────────▶ through_layers: own layers           the stream as it leaves this stage's layers
leave    loss_fn ──────────────▶ through_layers ──▶ norm, head, loss  sums over the microbatch
```

What stands before the layers and is not asked for (the embedding, for any stage but the first) is dead code, and so is
what stands behind them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

Run = Callable[[Any, Any], tuple[jax.Array, Any]]
"""`(x, layers) -> (x after them, a value of each layer, stacked)`, for any number of layers."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """What goes from stage to stage.

    Attributes:
        x: The residual stream of one microbatch.
        values: What layers returned besides, stacked over all layers; of layers that are still to come, zeros.
    """

    x: Any
    values: Any


class Reached(Exception):
    """The model came to its layers, and nothing behind them is asked for.

    Attributes:
        stream: What there is at that point.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream


Answer = Callable[[Run, jax.Array, Any], tuple[jax.Array, Any]]
"""What a pipeline does in the place of `run(x, layers)`."""

SLOTS = "stage_inputs"
"""What a pipeline marks the slots as in which a stage keeps what arrives, until it is needed."""

_ANSWER = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def answered(answer: Answer) -> Iterator[None]:
    """Inside, `through_layers` does what `answer` says."""
    with _ANSWER(answer):
        yield


def through_layers(run: Run, x: jax.Array, layers: Any) -> tuple[jax.Array, Any]:
    """`run(x, layers)`; in a pipeline, on the layers of one stage.

    Args:
        run: Runs some layers, one after the other.
        x: What enters the first one.
        layers: A tree of arrays with a leading layer dimension.

    Returns:
        What leaves the last layer, and a value of each layer, stacked.

    Example:
        >>> import jax.numpy as jnp
        >>> run = lambda x, layers: jax.lax.scan(lambda x, w: (x * w, x), x, layers)
        >>> float(through_layers(run, jnp.float32(1), jnp.array([2.0, 3.0]))[0])
        6.0
    """
    answer = _ANSWER.value
    return run(x, layers) if answer is None else answer(run, x, layers)
