"""Zero-bubble schedules that trade memory for time, ZB-H2 and ZB-V, built by list scheduling.

`make_schedule("zero-bubble", ...)` is ZB-H1, with the activations of 1F1B and a third of its bubble. With twice the
activations (ZB-H2) every stage is busy from its first task to its last. With V placement in two chunks (ZB-V) the
memory of 1F1B is enough for that.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241. This search is simpler than theirs, and as good
where they publish figures.
"""

import dataclasses
from collections import Counter
from fractions import Fraction

from spmd.errors import Problem, ScheduleError
from spmd.pipeline.schedule import ACTIVATIONS, Pass, Schedule, Task, check_values

_TITLE = "The schedule cannot be built:"


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
    """Build the schedule in which every free stage takes the best task that can start.

    F and B alternate where both can start, the one nearest the model's end first; W runs if neither can.

    Args:
        stages: Stages of the pipeline (p).
        microbatches: Microbatches of one batch (m).
        limit: Activations of one microbatch (and chunk) that a stage may hold, counted as in `Timeline.peak_memory`.
            2 p is enough for no bubble, in either placement.
        placement: `"loop"` has one chunk per stage, `"v"` two.
        forward: Time of the forward pass of a stage's layers.
        backward: Time of the gradient of the input.
        weight: Time of the gradients of the weights.

    Raises:
        ScheduleError: A count below 1, a cost that is not positive, or a limit that causes a deadlock.

    Example:
        >>> for order in fill_bubbles(stages=2, microbatches=3, limit=4).orders:
        ...     print(*order)
        F0 F1 F2 B0 W0 B1 W1 B2 W2
        F0 B0 F1 B1 F2 B2 W0 W1 W2
    """
    problems = check_values("at least 1", stages=stages, microbatches=microbatches, limit=limit)
    problems += check_values("above 0 and finite", forward=forward, backward=backward, weight=weight)
    if problems:
        raise ScheduleError(_TITLE, problems)
    costs = {"F": Fraction(forward), "B": Fraction(backward), "W": Fraction(weight)}
    name, chunks = ("zb-v", 2) if placement == "v" else ("zb-h2", 1)
    empty = Schedule(name, microbatches, chunks, ((),) * stages, placement)
    virtual_stages = [
        sorted((empty.virtual_stage(stage, chunk) for chunk in range(chunks)), reverse=True) for stage in range(stages)
    ]
    orders: list[list[Task]] = [[] for _ in range(stages)]
    held = [0.0] * stages
    free = [Fraction()] * stages
    ends: dict[Pass, Fraction] = {}
    counts: Counter[tuple[str, int]] = Counter()  # microbatches of (kind, virtual stage) that have started

    def can_start(stage: int, task: Task, now: Fraction) -> bool:
        return task.microbatch < microbatches and all(
            item in ends and ends[item] <= now for item in empty.dependencies(stage, task)
        )

    def best(stage: int, now: Fraction) -> Task | None:
        last = next((task.kind for task in reversed(orders[stage]) if task.kind != "W"), "B")
        kinds = ["F", "B", "W"] if last == "B" else ["B", "F", "W"]
        if held[stage] + 1 > limit:
            kinds.remove("F")
        tasks = (Task(kind, counts[kind, v], empty.locate(v)[1]) for kind in kinds for v in virtual_stages[stage])
        return next((task for task in tasks if can_start(stage, task, now)), None)

    now = Fraction()
    while True:
        for stage in range(stages):
            task = best(stage, now) if free[stage] <= now else None
            if task is not None:
                orders[stage].append(task)
                free[stage] = now + costs[task.kind] / chunks
                ends.update((item, free[stage]) for item in empty.passes(stage, task))
                counts[task.kind, empty.virtual_stage(stage, task.chunk)] += 1
                held[stage] += ACTIVATIONS[task.kind]
        running = [end for end in free if end > now]
        if not running:
            break
        now = min(running)
    if sum(counts.values()) < 3 * stages * chunks * microbatches:
        detail = f"limit = {limit} activations, stages = {stages}, chunks = {chunks}"
        problem = Problem("limit", "causes a deadlock: every stage is full", detail, f"{2 * stages}")
        raise ScheduleError(_TITLE, [problem])
    return dataclasses.replace(empty, orders=tuple(tuple(order) for order in orders))
