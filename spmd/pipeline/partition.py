"""Partition of a model's loss and its arrays into the stages of a pipeline.

```
embed        embed_inputs                       the input of the first layer
run_layers   apply_layers, some of the layers   the stream after this stage's layers, statistics
head         compute_outputs, then the loss     sums over the microbatch
```
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import get_abstract_mesh

from spmd import tree
from spmd.errors import ConfigError, Problem, describe_value
from spmd.gradients.accumulate import join_microbatch, split_microbatches
from spmd.gradients.losses import LossFn, ModelLoss, Sums
from spmd.jaxpr.dependence import needed_inputs
from spmd.jaxpr.forwarding import forwarded_inputs
from spmd.layers.lm_head import LazyLogits, lazy_logits
from spmd.model_interface.model import NO_PIPELINE, LayeredModel, Outputs, as_outputs
from spmd.pipeline.branches import cond
from spmd.pipeline.interleave import AXIS
from spmd.pipeline.layer_split import LayerSplit
from spmd.pipeline.shared_params import gather_over_stages
from spmd.pipeline.slots import select_chunk
from spmd.pipeline.variables import MicrobatchVariables, variables_by_microbatch
from spmd.plan.context import current
from spmd.plan.partition_safe import partition_safe
from spmd.sharding.layer_paths import is_staged, own_stacks


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
        raise ConfigError(NO_PIPELINE, [problem])
    layered = loss_fn.model.layered()
    if layered is None:
        problem = Problem(
            "layers",
            "are nowhere: the model is in one part",
            fix="give the module the methods embed_inputs, apply_layers and compute_outputs, and "
            'spmd.from_linen also layers="…", its field with their number',
        )
        raise ConfigError(NO_PIPELINE, [problem])
    return loss_fn, layered


@dataclasses.dataclass(frozen=True)
class StageModel:
    """The parts of a loss function computed by a stage, as functions of arrays.

    Attributes:
        microbatches: The microbatches, and a key for each.
        some_layers: Any chunk of layers, `[layer, …]`: a placeholder where layers are not used.
        split: The layers of each stage.
        variables: Those of the layers, `[chunk, layer, …]`, and all others.
    """

    loss_fn: LossFn
    microbatches: Any
    some_layers: Any
    split: LayerSplit
    variables: tuple[MicrobatchVariables, MicrobatchVariables]

    def shapes(self, shared: Any) -> tuple[Stream, Sums]:
        """Return the abstract stream and sums for parameters `[version, …]`.

        Raises:
            ConfigError: Layers are used outside of stages, or change variables of all stages; or
                the stream has no gradient.
        """
        own = jax.tree.map(lambda w: w[0], shared)
        first = jnp.int32(0)
        of_layers, others = self.variables

        def outside(layers: Any, variables: MicrobatchVariables) -> tuple[Stream, Sums]:
            around = dataclasses.replace(self, some_layers=layers, variables=(variables, others))
            stream = around.embed(own, first)
            # The stream after the layers is replaced by zeros: only uses of layers outside of
            # apply_layers remain.
            left = jax.tree.map(jnp.zeros_like, stream)
            _, sums = around.head(own, left, first)
            return stream, sums

        trace = jax.make_jaxpr(outside, return_shape=True)
        jaxpr, (stream, sums) = trace(self.some_layers, of_layers)
        paths = list[str]()
        every = self.some_layers, of_layers.fixed, of_layers.changing, of_layers.statistics
        for arrays in every:
            paths += tree.flatten(arrays)
        used = itertools.compress(paths, needed_inputs(jaxpr))
        problems = [
            *_use_problems(used),
            *_stream_problems(stream),
            *_change_problems(self._changed_by_layers(own, first)),
        ]
        if problems:
            raise ConfigError(NO_PIPELINE, problems)
        return stream, sums

    def _changed_by_layers(self, shared: Any, i: jax.Array) -> list[str]:
        """Return the paths of the variables of all stages changed by the layers."""
        _, others = self.variables
        if not others.changing:
            return []
        params, all_variables = self._some_arrays(shared, i)
        variables_of_all = others.at(i)
        paths = list(tree.flatten(variables_of_all))

        def after_layers(variables_of_all: Any) -> list[Any]:
            variables = tree.merge(all_variables, variables_of_all)
            # Those after the embedding are not passed on: its changes do not count.
            (x, context), _ = self._embed_inputs(params, variables, *self._read(i))
            _, after = self._apply_layers(params, variables, x, context)
            found = tree.flatten(after)
            return [found[path] for path in paths]

        sources = forwarded_inputs(jax.make_jaxpr(after_layers)(variables_of_all))
        is_changed = map(operator.ne, sources, range(len(paths)))
        return list(itertools.compress(paths, is_changed))

    def embed(self, shared: Any, i: jax.Array) -> Stream:
        """Return the input of the first layer."""
        arrays = self._some_arrays(shared, i)
        (x, context), _ = partition_safe(self._embed_inputs)(*arrays, *self._read(i))
        (_, values), _ = jax.eval_shape(self._apply_layers, *arrays, x, context)

        def of_all_layers(v: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros((self.split.layers, *v.shape[1:]), v.dtype)

        all_values = jax.tree.map(of_all_layers, values)
        return Stream(x, all_values)

    @property
    def statistics(self) -> Any:
        """Statistics of the layers before the first microbatch, `[chunk, layer, …]`."""
        of_layers, _ = self.variables
        return of_layers.statistics

    def run_layers(
        self,
        layers: Any,
        shared: Any,
        stream: Stream,
        i: jax.Array,
        chunk: Any,
        statistics: Any,
    ) -> tuple[Stream, Any]:
        """Return the stream and the statistics after the layers of one of this stage's chunks.

        Args:
            statistics: Those of the chunk before the microbatch, `[layer, …]`.
        """
        split = self.split
        number = chunk * split.stages + jax.lax.axis_index(AXIS)
        first = jnp.asarray(split.firsts)[number]
        of_layers, _ = self.variables
        variables = select_chunk(of_layers, chunk).with_statistics(statistics)
        parts = split.in_parts((layers, variables.at(i)))
        stream, after = self._run_rows(parts[0], shared, stream, i, first)
        all_after = [after]
        for row, rows in enumerate(parts[1:], split.least):

            def more_layers(
                stream: Stream, before: Any, rows: Any = rows, row: int = row
            ) -> tuple[Stream, Any]:
                del before
                return self._run_rows(rows, shared, stream, i, first + row)

            def no_layers(stream: Stream, before: Any) -> tuple[Stream, Any]:
                return stream, before

            has_row = jnp.asarray(split.counts)[number] > row
            before = of_layers.statistics_of(rows[1])
            stream, after = cond(has_row, more_layers, no_layers, stream, before)
            all_after.append(after)
        return stream, jax.tree.map(lambda *rows: jnp.concatenate(rows), *all_after)

    def _run_rows(
        self, rows: tuple[Any, Any], shared: Any, stream: Stream, i: jax.Array, first: jax.Array
    ) -> tuple[Stream, Any]:
        """Return stream and statistics after some layers, of parameters and variables `[layer, …]`.

        Args:
            first: The number of the first of these layers in the model.
        """
        of_layers, _ = self.variables

        def apply(
            params: Any, variables: Any, batch: Any, key: jax.Array, x: jax.Array
        ) -> tuple[jax.Array, Any, Any]:
            (_, context), variables = self._embed_inputs(params, variables, batch, key)
            (x, values), variables = self._apply_layers(params, variables, x, context)
            return x, values, of_layers.statistics_of(variables)

        arrays = self._arrays(rows, shared, i)
        x, values, statistics = partition_safe(apply)(*arrays, *self._read(i), stream.x)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
        return Stream(x, jax.tree.map(put, stream.values, values)), statistics

    def head(
        self, shared: Any, stream: Stream, i: jax.Array, *, over: str | None = None
    ) -> tuple[jax.Array, Sums]:
        """Return the loss and all sums.

        Args:
            over: The axis whose devices compute the logits of some words each, as `LazyLogits.over`.
        """
        loss, _ = in_parts(self.loss_fn)

        def finish(params: Any, variables: Any, batch: Any, key: jax.Array, stream: Stream) -> Sums:
            with lazy_logits():
                outputs = self._outputs(params, variables, batch, key, stream)
                return loss.sums(_divided(outputs, over), batch)

        arrays = self._some_arrays(shared, i)
        sums = partition_safe(finish)(*arrays, *self._read(i), stream)
        return sums["loss"], sums

    def divides_words(self, shared: Any, stream: Stream) -> bool:
        """Return whether stages can divide the words of the logits (`LazyLogits.divides`)."""
        first = jnp.int32(0)
        arrays = self._some_arrays(shared, first)
        with lazy_logits():
            outputs = jax.eval_shape(self._outputs, *arrays, *self._read(first), stream)
        heads = [node for node in jax.tree.leaves(outputs, is_leaf=_is_lazy) if _is_lazy(node)]
        return bool(heads) and all(head.divides for head in heads)

    def _outputs(
        self, params: Any, variables: Any, batch: Any, key: jax.Array, stream: Stream
    ) -> Outputs:
        """Return the outputs of the model, from the stream after all layers."""
        loss, layered = in_parts(self.loss_fn)
        _, others = self.variables
        values = [stream.values]
        if layered.outputs_take_context or others.changing:
            (_, context), variables = self._embed_inputs(params, variables, batch, key)
        if layered.outputs_take_context:
            values.append(context)
        returned = layered.compute_outputs(params, variables, stream.x, *values, train=loss.train)
        outputs, _ = _with_variables(returned, "compute_outputs", variables)
        return as_outputs(outputs)

    def _embed_inputs(
        self, params: Any, variables: Any, batch: Any, key: jax.Array
    ) -> tuple[tuple[jax.Array, Any], Any]:
        """Return the input of the first layer, other inputs of all layers, and the variables."""
        loss, layered = in_parts(self.loss_fn)
        inputs, keywords = loss.arguments(batch)
        returned = layered.embed_inputs(
            params, variables, key, *inputs, train=loss.train, **keywords
        )
        return _with_variables(returned, "embed_inputs", variables)

    def _apply_layers(
        self, params: Any, variables: Any, x: jax.Array, context: Any
    ) -> tuple[tuple[jax.Array, Any], Any]:
        """Return the stream after the layers in `params`, their values, and the variables."""
        loss, layered = in_parts(self.loss_fn)
        returned = layered.apply_layers(params, variables, x, context, train=loss.train)
        return _with_variables(returned, "apply_layers", variables)

    def _read(self, i: jax.Array) -> tuple[Any, jax.Array]:
        """Return a microbatch and its key."""
        return read_microbatch(self.microbatches, i)

    def _some_arrays(self, shared: Any, i: jax.Array) -> tuple[Any, Any]:
        """Return the parameters and the variables of a model with any chunk of layers."""
        of_layers, _ = self.variables
        variables = select_chunk(of_layers, 0).at(i)
        return self._arrays((self.some_layers, variables), shared, i)

    def _arrays(self, layers: tuple[Any, Any], shared: Any, i: jax.Array) -> tuple[Any, Any]:
        """Return the parameters and the variables of a model with these layers."""
        own_params, own_variables = layers
        _, others = self.variables
        return tree.merge(own_params, shared), tree.merge(own_variables, others.at(i))


def _is_lazy(node: Any) -> bool:
    return isinstance(node, LazyLogits)


def _divided(outputs: Outputs, over: str | None) -> Outputs:
    """Return outputs with the words of logits divided over an axis."""

    def divide(node: Any) -> Any:
        if _is_lazy(node):
            return dataclasses.replace(node, over=over)
        return node

    return jax.tree.map(divide, outputs, is_leaf=_is_lazy)


def _with_variables(returned: Any, part: str, variables: Any) -> tuple[Any, Any]:
    """Return the result of a part of a model, and the variables after it.

    Args:
        variables: Those before it.

    Raises:
        ConfigError: It returns no such pair, or not all variables.
    """
    fix = "return result, variables"
    if not (
        isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
    ):
        what = f"returns {describe_value(returned)}, and no pair with the variables after it"
        raise ConfigError(NO_PIPELINE, [Problem(part, what, fix=fix)])
    lacking = tree.flatten(variables).keys() - tree.flatten(returned[1]).keys()
    if lacking:
        what = f"returns variables without {', '.join(sorted(lacking))}"
        raise ConfigError(NO_PIPELINE, [Problem(part, what, fix=fix)])
    return returned


def _use_problems(used: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem for each parameter or variable of layers used outside of `apply_layers`."""
    for path in used:
        what = "is used outside of apply_layers, where a stage has only some of the layers"
        yield Problem(path, what, fix="inside")


