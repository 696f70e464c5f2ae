"""Simulation of a schedule: starts of tasks, the makespan, the bubble and activations of stages.

A task starts as soon as its stage is free and its dependencies have arrived. Times are exact
fractions internally, so an empty bubble is exactly 0.0.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from spmd.errors import Problem, ScheduleError
from spmd.pipeline.schedule import (
    KINDS,
    Pass,
    Schedule,
    Task,
    check_schedule,
    check_values,
    execution_order,
    repeat_schedule,
)

_BATCHES = 4
"""Batches to simulate without a flush.

The first fills the pipeline, the last drains it, the others are the steady state.
"""


@dataclasses.dataclass(frozen=True)
class Slot:
    """A task with its times."""

    task: Task
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class ScheduleTimeline:
    """A schedule with times, in the unit of the simulated costs.

    Attributes:
        tasks: For each stage its tasks in order. Without a flush, those of `batches` consecutive
            batches with consecutive microbatch numbers.
        makespan: Time from the start of the first task to the end of the last.
        span: Time from a stage's first task to its last, the maximum over stages.
        period: Time of one batch: the makespan with a flush; without one, the time between the ends
            of two batches in the steady state.
        ideal: Time of one batch on a stage that is never idle: m (F + B).
        staleness: Updates by which a batch's weights are out of date when its gradients arrive; 0
            with a flush.
    """

    schedule: Schedule
    tasks: tuple[tuple[Slot, ...], ...]
    batches: int
    makespan: float
    span: float
    period: float
    ideal: float
    staleness: int

    @property
    def bubble(self) -> float:
        """Idle time relative to the ideal time: (p-1)/m for 1F1B.

        As in Narayanan et al., arXiv:2104.04473.
        """
        return (self.period - self.ideal) / self.ideal

    @property
    def bubble_share(self) -> float:
        """Idle time relative to the whole time: (p-1)/(m+p-1) for 1F1B.

        As in Huang et al., arXiv:1811.06965.
        """
        return (self.period - self.ideal) / self.period

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Most microbatches (times chunks) of each stage, from forward to the end of backward."""
        return tuple(_peak_in_flight(order) for order in self.tasks)


def _peak_in_flight(order: Sequence[Slot]) -> int:
    """Return the most tasks of a stage between forward and the end of backward."""
    peak = held = 0
    for slot in order:
        if slot.task.kind == "F":
            held += 1
        else:
            held -= 1
        peak = max(peak, held)
    return peak


def simulate(
    schedule: Schedule,
    *,
    forward: float = 1,
    backward: float = 2,
    transfer: float = 0,
) -> ScheduleTimeline:
    """Compute the times of all tasks; without a flush, of several consecutive batches.

    Args:
        forward: Time of the forward pass of a stage's layers for one microbatch (F); a chunk takes
            its share.
        backward: The same for the backward pass (B), by default twice as long.
        transfer: Time between the end of a task and the arrival of its output at another stage,
            during which both stages may compute.

    Raises:
        ScheduleError: A cost that is negative or not finite, or the problems that `check_schedule`
            finds.

    Example:
        >>> from spmd.pipeline.schedules import make_schedule
        >>> timeline = simulate(make_schedule("1f1b", stages=4, microbatches=8))
        >>> timeline.makespan, timeline.bubble, timeline.peak_in_flight
        (33.0, 0.375, (4, 3, 2, 1))
    """
    costs = {"forward": forward, "backward": backward, "transfer": transfer}
    problems = check_values("at least 0 and finite", **costs)
    if not problems and forward + backward == 0:
        detail = "forward + backward = 0"
        problems.append(Problem("costs", "the work takes no time", detail, "more than 0"))
    problems += check_schedule(schedule)
    if problems:
        raise ScheduleError(f"The schedule {schedule.name} cannot be simulated:", problems)

    whole = {"F": Fraction(forward), "BW": Fraction(backward)}
    durations = {kind: time / schedule.chunks for kind, time in whole.items()}
    batches = 1
    if not schedule.flush:
        batches = _BATCHES
    repeated = repeat_schedule(schedule, batches)
    tasks = _task_times(repeated, durations, Fraction(transfer))
    ends = _batch_ends(tasks, schedule.microbatches, batches)
    period = ends[0]
    if not schedule.flush:
        period = ends[-2] - ends[-3]
    slots = list[tuple[Slot, ...]]()
    span = Fraction()
    for order in tasks:
        slots.append(_slots(order))
        span = max(span, order[-1].end - order[0].start)
    return ScheduleTimeline(
        schedule=schedule,
        tasks=tuple(slots),
        batches=batches,
        makespan=float(ends[-1]),
        span=float(span),
        period=float(period),
        ideal=float(schedule.microbatches * sum(whole.values())),
        staleness=max(_staleness(order, schedule.microbatches) for order in repeated.orders),
    )


