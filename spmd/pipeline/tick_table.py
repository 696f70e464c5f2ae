"""A pipeline schedule as tables that one SPMD program steps through.

The stages of an SPMD program go in step: what a stage sends at the end of a tick, its neighbour has in the next. A tick
has room for one forward task and then for one backward task, so stages that do the same at the same time wait for each
other as little as the schedule allows.

```
tick        0      1      2      3
stage 0   F0 ·   F1 ·   F2 B0  F3 B1      the last stage takes a microbatch forward and backward in one tick:
stage 1    · ·   F0 B0  F1 B1  F2 B2      its forward task is the first half of its backward task
```

A backward task waits for all that the schedule lists before it. A forward task does not wait for backward tasks before
it: it runs as soon as its input is there. So GPipe stays what it is, and 1F1B holds up to 2(p − s) − 1 microbatches at
stage s instead of p − s; that many are needed to be busy all the time where sending takes a tick (eager 1F1B, Zhuang et
al., arXiv:2211.05322). The length is the published one.
"""

import dataclasses

import numpy as np

from spmd.errors import Problem, ScheduleError
from spmd.pipeline.schedule import Schedule, Task

IDLE = -1


@dataclasses.dataclass(frozen=True, eq=False)
class TickTable:
    """What every stage does in every tick: `[tick, stage]` arrays of int32, -1 for nothing.

    A stage keeps what enters each of its tasks in `depth` slots from when it arrives until it went backward, and the
    gradients that arrive in `gradient_depth` slots.

    Attributes:
        microbatches: How many there are.
        chunks: Parts of the layers that each stage has.
        depth: Slots for what enters, of the stage that needs most.
        gradient_depth: Slots for gradients.
        versions: How many batches are under way. Microbatches of the batch before count on: `microbatches`, ….
        arrives: The slot for what the stage before sent in the tick before.
        forward: The microbatch of the forward task.
        forward_chunk: Its part of the stage's layers.
        forward_slot: Where its input is; of the first task of a microbatch, where it is put.
        gradient_arrives: The slot for the gradient that the stage behind sent in the tick before.
        backward: The microbatch of the backward task.
        backward_chunk: Its part of the stage's layers.
        backward_slot: Where the input of its forward task is.
        gradient_slot: Where its gradient is; -1 in the last task of a microbatch, which begins with the loss.
    """

    microbatches: int
    chunks: int
    depth: int
    gradient_depth: int
    arrives: np.ndarray
    forward: np.ndarray
    forward_chunk: np.ndarray
    forward_slot: np.ndarray
    gradient_arrives: np.ndarray
    backward: np.ndarray
    backward_chunk: np.ndarray
    backward_slot: np.ndarray
    gradient_slot: np.ndarray
    versions: int = 1

    @property
    def ticks(self) -> int:
        """How many ticks there are."""
        return self.forward.shape[0]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.forward.shape[1]

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), np.ndarray)
        }

    def time(self, forward: float, backward: float) -> float:
        """How long it takes, where every stage waits for the slowest in each half of a tick.

        Args:
            forward: Time of a forward task of all layers of a stage.
            backward: Time of a backward task, with what it computes again.
        """
        halves = ((self.forward, forward), (self.backward, backward))
        return sum((tasks >= 0).any(axis=1).sum() * time / self.chunks for tasks, time in halves)


