"""Zero-bubble schedules that trade memory for time, ZB-H2 and ZB-V, built by list scheduling.

`make_schedule("zero-bubble", ...)` is ZB-H1, with the activations of 1F1B and a third of its bubble. With twice the
activations (ZB-H2) every stage is busy from its first task to its last. With V placement in two chunks (ZB-V) the
memory of 1F1B is enough for that.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241. This search takes F, B and W as equally long; it
is simpler than theirs, and as good where they publish figures.
"""

import dataclasses
from collections import Counter

from spmd.errors import Problem, ScheduleError
from spmd.pipeline.schedule import ACTIVATIONS, Pass, Schedule, Task


def fill_bubbles(stages: int, microbatches: int, limit: int, *, placement: str = "loop") -> Schedule:
    """Build the schedule in which every stage runs the best task that can start in each tick.

    F and B alternate where both can start, the one nearest the model's end first; W runs if neither can.

    Args:
        limit: Activations of one microbatch (and chunk) that a stage may hold, counted as in `Timeline.peak_memory`.
            Twice the stages are enough for no bubble, in either placement.
        placement: `"loop"` has one chunk per stage, `"v"` two.

    Example:
        >>> for order in fill_bubbles(stages=2, microbatches=3, limit=4).orders:
        ...     print(*order)
        F0 F1 F2 B0 W0 B1 W1 B2 W2
        F0 B0 F1 B1 F2 B2 W0 W1 W2
    """
    name, chunks = ("zb-v", 2) if placement == "v" else ("zb-h2", 1)
    empty = Schedule(name, microbatches, chunks, ((),) * stages, placement)
    orders: list[list[Task]] = [[] for _ in range(stages)]
    held = [0.0] * stages
    done: set[Pass] = set()
    started: Counter[tuple[int, str, int]] = Counter()  # microbatches of (stage, kind, chunk)

    def best(stage: int) -> Task | None:
        last = next((task.kind for task in reversed(orders[stage]) if task.kind != "W"), "B")
        kinds = ["F", "B", "W"] if last == "B" else ["B", "F", "W"]
        if held[stage] + 1 > limit:
            kinds.remove("F")
        tasks = [Task(kind, started[stage, kind, chunk], chunk) for kind in kinds for chunk in reversed(range(chunks))]
        can_start = (t for t in tasks if t.microbatch < microbatches and done.issuperset(empty.dependencies(stage, t)))
        return next(can_start, None)

    while tick := [(stage, task) for stage in range(stages) if (task := best(stage))]:
        for stage, task in tick:
            orders[stage].append(task)
            held[stage] += ACTIVATIONS[task.kind]
            done.update(empty.passes(stage, task))
            started[stage, task.kind, task.chunk] += 1
    if len(done) < 3 * stages * chunks * microbatches:
        detail = f"limit = {limit} activations, stages = {stages}, chunks = {chunks}"
        problem = Problem("limit", "causes a deadlock: every stage is full", detail, f"{2 * stages}")
        raise ScheduleError("The schedule cannot be built:", [problem])
    return dataclasses.replace(empty, orders=tuple(tuple(order) for order in orders))
