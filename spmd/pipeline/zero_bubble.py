"""Zero-bubble schedules within a memory limit, built by list scheduling: ZB-H2, ZB-V, V-Half and V-Min.

`make_schedule("zero-bubble", ...)` is ZB-H1, with the activations of 1F1B and a third of its bubble. With twice the
activations (ZB-H2) every stage is busy from its first task to its last. With V placement in two chunks the memory of
1F1B is enough for that (ZB-V); V-Half and V-Min need about a half and a third of it.

Sources: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, and Pipeline Parallelism with Controllable
Memory, arXiv:2405.15362. F, B and W are taken as equally long.
"""

import dataclasses
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping

from spmd.errors import Problem, ScheduleError
from spmd.pipeline.schedule import ACTIVATIONS, IN_FLIGHT, Schedule, Task

_Next = tuple[str, int]  # kind and chunk of a stage's next task, such as ("F", 0); its next W is ("W", 0)
_Choose = Callable[["_Build", int], _Next | None]

_BLOCKS = ((5, 0, 4), *itertools.product((1, 2, 3, 4), (0, 3), (1, 2)))
"""Slope, turn and window of the building blocks to try; the first never stops, and has no bubble with enough memory."""


def fill_bubbles(stages: int, microbatches: int, limit: int, *, placement: str = "loop") -> Schedule:
    """Build a schedule in which every stage runs the best task that can start in each tick.

    Args:
        limit: What a stage may hold. With `"loop"`, activations of a microbatch, as in `Timeline.peak_memory`: at least
            1; twice the stages leave no bubble. With `"v"`, chunks of a microbatch from F to W, as in
            `Timeline.peak_in_flight`: at least 2, because every microbatch comes to every stage twice; twice the stages
            leave no bubble.
        placement: `"loop"` has one chunk per stage, `"v"` two.

    Example:
        >>> for order in fill_bubbles(stages=2, microbatches=3, limit=4).orders:
        ...     print(*order)
        F0 F1 F2 B0 W0 B1 W1 B2 W2
        F0 B0 F1 B1 F2 B2 W0 W1 W2
    """
    name, chunks = ("zb-v", 2) if placement == "v" else ("zb-h2", 1)
    empty = Schedule(name, microbatches, chunks, ((),) * stages, placement)
    if limit < chunks:
        detail = f"limit = {limit} activations, stages = {stages}, chunks = {chunks}"
        problem = Problem("limit", "does not hold one microbatch", detail, f"{chunks} or more; {2 * stages}: no bubble")
        raise ScheduleError("The schedule cannot be built:", [problem])
    if placement == "loop":
        best = _Build(empty, limit, ACTIVATIONS, _alternate)
    else:
        best = _Build(empty, limit, IN_FLIGHT, _follow(stages, *_BLOCKS[0]))
        for most, block in itertools.product(sorted({limit, limit - limit % 2}), _BLOCKS[1:]):  # odd can be worse
            if best.span > 6 * microbatches:
                best = min(best, _Build(empty, most, IN_FLIGHT, _follow(stages, *block)), key=lambda build: build.span)
    return dataclasses.replace(empty, orders=tuple(map(tuple, best.orders)))


