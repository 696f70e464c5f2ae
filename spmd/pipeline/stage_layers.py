"""A stage's layers as a forward and a backward task, with arrays kept between the two.

| | forward task | kept | backward task |
|---|---|---|---|
| `SavedLayers` | layers | what the remat policy saves | derivative |
| `RecomputedLayers` | layers | nothing | layers again, derivative |

Neither keeps parameters: `jax.vjp` saves those too, and what is computed from them alone, such as
kernels cast to the compute dtype. The traced program tells which arrays depend on the stage's
input; the others are computed again.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from spmd.errors import ConfigError, Problem
from spmd.jaxpr.dependence import dependent_outputs
from spmd.model_interface.model import NO_PIPELINE
from spmd.pipeline.partition import StageModel, Stream

Derivative = Callable[[Stream], tuple[Any, Any, Stream]]
"""Gradient of a stage's output → those of its layers, of other parameters and of its input."""


class Microbatch(NamedTuple):
    """The arguments of a task.

    Attributes:
        layers: A chunk of layers, `[layer, …]`.
        shared: All other parameters.
        number: The microbatch.
        chunk: The number of the chunk.
        statistics: The statistics of the chunk's layers, before the task that carries them.
    """

    layers: Any
    shared: Any
    number: jax.Array
    chunk: jax.Array
    statistics: Any


class StageLayers(Protocol):
    """The two tasks of a stage's layers."""

    @property
    def saved(self) -> Sequence[jax.ShapeDtypeStruct]:
        """The arrays kept between the tasks."""

    def forward(self, at: Microbatch, stream: Stream) -> tuple[Stream, Sequence[jax.Array], Any]:
        """Return the stage's output, the arrays to keep, and the statistics after the layers."""

    def output(self, saved: Sequence[jax.Array]) -> Stream | None:
        """Return the stage's output from the arrays kept; None if only `backward` has it."""

    def backward(
        self, at: Microbatch, stream: Stream, saved: Sequence[jax.Array]
    ) -> tuple[Stream, Derivative, Any]:
        """Return the stage's output again, its derivative, and the statistics after the layers.

        These are None if every stage has forward tasks.
        """


class RecomputedLayers:
    """Layers with nothing kept: the backward task runs the forward pass again."""

    saved = ()

    def __init__(self, model: StageModel) -> None:
        self.model = model

    def forward(self, at: Microbatch, stream: Stream) -> tuple[Stream, Sequence[jax.Array], Any]:
        """Return the stage's output and the statistics; nothing is kept."""
        output, statistics = self.model.run_layers(
            at.layers, at.shared, stream, at.number, at.chunk, at.statistics
        )
        return output, (), statistics

    def output(self, saved: Sequence[jax.Array]) -> None:
        """Return None: the backward task computes the output."""
        del saved

    def backward(
        self, at: Microbatch, stream: Stream, saved: Sequence[jax.Array]
    ) -> tuple[Stream, Derivative, Any]:
        """Return the stage's output, its derivative, and the statistics."""
        del saved
        return _vjp(self.model, at, stream)


class SavedLayers:
    """Layers with the saved arrays of the remat policy kept from the forward task.

    Args:
        example: Arguments of a task; only shapes count.
        stream: The stage's input; the same.

    Raises:
        ConfigError: The policy moves arrays to host memory, and slots are on the device.
    """

    def __init__(self, model: StageModel, example: Microbatch, stream: Stream) -> None:
        def both_passes(at: Microbatch, stream: Stream) -> tuple[tuple[Stream, Derivative], Any]:
            output, derivative, statistics = _vjp(model, at, stream)
            return (output, derivative), statistics

        program, shapes = jax.make_jaxpr(both_passes, return_shape=True)(example, stream)
        of_backward, statistics = shapes
        results, self._structure = jax.tree.flatten(of_backward)
        of_statistics, self._statistics_structure = jax.tree.flatten(statistics)
        output, _ = of_backward
        outputs, self._output_structure = jax.tree.flatten(output)
        self._outputs = len(outputs)
        others = len(jax.tree.leaves(example))
        of_stream = len(jax.tree.leaves(stream))
        is_dependent = dependent_outputs(program, [False] * others + [True] * of_stream)
        # The output comes first, and the statistics last. The output is kept whatever it depends
        # on, for the loss reads it.
        self._is_saved = [True] * self._outputs
        self._is_saved += is_dependent[self._outputs : len(results)]
        _check_memory(itertools.compress(program.out_avals, self._is_saved))
        self.saved = tuple(itertools.compress(results, self._is_saved))
        self._program = program
        is_again = [not is_saved for is_saved in self._is_saved]
        is_again += [False] * len(of_statistics)
        part, _ = dce_jaxpr(program.jaxpr, is_again, instantiate=True)
        self._again = ClosedJaxpr(part, program.consts)

    def forward(self, at: Microbatch, stream: Stream) -> tuple[Stream, Sequence[jax.Array], Any]:
        """Return the output, the arrays to keep, of which it is one, and the statistics."""
        found = jaxpr_as_fun(self._program)(*jax.tree.leaves((at, stream)))
        results = found[: len(self._is_saved)]
        output, _ = self._unflatten(results)
        statistics = jax.tree.unflatten(self._statistics_structure, found[len(results) :])
        return output, tuple(itertools.compress(results, self._is_saved)), statistics

    def output(self, saved: Sequence[jax.Array]) -> Stream:
        """Return the stage's output: the first of the arrays kept."""
        return jax.tree.unflatten(self._output_structure, saved[: self._outputs])

    def backward(
        self, at: Microbatch, stream: Stream, saved: Sequence[jax.Array]
    ) -> tuple[Stream, Derivative, None]:
        """Return the stage's output and its derivative; the value of `stream` is not read."""
        again = iter(jaxpr_as_fun(self._again)(*jax.tree.leaves((at, stream))))
        kept = iter(saved)
        results = list[jax.Array]()
        for is_saved in self._is_saved:
            source = kept if is_saved else again
            results.append(next(source))
        return *self._unflatten(results), None

    def _unflatten(self, results: Sequence[jax.Array]) -> tuple[Stream, Derivative]:
        output, derivative = jax.tree.unflatten(self._structure, results)
        return output, derivative


def _vjp(model: StageModel, at: Microbatch, stream: Stream) -> tuple[Stream, Derivative, Any]:
    """Run layers; return the output, the derivative, and the statistics.

    The derivative is a tree of the policy's saved arrays.
    """

    def run(layers: Any, shared: Any, stream: Stream) -> tuple[Stream, Any]:
        return model.run_layers(layers, shared, stream, at.number, at.chunk, at.statistics)

    return jax.vjp(run, at.layers, at.shared, stream, has_aux=True)


def _check_memory(kept: Iterable[Any]) -> None:
    """Raise a `ConfigError` if an array to keep is in host memory."""
    offloaded = sum(aval.memory_space == jax.memory.Space.Host for aval in kept)
    if offloaded:
        problem = Problem(
            "remat",
            "offloads activations, and a stage keeps its tasks' arrays on the device",
            f"{offloaded} arrays of a stage in host memory",
            'tabulate(schedule, recompute=True), pipeline.keep="inputs" of a config; or no offload',
        )
        raise ConfigError(NO_PIPELINE, [problem])
