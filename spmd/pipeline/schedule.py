"""Pipeline schedules as data: the tasks of each stage, in order.

A schedule has no arrays and no times. Each stage runs its tasks in order, and a task starts when
its dependencies are done; `spmd.pipeline.simulate` computes the times.
"""

import dataclasses
import itertools
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace

from spmd.errors import Problem, ScheduleError, check_fields

KINDS = ("F", "BW")
"""Kinds of tasks."""

Pass = tuple[str, int, int]
"""Kind of task, virtual stage, microbatch."""

_TASK = re.compile(r"(F|BW)(\d+)(?:c(\d+))?")
_LISTED = 8  # missing tasks that an error lists


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """One microbatch through one chunk of layers, in one direction.

    Its kind is `"F"`, forward, or `"BW"`, backward: the gradients of the input and of the weights.
    Its text is the kind and the microbatch, and the chunk unless it is 0: `F3`, `BW0c1`.

    Example:
        >>> str(Task("F", 3)), str(Task("BW", 0, chunk=1))
        ('F3', 'BW0c1')
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __post_init__(self) -> None:
        rules = {"kind": KINDS, "microbatch": "at least 0", "chunk": "at least 0"}
        problems = check_fields(self, rules)
        if problems:
            raise ScheduleError("Invalid pipeline task:", problems)

    def __str__(self) -> str:
        text = f"{self.kind}{self.microbatch}"
        if self.chunk:
            text += f"c{self.chunk}"
        return text


def parse_task(text: str) -> Task:
    """Parse the text of a task; the inverse of `str`. `c0` may be written.

    Example:
        >>> parse_task("BW0c1"), parse_task("F3c0") == parse_task("F3")
        (Task(kind='BW', microbatch=0, chunk=1), True)
    """
    match = _TASK.fullmatch(text)
    if match is None:
        fix = "F or BW, a microbatch, and c with a chunk if stages have several: F3, BW0c1"
        problem = Problem("task", f"{text!r} is not a task", fix=fix)
        raise ScheduleError("Invalid pipeline task:", [problem])
    kind, microbatch, chunk = match.groups()
    return Task(kind, int(microbatch), int(chunk or 0))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The tasks of every stage of a pipeline, in order.

    The model is split into `stages * chunks` virtual stages: chunk 1 of the first stage follows
    chunk 0 of the last, and so on.

    Args:
        name: The name in error messages.
        chunks: Chunks of layers on each stage.
        orders: For each stage its tasks, in the order of execution.
        flush: Whether a batch ends before the next begins. Without a flush `orders` are those of a
            single batch, and `repeat_schedule` overlaps several.

    A value that is out of range is a `ScheduleError`; `check_schedule` checks the orders.
    """

    name: str
    microbatches: int
    chunks: int
    orders: tuple[tuple[Task, ...], ...]
    flush: bool = True

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("stages", "microbatches", "chunks"), "at least 1")
        problems = check_fields(self, counts)
        if problems:
            raise ScheduleError("Invalid pipeline schedule:", problems)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.orders)

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Return the virtual stage of a chunk, from 0 (first layers) to `stages * chunks - 1`."""
        return chunk * self.stages + stage

    def pass_of(self, stage: int, task: Task) -> Pass:
        """Return a task of this stage as one of the whole schedule."""
        return task.kind, self.virtual_stage(stage, task.chunk), task.microbatch

    def dependencies(self, stage: int, task: Task) -> tuple[Pass, ...]:
        """Return the passes needed before a task of this stage can start.

        F needs F of the previous virtual stage; BW its own F and BW of the next virtual stage.
        """
        virtual_stage = self.virtual_stage(stage, task.chunk)
        microbatch = task.microbatch
        if task.kind == "F" and virtual_stage == 0:
            return ()
        if task.kind == "F":
            return (("F", virtual_stage - 1, microbatch),)
        own_forward = ("F", virtual_stage, microbatch)
        if virtual_stage == self.stages * self.chunks - 1:
            return (own_forward,)
        return (own_forward, ("BW", virtual_stage + 1, microbatch))


def check_values(rule: str, **values: float) -> list[Problem]:
    """Return a problem for each value in conflict with a rule of `check_fields`."""
    return check_fields(SimpleNamespace(**values), dict.fromkeys(values, rule))


def alternate(forwards: list[Task], backwards: list[Task], warmup: int) -> Iterator[Task]:
    """Yield `warmup` forwards, then forwards and backwards in turn, then remaining backwards."""
    yield from forwards[:warmup]
    for i, backward in enumerate(backwards):
        yield from forwards[warmup + i : warmup + i + 1]
        yield backward


def repeat_schedule(schedule: Schedule, batches: int) -> Schedule:
    """Return several consecutive batches as one schedule of `batches * microbatches` microbatches.

    With a flush a stage starts the next batch when it has finished the last. Without one the
    forwards of the next batch alternate with the remaining backwards of the last, after the same
    warmup as in the first.
    """
    orders = tuple(tuple(_repeat_order(schedule, order, batches)) for order in schedule.orders)
    total = batches * schedule.microbatches
    return dataclasses.replace(schedule, microbatches=total, orders=orders)


def _repeat_order(schedule: Schedule, order: tuple[Task, ...], batches: int) -> Iterable[Task]:
    """Return the order of one stage for several batches."""
    tasks = list[Task]()
    for batch in range(batches):
        first = batch * schedule.microbatches
        for task in order:
            tasks.append(dataclasses.replace(task, microbatch=first + task.microbatch))
    if schedule.flush:
        return tasks
    forwards = list[Task]()
    backwards = list[Task]()
    for task in tasks:
        if task.kind == "F":
            forwards.append(task)
        else:
            backwards.append(task)
    return alternate(forwards, backwards, warmup=order.index(backwards[0]) - 1)


def execution_order(schedule: Schedule) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the tasks run until the end or a deadlock, and the index of each stage's next task.

    Tasks are (stage, index in its order), each after its dependencies. Passes that no stage runs
    count as done: `check_schedule` reports them as missing.
    """
    pending = set[Pass]()
    for stage, order in enumerate(schedule.orders):
        for task in order:
            pending.add(schedule.pass_of(stage, task))
    ran: list[tuple[int, int]] = []
    following = [0] * schedule.stages
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(schedule.orders):
            while following[stage] < len(order):
                task = order[following[stage]]
                if not pending.isdisjoint(schedule.dependencies(stage, task)):
                    break
                pending.discard(schedule.pass_of(stage, task))
                ran.append((stage, following[stage]))
                following[stage] += 1
                progress = True
    return ran, following


