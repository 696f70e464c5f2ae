"""Page of a plan."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from spmd.analysis.schedule_chart import COLOURS, LIGHTEST, NAMES, describe, ink_on, lighten
from spmd.observe.metrics import human_duration
from spmd.pipeline.schedule import Schedule
from spmd.pipeline.simulate import Slot
from spmd.plan.records import PlanEntry
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
_MOST_NUMBERED = 400
"""A chart of more tasks has no room for their microbatches."""


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
    devices = report.devices
    yield page.paragraph(_mesh_text(report))
    columns = {
        "x": devices.x,
        "y": devices.y,
        "first": devices.batch[:, 0],
        "end": devices.batch[:, 1] - 1,
        **devices.indices,
    }
    tips = []
    for axis in devices.indices:
        tips.append((axis, f"@{axis}"))
    tips.append(("examples of a batch", "@first to @end"))
    for axis, index in devices.indices.items():
        size = report.plan.mesh.shape[axis]
        yield charts.cells(
            f"{axis} {size}",
            {**columns, **_index_columns(index, size)},
            tips,
            size=(devices.width, devices.height),
            links=devices.links,
            labels=devices.panels,
        )


def _mesh_text(report: PlanReport) -> str:
    devices = report.devices
    topology = report.topology
    what = "Devices where they are on the machine"
    if topology.platform == "cpu":
        what = "Simulated devices"
    links = ""
    if topology.details:
        links = f"; {topology.details}"
        if any(topology.wrap):
            links += ", as the stubs over an edge show"
    shown = len(devices.x)
    part = ""
    if shown < devices.total:
        part = f" The first {shown:,} of {devices.total:,} devices are drawn."
    held = []
    for name, size in report.held().items():
        held.append(f"{name} {human_bytes(size)}")
    return (
        f"{what}, with their index along each mesh axis{links}.{part} Each device holds "
        f"{', '.join(held)}."
    )


def _index_columns(index: np.ndarray, size: int) -> dict[str, list[str]]:
    """Return the colour of each device by its index on an axis, and the index in a readable ink."""
    colours = charts.scale(np.asarray(index), size)
    ink_of: dict[str, str] = {}  # an axis has few colours, and a mesh has many devices
    inks = []
    for colour in colours:
        if colour not in ink_of:
            ink_of[colour] = ink_on(colour)
        inks.append(ink_of[colour])
    return {"colour": colours, "ink": inks, "text": list(map(str, index))}


def _shardings(report: PlanReport) -> Iterator[Html | Chart]:
    pictures = report.pictures()
    text = "The largest parameter of each rule; the shard of the first device is filled."
    if len(pictures) > MOST_PICTURES:
        text += f" Of {len(pictures)} rules, these have the largest."
    yield page.paragraph(text)
    for picture in pictures[:MOST_PICTURES]:
        yield _shard_chart(picture)
    head = ["path", "of", "dtype", "shape", "spec", "bytes of a device", "memory", "rule"]
    rows = []
    for table, entry in report.arrays():
        rows.append(_array_row(table, entry))
    yield page.table(head, rows, search=True)


def _shard_chart(picture: ShardPicture) -> Chart:
    row_text = _dim(picture.rows, picture.row_axes)
    column_text = _dim(picture.columns, picture.column_axes)
    return charts.shard(
        picture.entry.path,
        _describe(picture),
        (picture.rows, picture.row_parts, row_text),
        (picture.columns, picture.column_parts, column_text),
    )


def _array_row(table: str, entry: PlanEntry) -> list[str | Cell]:
    shape = "×".join(map(str, entry.shape)) or "scalar"
    memory = "device"
    if entry.on_host:
        memory = "host"
    _, _, _, _, rule = entry.row
    return [
        entry.path,
        table.replace("_", " "),
        entry.dtype,
        Cell(shape, str(entry.shape)),
        spec_text(entry.spec),
        Cell(human_bytes(entry.bytes_per_device), entry.bytes_per_device),
        memory,
        rule,
    ]


def _dim(size: int, axes: Mapping[str, int]) -> str:
    """Return a length with the mesh axes over it: `4,096 / fsdp 8`."""
    text = f"{size:,}"
    for axis, count in axes.items():
        text += f" / {axis} {count}"
    return text


def _describe(picture: ShardPicture) -> str:
    """Return the dimensions outside of the picture, the number of shards, and their size."""
    size = human_bytes(picture.entry.bytes_per_device)
    if picture.shards > 1:
        shards = f"{picture.shards:,} shards of {size}"
        if picture.copies > 1:
            shards += f", each on {picture.copies:,} devices"
    else:
        shards = f"whole on each device, {size}"
    if not picture.outer:
        return shards
    outer = [_dim(length, axes) for length, axes in picture.outer]
    return f"{' × '.join([*outer, 'the picture'])}; {shards}"


def _memory(report: PlanReport) -> Iterator[Html | Chart]:
    memory = report.memory
    topology = memory.topology
    bars = report.memory_rows()
    totals = [sum(parts.values()) for _, parts in bars]
    limit = _visible_limit(topology.memory or 0, 20 * max(totals))
    text = "Bytes of one device in a step."
    if limit:
        text += f" The dashed line is the {human_bytes(limit)} of a {topology.kind}."
    yield page.paragraph(text)
    yield charts.stacked_bars("Memory of a device", bars, x="bytes of a device", limit=limit)
    times, parts = report.memory_over_time()
    peak = np.sum(list(parts.values()), axis=0).max()
    yield charts.stacked_areas(
        "Over the step, by the operations of the traced program",
        times,
        parts,
        title="operation",
        limit=_visible_limit(limit, 3 * peak),
    )
    yield page.folded("as a table", page.preformatted(str(memory)))


def _visible_limit(limit: int, most: int) -> int:
    """Return a limit to draw, or 0 for none: bars are too short to read beside a far limit."""
    if limit < most:
        return limit
    return 0


def _time(report: PlanReport) -> Iterator[Html | Chart]:
    time = report.time
    if time is None:
        return
    seconds = human_duration(time.seconds)
    yield page.paragraph(f"Predicted: {seconds}, {time.range_text} ({time.method}).")
    longest_first = sorted(time.spent.items(), key=lambda item: -item[1])
    parts = {}
    for name, taken in longest_first:
        if taken > 0:
            parts[name] = taken * 1e3
    bars = [("step", parts)]
    yield charts.stacked_bars("Milliseconds of a device", bars, x="ms", form="0,0.[000]")
    if report.spans:
        yield _span_chart(merge_spans(report.spans, time.seconds), list(parts))
    yield page.folded("as text", page.preformatted(str(time)))


def _span_chart(spans: Sequence[Span], known: Sequence[str]) -> Chart:
    """Return the timeline of a compiled step.

    Args:
        known: Kinds of spans with the first colours: those of the bar above.
    """
    lanes = dict.fromkeys(("device", "network"))
    boxes = []
    kinds = set()
    for span in spans:
        lanes[span.lane] = None
        kind = _what(span)
        kinds.add(kind)
        start = span.start * 1e3
        end = (span.start + span.seconds) * 1e3
        boxes.append((span.lane, start, end, kind, span.name))
    others = sorted(kinds.difference(known))
    return charts.spans(
        "Predicted timeline of the compiled step; short operations are drawn together",
        list(lanes),
        boxes,
        x="ms",
        colours=charts.colours([*known, *others]),
    )


def _what(span: Span) -> str:
    if span.lane == "device":
        return span.what
    return f"transfers over {span.what}"


def _collectives(report: PlanReport) -> Iterator[Html | Chart]:
    if report.audit is None:
        return
    bars = list(report.collective_bytes().items())
    if not bars:
        yield page.paragraph("The compiled step has no collectives.")
        return
    yield page.paragraph(
        "Bytes that one device sends in a step, by the mesh axes over which it sends them."
    )
    yield charts.stacked_bars("Collectives by mesh axes", bars, x="bytes of a device in a step")
    waits = []
    for over, seconds in report.collective_seconds().items():
        milliseconds = {name: taken * 1e3 for name, taken in seconds.items()}
        waits.append((over, milliseconds))
    if waits:
        title = "Predicted time of collectives"
        yield charts.stacked_bars(title, waits, x="ms", form="0,0.[000]")
    yield page.notes(map(str, (*report.audit.warnings, *report.audit.broken)))
    yield _collective_table(report.collectives())


def _collective_table(rows: Sequence[CollectiveRow]) -> Html:
    """Return a table of collectives; without times if none is predicted."""
    timed = any(row.time for row in rows)
    head = ["sent", "kind", "over", "dtypes", "runs"]
    if timed:
        head += ["exposed", "hidden"]
    head.append("cause")
    return page.table(head, [_collective(row, timed) for row in rows], search=True)


def _collective(row: CollectiveRow, timed: bool) -> list[str | Cell]:
    cells: list[str | Cell] = [
        Cell(human_bytes(row.bytes), row.bytes),
        row.kind,
        row.over,
        row.dtypes,
        Cell(f"{row.runs:,}", row.runs),
    ]
    if timed and row.time:
        cells += [_seconds(row.time.exposed), _seconds(row.time.hidden)]
    elif timed:
        cells += [_seconds(0.0), _seconds(0.0)]
    cells.append(row.cause)
    return cells


def _seconds(seconds: float) -> Cell:
    text = "–"
    if seconds:
        text = human_duration(seconds)
    return Cell(text, seconds)


def _pipeline(report: PlanReport) -> Iterator[Html | Chart]:
    timeline = report.schedule
    if timeline is None:
        return
    yield page.paragraph(
        f"{describe(timeline)}. A forward pass of a stage takes 1; boxes have their microbatch."
    )
    slots = []
    for stage, order in enumerate(timeline.tasks):
        for slot in order:
            if slot.end > slot.start:
                slots.append((stage, slot))
    slots.sort(key=lambda item: item[1].start)
    shown = slots[:MOST_TASKS]
    if len(shown) < len(slots):
        yield page.paragraph(f"The first {len(shown):,} of {len(slots):,} tasks are drawn.")
    yield _schedule_chart(timeline.schedule, shown)


def _schedule_chart(schedule: Schedule, slots: Sequence[tuple[int, Slot]]) -> Chart:
    """Return the tasks of a pipeline, given with their stages."""
    boxes = []
    microbatches = []
    for stage, slot in slots:
        task = slot.task
        kind = _kind(task.kind, task.chunk, schedule.chunks)
        boxes.append((f"stage {stage}", slot.start, slot.end, kind, str(task)))
        microbatches.append(str(task.microbatch))
    if len(slots) > _MOST_NUMBERED:
        microbatches = []
    return charts.spans(
        "Schedule",
        [f"stage {stage}" for stage in range(schedule.stages)],
        boxes,
        x="time",
        colours=_task_colours(schedule.chunks),
        texts=microbatches,
    )


def _task_colours(chunks: int) -> dict[str, str]:
    """Return kind of task → colour, lighter from chunk to chunk."""
    last = max(chunks - 1, 1)
    colours = {}
    for kind in NAMES:
        for chunk in range(chunks):
            colours[_kind(kind, chunk, chunks)] = lighten(COLOURS[kind], LIGHTEST * chunk / last)
    return colours


def _kind(kind: str, chunk: int, chunks: int) -> str:
    name = NAMES[kind]
    if chunks > 1:
        return f"{name}, chunk {chunk}"
    return name
