"""Charts of a pipeline schedule, as text and as SVG.

Time runs from left to right, stages from top to bottom.
"""

import dataclasses
import xml.etree.ElementTree as ET
from typing import Any

from spmd.pipeline.schedule_files import to_csv
from spmd.pipeline.simulate import ScheduleTimeline, Slot

NAMES = {
    "F": "forward",
    "BW": "backward",
}
IDLE = "·"
# One character for a microbatch, from the last digit of its number.
DIGITS = {"F": "0123456789", "BW": "ABCDEFGHIJ"}

# Distinct under every kind of colour blindness, also where the last chunk is lighter by this share.
COLOURS = {"F": "#0072b2", "BW": "#e69f00"}
LIGHTEST = 0.4
IDLE_COLOUR, INK, PAPER = "#ececec", "#1a1a1a", "#ffffff"
ROW, GAP, MARGIN, LABEL = 26, 6, 16, 62  # pixels
LETTER, ENTRY = 7, 44  # pixels: a letter of text, and a legend's entry without its text
# Pixels: of the shortest task, unless the chart would be wider than that.
NARROWEST, WIDEST = 20, 3600


def _headline(timeline: ScheduleTimeline) -> str:
    schedule = timeline.schedule
    parts = [f"{schedule.stages} stages", f"{schedule.microbatches} microbatches"]
    if schedule.chunks > 1:
        parts.append(f"{schedule.chunks} chunks per stage")
    if timeline.batches > 1:
        parts.append(f"{timeline.batches} batches in a row")
    return f"{schedule.name}: {', '.join(parts)}"


def describe(timeline: ScheduleTimeline) -> str:
    """Return the size of a schedule, and its cost."""
    return f"{_headline(timeline)}; {_summary(timeline)}"


def _summary(timeline: ScheduleTimeline) -> str:
    parts = [f"makespan {timeline.makespan:g}"]
    if timeline.batches > 1:
        parts.append(f"{timeline.period:g} for each batch in the steady state")
    parts.append(f"bubble {100 * timeline.bubble:.1f} % of the ideal {timeline.ideal:g}")
    peaks = " ".join(map(str, timeline.peak_in_flight))
    parts.append(f"peak activations per stage {peaks}")
    if timeline.staleness:
        parts.append(f"weights behind by {timeline.staleness} update")
    return ", ".join(parts)


def _shortest_duration(timeline: ScheduleTimeline) -> float:
    """Return the duration of the shortest task, without tasks of duration 0."""
    return min(slot.end - slot.start for slot in _drawn_slots(timeline))


def _drawn_slots(timeline: ScheduleTimeline) -> list[Slot]:
    """Return the slots of all stages, without tasks of duration 0."""
    drawn = []
    for slots in timeline.tasks:
        for slot in slots:
            if slot.end > slot.start:
                drawn.append(slot)
    return drawn


def _task_kinds(timeline: ScheduleTimeline) -> list[str]:
    present = set()
    for slots in timeline.tasks:
        for slot in slots:
            present.add(slot.task.kind)
    return [kind for kind in NAMES if kind in present]