@dataclasses.dataclass(frozen=True)
class _Run:
    """The place of a task in a schedule."""

    stage: int
    tick: int
    task: Task


def check_schedule(
    schedule: Schedule, ticks: Sequence[Sequence[int]] | None = None
) -> list[Problem]:
    """Return the problems of a schedule, sorted: missing, repeated or unknown tasks, and deadlocks.

    `ticks` has the tick of each task for the messages; by default its index in the order of its
    stage.
    """
    ticks = ticks or [range(len(order)) for order in schedule.orders]
    runs: dict[Pass, _Run] = {}  # the first task of each pass
    problems = list[Problem]()
    for stage, order in enumerate(schedule.orders):
        for tick, task in zip(ticks[stage], order, strict=True):
            problems += _task_problems(schedule, _Run(stage, tick, task), runs)
            runs.setdefault(schedule.pass_of(stage, task), _Run(stage, tick, task))
    for stage in range(schedule.stages):
        problems += _missing_problems(schedule, runs, stage)
    problems += _deadlocks(schedule, runs, ticks)
    return sorted(problems)


def _task_problems(schedule: Schedule, run: _Run, runs: Mapping[Pass, _Run]) -> Iterator[Problem]:
    """Yield the problems of a task: it is unknown, or repeats one of `runs`."""
    task = run.task
    where = f"stage {run.stage}, tick {run.tick}"
    if task.microbatch >= schedule.microbatches or task.chunk >= schedule.chunks:
        sizes = f"microbatches = {schedule.microbatches}, chunks = {schedule.chunks}"
        detail = f"{sizes}; both count from 0"
        yield Problem(where, f"{task} is outside the schedule", detail)
    first = runs.get(schedule.pass_of(run.stage, task))
    if first is not None:
        what = f"{task} repeats {first.task} of tick {first.tick}"
        yield Problem(where, what, fix="remove one of them")


def _missing_problems(schedule: Schedule, runs: Container[Pass], stage: int) -> Iterator[Problem]:
    """Yield a problem if a stage lacks tasks."""
    missing = list(itertools.islice(_missing(schedule, runs, stage), _LISTED + 1))
    if not missing:
        return
    listed = " ".join(missing[:_LISTED])
    if len(missing) > _LISTED:
        listed += " and more"
    fix = "add them; each stage runs every task once"
    yield Problem(f"stage {stage}", f"tasks are missing: {listed}", fix=fix)


def _missing(schedule: Schedule, runs: Container[Pass], stage: int) -> Iterator[str]:
    """Yield the missing tasks of a stage; lazily, since a file may name any microbatch."""
    for microbatch in range(schedule.microbatches):
        for chunk in range(schedule.chunks):
            virtual_stage = schedule.virtual_stage(stage, chunk)
            for kind in KINDS:
                if (kind, virtual_stage, microbatch) not in runs:
                    yield str(Task(kind, microbatch, chunk))


def _deadlocks(
    schedule: Schedule, runs: Mapping[Pass, _Run], ticks: Sequence[Sequence[int]]
) -> Iterator[Problem]:
    """Yield a problem for each stage in a deadlock."""
    ran, stopped = execution_order(schedule)
    done = set[Pass]()
    for stage, index in ran:
        done.add(schedule.pass_of(stage, schedule.orders[stage][index]))
    for stage, index in enumerate(stopped):
        if index == len(schedule.orders[stage]):
            continue
        task = schedule.orders[stage][index]
        needed = schedule.dependencies(stage, task)
        other = next(runs[item] for item in needed if item in runs and item not in done)
        stop = ticks[other.stage][stopped[other.stage]]
        yield Problem(
            f"stage {stage}, tick {ticks[stage][index]}",
            f"deadlock: {task} waits for {other.task} of stage {other.stage}",
            f"{other.task} is at tick {other.tick}; stage {other.stage} stops at tick {stop}",
            "change the order of one stage",
        )
