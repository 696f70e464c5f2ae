"""Zero-bubble schedules that spend memory for time: ZB-H2 and ZB-V, and any between, found by list scheduling.

`make_schedule("zero-bubble", ...)` is ZB-H1, which holds no more activations than 1F1B and has a third of its bubble.
With twice as many the bubble goes but for the skew with which stages begin: every stage is busy from its first task to
its last. Where the model runs through the stages and back (a V), in two chunks, the memory of 1F1B is enough for that.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241. The search here is simpler than theirs, and as
good where they publish figures.
"""

import dataclasses
import math
from collections import Counter
from fractions import Fraction

from spmd.errors import Problem, ScheduleError
from spmd.pipeline.schedule import Part, Schedule, Task, below_one

HELD = {"F": 1.0, "B": -0.5, "W": -0.5}  # what a task changes of the activations that a stage holds


def fill_bubbles(
    stages: int,
    microbatches: int,
    limit: int,
    *,
    placement: str = "loop",
    forward: float = 1,
    backward: float = 1,
    weight: float = 1,
) -> Schedule:
    """The schedule in which every stage, whenever it is free, takes the best task that it can start at once.

    Best is an input gradient or a forward, in turn where both can start and nearest the model's end where several can;
    else a weight gradient.

    Args:
        stages: Stages of the pipeline (p).
        microbatches: Microbatches of one batch (m).
        limit: Activations of one microbatch (and chunk) that a stage may hold, counted as in `Timeline.peak_memory`.
            2 p is enough for no bubble, in either placement.
        placement: `"loop"` has one chunk per stage, `"v"` two.
        forward: What the forward of a stage's layers costs.
        backward: What the gradient of the input costs.
        weight: What the gradients of the weights cost.

    Raises:
        ScheduleError: Numbers below 1, or a limit with which the pipeline comes to a stop.

    Example:
        >>> for order in fill_bubbles(stages=2, microbatches=3, limit=4).orders:
        ...     print(*order)
        F0 F1 F2 B0 W0 B1 W1 B2 W2
        F0 B0 F1 B1 F2 B2 W0 W1 W2
    """
    problems = list(below_one(stages=stages, microbatches=microbatches, limit=limit))
    given = {"forward": forward, "backward": backward, "weight": weight}
    problems.extend(
        Problem(name, f"is {cost}", fix="more than 0")
        for name, cost in given.items()
        if not (math.isfinite(cost) and cost > 0)
    )
    if problems:
        raise ScheduleError("The schedule cannot be built:", problems)
    costs = {"F": Fraction(forward), "B": Fraction(backward), "W": Fraction(weight)}
    name, chunks = ("zb-v", 2) if placement == "v" else ("zb-h2", 1)
    empty = Schedule(name, microbatches, chunks, ((),) * stages, placement)
    positions = [[empty.position(stage, chunk) for chunk in range(empty.chunks)] for stage in range(stages)]
    orders: list[list[Task]] = [[] for _ in range(stages)]
    held = [0.0] * stages
    free = [Fraction()] * stages
    ends: dict[Part, Fraction] = {}
    counts: Counter[tuple[str, int]] = Counter()  # how many microbatches of a kind a position has begun

    def startable(stage: int, kind: str, now: Fraction) -> list[Task]:
        """The stage's next tasks of a kind that can start now, nearest the model's end first."""
        if kind == "F" and held[stage] + 1 > limit:
            return []
        tasks = [Task(kind, counts[kind, p], empty.place(p)[1]) for p in sorted(positions[stage], reverse=True)]
        return [
            task
            for task in tasks
            if task.microbatch < microbatches
            and all(part in ends and ends[part] <= now for part in empty.needs(stage, task))
        ]

    def best(stage: int, now: Fraction) -> Task | None:
        last = next((task.kind for task in reversed(orders[stage]) if task.kind != "W"), "B")
        kinds = ("F", "B", "W") if last == "B" else ("B", "F", "W")
        return next((task for kind in kinds for task in startable(stage, kind, now)), None)

    now = Fraction()
    while True:
        for stage in range(stages):
            task = best(stage, now) if free[stage] <= now else None
            if task is not None:
                orders[stage].append(task)
                free[stage] = now + costs[task.kind] / empty.chunks
                ends.update((part, free[stage]) for part in empty.does(stage, task))
                counts[task.kind, empty.position(stage, task.chunk)] += 1
                held[stage] += HELD[task.kind]
        running = [end for end in free if end > now]
        if not running:
            break
        now = min(running)
    if sum(counts.values()) < 3 * stages * empty.chunks * microbatches:
        arithmetic = f"limit = {limit} activations, stages = {stages}, chunks = {empty.chunks}"
        raise ScheduleError(
            "The schedule cannot be built:",
            [Problem("limit", "every stage is full, and waits for another", arithmetic, f"{2 * stages}")],
        )
    return dataclasses.replace(empty, orders=tuple(tuple(order) for order in orders))
