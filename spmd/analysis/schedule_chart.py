"""Charts of a pipeline schedule, time from left to right and stages from top to bottom: as text, and as SVG."""

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from spmd.errors import ConfigError, Problem
from spmd.pipeline.schedule_files import to_csv
from spmd.pipeline.simulate import Slot, Timeline

NAMES = {"F": "forward", "BW": "backward", "B": "gradient of the input", "W": "gradients of the weights"}
IDLE = "·"
# One character for a microbatch, from the last digit of its number.
DIGITS = {"F": "0123456789", "BW": "ABCDEFGHIJ", "B": "ABCDEFGHIJ", "W": "abcdefghij"}

# Distinct under every kind of colour blindness, also where the last chunk is lighter by this share.
COLOURS = {"F": "#0072b2", "BW": "#e69f00", "B": "#e69f00", "W": "#882255"}
LIGHTEST = 0.4
IDLE_COLOUR, INK, PAPER = "#ececec", "#1a1a1a", "#ffffff"
ROW, GAP, MARGIN, LABEL = 26, 6, 16, 62  # pixels
LETTER, ENTRY = 7, 44  # pixels: a letter of text, and a legend's entry without its text
NARROWEST, WIDEST = 20, 3600  # pixels: of the shortest task, unless the chart would be wider than that


def _headline(timeline: Timeline) -> str:
    schedule = timeline.schedule
    parts = [f"{schedule.stages} stages", f"{schedule.microbatches} microbatches"]
    if schedule.chunks > 1:
        parts.append(f"{schedule.chunks} chunks per stage")
    if timeline.batches > 1:
        parts.append(f"{timeline.batches} batches in a row")
    return f"{schedule.name}: {', '.join(parts)}"


def describe(timeline: Timeline) -> str:
    """Return the size of a schedule, and its cost."""
    return f"{_headline(timeline)}; {_summary(timeline)}"


def _summary(timeline: Timeline) -> str:
    parts = [f"makespan {timeline.makespan:g}"]
    if timeline.batches > 1:
        parts.append(f"{timeline.period:g} for each batch in the steady state")
    parts.append(f"bubble {100 * timeline.bubble:.1f} % of the ideal {timeline.ideal:g}")
    parts.append(f"peak activations per stage {' '.join(f'{held:g}' for held in timeline.peak_memory)}")
    if timeline.staleness:
        parts.append(f"weights behind by {timeline.staleness} update")
    return ", ".join(parts)


def _shortest_duration(timeline: Timeline) -> float:
    """Return the duration of the shortest task that takes any time."""
    return min(slot.end - slot.start for slots in timeline.tasks for slot in slots if slot.end > slot.start)


def _task_kinds(timeline: Timeline) -> list[str]:
    present = {slot.task.kind for slots in timeline.tasks for slot in slots}
    return [kind for kind in NAMES if kind in present]


