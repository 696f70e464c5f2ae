"""Zero-bubble schedules within a memory limit, by list scheduling: ZB-H2, ZB-V, V-Half and V-Min.

`make_schedule("zero-bubble", ...)` is ZB-H1, with the activations of 1F1B and a third of its
bubble. With twice the activations (ZB-H2) every stage is busy from its first task to its last. With
V placement in two chunks the memory of 1F1B is enough for that (ZB-V); V-Half and V-Min need about
a half and a third of it.

Sources: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, and Pipeline Parallelism
with Controllable Memory, arXiv:2405.15362. F, B and W are taken as equally long.
"""

import dataclasses
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping

from spmd.errors import Problem, ScheduleError
from spmd.pipeline.schedule import ACTIVATIONS, IN_FLIGHT, Schedule, Task

# Kind and chunk of a stage's next task, such as ("F", 0); its next W is ("W", 0).
_Next = tuple[str, int]
_Choose = Callable[["_Build", int], _Next | None]

_BLOCKS = ((5, 0, 4), *itertools.product((1, 2, 3, 4), (0, 3), (1, 2)))
"""Slope, turn and window of the building blocks to try.

The first never deadlocks, and leaves no bubble with enough memory.
"""


def fill_bubbles(
    stages: int, microbatches: int, limit: int, *, placement: str = "loop"
) -> Schedule:
    """Build a schedule by list scheduling: in each tick, each stage runs the best ready task.

    Args:
        limit: The memory limit of a stage. With `"loop"`, activations of microbatches, as in
            `ScheduleTimeline.peak_memory`: at least 1; twice the number of stages leaves no bubble.
            With `"v"`, chunks of microbatches between F and W, as in
            `ScheduleTimeline.peak_in_flight`: at least 2, because every microbatch runs on every
            stage twice; twice the number of stages leaves no bubble.
        placement: `"loop"` has one chunk per stage, `"v"` two.

    Example:
        >>> for order in fill_bubbles(stages=2, microbatches=3, limit=4).orders:
        ...     print(*order)
        F0 F1 F2 B0 W0 B1 W1 B2 W2
        F0 B0 F1 B1 F2 B2 W0 W1 W2
    """
    name = "zb-h2"
    chunks = 1
    if placement == "v":
        name = "zb-v"
        chunks = 2
    empty = Schedule(name, microbatches, chunks, ((),) * stages, placement)
    if limit < chunks:
        detail = f"limit = {limit} activations, stages = {stages}, chunks = {chunks}"
        fix = f"{chunks} or more; {2 * stages}: no bubble"
        problem = Problem("limit", "does not hold one microbatch", detail, fix)
        raise ScheduleError("The schedule cannot be built:", [problem])
    if placement == "v":
        return _best_of_blocks(empty, limit).schedule()
    return _Build(empty, limit, ACTIVATIONS, _alternate).schedule()


def _best_of_blocks(empty: Schedule, limit: int) -> "_Build":
    """Return the shortest schedule of all building blocks, or the first without a bubble."""
    first, *others = _BLOCKS
    best = _Build(empty, limit, IN_FLIGHT, _follow(empty.stages, *first))
    limits = sorted({limit, limit - limit % 2})  # an odd limit can be worse
    for most, block in itertools.product(limits, others):
        if best.span <= 6 * empty.microbatches:
            break
        build = _Build(empty, most, IN_FLIGHT, _follow(empty.stages, *block))
        if build.span < best.span:
            best = build
    return best


