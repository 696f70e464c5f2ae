"""Pipeline parallelism over the mesh axis `pipe`: a gradient function for any schedule.

A pipeline is one SPMD program, manual over `pipe` only, with a scan over the ticks of a `TickTable`
(`spmd.pipeline.executor`). An idle stage computes nothing (`lax.cond`). Between its forward and its
backward task a stage keeps what the remat policy saves (`spmd.pipeline.stage_layers`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.accumulate import first_microbatch
from spmd.gradients.additive import LossReader, has_part_of_batch
from spmd.gradients.base import GradFn, LossGradFn
from spmd.gradients.losses import LossFn, Sums
from spmd.model_interface.grad_transform import Carry, enter_all
from spmd.model_interface.model import NO_PIPELINE
from spmd.pipeline.branches import cond
from spmd.pipeline.entrance import FirstStageOrder, make_entrance
from spmd.pipeline.executor import first_carry, run_ticks
from spmd.pipeline.head import Head
from spmd.pipeline.interleave import AXIS
from spmd.pipeline.layer_split import LayerSplit
from spmd.pipeline.partition import StageModel, Stream, in_parts, partition
from spmd.pipeline.shared_params import sum_over_stages
from spmd.pipeline.slots import zeros
from spmd.pipeline.tick_table import TickTable
from spmd.pipeline.transfers import shift, sum_of_stages
from spmd.pipeline.variables import MicrobatchVariables, check_no_statistics
from spmd.plan.context import current
from spmd.plan.fsdp import grad_targets
from spmd.plan.manual import shard_map_over

_PER_MICROBATCH = "pipeline(…, per_microbatch=True) for the loss of each microbatch"


def pipeline(loss_fn: LossFn, table: TickTable, *, per_microbatch: bool = False) -> GradFn:
    """Return a gradient function over a pipeline of stages, each with some of the layers.

    The stacks that the plan splits over `pipe` are the layers; all other parameters are used by
    every stage, however they are stored (`shared_params`). If stages have several chunks, the step
    moves the layers to their stage, and their gradients back (`interleave`). The loss is a
    `ModelLoss` of a model in parts, such as `next_token_loss(model)`; another raises a
    `ConfigError` at trace time.

    Args:
        per_microbatch: Whether a loss that is no sum over the examples is meant to be one of each
            microbatch, as for `spmd.accumulate`.
    """
    loss = LossReader(loss_fn)

    def grad_fn(params: Any, carry: Carry, batch: Any, key: jax.Array) -> tuple[Any, Sums, Carry]:
        in_stages, _ = in_parts(loss_fn)
        with in_stages.ordered(batch) as ordered:
            return grad_of_ordered(params, carry, batch, ordered, key)

    def grad_of_ordered(
        params: Any, carry: Carry, batch: Any, ordered: Any, key: jax.Array
    ) -> tuple[Any, Sums, Carry]:
        own = carry.variables
        first = first_microbatch(batch, table.microbatches)
        counts = table.stages, table.chunks, table.microbatches
        given = grad_targets(params), own, batch, ordered, key
        split, arrays, after = partition(loss_fn, *given, *counts)
        checked, variables = params, own
        if not split.is_even:  # in a region manual over `pipe`, only stages have whole layers
            layers, of_layers = arrays[0]
            checked, variables = _replaced(params, layers), _replaced(own, of_layers.at(0))
        _check_loss(loss, checked, variables, first, key, per_microbatch=per_microbatch)
        _check_order(table, arrays[0][1])
        scale = enter_all(current().transforms, carry).scaled(jnp.float32(1))
        local = functools.partial(_backward, loss_fn=loss_fn, table=table, split=split)
        out_specs = (P(AXIS), P(AXIS)), P(AXIS), P()
        of_stages, d_shared, sums = shard_over_stages(local, out_specs, *arrays, scale)
        if not split.is_even:
            of_stages = split.from_stages(of_stages[0]), split.from_stages(of_stages[1])
        d_layers, statistics = of_stages
        gradients = merge_like(params, d_layers, sum_over_stages(d_shared))
        variables = merge_like(own, after, statistics)
        return gradients, sums, dataclasses.replace(carry, variables=variables)

    return LossGradFn(grad_fn, loss, table)


def _check_loss(
    loss: LossReader,
    params: Any,
    variables: Any,
    microbatch: Any,
    key: jax.Array,
    *,
    per_microbatch: bool,
) -> None:
    """Raise a `ConfigError` if the loss is divided twice, or no sum over examples."""
    given = params, variables, microbatch, key
    is_part = has_part_of_batch()
    loss.check_mean(*given)
    if is_part or not per_microbatch or loss.has_values(*given):
        loss.check_additive(NO_PIPELINE, *given, fix=_PER_MICROBATCH, statistics=is_part)


def _check_order(table: TickTable, of_layers: MicrobatchVariables) -> None:
    """Raise a `ConfigError` if statistics would see the microbatches in another order."""
    if of_layers.statistics and not table.is_in_order:
        paths = ", ".join(tree.flatten(of_layers.statistics))
        what = "has stages with microbatches in another order than on one device"
        detail = f"batch statistics depend on it: {paths}"
        fix = "a schedule in which each stage runs microbatch 0, 1, 2, …"
        raise ConfigError(NO_PIPELINE, [Problem("schedule", what, detail, fix)])


def _replaced(arrays: Any, others: Any) -> Any:
    """Return a tree with some arrays replaced by those at the same paths of another."""
    found = tree.flatten(others)
    return tree.map_with_path(lambda path, x: found.get(path, x), arrays)


def merge_like(whole: Any, part: Any, other: Any) -> Any:
    """Merge two parts into one tree, with the keys in the order of `whole`."""
    merged = tree.flatten(tree.merge(part, other))
    return tree.map_with_path(lambda path, _: merged[path], whole)


def pipelined(loss_fn: LossFn, stages: int, microbatches: int) -> LossFn:
    """Return a loss function for evaluation: microbatches pass through the stages of `pipe`."""

    def pipelined_loss(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Sums, Any]:
        in_stages, _ = in_parts(loss_fn)
        with in_stages.ordered(batch) as ordered:
            given = params, variables, batch, ordered, key
            split, arrays, after = partition(loss_fn, *given, stages, 1, microbatches)
            local = functools.partial(
                _forward, loss_fn=loss_fn, split=split, microbatches=microbatches
            )
            (_, of_layers), *_ = arrays
            check_no_statistics(of_layers)
            return shard_over_stages(local, P(), *arrays), after

    return pipelined_loss


def shard_over_stages(local: Callable[..., Any], out_specs: Any, layers: Any, *shared: Any) -> Any:
    """Run `local` on every stage, on the stage's part of `layers` and all of `shared`."""
    mesh = current().mesh
    assert mesh is not None, "a step is traced within its plan"
    in_specs = P(AXIS), *[P()] * len(shared)
    return shard_map_over(mesh, (AXIS,), local, in_specs, out_specs)(layers, *shared)