def chart(timeline: Timeline, width: int = 100) -> str:
    """Draw the timeline as text, its rows no wider than `width`, with a legend and a summary.

    Tasks are shown by name if every name fits its duration; else by their microbatch, one character for each column, if
    the shortest task has a column; else by their kind.

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
    available = max(width - label, 1)
    units = timeline.makespan / _shortest_duration(timeline)
    longest = max(len(str(slot.task)) for slot in slots)
    columns = round(units * min(int(available / units), longest + 1)) if units <= available else available
    scale = columns / timeline.makespan

    def size(slot: Slot) -> int:
        return round(slot.end * scale) - round(slot.start * scale)

    by_name, by_microbatch = all(len(str(slot.task)) <= size(slot) for slot in slots), units <= available
    if by_name:
        legend = {kind: kind for kind in NAMES}
    elif by_microbatch:
        legend = {kind: f"{digits[0]}-{digits[-1]}" for kind, digits in DIGITS.items()}
    else:
        legend = {kind: kind[0] for kind in NAMES}

    def draw(slot: Slot) -> str:
        if by_name:
            return str(slot.task).ljust(size(slot))[: size(slot)]
        character = DIGITS[slot.task.kind][slot.task.microbatch % 10] if by_microbatch else slot.task.kind[0]
        return character * size(slot)

    lines = [_headline(timeline)]
    for stage, order in enumerate(timeline.tasks):
        cells = [IDLE] * columns
        for slot in order:
            cells[round(slot.start * scale) : round(slot.end * scale)] = draw(slot)
        lines.append(f"stage {stage}".ljust(label) + "".join(cells).rstrip())
    lines.append(", ".join([*(f"{legend[kind]} {NAMES[kind]}" for kind in _task_kinds(timeline)), f"{IDLE} idle"]))
    return "\n".join([*lines, _summary(timeline)])


def svg(timeline: Timeline) -> str:
    """Draw the timeline as a standalone SVG: a box for every task with its microbatch, lighter for later chunks.

    The tooltip of a box has its task, stage and times.

    Example:
    >>> from spmd.pipeline.schedules import make_schedule
    >>> from spmd.pipeline.simulate import simulate
    >>> svg(simulate(make_schedule("1f1b", stages=2, microbatches=2))).count('class="task"')
    8
    """
    schedule, title, text = timeline.schedule, _headline(timeline), _summary(timeline)
    scale = min(NARROWEST / _shortest_duration(timeline), WIDEST / timeline.makespan)
    entries = [*((COLOURS[kind], NAMES[kind]) for kind in _task_kinds(timeline)), (IDLE_COLOUR, "idle")]
    if schedule.chunks > 1:
        entries.append((lighten(COLOURS["F"], LIGHTEST), "lighter: later chunks of the model"))
    legend_width = sum(ENTRY + LETTER * len(name) for _, name in entries)
    chart_width = timeline.makespan * scale
    text_width = LETTER * max(4 / 3 * len(title), len(text))
    width = 2 * MARGIN + max(LABEL + chart_width, LABEL + legend_width, text_width)
    left, top = MARGIN + LABEL, MARGIN + 52
    bottom = top + schedule.stages * (ROW + GAP)
    height = bottom + 56
    style = {"role": "img", "font-family": "sans-serif", "font-size": "12", "viewBox": f"0 0 {width:g} {height:g}"}
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **style}, width=f"{width:g}", height=f"{height:g}")
    ET.SubElement(root, "title").text = _printable(describe(timeline))
    _add_box(root, 0, 0, width, height, PAPER)
    _add_text(root, MARGIN, MARGIN + 16, title, size=16)
    _add_text(root, MARGIN, MARGIN + 36, text)
    for stage, slots in enumerate(timeline.tasks):
        y = top + stage * (ROW + GAP)
        _add_text(root, MARGIN, y + ROW / 2 + 4, f"stage {stage}")
        _add_box(root, left, y, chart_width, ROW, IDLE_COLOUR, css="idle")
        for slot in slots:
            fill = lighten(COLOURS[slot.task.kind], LIGHTEST * slot.task.chunk / max(schedule.chunks - 1, 1))
            x, task_width = left + slot.start * scale, (slot.end - slot.start) * scale
            box = _add_box(root, x, y, task_width, ROW, fill, css="task")
            box.attrib.update({"stroke": PAPER, "stroke-width": "1"})
            ET.SubElement(box, "title").text = f"{slot.task} on stage {stage}, {slot.start:g} to {slot.end:g}"
            number = str(slot.task.microbatch)
            if task_width >= LETTER * len(number) + 2:
                _add_text(root, x + task_width / 2, y + ROW / 2 + 4, number, ink_on(fill), anchor="middle")
    _add_text(root, left, bottom + 12, "0")
    _add_text(root, left + chart_width, bottom + 12, f"{timeline.makespan:g}", anchor="end")
    _add_text(root, left + chart_width / 2, bottom + 12, "time", anchor="middle")
    x = left
    for colour, name in entries:
        _add_box(root, x, bottom + 26, 18, 14, colour, css="legend")
        _add_text(root, x + 24, bottom + 38, name)
        x += ENTRY + LETTER * len(name)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _add_box(root: ET.Element, x: float, y: float, width: float, height: float, fill: str, css: str = "") -> ET.Element:
    size = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}"}
    return ET.SubElement(root, "rect", {"class": css} if css else {}, **size, fill=fill)


def _add_text(
    root: ET.Element, x: float, y: float, text: str, fill: str = INK, *, size: int = 12, anchor: str = "start"
) -> None:
    place = {"x": f"{x:g}", "y": f"{y:g}", "font-size": str(size), "text-anchor": anchor}
    ET.SubElement(root, "text", place, fill=fill).text = _printable(text)


def _printable(text: str) -> str:
    # XML cannot hold control characters.
    return "".join(c if c.isprintable() else "?" for c in text)


def lighten(colour: str, share: float) -> str:
    """Mix a colour with white.

    Example:
        >>> lighten("#0072b2", 0.5)
        '#80b8d8'
    """
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in bytes.fromhex(colour[1:]))


def ink_on(fill: str) -> str:
    """Return the colour of text that is legible on a fill.

    Example:
        >>> ink_on("#0072b2"), ink_on("#e69f00")
        ('#ffffff', '#1a1a1a')
    """
    return PAPER if _luminance(fill) < 0.25 else INK


def _luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2.2, from 0 to 1."""
    channels = [n / 255 for n in bytes.fromhex(colour[1:])]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def write_svg(timeline: Timeline, path: str | Path) -> None:
    """Write the SVG to a file.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        Path(path).write_text(svg(timeline), encoding="utf-8")
    except OSError as error:
        problem = Problem(str(path), f"cannot be written: {error.strerror}", fix='--svg FILE, or --svg "" for none')
        raise ConfigError("The schedule was not drawn:", [problem]) from error


def to_json(timeline: Timeline) -> dict[str, Any]:
    """Return the schedule and its cost as JSON values: one row of tasks for each stage, as in a CSV file."""
    return {
        "schedule": timeline.schedule.name,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "peak_in_flight": timeline.peak_in_flight,
        "orders": to_csv(timeline.schedule).split(),
    }
