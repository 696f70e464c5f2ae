"""A model's loss in the parts that a stage of a pipeline computes, and what belongs to which stage.

```
enter    embed_inputs                       the stream that enters the first layer
inside   apply_layers, some of the layers   the stream after this stage's layers
leave    compute_outputs, then the loss     sums over the microbatch
```
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import get_abstract_mesh

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.accumulate import join_microbatch, split_microbatches
from spmd.gradients.losses import LossFn, ModelLoss, Sums
from spmd.layers.lm_head import lazy_logits
from spmd.model_api.model import LayeredModel, as_outputs
from spmd.pipeline.interleave import AXIS
from spmd.pipeline.shared_params import gather_over_stages
from spmd.plan.context import current
from spmd.plan.partition_safe import partition_safe

TITLE = "This model cannot be pipelined:"


def read_slot(slots: Any, slot: Any) -> Any:
    """Return the contents of a slot."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, keepdims=False), slots)


def select_chunk(chunks: Any, which: Any) -> Any:
    """Return one of several chunks; without indexing where there is only one."""
    is_single = all(w.shape[0] == 1 for w in jax.tree.leaves(chunks))
    return jax.tree.map(lambda w: w[0], chunks) if is_single else read_slot(chunks, which)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """The arrays that stages pass on: the residual stream, and the values of all layers (zeros for later layers)."""

    x: Any
    values: Any


def in_parts(loss_fn: LossFn) -> tuple[ModelLoss, LayeredModel]:
    """Return a loss and its model in parts, or raise a `ConfigError`."""
    if not isinstance(loss_fn, ModelLoss):
        fix = "spmd.gradients.losses.ModelLoss(model, inputs, sums), or spmd.next_token_loss(model)"
        raise ConfigError(TITLE, [Problem("loss", "is a function, and a pipeline needs its parts", fix=fix)])
    layered = loss_fn.model.layered()
    if layered is None:
        fix = "give the module the methods embed_inputs, apply_layers and compute_outputs"
        raise ConfigError(TITLE, [Problem("layers", "are nowhere: the model is in one part", fix=fix)])
    return loss_fn, layered


