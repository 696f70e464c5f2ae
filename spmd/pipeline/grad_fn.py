"""A pipeline over the mesh axis `pipe` as a gradient function: any schedule, in one SPMD program.

The program is manual over `pipe` alone; all other axes are left to the plan, as without a pipeline. It scans over the
ticks of a `TickTable` (`spmd.pipeline.executor`), in each of which a stage does what its row of the tables says.

An idle stage computes nothing (`lax.cond`). The embedding comes before the first task of a microbatch, the head and
the loss after the last. Only the input of a task is kept for its backward task, which recomputes the rest under the
plan's remat policy.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.gradients.base import GradFn
from spmd.gradients.losses import LossFn, Sums
from spmd.model_api.precision import scale_loss, split_loss_scale
from spmd.pipeline.executor import cond, first_carry, run_ticks, shift, zeros
from spmd.pipeline.interleave import AXIS, interleave
from spmd.pipeline.partition import StageModel, Stream, partition, split_in_flight
from spmd.pipeline.tick_table import TickTable
from spmd.plan.annotate import manual_over
from spmd.plan.context import current
from spmd.plan.fsdp import grad_targets


def pipeline(loss_fn: LossFn, table: TickTable) -> GradFn:
    """Return a gradient function that sends microbatches through stages, each with some of the layers.

    The stages are those of mesh axis `pipe`: the parameters that the plan splits over it are the layers, everything
    else is on every stage. Layers stay where the plan stores them; where stages have several chunks, they move to their
    stage when the step begins, shard by shard, and their gradients move back (`interleave`).

    Args:
        loss_fn: A `ModelLoss` of a model in parts, such as `next_token_loss(model)`.
        table: From `spmd.pipeline.tick_table.tabulate`.

    Raises:
        ConfigError: At trace time: as `spmd.pipeline.partition.partition` and `StageModel.shapes`.
    """

    def grad_fn(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Sums, Any]:
        own, scaling = split_loss_scale(variables)
        arrays = partition(grad_targets(params), own, batch, key, table.stages, table.chunks, table.microbatches)
        scale = scale_loss(jnp.float32(1), scaling)
        local = functools.partial(_backward, loss_fn=loss_fn, table=table)
        d_layers, d_shared, sums = shard_over_stages(local, (P(AXIS), P(), P()), *arrays, scale)
        merged = tree.flatten(tree.merge(d_layers, d_shared))
        return tree.map_with_path(lambda path, _: merged[path], params), sums, variables

    return grad_fn


def pipelined(loss_fn: LossFn, stages: int, microbatches: int) -> LossFn:
    """Return a loss function for evaluation that sends microbatches through stages.

    Args:
        loss_fn: As for `pipeline`.
        stages: The size of `pipe`.
        microbatches: The number of microbatches of a batch.

    Raises:
        ConfigError: As for `pipeline`.
    """

    def whole(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Sums, Any]:
        arrays = partition(params, split_in_flight(variables)[0], batch, key, stages, 1, microbatches)
        local = functools.partial(_forward, loss_fn=loss_fn, stages=stages, microbatches=microbatches)
        return shard_over_stages(local, P(), *arrays), variables

    return whole


def shard_over_stages(local: Callable[..., Any], out: Any, layers: Any, *others: Any) -> Any:
    """Run `local` on every stage, with its layers and the whole of all others."""
    mesh = current().mesh
    assert mesh is not None, "a step is traced within its plan"
    return manual_over(mesh, (AXIS,), local, (P(AXIS), *(P(),) * len(others)), out)(layers, *others)


def _backward(layers: Any, shared: Any, parts: Any, scale: jax.Array, *, loss_fn: LossFn, table: TickTable) -> Any:
    """Return the gradients of one stage's layers, and its part of all others and of the sums."""
    chunks, frozen = interleave(layers, table.stages, table.chunks)
    shared, others = shared
    some_layers = jax.tree.map(lambda w: w[0], chunks)
    model = StageModel(loss_fn, parts, some_layers, table.stages, (frozen, others), table.chunks)
    shared = jax.tree.map(lambda w: w[None], shared)
    carry = run_ticks(model, chunks, shared, scale, table, first_carry(model, chunks, shared, table))
    d_chunks, d_shared, sums = carry["totals"]
    d_shared, sums = jax.tree.map(lambda x: x[0], (d_shared, sums))
    return interleave(d_chunks, table.stages, table.chunks, back=True), *jax.lax.psum((d_shared, sums), AXIS)


def _forward(layers: Any, shared: Any, parts: Any, *, loss_fn: LossFn, stages: int, microbatches: int) -> Sums:
    """Return one stage's part of the sums: tick *t* runs microbatch *t* minus the number of stages before it."""
    stage = jax.lax.axis_index(AXIS)
    (layers, frozen), (shared, others) = layers, shared
    model = StageModel(loss_fn, parts, layers, stages, (jax.tree.map(lambda w: w[None], frozen), others))
    empty, none = map(zeros, model.shapes(jax.tree.map(lambda w: w[None], shared)))

    def tick(carry: tuple[Stream, Sums], number: jax.Array) -> tuple[tuple[Stream, Sums], None]:
        arrived, sums = carry
        entered = cond(number < microbatches, lambda: model.enter(shared, number), lambda: empty)
        stream = jax.tree.map(lambda x, y: jnp.where(stage == 0, x, y), entered, arrived)
        i = number - stage

        def task() -> Stream:
            return model.inside(layers, shared, stream, i)

        left = cond((i >= 0) & (i < microbatches), task, lambda: empty)
        ends = (i >= 0) & (stage == stages - 1)

        def leave(sums: Sums) -> Sums:
            return jax.tree.map(jnp.add, sums, model.leave(shared, left, i)[1])

        sums = cond(ends, leave, lambda sums: sums, sums)
        return (shift(left, stages, 1), sums), None

    (_, sums), _ = jax.lax.scan(tick, (empty, none), jnp.arange(microbatches + stages - 1))
    return jax.lax.psum(sums, AXIS)
