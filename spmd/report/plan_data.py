"""Contents of a plan's report: decisions, predictions and the compiled step, without HTML.

Each figure is one that `spmd plan` prints; nothing is computed a second time here.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from spmd.analysis.collective_audit import CollectiveAudit
from spmd.analysis.collective_record import Collective
from spmd.analysis.memory import CATEGORIES, MemoryReport
from spmd.analysis.topology import Topology, missing_extra
from spmd.errors import ConfigError, SpmdError
from spmd.observe.metrics import human_count, human_duration
from spmd.observe.spinner import spinner
from spmd.observe.wrap_text import wrap_to_terminal
from spmd.pipeline.schedule import Schedule
from spmd.pipeline.simulate import ScheduleTimeline as PipelineTimeline
from spmd.pipeline.simulate import simulate
from spmd.plan.plan import TABLES, ShardingPlan
from spmd.plan.records import PlanEntry
from spmd.report.shards import DeviceMap, ShardPicture, map_devices, shard_pictures
from spmd.run.planned_step import PlannedStep, estimate_step
from spmd.run.step_source import StepSource, compile_on
from spmd.run.step_time import time_program
from spmd.step_time.report import CollectiveTime, StepTime
from spmd.step_time.timeline import Span
from spmd.tree import human_bytes

RESOLUTION = 1500
"""Parts of a step: shorter operations in one part are drawn as the kind with the most time."""


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind over some axes for one cause.

    `bytes` of one device, and `runs`, are of one step.
    """

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
        name: Config or file, as it was named.
        time: Predicted step; None for simulated devices, and for models whose FLOPs are not known.
        audit: Collectives of the compiled step; None if it was not compiled.
        spans: Timeline of the compiled step on a TPU.
        schedule: Simulated pipeline, in units of a stage's forward pass.
        notes: Parts that are missing, each with its reason.
    """

    name: str
    source: StepSource
    planned: PlannedStep
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
        """Sharding plan of the step."""
        return self.planned.plan

    def __str__(self) -> str:
        parts = [str(self.audit or self.plan)]
        parts[0] += self.source.lines(
            self.planned, (self.topology.platform, self.topology.chip.device_kind)
        )
        parts.append(f"memory of one device, {self.topology}\n{self.memory}")
        if self.time:
            parts.append(str(self.time))
        parts += self.notes
        return wrap_to_terminal("\n\n".join(parts))

    def pictures(self) -> tuple[ShardPicture, ...]:
        """Return one picture for each rule, of its largest parameter."""
        return shard_pictures(self.plan)

    def facts(self) -> list[tuple[str, str]]:
        """Return label → value of the figures at the top."""
        plan = self.plan
        parameters = sum(math.prod(entry.shape) for entry in plan.params)
        found = [
            ("parameters", human_count(parameters)),
            ("devices", f"{plan.mesh.size:,}"),
            ("mesh", self._mesh_text()),
            ("memory of a device", self._memory_text()),
        ]
        if self.time:
            seconds = human_duration(self.time.seconds)
            speed, unit = self.time.speed
            found += [
                ("predicted step", f"{seconds} ({self.time.range_text})"),
                (f"{unit}/s on a chip", f"{speed:,.0f}"),
            ]
            if self.time.mfu is not None:
                found.append(("MFU", f"{self.time.mfu:.1%}"))
        if self.audit:
            sent = human_bytes(self.audit.bytes())
            found.append(("sent by a device", f"{sent} in a step"))
        return found

    def _mesh_text(self) -> str:
        axes = []
        for axis, size in self.plan.mesh.shape.items():
            if size > 1:
                axes.append(f"{axis} {size}")
        return " × ".join(axes) or "1 device"

    def _memory_text(self) -> str:
        total = human_bytes(self.memory.total)
        limit = self.memory.topology.memory
        if not limit:
            return total
        verdict = {True: "fits", False: "DOES NOT FIT", None: ""}[self.memory.fits]
        return f"{total} of {human_bytes(limit)}: {verdict}"

    def decisions(self) -> str:
        """Return the heading of the plan, and its lines about the execution."""
        device = (self.topology.platform, self.topology.chip.device_kind)
        return f"{self.plan.heading}{self.source.lines(self.planned, device)}"

    def held(self) -> dict[str, int]:
        """Return table → bytes on each device, without empty tables."""
        found = {}
        for name, size in self.plan.bytes_per_device().items():
            if size:
                found[name.replace("_", " ")] = size
        return found

    def arrays(self) -> Iterator[tuple[str, PlanEntry]]:
        """Yield (table, entry) for each array of the training state and each gradient."""
        for table in TABLES:
            for entry in getattr(self.plan, table):
                yield table, entry

    def memory_rows(self) -> list[tuple[str, dict[str, int]]]:
        """Return the bars of memory: label → bytes of one device by category."""
        estimate = self.memory.estimated
        once = dict(estimate.held)
        for name in ("collectives", "temporaries"):  # no arrays of the training state
            once.pop(name, None)
        rows = [
            ("each array once", _labelled(once)),
            ("live at the peak", _labelled(estimate.at_peak)),
        ]
        compiled = self.memory.compiled
        if compiled:
            parts = {"arguments": compiled.arguments, "temporaries": compiled.temporaries}
            rows.append(("compiled", parts))
        return rows

    def memory_over_time(self, most: int = 600) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the times of the traced step, and label → bytes from each of them on.

        Of more times than `most`, those of one part of the step are drawn as the one with the most
        bytes.
        """
        times, used = self.memory.estimated.over_time()
        count = min(most, len(times))
        edges = np.linspace(0, len(times), count + 1).astype(int)
        total = sum(used.values(), np.zeros(len(times), dtype=np.int64))
        largest = []
        for low, high in itertools.pairwise(edges):
            largest.append(low + int(np.argmax(total[low:high])))
        labelled = {}
        for name, values in used.items():
            if values.any():
                labelled[CATEGORIES[name]] = values[largest]
        return times[edges[:-1]], labelled

    def collective_bytes(self) -> dict[str, dict[str, int]]:
        """Return mesh axes → kind → bytes from one device in one step."""
        found: dict[str, dict[str, int]] = {}
        if self.audit is None:
            return found
        for (kind, over), records in self.audit.by_axes().items():
            kinds = found.setdefault(over, {})
            kinds[kind] = sum(record.bytes for record in records)
        return found

    def collective_seconds(self) -> dict[str, dict[str, float]]:
        """Return mesh axes → predicted seconds of their collectives in one step.

        They are divided into exposed ones, and ones hidden behind compute.
        """
        found: dict[str, dict[str, float]] = {}
        for took in self._collective_times():
            sums = found.setdefault(took.over, {"exposed": 0.0, "hidden": 0.0})
            sums["exposed"] += took.exposed
            sums["hidden"] += took.hidden
        return found

    def _collective_times(self) -> Sequence[CollectiveTime]:
        if self.time is None:
            return ()
        return self.time.collectives

    def collectives(self) -> list[CollectiveRow]:
        """Return a row for each kind, axes and cause of executed collectives, most bytes first."""
        times = {}
        for took in self._collective_times():
            times[took.kind, took.over, took.cause] = took
        rows = []
        for key, records in self._executed().items():
            kind, over, cause = key
            dtypes = {record.dtype for record in records}
            row = CollectiveRow(
                kind=kind,
                over=over,
                dtypes=", ".join(sorted(dtypes)),
                bytes=sum(record.bytes for record in records),
                runs=sum(record.executions for record in records),
                cause=cause,
                time=times.get(key),
            )
            rows.append(row)
        rows.sort(key=lambda row: -row.bytes)
        return rows

    def _executed(self) -> dict[tuple[str, str, str], list[Collective]]:
        """Return (kind, axes, cause) → its collectives, without those of branches never taken."""
        groups: dict[tuple[str, str, str], list[Collective]] = collections.defaultdict(list)
        if self.audit is None:
            return groups
        for record in self.audit.records:
            if record.executions:
                key = (record.kind, record.over, str(record.cause or ""))
                groups[key].append(record)
        return groups


