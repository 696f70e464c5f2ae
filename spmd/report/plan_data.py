"""Contents of a plan's report: what is decided, predicted and compiled, as plain values without HTML.

Each figure is one that `spmd plan` prints; nothing is computed a second time here.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from spmd.analysis.collective_audit import CollectiveAudit
from spmd.analysis.memory import CATEGORIES, MemoryReport
from spmd.analysis.topology import Topology, missing_extra
from spmd.distributed.initialize import initialize
from spmd.errors import ConfigError, SpmdError
from spmd.observe.metrics import human_count, human_duration
from spmd.observe.waiting import show_waiting
from spmd.pipeline.simulate import Timeline as PipelineTimeline
from spmd.pipeline.simulate import simulate
from spmd.plan.plan import TABLES, ShardingPlan
from spmd.plan.records import PlanEntry
from spmd.report.shards import DeviceMap, ShardPicture, map_devices, shard_pictures
from spmd.run.build import TrainSetup, make_setup
from spmd.run.describe import execution_lines
from spmd.run.preflight import compile_step, estimate_step, preflight, topology_mesh
from spmd.run.step_time import estimate_time, time_program
from spmd.step_time.hardware import HARDWARE
from spmd.step_time.report import CollectiveTime, StepTime
from spmd.step_time.timeline import Span
from spmd.tree import human_bytes

RESOLUTION = 1500
"""Parts of a step: of shorter operations in one part, only what takes the most of it is drawn."""


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind over some axes for one cause; `bytes` of one device, and `runs`, are of one step."""

    kind: str
    over: str
    dtypes: str
    bytes: int
    runs: int
    cause: str
    time: CollectiveTime | None


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """Contents of a plan's report.

    Attributes:
        name: Config, as it was named.
        time: Predicted step; None for simulated devices, and for models whose FLOPs are not known.
        audit: Collectives of the compiled step; None if it was not compiled.
        spans: Timeline of the compiled step on a TPU.
        schedule: Simulated pipeline, in units of a stage's forward pass.
        notes: Parts that are missing, each with its reason.
    """

    name: str
    setup: TrainSetup
    topology: Topology
    memory: MemoryReport
    time: StepTime | None
    audit: CollectiveAudit | None
    spans: tuple[Span, ...]
    schedule: PipelineTimeline | None
    devices: DeviceMap
    notes: tuple[str, ...]

    @property
    def plan(self) -> ShardingPlan:
        """Sharding plan of the config."""
        return self.setup.plan

    def pictures(self) -> tuple[ShardPicture, ...]:
        """Return one picture for each rule, of its largest parameter."""
        return shard_pictures(self.plan)

    def facts(self) -> list[tuple[str, str]]:
        """Return label → value of the figures that come first."""
        plan, memory = self.plan, self.memory
        total, limit = human_bytes(memory.total), memory.topology.memory
        verdict = {True: "fits", False: "DOES NOT FIT", None: ""}[memory.fits]
        found = [
            ("parameters", human_count(sum(math.prod(entry.shape) for entry in plan.params))),
            ("devices", f"{plan.mesh.size:,}"),
            ("mesh", " × ".join(f"{axis} {size}" for axis, size in plan.mesh.shape.items() if size > 1) or "1 device"),
            ("memory of a device", f"{total} of {human_bytes(limit)}: {verdict}" if limit else total),
        ]
        if self.time:
            low, high = map(human_duration, self.time.range)
            found += [
                ("predicted step", f"{human_duration(self.time.seconds)} ({low} to {high})"),
                ("tokens/s on a chip", f"{self.time.tokens_per_second:,.0f}"),
                ("MFU", f"{self.time.mfu:.1%}"),
            ]
        if self.audit:
            found.append(("sent by a device", f"{human_bytes(self.audit.bytes())} in a step"))
        return found

    def decisions(self) -> str:
        """Return the lines of the plan that are not about one array."""
        device = self.topology.platform, self.topology.chip.device_kind
        return f"{self.plan.heading}{execution_lines(self.setup, device)}"

    def held(self) -> dict[str, int]:
        """Return table → bytes that each device holds."""
        return {name.replace("_", " "): size for name, size in self.plan.bytes_per_device().items() if size}

    def arrays(self) -> Iterator[tuple[str, PlanEntry]]:
        """Yield (table, entry) for each array of the training state and each gradient."""
        for table in TABLES:
            yield from ((table, entry) for entry in getattr(self.plan, table))

    def memory_rows(self) -> list[tuple[str, dict[str, int]]]:
        """Return the bars of memory: label → bytes of one device by category."""
        estimate = self.memory.estimated
        once = {name: size for name, size in estimate.held.items() if name not in ("collectives", "temporaries")}
        bars = [("each array once", once), ("live at the peak", dict(estimate.at_peak))]
        rows = [(label, {CATEGORIES[name]: size for name, size in bar.items() if size}) for label, bar in bars]
        if compiled := self.memory.compiled:
            rows.append(("compiled", {"arguments": compiled.arguments, "temporaries": compiled.temporaries}))
        return rows

    def memory_over_time(self, most: int = 600) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the times of the traced step, and label → bytes from each of them on.

        Of more times than `most`, those of one part of the step are drawn as the one with the most bytes.
        """
        times, used = self.memory.estimated.over_time()
        parts = np.linspace(0, len(times), min(most, len(times)) + 1).astype(int)
        total = sum(used.values(), np.zeros(len(times), dtype=np.int64))
        chosen = [low + int(np.argmax(total[low:high])) for low, high in itertools.pairwise(parts)]
        labelled = {CATEGORIES[name]: values[chosen] for name, values in used.items() if values.any()}
        return times[parts[:-1]], labelled

    def collective_bytes(self) -> dict[str, dict[str, int]]:
        """Return mesh axes → kind → bytes that a device sends in one step."""
        found: dict[str, dict[str, int]] = {}
        for (kind, over), records in self.audit.by_axes().items() if self.audit else ():
            found.setdefault(over, {})[kind] = sum(record.bytes for record in records)
        return found

    def collective_seconds(self) -> dict[str, dict[str, float]]:
        """Return mesh axes → predicted seconds of their collectives in one step: exposed, and hidden behind compute."""
        found: dict[str, dict[str, float]] = {}
        for took in self.time.collectives if self.time else ():
            sums = found.setdefault(took.over, {"exposed": 0.0, "hidden": 0.0})
            sums["exposed"] += took.exposed
            sums["hidden"] += took.hidden
        return found

    def collectives(self) -> list[CollectiveRow]:
        """Return one row for each kind, axes and cause of collectives that are executed, the most bytes first."""
        times = {(c.kind, c.over, c.cause): c for c in (self.time.collectives if self.time else ())}
        groups = collections.defaultdict(list)
        for record in self.audit.records if self.audit else ():
            if record.executions:
                groups[record.kind, record.over, str(record.cause or "")].append(record)
        rows = [
            CollectiveRow(
                kind,
                over,
                ", ".join(sorted({record.dtype for record in records})),
                sum(record.bytes for record in records),
                sum(record.executions for record in records),
                cause,
                times.get((kind, over, cause)),
            )
            for (kind, over, cause), records in groups.items()
        ]
        return sorted(rows, key=lambda row: -row.bytes)


def collect_plan(name: str, setup: TrainSetup, topology: Topology, *, compiles: bool) -> PlanReport:
    """Collect the report of a config's plan on a machine; a part that cannot be made is a note."""
    preflight(setup)
    memory, notes = MemoryReport(topology, estimate_step(setup, topology.platform)), list[str]()
    audit, spans, time = None, tuple[Span, ...](), None
    if topology.kind not in HARDWARE:
        notes.append("No time is predicted of simulated devices: --topology v5p:4x4x8, or another machine.")
    else:
        try:
            time = estimate_time(setup, topology)
        except ConfigError as error:
            notes.append(str(error))
    if not compiles:
        notes.append("The step was not compiled (--no-compile): there are no collectives, and no timeline.")
    elif absent := missing_extra(topology):
        notes.append(str(SpmdError("The step was not compiled, so there are no collectives:", [absent])))
    else:
        simulated = topology.devices if topology.platform == "cpu" else 0
        initialize(simulated, target_platform="" if simulated else topology.platform)
        there = make_setup(setup.config, topology_mesh(setup.config, topology))
        try:
            with show_waiting(f"compiling for {topology}"):
                step = compile_step(there)
            audit, memory = step.audit, dataclasses.replace(memory, compiled=step.memory)
            if topology.platform == "tpu" and time:
                time, line = time_program(there, topology, step, keep_spans=True)
                spans = tuple(line.spans)
        except MemoryError as error:
            notes.append(f"The compiler refuses the step: {error}")
    devices = map_devices(topology, setup.mesh.shape, setup.config.slices.sizes, setup.config.data.batch)
    schedule = simulate(setup.schedule) if setup.schedule else None
    return PlanReport(name, setup, topology, memory, time, audit, spans, schedule, devices, tuple(notes))


def merge_spans(spans: Sequence[Span], seconds: float) -> list[Span]:
    """Return the spans that can be seen: of those shorter than a part of the step, one for each part and lane.

    It is named after the operation that takes the most of it. Spans of no length are dropped.
    """
    part = seconds / RESOLUTION
    kept = [span for span in spans if span.seconds >= part]
    short: dict[tuple[str, int], list[Span]] = collections.defaultdict(list)
    for span in spans:
        if 0 < span.seconds < part:
            short[span.lane, int(span.start / part)].append(span)
    for (lane, _), found in short.items():
        by_what: Mapping[str, float] = _sums(found)
        longest = max(found, key=lambda span: span.seconds)
        name = longest.name if len(found) == 1 else f"{len(found)} operations, the longest {longest.name}"
        start = found[0].start
        kept.append(Span(name, lane, max(by_what, key=by_what.__getitem__), start, sum(by_what.values())))
    return sorted(kept, key=lambda span: (span.lane, span.start))


def _sums(spans: Sequence[Span]) -> Mapping[str, float]:
    found = collections.defaultdict[str, float](float)
    for span in spans:
        found[span.what] += span.seconds
    return found
