"""The input of the first layer of the stages, and its gradient, computed by all stages.

An embedding is a lookup: all stages look up the same microbatch in the tick in which it enters
(`LookupEntrance`). Other layers before the stages, such as dense first layers, take time, which all
stages would spend on each microbatch. So the stages run them for as many microbatches as there are
stages, one each, when the first of these enters (`LayersEntrance`). After each one that enters, the
rest move one stage on:

```
stage        0    1    2    3
tick 0      m0   m1   m2   m3     computed in this tick; m0 enters
tick 1      m1   m2   m3    ·     m1 enters
```

Gradients go the other way: each one that leaves the first stage moves the others one stage on, and
when all stages have one, they run the backward pass.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from spmd.jaxpr.equations import equations, name_of
from spmd.pipeline.branches import cond
from spmd.pipeline.interleave import AXIS
from spmd.pipeline.partition import StageModel, Stream
from spmd.pipeline.slots import accumulate_at, select_chunk
from spmd.pipeline.transfers import shift

_PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclasses.dataclass(frozen=True, eq=False)
class FirstStageOrder:
    """Order of the microbatches at the first stage, on the way in or out.

    Attributes:
        microbatches: `[place]`.
        places: The place of the one that passes in each tick, `[tick]`; -1 for none.
    """

    microbatches: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, tasks: np.ndarray, chunks: np.ndarray) -> "FirstStageOrder":
        """Return the order of the tasks of the first virtual stage.

        Args:
            tasks: Microbatches of the first stage's tasks, `[tick]`; -1 for none.
            chunks: The number of the chunk of layers of each.

        Example:
            >>> order = FirstStageOrder.of(np.array([3, -1, 0]), np.array([0, 0, 0]))
            >>> order.microbatches.tolist(), order.places.tolist()
            ([3, 0], [0, -1, 1])
        """
        passes = (tasks >= 0) & (chunks == 0)
        places = np.where(passes, np.cumsum(passes) - 1, -1)
        return cls(tasks[passes], places)


class Entrance(Protocol):
    """The first stage's inputs and their gradients.

    A number is the place of a microbatch among those that enter, or that leave (`FirstStageOrder`).
    """

    @property
    def held(self) -> tuple[Any, Any]:
        """The arrays held before the first tick, on the way in and on the way out."""

    def enter(self, held: Any, number: jax.Array) -> tuple[Stream, Any]:
        """Return the input of the first stage, and the arrays held after it; number -1 for none."""

    def leave(
        self, held: Any, number: jax.Array, gradient: Stream, d_shared: Any
    ) -> tuple[Any, Any]:
        """Return totals with the gradients of the parameters added, and the arrays held after it.

        Args:
            number: -1 for none.
            gradient: Of the first stage's input, on the first stage.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class _Input:
    """The input of the first layer, and its derivative.

    Attributes:
        shared: Parameters other than those of layers, `[version, …]`.
        microbatches: Microbatches of each version.
        empty: A stream of zeros.
    """

    model: StageModel
    shared: Any
    microbatches: int
    empty: Stream

    def of(self, i: jax.Array) -> Stream:
        """Return the input of a microbatch."""
        return self.model.embed(select_chunk(self.shared, i // self.microbatches), i)

    def add_gradients(self, d_shared: Any, i: jax.Array, gradient: Stream) -> Any:
        """Add the gradients of the parameters to totals, from the gradient of the input."""
        version = i // self.microbatches
        own = select_chunk(self.shared, version)
        _, pull = jax.vjp(lambda shared: self.model.embed(shared, i), own)
        (d_own,) = pull(gradient)
        return accumulate_at(d_shared, d_own, version)

    @property
    def has_layers(self) -> bool:
        """Whether it has a product, and is no lookup."""
        own = select_chunk(self.shared, 0)
        program = jax.make_jaxpr(self.model.embed)(own, jnp.int32(0)).jaxpr
        used, _ = dce_jaxpr(program, [True] * len(program.outvars))
        return any(name_of(equation) in _PRODUCTS for equation in equations(used))


@dataclasses.dataclass(frozen=True, eq=False)
class LookupEntrance:
    """The same microbatch on all stages, in the tick of its entry or exit.

    Attributes:
        entering: The microbatches in the order in which they enter.
        leaving: The microbatches in the order in which they leave.
    """

    input: _Input
    entering: np.ndarray
    leaving: np.ndarray

    held = ((), ())

    def enter(self, held: tuple[()], number: jax.Array) -> tuple[Stream, tuple[()]]:
        """Return the input of the first stage."""
        i = jnp.asarray(self.entering)[number]

        def embedding() -> Stream:
            return self.input.of(i)

        return cond(number >= 0, embedding, lambda: self.input.empty), held

    def leave(
        self, held: tuple[()], number: jax.Array, gradient: Stream, d_shared: Any
    ) -> tuple[Any, tuple[()]]:
        """Add the gradients of one microbatch, of the first stage alone."""
        i = jnp.asarray(self.leaving)[number]
        is_first = jax.lax.axis_index(AXIS) == 0

        def embedding_backward(d_shared: Any) -> Any:
            own = jax.tree.map(lambda d: jnp.where(is_first, d, jnp.zeros_like(d)), gradient)
            return self.input.add_gradients(d_shared, i, own)

        return cond(number >= 0, embedding_backward, lambda total: total, d_shared), held


@dataclasses.dataclass(frozen=True, eq=False)
class LayersEntrance:
    """A microbatch of its own on each stage, in the tick of the first one's entry.

    Attributes are those of `LookupEntrance`.
    """

    input: _Input
    entering: np.ndarray
    leaving: np.ndarray

    @property
    def held(self) -> tuple[Any, Any]:
        """One residual stream and one gradient of it."""
        return self.input.empty.x, self.input.empty.x

    @property
    def _stages(self) -> int:
        return self.input.model.split.stages

    def _stream(self, x: Any) -> Stream:
        """Return a stream without values, which layers of the stages add."""
        return Stream(x, self.input.empty.values)

    def enter(self, held: Any, number: jax.Array) -> tuple[Stream, Any]:
        """Return the input of the first stage, and the inputs moved on to the stages."""
        # The last group may have fewer microbatches than stages.
        own = jnp.minimum(number + jax.lax.axis_index(AXIS), len(self.entering) - 1)
        i = jnp.asarray(self.entering)[own]

        def first_layers(held: Any) -> Any:
            del held
            return self.input.of(i).x

        is_due = (number >= 0) & (number % self._stages == 0)
        held = cond(is_due, first_layers, lambda held: held, held)
        moved = shift(held, self._stages, -1)
        return self._stream(held), _where(number >= 0, moved, held)

    def leave(
        self, held: Any, number: jax.Array, gradient: Stream, d_shared: Any
    ) -> tuple[Any, Any]:
        """Hold a gradient, and add those of all stages once each has one, or none is left."""
        stage = jax.lax.axis_index(AXIS)
        place = number % self._stages
        moved = shift(held, self._stages, 1)
        others = _where(place == 0, self.input.empty.x, moved)
        after = _where(stage == 0, gradient.x, others)
        held = _where(number >= 0, after, held)
        i = jnp.asarray(self.leaving)[jnp.maximum(number - stage, 0)]

        def first_layers_backward(d_shared: Any) -> Any:
            return self.input.add_gradients(d_shared, i, self._stream(held))

        is_last = (place == self._stages - 1) | (number == len(self.leaving) - 1)
        is_due = (number >= 0) & is_last
        return cond(is_due, first_layers_backward, lambda total: total, d_shared), held


def _where(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), yes, no)


def make_entrance(
    model: StageModel,
    shared: Any,
    empty: Stream,
    *,
    microbatches: int,
    versions: int,
    entering: FirstStageOrder,
    leaving: FirstStageOrder,
) -> Entrance:
    """Return the entrance of a pipeline's microbatches.

    Args:
        shared: Parameters other than those of layers, `[version, …]`.
        empty: A stream of zeros.
        microbatches: Microbatches of each version.
        versions: Batches in flight.
        entering: The order in which microbatches enter.
        leaving: The order in which they leave.
    """
    orders = entering.microbatches, leaving.microbatches
    first_input = _Input(model, shared, microbatches, empty)
    # Without a flush, a group of microbatches would be of two batches.
    if versions == 1 and first_input.has_layers:
        return LayersEntrance(first_input, *orders)
    return LookupEntrance(first_input, *orders)