def _change_problems(changed: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem for each variable of all stages changed by the layers."""
    for path in changed:
        what = "is changed in apply_layers by the layers of every stage, and there is one of it"
        yield Problem(path, what, fix="one for each layer, stacked as the layers are; or pipe=1")


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
    ordered: Any,
    key: jax.Array,
    stages: int,
    chunks: int,
    microbatches: int,
) -> tuple[LayerSplit, tuple[Any, Any, Any], Any]:
    """Split arrays into layers on their stages, all others, and microbatches with keys.

    The first two are pairs: parameters, and `MicrobatchVariables`. The last result are the
    variables after all microbatches, without statistics.

    Args:
        ordered: The batch as the model takes it, from `ModelLoss.ordered`.

    Raises:
        ConfigError: All reasons why the model cannot be split into these stages.
    """
    loss, _ = in_parts(loss_fn)
    layers, shared = _split_layers(params)
    problems = [
        *_setting_problems(stages),
        *_stack_problems(layers, stages, chunks),
        *_nested_problems(shared),
    ]
    if problems:
        raise ConfigError(NO_PIPELINE, problems)
    (count,) = _counts_of_layers(layers, stages)
    problems = list(_layer_dim_problems(variables, count, stages))
    if problems:
        raise ConfigError(NO_PIPELINE, problems)
    given = params, variables, batch, key, microbatches
    by_microbatch, after = variables_by_microbatch(loss, *given)
    of_layers, of_others = _split_variables(by_microbatch)
    split = LayerSplit.of(count, stages, chunks)
    of_stages = layers, of_layers
    if not split.is_even:
        of_stages = split.to_stages(layers), of_layers.map(split.to_stages)
    batches = _stack_microbatches(ordered, microbatches)
    keys = jax.random.split(key, microbatches)
    others = gather_over_stages(shared), of_others.map(gather_over_stages)
    return split, (of_stages, others, (batches, keys)), after


def _split_variables(
    variables: MicrobatchVariables,
) -> tuple[MicrobatchVariables, MicrobatchVariables]:
    """Split variables into those of layers, and all others.

    Raises:
        ConfigError: Examples change some of the others.
    """
    fixed, other_fixed = _split_layers(variables.fixed)
    changing, other_changing = _split_layers(variables.changing)
    statistics, other_statistics = _split_layers(variables.statistics)
    problems = list(_statistics_problems(other_statistics))
    if problems:
        raise ConfigError(NO_PIPELINE, problems)
    of_layers = MicrobatchVariables(fixed, changing, statistics)
    return of_layers, MicrobatchVariables(other_fixed, other_changing, {})


def _statistics_problems(statistics: Any) -> Iterator[Problem]:
    """Yield a problem for each variable that examples change outside of the layers."""
    for path in tree.flatten(statistics):
        what = "is changed by the examples of each microbatch, and is outside of the layers"
        detail = "every stage computes what is there, and in an order of its own"
        yield Problem(path, what, detail, "in the layers, stacked as they are; or pipe=1")


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
    attention = context.attention
    if attention.is_ring and attention.platform in ("cuda", "rocm"):
        yield Problem(
            "context",
            "is a ring, which permutes keys and values inside a stage's task, where GPUs may wait for "
            "all stages",
            fix='context="all-to-all"',
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


def _layer_dim_problems(variables: Any, count: int, stages: int) -> Iterator[Problem]:
    """Yield a problem for each variable inside the layers without a dimension of layers."""
    is_manual = AXIS in get_abstract_mesh().manual_axes
    of_layers, _ = _split_layers(variables)
    for path, x in tree.flatten(of_layers).items():
        rows = count
        if is_manual and own_stacks(path, current().stacks)[0].is_even:
            rows //= stages
        if x.shape[:1] != (rows,):
            what = f"is one of all layers, of the shape {x.shape}, and stages have their own"
            fix = f"one for each layer, [{count}, …], or outside of the layers"
            yield Problem(path, what, fix=fix)


def _nested_problems(shared: Any) -> Iterator[Problem]:
    """Yield a problem for each stack inside another, outside of the layers."""
    placements = current().placements
    for path in tree.flatten(shared):
        if path in placements and AXIS in placements[path].leading:
            what = "is a stack inside another, and stages divide the first dimension"
            yield Problem(path, what, fix="one stack")


def _stack_microbatches(batch: Any, microbatches: int) -> Any:
    """Return a batch as arrays `[microbatch, …]`; those without examples are `[1, …]`."""
    split, shared = split_microbatches(batch, microbatches)
    of_batch = {path: x[None] for path, x in shared.items()}
    return join_microbatch(batch, split, of_batch)
