"""Schedules in step: played back without arrays, every task of the tick tables finds what it needs."""

import dataclasses
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.errors import ScheduleError
from spmd.pipeline.schedule import Schedule, Task, check_schedule
from spmd.pipeline.schedule_files import read_schedule, to_csv
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.simulate import simulate
from spmd.pipeline.tick_table import IDLE, TickTable, tabulate

EXECUTED = ("gpipe", "1f1b", "interleaved")
# what a group of layers gets: its microbatch and the group; None: zeros
Value = tuple[int, int] | None


class Replay:
    """The engine without arrays: names stand in their place, and what is wrong with the tables is noted."""

    def __init__(self, table: TickTable) -> None:
        stages = table.stages
        self.table = table
        self.last = stages * table.chunks - 1
        self.inputs: list[list[Value]] = [[None] * table.depth for _ in range(stages)]
        self.saved: list[list[Value]] = [[None] * table.saved_depth for _ in range(stages)]
        self.gradients: list[list[Value]] = [[None] * table.gradient_depth for _ in range(stages)]
        self.sent: list[Value] = [None] * stages
        self.sent_back: list[Value] = [None] * stages
        self.forward: Counter[Value] = Counter()
        self.backward: Counter[Value] = Counter()
        self.where = ""
        self.problems: list[str] = []

    def put(self, slots: list[Value], slot: int, value: Value) -> None:
        if slot == IDLE:
            return
        if value is None:
            self.problems.append(f"{self.where}: slot {slot} gets nothing")
        slots[slot] = value

    def take(self, slots: list[Value], slot: int, expected: Value, what: str) -> None:
        found: object = "no slot"
        if slot != IDLE:
            found = slots[slot]
        if found != expected:
            self.problems.append(f"{self.where}: the {what} of {expected} is {found}")

    def tick(self, tick: int) -> None:
        """All stages receive what was sent in the tick before, and send what they compute."""
        stages = self.table.stages
        arrived = [self.sent[-1], *self.sent[:-1]]
        arrived_back = [*self.sent_back[1:], self.sent_back[0]]
        if self.table.chunks == 1:  # the last stage sends nothing to the first one
            arrived[0] = arrived_back[-1] = None
        self.sent, self.sent_back = [None] * stages, [None] * stages
        for stage in range(stages):
            self.where = f"tick {tick}, stage {stage}"
            do = {name: int(column[tick, stage]) for name, column in self.table.columns.items()}
            self.put(self.inputs[stage], do["receive_slot"], arrived[stage])
            if do["forward"] != IDLE:
                self.run_forward(stage, do)
            self.put(self.gradients[stage], do["gradient_receive_slot"], arrived_back[stage])
            if do["backward"] != IDLE:
                self.run_backward(stage, do)

    def run_forward(self, stage: int, do: dict[str, int]) -> None:
        group = do["forward_chunk"] * self.table.stages + stage
        task = do["forward"], group
        if group == 0:
            self.put(self.inputs[stage], do["forward_slot"], task)
        self.take(self.inputs[stage], do["forward_slot"], task, "input")
        if self.table.saved_depth:
            self.put(self.saved[stage], do["forward_saved_slot"], task)
        self.forward[task] += 1
        self.sent[stage] = do["forward"], group + 1

    def run_backward(self, stage: int, do: dict[str, int]) -> None:
        group = do["backward_chunk"] * self.table.stages + stage
        task = do["backward"], group
        if self.table.saved_depth:
            self.take(self.saved[stage], do["backward_saved_slot"], task, "saved arrays")
        else:
            self.take(self.inputs[stage], do["backward_slot"], task, "stored input")
        if group < self.last:
            self.take(self.gradients[stage], do["gradient_slot"], task, "gradient")
        elif do["gradient_slot"] != IDLE:
            self.problems.append(f"{self.where}: the last group has a gradient slot")
        self.backward[task] += 1
        self.sent_back[stage] = do["backward"], group - 1

    def check_counts(self, name: str, counts: Counter[Value], groups: int) -> None:
        tasks = itertools.product(range(self.table.microbatches), range(groups))
        if counts != Counter(tasks):
            self.problems.append(f"{name} tasks do not run once each")


