"""A stage's layers as the tasks of a schedule, and what is kept between them.

| | forward task | kept | backward task | kept | task of weight gradients |
|---|---|---|---|---|---|
| `RecomputedLayers` | layers | | layers, all gradients | | |
| `SavedLayers` | layers | what remat saves | all gradients | | |
| `DeferredLayers` | layers | what remat saves | gradient of the input | operands | gradients of weights |

None keeps parameters: `jax.vjp` saves those too, and what is computed from them alone, such as
kernels cast to the compute dtype. Traced programs of the tasks tell which arrays depend on the
stage's input; the others are computed again. Operands are of the products that make gradients of
weights: what the remat policy computed again, and gradients of activations.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from spmd.errors import ConfigError, Problem
from spmd.jaxpr.dependence import dependent_outputs
from spmd.jaxpr.split import SplitProgram
from spmd.pipeline.partition import TITLE, StageModel, Stream

Pull = Callable[[Stream], tuple[Stream, Any]]
"""Gradient of a stage's output → that of its input, and what `weight_gradients` takes."""


class Microbatch(NamedTuple):
    """The arguments of a task.

    Attributes:
        layers: A chunk of layers, `[layer, …]`.
        shared: All other parameters.
        number: The microbatch.
        chunk: The number of the chunk.
    """

    layers: Any
    shared: Any
    number: jax.Array
    chunk: jax.Array


class StageLayers(Protocol):
    """The tasks of a stage's layers."""

    @property
    def saved(self) -> Sequence[jax.ShapeDtypeStruct]:
        """The arrays that are kept from a forward task."""

    @property
    def deferred(self) -> Sequence[jax.ShapeDtypeStruct]:
        """The arrays that are kept from a backward task; none if it computes all gradients."""

    def forward(self, at: Microbatch, stream: Stream) -> tuple[Stream, Sequence[jax.Array]]:
        """Return the stage's output, and the arrays to keep."""

    def backward(
        self, at: Microbatch, stream: Stream, saved: Sequence[jax.Array]
    ) -> tuple[Stream, Pull]:
        """Return the stage's output again, and the derivative."""

    def weight_gradients(
        self, at: Microbatch, saved: Sequence[jax.Array], found: Any
    ) -> tuple[Any, Any]:
        """Return the gradients of the layers and of other parameters."""


class RecomputedLayers:
    """Layers whose backward task runs the forward pass again, from the stage's input."""

    saved = ()
    deferred = ()

    def __init__(self, model: StageModel) -> None:
        self.model = model

    def forward(self, at: Microbatch, stream: Stream) -> tuple[Stream, Sequence[jax.Array]]:
        """Return the stage's output; nothing is kept."""
        return self.model.run_layers(at.layers, at.shared, stream, at.number, at.chunk), ()

    def backward(
        self, at: Microbatch, stream: Stream, saved: Sequence[jax.Array]
    ) -> tuple[Stream, Pull]:
        """Return the stage's output and the derivative."""
        del saved
        output, derivative = _vjp(self.model, at, stream)
        return output, _of_all(derivative)

    def weight_gradients(
        self, at: Microbatch, saved: Sequence[jax.Array], found: Any
    ) -> tuple[Any, Any]:
        """Return the gradients, which the derivative found."""
        del at, saved
        return found


