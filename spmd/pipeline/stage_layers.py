"""A stage's layers as a forward and a backward task, and what is kept between the two.

| | forward task | kept | backward task |
|---|---|---|---|
| `SavedLayers` | layers | what the remat policy saves | derivative |
| `RecomputedLayers` | layers | nothing | layers again, derivative |

Both keep no parameters: `jax.vjp` saves those too, and what is computed from them alone, such as
kernels cast to the compute dtype. A program of the saved arrays tells which of them depend on the
stage's input; the others are computed again.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from spmd.errors import ConfigError, Problem
from spmd.jaxpr.dependence import dependent_outputs
from spmd.pipeline.partition import TITLE, StageModel, Stream

Pull = Callable[[Stream], Any]
"""Gradient of a stage's output → those of its layers, of other parameters and of its input."""


class StageLayers(Protocol):
    """The two tasks of a stage's layers.

    Arguments of both are a chunk of layers `[layer, …]`, all other parameters, the stage's input,
    the microbatch, and the number of the chunk.
    """

    @property
    def saved(self) -> Sequence[jax.ShapeDtypeStruct]:
        """The arrays that are kept between the tasks."""

    def forward(
        self, layers: Any, shared: Any, stream: Stream, i: jax.Array, chunk: jax.Array
    ) -> tuple[Stream, Sequence[jax.Array]]:
        """Return the stage's output, and the arrays to keep."""

    def backward(
        self,
        layers: Any,
        shared: Any,
        stream: Stream,
        saved: Sequence[jax.Array],
        i: jax.Array,
        chunk: jax.Array,
    ) -> tuple[Stream, Pull]:
        """Return the stage's output again, and its derivative."""


class RecomputedLayers:
    """Layers whose backward task runs the forward pass again, from the stage's input."""

    saved = ()

    def __init__(self, model: StageModel) -> None:
        self.model = model

    def forward(
        self, layers: Any, shared: Any, stream: Stream, i: jax.Array, chunk: jax.Array
    ) -> tuple[Stream, Sequence[jax.Array]]:
        """Return the stage's output; nothing is kept."""
        return self.model.run_layers(layers, shared, stream, i, chunk), ()

    def backward(
        self,
        layers: Any,
        shared: Any,
        stream: Stream,
        saved: Sequence[jax.Array],
        i: jax.Array,
        chunk: jax.Array,
    ) -> tuple[Stream, Pull]:
        """Return the stage's output and its derivative."""
        del saved
        return _vjp(self.model, layers, shared, stream, i, chunk)


class SavedLayers:
    """Layers whose backward task starts from what the remat policy saved of the forward task.

    Args:
        layers: A chunk of layers, `[layer, …]`.
        shared: All other parameters.
        stream: The stage's input; only the shapes of the three count.

    Raises:
        ConfigError: The policy moves arrays to host memory, and slots are on the device.
    """

    def __init__(self, model: StageModel, layers: Any, shared: Any, stream: Stream) -> None:
        def both_passes(*arguments: Any) -> tuple[Stream, Pull]:
            return _vjp(model, *arguments)

        example = layers, shared, stream, jax.numpy.int32(0), jax.numpy.int32(0)
        program, shapes = jax.make_jaxpr(both_passes, return_shape=True)(*example)
        results, self._results = jax.tree.flatten(shapes)
        is_input = _leaves_of(example, number=2)
        is_saved = dependent_outputs(program, is_input)
        _check_memory(itertools.compress(program.out_avals, is_saved))
        self.saved = tuple(itertools.compress(results, is_saved))
        self._is_saved = is_saved
        self._outputs = len(jax.tree.leaves(shapes[0]))
        self._forward = program
        self._again = _computing(program, [not saved for saved in is_saved])

    def forward(
        self, layers: Any, shared: Any, stream: Stream, i: jax.Array, chunk: jax.Array
    ) -> tuple[Stream, Sequence[jax.Array]]:
        """Return the stage's output, and the arrays to keep; the output is one of them."""
        arguments = jax.tree.leaves((layers, shared, stream, i, chunk))
        results = jaxpr_as_fun(self._forward)(*arguments)
        output, _ = self._unflatten(results)
        return output, tuple(itertools.compress(results, self._is_saved))

    def backward(
        self,
        layers: Any,
        shared: Any,
        stream: Stream,
        saved: Sequence[jax.Array],
        i: jax.Array,
        chunk: jax.Array,
    ) -> tuple[Stream, Pull]:
        """Return the stage's output and its derivative; the value of `stream` is not read."""
        arguments = jax.tree.leaves((layers, shared, stream, i, chunk))
        again = iter(jaxpr_as_fun(self._again)(*arguments))
        kept = iter(saved)
        results = [next(kept if is_saved else again) for is_saved in self._is_saved]
        return self._unflatten(results)

    def _unflatten(self, results: Sequence[jax.Array]) -> tuple[Stream, Pull]:
        output, pull = jax.tree.unflatten(self._results, results)
        return output, pull


def _vjp(
    model: StageModel, layers: Any, shared: Any, stream: Stream, i: jax.Array, chunk: jax.Array
) -> tuple[Stream, Pull]:
    """Run layers; return the output and the derivative, whose leaves are what the policy saves."""

    def run(layers: Any, shared: Any, stream: Stream) -> Stream:
        return model.run_layers(layers, shared, stream, i, chunk)

    return jax.vjp(run, layers, shared, stream)


def _check_memory(saved: Iterable[Any]) -> None:
    """Raise a `ConfigError` if an array to keep is in host memory."""
    offloaded = sum(aval.memory_space == jax.memory.Space.Host for aval in saved)
    if offloaded:
        problem = Problem(
            "remat",
            "offloads activations, and a stage keeps its tasks' arrays on the device",
            f"{offloaded} arrays of a stage in host memory",
            "tabulate(schedule, recompute=True), pipeline.recompute of a config; or no offload",
        )
        raise ConfigError(TITLE, [problem])


def _leaves_of(arguments: Sequence[Any], number: int) -> list[bool]:
    """Return a flag for each leaf of the arguments: it is one of that argument."""
    flags = list[bool]()
    for position, argument in enumerate(arguments):
        flags += [position == number] * len(jax.tree.leaves(argument))
    return flags


def _computing(program: ClosedJaxpr, outputs: Iterable[bool]) -> ClosedJaxpr:
    """Return the part of a program that computes the marked outputs, with the same inputs."""
    part, _ = dce_jaxpr(program.jaxpr, list(outputs), instantiate=True)
    return ClosedJaxpr(part, program.consts)
