"""Run of a schedule on one device: start of each operation, waiting, and time by activity."""

import collections
import dataclasses
from typing import NamedTuple

from spmd.chips import Hardware, Rates
from spmd.step_time.network import Network
from spmd.step_time.program import ProgramSchedule, ScheduledBlock, ScheduledOp, Transfer


class Span(NamedTuple):
    """Occupation of a lane by one operation, in seconds.

    A lane is the device, the network, or a link to the host.
    """

    name: str
    lane: str
    what: str
    start: float
    seconds: float


def _sums() -> dict[str, float]:
    return collections.defaultdict(float)


@dataclasses.dataclass
class StepTimeline:
    """Result of a run.

    Attributes:
        seconds: Length of the step.
        spent: Activity of the device → seconds; they add up to the length.
        exposed: Collective → seconds in which the device only waits for it.
        moving: Collective → seconds in which it is moved.
        uncounted: Loops of unknown length, counted once, and branches of unknown share, counted in
            equal parts.
        spans: In order of their start, if they were asked for.
    """

    seconds: float = 0.0
    spent: dict[str, float] = dataclasses.field(default_factory=_sums)
    exposed: dict[str, float] = dataclasses.field(default_factory=_sums)
    moving: dict[str, float] = dataclasses.field(default_factory=_sums)
    uncounted: dict[str, None] = dataclasses.field(default_factory=dict)
    spans: list[Span] = dataclasses.field(default_factory=list)


_PASSES = {"all-gather": 2, "reduce-scatter": 5, "all-reduce": 7, "to host": 1, "from host": 1}
"""Times that the bytes of a transfer pass through the device's memory.

Data that arrives over a ring is written, and read to be sent on. In a reduction it is written, it
and the device's own part are read, and their sum is written, and read to be sent on.
"""

_STEADY = 4
"""Iterations of a loop after which each takes as long as the last.

Transfers of one iteration may end in the next.
"""

_LABELS = {
    "matmul": "matmuls",
    "attention": "attention",
    "kernel": "other kernels, by their bytes",
    "memory": "memory-bound work",
}


def run_schedule(
    schedule: ProgramSchedule,
    network: Network,
    clock: float,
    rates: Rates,
    *,
    keep_spans: bool = False,
) -> StepTimeline:
    """Run a schedule on a device with a clock in Hz.

    Transfers over the same links wait for each other. A synchronous transfer, for which the device
    waits, goes before those in the background: it is alone on its links, and delays them by its
    length. The bytes of a hidden transfer pass through the device's memory and delay the device by
    the time of these passes.
    """
    run = _Run(network, clock, rates, keep_spans)
    run.execute(schedule, 1.0)
    run.line.seconds = sum(run.line.spent.values())
    return run.line


class _Moving(NamedTuple):
    """Transfer in the background: its end, its own seconds, and its links."""

    end: float
    seconds: float
    links: tuple[str, ...]


