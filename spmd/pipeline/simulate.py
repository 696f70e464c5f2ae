"""Simulation of a schedule: the start of every task, the makespan, the bubble and the activations that a stage holds.

A task starts as soon as its stage is free and its dependencies have arrived. Times are exact fractions internally, so
an empty bubble is exactly 0.0.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from fractions import Fraction

from spmd.errors import Problem, ScheduleError
from spmd.pipeline.schedule import (
    ACTIVATIONS,
    IN_FLIGHT,
    PASSES,
    Pass,
    Schedule,
    Task,
    check_schedule,
    check_values,
    execution_order,
    repeat_schedule,
)

_BATCHES = 4  # without a flush: the first fills the pipeline, the last drains it, the others are the steady state


@dataclasses.dataclass(frozen=True)
class Slot:
    """A task with its times."""

    task: Task
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A schedule with times, in the unit of the simulated costs.

    Attributes:
        tasks: For each stage its tasks in order. Without a flush, those of `batches` consecutive batches with
            consecutive microbatch numbers.
        makespan: Time from the start of the first task to the end of the last.
        span: Time from a stage's first task to its last, the maximum over stages.
        period: Time of one batch: the makespan with a flush; without one, the time between the ends of two batches in
            the steady state.
        ideal: Time of one batch on a stage that is never idle: m (F + B + W).
        staleness: Updates by which a batch's weights are out of date when its gradients arrive; 0 with a flush.
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
        """Idle time relative to the ideal time, as in Narayanan et al., arXiv:2104.04473: (p-1)/m for 1F1B."""
        return (self.period - self.ideal) / self.ideal

    @property
    def bubble_share(self) -> float:
        """Idle time relative to the whole time, as in Huang et al., arXiv:1811.06965: (p-1)/(m+p-1) for 1F1B."""
        return (self.period - self.ideal) / self.period

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Most microbatches (times chunks) of each stage between their forward and the end of their backward."""
        return tuple(map(int, self._peaks(IN_FLIGHT)))

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """Most activations that each stage holds, in units of one microbatch (and chunk), by `ACTIVATIONS`."""
        return self._peaks(ACTIVATIONS)

    def _peaks(self, changes: Mapping[str, float]) -> tuple[float, ...]:
        held = (itertools.accumulate((changes[slot.task.kind] for slot in order), initial=0.0) for order in self.tasks)
        return tuple(map(max, held))


def simulate(
    schedule: Schedule, *, forward: float = 1, backward: float = 1, weight: float = 1, transfer: float = 0
) -> Timeline:
    """Compute the times of all tasks; without a flush, of several consecutive batches.

    Args:
        forward: Time of the forward pass of a stage's layers for one microbatch (F); a chunk takes its share.
        backward: The same for the gradient of the input (B).
        weight: The same for the gradients of the weights (W). A whole backward pass takes B + W.
        transfer: Time between the end of a task and the arrival of its output at another stage, during which both
            stages may compute.

    Raises:
        ScheduleError: A cost that is negative or not finite, or the problems that `check_schedule` finds.

    Example:
        >>> from spmd.pipeline.schedules import make_schedule
        >>> timeline = simulate(make_schedule("1f1b", stages=4, microbatches=8))
        >>> timeline.makespan, timeline.bubble, timeline.peak_in_flight
        (33.0, 0.375, (4, 3, 2, 1))
    """
    costs = {"forward": forward, "backward": backward, "weight": weight, "transfer": transfer}
    problems = check_values("at least 0 and finite", **costs)
    if not problems and forward + backward + weight == 0:
        problems.append(Problem("costs", "the work takes no time", "forward + backward + weight = 0", "more than 0"))
    problems.extend(check_schedule(schedule))
    if problems:
        raise ScheduleError(f"The schedule {schedule.name} cannot be simulated:", problems)

    times = {"F": Fraction(forward), "B": Fraction(backward), "W": Fraction(weight)}
    durations = {kind: sum((times[p] for p in passes), Fraction()) / schedule.chunks for kind, passes in PASSES.items()}
    batches = 1 if schedule.flush else _BATCHES
    repeated = repeat_schedule(schedule, batches)
    tasks = _task_times(repeated, durations, Fraction(transfer))
    ends = [Fraction()] * batches
    for task, _, end in (timed for order in tasks for timed in order):
        batch = task.microbatch // schedule.microbatches
        ends[batch] = max(ends[batch], end)
    return Timeline(
        schedule=schedule,
        tasks=tuple(tuple(Slot(task, float(start), float(end)) for task, start, end in order) for order in tasks),
        batches=batches,
        makespan=float(ends[-1]),
        span=float(max(order[-1][2] - order[0][1] for order in tasks)),
        period=float(ends[0] if schedule.flush else ends[-2] - ends[-3]),
        ideal=float(schedule.microbatches * sum(times.values())),
        staleness=max(_staleness(order, schedule.microbatches) for order in repeated.orders),
    )


def _task_times(
    schedule: Schedule, durations: Mapping[str, Fraction], transfer: Fraction
) -> list[list[tuple[Task, Fraction, Fraction]]]:
    """Return for each stage its tasks in order, each with its start and end."""
    ended: dict[Pass, tuple[int, Fraction]] = {}
    times: list[list[tuple[Task, Fraction, Fraction]]] = [[] for _ in schedule.orders]
    for stage, index in execution_order(schedule)[0]:
        task = schedule.orders[stage][index]
        start = times[stage][-1][2] if index else Fraction()
        for dependency in schedule.dependencies(stage, task):
            source, end = ended[dependency]
            start = max(start, end if source == stage else end + transfer)
        end = start + durations[task.kind]
        ended.update((item, (stage, end)) for item in schedule.passes(stage, task))
        times[stage].append((task, start, end))
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
    if problems := check_schedule(schedule):
        raise ScheduleError(f"The schedule {schedule.name} cannot be run:", problems)
    times = _task_times(schedule, dict.fromkeys(PASSES, Fraction(1)), Fraction())
    starts = [{int(start): task for task, start, _ in order} for order in times]
    ticks = 1 + max(max(row) for row in starts)
    return tuple(tuple(row.get(tick) for tick in range(ticks)) for row in starts)


def _staleness(order: tuple[Task, ...], microbatches: int) -> int:
    """Return the most updates of earlier batches that a stage lacks when a batch's first forward reads its weights."""
    most = updates = backwards = 0
    for task in order:
        if task.kind == "F":
            most = max(most, task.microbatch // microbatches - updates)
        elif task.kind != "B":
            backwards += 1
            updates = backwards // microbatches
    return most
