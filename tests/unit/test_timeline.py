"""Pictures of schedules show every task where and when it runs, and fit where they are put."""

import dataclasses
import itertools
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings

from spmd.analysis.schedule_chart import COLOURS, IDLE_COLOUR, LIGHTEST, chart, lighten, svg
from spmd.pipeline.schedule import Schedule
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.simulate import ScheduleTimeline, simulate
from tests.unit.test_schedules import schedules

SVG = "{http://www.w3.org/2000/svg}"


def rows_of(picture: str) -> list[str]:
    """What stands behind each stage's label."""
    return [line.split(maxsplit=2)[2] for line in picture.split("\n") if line.startswith("stage ")]


def boxes_of(picture: str, css: str) -> list[ET.Element]:
    return [box for box in ET.fromstring(picture).iter(f"{SVG}rect") if box.get("class") == css]


def number(element: ET.Element, name: str) -> float:
    return float(element.get(name, "nan"))


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_chart_fits(schedule: Schedule) -> None:
    """Whatever the schedule, there is a row for each stage, none wider than was asked for."""
    for width in (60, 100):
        picture = chart(simulate(schedule), width)
        rows = [line for line in picture.split("\n") if line.startswith("stage ")]
        assert len(rows) == schedule.stages
        assert max(len(row) for row in rows) <= width


def test_chart_of_words() -> None:
    """Where there is room every task is written out, in order; F, BW and idle time are told apart."""
    timeline = simulate(make_schedule("1f1b", 4, 8))
    for row, order in zip(rows_of(chart(timeline)), timeline.schedule.orders, strict=True):
        assert re.findall(r"[FBW]+\d+", row) == [str(task) for task in order]
    assert rows_of(chart(timeline))[3].startswith("······F0BW0 F1BW1 F2BW2 F3BW3 F4")


def test_chart_of_microbatches() -> None:
    """Where words do not fit, a digit is a forward and a capital a backward."""
    rows = rows_of(chart(simulate(make_schedule("1f1b", 2, 12)), width=50))
    assert rows == [
        "01··AA2BB3CC4DD5EE6FF7GG8HH9II0JJ1AA·BB",
        "·0AA1BB2CC3DD4EE5FF6GG7HH8II9JJ0AA1BB··",
    ]


def test_chart_of_kinds() -> None:
    """A chart in which several tasks share a column shows their kinds, and idle time where it is."""
    rows = rows_of(chart(simulate(make_schedule("1f1b", 4, 64))))
    assert [set(row) for row in rows] == [set("FB·")] * 4
    assert [len(row) - len(row.lstrip("·")) for row in rows] == [0, 0, 1, 1]


def test_chart_of_unequal_costs() -> None:
    """A task has columns in proportion to its time."""
    picture = chart(simulate(make_schedule("1f1b", 2, 2), forward=1, backward=4), width=40)
    assert rows_of(picture) == ["F0F1········BW0     ··BW1", "··F0BW0     F1BW1     ········"]


def test_chart_says() -> None:
    """The first line says what is drawn; the last two have the legend and what it comes to."""
    first, *_, legend, last = chart(simulate(make_schedule("1f1b", 4, 8))).split("\n")
    assert first == "1f1b: 4 stages, 8 microbatches"
    assert legend == "F forward, BW backward, · idle"
    assert last == "makespan 33, bubble 37.5 % of the ideal 24, peak activations per stage 4 3 2 1"
    first, *_, last = chart(simulate(make_schedule("pipedream", 2, 2))).split("\n")
    assert first == "pipedream: 2 stages, 2 microbatches, 4 batches in a row"
    assert "6 for each batch in the steady state, bubble 0.0 %" in last
    assert last.endswith("weights behind by 1 update")
    assert "2 chunks per stage" in chart(simulate(make_schedule("interleaved", 2, 2, 2)))


