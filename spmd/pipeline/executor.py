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
from spmd.pipeline.entrance import Entrance, FirstStageOrder, make_entrance
from spmd.pipeline.head import Head
from spmd.pipeline.interleave import AXIS
from spmd.pipeline.partition import StageModel, Stream
from spmd.pipeline.slots import (
    accumulate_at,
    put_slot,
    read_slot,
    select_chunk,
    take_slot,
    write_slot,
    zeros,
)
from spmd.pipeline.stage_layers import Microbatch, RecomputedLayers, SavedLayers, StageLayers
from spmd.pipeline.tick_table import IDLE, TickTable
from spmd.pipeline.transfers import shift
from spmd.plan.fsdp import zero_gradients

SLOTS = "stage_slots"
"""The checkpoint name of the slots with a stage's inputs, what it keeps of them, and gradients."""

Carry = dict[str, Any]
"""The carry of the scan.

It has slots for `inputs`, what is `saved` between tasks, and `gradients`; the streams `arrived`
(from the previous stage) and `sent_back` (to it in the next tick); the `statistics` of layers,
`[chunk, layer, …]`; what the entrance has `held`, within `run_ticks`; and `totals`: gradients of
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
        "statistics": model.statistics,
        "totals": (zero_gradients(chunks), zero_gradients(shared), zeros(sums, table.versions)),
    }


def _stage_layers(
    model: StageModel, chunks: Any, shared: Any, table: TickTable, empty: Stream
) -> StageLayers:
    if not table.saved_depth:
        return RecomputedLayers(model)
    firsts = jax.tree.map(lambda x: x[0], (chunks, shared, model.statistics))
    first_chunk, own, statistics = firsts
    example = Microbatch(first_chunk, own, jnp.int32(0), jnp.int32(0), statistics)
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
    head = Head.of(model, jax.tree.map(lambda x: x[0], shared), empty)
    entering = FirstStageOrder.of(table.forward[:, 0], table.forward_chunk[:, 0])
    leaving = FirstStageOrder.of(table.backward[:, 0], table.backward_chunk[:, 0])
    entrance = make_entrance(
        model,
        shared,
        empty,
        microbatches=table.microbatches,
        versions=table.versions,
        entering=entering,
        leaving=leaving,
    )
    stage = _Stage(model, layers, entrance, head, chunks, shared, scale, table, number, empty)
    ticks = jax.tree.map(jnp.asarray, (table.columns, entering.places, leaving.places))
    carry, _ = jax.lax.scan(stage.tick, {**carry, "held": entrance.held}, ticks)
    return carry


@dataclasses.dataclass(frozen=True, eq=False)
class _Stage:
    """One stage and its work in a tick.

    The functions given to `cond` have the names of the tasks: they are name scopes, and the audit
    counts the ticks of each (`TickTable.taken`).

    Attributes:
        layers: The tasks of its layers.
        entrance: The inputs of the first stage.
        head: The loss.
        chunks: Layers of the stage, `[version · chunk, layer, …]`.
        shared: All other parameters, `[version, …]`.
        scale: Factor of the loss.
        number: Number of the stage, on its devices.
        empty: A stream of zeros.
    """

    model: StageModel
    layers: StageLayers
    entrance: Entrance
    head: Head
    chunks: Any
    shared: Any
    scale: jax.Array
    table: TickTable
    number: jax.Array
    empty: Stream

    def tick(
        self, carry: Carry, ticks: tuple[dict[str, jax.Array], jax.Array, jax.Array]
    ) -> tuple[Carry, None]:
        """Run one tick.

        Args:
            ticks: A row of each column of the table, `[stage]`; and the places of the microbatches
                that enter and leave the first stage, from `FirstStageOrder`.
        """
        rows, entry, exit_ = ticks
        held_inputs, held_gradients = carry["held"]
        row = {name: column[self.number] for name, column in rows.items()}
        gradient = self._send(carry["sent_back"], by=-1)  # while the forward task computes
        inputs = write_slot(carry["inputs"], row["receive_slot"], carry["arrived"])
        entered, held_inputs = self.entrance.enter(held_inputs, entry)
        slot = jnp.where((entry >= 0) & (self.number == 0), row["forward_slot"], IDLE)
        inputs = write_slot(inputs, slot, entered)
        before = carry["saved"], carry["statistics"]
        output, saved, statistics = self._run_forward(inputs, *before, row)
        arrived = self._send(output, by=1)  # while the backward task computes
        gradients = write_slot(carry["gradients"], row["gradient_receive_slot"], gradient)
        slots = {"inputs": inputs, "saved": saved, "gradients": gradients}
        d_output, totals = self._run_head(carry["totals"], rows, saved)
        sent_back, totals, statistics = self._run_backward(totals, statistics, row, slots, d_output)
        d_chunks, d_shared, sums = totals
        d_shared, held_gradients = self.entrance.leave(held_gradients, exit_, sent_back, d_shared)
        slots = jax.tree.map(lambda x: checkpoint_name(x, SLOTS), slots)
        return {
            **slots,
            "held": (held_inputs, held_gradients),
            "arrived": arrived,
            "sent_back": sent_back,
            "statistics": statistics,
            "totals": (d_chunks, d_shared, sums),
        }, None

    def _send(self, stream: Stream, by: int) -> Stream:
        return shift(stream, self.table.stages, by, chunks=self.table.chunks)

    def _at(self, i: jax.Array, chunk: jax.Array, statistics: Any) -> Microbatch:
        """Return the arguments of a task.

        Args:
            statistics: Of all chunks. Their values count in the tasks that carry them.
        """
        layers = select_chunk(self.chunks, self._group(i, chunk))
        shared = select_chunk(self.shared, self._version(i))
        return Microbatch(layers, shared, i, chunk, select_chunk(statistics, chunk))

    def _group(self, i: jax.Array, chunk: jax.Array) -> jax.Array:
        """Return the index of a chunk of layers in the version of a microbatch."""
        return self._version(i) * self.table.chunks + chunk

    def _version(self, i: jax.Array) -> jax.Array:
        """Return the index of a microbatch's version of the weights."""
        return i // self.table.microbatches

    def _run_forward(
        self, inputs: Any, saved: Any, statistics: Any, row: dict[str, jax.Array]
    ) -> tuple[Stream, Any, Any]:
        """Run the forward task, if there is one; return output, slots and statistics after it."""

        def forward(saved: Any, statistics: Any) -> tuple[Stream, Any, Any]:
            at = self._at(row["forward"], row["forward_chunk"], statistics)
            stream = read_slot(inputs, row["forward_slot"])
            output, kept, after = self.layers.forward(at, stream)
            saved = put_slot(saved, row["forward_saved_slot"], kept)
            return output, saved, put_slot(statistics, at.chunk, after)

        def idle(saved: Any, statistics: Any) -> tuple[Stream, Any, Any]:
            return self.empty, saved, statistics

        return cond(row["forward"] >= 0, forward, idle, saved, statistics)

    def _run_head(
        self, totals: Any, rows: dict[str, jax.Array], saved: Any
    ) -> tuple[Stream | None, Any]:
        """Return the gradient of the output of the last virtual stage, and totals.

        If the output is not kept, the loss is a part of the backward task, which computes it.
        """
        i, chunk = rows["backward"][-1], rows["backward_chunk"][-1]
        kept = read_slot(saved, rows["backward_saved_slot"][-1])
        output = self.layers.output(kept)
        if output is None:
            return None, totals
        at = self._at(i, chunk, self.model.statistics)
        d_chunks, d_shared, sums = totals

        def add(d_shared: Any, sums: Sums) -> tuple[Stream, Any, Sums]:
            return self._add_loss(self.head, at, output, d_shared, sums)

        def idle(d_shared: Any, sums: Sums) -> tuple[Stream, Any, Sums]:
            return self.empty, d_shared, sums

        is_due = (i >= 0) & (chunk == self.table.chunks - 1)
        d_output, d_shared, sums = self.head.run(is_due, add, idle, d_shared, sums)
        return d_output, (d_chunks, d_shared, sums)

    def _add_loss(
        self, head: Head, at: Microbatch, output: Stream, d_shared: Any, sums: Sums
    ) -> tuple[Stream, Any, Sums]:
        """Return the gradient of the last output, and totals with those of the loss added."""
        d_own, d_output, found = head.gradients(at.shared, output, at.number, self.scale)
        d_shared = accumulate_at(d_shared, d_own, self._version(at.number))
        sums = accumulate_at(sums, found, self._version(at.number))
        return d_output, d_shared, sums

    def _run_backward(
        self,
        totals: Any,
        statistics: Any,
        row: dict[str, jax.Array],
        slots: Mapping[str, Any],
        d_output: Stream | None,
    ) -> tuple[Stream, Any, Any]:
        """Run the backward task, if there is one.

        Args:
            d_output: From `_run_head`.

        Returns:
            The gradient of the task's input, totals, and statistics.
        """

        def backward(kept: Any, totals: Any, statistics: Any) -> tuple[Stream, Any, Any]:
            at = self._at(row["backward"], row["backward_chunk"], statistics)
            stream = read_slot(slots["inputs"], row["backward_slot"])
            left, pull, after = self.layers.backward(at, stream, kept)
            arrived = read_slot(slots["gradients"], row["gradient_slot"])
            d_left, totals = self._output_gradient(at, left, arrived, d_output, totals)
            d_layers, d_own, d_entered = pull(d_left)
            d_chunks, d_shared, sums = totals
            d_chunks = accumulate_at(d_chunks, d_layers, self._group(at.number, at.chunk))
            d_shared = accumulate_at(d_shared, d_own, self._version(at.number))
            statistics = self._last_statistics(at, statistics, after)
            return d_entered, (d_chunks, d_shared, sums), statistics

        def idle(kept: Any, totals: Any, statistics: Any) -> tuple[Stream, Any, Any]:
            return self.empty, totals, statistics

        kept = take_slot(slots["saved"], row["backward_saved_slot"])
        return cond(row["backward"] >= 0, backward, idle, kept, totals, statistics)

    def _is_last(self, at: Microbatch) -> jax.Array:
        """Return whether a task is of the last virtual stage."""
        return self.head.is_last & (at.chunk == self.table.chunks - 1)

    def _last_statistics(self, at: Microbatch, statistics: Any, after: Any) -> Any:
        """Return statistics after a backward task.

        If nothing is kept, the last virtual stage has no forward tasks.
        """
        if after is None:
            return statistics
        is_last = self._is_last(at)
        chosen = jax.tree.map(lambda x, y: jnp.where(is_last, x, y), after, at.statistics)
        return put_slot(statistics, at.chunk, chosen)

    def _output_gradient(
        self, at: Microbatch, left: Stream, arrived: Stream, d_output: Stream | None, totals: Any
    ) -> tuple[Stream, Any]:
        """Return the gradient of the output of a backward task, and totals.

        It has arrived from the next stage, but for the last virtual stage.
        """
        is_last = self._is_last(at)
        if d_output is not None:
            return jax.tree.map(lambda x, y: jnp.where(is_last, x, y), d_output, arrived), totals
        d_chunks, d_shared, sums = totals

        def from_loss(d_shared: Any, sums: Sums) -> tuple[Stream, Any, Sums]:
            return self._add_loss(self.head.of_last_stage, at, left, d_shared, sums)

        def from_next_stage(d_shared: Any, sums: Sums) -> tuple[Stream, Any, Sums]:
            return arrived, d_shared, sums

        d_left, d_shared, sums = cond(is_last, from_loss, from_next_stage, d_shared, sums)
        return d_left, (d_chunks, d_shared, sums)