@dataclasses.dataclass(frozen=True)
class StageModel:
    """The parts of a loss function that a stage computes, as functions of arrays.

    Attributes:
        microbatches: The microbatches, and a key for each.
        some_layers: Any chunk of layers, `[layer, …]`: a placeholder where layers are not used.
        frozen: The frozen variables of the layers, `[chunk, layer, …]`, and all others.
        chunks: Chunks of layers of each stage.
    """

    loss_fn: LossFn
    microbatches: Any
    some_layers: Any
    stages: int
    frozen: tuple[Any, Any]
    chunks: int = 1

    @property
    def size(self) -> int:
        """Layers of a chunk."""
        return jax.tree.leaves(self.some_layers)[0].shape[0]

    def shapes(self, shared: Any) -> tuple[Stream, Sums]:
        """Return the abstract stream and sums for parameters `[version, …]`; check that only stages use the layers."""
        own, first = jax.tree.map(lambda w: w[0], shared), jnp.int32(0)

        def outside(layers: Any, frozen: Any) -> tuple[Stream, Sums]:
            around = dataclasses.replace(self, some_layers=layers, frozen=(frozen, self.frozen[1]))
            stream = around.enter(own, first)
            # The stream after the layers is replaced by zeros: only uses of layers outside of apply_layers remain.
            return stream, around.leave(own, jax.tree.map(jnp.zeros_like, stream), first)[1]

        of_layers = self.some_layers, self.frozen[0]
        jaxpr, (stream, sums) = jax.make_jaxpr(outside, return_shape=True)(*of_layers)
        used = dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.out_avals))[1]
        problems = [
            Problem(path, "is used outside of apply_layers, where a stage has only some of the layers", fix="inside")
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
        """Return the stream that enters the first layer."""
        loss, layered = in_parts(self.loss_fn)

        def embed(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
            inputs, keywords = loss.arguments(batch)
            return layered.embed_inputs(params, variables, key, *inputs, train=loss.train, **keywords)

        arrays = self._arrays(self.some_layers, shared, 0)
        x, context = partition_safe(embed)(*arrays, *read_slot(self.microbatches, i))
        apply = functools.partial(layered.apply_layers, train=loss.train)
        _, values = jax.eval_shape(apply, *arrays, x, context)
        count = self.stages * self.chunks * self.size
        return Stream(x, jax.tree.map(lambda v: jnp.zeros((count, *v.shape[1:]), v.dtype), values))

    def inside(self, layers: Any, shared: Any, stream: Stream, i: jax.Array, chunk: Any = 0) -> Stream:
        """Return the stream after the layers of one of this stage's chunks."""
        loss, layered = in_parts(self.loss_fn)

        def apply(params: Any, variables: Any, batch: Any, key: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
            inputs, keywords = loss.arguments(batch)
            _, context = layered.embed_inputs(params, variables, key, *inputs, train=loss.train, **keywords)
            return layered.apply_layers(params, variables, x, context, train=loss.train)

        arrays = self._arrays(layers, shared, chunk)
        x, values = partition_safe(apply)(*arrays, *read_slot(self.microbatches, i), stream.x)
        first = (chunk * self.stages + jax.lax.axis_index(AXIS)) * self.size
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
        return Stream(x, jax.tree.map(put, stream.values, values))

    def leave(self, shared: Any, stream: Stream, i: jax.Array) -> tuple[jax.Array, Sums]:
        """Return the loss and all sums."""
        loss, layered = in_parts(self.loss_fn)

        def finish(params: Any, variables: Any, batch: Any, stream: Stream) -> Sums:
            with lazy_logits():
                outputs = layered.compute_outputs(params, variables, stream.x, stream.values, train=loss.train)
                return loss.sums(as_outputs(outputs), batch)

        arrays = self._arrays(self.some_layers, shared, 0)
        sums = partition_safe(finish)(*arrays, read_slot(self.microbatches, i)[0], stream)
        return sums["loss"], sums

    def _arrays(self, layers: Any, shared: Any, chunk: Any) -> tuple[Any, Any]:
        """Return the parameters and the variables of a model with one chunk of layers."""
        frozen, others = self.frozen
        return tree.merge(layers, shared), tree.merge(select_chunk(frozen, chunk), others)


def partition(
    loss_fn: LossFn,
    params: Any,
    variables: Any,
    batch: Any,
    key: jax.Array,
    stages: int,
    chunks: int,
    microbatches: int,
) -> tuple[Any, Any, Any]:
    """Split arrays into layers, all others (both pairs: parameters, frozen variables), and microbatches with keys.

    Raises:
        ConfigError: All reasons why the model cannot be split into these stages.
    """
    context = current()
    assert context.mesh is not None, "a step is traced within its plan"
    placements = context.placements

    def is_layer(path: str) -> bool:
        return path in placements and placements[path].leading[:1] == (AXIS,)

    def divided(arrays: Any) -> tuple[Any, Any]:
        return tree.select(arrays, is_layer), tree.select(arrays, lambda path: not is_layer(path))

    (layers, shared), (frozen_layers, frozen_others) = map(divided, (params, variables))
    problems = []
    if (size := context.mesh.shape[AXIS]) != stages:
        problems.append(Problem("schedule", f"is for {stages} stages", f"mesh.pipe = {size}", "make it for the mesh"))
    if context.attention.is_ring:
        what = "is a ring, which would send keys and values inside a stage's task, where XLA:CPU waits for all stages"
        problems.append(Problem("context", what, fix="--context all-to-all"))
    parts = stages if AXIS in get_abstract_mesh().manual_axes else 1  # there, the layers are those of one stage
    counts = sorted({parts * leaf.shape[0] for leaf in jax.tree.leaves(layers)})
    if not counts:
        fix = 'stack the layers, and name the stack in the rule table: stacked={"layers": "pipe"}'
        problems.append(Problem("mesh.pipe", "splits no parameter", f"pipe={stages}", fix))
    if len(counts) > 1:
        problems.append(Problem("layers", f"are stacks of {' and '.join(map(str, counts))} layers", fix="one stack"))
    for count in counts:
        if count % (stages * chunks):
            product = f"pipe={stages}" + (f" × {chunks} chunks" if chunks > 1 else "")
            detail = f"{count} / ({product}) = {count / (stages * chunks):.4g}"
            problems.append(Problem("layers", "do not divide into stages", detail, f"a multiple of {stages * chunks}"))
    problems += [
        Problem(path, "is a stack inside another, and stages divide the first dimension", fix="one stack")
        for path in tree.flatten(shared)
        if path in placements and AXIS in placements[path].leading
    ]
    problems += [
        Problem(path, "is a variable that the model changes by itself, and every stage would", fix="pipe=1")
        for path in tree.flatten(variables)
        if path not in placements
    ]
    if problems:
        raise ConfigError(TITLE, problems)
    batch = in_parts(loss_fn)[0].prepare(batch)
    split, shared_arrays = split_microbatches(batch, microbatches)
    repeated = {path: jnp.broadcast_to(x[None], (microbatches, *x.shape)) for path, x in shared_arrays.items()}
    microbatched = join_microbatch(batch, split, repeated), jax.random.split(key, microbatches)
    return (layers, frozen_layers), (gather_over_stages(shared), gather_over_stages(frozen_others)), microbatched