def replay(table: TickTable) -> list[str]:
    """What is wrong with the tables: they are stepped through as the engine does, with names in the place of arrays."""
    played = Replay(table)
    for tick in range(table.ticks):
        played.tick(tick)
    # Where backward tasks run the forward pass again, the last group has no other.
    played.check_counts("forward", played.forward, played.last + bool(table.saved_depth))
    played.check_counts("backward", played.backward, played.last + 1)
    return played.problems


@st.composite
def named(draw: st.DrawFn) -> Schedule:
    """A schedule that is executed, of 2 to 8 stages."""
    name, stages = draw(st.sampled_from(EXECUTED)), draw(st.integers(2, 8))
    if name == "interleaved":
        return make_schedule(
            name, stages, stages * draw(st.integers(1, 4)), draw(st.integers(2, 4))
        )
    return make_schedule(name, stages, draw(st.integers(1, 20)))


@st.composite
def any_order(draw: st.DrawFn) -> Schedule:
    """A schedule in which whatever can run next runs next, as chance will have it."""
    stages, microbatches, chunks = (
        draw(st.integers(2, 4)),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 3)),
    )
    random = draw(st.randoms(use_true_random=False))
    groups = stages * chunks
    left = {
        (kind, group, i)
        for kind in ("F", "BW")
        for group in range(groups)
        for i in range(microbatches)
    }
    orders: list[list[Task]] = [[] for _ in range(stages)]

    def can_run(kind: str, group: int, i: int) -> bool:
        if kind == "F":
            return group == 0 or ("F", group - 1, i) not in left
        return ("F", group, i) not in left and (
            group + 1 == groups or ("BW", group + 1, i) not in left
        )

    while left:
        task = random.choice(sorted(task for task in left if can_run(*task)))
        left.remove(task)
        kind, group, i = task
        orders[group % stages].append(Task(kind, i, group // stages))
    return Schedule("any order", microbatches, chunks, tuple(map(tuple, orders)))


@settings(max_examples=60, deadline=None)
@given(named(), st.booleans())
def test_every_task_finds_its_own(schedule: Schedule, recompute: bool) -> None:
    """Every task runs once, and finds its own arrays in its slots: arrived, and not overwritten."""
    assert replay(tabulate(schedule, recompute=recompute)) == []


@settings(max_examples=60, deadline=None)
@given(any_order(), st.booleans())
def test_any_legal_order(schedule: Schedule, recompute: bool) -> None:
    """An order that nobody would write down is put in step as well, if it can be run at all."""
    assert check_schedule(schedule) == []
    assert replay(tabulate(schedule, recompute=recompute)) == []


def test_a_file_in_another_order(tmp_path: Path) -> None:
    """A file whose microbatches go forward in one order and backward in another is put in step."""
    path = tmp_path / "odd.csv"
    path.write_text("F2,F0,F1,,,BW0,BW2,BW1\n,F2,F0,BW0,F1,BW2,BW1,\n", encoding="utf-8")
    table = tabulate(read_schedule(path))
    assert replay(table) == []
    assert [i for i in table.forward[:, 0] if i != IDLE] == [2, 0, 1]
    assert [i for i in table.backward[:, 0] if i != IDLE] == [0, 2, 1]


@settings(max_examples=30, deadline=None)
@given(named())
def test_files_change_nothing(tmp_path_factory: pytest.TempPathFactory, schedule: Schedule) -> None:
    """A schedule that went through a file has the same tables."""
    path = tmp_path_factory.mktemp("schedules") / "schedule.csv"
    path.write_text(to_csv(schedule), encoding="utf-8")
    table, again = tabulate(schedule), tabulate(read_schedule(path))
    assert all(
        np.array_equal(column, again.columns[name]) for name, column in table.columns.items()
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [
        make_schedule("gpipe", 3, 4),
        make_schedule("1f1b", 3, 7),
        make_schedule("interleaved", 2, 4, 2),
    ],
    ids=lambda schedule: schedule.name,
)
def test_replay_control(schedule: Schedule, recompute: bool) -> None:
    """Whichever entry of the tables is another number, the replay reports it."""
    table = tabulate(schedule, recompute=recompute)
    slots = {
        "receive_slot": table.depth,
        "forward_slot": table.depth,
        "forward_saved_slot": table.saved_depth,
        "backward_slot": table.depth,
        "backward_saved_slot": table.saved_depth,
        "gradient_receive_slot": table.gradient_depth,
        "gradient_slot": table.gradient_depth,
    }
    microbatches = dict.fromkeys(("forward", "backward"), table.microbatches)
    chunks = dict.fromkeys(("forward_chunk", "backward_chunk"), table.chunks)
    sizes = slots | microbatches | chunks
    assert sizes.keys() == table.columns.keys()
    changes = 0
    for name, column in table.columns.items():
        for tick, stage in np.argwhere(column != IDLE):
            changed = column.copy()
            after = (column[tick, stage] + 1) % sizes[name]
            changed[tick, stage] = after if after != column[tick, stage] else IDLE
            assert replay(dataclasses.replace(table, **{name: changed})), (name, tick, stage)
            changes += 1
    tasks = schedule.microbatches * schedule.stages * schedule.chunks
    assert changes > 6 * tasks, (
        "each task has at least its number, chunk and slot, forward and backward"
    )


@settings(max_examples=80, deadline=None)
@given(named(), st.integers(1, 5), st.integers(1, 5))
def test_time(schedule: Schedule, forward: int, backward: int) -> None:
    """It takes as long as its published schedule; where backward tasks run the forward pass again, less one forward
    task: the last group's, which is the first half of its backward task, so the first of them delays nothing."""
    makespan = simulate(schedule, forward=forward, backward=backward).makespan
    assert tabulate(schedule).time(forward, backward) == pytest.approx(makespan)
    again = tabulate(schedule, recompute=True).time(forward, backward)
    assert again == pytest.approx(makespan - forward / schedule.chunks)


@settings(max_examples=60, deadline=None)
@given(named())
def test_depth(schedule: Schedule) -> None:
    """GPipe keeps every microbatch, 1F1B at most 2(p − 1) + 1 of them, and each gradient is used when it arrives."""
    table = tabulate(schedule)
    if schedule.name != "interleaved":
        most = {"gpipe": schedule.microbatches, "1f1b": 2 * (schedule.stages - 1) + 1}[
            schedule.name
        ]
        assert table.saved_depth == min(schedule.microbatches, most)
        assert tabulate(schedule, recompute=True).depth == table.saved_depth
    assert table.depth == 1, "the input of a forward task is read as soon as it arrives"
    assert table.gradient_depth == 1


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (4, 3), (8, 4)])
def test_interleaved_is_flat(stages: int, chunks: int) -> None:
    """Interleaved keeps what the published schedule holds at its fullest stage, however many microbatches there are."""
    schedules = [
        make_schedule("interleaved", stages, turns * stages, chunks) for turns in (2, 3, 8)
    ]
    depths = {tabulate(schedule).saved_depth for schedule in schedules}
    assert (
        depths
        == {max(simulate(schedules[0]).peak_in_flight)}
        == {2 * (stages - 1) + (chunks - 1) * stages + 1}
    )


def test_busy_all_the_time() -> None:
    """Once its first gradient came, a stage of 1F1B has a forward and a backward task in every tick until its forward
    tasks are done."""
    table = tabulate(make_schedule("1f1b", 4, 16))
    for stage in range(3):
        first = int(np.argmax(table.backward[:, stage] != IDLE))
        end = int(np.argwhere(table.forward[:, stage] != IDLE)[-1, 0]) + 1
        assert end - first > 8
        assert (table.forward[first:end, stage] != IDLE).all()
        assert (table.backward[first:end, stage] != IDLE).all()


def test_refused() -> None:
    """What cannot be executed is refused, with every reason."""
    with pytest.raises(ScheduleError, match="can be simulated but not executed") as refused:
        tabulate(make_schedule("pipedream", 3, 3))
    assert [problem.what for problem in refused.value.problems] == [
        "has microbatches of three batches in flight"
    ]
    odd = dataclasses.replace(make_schedule("gpipe", 1, 4), flush=False)
    with pytest.raises(ScheduleError, match=r"has no flush, and another(.|\n)*has one stage"):
        tabulate(odd)
