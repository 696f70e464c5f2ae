"""The scan over the ticks of a `TickTable`: the work of one stage in each tick.

```
input from the ──▶ slots ──▶ forward task ──▶ to the next stage,
previous stage                   │             while the backward task computes
                                 ▼
                        slots of what is kept (spmd.pipeline.stage_layers)
                                 │
                                 ├──▶ loss, from the output of the last stage
                                 ▼
to the previous  ◀───────── backward task ◀── gradient from the next stage, in its slot
stage, while the                 │
forward task computes            └──▶ accumulated into the stage's gradients
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from spmd.gradients.losses import Sums
from spmd.pipeline.branches import cond
from spmd.pipeline.head import Head
from spmd.pipeline.interleave import AXIS
from spmd.pipeline.partition import StageModel, Stream, read_slot, select_chunk
from spmd.pipeline.stage_layers import Microbatch, RecomputedLayers, SavedLayers, StageLayers
from spmd.pipeline.tick_table import IDLE, TickTable
from spmd.plan.fsdp import zero_gradients
from spmd.plan.scopes import comm_scope, in_scope

SLOTS = "stage_slots"
"""The checkpoint name of the slots with a stage's inputs, what it keeps of them, and gradients."""

Carry = dict[str, Any]
"""The carry of the scan.

It has slots for `inputs`, what is `saved` between tasks, and `gradients`; the streams `arrived`
(from the previous stage) and `sent_back` (to it in the next tick); and `totals`: gradients of
layers `[version · chunk, …]`, of all other parameters `[version, …]`, and sums `[version]`.
"""


def first_carry(
    model: StageModel, chunks: Any, shared: Any, table: TickTable
) -> tuple[StageLayers, Carry]:
    """Return the tasks of a stage's layers, and the carry of an empty pipeline.

    Arguments are those of `run_ticks`.
    """
    stream, sums = model.shapes(shared)
    empty = zeros(stream)
    layers = _stage_layers(model, chunks, shared, table, empty)
    return layers, {
        "inputs": zeros(stream, table.depth),
        "saved": zeros(layers.saved, table.saved_depth),
        "gradients": zeros(stream, table.gradient_depth),
        "arrived": empty,
        "sent_back": empty,
        "totals": (zero_gradients(chunks), zero_gradients(shared), zeros(sums, table.versions)),
    }


def _stage_layers(
    model: StageModel, chunks: Any, shared: Any, table: TickTable, empty: Stream
) -> StageLayers:
    if not table.saved_depth:
        return RecomputedLayers(model)
    first_chunk, own = jax.tree.map(lambda x: x[0], (chunks, shared))
    example = Microbatch(first_chunk, own, jnp.int32(0), jnp.int32(0))
    return SavedLayers(model, example, empty)


def run_ticks(
    model: StageModel,
    layers: StageLayers,
    chunks: Any,
    shared: Any,
    scale: jax.Array,
    table: TickTable,
    carry: Carry,
) -> Carry:
    """Run all ticks of one stage.

    Args:
        layers: From `first_carry`.
        chunks: Layers of the stage, `[version · chunk, layer, …]`.
        shared: All other parameters, `[version, …]`.
        scale: Factor of the loss.
    """
    number = jax.lax.axis_index(AXIS)
    empty = zeros(carry["arrived"])
    head = Head.of_last_stage(model)
    if layers.saved:
        head = Head.of_all_stages(model, jax.tree.map(lambda x: x[0], shared), empty)
    stage = _Stage(model, layers, head, chunks, shared, scale, table, number, empty)
    columns = jax.tree.map(jnp.asarray, table.columns)
    carry, _ = jax.lax.scan(stage.tick, carry, columns)
    return carry