class _Timed(NamedTuple):
    """A task with its exact times."""

    task: Task
    start: Fraction
    end: Fraction


def _slots(order: Sequence[_Timed]) -> tuple[Slot, ...]:
    return tuple(Slot(timed.task, float(timed.start), float(timed.end)) for timed in order)


def _batch_ends(
    tasks: Sequence[Sequence[_Timed]], microbatches: int, batches: int
) -> list[Fraction]:
    """Return the end of the last task of each batch."""
    ends = [Fraction()] * batches
    for order in tasks:
        for timed in order:
            batch = timed.task.microbatch // microbatches
            ends[batch] = max(ends[batch], timed.end)
    return ends


def _task_times(
    schedule: Schedule, durations: Mapping[str, Fraction], transfer: Fraction
) -> list[list[_Timed]]:
    """Return for each stage its tasks in order, each with its start and end."""
    ended: dict[Pass, tuple[int, Fraction]] = {}  # stage and time
    times: list[list[_Timed]] = [[] for _ in schedule.orders]
    ran, _ = execution_order(schedule)
    for stage, index in ran:
        task = schedule.orders[stage][index]
        start = Fraction()
        if index > 0:
            start = times[stage][-1].end
        for dependency in schedule.dependencies(stage, task):
            source, arrival = ended[dependency]
            if source != stage:
                arrival += transfer
            start = max(start, arrival)
        end = start + durations[task.kind]
        ended[schedule.pass_of(stage, task)] = stage, end
        times[stage].append(_Timed(task, start, end))
    return times


def tick_grid(schedule: Schedule) -> tuple[tuple[Task | None, ...], ...]:
    """Return the task of each stage in each tick, or None, if every task takes one tick.

    Example:
        >>> from spmd.pipeline.schedules import make_schedule
        >>> for row in tick_grid(make_schedule("1f1b", stages=2, microbatches=2)):
        ...     print(*(task or "--" for task in row))
        F0 F1 -- BW0 -- BW1
        -- F0 BW0 F1 BW1 --
    """
    problems = check_schedule(schedule)
    if problems:
        raise ScheduleError(f"The schedule {schedule.name} cannot be run:", problems)
    times = _task_times(schedule, dict.fromkeys(KINDS, Fraction(1)), Fraction())
    last = max(int(order[-1].start) for order in times)
    return tuple(_grid_row(order, last + 1) for order in times)


def _grid_row(order: Sequence[_Timed], ticks: int) -> tuple[Task | None, ...]:
    """Return the task of a stage in each tick, or None."""
    row: list[Task | None] = [None] * ticks
    for timed in order:
        row[int(timed.start)] = timed.task
    return tuple(row)


def _staleness(order: tuple[Task, ...], microbatches: int) -> int:
    """Return the most updates of earlier batches missing in the weights of a stage's forward."""
    most = updates = backwards = 0
    for task in order:
        if task.kind == "F":
            most = max(most, task.microbatch // microbatches - updates)
        else:
            backwards += 1
            updates = backwards // microbatches
    return most
