"""Pictures of a pipeline schedule, time from left to right and stages from top to bottom: as text, and as SVG."""

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from spmd.errors import ConfigError, Problem
from spmd.pipeline.schedule import Task
from spmd.pipeline.schedule_files import to_csv
from spmd.pipeline.simulate import Slot, Timeline

NAMES = {"F": "forward", "BW": "backward", "B": "gradient of the input", "W": "gradients of the weights"}
IDLE = "·"
# One character for a microbatch, from the last digit of its number.
DIGITS = {"F": "0123456789", "BW": "ABCDEFGHIJ", "B": "ABCDEFGHIJ", "W": "abcdefghij"}

# Apart for every kind of colour blindness, and still so where the last chunk is lighter by this share.
COLOURS = {"F": "#0072b2", "BW": "#e69f00", "B": "#e69f00", "W": "#882255"}
LIGHTEST = 0.4
IDLE_COLOUR, INK, PAPER = "#ececec", "#1a1a1a", "#ffffff"
ROW, GAP, MARGIN, LABEL = 26, 6, 16, 62  # pixels
LETTER, ENTRY = 7, 44  # pixels: a letter of text, and what a legend's entry takes besides its text
NARROWEST, WIDEST = 20, 3600  # pixels: of the shortest task, where the whole chart is not made wider than that


def headline(timeline: Timeline) -> str:
    """What is drawn: the schedule and its size."""
    schedule = timeline.schedule
    parts = [f"{schedule.stages} stages", f"{schedule.microbatches} microbatches"]
    if schedule.chunks > 1:
        parts.append(f"{schedule.chunks} chunks per stage")
    if timeline.batches > 1:
        parts.append(f"{timeline.batches} batches in a row")
    return f"{schedule.name}: {', '.join(parts)}"


def summary(timeline: Timeline) -> str:
    """What it comes to: makespan, bubble, and the activations that each stage holds at most."""
    parts = [f"makespan {timeline.makespan:g}"]
    if timeline.batches > 1:
        parts.append(f"{timeline.period:g} for each batch in the steady state")
    parts.append(f"bubble {100 * timeline.bubble:.1f} % of the ideal {timeline.ideal:g}")
    parts.append(f"peak activations per stage {' '.join(f'{held:g}' for held in timeline.peak_memory)}")
    if timeline.staleness:
        parts.append(f"weights behind by {timeline.staleness} update")
    return ", ".join(parts)


def shortest(timeline: Timeline) -> float:
    """How long the shortest task takes that takes any time."""
    return min(slot.end - slot.start for slots in timeline.tasks for slot in slots if slot.end > slot.start)


def kinds(timeline: Timeline) -> list[str]:
    """The kinds of task that occur."""
    present = {slot.task.kind for slots in timeline.tasks for slot in slots}
    return [kind for kind in NAMES if kind in present]


def chart(timeline: Timeline, width: int = 100) -> str:
    """The timeline as text, its rows no wider than `width`, with a legend and what it comes to.

    Tasks are written out where every word fits its time. Where one does not, a task is one character for each column:
    of its microbatch as long as the shortest task has a column, and of its kind in a chart of still less detail.

    Example:
        >>> from spmd.pipeline.schedules import make_schedule
        >>> from spmd.pipeline.simulate import simulate
        >>> print(chart(simulate(make_schedule("1f1b", stages=2, microbatches=2)), width=50))
        1f1b: 2 stages, 2 microbatches
        stage 0  F0  F1  ········BW0     ····BW1
        stage 1  ····F0  BW0     F1  BW1     ········
        F forward, BW backward, · idle
        makespan 9, bubble 50.0 % of the ideal 6, peak activations per stage 2 1
    """
    slots = [slot for slots in timeline.tasks for slot in slots if slot.end > slot.start]
    label = len(f"stage {timeline.schedule.stages - 1}  ")
    room = max(width - label, 1)
    units = timeline.makespan / shortest(timeline)
    longest = max(len(str(slot.task)) for slot in slots)
    columns = round(units * min(int(room / units), longest + 1)) if units <= room else room
    scale = columns / timeline.makespan

    def extent(slot: Slot) -> slice:
        return slice(round(slot.start * scale), round(slot.end * scale))

    def size(slot: Slot) -> int:
        return extent(slot).stop - extent(slot).start

    if all(len(str(slot.task)) <= size(slot) for slot in slots):
        draw, legend = written, {kind: kind for kind in NAMES}
    elif units <= room:
        draw, legend = numbered, {kind: f"{digits[0]}-{digits[-1]}" for kind, digits in DIGITS.items()}
    else:
        draw, legend = named, {kind: kind[0] for kind in NAMES}
    lines = [headline(timeline)]
    for stage, order in enumerate(timeline.tasks):
        cells = [IDLE] * columns
        for slot in order:
            cells[extent(slot)] = draw(slot.task, size(slot))
        lines.append(f"stage {stage}".ljust(label) + "".join(cells).rstrip())
    lines.append(", ".join([*(f"{legend[kind]} {NAMES[kind]}" for kind in kinds(timeline)), f"{IDLE} idle"]))
    return "\n".join([*lines, summary(timeline)])


def written(task: Task, columns: int) -> str:
    """The task's word, in so many columns."""
    return str(task).ljust(columns)[:columns]


def numbered(task: Task, columns: int) -> str:
    """The task's microbatch, so many times."""
    return DIGITS[task.kind][task.microbatch % 10] * columns


def named(task: Task, columns: int) -> str:
    """The task's kind, so many times."""
    return task.kind[0] * columns