@dataclasses.dataclass(frozen=True, eq=False)
class _Stage:
    """One stage and its work in a tick.

    The functions given to `cond` have the names of the tasks: they are name scopes, and the audit
    counts the ticks of each (`TickTable.taken`).

    Attributes:
        layers: The tasks of its layers.
        head: The loss.
        chunks: Layers of the stage, `[version · chunk, layer, …]`.
        shared: All other parameters, `[version, …]`.
        scale: Factor of the loss.
        number: Number of the stage, on its devices.
        empty: A stream of zeros.
    """

    model: StageModel
    layers: StageLayers
    head: Head
    chunks: Any
    shared: Any
    scale: jax.Array
    table: TickTable
    number: jax.Array
    empty: Stream

    def tick(self, carry: Carry, rows: dict[str, jax.Array]) -> tuple[Carry, None]:
        """Run one tick, given a row of each column of the table, `[stage]`."""
        row = {name: column[self.number] for name, column in rows.items()}
        gradient = self._send(carry["sent_back"], by=-1)  # while the forward task computes
        inputs = write_slot(carry["inputs"], row["receive_slot"], carry["arrived"])
        inputs = self._write_embedding(inputs, rows, row)
        output, saved = self._run_forward(inputs, carry["saved"], row)
        arrived = self._send(output, by=1)  # while the backward task computes
        gradients = write_slot(carry["gradients"], row["gradient_receive_slot"], gradient)
        slots = {"inputs": inputs, "saved": saved, "gradients": gradients}
        d_output, totals = self._run_head(carry["totals"], rows, saved)
        sent_back, totals = self._run_backward(totals, row, slots, d_output)
        d_chunks, d_shared, sums = totals
        d_shared = self._run_embedding_backward(d_shared, rows, sent_back)
        slots = jax.tree.map(lambda x: checkpoint_name(x, SLOTS), slots)
        totals = d_chunks, d_shared, sums
        return {**slots, "arrived": arrived, "sent_back": sent_back, "totals": totals}, None

    def _send(self, stream: Stream, by: int) -> Stream:
        return shift(stream, self.table.stages, by, chunks=self.table.chunks)

    def _at(self, i: jax.Array, chunk: jax.Array) -> Microbatch:
        """Return the arguments of a task."""
        layers = select_chunk(self.chunks, self._group(i, chunk))
        return Microbatch(layers, select_chunk(self.shared, self._version(i)), i, chunk)

    def _group(self, i: jax.Array, chunk: jax.Array) -> jax.Array:
        """Return the index of a chunk of layers in the version of a microbatch."""
        return self._version(i) * self.table.chunks + chunk

    def _version(self, i: jax.Array) -> jax.Array:
        """Return the index of a microbatch's version of the weights."""
        return i // self.table.microbatches

    def _write_embedding(
        self, inputs: Any, rows: dict[str, jax.Array], row: dict[str, jax.Array]
    ) -> Any:
        """Write the input of the first layer into the slots of the first stage.

        All stages look up the embedding in the same tick: no stage waits for another, and a lookup
        has no matmul.
        """
        i = rows["forward"][0]
        is_first = (i >= 0) & (rows["forward_chunk"][0] == 0)

        def embedding() -> Stream:
            return self.model.embed(select_chunk(self.shared, self._version(i)), i)

        entered = cond(is_first, embedding, lambda: self.empty)
        slot = jnp.where(is_first & (self.number == 0), row["forward_slot"], IDLE)
        return write_slot(inputs, slot, entered)

    def _run_forward(
        self, inputs: Any, saved: Any, row: dict[str, jax.Array]
    ) -> tuple[Stream, Any]:
        """Run the forward task, if there is one; return its output and the slots after it."""

        def forward(saved: Any) -> tuple[Stream, Any]:
            at = self._at(row["forward"], row["forward_chunk"])
            stream = read_slot(inputs, row["forward_slot"])
            output, kept = self.layers.forward(at, stream)
            return output, put_slot(saved, row["forward_saved_slot"], kept)

        def idle(saved: Any) -> tuple[Stream, Any]:
            return self.empty, saved

        return cond(row["forward"] >= 0, forward, idle, saved)

    def _run_head(
        self, totals: Any, rows: dict[str, jax.Array], saved: Any
    ) -> tuple[Stream | None, Any]:
        """Return the gradient of the output of the last virtual stage, and totals.

        If the output is not kept, the loss is a part of the backward task, which computes it.
        """
        i, chunk = rows["backward"][-1], rows["backward_chunk"][-1]
        kept = read_slot(saved, rows["backward_saved_slot"][-1])
        at = self._at(i, chunk)
        output = self.layers.output(at, kept)
        if output is None:
            return None, totals
        d_chunks, d_shared, sums = totals

        def add(d_shared: Any, sums: Sums) -> tuple[Stream, Any, Sums]:
            return self._add_loss(at, output, d_shared, sums)

        def idle(d_shared: Any, sums: Sums) -> tuple[Stream, Any, Sums]:
            return self.empty, d_shared, sums

        is_due = (i >= 0) & (chunk == self.table.chunks - 1)
        d_output, d_shared, sums = self.head.run(is_due, add, idle, d_shared, sums)
        return d_output, (d_chunks, d_shared, sums)

    def _add_loss(
        self, at: Microbatch, output: Stream, d_shared: Any, sums: Sums
    ) -> tuple[Stream, Any, Sums]:
        """Return the gradient of the last output, and totals with those of the loss added."""
        d_own, d_output, found = self.head.gradients(at.shared, output, at.number, self.scale)
        d_shared = accumulate_at(d_shared, d_own, self._version(at.number))
        sums = accumulate_at(sums, found, self._version(at.number))
        return d_output, d_shared, sums

    def _run_backward(
        self,
        totals: Any,
        row: dict[str, jax.Array],
        slots: Mapping[str, Any],
        d_output: Stream | None,
    ) -> tuple[Stream, Any]:
        """Run the backward task, if there is one; return the gradient of its input, and totals.

        Args:
            d_output: From `_run_head`.
        """

        def backward(kept: Any, totals: Any) -> tuple[Stream, Any]:
            at = self._at(row["backward"], row["backward_chunk"])
            stream = read_slot(slots["inputs"], row["backward_slot"])
            left, pull = self.layers.backward(at, stream, kept)
            arrived = read_slot(slots["gradients"], row["gradient_slot"])
            d_left, totals = self._output_gradient(at, left, arrived, d_output, totals)
            d_layers, d_own, d_entered = pull(d_left)
            d_chunks, d_shared, sums = totals
            d_chunks = accumulate_at(d_chunks, d_layers, self._group(at.number, at.chunk))
            d_shared = accumulate_at(d_shared, d_own, self._version(at.number))
            return d_entered, (d_chunks, d_shared, sums)

        def idle(kept: Any, totals: Any) -> tuple[Stream, Any]:
            return self.empty, totals

        kept = take_slot(slots["saved"], row["backward_saved_slot"])
        return cond(row["backward"] >= 0, backward, idle, kept, totals)

    def _output_gradient(
        self, at: Microbatch, left: Stream, arrived: Stream, d_output: Stream | None, totals: Any
    ) -> tuple[Stream, Any]:
        """Return the gradient of the output of a backward task, and totals.

        It has arrived from the next stage, but for the last virtual stage.
        """
        is_last = self.head.is_last & (at.chunk == self.table.chunks - 1)
        if d_output is not None:
            return jax.tree.map(lambda x, y: jnp.where(is_last, x, y), d_output, arrived), totals
        d_chunks, d_shared, sums = totals

        def from_loss(d_shared: Any, sums: Sums) -> tuple[Stream, Any, Sums]:
            return self._add_loss(at, left, d_shared, sums)

        def from_next_stage(d_shared: Any, sums: Sums) -> tuple[Stream, Any, Sums]:
            return arrived, d_shared, sums

        d_left, d_shared, sums = cond(is_last, from_loss, from_next_stage, d_shared, sums)
        return d_left, (d_chunks, d_shared, sums)

    def _run_embedding_backward(
        self, d_shared: Any, rows: dict[str, jax.Array], sent_back: Stream
    ) -> Any:
        """Add the gradient of the embedding to the totals, on all stages in the same tick."""

        def embedding_backward(d_shared: Any) -> Any:
            i = rows["backward"][0]
            d_entered = jax.tree.map(
                lambda d: jnp.where(self.number == 0, d, jnp.zeros_like(d)), sent_back
            )
            own = select_chunk(self.shared, self._version(i))
            _, pull = jax.vjp(lambda shared: self.model.embed(shared, i), own)
            (d_own,) = pull(d_entered)
            return accumulate_at(d_shared, d_own, self._version(i))

        is_first = (rows["backward"][0] >= 0) & (rows["backward_chunk"][0] == 0)
        return cond(is_first, embedding_backward, lambda d_shared: d_shared, d_shared)


