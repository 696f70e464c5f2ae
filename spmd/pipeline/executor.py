"""The loop over the ticks of a pipeline: what every stage does in each, by the tables of a `TickTable`.

```
what the stage before sent ──▶ slots ──▶ forward task ──▶ to the stage behind, while the backward task computes
                                  │
                                  ▼
to the stage before ◀────── backward task (forward again, then its derivative) ◀── the gradient, from its slot
while the forward task computes        └──▶ added to the stage's gradients
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
from spmd.plan.fsdp import accumulation_dtype

SLOTS = "stage_inputs"
"""The checkpoint name of the slots in which a stage keeps its inputs until they are used."""

Carry = dict[str, Any]
"""What goes from tick to tick: slots for `inputs` and `gradients`, what `arrived` and what is to be `sent_back`, and
`totals`: gradients of layers `[version · chunk, …]`, all other gradients and sums `[version, …]`."""


def first_carry(model: StageModel, chunks: Any, shared: Any, table: TickTable) -> Carry:
    """The carry of a pipeline with nothing in it."""
    stream, sums = model.shapes(shared)
    empty = zeros(stream)

    def total(like: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), like)

    return {
        "inputs": zeros(stream, table.depth),
        "gradients": zeros(stream, table.gradient_depth),
        "arrived": empty,
        "sent_back": empty,
        "totals": (total(chunks), total(shared), zeros(sums, table.versions)),
    }


def run_ticks(model: StageModel, chunks: Any, shared: Any, scale: jax.Array, table: TickTable, carry: Carry) -> Carry:
    """What one stage does.

    Args:
        model: The parts of the loss function.
        chunks: The stage's layers, `[version · chunk, layer, …]`.
        shared: All other parameters, `[version, …]`.
        scale: Of the loss.
        table: The tables.
        carry: From `first_carry`, or of the ticks before.
    """
    stage = jax.lax.axis_index(AXIS)
    empty = zeros(carry["arrived"])
    move = functools.partial(shift, stages=table.stages, chunks=table.chunks)

    def version(i: jax.Array) -> jax.Array:
        return i // table.microbatches

    def tick(carry: Carry, row: dict[str, jax.Array]) -> tuple[Carry, None]:
        do = {name: column[stage] for name, column in row.items()}
        arrived_back = move(carry["sent_back"], by=-1)  # while the forward task computes
        inputs = write_slot(carry["inputs"], do["arrives"], carry["arrived"])

        # The embedding is looked up on all stages at once: no stage waits for it, and no matrix is multiplied.
        i = row["forward"][0]
        begins = (i >= 0) & (row["forward_chunk"][0] == 0)
        entered = cond(begins, lambda: model.enter(select_chunk(shared, version(i)), i), lambda: empty)
        inputs = write_slot(inputs, jnp.where(begins & (stage == 0), do["forward_slot"], IDLE), entered)

        def forward() -> Stream:
            i, chunk = do["forward"], do["forward_chunk"]
            layers = select_chunk(chunks, version(i) * table.chunks + chunk)
            return model.inside(
                layers, select_chunk(shared, version(i)), read_slot(inputs, do["forward_slot"]), i, chunk
            )

        arrived = move(cond(do["forward"] >= 0, forward, lambda: empty), by=1)  # while the backward one does
        gradients = write_slot(carry["gradients"], do["gradient_arrives"], arrived_back)

        def backward(totals: Any) -> tuple[Stream, Any]:
            i, chunk = do["backward"], do["backward_chunk"]
            own, group = select_chunk(shared, version(i)), version(i) * table.chunks + chunk
            d_chunks, d_shared, sums = totals
            left, pull = jax.vjp(
                lambda layers, shared, stream: model.inside(layers, shared, stream, i, chunk),
                *(select_chunk(chunks, group), own, read_slot(inputs, do["backward_slot"])),
            )

            def from_loss(d_shared: Any, sums: Any) -> tuple[Stream, Any, Any]:
                _, pull, found = jax.vjp(lambda shared, x: model.leave(shared, x, i), own, left, has_aux=True)
                d, d_left = pull(scale)
                return d_left, accumulate_at(d_shared, d, version(i)), accumulate_at(sums, found, version(i))

            def from_behind(d_shared: Any, sums: Any) -> tuple[Stream, Any, Any]:
                return read_slot(gradients, do["gradient_slot"]), d_shared, sums

            ends = (stage == table.stages - 1) & (chunk == table.chunks - 1)
            d_left, d_shared, sums = cond(ends, from_loss, from_behind, d_shared, sums)
            d_layers, d, d_entered = pull(d_left)
            return d_entered, (accumulate_at(d_chunks, d_layers, group), accumulate_at(d_shared, d, version(i)), sums)

        sent_back, totals = cond(do["backward"] >= 0, backward, lambda totals: (empty, totals), carry["totals"])

        def into_embedding(d_shared: Any) -> Any:
            i = row["backward"][0]
            of_first = jax.tree.map(lambda d: jnp.where(stage == 0, d, jnp.zeros_like(d)), sent_back)
            (d,) = jax.vjp(lambda w: model.enter(w, i), select_chunk(shared, version(i)))[1](of_first)
            return accumulate_at(d_shared, d, version(i))

        d_chunks, d_shared, sums = totals
        begins = (row["backward"][0] >= 0) & (row["backward_chunk"][0] == 0)
        d_shared = cond(begins, into_embedding, lambda d_shared: d_shared, d_shared)
        totals = d_chunks, d_shared, sums
        slots = jax.tree.map(lambda x: checkpoint_name(x, SLOTS), {"inputs": inputs, "gradients": gradients})
        return {**slots, "arrived": arrived, "sent_back": sent_back, "totals": totals}, None

    rows = {name: jnp.asarray(column) for name, column in table.columns.items()}
    return jax.lax.scan(tick, carry, rows)[0]


def cond(predicate: jax.Array, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
    """`jax.lax.cond`, whose branches end in no sharding constraint: XLA refuses two that end in different ones."""

    def ended(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: jax.lax.optimization_barrier(branch(*operands))

    return jax.lax.cond(predicate, ended(yes), ended(no), *operands)


def shift(stream: Stream, stages: int, by: int, *, chunks: int = 1) -> Stream:
    """To the stage behind (1) or before (-1); round the ring only where stages have several chunks."""
    ring = [(s, (s + by) % stages) for s in range(stages)]
    pairs = ring if chunks > 1 else [(s, to) for s, to in ring if to - s == by]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), stream)


def zeros(like: Any, *leading: int) -> Any:
    """Zeros like some arrays, with dimensions in front."""
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), like)


def write_slot(slots: Any, slot: jax.Array, value: Any) -> Any:
    """The slots with `value` in one of them; as they are, for slot -1."""
    where = jnp.maximum(slot, 0)

    def one(x: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, jnp.where(slot >= 0, new, old), where, 0)

    return jax.tree.map(one, slots, value, read_slot(slots, where))


def accumulate_at(total: Any, d: Any, which: jax.Array) -> Any:
    """The parts with `d` added to one of them, in their dtype."""

    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        y = y.astype(x.dtype)
        if x.shape[0] == 1:
            return x + y[None]
        return jax.lax.dynamic_update_index_in_dim(x, read_slot(x, which) + y, which, 0)

    return jax.tree.map(add, total, d)
