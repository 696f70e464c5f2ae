"""Pipeline schedules: what builders build can be run, and what cannot be run is refused with stage and tick."""

import dataclasses
import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.errors import ScheduleError
from spmd.pipeline.schedule import (
    Schedule,
    Task,
    check_schedule,
    execution_order,
    parse_task,
    repeat_schedule,
)
from spmd.pipeline.schedule_files import read_schedule, to_csv
from spmd.pipeline.schedules import SCHEDULES, make_schedule
from spmd.pipeline.simulate import simulate, tick_grid

COSTS = st.integers(1, 5)
EACH = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("pipedream", 1)]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule with a closed form, up to 8 stages."""
    name = draw(st.sampled_from([name for name, _ in EACH]))
    stages = draw(st.integers(1, 8))
    if name == "interleaved":
        return make_schedule(
            name, stages, stages * draw(st.integers(1, 4)), draw(st.integers(2, 4))
        )
    least = stages if name == "pipedream" else 1
    return make_schedule(name, stages, draw(st.integers(least, 24)))


def closed_form(schedule: Schedule, forward: int, backward: int) -> Fraction:
    """The bubble of one batch, as the papers in the docstring of `spmd.pipeline.schedules` have it."""
    work = forward + backward
    bubbles = {
        "gpipe": work,
        "1f1b": work,
        "interleaved": Fraction(work, schedule.chunks),
        "pipedream": 0,
    }
    return Fraction((schedule.stages - 1) * bubbles[schedule.name])


@settings(max_examples=120, deadline=None)
@given(schedules(), COSTS, COSTS)
def test_builders(schedule: Schedule, forward: int, backward: int) -> None:
    """Whatever the sizes and costs, every task runs once and a batch takes as long as the closed form says."""
    assert check_schedule(schedule) == []
    timeline = simulate(schedule, forward=forward, backward=backward)
    bubble = closed_form(schedule, forward, backward)
    assert timeline.ideal == schedule.microbatches * (forward + backward)
    assert timeline.period == float(timeline.ideal + bubble)
    assert timeline.bubble == pytest.approx(float(bubble / Fraction(timeline.ideal)), abs=1e-12)
    assert timeline.bubble_share == pytest.approx(
        float(bubble / Fraction(timeline.period)), abs=1e-12
    )


@settings(max_examples=60, deadline=None)
@given(schedules(), COSTS, COSTS, COSTS)
def test_times(schedule: Schedule, forward: int, backward: int, transfer: int) -> None:
    """In every timeline a stage runs one task at a time, and none before what it needs has arrived."""
    timeline = simulate(schedule, forward=forward, backward=backward, transfer=transfer)
    chunks = schedule.chunks
    duration = {"F": forward, "BW": backward}
    ends = {}
    for stage, slots in enumerate(timeline.tasks):
        assert all(earlier.end <= later.start for earlier, later in itertools.pairwise(slots))
        for slot in slots:
            assert slot.end - slot.start == pytest.approx(duration[slot.task.kind] / chunks)
            ends[schedule.pass_of(stage, slot.task)] = (stage, slot.end)
    last = schedule.stages * chunks - 1
    for stage, slots in enumerate(timeline.tasks):
        for kind, i, chunk, start in (
            (s.task.kind, s.task.microbatch, s.task.chunk, s.start) for s in slots
        ):
            at = schedule.virtual_stage(stage, chunk)
            needs = [("F", at - 1, i)]
            if kind == "BW":
                needs = [("F", at, i), ("BW", at + 1, i)]
            needs = [need for need in needs if 0 <= need[1] <= last]
            for source, end in (ends[need] for need in needs):
                assert start >= end + (transfer if source != stage else 0) - 1e-9


@settings(max_examples=60, deadline=None)
@given(schedules(), st.data())
def test_mutations(schedule: Schedule, data: st.DataObject) -> None:
    """A schedule in which one task is dropped, or runs twice, or comes before its own forward, is refused."""
    stage = data.draw(st.integers(0, schedule.stages - 1))
    order = list(schedule.orders[stage])
    index = data.draw(st.integers(0, len(order) - 1))
    task = order[index]

    def problems(changed: list[Task]) -> list[str]:
        orders = (*schedule.orders[:stage], tuple(changed), *schedule.orders[stage + 1 :])
        return [
            str(problem) for problem in check_schedule(dataclasses.replace(schedule, orders=orders))
        ]

    [dropped] = problems(order[:index] + order[index + 1 :])
    assert dropped.startswith(f"stage {stage}: tasks are missing: {task}")
    [twice] = problems([*order, task])
    assert twice.startswith(
        f"stage {stage}, tick {len(order)}: {task} repeats {task} of tick {index}"
    )
    if task.kind != "F":
        moved = [task, *order[:index], *order[index + 1 :]]
        assert any(
            f"stage {stage}, tick 0: deadlock: {task} waits for" in problem
            for problem in problems(moved)
        )


@pytest.mark.parametrize(("name", "chunks"), EACH)
def test_every_task_once(name: str, chunks: int) -> None:
    """The tasks of every stage are the forwards and the backwards of all microbatches."""
    expected = {
        Task(kind, i, chunk) for kind in ("F", "BW") for i in range(8) for chunk in range(chunks)
    }
    for order in make_schedule(name, 4, 8, chunks).orders:
        assert sorted(order) == sorted(expected)


def test_peaks() -> None:
    """GPipe holds every microbatch; 1F1B as many as stages are left."""
    for microbatches in (4, 8, 32):
        assert (
            simulate(make_schedule("gpipe", 4, microbatches)).peak_in_flight == (microbatches,) * 4
        )
        assert simulate(make_schedule("1f1b", 4, microbatches)).peak_in_flight == (4, 3, 2, 1)
    assert simulate(make_schedule("1f1b", 4, 2)).peak_in_flight == (2, 2, 2, 1)


def test_transfer() -> None:
    """What travels between stages delays a pipeline of one microbatch by two transfers for each boundary."""
    assert simulate(make_schedule("1f1b", 4, 1), transfer=0.25).makespan == 4 * 3 + 2 * 3 * 0.25


def test_exact() -> None:
    """Costs that no float holds exactly leave a bubble of exactly nothing where there is none."""
    for schedule in (make_schedule("pipedream", 3, 7), make_schedule("interleaved", 1, 7, 3)):
        assert simulate(schedule, forward=0.1, backward=0.5).bubble == 0.0


def test_pipedream() -> None:
    """Without a flush a batch costs m (F + B) in the steady state, and its weights are one update behind."""
    timeline = simulate(make_schedule("pipedream", 4, 8))
    assert (timeline.period, timeline.bubble, timeline.staleness, timeline.batches) == (24, 0, 1, 4)
    assert timeline.makespan == 4 * 24 + 3 * 3
    assert timeline.peak_in_flight == (4, 3, 2, 1)
    assert simulate(make_schedule("pipedream", 1, 8)).staleness == 0
    assert [
        simulate(make_schedule(name, 4, 8, v)).staleness for name, v in EACH if name != "pipedream"
    ] == [0] * 3


@pytest.mark.parametrize(("name", "chunks"), EACH)
def test_consecutive(name: str, chunks: int) -> None:
    """Several batches in a row run to their end; with a flush a stage begins one when it has ended the last."""
    schedule = make_schedule(name, 3, 6, chunks)
    several = repeat_schedule(schedule, 3)
    assert check_schedule(several) == []
    assert several.microbatches == 18
    if name == "pipedream":
        assert several.orders == make_schedule("1f1b", 3, 18).orders
    mixed = [
        [t.microbatch // 6 for t in o] != sorted(t.microbatch // 6 for t in o)
        for o in several.orders
    ]
    assert mixed == ([False] * 3 if schedule.flush else [True, True, False])


def test_places() -> None:
    """Every part of the model is on one stage, in one chunk, in turns around the stages."""
    schedule = Schedule("any", 1, 2, ((), (), ()))
    stages = {
        schedule.virtual_stage(stage, chunk): stage for stage in range(3) for chunk in range(2)
    }
    assert [stages[i] for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_as_table() -> None:
    """The table of ticks has every order, and takes as many ticks as a simulation in which every task costs one."""
    for name, chunks in EACH:
        schedule = make_schedule(name, 4, 8, chunks)
        table = tick_grid(schedule)
        assert tuple(tuple(task for task in row if task) for row in table) == schedule.orders
        assert len({len(row) for row in table}) == 1
        if name in ("gpipe", "1f1b", "interleaved"):
            assert len(table[0]) == simulate(schedule, forward=chunks, backward=chunks).makespan


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("1f2b", 2, 4), ["there is no '1f2b'", 'did you mean "1f1b"?']),
        (("1f1b", 0, -1, 0), ["stages: is 0", "microbatches: is -1", "chunks: is 0"]),
        (("1f1b", 2, 4, 2), ["chunks: 1f1b has one chunk", "chunks = 2", "interleaved"]),
        (
            ("interleaved", 4, 6, 1),
            ["chunks: interleaved runs several", "6 / (stages=4) = 1.5", "8 microbatches"],
        ),
        (
            ("pipedream", 4, 3, 2),
            ["pipedream needs one for each stage", "3 < stages = 4", "pipedream has one chunk"],
        ),
    ],
)
def test_bad_arguments(arguments: tuple, expected: list[str]) -> None:
    """What a schedule cannot do with is one error that says all of it, with the arithmetic."""
    with pytest.raises(ScheduleError) as error:
        make_schedule(*arguments)
    assert [text for text in expected if text not in str(error.value)] == []


@pytest.mark.parametrize("costs", [{"forward": -1}, {"backward": math.inf}, {"transfer": math.nan}])
def test_bad_costs(costs: dict[str, float]) -> None:
    """A cost that is negative or not finite is refused by its name."""
    with pytest.raises(ScheduleError, match=f"{next(iter(costs))}: is"):
        simulate(make_schedule("1f1b", 2, 2), **costs)


def test_no_work() -> None:
    """Work that takes no time has no bubble to speak of, and is refused."""
    with pytest.raises(ScheduleError, match="takes no time"):
        simulate(make_schedule("1f1b", 2, 2), forward=0, backward=0)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Task("X", 0), "kind: is 'X'"),
        (lambda: Task("F", -1), "microbatch: is -1"),
        (lambda: parse_task("F"), "'F' is not a task"),
        (lambda: parse_task("BW1d0"), "'BW1d0' is not a task"),
        (lambda: Schedule("any", 1, 1, ()), "stages: is 0"),
    ],
)
def test_bad_values(make, expected: str) -> None:
    """A task or a schedule that cannot be is refused when it is made."""
    with pytest.raises(ScheduleError) as error:
        make()
    assert expected in str(error.value)


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv(name: str, tmp_path) -> None:
    """A schedule that was written is read back whole: its orders, and whether it has a flush."""
    schedule = make_schedule(name, 4, 8, dict(EACH).get(name, 1))
    text = to_csv(schedule)
    (tmp_path / "mine.csv").write_text(text, encoding="utf-8")
    assert read_schedule(tmp_path / "mine.csv") == dataclasses.replace(schedule, name="mine")
    assert text.startswith("# flush=no") != schedule.flush


GOOD = "F0,F1,,BW0,,BW1\n,F0,BW0,F1,BW1,\n"


@pytest.mark.parametrize(
    "text", [GOOD, "\ufeff" + GOOD, GOOD.replace("\n", "\r\n"), GOOD.replace(",", " , ") + "\n"]
)
def test_csv_dialects(text: str, tmp_path) -> None:
    """A byte order mark, Windows line ends, spaces around cells and empty lines change nothing."""
    (tmp_path / "a.csv").write_text(text, encoding="utf-8", newline="")
    assert read_schedule(tmp_path / "a.csv").orders == make_schedule("1f1b", 2, 2).orders


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            GOOD.replace("F1,,", "G1,,"),
            ["stage 0, tick 1: 'G1' is not a task", "stage 0: tasks are missing: F1"],
        ),
        (GOOD.replace("F1,,", "F0,,"), ["stage 0, tick 1: F0 repeats F0 of tick 0", "missing: F1"]),
        (GOOD.replace(",BW1,\n", ",,\n"), ["stage 1: tasks are missing: BW1"]),
        (GOOD.replace(",BW1,\n", ",B1,\n"), ["'B1' is not a task", "tasks are missing: BW1"]),
        (GOOD.replace(",BW1,\n", ",BW1,BW1\n"), ["stage 1, tick 5: BW1 repeats BW1 of tick 4"]),
        (
            GOOD.replace("F0,F1,", "F0 F1,,"),
            ["stage 0, tick 0: a tick has one task", "F0 F1: 2 tasks"],
        ),
        (
            "F0,BW1,F1,BW0\n,F0,BW0,F1,BW1\n",
            [
                "stage 0, tick 1: deadlock: BW1 waits for F1 of stage 0",
                "F1 is at tick 2; stage 0 stops at tick 1",
                "stage 1, tick 3: deadlock: F1 waits for F1 of stage 0",
            ],
        ),
        (
            "F0,BW0,F1,BW1\n,F1,F0,,BW0,BW1\n",
            [
                "stage 0, tick 1: deadlock: BW0 waits for BW0 of stage 1",
                "BW0 is at tick 4; stage 1 stops at tick 1",
                "stage 1, tick 1: deadlock: F1 waits for F1 of stage 0",
            ],
        ),
        ("", ["has no tasks"]),
        (",,\n,,\n", ["has no tasks"]),
        ("F0,BW0\n,\n", ["stage 1: tasks are missing: F0 BW0"]),
        ("F0,BW0,F99999999999\n", ["missing: F1 BW1 F2 BW2 F3 BW3 F4 BW4 and more"]),
        ('"F0', ["cannot be read"]),
        ("# flush=no\nF0,BW0,F1,BW1\n,F0,BW0,F1,BW1\n", ["the order is another than 1F1B's"]),
        (
            "# flushes=no\n" + GOOD + "# end\n",
            ["line 1: '# flushes=no' has no meaning", "line 4: '# end'", "fix: # flush=no"],
        ),
    ],
)
def test_bad_csv(text: str, expected: list[str], tmp_path) -> None:
    """What is wrong with a file is one error that names the file, and for everything in it the stage and the tick."""
    (tmp_path / "mine.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ScheduleError) as error:
        read_schedule(tmp_path / "mine.csv")
    assert [part for part in ["mine.csv", *expected] if part not in str(error.value)] == []


def test_csv_of_another_size(tmp_path) -> None:
    """A file is held against the microbatches and chunks that are asked for, where they are."""
    path = tmp_path / "mine.csv"
    path.write_text(GOOD, encoding="utf-8")
    assert read_schedule(path, microbatches=2, chunks=1).microbatches == 2
    with pytest.raises(ScheduleError, match="stage 0: tasks are missing: F2 BW2"):
        read_schedule(path, microbatches=3)
    with pytest.raises(ScheduleError, match="stage 0, tick 1: F1 is outside the schedule"):
        read_schedule(path, microbatches=1)
    with pytest.raises(ScheduleError, match="cannot be read"):
        read_schedule(tmp_path / "absent.csv")


def test_what_cannot_run_is_not_simulated() -> None:
    """A deadlock is an error of everything that would have to run the schedule."""
    stuck = Schedule("stuck", 1, 1, ((parse_task("BW0"), parse_task("F0")),))
    assert execution_order(stuck) == ([], [0])
    for run in (simulate, tick_grid, to_csv):
        with pytest.raises(ScheduleError, match="deadlock"):
            run(stuck)