def tabulate(schedule: Schedule) -> TickTable:
    """The schedule in step.

    Raises:
        ScheduleError: It cannot be executed: it splits the backward pass, or goes through the stages in another order
            than round and round, or has microbatches of three batches under way.
    """
    if problems := _not_executed(schedule):
        raise ScheduleError("This schedule can be drawn and not executed:", problems)
    if not schedule.flush:
        return _steady(schedule.stages, schedule.microbatches)
    stages, count = schedule.stages, schedule.stages * schedule.chunks
    ticks = _ticks(schedule)
    forward, backward = (
        {task: tick for task, tick in ticks.items() if (task[2] == "F") == is_forward} for is_forward in (True, False)
    )
    length = max(backward.values()) + 1
    names = [field.name for field in dataclasses.fields(TickTable) if field.name not in _SIZES]
    columns = {name: np.full((length, stages), IDLE, np.int32) for name in names}

    def own(group: int) -> tuple[int, int]:
        """The stage that has a group of layers, and which of its chunks that is."""
        return group % stages, group // stages

    inputs: list[list[tuple[int, int, tuple]]] = [[] for _ in range(stages)]
    gradients: list[list[tuple[int, int, tuple]]] = [[] for _ in range(stages)]
    for (i, group, _), tick in backward.items():
        stage, chunk = own(group)
        columns["backward"][tick, stage], columns["backward_chunk"][tick, stage] = i, chunk
        begins = forward[i, 0, "F"] if group == 0 else forward[i, group - 1, "F"] + 1
        inputs[stage].append((begins, tick, (i, group)))
        if group + 1 < count:
            gradients[stage].append((backward[i, group + 1, "B"] + 1, tick, (i, group)))
    slots, depths = zip(*map(_slots, inputs), strict=True)
    gradient_slots, gradient_depths = zip(*map(_slots, gradients), strict=True)
    for (i, group, _), tick in forward.items():
        if group + 1 == count:
            continue  # the first half of its backward task
        stage, chunk = own(group)
        columns["forward"][tick, stage], columns["forward_chunk"][tick, stage] = i, chunk
        columns["forward_slot"][tick, stage] = slots[stage][i, group]
    for stage in range(stages):
        for begins, tick, (i, group) in inputs[stage]:
            columns["backward_slot"][tick, stage] = slots[stage][i, group]
            if group:
                columns["arrives"][begins, stage] = slots[stage][i, group]
        for begins, tick, task in gradients[stage]:
            columns["gradient_slot"][tick, stage] = gradient_slots[stage][task]
            columns["gradient_arrives"][begins, stage] = gradient_slots[stage][task]
    return TickTable(schedule.microbatches, schedule.chunks, max(depths), max(1, *gradient_depths), **columns)  # type: ignore[arg-type]


def describe_execution(schedule: Schedule) -> str:
    """One line on how the schedule is executed, or why it is not.

    Example:
        >>> from spmd.pipeline.schedules import make_schedule
        >>> how_executed(make_schedule("1f1b", stages=2, microbatches=8))
        'executed in lock step: 10 ticks of a forward and a backward task; a stage holds the inputs of at most 3 tasks'
    """
    if problems := _not_executed(schedule):
        return f"drawn, not executed: it {problems[0].what}; {problems[0].fix}"
    program = tabulate(schedule)
    if not schedule.flush:
        kept = f"a stage holds the inputs of at most {program.depth} tasks, and the weights of the batch before"
        return f"executed without a flush: {program.ticks} ticks of a forward and a backward task a batch; {kept}"
    held = f"a stage holds the inputs of at most {program.depth} tasks"
    return f"executed in lock step: {program.ticks} ticks of a forward and a backward task; {held}"


_SIZES = ("microbatches", "chunks", "depth", "gradient_depth", "versions")


def _not_executed(schedule: Schedule) -> list[Problem]:
    kinds = {task.kind for order in schedule.orders for task in order}
    problems = []
    if split := sorted(kinds & {"B", "W"}):
        what = f"splits the backward pass into {' and '.join(split)}"
        problems.append(Problem(f"schedule {schedule.name}", what, fix="gpipe, 1f1b, interleaved, or a table of F, BW"))
    if schedule.placement != "loop":
        what = f"goes through the stages in the order of a {schedule.placement}"
        problems.append(Problem(f"schedule {schedule.name}", what, fix="chunk c of stage s: layers c × stages + s"))
    if schedule.stages == 1:
        problems.append(Problem(f"schedule {schedule.name}", "has one stage", fix="2 stages or more, or accumulate"))
    least = 2 * (schedule.stages - 1)
    if not schedule.flush and schedule.microbatches < least:
        what = "has microbatches of three batches under way"
        arithmetic = f"{schedule.microbatches} < 2 × (stages={schedule.stages} - 1)"
        problems.append(Problem(f"schedule {schedule.name}", what, arithmetic, f"{least} microbatches or more"))
    return problems


