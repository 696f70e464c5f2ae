"""Page of a plan."""

from collections.abc import Iterator, Mapping

import numpy as np

from spmd.analysis.schedule_chart import COLOURS, LIGHTEST, NAMES, describe, ink_on, lighten
from spmd.observe.metrics import human_duration
from spmd.report import charts, page
from spmd.report.charts import Chart
from spmd.report.page import Cell, Html, Section
from spmd.report.plan_data import CollectiveRow, PlanReport, merge_spans
from spmd.report.shards import ShardPicture
from spmd.sharding.rules import spec_text
from spmd.step_time.timeline import Span
from spmd.tree import human_bytes

MOST_PICTURES = 12
MOST_TASKS = 12_000
"""Tasks of a pipeline that are drawn: those of the first part of the step."""


def plan_page(report: PlanReport) -> str:
    """Return the report of a plan."""
    sections = [
        Section("Summary", [*_summary(report)]),
        Section("Mesh", [*_mesh(report)]),
        Section("Shardings", [*_shardings(report)]),
        Section("Memory", [*_memory(report)]),
        Section("Step time", [*_time(report)]),
        Section("Collectives", [*_collectives(report)]),
        Section("Pipeline", [*_pipeline(report)]),
    ]
    return page.render(f"Plan of {report.name}", f"spmd report, for {report.topology}", sections)


def _summary(report: PlanReport) -> Iterator[Html]:
    yield page.facts(report.facts())
    if report.notes:
        yield page.notes(report.notes)
    yield page.preformatted(report.decisions())


def _mesh(report: PlanReport) -> Iterator[Html | Chart]:
    devices, topology = report.devices, report.topology
    what = "Devices where they are on the machine" if topology.platform != "cpu" else "Simulated devices"
    links = f"; {topology.links}, as the stubs over an edge show" if any(topology.wrap) else f"; {topology.links}"
    shown = len(devices.x)
    part = f" The first {shown:,} of {devices.total:,} devices are drawn." if shown < devices.total else ""
    held = ", ".join(f"{name} {human_bytes(size)}" for name, size in report.held().items())
    where = f", with their index along each mesh axis{links if topology.links else ''}."
    yield page.paragraph(f"{what}{where}{part} Each device holds {held}.")
    tips = [(axis, f"@{axis}") for axis in devices.indices]
    columns = {
        "x": devices.x,
        "y": devices.y,
        "first": devices.batch[:, 0],
        "end": devices.batch[:, 1] - 1,
        **devices.indices,
    }
    for axis, index in devices.indices.items():
        size = report.plan.mesh.shape[axis]
        colours = charts.scale(np.asarray(index), size)
        inks = {colour: ink_on(colour) for colour in set(colours)}
        cells = {"colour": colours, "ink": [inks[colour] for colour in colours], "text": [str(i) for i in index]}
        yield charts.cells(
            f"{axis} {size}",
            {**columns, **cells},
            [*tips, ("examples of a batch", "@first to @end")],
            size=(devices.width, devices.height),
            links=devices.links,
            labels=devices.panels,
        )


def _shardings(report: PlanReport) -> Iterator[Html | Chart]:
    pictures = report.pictures()
    more = f" Of {len(pictures)} rules, these have the largest." if len(pictures) > MOST_PICTURES else ""
    yield page.paragraph(f"The largest parameter of each rule; the shard of the first device is filled.{more}")
    for picture in pictures[:MOST_PICTURES]:
        down = picture.rows, picture.row_parts, _dim(picture.rows, picture.row_axes)
        across = picture.columns, picture.column_parts, _dim(picture.columns, picture.column_axes)
        yield charts.shard(picture.entry.path, _describe(picture), down, across)
    head = ["path", "of", "dtype", "shape", "spec", "bytes of a device", "memory", "rule"]
    rows = [
        [
            entry.path,
            table.replace("_", " "),
            entry.dtype,
            Cell("×".join(map(str, entry.shape)) or "scalar", str(entry.shape)),
            spec_text(entry.spec),
            Cell(human_bytes(entry.bytes_per_device), entry.bytes_per_device),
            "host" if entry.on_host else "device",
            entry.row[4],
        ]
        for table, entry in report.arrays()
    ]
    yield page.table(head, rows, search=True)


def _dim(size: int, axes: Mapping[str, int]) -> str:
    return f"{size:,}" + "".join(f" / {axis} {count}" for axis, count in axes.items())


def _describe(picture: ShardPicture) -> str:
    """Return the dimensions that the picture has no room for, and the number of shards."""
    size = human_bytes(picture.entry.bytes_per_device)
    outer = "".join(f"{_dim(length, axes)} × " for length, axes in picture.outer)
    shards = f"{picture.shards:,} shards of {size}" if picture.shards > 1 else f"whole on each device, {size}"
    copies = f", each on {picture.copies:,} devices" if picture.shards > 1 < picture.copies else ""
    return f"{outer}the picture; {shards}{copies}" if outer else f"{shards}{copies}"