def svg(timeline: Timeline) -> str:
    """The timeline as a standalone SVG: a box for every task with its microbatch, lighter for later chunks.

    Each box says in its tooltip what it is and when.

    Example:
    >>> from spmd.pipeline.schedules import make_schedule
    >>> from spmd.pipeline.simulate import simulate
    >>> svg(simulate(make_schedule("1f1b", stages=2, microbatches=2))).count('class="task"')
    8
    """
    schedule = timeline.schedule
    scale = min(NARROWEST / shortest(timeline), WIDEST / timeline.makespan)
    title = headline(timeline)
    entries = [*((COLOURS[kind], NAMES[kind]) for kind in kinds(timeline)), (IDLE_COLOUR, "idle")]
    if schedule.chunks > 1:
        entries.append((lighten(COLOURS["F"], LIGHTEST), "lighter: later chunks of the model"))
    legend_width = sum(ENTRY + LETTER * len(name) for _, name in entries)
    chart_width = timeline.makespan * scale
    wide_text = max(4 / 3 * LETTER * len(title), LETTER * len(summary(timeline)))
    width = 2 * MARGIN + max(LABEL + chart_width, LABEL + legend_width, wide_text)
    top = MARGIN + 52
    bottom = top + schedule.stages * (ROW + GAP)
    root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
    root.attrib.update({"font-family": "sans-serif", "font-size": "12"})
    height = bottom + 56
    root.attrib.update(width=f"{width:g}", height=f"{height:g}", viewBox=f"0 0 {width:g} {height:g}")
    ET.SubElement(root, "title").text = printable(f"{title}; {summary(timeline)}")
    box(root, 0, 0, width, height, PAPER)
    write(root, MARGIN, MARGIN + 16, title, INK, size=16)
    write(root, MARGIN, MARGIN + 36, summary(timeline), INK)
    left = MARGIN + LABEL
    for stage, slots in enumerate(timeline.tasks):
        y = top + stage * (ROW + GAP)
        write(root, MARGIN, y + ROW / 2 + 4, f"stage {stage}", INK)
        box(root, left, y, chart_width, ROW, IDLE_COLOUR, css="idle")
        for slot in slots:
            draw_task(root, slot, stage, left, y, scale, schedule.chunks)
    write(root, left, bottom + 12, "0", INK)
    write(root, left + chart_width, bottom + 12, f"{timeline.makespan:g}", INK, anchor="end")
    write(root, left + chart_width / 2, bottom + 12, "time", INK, anchor="middle")
    x = left
    for colour, name in entries:
        box(root, x, bottom + 26, 18, 14, colour, css="legend")
        write(root, x + 24, bottom + 38, name, INK)
        x += ENTRY + LETTER * len(name)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def draw_task(root: ET.Element, slot: Slot, stage: int, left: float, y: float, scale: float, chunks: int) -> None:
    """A task's box, with the number of its microbatch where there is room."""
    fill = lighten(COLOURS[slot.task.kind], LIGHTEST * slot.task.chunk / max(chunks - 1, 1))
    x, width = left + slot.start * scale, (slot.end - slot.start) * scale
    rectangle = box(root, x, y, width, ROW, fill, css="task")
    rectangle.attrib.update({"stroke": PAPER, "stroke-width": "1"})
    ET.SubElement(rectangle, "title").text = f"{slot.task} on stage {stage}, {slot.start:g} to {slot.end:g}"
    number = str(slot.task.microbatch)
    if width >= 7 * len(number) + 2:
        colour = PAPER if luminance(fill) < 0.25 else INK
        write(root, x + width / 2, y + ROW / 2 + 4, number, colour, anchor="middle")


def box(root: ET.Element, x: float, y: float, width: float, height: float, fill: str, css: str = "") -> ET.Element:
    """Adds a rectangle."""
    size = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}"}
    return ET.SubElement(root, "rect", {"class": css} if css else {}, **size, fill=fill)


def write(root: ET.Element, x: float, y: float, text: str, fill: str, *, size: int = 12, anchor: str = "start") -> None:
    """Adds text whose baseline is at `y`."""
    place = {"x": f"{x:g}", "y": f"{y:g}", "font-size": str(size), "text-anchor": anchor}
    ET.SubElement(root, "text", place, fill=fill).text = printable(text)


def printable(text: str) -> str:
    """The text with a question mark for every character that XML cannot hold."""
    return "".join(c if c.isprintable() else "?" for c in text)


def channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def lighten(colour: str, share: float) -> str:
    """The colour mixed with white.

    Example:
        >>> lighten("#0072b2", 0.5)
        '#80b8d8'
    """
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in channels(colour))


def luminance(colour: str) -> float:
    """How light a colour is, from 0 to 1 (WCAG 2.2, relative luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (n / 255 for n in channels(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def write_svg(timeline: Timeline, path: str | Path) -> None:
    """Writes the picture of `svg` to a file.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        Path(path).write_text(svg(timeline), encoding="utf-8")
    except OSError as error:
        problem = Problem(str(path), f"cannot be written: {error.strerror}", fix='--svg FILE, or --svg "" for none')
        raise ConfigError("The schedule was not drawn:", [problem]) from error


def to_json(timeline: Timeline) -> dict[str, Any]:
    """The schedule and what it costs, as JSON values: a row of tasks for each stage, as in a CSV file."""
    return {
        "schedule": timeline.schedule.name,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "peak_in_flight": timeline.peak_in_flight,
        "orders": to_csv(timeline.schedule).split(),
    }
