"""A pipeline over the mesh axis `pipe` as one more gradient function: any schedule, in one SPMD program.

The program is manual over `pipe` alone; all other axes are left to the plan, as without a pipeline. It scans over the
ticks of a `Program`. In each, a stage does what its row of the tables says:

```
what the stage before sent ──▶ slots ──▶ forward task ──▶ to the stage behind, while the backward task computes
                                  │
                                  ▼
to the stage before ◀────── backward task (forward again, then its derivative) ◀── the gradient, from its slot
while the forward task computes        └──▶ added to the stage's gradients
```

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
from spmd.annotate import manual_over
from spmd.errors import ConfigError, Problem
from spmd.gradients.accumulate import cut_batch
from spmd.gradients.base import GradFn
from spmd.gradients.exchange import exchange
from spmd.gradients.lockstep import IDLE, Program
from spmd.gradients.stages import TITLE, Stages
from spmd.loss import LossFn, Sums
from spmd.parallel.stages import Stream
from spmd.precision import scale_loss, split_loss_scale
from spmd.scope import current
from spmd.weights import accumulation_dtype, as_taken, gradient_view

AXIS = "pipe"


def pipeline(loss_fn: LossFn, program: Program) -> GradFn:
    """Gradients of the batch, which goes in microbatches through stages that each have some of the layers.

    The stages are those of mesh axis `pipe`: the parameters that the plan splits over it are the layers, everything
    else is on every stage. Layers stay where the plan has them; where stages have several chunks, they travel to their
    stage when the step begins, shard by shard, and their gradients travel back (`exchange`).

    Args:
        loss_fn: Of a model that runs its layers through `spmd.parallel.stages.through_layers`.
        program: What each stage does when, from `spmd.gradients.lockstep.make_program`.

    Raises:
        ConfigError: At trace time: the mesh has another number of stages, the layers do not divide into so many
            groups, the model does not say where its layers are, or keeps variables.
    """

    def grad_fn(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Sums, Any]:
        own, scaling = split_loss_scale(variables)
        view = as_taken(params, gradient_view(params))
        arrays = _cut(view, own, batch, key, program.stages, program.chunks, program.microbatches)
        scale = scale_loss(jnp.float32(1), scaling)
        local = functools.partial(_backward, loss_fn=loss_fn, program=program)
        d_layers, d_shared, sums = _on_stages(local, (P(AXIS), P(), P()), *arrays, scale)
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
        arrays = _cut(params, variables, batch, key, stages, 1, microbatches)
        local = functools.partial(_forward, loss_fn=loss_fn, stages=stages, microbatches=microbatches)
        return _on_stages(local, P(), *arrays), variables

    return whole


def _on_stages(local: Callable[..., Any], out: Any, layers: Any, *others: Any) -> Any:
    """`local` on every stage: its layers, and the whole of all else."""
    scope = current()
    assert scope is not None, "a step is traced within its plan"
    return manual_over(scope.mesh, (AXIS,), local, (P(AXIS), *(P(),) * len(others)), out)(layers, *others)


def _cut(
    params: Any, variables: Any, batch: Any, key: jax.Array, stages: int, chunks: int, microbatches: int
) -> tuple[Any, Any, Any]:
    """Layers, all other parameters, and microbatches with a key for each; if the model and the mesh are made for it."""
    scope = current()
    assert scope is not None, "a step is traced within its plan"

    def is_layer(path: str) -> bool:
        return AXIS in scope.rules.layer_path(path)[1]

    layers, shared = tree.select(params, is_layer), tree.select(params, lambda path: not is_layer(path))
    problems = []
    if (size := scope.mesh.shape[AXIS]) != stages:
        problems.append(Problem("schedule", f"is for {stages} stages", f"mesh.pipe = {size}", "make it for the mesh"))
    if scope.attention.is_ring:
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
        Problem(path, "is a variable that the model changes by itself, and every stage would", fix="pipe=1")
        for path in tree.flatten(variables)
    ]
    if problems:
        raise ConfigError(TITLE, problems)
    return layers, shared, (cut_batch(batch, microbatches), jax.random.split(key, microbatches))


def _backward(layers: Any, shared: Any, parts: Any, scale: jax.Array, *, loss_fn: LossFn, program: Program) -> Any:
    """What one stage does: gradients of its layers, and its part of all others and of the sums."""
    stage = jax.lax.axis_index(AXIS)
    chunks = exchange(layers, program.stages, program.chunks)
    count = program.stages * jax.tree.leaves(layers)[0].shape[0]
    model = Stages(loss_fn, parts, chunks, count)
    stream = jax.eval_shape(model.enter, shared, jnp.int32(0))
    empty = _zeros(stream)
    shift = functools.partial(_shift, stages=program.stages, chunks=program.chunks)

    def total(like: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), like)

    sums = jax.eval_shape(lambda: model.leave(shared, empty, jnp.int32(0))[1])
    carry = {
        "inputs": _zeros(stream, program.depth),
        "gradients": _zeros(stream, program.gradient_depth),
        "arrived": empty,
        "sent back": empty,
        "totals": (total(chunks), total(shared), _zeros(sums)),
    }

    def first_layer(chunk: jax.Array) -> jax.Array:
        return (chunk * program.stages + stage) * model.size

    def tick(carry: dict[str, Any], row: dict[str, jax.Array]) -> tuple[dict[str, Any], None]:
        do = {name: column[stage] for name, column in row.items()}
        arrived_back = shift(carry["sent back"], by=-1)  # while the forward task computes
        inputs = _put(carry["inputs"], do["arrives"], carry["arrived"])

        # The embedding is looked up on all stages at once: no stage waits for it, and no matrix is multiplied.
        begins = (row["forward"][0] >= 0) & (row["forward_chunk"][0] == 0)
        entered = _cond(begins, lambda: model.enter(shared, row["forward"][0]), lambda: empty)
        inputs = _put(inputs, jnp.where(begins & (stage == 0), do["forward_slot"], IDLE), entered)

        def forward() -> Stream:
            entered, layers = _take(inputs, do["forward_slot"]), _chunk(chunks, do["forward_chunk"])
            return model.inside(layers, shared, entered, do["forward"], first_layer(do["forward_chunk"]))

        arrived = shift(_cond(do["forward"] >= 0, forward, lambda: empty), by=1)  # while the backward one does
        gradients = _put(carry["gradients"], do["gradient_arrives"], arrived_back)

        def backward(totals: Any) -> tuple[Stream, Any]:
            i, chunk = do["backward"], do["backward_chunk"]
            d_chunks, d_shared, sums = totals
            left, pull = jax.vjp(
                lambda layers, shared, stream: model.inside(layers, shared, stream, i, first_layer(chunk)),
                *(_chunk(chunks, chunk), shared, _take(inputs, do["backward_slot"])),
            )

            def from_loss(d_shared: Any, sums: Any) -> tuple[Stream, Any, Any]:
                _, pull, own = jax.vjp(lambda shared, x: model.leave(shared, x, i), shared, left, has_aux=True)
                d, d_left = pull(scale)
                return d_left, _added(d_shared, d), _added(sums, own)

            def from_behind(d_shared: Any, sums: Any) -> tuple[Stream, Any, Any]:
                return _take(gradients, do["gradient_slot"]), d_shared, sums

            ends = (stage == program.stages - 1) & (chunk == program.chunks - 1)
            d_left, d_shared, sums = _cond(ends, from_loss, from_behind, d_shared, sums)
            d_layers, d, d_entered = pull(d_left)
            return d_entered, (_add_chunk(d_chunks, d_layers, chunk), _added(d_shared, d), sums)

        sent_back, totals = _cond(do["backward"] >= 0, backward, lambda totals: (empty, totals), carry["totals"])

        def into_embedding(d_shared: Any) -> Any:
            own = jax.tree.map(lambda d: jnp.where(stage == 0, d, jnp.zeros_like(d)), sent_back)
            return _added(d_shared, jax.vjp(lambda w: model.enter(w, row["backward"][0]), shared)[1](own)[0])

        d_chunks, d_shared, sums = totals
        begins = (row["backward"][0] >= 0) & (row["backward_chunk"][0] == 0)
        d_shared = _cond(begins, into_embedding, lambda d_shared: d_shared, d_shared)
        totals = d_chunks, d_shared, sums
        after = {"inputs": inputs, "gradients": gradients, "arrived": arrived, "sent back": sent_back, "totals": totals}
        return after, None

    table = {name: jnp.asarray(column) for name, column in program.columns.items()}
    (d_chunks, d_shared, sums) = jax.lax.scan(tick, carry, table)[0]["totals"]
    d_layers = exchange(d_chunks, program.stages, program.chunks, back=True)
    return d_layers, *jax.lax.psum((d_shared, sums), AXIS)


def _forward(layers: Any, shared: Any, parts: Any, *, loss_fn: LossFn, stages: int, microbatches: int) -> Sums:
    """What one stage does for the sums alone: in tick *t*, microbatch *t* less the stages before it."""
    stage = jax.lax.axis_index(AXIS)
    size = jax.tree.leaves(layers)[0].shape[0]
    model = Stages(loss_fn, parts, jax.tree.map(lambda w: w[None], layers), stages * size)
    empty = _zeros(jax.eval_shape(model.enter, shared, jnp.int32(0)))
    none = _zeros(jax.eval_shape(lambda: model.leave(shared, empty, jnp.int32(0))[1]))

    def tick(carry: tuple[Stream, Sums], number: jax.Array) -> tuple[tuple[Stream, Sums], None]:
        arrived, sums = carry
        entered = _cond(number < microbatches, lambda: model.enter(shared, number), lambda: empty)
        stream = jax.tree.map(lambda x, y: jnp.where(stage == 0, x, y), entered, arrived)
        i = number - stage

        def task() -> Stream:
            return model.inside(layers, shared, stream, i, stage * size)

        left = _cond((i >= 0) & (i < microbatches), task, lambda: empty)
        ends = (i >= 0) & (stage == stages - 1)
        sums = _cond(ends, lambda sums: _added(sums, model.leave(shared, left, i)[1]), lambda sums: sums, sums)
        return (_shift(left, stages, 1), sums), None

    (_, sums), _ = jax.lax.scan(tick, (empty, none), jnp.arange(microbatches + stages - 1))
    return jax.lax.psum(sums, AXIS)


def _cond(predicate: jax.Array, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
    """`jax.lax.cond`, whose branches end in no sharding constraint: XLA refuses two that end in different ones."""

    def ended(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: jax.lax.optimization_barrier(branch(*operands))

    return jax.lax.cond(predicate, ended(yes), ended(no), *operands)


def _shift(stream: Stream, stages: int, by: int, *, chunks: int = 1) -> Stream:
    """To the stage behind (1) or before (-1); round the ring only where stages have several chunks."""
    ring = [(s, (s + by) % stages) for s in range(stages)]
    pairs = ring if chunks > 1 else [(s, to) for s, to in ring if to - s == by]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), stream)


def _zeros(like: Any, *leading: int) -> Any:
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), like)


def _at(x: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _take(slots: Any, slot: jax.Array) -> Any:
    return jax.tree.map(lambda x: _at(x, slot), slots)


def _put(slots: Any, slot: jax.Array, value: Any) -> Any:
    """The slots with `value` in one of them; as they are, for slot -1."""

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        at = jnp.maximum(slot, 0)
        return jax.lax.dynamic_update_index_in_dim(x, jnp.where(slot >= 0, new, _at(x, at)), at, 0)

    return jax.tree.map(put, slots, value)


def _chunk(chunks: Any, chunk: jax.Array) -> Any:
    return jax.tree.map(lambda w: w[0] if w.shape[0] == 1 else _at(w, chunk), chunks)


def _add_chunk(total: Any, d: Any, chunk: jax.Array) -> Any:
    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        y = y.astype(x.dtype)
        if x.shape[0] == 1:
            return x + y[None]
        return jax.lax.dynamic_update_index_in_dim(x, _at(x, chunk) + y, chunk, 0)

    return jax.tree.map(add, total, d)


def _added(total: Any, d: Any) -> Any:
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, d)
