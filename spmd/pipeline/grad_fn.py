"""A pipeline over the mesh axis `pipe` as one more gradient function: any schedule, in one SPMD program.

The program is manual over `pipe` alone; all other axes are left to the plan, as without a pipeline. It scans over the
ticks of a `TickTable` (`spmd.pipeline.executor`), in each of which a stage does what its row of the tables says.

A stage with nothing to do computes nothing (`lax.cond`). Before the first task of a microbatch comes the embedding, and
the last one ends with the head and the loss. Only what enters a task is kept for its backward task, which computes the
rest again, under the plan's remat policy.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.accumulate import split_microbatches
from spmd.gradients.base import GradFn
from spmd.gradients.losses import LossFn, Sums
from spmd.layers.pipelined_layers import Stream
from spmd.model_api.precision import scale_loss, split_loss_scale
from spmd.pipeline.executor import cond, first_carry, run_ticks, shift, zeros
from spmd.pipeline.interleave import AXIS, interleave
from spmd.pipeline.partition import TITLE, Stages, split_in_flight
from spmd.pipeline.tick_table import TickTable
from spmd.plan.annotate import manual_over
from spmd.plan.context import current
from spmd.plan.fsdp import grad_targets


def pipeline(loss_fn: LossFn, program: TickTable) -> GradFn:
    """Gradients of the batch, which goes in microbatches through stages that each have some of the layers.

    The stages are those of mesh axis `pipe`: the parameters that the plan splits over it are the layers, everything
    else is on every stage. Layers stay where the plan has them; where stages have several chunks, they travel to their
    stage when the step begins, shard by shard, and their gradients travel back (`interleave`).

    Args:
        loss_fn: Of a model that runs its layers through `spmd.layers.pipelined_layers.pipelined_layers`.
        program: What each stage does when, from `spmd.pipeline.tick_table.tabulate`.

    Raises:
        ConfigError: At trace time: the mesh has another number of stages, the layers do not divide into so many
            groups, the model does not say where its layers are, or keeps variables that change.
    """

    def grad_fn(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Sums, Any]:
        own, scaling = split_loss_scale(variables)
        arrays = partition(grad_targets(params), own, batch, key, program.stages, program.chunks, program.microbatches)
        scale = scale_loss(jnp.float32(1), scaling)
        local = functools.partial(_backward, loss_fn=loss_fn, program=program)
        d_layers, d_shared, sums = shard_over_stages(local, (P(AXIS), P(), P()), *arrays, scale)
        merged = tree.flatten(tree.merge(d_layers, d_shared))
        return tree.map_with_path(lambda path, _: merged[path], params), sums, variables

    return grad_fn


def pipelined(loss_fn: LossFn, stages: int, microbatches: int) -> LossFn:
    """The loss alone, of a batch that goes in microbatches through stages: for evaluation.

    Args:
        loss_fn: As for `pipeline`.
        stages: The size of `pipe`.
        microbatches: How many parts of the batch.

    Raises:
        ConfigError: As for `pipeline`.
    """

    def whole(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Sums, Any]:
        arrays = partition(params, split_in_flight(variables)[0], batch, key, stages, 1, microbatches)
        local = functools.partial(_forward, loss_fn=loss_fn, stages=stages, microbatches=microbatches)
        return shard_over_stages(local, P(), *arrays), variables

    return whole


def shard_over_stages(local: Callable[..., Any], out: Any, layers: Any, *others: Any) -> Any:
    """`local` on every stage: its layers, and the whole of all else."""
    mesh = current().mesh
    assert mesh is not None, "a step is traced within its plan"
    return manual_over(mesh, (AXIS,), local, (P(AXIS), *(P(),) * len(others)), out)(layers, *others)


def partition(
    params: Any, variables: Any, batch: Any, key: jax.Array, stages: int, chunks: int, microbatches: int
) -> tuple[Any, Any, Any]:
    """Layers, all else, and microbatches with a key for each; if the model and the mesh are made for it.

    Layers and all else are pairs: the parameters, and what is among the variables because it never changes.
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
        what = "would send keys and values inside of a stage's task, for which XLA:CPU waits on all stages"
        problems.append(Problem("context", f"is a ring, which {what}", fix="--context all-to-all"))
    counts = sorted({leaf.shape[0] for leaf in jax.tree.leaves(layers)})
    if not counts:
        fix = 'stack the layers, and name the stack in the rule table: stacked={"layers": "pipe"}'
        problems.append(Problem("mesh.pipe", "splits no parameter", f"pipe={stages}", fix))
    if len(counts) > 1:
        problems.append(Problem("layers", f"are stacks of {' and '.join(map(str, counts))} layers", fix="one stack"))
    for count in counts:
        if count % (stages * chunks):
            product = f"pipe={stages}" + (f" × {chunks} chunks" if chunks > 1 else "")
            arithmetic = f"{count} / ({product}) = {count / (stages * chunks):.4g}"
            fix = f"a multiple of {stages * chunks}"
            problems.append(Problem("layers", "do not divide into stages", arithmetic, fix))
    problems += [
        Problem(path, "is a stack inside of another, and stages are cut along the first dimension", fix="one stack")
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
    parts = split_microbatches(batch, microbatches), jax.random.split(key, microbatches)
    return (layers, frozen_layers), (shared, frozen_others), parts


def _backward(layers: Any, shared: Any, parts: Any, scale: jax.Array, *, loss_fn: LossFn, program: TickTable) -> Any:
    """What one stage does: gradients of its layers, and its part of all others and of the sums."""
    chunks, frozen = interleave(layers, program.stages, program.chunks)
    shared, others = shared
    some_layers = jax.tree.map(lambda w: w[0], chunks)
    model = Stages(loss_fn, parts, some_layers, program.stages, (frozen, others), program.chunks)
    shared = jax.tree.map(lambda w: w[None], shared)
    carry = run_ticks(model, chunks, shared, scale, program, first_carry(model, chunks, shared, program))
    d_chunks, d_shared, sums = carry["totals"]
    d_shared, sums = jax.tree.map(lambda x: x[0], (d_shared, sums))
    return interleave(d_chunks, program.stages, program.chunks, back=True), *jax.lax.psum((d_shared, sums), AXIS)


def _forward(layers: Any, shared: Any, parts: Any, *, loss_fn: LossFn, stages: int, microbatches: int) -> Sums:
    """What one stage does for the sums alone: in tick *t*, microbatch *t* less the stages before it."""
    stage = jax.lax.axis_index(AXIS)
    (layers, frozen), (shared, others) = layers, shared
    model = Stages(loss_fn, parts, layers, stages, (jax.tree.map(lambda w: w[None], frozen), others))
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