def _ticks(schedule: Schedule) -> dict[tuple[int, int, str], int]:
    """(microbatch, group of layers, "F" or "B") → its tick. The last group's forward task takes no room."""
    stages, last = schedule.stages, schedule.stages * schedule.chunks - 1
    forward, backward = (
        [[task for task in order if (task.kind == "F") == is_forward] for order in schedule.orders]
        for is_forward in (True, False)
    )
    waits_for = [_forward_tasks_before(order) for order in schedule.orders]
    done: dict[tuple[int, int, str], int] = {}
    next_forward, next_backward = [0] * stages, [0] * stages
    total = sum(map(len, schedule.orders))
    tick = 0
    while len(done) < total:
        before = len(done)
        for stage in range(stages):
            room = 1
            while next_forward[stage] < len(forward[stage]):
                task = forward[stage][next_forward[stage]]
                group = task.chunk * stages + stage
                if not (group == 0 or done.get((task.microbatch, group - 1, "F"), tick) < tick):
                    break
                if group < last:
                    if not room:
                        break
                    room = 0
                done[task.microbatch, group, "F"] = tick
                next_forward[stage] += 1
        for stage in range(stages):
            if next_backward[stage] == len(backward[stage]):
                continue
            task = backward[stage][next_backward[stage]]
            group = task.chunk * stages + stage
            has_gradient = group == last or done.get((task.microbatch, group + 1, "B"), tick) < tick
            if has_gradient and next_forward[stage] >= waits_for[stage][next_backward[stage]]:
                done[task.microbatch, group, "B"] = tick
                next_backward[stage] += 1
        tick += 1
        assert len(done) > before, "a schedule that was checked has no deadlock"
    return done


def _steady(stages: int, microbatches: int) -> TickTable:
    """1F1B that never runs dry: every stage has a forward and a backward task in every tick of a batch.

    When a batch begins, the last microbatches of the one before are still under way: those of its tasks that are not
    done are done by tables that count its microbatches on. The slot of a microbatch is its number modulo the slots, of
    the batch before its number less `microbatches`.
    """
    depth = 2 * stages - 1
    tick, stage = np.arange(microbatches)[:, None], np.arange(stages)[None]
    forward, backward = tick - stage, tick - (2 * (stages - 1) - stage)
    one = np.zeros_like(forward)

    def number(i: np.ndarray) -> np.ndarray:
        return np.where(i < 0, i + 2 * microbatches, i).astype(np.int32)

    def only(chosen: np.ndarray, column: np.ndarray) -> np.ndarray:
        return np.where(chosen, column, IDLE).astype(np.int32)

    not_first, not_last = one + stage > 0, one + stage < stages - 1
    return TickTable(
        microbatches=microbatches,
        chunks=1,
        depth=depth,
        gradient_depth=1,
        arrives=only(not_first, forward % depth),
        forward=only(not_last, number(forward)),
        forward_chunk=only(not_last, one),
        forward_slot=only(not_last, forward % depth),
        gradient_arrives=only(not_last, one),
        backward=number(backward),
        backward_chunk=one.astype(np.int32),
        backward_slot=(backward % depth).astype(np.int32),
        gradient_slot=only(not_last, one),
        versions=2,
    )


def _forward_tasks_before(order: tuple[Task, ...]) -> list[int]:
    """Of each backward task, how many forward tasks are listed before it."""
    counts, forward = [], 0
    for task in order:
        if task.kind == "F":
            forward += 1
        else:
            counts.append(forward)
    return counts


def _slots(lives: list[tuple[int, int, tuple]]) -> tuple[dict[tuple, int], int]:
    """A slot for each of some things that are needed from one tick to another, and how many slots there are."""
    until: list[int] = []  # of each slot, the last tick in which it is needed
    slots = {}
    for first, last, name in sorted(lives):
        free = [slot for slot, end in enumerate(until) if end < first]
        slot = free[0] if free else len(until)
        until[slot : slot + 1] = [last]
        slots[name] = slot
    return slots, len(until)