class _Build:
    """A schedule, built tick by tick: in each, every stage runs its choice of task, if any.

    Attributes:
        held: Memory in use on each stage, the sum of `changes`.
        backlog: For each stage, the B tasks without their W yet.
        span: Ticks from a stage's first task to its last, the maximum over stages; infinite after a
            deadlock.
    """

    def __init__(
        self, empty: Schedule, limit: int, changes: Mapping[str, float], choose: _Choose
    ) -> None:
        self.empty = empty
        self.limit = limit
        self.held = [0.0] * empty.stages
        self.backlog: list[deque[Task]] = [deque() for _ in empty.orders]
        self.orders: list[list[Task]] = [[] for _ in empty.orders]
        self._done: Counter[_Next] = Counter()  # microbatches, by kind and virtual stage
        self._runs: dict[tuple[int, _Next], _Next] = {}  # stage and step → kind and virtual stage
        # stage and step → kinds and virtual stages of its inputs
        self._needs: dict[tuple[int, _Next], list[_Next]] = {}
        for stage in range(empty.stages):
            for step in itertools.product("FB", range(empty.chunks)):
                self._add_step(stage, step)
        self.span = self._run(changes, choose)

    def _add_step(self, stage: int, step: _Next) -> None:
        kind, chunk = step
        task = Task(kind, 0, chunk)
        self._runs[stage, step] = kind, self.empty.virtual_stage(stage, chunk)
        needs = list[_Next]()
        for needed, virtual_stage, _ in self.empty.dependencies(stage, task):
            needs.append((needed, virtual_stage))
        self._needs[stage, step] = needs

    def _run(self, changes: Mapping[str, float], choose: _Choose) -> float:
        """Run tasks until no stage has one to start, and return the span."""
        ticks: list[list[int]] = [[] for _ in self.orders]
        for tick in itertools.count():
            chosen = [choose(self, stage) for stage in range(self.empty.stages)]
            if not any(chosen):
                break
            for stage, step in enumerate(chosen):
                if step is None:
                    continue
                task = self._start(stage, step)
                self.orders[stage].append(task)
                self.held[stage] += changes[task.kind]
                ticks[stage].append(tick)
        tasks = 3 * self.empty.chunks * self.empty.microbatches
        span = 0
        for order, row in zip(self.orders, ticks, strict=True):
            if len(order) < tasks:
                return math.inf
            span = max(span, row[-1] - row[0] + 1)
        return span

    def schedule(self) -> Schedule:
        """Return the built schedule."""
        return dataclasses.replace(self.empty, orders=tuple(map(tuple, self.orders)))

    def microbatch(self, stage: int, step: _Next) -> int:
        """Return the microbatch of a stage's next F or B; the number of microbatches if done."""
        return self._done[self._runs[stage, step]]

    def can_start(self, stage: int, step: _Next, spare: int = 0) -> bool:
        """Return whether a stage's next F or B has its inputs and, for an F, enough memory.

        After an F, memory for `spare` more must be free.
        """
        microbatch = self.microbatch(stage, step)
        is_ready = all(self._done[needed] > microbatch for needed in self._needs[stage, step])
        fits = step[0] == "B" or self.held[stage] + 1 + spare <= self.limit
        return microbatch < self.empty.microbatches and is_ready and fits

    def due(self, stage: int) -> _Next | None:
        """Return a stage's next W, None if none is pending."""
        if not self.backlog[stage]:
            return None
        return ("W", 0)

    def _start(self, stage: int, step: _Next) -> Task:
        kind, chunk = step
        if kind == "W":
            return dataclasses.replace(self.backlog[stage].popleft(), kind="W")
        task = Task(kind, self.microbatch(stage, step), chunk)
        self._done[self._runs[stage, step]] += 1
        if kind == "B":
            self.backlog[stage].append(task)
        return task


def _alternate(build: _Build, stage: int) -> _Next | None:
    """Choose F and B in turn where both can start, and W if neither can."""
    kinds = (task.kind for task in reversed(build.orders[stage]) if task.kind != "W")
    turns = ["F", "B"]
    if next(kinds, "B") == "F":
        turns = ["B", "F"]
    for kind in turns:
        if build.can_start(stage, (kind, 0)):
            return (kind, 0)
    return build.due(stage)


def _follow(stages: int, slope: int, turn: int, window: int) -> _Choose:
    """Return a choice by a building block, repeated every six ticks for each microbatch.

    Each stage runs its F and B in the order of their starts in the block, and W while it waits. The
    time for which the block holds a microbatch determines its memory (Qi et al., arXiv:2405.15362,
    section 3).

    Args:
        slope: Ticks from a stage to the next on the way down the V; on the way up it is 1.
        turn: Ticks between the last forward and the first backward.
        window: Number of candidates, the earliest of a stage's next F and B of each chunk. With all
            4, W comes first where memory is full. An F of chunk 0 that may be ahead of the block
            leaves memory for one of chunk 1, unless a B will free some; otherwise all stages could
            wait for memory.
    """
    block = [_block_starts(stages, stage, slope, turn) for stage in range(stages)]

    def choose(build: _Build, stage: int) -> _Next | None:
        due = build.due(stage)
        if due and window == 4 and build.held[stage] >= build.limit:
            return due
        steps = _next_by_start(build, stage, block[stage])
        for rank, step in enumerate(steps[:window]):
            is_ahead = step == ("F", 0) and (rank > 0 or window == 4)
            spare = 0
            if is_ahead and not _has_backward(build, stage):
                spare = 1
            if build.can_start(stage, step, spare):
                return step
        return due

    return choose


def _block_starts(stages: int, stage: int, slope: int, turn: int) -> dict[_Next, int]:
    """Return the start of a stage's F and B of each chunk in a building block, in ticks."""
    last = stages - 1
    down = slope * stage
    up = slope * last + 1 + last - stage
    half = (slope + 1) * last + 2 + turn
    return {("F", 0): down, ("F", 1): up, ("B", 1): half + down, ("B", 0): half + up}


def _next_by_start(build: _Build, stage: int, block: Mapping[_Next, int]) -> list[_Next]:
    """Return a stage's next F and B of each chunk, in the order of their starts in the block."""
    starts = dict[_Next, int]()
    for step, start in block.items():
        microbatch = build.microbatch(stage, step)
        if microbatch < build.empty.microbatches:
            starts[step] = start + 6 * microbatch
    return sorted(starts, key=starts.__getitem__)


def _has_backward(build: _Build, stage: int) -> bool:
    """Return whether a stage can start a B of any chunk."""
    return build.can_start(stage, ("B", 0)) or build.can_start(stage, ("B", 1))
