"""Pipeline schedules as data: which task each stage runs, in which order.

A schedule says nothing about arrays or time. Each stage runs its list from the first task to the last, and a task
starts when what it needs is there; `spmd.pipeline.simulate` turns that into times.
"""

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterator, Sequence

from spmd.errors import Problem, ScheduleError, did_you_mean

SPLIT = {"F": ("F",), "B": ("B",), "W": ("W",), "BW": ("B", "W")}  # a kind of task → the parts of the work that it does
NAMED = 8  # as many missing tasks does an error name
WORD = re.compile(r"(F|BW|B|W)(\d+)(?:c(\d+))?")

Part = tuple[str, int, int]  # "F", "B" or "W", the position in the model, the microbatch


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """One microbatch through one chunk of layers, in one direction.

    As text it is its kind and its microbatch, and its chunk unless that is the first: `F3`, `BW0c1`.

    Args:
        kind: `"F"` forward; `"B"` the gradient of the input alone; `"W"` the gradients of the weights alone; `"BW"`
            the whole backward.
        microbatch: Which part of the batch, from 0.
        chunk: Which of the stage's chunks of layers, from 0.

    Raises:
        ScheduleError: A kind that there is not, or a negative number.

    Example:
        >>> str(Task("F", 3)), str(Task("BW", 0, chunk=1))
        ('F3', 'BW0c1')
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in SPLIT:
            problems.append(Problem("kind", f"is {self.kind!r}", fix=did_you_mean(self.kind, SPLIT)))
        for name, n in (("microbatch", self.microbatch), ("chunk", self.chunk)):
            if n < 0:
                problems.append(Problem(name, f"is {n}", fix="0 or more"))
        if problems:
            raise ScheduleError("There is no such task:", problems)

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f"c{self.chunk}" if self.chunk else "")


def parse_task(word: str) -> Task:
    """The task that a word names; the inverse of `str`, and `c0` may be written.

    Raises:
        ScheduleError: A word that names none.

    Example:
        >>> parse_task("BW0c1"), parse_task("F3c0") == parse_task("F3")
        (Task(kind='BW', microbatch=0, chunk=1), True)
    """
    match = WORD.fullmatch(word)
    if match is None:
        fix = "F, B, W or BW, a microbatch, and c with a chunk where a stage has several: F3, BW0c1"
        raise ScheduleError("A task cannot be read:", [Problem("task", f"{word!r} names no task", fix=fix)])
    kind, microbatch, chunk = match.groups()
    return Task(kind, int(microbatch), int(chunk or 0))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What every stage of a pipeline does, in order.

    Args:
        name: What it is called.
        microbatches: Parts of one batch.
        chunks: Chunks of layers on each stage; the model is cut into `stages * chunks`.
        orders: For each stage its tasks, in the order in which it runs them.
        placement: Which stage has which part of the model. `"loop"`: chunk 1 of the first stage follows chunk 0 of the
            last, and so on. `"v"`: there are two chunks, and the second runs from the last stage back to the first.
        flush: Whether a batch ends before the next begins. Where it does not, `orders` are those of a batch after
            which nothing comes, and `consecutive` has those of several.

    Raises:
        ScheduleError: Numbers below 1, or a placement that there is not. Whether the orders can be run is what
            `check_schedule` finds out.
    """

    name: str
    microbatches: int
    chunks: int
    orders: tuple[tuple[Task, ...], ...]
    placement: str = "loop"
    flush: bool = True

    def __post_init__(self) -> None:
        problems = list(below_one(stages=self.stages, microbatches=self.microbatches, chunks=self.chunks))
        if self.placement not in ("loop", "v"):
            problems.append(Problem("placement", f"is {self.placement!r}", fix='"loop" or "v"'))
        elif self.placement == "v" and self.chunks != 2:
            problems.append(Problem("placement", '"v" has two chunks per stage', f"chunks = {self.chunks}"))
        if problems:
            raise ScheduleError("This is not a schedule:", problems)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.orders)

    def position(self, stage: int, chunk: int) -> int:
        """Which part of the model a stage's chunk is, from 0 (the first layers) to `stages * chunks - 1`."""
        turned = self.placement == "v" and chunk == 1
        return chunk * self.stages + (self.stages - 1 - stage if turned else stage)

    def place(self, position: int) -> tuple[int, int]:
        """The stage and the chunk that hold a part of the model; the inverse of `position`."""
        chunk, offset = divmod(position, self.stages)
        turned = self.placement == "v" and chunk == 1
        return (self.stages - 1 - offset if turned else offset), chunk

    def does(self, stage: int, task: Task) -> tuple[Part, ...]:
        """The parts of the work that a task of this stage does."""
        position = self.position(stage, task.chunk)
        return tuple((part, position, task.microbatch) for part in SPLIT[task.kind])

    def needs(self, stage: int, task: Task) -> tuple[Part, ...]:
        """The parts of the work that must be done before a task of this stage can start.

        A forward needs the forward of the layers before it, an input gradient its own forward and the input gradient
        of the layers after it, a weight gradient the input gradient of the same layers.
        """
        position, microbatch = self.position(stage, task.chunk), task.microbatch
        if task.kind == "F":
            return (("F", position - 1, microbatch),) if position else ()
        if task.kind == "W":
            return (("B", position, microbatch),)
        forward = ("F", position, microbatch)
        last = position == self.stages * self.chunks - 1
        return (forward,) if last else (forward, ("B", position + 1, microbatch))


def below_one(**counts: int) -> Iterator[Problem]:
    """A problem for each count that is not positive."""
    yield from (Problem(name, f"is {n}", fix="1 or more") for name, n in counts.items() if n < 1)