def _memory(report: PlanReport) -> Iterator[Html | Chart]:
    memory = report.memory
    limit = memory.topology.memory or 0
    largest = max(sum(parts.values()) for _, parts in report.memory_rows())
    marked = limit if limit < 20 * largest else 0
    line = f" The dashed line is the {human_bytes(limit)} of a {memory.topology.kind}." if marked else ""
    yield page.paragraph(f"Bytes of one device in a step.{line}")
    yield charts.stacked_bars("Memory of a device", report.memory_rows(), x="bytes of a device", limit=marked)
    times, parts = report.memory_over_time()
    close = marked if marked < 3 * np.sum(list(parts.values()), axis=0).max() else 0
    label = "Over the step, by the operations of the traced program"
    yield charts.stacked_areas(label, times, parts, title="operation", limit=close)
    yield page.folded("as a table", page.preformatted(str(memory)))


def _time(report: PlanReport) -> Iterator[Html | Chart]:
    time = report.time
    if time is None:
        return
    low, high = map(human_duration, time.range)
    yield page.paragraph(f"Predicted: {human_duration(time.seconds)}, from {low} to {high} ({time.method}).")
    spent = dict(sorted(time.spent.items(), key=lambda item: -item[1]))
    parts = {name: seconds * 1e3 for name, seconds in spent.items() if seconds > 0}
    yield charts.stacked_bars("Milliseconds of a device", [("step", parts)], x="ms", form="0,0.[000]")
    if report.spans:
        merged = merge_spans(report.spans, time.seconds)
        lanes = list(dict.fromkeys(("device", "network", *(span.lane for span in merged))))
        boxes = [(s.lane, s.start * 1e3, (s.start + s.seconds) * 1e3, _what(s), s.name) for s in merged]
        colours = charts.colours([*parts, *sorted({kind for *_, kind, _ in boxes} - parts.keys())])
        label = "Predicted timeline of the compiled step; short operations are drawn together"
        yield charts.spans(label, lanes, boxes, x="ms", colours=colours)
    yield page.folded("as text", page.preformatted(str(time)))


def _what(span: Span) -> str:
    return span.what if span.lane == "device" else f"transfers over {span.what}"


def _collectives(report: PlanReport) -> Iterator[Html | Chart]:
    if report.audit is None:
        return
    bars = list(report.collective_bytes().items())
    if not bars:
        yield page.paragraph("The compiled step has no collectives.")
        return
    yield page.paragraph("Bytes that one device sends in a step, by the mesh axes over which it sends them.")
    yield charts.stacked_bars("Collectives by mesh axes", bars, x="bytes of a device in a step")
    if took := report.collective_seconds():
        waits = [(over, {name: seconds * 1e3 for name, seconds in both.items()}) for over, both in took.items()]
        yield charts.stacked_bars("Predicted time of collectives", waits, x="ms", form="0,0.[000]")
    yield page.notes(str(problem) for problem in (*report.audit.warnings, *report.audit.broken))
    rows = report.collectives()
    timed = any(row.time for row in rows)
    head = ["sent", "kind", "over", "dtypes", "runs", *(["exposed", "hidden"] if timed else []), "cause"]
    yield page.table(head, [_collective(row, timed) for row in rows], search=True)


def _collective(row: CollectiveRow, timed: bool) -> list[str | Cell]:
    seconds = [row.time.exposed if row.time else 0.0, row.time.hidden if row.time else 0.0] if timed else []
    times = [Cell(human_duration(x) if x else "–", x) for x in seconds]
    runs = Cell(f"{row.runs:,}", row.runs)
    return [Cell(human_bytes(row.bytes), row.bytes), row.kind, row.over, row.dtypes, runs, *times, row.cause]


def _pipeline(report: PlanReport) -> Iterator[Html | Chart]:
    timeline = report.schedule
    if timeline is None:
        return
    yield page.paragraph(f"{describe(timeline)}. A forward pass of a stage takes 1; boxes have their microbatch.")
    slots = [(stage, slot) for stage, order in enumerate(timeline.tasks) for slot in order if slot.end > slot.start]
    shown = sorted(slots, key=lambda item: item[1].start)[:MOST_TASKS]
    chunks, last = timeline.schedule.chunks, max(timeline.schedule.chunks - 1, 1)
    colours = {
        _kind(kind, chunk, chunks): lighten(COLOURS[kind], LIGHTEST * chunk / last)
        for kind in NAMES
        for chunk in range(chunks)
    }
    boxes = [
        (f"stage {stage}", slot.start, slot.end, _kind(slot.task.kind, slot.task.chunk, chunks), str(slot.task))
        for stage, slot in shown
    ]
    texts = [str(slot.task.microbatch) for _, slot in shown] if len(shown) <= 400 else ()
    lanes = [f"stage {stage}" for stage in range(timeline.schedule.stages)]
    if len(shown) < len(slots):
        yield page.paragraph(f"The first {len(shown):,} of {len(slots):,} tasks are drawn.")
    yield charts.spans("Schedule", lanes, boxes, x="time", colours=colours, texts=texts)


def _kind(kind: str, chunk: int, chunks: int) -> str:
    return NAMES[kind] + (f", chunk {chunk}" if chunks > 1 else "")
