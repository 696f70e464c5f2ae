"""A loss function cut where its layers begin and end, into the parts that a stage of a pipeline computes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.losses import LossFn, Sums
from spmd.layers.pipelined_layers import Answer, Reached, Run, Stream, answered
from spmd.pipeline.interleave import AXIS

TITLE = "This model cannot be cut into stages:"


IN_FLIGHT = "in_flight"
"""The name among the variables of what is under way between two steps, in a pipeline that never runs dry."""


def split_in_flight(variables: Any) -> tuple[Any, Any]:
    """The model's own variables, and what is under way; None for nothing."""
    return {name: value for name, value in variables.items() if name != IN_FLIGHT}, variables.get(IN_FLIGHT)


def read_slot(slots: Any, slot: Any) -> Any:
    """What is in a slot."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, keepdims=False), slots)


def select_chunk(parts: Any, which: Any) -> Any:
    """One of several parts; of one alone, that one."""
    alone = all(w.shape[0] == 1 for w in jax.tree.leaves(parts))
    return jax.tree.map(lambda w: w[0], parts) if alone else read_slot(parts, which)


@dataclasses.dataclass(frozen=True)
class Stages:
    """The parts of a loss function that a stage has, as functions of arrays.

    Attributes:
        loss_fn: The whole.
        parts: The microbatches, and a key for each.
        some_layers: Any chunk of layers, `[layer, …]`: what stands for them where they are not asked for.
        stages: How many there are.
        frozen: What the layers have that never changes, `[chunk, layer, …]`, and what all else has.
    """

    loss_fn: LossFn
    parts: Any
    some_layers: Any
    stages: int
    frozen: tuple[Any, Any]
    chunks: int = 1

    @property
    def size(self) -> int:
        """How many layers a chunk has."""
        return jax.tree.leaves(self.some_layers)[0].shape[0]

    def shapes(self, shared: Any) -> tuple[Stream, Sums]:
        """What the stream and the sums look like, for parameters `[version, …]`.

        Raises:
            ConfigError: What enters or leaves the layers depends on them by another way than through them; layers
                return what has no gradient.
        """
        own, first = jax.tree.map(lambda w: w[0], shared), jnp.int32(0)

        def outside(layers: Any, frozen: Any) -> tuple[Stream, Sums]:
            around = dataclasses.replace(self, some_layers=layers, frozen=(frozen, self.frozen[1]))
            stream = around.enter(own, first)
            # Zeros, for what enters is not what leaves: only what is not through the layers is looked at.
            return stream, around.leave(own, jax.tree.map(jnp.zeros_like, stream), first)[1]

        of_layers = self.some_layers, self.frozen[0]
        jaxpr, (stream, sums) = jax.make_jaxpr(outside, return_shape=True)(*of_layers)
        used = dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.out_avals))[1]
        problems = [
            Problem(
                path, "is used outside of through_layers, where a stage has a part of the layers alone", fix="inside"
            )
            for path, is_used in zip([path for part in of_layers for path in tree.flatten(part)], used, strict=True)
            if is_used
        ]
        problems += [
            Problem("layers", f"return {x.dtype}, which has no gradient", fix="floats, such as float32")
            for x in jax.tree.leaves(stream)
            if not jnp.issubdtype(x.dtype, jnp.inexact)
        ]
        if problems:
            raise ConfigError(TITLE, problems)
        return stream, sums

    def enter(self, shared: Any, i: jax.Array) -> Stream:
        """What enters the first layer."""

        def answer(run: Run, x: jax.Array, layers: Any) -> Any:
            values = jax.eval_shape(run, x, self._own(layers, 0))[1]
            count = self.stages * self.chunks * self.size
            raise Reached(Stream(x, jax.tree.map(lambda v: jnp.zeros((count, *v.shape[1:]), v.dtype), values)))

        return self._until(answer, self.some_layers, shared, i)

    def inside(self, layers: Any, shared: Any, stream: Stream, i: jax.Array, chunk: Any = 0) -> Stream:
        """What leaves the layers of one of this stage's chunks."""
        first = (chunk * self.stages + jax.lax.axis_index(AXIS)) * self.size

        def answer(run: Run, x: jax.Array, stack: Any) -> Any:
            x, values = run(stream.x, self._own(stack, first))
            put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
            raise Reached(Stream(x, jax.tree.map(put, stream.values, values)))

        return self._until(answer, layers, shared, i, chunk)

    def leave(self, shared: Any, stream: Stream, i: jax.Array) -> tuple[jax.Array, Sums]:
        """The loss and all sums."""
        calls = []

        def answer(run: Run, x: jax.Array, layers: Any) -> Any:
            calls.append(run)
            return stream.x, stream.values

        with answered(answer):
            sums = self._loss(self.some_layers, shared, i)
        if len(calls) > 1:
            problem = Problem("layers", f"are {len(calls)} stacks", fix="one call of through_layers")
            raise ConfigError(TITLE, [problem])
        return sums["loss"], sums

    def _until(self, answer: Answer, layers: Any, shared: Any, i: jax.Array, chunk: Any = 0) -> Stream:
        try:
            with answered(answer):
                self._loss(layers, shared, i, chunk)
        except Reached as reached:
            return reached.stream
        fix = "run stacked layers through spmd.layers.pipelined_layers.pipelined_layers"
        problem = Problem("layers", "are nowhere: the model does not say where they begin", fix=fix)
        raise ConfigError(TITLE, [problem])

    def _loss(self, layers: Any, shared: Any, i: jax.Array, chunk: Any = 0) -> Sums:
        batch, key = read_slot(self.parts, i)
        frozen, others = self.frozen
        return self.loss_fn(tree.merge(layers, shared), tree.merge(select_chunk(frozen, chunk), others), batch, key)[0]

    def _own(self, stack: Any, first: Any) -> Any:
        """Of what is there for all layers, the part that is for these."""

        def own(x: jax.Array) -> jax.Array:
            return x if x.shape[0] == self.size else jax.lax.dynamic_slice_in_dim(x, first, self.size)

        return jax.tree.map(own, stack)