class _Build:
    """A schedule, built tick by tick: in each, every stage runs the task that `choose` names, if any.

    Attributes:
        held: What each stage holds, by `changes`.
        backlog: For each stage the tasks whose W is to be done.
        span: Ticks from a stage's first task to its last, the maximum over stages; infinite after a deadlock.
    """

    def __init__(self, empty: Schedule, limit: int, changes: Mapping[str, float], choose: _Choose) -> None:
        stages = range(empty.stages)
        self.empty, self.limit = empty, limit
        self.held = [0.0] * empty.stages
        self.backlog: list[deque[Task]] = [deque() for _ in stages]
        self.orders: list[list[Task]] = [[] for _ in stages]
        self._done: Counter[_Next] = Counter()  # microbatches, by kind and virtual stage
        self._runs = {}  # stage and step → kind and virtual stage, and those that it needs
        for stage, kind, chunk in itertools.product(stages, "FB", range(empty.chunks)):
            needs = [needed[:2] for needed in empty.dependencies(stage, Task(kind, 0, chunk))]
            self._runs[stage, (kind, chunk)] = (kind, empty.virtual_stage(stage, chunk)), needs
        ticks: list[list[int]] = [[] for _ in stages]
        for tick in itertools.count():
            chosen = [(stage, step) for stage in stages if (step := choose(self, stage))]
            if not chosen:
                break
            for stage, step in chosen:
                task = self._start(stage, step)
                self.orders[stage].append(task)
                self.held[stage] += changes[task.kind]
                ticks[stage].append(tick)
        is_whole = all(len(order) == 3 * empty.chunks * empty.microbatches for order in self.orders)
        self.span = max(row[-1] - row[0] + 1 for row in ticks) if is_whole else math.inf

    def microbatch(self, stage: int, step: _Next) -> int:
        """Return the microbatch of a stage's next F or B, which is their number if none is left."""
        return self._done[self._runs[stage, step][0]]

    def can_start(self, stage: int, step: _Next, spare: int = 0) -> bool:
        """Tell whether the inputs of a stage's next F or B are there, and memory for an F and `spare` more."""
        microbatch = self.microbatch(stage, step)
        is_ready = all(self._done[needed] > microbatch for needed in self._runs[stage, step][1])
        fits = step[0] == "B" or self.held[stage] + 1 + spare <= self.limit
        return microbatch < self.empty.microbatches and is_ready and fits

    def _start(self, stage: int, step: _Next) -> Task:
        kind, chunk = step
        if kind == "W":
            return dataclasses.replace(self.backlog[stage].popleft(), kind="W")
        task = Task(kind, self.microbatch(stage, step), chunk)
        self._done[self._runs[stage, step][0]] += 1
        if kind == "B":
            self.backlog[stage].append(task)
        return task


def _alternate(build: _Build, stage: int) -> _Next | None:
    """Choose F and B in turn where both can start, and W if neither can."""
    last = next((task.kind for task in reversed(build.orders[stage]) if task.kind != "W"), "B")
    steps = (("F", 0), ("B", 0)) if last == "B" else (("B", 0), ("F", 0))
    due = ("W", 0) if build.backlog[stage] else None
    return next((step for step in steps if build.can_start(stage, step)), due)


def _follow(stages: int, slope: int, turn: int, window: int) -> _Choose:
    """Return a choice by a building block, which is repeated every six ticks for each microbatch.

    Each stage runs its F and B in the order of their starts in the block, and W while it waits. How long the block
    holds a microbatch is the memory that it needs (Qi et al., arXiv:2405.15362, section 3).

    Args:
        slope: Ticks from a stage to the next on the way down the V; on the way up it is 1.
        turn: Ticks between the last forward and the first backward.
        window: Of its next F and B of each chunk, the first so many may run. With all 4, W comes first where memory is
            full. An F of chunk 0 that may be ahead of the block leaves memory for one of chunk 1, unless a B will free
            some; otherwise all stages could wait for memory.
    """
    last = stages - 1
    half, backwards = (slope + 1) * last + 2 + turn, (("B", 0), ("B", 1))
    block = [
        {("F", 0): down, ("F", 1): up, ("B", 1): half + down, ("B", 0): half + up}
        for down, up in ((slope * stage, slope * last + 1 + last - stage) for stage in range(stages))
    ]

    def choose(build: _Build, stage: int) -> _Next | None:
        due = ("W", 0) if build.backlog[stage] else None
        if due and window == 4 and build.held[stage] >= build.limit:
            return due
        starts = {step: start + 6 * build.microbatch(stage, step) for step, start in block[stage].items()}
        left = [step for step in starts if build.microbatch(stage, step) < build.empty.microbatches]
        for rank, step in enumerate(sorted(left, key=starts.__getitem__)[:window]):
            is_ahead = step == ("F", 0) and (rank > 0 or window == 4)
            if build.can_start(stage, step, spare=is_ahead and not any(build.can_start(stage, b) for b in backwards)):
                return step
        return due

    return choose