def in_turn(forwards: list[Task], backwards: list[Task], ahead: int) -> Iterator[Task]:
    """Forwards and backwards in turn, once the forwards are `ahead` by so many."""
    yield from forwards[:ahead]
    for i, backward in enumerate(backwards):
        yield from forwards[ahead + i : ahead + i + 1]
        yield backward


def consecutive(schedule: Schedule, batches: int) -> Schedule:
    """Several batches in a row as one schedule of `batches * microbatches` microbatches.

    After a flush a stage starts the next batch when it has ended the last. Without one the forwards of the next batch
    run in turn with the backwards that are left of the last, as far ahead of them as in the first.

    Raises:
        ScheduleError: Fewer than one batch.
    """
    problems = list(below_one(batches=batches))
    if problems:
        raise ScheduleError("There are no batches:", problems)
    total = batches * schedule.microbatches

    def extend(order: tuple[Task, ...]) -> Iterator[Task]:
        shifts = range(0, total, schedule.microbatches)
        tasks = [dataclasses.replace(task, microbatch=task.microbatch + shift) for shift in shifts for task in order]
        if schedule.flush:
            return iter(tasks)
        forwards = [task for task in tasks if task.kind == "F"]
        backwards = [task for task in tasks if task.kind != "F"]
        return in_turn(forwards, backwards, ahead=order.index(backwards[0]) - 1)

    orders = tuple(tuple(extend(order)) for order in schedule.orders)
    return dataclasses.replace(schedule, microbatches=total, orders=orders)


def run_order(schedule: Schedule) -> tuple[list[tuple[int, int]], list[int]]:
    """Runs every stage as far as it comes, without time.

    Parts of the work that no stage does count as done: that they are missing is another problem.

    Returns:
        The tasks that ran as (stage, index in its order), each after all that it needs; and for each stage the index
        at which it stopped, which is the length of its order unless there is a deadlock.
    """
    jobs = [[(schedule.does(s, task), schedule.needs(s, task)) for task in o] for s, o in enumerate(schedule.orders)]
    waiting = {part for stage_jobs in jobs for does, _ in stage_jobs for part in does}
    ran: list[tuple[int, int]] = []
    at = [0] * schedule.stages
    progress = True
    while progress:
        progress = False
        for stage, stage_jobs in enumerate(jobs):
            while at[stage] < len(stage_jobs) and waiting.isdisjoint(stage_jobs[at[stage]][1]):
                waiting.difference_update(stage_jobs[at[stage]][0])
                ran.append((stage, at[stage]))
                at[stage] += 1
                progress = True
    return ran, at


def check_schedule(schedule: Schedule, ticks: Sequence[Sequence[int]] | None = None) -> list[Problem]:
    """Everything that keeps a schedule from being run: tasks missing, twice, unknown, or waiting for each other.

    Args:
        schedule: What to check.
        ticks: For each stage the ticks at which its tasks stand, for the messages; without it their places in the
            order, from 0.

    Returns:
        The problems, sorted; none for a schedule that runs to its end.
    """
    return sorted(find_problems(schedule, ticks or [range(len(order)) for order in schedule.orders]))


def find_problems(schedule: Schedule, ticks: Sequence[Sequence[int]]) -> Iterator[Problem]:
    """The problems that `check_schedule` sorts."""
    first: dict[Part, tuple[int, Task]] = {}
    for stage, order in enumerate(schedule.orders):
        for tick, task in zip(ticks[stage], order, strict=True):
            where = f"stage {stage}, tick {tick}"
            if task.microbatch >= schedule.microbatches or task.chunk >= schedule.chunks:
                arithmetic = f"microbatches = {schedule.microbatches}, chunks = {schedule.chunks}; both count from 0"
                yield Problem(where, f"{task} is not of this schedule", arithmetic)
            again = [first[part] for part in schedule.does(stage, task) if part in first]
            if again:
                earlier, same = again[0]
                yield Problem(where, f"{task} repeats {same} of tick {earlier}", fix="remove one of them")
            for part in schedule.does(stage, task):
                first.setdefault(part, (tick, task))
    for stage in range(schedule.stages):
        absent = (
            str(Task(kind, microbatch, chunk))
            for microbatch in range(schedule.microbatches)
            for chunk in range(schedule.chunks)
            for kind in absent_kinds(first, schedule.position(stage, chunk), microbatch)
        )
        words = list(itertools.islice(absent, NAMED + 1))
        if words:
            named = " ".join(words[:NAMED]) + (" and more" if len(words) > NAMED else "")
            yield Problem(
                f"stage {stage}", f"tasks are missing: {named}", fix="add them; each stage runs every task once"
            )
    ran, stopped = run_order(schedule)
    done = {part for stage, index in ran for part in schedule.does(stage, schedule.orders[stage][index])}
    for stage, index in enumerate(stopped):
        if index < len(schedule.orders[stage]):
            task = schedule.orders[stage][index]
            part = next(part for part in schedule.needs(stage, task) if part in first and part not in done)
            other, _ = schedule.place(part[1])
            tick, needed = first[part]
            what = f"deadlock: {task} waits for {needed} of stage {other}"
            behind = f"{needed} stands at tick {tick}; stage {other} gets to tick {ticks[other][stopped[other]]}"
            yield Problem(f"stage {stage}, tick {ticks[stage][index]}", what, behind, "change one stage's order")


def absent_kinds(present: Collection[Part], position: int, microbatch: int) -> list[str]:
    """The kinds of task that would do what is not done for a part of the model and a microbatch."""
    return " ".join(k for k in "FBW" if (k, position, microbatch) not in present).replace("B W", "BW").split()
