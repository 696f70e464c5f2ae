"""Partition of a model's loss and its arrays into the stages of a pipeline.

```
embed        embed_inputs                       the input of the first layer
run_layers   apply_layers, some of the layers   the stream after this stage's layers
head         compute_outputs, then the loss     sums over the microbatch
```
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import get_abstract_mesh

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.accumulate import join_microbatch, split_microbatches
from spmd.gradients.losses import LossFn, ModelLoss, Sums
from spmd.jaxpr.dependence import needed_inputs
from spmd.layers.lm_head import lazy_logits
from spmd.model_interface.model import LayeredModel, Model, as_outputs
from spmd.pipeline.branches import cond
from spmd.pipeline.interleave import AXIS
from spmd.pipeline.layer_split import LayerSplit
from spmd.pipeline.shared_params import gather_over_stages
from spmd.plan.context import current
from spmd.plan.partition_safe import partition_safe
from spmd.sharding.layer_paths import is_staged, own_stacks

TITLE = "This model cannot be pipelined:"


def read_slot(slots: Any, slot: Any) -> Any:
    """Return the contents of a slot."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, keepdims=False), slots)


def read_microbatch(microbatches: tuple[Any, jax.Array], i: Any) -> tuple[Any, jax.Array]:
    """Return a microbatch and its key.

    Args:
        microbatches: Arrays `[microbatch, …]` and keys. An array without examples is `[batch, …]`,
            one for all microbatches of each batch.
    """
    _, keys = microbatches
    total = keys.shape[0]

    def read(x: jax.Array) -> jax.Array:
        count = x.shape[0]
        if count == 1:
            return x[0]
        return jax.lax.dynamic_index_in_dim(x, i * count // total, keepdims=False)

    return jax.tree.map(read, microbatches)


def select_chunk(chunks: Any, which: Any) -> Any:
    """Return one of several chunks; without indexing where there is only one."""
    is_single = all(w.shape[0] == 1 for w in jax.tree.leaves(chunks))
    if is_single:
        return jax.tree.map(lambda w: w[0], chunks)
    return read_slot(chunks, which)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """The arrays sent between stages: the residual stream, and the values of all layers.

    Values of layers not run yet are zeros.
    """

    x: Any
    values: Any


def in_parts(loss_fn: LossFn) -> tuple[ModelLoss, LayeredModel]:
    """Return a loss and its model in parts, or raise a `ConfigError`."""
    if not isinstance(loss_fn, ModelLoss):
        problem = Problem(
            "loss",
            "is a function, and a pipeline needs its parts",
            fix="spmd.gradients.losses.ModelLoss(model, inputs, sums), or "
            "spmd.next_token_loss(model)",
        )
        raise ConfigError(TITLE, [problem])
    layered = loss_fn.model.layered()
    if layered is None:
        problem = Problem(
            "layers",
            "are nowhere: the model is in one part",
            fix="give the module the methods embed_inputs, apply_layers and compute_outputs",
        )
        raise ConfigError(TITLE, [problem])
    return loss_fn, layered


@dataclasses.dataclass(frozen=True)
class StageModel:
    """The parts of a loss function computed by a stage, as functions of arrays.

    Attributes:
        microbatches: The microbatches, and a key for each.
        some_layers: Any chunk of layers, `[layer, …]`: a placeholder where layers are not used.
        split: The layers of each stage.
        frozen: The variables of the layers, `[chunk, layer, …]`, and all others; the forward pass
            changes none.
    """

    loss_fn: LossFn
    microbatches: Any
    some_layers: Any
    split: LayerSplit
    frozen: tuple[Any, Any]

    def shapes(self, shared: Any) -> tuple[Stream, Sums]:
        """Return the abstract stream and sums for parameters `[version, …]`.

        Raises:
            ConfigError: Layers are used outside of stages, or the stream has no gradient.
        """
        own = jax.tree.map(lambda w: w[0], shared)
        first = jnp.int32(0)

        def outside(layers: Any, frozen: Any) -> tuple[Stream, Sums]:
            around = dataclasses.replace(self, some_layers=layers, frozen=(frozen, self.frozen[1]))
            stream = around.embed(own, first)
            # The stream after the layers is replaced by zeros: only uses of layers outside of
            # apply_layers remain.
            left = jax.tree.map(jnp.zeros_like, stream)
            _, sums = around.head(own, left, first)
            return stream, sums

        of_layers = self.some_layers, self.frozen[0]
        jaxpr, (stream, sums) = jax.make_jaxpr(outside, return_shape=True)(*of_layers)
        paths = [*tree.flatten(of_layers[0]), *tree.flatten(of_layers[1])]
        used = itertools.compress(paths, needed_inputs(jaxpr))
        problems = [*_use_problems(used), *_stream_problems(stream)]
        if problems:
            raise ConfigError(TITLE, problems)
        return stream, sums

    def embed(self, shared: Any, i: jax.Array) -> Stream:
        """Return the input of the first layer."""
        loss, layered = in_parts(self.loss_fn)

        def embed(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
            inputs, keywords = loss.arguments(batch)
            return layered.embed_inputs(
                params, variables, key, *inputs, train=loss.train, **keywords
            )

        arrays = self._some_arrays(shared)
        batch, key = read_microbatch(self.microbatches, i)
        x, context = partition_safe(embed)(*arrays, batch, key)
        apply = functools.partial(layered.apply_layers, train=loss.train)
        _, values = jax.eval_shape(apply, *arrays, x, context)

        def of_all_layers(v: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros((self.split.layers, *v.shape[1:]), v.dtype)

        all_values = jax.tree.map(of_all_layers, values)
        return Stream(x, all_values)

    def run_layers(
        self, layers: Any, shared: Any, stream: Stream, i: jax.Array, chunk: Any = 0
    ) -> Stream:
        """Return the stream after the layers of one of this stage's chunks."""
        split = self.split
        number = chunk * split.stages + jax.lax.axis_index(AXIS)
        first = jnp.asarray(split.firsts)[number]
        frozen, _ = self.frozen
        parts = split.in_parts((layers, select_chunk(frozen, chunk)))
        stream = self._run_rows(parts[0], shared, stream, i, first)
        for row, rows in enumerate(parts[1:], split.least):

            def more_layers(stream: Stream, rows: Any = rows, row: int = row) -> Stream:
                return self._run_rows(rows, shared, stream, i, first + row)

            has_row = jnp.asarray(split.counts)[number] > row
            stream = cond(has_row, more_layers, lambda stream: stream, stream)
        return stream

    def _run_rows(
        self, rows: tuple[Any, Any], shared: Any, stream: Stream, i: jax.Array, first: jax.Array
    ) -> Stream:
        """Return the stream after some layers, of parameters and variables `[layer, …]`.

        Args:
            first: The number of the first of these layers in the model.
        """
        loss, layered = in_parts(self.loss_fn)

        def apply(
            params: Any, variables: Any, batch: Any, key: jax.Array, x: jax.Array
        ) -> tuple[jax.Array, Any]:
            inputs, keywords = loss.arguments(batch)
            _, context = layered.embed_inputs(
                params, variables, key, *inputs, train=loss.train, **keywords
            )
            return layered.apply_layers(params, variables, x, context, train=loss.train)

        arrays = self._arrays(rows, shared)
        batch, key = read_microbatch(self.microbatches, i)
        x, values = partition_safe(apply)(*arrays, batch, key, stream.x)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
        return Stream(x, jax.tree.map(put, stream.values, values))

    def head(self, shared: Any, stream: Stream, i: jax.Array) -> tuple[jax.Array, Sums]:
        """Return the loss and all sums."""
        loss, layered = in_parts(self.loss_fn)

        def finish(params: Any, variables: Any, batch: Any, key: jax.Array, stream: Stream) -> Sums:
            values = [stream.values]
            if layered.outputs_take_context:
                inputs, keywords = loss.arguments(batch)
                _, context = layered.embed_inputs(
                    params, variables, key, *inputs, train=loss.train, **keywords
                )
                values.append(context)
            with lazy_logits():
                outputs = layered.compute_outputs(
                    params, variables, stream.x, *values, train=loss.train
                )
                return loss.sums(as_outputs(outputs), batch)

        arrays = self._some_arrays(shared)
        batch, key = read_microbatch(self.microbatches, i)
        sums = partition_safe(finish)(*arrays, batch, key, stream)
        return sums["loss"], sums

    def _some_arrays(self, shared: Any) -> tuple[Any, Any]:
        """Return the parameters and the variables of a model with any chunk of layers."""
        frozen, _ = self.frozen
        return self._arrays((self.some_layers, select_chunk(frozen, 0)), shared)

    def _arrays(self, layers: tuple[Any, Any], shared: Any) -> tuple[Any, Any]:
        """Return the parameters and the variables of a model with these layers."""
        own_params, own_variables = layers
        _, others = self.frozen
        return tree.merge(own_params, shared), tree.merge(own_variables, others)


def _use_problems(used: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem for each parameter or variable of layers used outside of `apply_layers`."""
    for path in used:
        what = "is used outside of apply_layers, where a stage has only some of the layers"
        yield Problem(path, what, fix="inside")


def _stream_problems(stream: Stream) -> Iterator[Problem]:
    """Yield a problem for each array between stages without a gradient."""
    for x in jax.tree.leaves(stream):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            what = f"return {x.dtype}, which has no gradient"
            yield Problem("layers", what, fix="floats, such as float32")


def partition(
    loss_fn: LossFn,
    params: Any,
    variables: Any,
    batch: Any,
    key: jax.Array,
    stages: int,
    chunks: int,
    microbatches: int,
) -> tuple[LayerSplit, tuple[Any, Any, Any]]:
    """Split arrays into layers on their stages, all others, and microbatches with keys.

    The first two are pairs: parameters, and variables that the forward pass does not change.

    Raises:
        ConfigError: All reasons why the model cannot be split into these stages.
    """
    loss, _ = in_parts(loss_fn)
    layers, shared = _split_layers(params)
    frozen_layers, frozen_others = _split_layers(variables)
    problems = [
        *_setting_problems(stages),
        *_stack_problems(layers, stages, chunks),
        *_path_problems(shared, variables, loss.model),
    ]
    if problems:
        raise ConfigError(TITLE, problems)
    (count,) = _counts_of_layers(layers, stages)
    split = LayerSplit.of(count, stages, chunks)
    of_stages = layers, frozen_layers
    if not split.is_even:
        of_stages = split.to_stages(layers), split.to_stages(frozen_layers)
    batches = _stack_microbatches(loss.prepare(batch), microbatches)
    keys = jax.random.split(key, microbatches)
    others = gather_over_stages(shared), gather_over_stages(frozen_others)
    return split, (of_stages, others, (batches, keys))


def _split_layers(arrays: Any) -> tuple[Any, Any]:
    """Split parameters or variables into those of layers, and all others."""
    context = current()

    def is_layer(path: str) -> bool:
        if path in context.placements:
            return context.placements[path].is_staged
        return is_staged(own_stacks(path, context.stacks))

    layers = tree.select(arrays, is_layer)
    others = tree.select(arrays, lambda path: not is_layer(path))
    return layers, others


def _setting_problems(stages: int) -> Iterator[Problem]:
    """Yield the problems of the plan's mesh and attention."""
    context = current()
    assert context.mesh is not None, "a step is traced within its plan"
    size = context.mesh.shape[AXIS]
    if size != stages:
        detail = f"mesh.pipe = {size}"
        yield Problem("schedule", f"is for {stages} stages", detail, "make it for the mesh")
    if context.attention.is_ring:
        yield Problem(
            "context",
            "is a ring, which would send keys and values inside a stage's task, where XLA:CPU "
            "waits for all stages",
            fix='context="all-to-all", or "gather" on TPUs',
        )


def _stack_problems(layers: Any, stages: int, chunks: int) -> Iterator[Problem]:
    """Yield the problems of the number of layers."""
    counts = _counts_of_layers(layers, stages)
    if not counts:
        fix = 'stack the layers, and name the stack in the rule table: stacked={"layers": "pipe"}'
        yield Problem("mesh.pipe", "splits no parameter", f"pipe={stages}", fix)
    if len(counts) > 1:
        listed = " and ".join(map(str, counts))
        yield Problem("layers", f"are stacks of {listed} layers", fix="one stack")
    product = f"pipe={stages}"
    if chunks > 1:
        product += f" × {chunks} chunks"
    virtual_stages = stages * chunks
    for count in counts:
        detail = f"{count} / ({product}) = {count / virtual_stages:.4g}"
        fix = f"a multiple of {virtual_stages}"
        if count < virtual_stages:
            yield Problem("layers", "are fewer than stages", detail, fix)
        elif count % virtual_stages and count % stages == 0:
            what = "divide into stages, and not into their chunks"
            yield Problem("layers", what, detail, f"{fix}, or other chunks")


def _counts_of_layers(layers: Any, stages: int) -> list[int]:
    """Return the numbers of layers of all stacks, each once.

    In a region manual over `pipe`, a device has those of its stage alone, where they divide.
    """
    is_manual = AXIS in get_abstract_mesh().manual_axes
    counts = set[int]()
    for path, leaf in tree.flatten(layers).items():
        count = leaf.shape[0]
        if is_manual and own_stacks(path, current().stacks)[0].is_even:
            count *= stages
        counts.add(count)
    return sorted(counts)


def _path_problems(shared: Any, variables: Any, model: Model) -> Iterator[Problem]:
    """Yield the problems of parameters outside of the layers, and of variables."""
    placements = current().placements
    for path in tree.flatten(shared):
        if path in placements and AXIS in placements[path].leading:
            what = "is a stack inside another, and stages divide the first dimension"
            yield Problem(path, what, fix="one stack")
    constant = model.info().step_variables
    for path in tree.flatten(variables):
        if path not in placements and path not in constant:
            what = "is a variable that the model changes by itself, and every stage would"
            yield Problem(path, what, fix="pipe=1")


def _stack_microbatches(batch: Any, microbatches: int) -> Any:
    """Return a batch as arrays `[microbatch, …]`; those without examples are `[1, …]`."""
    split, shared = split_microbatches(batch, microbatches)
    of_batch = {path: x[None] for path, x in shared.items()}
    return join_microbatch(batch, split, of_batch)