class _Run:
    """State of a device: the time now, and the end of background transfers on each link."""

    def __init__(self, network: Network, clock: float, rates: Rates, keep_spans: bool) -> None:
        self.network = network
        self.clock = clock
        self.rates = rates
        self.keep_spans = keep_spans
        self.hardware: Hardware = network.hardware
        self.line = StepTimeline()
        self.now = 0.0
        # Share of the cases in which the current branch is taken; it scales all durations inside.
        self.share = 1.0
        self.free: dict[str, float] = collections.defaultdict(float)
        self.moving: dict[tuple[str, ...], _Moving] = {}

    def execute(self, schedule: ProgramSchedule, times: float) -> None:
        """Run a schedule once, and count its seconds `times` times in the sums."""
        for entry in schedule:
            if isinstance(entry, ScheduledBlock):
                self._block(entry, times)
            else:
                self._operation(entry, times)

    def _block(self, block: ScheduledBlock, times: float) -> None:
        """Run a loop, or a branch in its share of the cases."""
        turns = float(block.times)
        if not block.is_counted:
            self.line.uncounted[block.name] = None
        if turns < 1:
            self._branch(block, turns, times)
            return
        whole = int(turns)
        steady = whole if self.keep_spans else _STEADY
        for _ in range(min(whole, steady) - 1):
            self.execute(block.body, times)
        before = self._totals()
        self.execute(block.body, times)
        if whole > steady:
            self._repeat(before, whole - steady)

    def _branch(self, block: ScheduledBlock, share: float, times: float) -> None:
        around = self.share
        self.share *= share
        if share:
            self.execute(block.body, times)
        self.share = around

    def _tables(self) -> tuple[dict[str, float], ...]:
        """Return the tables of seconds: spent, exposed and moving."""
        return self.line.spent, self.line.exposed, self.line.moving

    def _totals(self) -> tuple[float, list[dict[str, float]]]:
        return self.now, [dict(table) for table in self._tables()]

    def _repeat(self, before: tuple[float, list[dict[str, float]]], turns: int) -> None:
        """Add the increments of one iteration of a loop, several times."""
        start, tables = before
        for table, old in zip(self._tables(), tables, strict=True):
            for name, total in table.items():
                table[name] = total + turns * (total - old.get(name, 0.0))
        later = turns * (self.now - start)
        self.now += later
        for link in self.free:
            self.free[link] += later
        for key, moving in self.moving.items():
            self.moving[key] = moving._replace(end=moving.end + later)

    def _operation(self, operation: ScheduledOp, times: float) -> None:
        if operation.kind == "start":
            self._start(operation, times)
        elif operation.kind == "done":
            self._finish(operation, times)
        elif operation.kind == "transfer":
            self._start(operation, times, at_once=True)
            self._finish(operation, times)
        else:
            self._spend(operation.name, _LABELS[operation.kind], self._seconds(operation), times)

    def _seconds(self, operation: ScheduledOp) -> float:
        """Return the time of an operation on the device."""
        if operation.kind in ("attention", "kernel"):
            return self.share * self._kernel_seconds(operation)
        seconds = operation.cycles / self.clock * self.share
        if operation.kind == "matmul":
            return seconds * self.rates.matmul
        return seconds * self.rates.memory

    def _kernel_seconds(self, operation: ScheduledOp) -> float:
        """Return the time of a Pallas kernel, by its bytes and its FLOPs."""
        moved = operation.bytes / self.hardware.memory_bandwidth
        if not operation.flops:
            return max(0.0, moved)
        peak = self.hardware.attention_peak(operation.width) * self.rates.attention
        return max(operation.flops / peak, moved)

    def _start(self, operation: ScheduledOp, times: float, *, at_once: bool = False) -> None:
        """Start a transfer: at once, or in the background as soon as its links are free."""
        transfer = operation.transfer
        assert transfer is not None
        lane, links, length = self._route(transfer)
        length *= self.share
        begin = self.now
        if at_once:
            self._delay(links, length)
        else:
            for link in links:
                begin = max(begin, self.free[link])
        end = begin + length
        for link in links:
            self.free[link] = max(self.free[link], end)
        self.moving[operation.key] = _Moving(end, length, links)
        self.line.moving[transfer.instruction] += length * times
        if self.keep_spans:
            name = f"{transfer.kind} {transfer.instruction}"
            self.line.spans.append(Span(name, lane, transfer.over, begin, length))

    def _route(self, transfer: Transfer) -> tuple[str, tuple[str, ...], float]:
        """Return the lane and the links of a transfer, and its seconds alone on them."""
        if transfer.over == "host":
            seconds = transfer.payload / self.hardware.host
            return transfer.kind, (transfer.kind,), seconds
        links = self.network.links(transfer.group)
        seconds = self.network.seconds(transfer.kind, transfer.payload, transfer.group)
        return "network", links, seconds

    def _delay(self, links: tuple[str, ...], seconds: float) -> None:
        """Delay the transfers over some links in the background."""
        for key, moving in self.moving.items():
            if moving.end > self.now and set(links) & set(moving.links):
                end = moving.end + seconds
                self.moving[key] = moving._replace(end=end)
                for link in moving.links:
                    self.free[link] = max(self.free[link], end)

    def _finish(self, operation: ScheduledOp, times: float) -> None:
        """Wait for the end of a transfer.

        Add the time of the passes of its hidden part through memory: compute beside the transfer
        had less bandwidth.
        """
        transfer = operation.transfer
        assert transfer is not None
        moving = self.moving.pop(operation.key, _Moving(self.now, 0.0, ()))
        wait = max(0.0, moving.end - self.now)
        self.line.exposed[transfer.instruction] += wait * times
        label = f"exposed collectives over {transfer.over}"
        if transfer.over == "host":
            label = "host transfers"
        self._spend(f"wait for {transfer.instruction}", label, wait, times)
        if moving.seconds > wait:
            hidden = self.share * (1 - wait / moving.seconds)
            moved = _PASSES.get(transfer.kind, 2) * transfer.payload
            passed = moved / self.hardware.memory_bandwidth
            name = f"memory of {transfer.instruction}"
            self._spend(name, "memory of hidden transfers", hidden * passed, times)

    def _spend(self, name: str, label: str, seconds: float, times: float) -> None:
        if not seconds:
            return
        if self.keep_spans:
            self.line.spans.append(Span(name, "device", label, self.now, seconds))
        self.line.spent[label] += seconds * times
        self.now += seconds