def shift(stream: Stream, stages: int, by: int, *, chunks: int = 1) -> Stream:
    """Send to the next stage (1) or the previous one (-1).

    The last stage sends to the first, or back, only if stages have several chunks.
    """
    pairs = list[tuple[int, int]]()
    for source in range(stages):
        target = (source + by) % stages
        is_neighbour = target - source == by
        if is_neighbour or chunks > 1:
            pairs.append((source, target))
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


def take_slot(slots: Any, slot: jax.Array) -> Any:
    """Return the contents of a slot for a task, outside of its branch.

    In the branch, XLA brings all slots of an array into the layout that a product prefers, in each
    tick, to read one. Operands of a branch have the layout of the slots.
    """
    return jax.lax.optimization_barrier(read_slot(slots, slot))


def put_slot(slots: Any, slot: jax.Array, value: Any) -> Any:
    """Write a value into a slot."""

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, new, slot, 0)

    return jax.tree.map(put, slots, value)


def accumulate_at(total: Any, d: Any, index: jax.Array) -> Any:
    """Add `d` to one index of the totals, in their dtype."""

    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        y = y.astype(x.dtype)
        if x.shape[0] == 1:
            return x + y[None]
        return jax.lax.dynamic_update_index_in_dim(x, read_slot(x, index) + y, index, 0)

    return jax.tree.map(add, total, d)