def _backward(
    layers: Any,
    shared: Any,
    parts: Any,
    scale: jax.Array,
    *,
    loss_fn: LossFn,
    table: TickTable,
    split: LayerSplit,
) -> Any:
    """Return what is of one stage, gradients of shared parameters, and the sums of all stages.

    Of a stage are the gradients of its layers and their statistics; shared parameters are `[1, …]`.
    """
    chunks, of_layers = split.in_chunks(layers)
    params, others = shared
    first = jax.tree.map(lambda w: w[0], chunks)
    model = StageModel(loss_fn, parts, first, split, (of_layers, others))
    params = jax.tree.map(lambda w: w[None], params)  # [version, …] of the only version
    tasks, carry = first_carry(model, chunks, params, table)
    carry = run_ticks(model, tasks, chunks, params, scale, table, carry)
    d_chunks, d_shared, sums = carry["totals"]
    sums = sum_of_stages(jax.tree.map(lambda x: x[0], sums))
    of_stage = split.joined(d_chunks), split.joined(carry["statistics"])
    return of_stage, d_shared, sums


def _forward(
    layers: Any, shared: Any, parts: Any, *, loss_fn: LossFn, split: LayerSplit, microbatches: int
) -> Sums:
    """Return the sums over all stages: stage *s* runs microbatch *t* - *s* in tick *t*."""
    stages = split.stages
    stage = jax.lax.axis_index(AXIS)
    (layers, of_layers), (shared, others) = layers, shared
    of_layers = jax.tree.map(lambda w: w[None], of_layers)  # [chunk, layer, …] of the only chunk
    model = StageModel(loss_fn, parts, layers, split, (of_layers, others))
    stream_shape, sums_shape = model.shapes(jax.tree.map(lambda w: w[None], shared))
    empty = zeros(stream_shape)
    no_sums = zeros(sums_shape)
    head = Head.of(model, shared, stream_shape)

    times = np.arange(microbatches + stages - 1)
    first_tasks = np.where(times < microbatches, times, -1)
    entering = FirstStageOrder.of(first_tasks, np.zeros_like(times))
    entrance = make_entrance(
        model,
        jax.tree.map(lambda w: w[None], shared),
        empty,
        microbatches=microbatches,
        versions=1,
        entering=entering,
        leaving=entering,
    )

    def tick(
        carry: tuple[Any, Stream, Sums], ticks: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[Any, Stream, Sums], None]:
        held, arrived, sums = carry
        t, entry = ticks
        entered, held = entrance.enter(held, entry)
        stream = jax.tree.map(lambda x, y: jnp.where(stage == 0, x, y), entered, arrived)
        i = t - stage
        is_busy = (i >= 0) & (i < microbatches)

        def forward() -> Stream:
            output, _ = model.run_layers(layers, shared, stream, i, 0, {})
            return output

        left = cond(is_busy, forward, lambda: empty)

        last = t - (stages - 1)  # the microbatch of the last stage

        def add_loss(sums: Sums) -> Sums:
            return jax.tree.map(jnp.add, sums, head.sums(shared, left, last))

        sums = head.run(last >= 0, add_loss, lambda sums: sums, sums)
        return (held, shift(left, stages, 1), sums), None

    ticks = jnp.asarray(times), jnp.asarray(entering.places)
    held, _ = entrance.held
    (_, _, sums), _ = jax.lax.scan(tick, (held, empty, no_sums), ticks)
    return sum_of_stages(sums)
