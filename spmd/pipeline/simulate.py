"""When every task of a schedule runs, and what follows: makespan, bubble, and what each stage holds at most.

Each stage runs its list in order, and a task starts as soon as the stage is free and what the task needs has arrived.
Times are exact fractions inside, so a bubble of nothing is 0.0.
"""

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction

from spmd.errors import Problem, ScheduleError
from spmd.pipeline.schedule import SPLIT, Part, Schedule, Task, check_schedule, consecutive, run_order

BATCHES = 4  # without a flush: the first fills the pipeline, the last drains it, and those between are all alike


@dataclasses.dataclass(frozen=True)
class Slot:
    """A task and when it runs."""

    task: Task
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A schedule with times, in the unit of the costs that it was simulated with.

    Attributes:
        schedule: What was simulated.
        tasks: For each stage its tasks in order. Where there is no flush, those of `batches` batches in a row, whose
            microbatches count on.
        batches: How many batches `tasks` are of.
        makespan: From the start of the first task to the end of the last.
        span: From a stage's first task to its last, at most over the stages.
        period: What one batch costs. With a flush the makespan; without, the time from one batch's end to the next's
            in the steady state.
        ideal: What one batch costs a stage that is never idle: m (F + B + W).
        staleness: By how many updates of the weights a batch's weights are behind when its gradients arrive; 0 with a
            flush.
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
        """For each stage, of how many microbatches (times chunks) at once the forward is done and the backward not."""
        return tuple(int(peak(order, {"F": 1, "B": 0, "W": -1, "BW": -1})) for order in self.tasks)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """For each stage, the activations held at most, in those of one microbatch (and chunk).

        As in Qi et al., arXiv:2401.10241: a forward adds one, and each half of the backward frees one half.
        """
        return tuple(peak(order, {"F": 1, "B": -0.5, "W": -0.5, "BW": -1}) for order in self.tasks)


def peak(order: tuple[Slot, ...], changes: dict[str, float]) -> float:
    """The most that there is at any time, if every task changes it by so much."""
    held = highest = 0.0
    for slot in order:
        held += changes[slot.task.kind]
        highest = max(highest, held)
    return highest


def simulate(
    schedule: Schedule, *, forward: float = 1, backward: float = 1, weight: float = 1, transfer: float = 0
) -> Timeline:
    """When every task runs.

    A schedule without a flush is simulated over `BATCHES` batches in a row, and its period is that of the steady state.

    Args:
        schedule: One that runs to its end.
        forward: What the forward of a stage's layers costs for one microbatch (F); a chunk costs its share of it.
        backward: The same of the gradient of the input (B).
        weight: The same of the gradients of the weights (W). A whole backward costs B + W.
        transfer: What passes between the end of a task and the arrival of what it made at another stage, while both
            stages may compute.

    Raises:
        ScheduleError: A cost that cannot be, or a schedule that `check_schedule` finds wrong.

    Example:
        >>> from spmd.pipeline.schedules import make_schedule
        >>> timeline = simulate(make_schedule("1f1b", stages=4, microbatches=8))
        >>> timeline.makespan, timeline.bubble, timeline.peak_in_flight
        (33.0, 0.375, (4, 3, 2, 1))
    """
    costs = {"forward": forward, "backward": backward, "weight": weight, "transfer": transfer}
    problems = [
        Problem(name, f"is {cost}", fix="0 or more")
        for name, cost in costs.items()
        if not (math.isfinite(cost) and cost >= 0)
    ]
    if not problems and forward + backward + weight == 0:
        problems.append(Problem("costs", "the work takes no time", "forward + backward + weight = 0", "more than 0"))
    problems.extend(check_schedule(schedule))
    if problems:
        raise ScheduleError(f"The schedule {schedule.name} cannot be simulated:", problems)

    parts = {"F": Fraction(forward), "B": Fraction(backward), "W": Fraction(weight)}
    durations = {kind: sum((parts[p] for p in split), Fraction()) / schedule.chunks for kind, split in SPLIT.items()}
    batches = 1 if schedule.flush else BATCHES
    whole = consecutive(schedule, batches)
    times = run_times(whole, durations, Fraction(transfer))
    ends = [Fraction()] * batches
    for task, _, end in (timed for order in times for timed in order):
        batch = task.microbatch // schedule.microbatches
        ends[batch] = max(ends[batch], end)
    return Timeline(
        schedule=schedule,
        tasks=tuple(tuple(Slot(task, float(start), float(end)) for task, start, end in order) for order in times),
        batches=batches,
        makespan=float(ends[-1]),
        span=float(max(order[-1][2] - order[0][1] for order in times)),
        period=float(ends[0] if schedule.flush else ends[-2] - ends[-3]),
        ideal=float(schedule.microbatches * sum(parts.values())),
        staleness=max(stale_updates(order, schedule.microbatches) for order in whole.orders),
    )


def run_times(
    schedule: Schedule, durations: Mapping[str, Fraction], transfer: Fraction
) -> list[list[tuple[Task, Fraction, Fraction]]]:
    """For each stage its tasks in order, each with its start and end."""
    arrived: dict[Part, tuple[int, Fraction]] = {}
    times: list[list[tuple[Task, Fraction, Fraction]]] = [[] for _ in schedule.orders]
    for stage, index in run_order(schedule)[0]:
        task = schedule.orders[stage][index]
        start = times[stage][-1][2] if index else Fraction()
        for part in schedule.needs(stage, task):
            source, end = arrived[part]
            start = max(start, end if source == stage else end + transfer)
        end = start + durations[task.kind]
        arrived.update((part, (stage, end)) for part in schedule.does(stage, task))
        times[stage].append((task, start, end))
    return times


def as_table(schedule: Schedule) -> tuple[tuple[Task | None, ...], ...]:
    """The schedule as a table of ticks: what each stage does at each, or None.

    Every task takes one tick, whatever its kind, and runs at the first at which the stage is free and all that it
    needs was made at an earlier tick.

    Raises:
        ScheduleError: A schedule that `check_schedule` finds wrong.

    Example:
        >>> from spmd.pipeline.schedules import make_schedule
        >>> for row in as_table(make_schedule("1f1b", stages=2, microbatches=2)):
        ...     print(*(task or "--" for task in row))
        F0 F1 -- BW0 -- BW1
        -- F0 BW0 F1 BW1 --
    """
    problems = check_schedule(schedule)
    if problems:
        raise ScheduleError(f"The schedule {schedule.name} cannot be run:", problems)
    times = run_times(schedule, dict.fromkeys(SPLIT, Fraction(1)), Fraction())
    started = [{int(start): task for task, start, _ in order} for order in times]
    ticks = 1 + max(max(row) for row in started)
    return tuple(tuple(row.get(tick) for tick in range(ticks)) for row in started)


def stale_updates(order: tuple[Task, ...], microbatches: int) -> int:
    """How many batches before its own have not updated a stage's weights when a batch's first forward takes them."""
    most = updates = backwards = 0
    for task in order:
        if task.kind == "F":
            most = max(most, task.microbatch // microbatches - updates)
        elif task.kind != "B":
            backwards += 1
            updates = backwards // microbatches
    return most
