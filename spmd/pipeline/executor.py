"""The scan over the ticks of a `TickTable`: the work of one stage in each tick.

```
input from the previous stage ──▶ slots ──▶ forward task ──▶ to the next stage, while the backward task computes
                                    │
                                    ▼
to the previous stage ◀────── backward task (recomputes the forward) ◀── gradient from the next stage, in its slot
while the forward task computes        └──▶ accumulated into the stage's gradients
```
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from spmd.pipeline.interleave import AXIS
from spmd.pipeline.partition import StageModel, Stream, read_slot, select_chunk
from spmd.pipeline.tick_table import IDLE, TickTable
from spmd.plan.fsdp import zero_gradients
from spmd.plan.scopes import comm_scope, in_scope

SLOTS = "stage_inputs"
"""The checkpoint name of the slots that hold a stage's inputs."""

Carry = dict[str, Any]
"""The carry of the scan: slots for `inputs` and `gradients`, what `arrived`, what is `sent_back` next, and `totals`:
gradients of layers `[version · chunk, …]`, of all other parameters `[version, …]`, and sums `[version]`."""


def first_carry(model: StageModel, chunks: Any, shared: Any, table: TickTable) -> Carry:
    """Return the carry of an empty pipeline."""
    stream, sums = model.shapes(shared)
    empty = zeros(stream)

    return {
        "inputs": zeros(stream, table.depth),
        "gradients": zeros(stream, table.gradient_depth),
        "arrived": empty,
        "sent_back": empty,
        "totals": (zero_gradients(chunks), zero_gradients(shared), zeros(sums, table.versions)),
    }


def run_ticks(model: StageModel, chunks: Any, shared: Any, scale: jax.Array, table: TickTable, carry: Carry) -> Carry:
    """Run all ticks of one stage, with its layers `[version · chunk, layer, …]` and all `shared` `[version, …]`."""
    stage = jax.lax.axis_index(AXIS)
    empty = zeros(carry["arrived"])
    send = functools.partial(shift, stages=table.stages, chunks=table.chunks)

    def version(i: jax.Array) -> jax.Array:
        return i // table.microbatches

    def tick(carry: Carry, rows: dict[str, jax.Array]) -> tuple[Carry, None]:
        row = {name: column[stage] for name, column in rows.items()}
        gradient = send(carry["sent_back"], by=-1)  # while the forward task computes
        inputs = write_slot(carry["inputs"], row["receive_slot"], carry["arrived"])

        # All stages look up the embedding at the same time: no stage waits for it, and it has no matmul.
        i = rows["forward"][0]
        is_first = (i >= 0) & (rows["forward_chunk"][0] == 0)

        def embedding() -> Stream:
            return model.enter(select_chunk(shared, version(i)), i)

        entered = cond(is_first, embedding, lambda: empty)
        inputs = write_slot(inputs, jnp.where(is_first & (stage == 0), row["forward_slot"], IDLE), entered)

        def forward() -> Stream:
            i, chunk = row["forward"], row["forward_chunk"]
            layers, own = select_chunk(chunks, version(i) * table.chunks + chunk), select_chunk(shared, version(i))
            return model.inside(layers, own, read_slot(inputs, row["forward_slot"]), i, chunk)

        arrived = send(cond(row["forward"] >= 0, forward, lambda: empty), by=1)  # while the backward task computes
        gradients = write_slot(carry["gradients"], row["gradient_receive_slot"], gradient)

        def backward(totals: Any) -> tuple[Stream, Any]:
            i, chunk = row["backward"], row["backward_chunk"]
            own, group = select_chunk(shared, version(i)), version(i) * table.chunks + chunk
            d_chunks, d_shared, sums = totals
            left, pull = jax.vjp(
                lambda layers, shared, stream: model.inside(layers, shared, stream, i, chunk),
                *(select_chunk(chunks, group), own, read_slot(inputs, row["backward_slot"])),
            )

            def from_loss(d_shared: Any, sums: Any) -> tuple[Stream, Any, Any]:
                _, pull, found = jax.vjp(lambda shared, x: model.leave(shared, x, i), own, left, has_aux=True)
                d, d_left = pull(scale)
                return d_left, accumulate_at(d_shared, d, version(i)), accumulate_at(sums, found, version(i))

            def from_next_stage(d_shared: Any, sums: Any) -> tuple[Stream, Any, Any]:
                return read_slot(gradients, row["gradient_slot"]), d_shared, sums

            is_last = (stage == table.stages - 1) & (chunk == table.chunks - 1)
            d_left, d_shared, sums = cond(is_last, from_loss, from_next_stage, d_shared, sums)
            d_layers, d, d_entered = pull(d_left)
            return d_entered, (accumulate_at(d_chunks, d_layers, group), accumulate_at(d_shared, d, version(i)), sums)

        sent_back, totals = cond(row["backward"] >= 0, backward, lambda totals: (empty, totals), carry["totals"])

        def embedding_backward(d_shared: Any) -> Any:
            i = rows["backward"][0]
            d_entered = jax.tree.map(lambda d: jnp.where(stage == 0, d, jnp.zeros_like(d)), sent_back)
            (d,) = jax.vjp(lambda w: model.enter(w, i), select_chunk(shared, version(i)))[1](d_entered)
            return accumulate_at(d_shared, d, version(i))

        d_chunks, d_shared, sums = totals
        is_first = (rows["backward"][0] >= 0) & (rows["backward_chunk"][0] == 0)
        d_shared = cond(is_first, embedding_backward, lambda d_shared: d_shared, d_shared)
        slots = jax.tree.map(lambda x: checkpoint_name(x, SLOTS), {"inputs": inputs, "gradients": gradients})
        totals = d_chunks, d_shared, sums
        return {**slots, "arrived": arrived, "sent_back": sent_back, "totals": totals}, None

    return jax.lax.scan(tick, carry, jax.tree.map(jnp.asarray, table.columns))[0]


def cond(predicate: jax.Array, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
    """Apply `jax.lax.cond` in a scope of the branch's name, with barriers: XLA refuses branches of other shardings."""

    def barrier(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: jax.lax.optimization_barrier(branch(*operands))

    with jax.named_scope(f"pipeline_{yes.__name__}"):
        return jax.lax.cond(predicate, barrier(yes), barrier(no), *operands)


def shift(stream: Stream, stages: int, by: int, *, chunks: int = 1) -> Stream:
    """Send to the next stage (1) or the previous one (-1); around the ring only if stages have several chunks."""
    ring = [(s, (s + by) % stages) for s in range(stages)]
    pairs = ring if chunks > 1 else [(s, to) for s, to in ring if to - s == by]
    with in_scope(comm_scope("pipeline, from stage to stage")):
        return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), stream)


def zeros(like: Any, *leading: int) -> Any:
    """Return zeros like a tree of arrays, with leading dimensions."""
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), like)


def write_slot(slots: Any, slot: jax.Array, value: Any) -> Any:
    """Write a value into a slot; slot -1 writes nothing."""
    index = jnp.maximum(slot, 0)

    def write(x: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, jnp.where(slot >= 0, new, old), index, 0)

    return jax.tree.map(write, slots, value, read_slot(slots, index))


def accumulate_at(total: Any, d: Any, index: jax.Array) -> Any:
    """Add `d` to one index of the totals, in their dtype."""

    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        y = y.astype(x.dtype)
        if x.shape[0] == 1:
            return x + y[None]
        return jax.lax.dynamic_update_index_in_dim(x, read_slot(x, index) + y, index, 0)

    return jax.tree.map(add, total, d)