@pytest.mark.parametrize(
    "schedule",
    [
        make_schedule("gpipe", 2, 2),
        make_schedule("interleaved", 4, 8, 2),
        make_schedule("pipedream", 4, 8),
        make_schedule("1f1b", 8, 64),
    ],
    ids=lambda schedule: schedule.name,
)
def test_svg(schedule: Schedule) -> None:
    """The SVG has one box for each task, in its stage's row, as long as the task takes, and all inside the picture."""
    timeline = simulate(schedule)
    picture = svg(timeline)
    root = ET.fromstring(picture)
    tasks, idle = boxes_of(picture, "task"), boxes_of(picture, "idle")
    slots = [(stage, slot) for stage, slots in enumerate(timeline.tasks) for slot in slots]
    assert len(tasks) == len(slots)
    assert len(idle) == schedule.stages
    scale = number(idle[0], "width") / timeline.makespan
    for box, (stage, slot) in zip(tasks, slots, strict=True):
        assert number(box, "y") == number(idle[stage], "y")
        assert number(box, "x") == pytest.approx(
            number(idle[0], "x") + slot.start * scale, rel=1e-4
        )
        assert number(box, "width") == pytest.approx((slot.end - slot.start) * scale, rel=1e-4)
        assert (
            box.findtext(f"{SVG}title")
            == f"{slot.task} on stage {stage}, {slot.start:g} to {slot.end:g}"
        )
    for box in root.iter(f"{SVG}rect"):
        assert number(box, "x") + number(box, "width") <= number(root, "width")
        assert number(box, "y") + number(box, "height") <= number(root, "height")
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert [text for text in texts if text and text.isdigit()].count("1") >= schedule.stages
    assert [f"stage {stage}" in texts for stage in range(schedule.stages)] == [
        True
    ] * schedule.stages
    assert (
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches"
        in str(texts[0])
    )
    assert "bubble" in str(root.findtext(f"{SVG}title"))


def test_svg_control() -> None:
    """A timeline that lacks a task has a box less."""
    timeline = simulate(make_schedule("1f1b", 2, 2))
    changed: ScheduleTimeline = dataclasses.replace(
        timeline, tasks=(timeline.tasks[0][1:], *timeline.tasks[1:])
    )
    assert len(boxes_of(svg(changed), "task")) == len(boxes_of(svg(timeline), "task")) - 1


def test_svg_escapes() -> None:
    """A name that is markup, or has characters that XML cannot hold, is text in a picture that can be read."""
    schedule = dataclasses.replace(
        make_schedule("1f1b", 2, 2), name='</text><rect class="task"/>&\x00\x1b'
    )
    picture = svg(simulate(schedule))
    assert len(boxes_of(picture, "task")) == 8
    assert '</text><rect class="task"/>&??' in str(ET.fromstring(picture).findtext(f"{SVG}text"))


# Machado et al. 2009, table 1 at severity 1: linear RGB as seen without one kind of cone.
SEEN = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no long": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no medium": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no short": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
# over the white of D65
TO_XYZ = ((0.4339, 0.3763, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))


def lab(colour: str, cones: str) -> list[float]:
    """CIE L*a*b* of a colour as seen with those cones."""
    srgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    light = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in srgb]
    for matrix in (SEEN[cones], TO_XYZ):
        light = [
            min(max(sum(a * b for a, b in zip(row, light, strict=True)), 0), 1) for row in matrix
        ]
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in light)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


def nearest(colours: list[str], cones: str) -> float:
    """The least difference of two of the colours, CIE 1976; 2.3 is just noticeable."""
    return min(
        sum((p - q) ** 2 for p, q in zip(lab(a, cones), lab(b, cones), strict=True)) ** 0.5
        for a, b in itertools.combinations(colours, 2)
    )


@pytest.mark.parametrize("cones", SEEN)
@pytest.mark.parametrize("share", [0, LIGHTEST])
def test_colours(cones: str, share: float) -> None:
    """Forward, backward and idle are apart for every kind of colour blindness, in each chunk."""
    colours = [lighten(COLOURS[kind], share) for kind in COLOURS]
    assert nearest([*colours, IDLE_COLOUR], cones) > 15


def test_colours_control() -> None:
    """Red and green of equal lightness are not apart for who lacks the medium cones."""
    assert (
        nearest(["#b04a3a", "#6f7322"], "no medium") < 15 < nearest(["#b04a3a", "#6f7322"], "all")
    )