def chart(timeline: ScheduleTimeline, width: int = 100) -> str:
    """Draw the timeline as text, its rows no wider than `width`, with a legend and a summary.

    Tasks are shown by name if every name fits its duration; else by their microbatch, one character
    for each column, if the shortest task has a column; else by their kind.

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
    label = len(f"stage {timeline.schedule.stages - 1}  ")
    scale = _fit(timeline, max(width - label, 1))
    lines = [_headline(timeline)]
    for stage, order in enumerate(timeline.tasks):
        cells = [IDLE] * scale.columns
        for slot in order:
            cells[scale.first(slot) : scale.end(slot)] = scale.draw(slot)
        lines.append(f"stage {stage}".ljust(label) + "".join(cells).rstrip())
    legend = [f"{scale.sign(kind)} {NAMES[kind]}" for kind in _task_kinds(timeline)]
    lines.append(", ".join([*legend, f"{IDLE} idle"]))
    return "\n".join([*lines, _summary(timeline)])


@dataclasses.dataclass(frozen=True)
class _TextScale:
    """Columns of a chart as text, and the form of its tasks.

    Attributes:
        columns: Columns of the whole timeline.
        factor: Columns of one unit of time.
        by_name: Whether tasks are shown by name.
        by_microbatch: Whether they are shown by microbatch otherwise.
    """

    columns: int
    factor: float
    by_name: bool = False
    by_microbatch: bool = False

    def first(self, slot: Slot) -> int:
        """Return the first column of a task."""
        return round(slot.start * self.factor)

    def end(self, slot: Slot) -> int:
        """Return the column after a task."""
        return round(slot.end * self.factor)

    def size(self, slot: Slot) -> int:
        """Return the number of columns of a task."""
        return self.end(slot) - self.first(slot)

    def draw(self, slot: Slot) -> str:
        """Return a task as text of its length."""
        size = self.size(slot)
        task = slot.task
        if self.by_name:
            return str(task).ljust(size)[:size]
        if self.by_microbatch:
            return DIGITS[task.kind][task.microbatch % 10] * size
        return task.kind[0] * size

    def sign(self, kind: str) -> str:
        """Return the sign of a kind of task in the legend."""
        if self.by_name:
            return kind
        if self.by_microbatch:
            digits = DIGITS[kind]
            return f"{digits[0]}-{digits[-1]}"
        return kind[0]


def _fit(timeline: ScheduleTimeline, available: int) -> _TextScale:
    """Return the most detailed scale for a number of columns."""
    slots = _drawn_slots(timeline)
    units = timeline.makespan / _shortest_duration(timeline)
    longest = max(len(str(slot.task)) for slot in slots)
    columns = available
    if units <= available:
        columns = round(units * min(int(available / units), longest + 1))
    scale = _TextScale(columns, columns / timeline.makespan)
    return dataclasses.replace(
        scale,
        by_name=all(len(str(slot.task)) <= scale.size(slot) for slot in slots),
        by_microbatch=units <= available,
    )


def svg(timeline: ScheduleTimeline) -> str:
    """Draw the timeline as a standalone SVG: a box for every task with its microbatch.

    Boxes of later chunks are lighter. The tooltip of a box has its task, stage and times.

    Example:
    >>> from spmd.pipeline.schedules import make_schedule
    >>> from spmd.pipeline.simulate import simulate
    >>> svg(simulate(make_schedule("1f1b", stages=2, microbatches=2))).count('class="task"')
    8
    """
    chart = _SvgChart(timeline)
    chart.draw_title()
    for stage in range(len(timeline.tasks)):
        chart.draw_stage(stage)
    chart.draw_axis()
    chart.draw_legend()
    ET.indent(chart.root)
    return ET.tostring(chart.root, encoding="unicode") + "\n"


class _SvgChart:
    """SVG of a timeline with its sizes, in pixels; `root` is the element of the whole."""

    def __init__(self, timeline: ScheduleTimeline) -> None:
        self.timeline = timeline
        self.title = _headline(timeline)
        self.summary = _summary(timeline)
        # Pixels of one unit of time.
        self.scale = min(
            NARROWEST / _shortest_duration(timeline),
            WIDEST / timeline.makespan,
        )
        self.entries = _legend(timeline)
        self.left = MARGIN + LABEL
        self.top = MARGIN + 52
        self.bottom = self.top + timeline.schedule.stages * (ROW + GAP)
        self.chart_width = timeline.makespan * self.scale
        self.width = 2 * MARGIN + self._inner_width()
        self.height = self.bottom + 56
        self.root = ET.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "role": "img",
                "font-family": "sans-serif",
                "font-size": "12",
                "viewBox": f"0 0 {self.width:g} {self.height:g}",
            },
            width=f"{self.width:g}",
            height=f"{self.height:g}",
        )

    def _inner_width(self) -> float:
        """Return the width between the margins, of the widest part."""
        legend_width = sum(ENTRY + LETTER * len(name) for _, name in self.entries)
        title_width = LETTER * max(4 / 3 * len(self.title), len(self.summary))
        return max(LABEL + self.chart_width, LABEL + legend_width, title_width)

    def draw_title(self) -> None:
        """Draw the background and the texts above the chart."""
        ET.SubElement(self.root, "title").text = _printable(describe(self.timeline))
        _add_box(self.root, 0, 0, self.width, self.height, PAPER)
        _add_text(self.root, MARGIN, MARGIN + 16, self.title, size=16)
        _add_text(self.root, MARGIN, MARGIN + 36, self.summary)

    def draw_stage(self, stage: int) -> None:
        """Draw the row of a stage."""
        y = self.top + stage * (ROW + GAP)
        _add_text(self.root, MARGIN, y + ROW / 2 + 4, f"stage {stage}")
        _add_box(self.root, self.left, y, self.chart_width, ROW, IDLE_COLOUR, css="idle")
        for slot in self.timeline.tasks[stage]:
            self._draw_task(slot, stage, y)

    def _draw_task(self, slot: Slot, stage: int, y: float) -> None:
        """Draw the box of a task, with its microbatch if there is room."""
        last_chunk = max(self.timeline.schedule.chunks - 1, 1)
        fill = lighten(COLOURS[slot.task.kind], LIGHTEST * slot.task.chunk / last_chunk)
        x = self.left + slot.start * self.scale
        width = (slot.end - slot.start) * self.scale
        box = _add_box(self.root, x, y, width, ROW, fill, css="task")
        box.attrib.update({"stroke": PAPER, "stroke-width": "1"})
        times = f"{slot.start:g} to {slot.end:g}"
        ET.SubElement(box, "title").text = f"{slot.task} on stage {stage}, {times}"
        number = str(slot.task.microbatch)
        if width >= LETTER * len(number) + 2:
            middle = x + width / 2
            _add_text(self.root, middle, y + ROW / 2 + 4, number, ink_on(fill), anchor="middle")

    def draw_axis(self) -> None:
        """Draw the ends and the name of the axis of time."""
        y = self.bottom + 12
        right = self.left + self.chart_width
        middle = self.left + self.chart_width / 2
        _add_text(self.root, self.left, y, "0")
        _add_text(self.root, right, y, f"{self.timeline.makespan:g}", anchor="end")
        _add_text(self.root, middle, y, "time", anchor="middle")

    def draw_legend(self) -> None:
        """Draw the legend below the chart."""
        x = self.left
        for colour, name in self.entries:
            _add_box(self.root, x, self.bottom + 26, 18, 14, colour, css="legend")
            _add_text(self.root, x + 24, self.bottom + 38, name)
            x += ENTRY + LETTER * len(name)


def _legend(timeline: ScheduleTimeline) -> list[tuple[str, str]]:
    """Return the colours of a chart with their names."""
    entries = []
    for kind in _task_kinds(timeline):
        entries.append((COLOURS[kind], NAMES[kind]))
    entries.append((IDLE_COLOUR, "idle"))
    if timeline.schedule.chunks > 1:
        entries.append((lighten(COLOURS["F"], LIGHTEST), "lighter: later chunks of the model"))
    return entries


def _add_box(
    root: ET.Element,
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    css: str = "",
) -> ET.Element:
    attributes = {}
    if css:
        attributes["class"] = css
    size = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}"}
    return ET.SubElement(root, "rect", attributes, **size, fill=fill)


def _add_text(
    root: ET.Element,
    x: float,
    y: float,
    text: str,
    fill: str = INK,
    *,
    size: int = 12,
    anchor: str = "start",
) -> None:
    place = {"x": f"{x:g}", "y": f"{y:g}", "font-size": str(size), "text-anchor": anchor}
    ET.SubElement(root, "text", place, fill=fill).text = _printable(text)


def _printable(text: str) -> str:
    # XML cannot hold control characters.
    characters = []
    for character in text:
        characters.append(character if character.isprintable() else "?")
    return "".join(characters)


def lighten(colour: str, share: float) -> str:
    """Mix a colour with white.

    Example:
        >>> lighten("#0072b2", 0.5)
        '#80b8d8'
    """
    text = "#"
    for channel in bytes.fromhex(colour[1:]):
        lighter = round(channel + (255 - channel) * share)
        text += f"{lighter:02x}"
    return text


def ink_on(fill: str) -> str:
    """Return a legible colour for text on a fill.

    Example:
        >>> ink_on("#0072b2"), ink_on("#e69f00")
        ('#ffffff', '#1a1a1a')
    """
    return PAPER if _luminance(fill) < 0.25 else INK


def _luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2.2, from 0 to 1."""
    red, green, blue = map(_linear, bytes.fromhex(colour[1:]))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(channel: int) -> float:
    """Return the light of a channel of sRGB, from 0 to 1."""
    value = channel / 255
    if value <= 0.04045:
        return value / 12.92
    return ((value + 0.055) / 1.055) ** 2.4


def to_json(timeline: ScheduleTimeline) -> dict[str, Any]:
    """Return the schedule and its cost as JSON values.

    Each stage has one row of tasks, as in a CSV file.
    """
    return {
        "schedule": timeline.schedule.name,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "peak_in_flight": timeline.peak_in_flight,
        "orders": to_csv(timeline.schedule).splitlines(),
    }