class SavedLayers:
    """Layers whose backward task starts from what the remat policy saved of the forward task.

    Args:
        example: Arguments of a task; only shapes count.
        stream: The stage's input; the same.

    Raises:
        ConfigError: The policy moves arrays to host memory, and slots are on the device.
    """

    deferred: Sequence[jax.ShapeDtypeStruct] = ()

    def __init__(self, model: StageModel, example: Microbatch, stream: Stream) -> None:
        def both_passes(at: Microbatch, stream: Stream) -> tuple[Stream, Any]:
            return _vjp(model, at, stream)

        program, shapes = jax.make_jaxpr(both_passes, return_shape=True)(example, stream)
        self._shapes = shapes
        self._program = _Kept(program, [*_flags(example, False), *_flags(stream, True)])
        _check_memory(self._program.kept_avals)
        results = jax.tree.leaves(shapes)
        self.saved = tuple(itertools.compress(results, self._program.is_kept))

    def forward(self, at: Microbatch, stream: Stream) -> tuple[Stream, Sequence[jax.Array]]:
        """Return the stage's output, and the arrays to keep; the output is one of them."""
        results = self._program.run(jax.tree.leaves((at, stream)))
        output, _ = self._unflatten(results)
        return output, self._program.kept_of(results)

    def backward(
        self, at: Microbatch, stream: Stream, saved: Sequence[jax.Array]
    ) -> tuple[Stream, Pull]:
        """Return the stage's output and the derivative; the value of `stream` is not read."""
        output, derivative = self._unflatten(self._results(at, stream, saved))
        return output, _of_all(derivative)

    def weight_gradients(
        self, at: Microbatch, saved: Sequence[jax.Array], found: Any
    ) -> tuple[Any, Any]:
        """Return the gradients, which the derivative found."""
        del at, saved
        return found

    def _results(
        self, at: Microbatch, stream: Stream, saved: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Return all leaves of the output and its derivative, from those that were kept."""
        return self._program.restore(jax.tree.leaves((at, stream)), saved)

    def _unflatten(self, results: Sequence[jax.Array]) -> tuple[Stream, Any]:
        output, derivative = jax.tree.unflatten(jax.tree.structure(self._shapes), results)
        return output, derivative


class DeferredLayers(SavedLayers):
    """Layers whose backward task finds the gradient of the input alone; weights have their own task.

    Arguments are those of `SavedLayers`.
    """

    def __init__(self, model: StageModel, example: Microbatch, stream: Stream) -> None:
        super().__init__(model, example, stream)
        results = jax.tree.leaves(self._shapes)
        output, _ = self._shapes
        self._stream = stream

        def derive(results: Sequence[jax.Array], d_output: Stream) -> tuple[Any, Any, Stream]:
            _, derivative = self._unflatten(results)
            gradients: tuple[Any, Any, Stream] = derivative(d_output)
            return gradients

        program, self._gradients = jax.make_jaxpr(derive, return_shape=True)(results, output)
        d_layers, d_shared, d_stream = self._gradients
        # Gradients of vectors, such as norm scales, take no product, and their operands are wide.
        is_vector = [d.ndim < 3 for d in _leaves(d_layers)]  # [layer, …]
        is_first = [*is_vector, *_flags(d_shared, False), *_flags(d_stream, True)]
        self._split = SplitProgram(program, is_first)

        def first(*inputs: jax.Array) -> Any:
            return self._split.run_first(inputs)

        first_program, shapes = jax.make_jaxpr(first, return_shape=True)(*results, *_leaves(output))
        self._first_shapes = shapes
        varying = [*self._program.is_kept, *_flags(output, True)]
        outputs, kept = shapes
        of_stream = len(_leaves(d_stream))
        of_vectors = len(_leaves(outputs)) - of_stream
        is_read = [True] * of_vectors + [False] * of_stream + _flags(kept, True)
        self._first = _Kept(first_program, varying, is_read)
        self.deferred = tuple(itertools.compress(_leaves(shapes), self._first.is_kept))

    def backward(
        self, at: Microbatch, stream: Stream, saved: Sequence[jax.Array]
    ) -> tuple[Stream, Pull]:
        """Return the stage's output and the derivative, which finds operands of weight gradients."""
        results = self._results(at, stream, saved)
        output, _ = self._unflatten(results)

        def pull(d_output: Stream) -> tuple[Stream, Any]:
            found = self._first.run([*results, *_leaves(d_output)])
            gradients, _ = self._unflatten_first(found)
            *_, d_stream = self._unflatten_gradients(gradients)
            return d_stream, self._first.kept_of(found)

        return output, pull

    def weight_gradients(
        self, at: Microbatch, saved: Sequence[jax.Array], found: Any
    ) -> tuple[Any, Any]:
        """Return the gradients of the layers and of other parameters, from what was kept."""
        output, _ = self._shapes
        unread = _leaves(_zeros(output))
        inputs = [*self._results(at, _zeros(self._stream), saved), *unread]
        vectors, kept = self._unflatten_first(self._first.restore(inputs, found))
        matrices = self._split.run_second(inputs, kept)
        gradients = []
        for vector, matrix in zip(vectors, matrices, strict=True):
            gradients.append(vector if matrix is None else matrix)
        d_layers, d_shared, _ = self._unflatten_gradients(gradients)
        return d_layers, d_shared

    def _unflatten_first(self, results: Sequence[jax.Array]) -> tuple[list[Any], Any]:
        """Return the gradients that the first part finds, and what the second part reads."""
        outputs, kept = jax.tree.unflatten(jax.tree.structure(self._first_shapes), results)
        return outputs, kept

    def _unflatten_gradients(self, gradients: Sequence[Any]) -> tuple[Any, Any, Stream]:
        d_layers, d_shared, d_stream = jax.tree.unflatten(
            jax.tree.structure(self._gradients), gradients
        )
        return d_layers, d_shared, d_stream


class _Kept:
    """A program some of whose results are kept, and the part of it that computes the others again.

    Args:
        varying: A flag for each input; results that depend on such inputs are kept.
        is_read: A flag for each result: it is needed again; by default all are.
    """

    def __init__(
        self, program: ClosedJaxpr, varying: Sequence[bool], is_read: Sequence[bool] = ()
    ) -> None:
        depends = dependent_outputs(program, varying)
        self._is_read = is_read or [True] * len(depends)
        pairs = list(zip(depends, self._is_read, strict=True))
        self.is_kept = [varies and read for varies, read in pairs]
        self._program = program
        part, _ = dce_jaxpr(
            program.jaxpr, [read and not varies for varies, read in pairs], instantiate=True
        )
        self._again = ClosedJaxpr(part, program.consts)

    @property
    def kept_avals(self) -> list[Any]:
        """The kept results, abstract."""
        return list(itertools.compress(self._program.out_avals, self.is_kept))

    def run(self, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        """Return all results."""
        return list(jaxpr_as_fun(self._program)(*inputs))

    def kept_of(self, results: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Return the results to keep."""
        return tuple(itertools.compress(results, self.is_kept))

    def restore(self, inputs: Sequence[jax.Array], kept: Sequence[jax.Array]) -> list[Any]:
        """Return all results from the kept ones; None for those that are not needed.

        Args:
            inputs: Of varying ones, the values are not read.
        """
        again = iter(jaxpr_as_fun(self._again)(*inputs))
        remaining = iter(kept)
        results = list[Any]()
        for is_kept, is_read in zip(self.is_kept, self._is_read, strict=True):
            if not is_read:
                results.append(None)
            elif is_kept:
                results.append(next(remaining))
            else:
                results.append(next(again))
        return results


def _vjp(model: StageModel, at: Microbatch, stream: Stream) -> tuple[Stream, Any]:
    """Run layers; return the output and the derivative, whose leaves are what the policy saves."""

    def run(layers: Any, shared: Any, stream: Stream) -> Stream:
        return model.run_layers(layers, shared, stream, at.number, at.chunk)

    return jax.vjp(run, at.layers, at.shared, stream)


def _of_all(derivative: Callable[[Stream], tuple[Any, Any, Stream]]) -> Pull:
    """Return a derivative with the gradients of parameters as what was found."""

    def pull(d_output: Stream) -> tuple[Stream, Any]:
        d_layers, d_shared, d_stream = derivative(d_output)
        return d_stream, (d_layers, d_shared)

    return pull


def _check_memory(kept: Iterable[Any]) -> None:
    """Raise a `ConfigError` if an array to keep is in host memory."""
    offloaded = sum(aval.memory_space == jax.memory.Space.Host for aval in kept)
    if offloaded:
        problem = Problem(
            "remat",
            "offloads activations, and a stage keeps its tasks' arrays on the device",
            f"{offloaded} arrays of a stage in host memory",
            "tabulate(schedule, recompute=True), pipeline.recompute of a config; or no offload",
        )
        raise ConfigError(TITLE, [problem])


def _leaves(arrays: Any) -> list[Any]:
    return jax.tree.leaves(arrays)


def _flags(arrays: Any, flag: bool) -> list[bool]:
    """Return a flag for each leaf."""
    return [flag] * len(_leaves(arrays))


def _zeros(like: Any) -> Any:
    return jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), like)