def _labelled(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return label of a category → bytes, without empty categories."""
    return {CATEGORIES[name]: size for name, size in sizes.items() if size}


def collect_plan(
    name: str, source: StepSource, planned: PlannedStep, topology: Topology, *, compiles: bool
) -> PlanReport:
    """Collect the report of a step's plan on a machine; a missing part is a note.

    Args:
        planned: The step on the source's mesh.
    """
    with spinner("estimating memory and time"):
        memory = MemoryReport(topology, estimate_step(planned, topology.platform))
        notes: list[str] = []
        report = PlanReport(
            name=name,
            source=source,
            planned=planned,
            topology=topology,
            memory=memory,
            time=_predict(source, planned, topology, notes),
            audit=None,
            spans=(),
            schedule=_simulate(source.schedule(planned)),
            devices=map_devices(
                topology,
                planned.mesh.shape,
                planned.slices,
                planned.examples,
            ),
            notes=tuple(notes),
        )
    if compiles:
        return _add_compiled(report)
    return _add_note(
        report,
        "The step was not compiled (--no-compile): there are no collectives, and no timeline.",
    )


def _predict(
    source: StepSource, planned: PlannedStep, topology: Topology, notes: list[str]
) -> StepTime | None:
    """Return the time of a step without a compiler, or add the reason for its absence to notes."""
    if topology.chip.speeds is None:
        notes.append(
            "No time is predicted of simulated devices: --topology v5p:4x4x8, or another machine."
        )
        return None
    try:
        return source.estimate_time(planned, topology)
    except ConfigError as error:
        notes.append(str(error))
        return None


def _simulate(schedule: Schedule | None) -> PipelineTimeline | None:
    if schedule is None:
        return None
    return simulate(schedule)


def _add_note(report: PlanReport, note: str) -> PlanReport:
    return dataclasses.replace(report, notes=(*report.notes, note))


def _add_compiled(report: PlanReport) -> PlanReport:
    """Compile the step for the machine, and add its collectives, its memory and its timeline."""
    topology = report.topology
    absent = missing_extra(topology)
    if absent:
        error = SpmdError("The step was not compiled, so there are no collectives:", [absent])
        return _add_note(report, str(error))
    try:
        made, step = compile_on(report.source, topology, report.planned.slices)
        memory = dataclasses.replace(report.memory, compiled=step.memory)
        report = dataclasses.replace(report, audit=step.audit, memory=memory)
        if topology.platform == "tpu" and report.time:
            work = report.source.workload(made)
            time, line = time_program(made, topology, step, work, keep_spans=True)
            report = dataclasses.replace(report, time=time, spans=tuple(line.spans))
    except MemoryError as error:
        return _add_note(report, f"The compiler refuses the step: {error}")
    return report


def merge_spans(spans: Sequence[Span], seconds: float) -> list[Span]:
    """Return the long spans, and one for the short spans of each lane and part of the step.

    A span is short if it is shorter than a part. The one for several is named after the longest.
    Spans of no length are dropped.
    """
    part = seconds / RESOLUTION
    kept = []
    short: dict[tuple[str, int], list[Span]] = collections.defaultdict(list)
    for span in spans:
        if span.seconds >= part:
            kept.append(span)
        elif span.seconds > 0:
            short[span.lane, int(span.start / part)].append(span)
    for found in short.values():
        kept.append(_merged(found))
    return sorted(kept, key=lambda span: (span.lane, span.start))


def _merged(spans: Sequence[Span]) -> Span:
    """Return one span for short ones of a lane, of the sum of their times."""
    first = spans[0]
    longest = max(spans, key=lambda span: span.seconds)
    name = longest.name
    if len(spans) > 1:
        name = f"{len(spans)} operations, the longest {longest.name}"
    seconds_of: dict[str, float] = collections.defaultdict(float)
    for span in spans:
        seconds_of[span.what] += span.seconds
    what = max(seconds_of, key=lambda kind: seconds_of[kind])
    return Span(name, first.lane, what, first.start, sum(seconds_of.values()))
