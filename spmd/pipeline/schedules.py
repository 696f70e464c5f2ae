"""Pipeline schedules by name.

| name | order of one stage | source |
|---|---|---|
| `gpipe` | all forwards, then all backwards | Huang et al., arXiv:1811.06965 |
| `1f1b` | warmup forwards, then one forward and one backward in turn | PipeDream |
| `interleaved` | 1F1B over several chunks of layers per stage | arXiv:2104.04473, section 2.2 |
| `pipedream` | 1F1B without a flush between batches | PipeDream-2BW, arXiv:2006.09503 |

Sources in full: Narayanan et al., PipeDream, SOSP 2019; PipeDream-2BW, arXiv:2006.09503; and
arXiv:2104.04473 (interleaved). Zero-bubble schedules (Qi et al., arXiv:2401.10241 and 2405.15362)
were tried, and are slower in lock step than `interleaved`: docs/decisions/0062.
"""

import itertools
from collections.abc import Callable, Iterator

from spmd.errors import Problem, ScheduleError, did_you_mean
from spmd.pipeline.schedule import Schedule, Task, alternate, check_values


def make_schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Build a schedule.

    Args:
        name: One of `SCHEDULES`.
        microbatches: Microbatches of one batch (m): a multiple of the stages for `interleaved`, at
            least as many as stages for `pipedream`.
        chunks: Chunks of layers per stage (v): 2 or more for `interleaved`, 1 for the others.

    Raises:
        ScheduleError: All problems of the arguments.

    Example:
        >>> for order in make_schedule("1f1b", stages=2, microbatches=3).orders:
        ...     print(*order)
        F0 F1 BW0 F2 BW1 BW2
        F0 BW0 F1 BW1 F2 BW2
    """
    problems = check_values("at least 1", stages=stages, microbatches=microbatches, chunks=chunks)
    if name not in SCHEDULES:
        problems.append(
            Problem("schedule", f"there is no {name!r}", fix=did_you_mean(name, SCHEDULES))
        )
    elif not problems:
        problems.extend(_size_problems(name, stages, microbatches, chunks))
    if problems:
        raise ScheduleError("The schedule cannot be built:", problems)
    build = _BUILDERS[name]
    orders = tuple(tuple(build(stage, stages, microbatches, chunks)) for stage in range(stages))
    return Schedule(name, microbatches, chunks, orders, flush=name != "pipedream")


def _size_problems(name: str, stages: int, microbatches: int, chunks: int) -> Iterator[Problem]:
    """Yield the problems of the numbers for a schedule; each of them is at least 1."""
    if name == "interleaved":
        yield from _interleaved_problems(stages, microbatches, chunks)
        return
    if chunks > 1:
        fix = '1, or schedule = "interleaved"'
        yield Problem(
            "chunks", f"{name} has one chunk of layers per stage", f"chunks = {chunks}", fix
        )
    if name == "pipedream" and microbatches < stages:
        detail = f"{microbatches} < stages = {stages}"
        fix = f"{stages} or more"
        yield Problem("microbatches", f"{name} needs one for each stage", detail, fix)


def _interleaved_problems(stages: int, microbatches: int, chunks: int) -> Iterator[Problem]:
    if chunks < 2:
        what = "interleaved runs several chunks of layers per stage"
        yield Problem("chunks", what, f"chunks = {chunks}", "2")
    if microbatches % stages:
        what = "interleaved runs them in groups of as many as stages"
        detail = f"{microbatches} / (stages={stages}) = {microbatches / stages:.4g}"
        groups = -(-microbatches // stages)  # rounded up
        yield Problem("microbatches", what, detail, f"{groups * stages} microbatches")


def _tasks(kind: str, microbatches: int) -> list[Task]:
    """Return one task for each microbatch."""
    return [Task(kind, i) for i in range(microbatches)]


def _gpipe(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Task]:
    """Yield all forwards, then all backwards.

    Backwards are from the first microbatch on, so that all schedules sum in one order.
    """
    yield from _tasks("F", microbatches)
    yield from _tasks("BW", microbatches)


def one_f_one_b(stage: int, stages: int, microbatches: int, chunks: int = 1) -> Iterator[Task]:
    """Yield a stage's tasks: warmup forwards, then one forward and one backward in turn."""
    del chunks
    forwards = _tasks("F", microbatches)
    backwards = _tasks("BW", microbatches)
    yield from alternate(forwards, backwards, warmup=stages - 1 - stage)


def is_one_f_one_b(schedule: Schedule) -> bool:
    """Return whether the order of every stage is 1F1B's."""
    for stage, order in enumerate(schedule.orders):
        if order != tuple(one_f_one_b(stage, schedule.stages, schedule.microbatches)):
            return False
    return True


def _interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Task]:
    """Yield 1F1B over chunks.

    Microbatches run through one chunk after the other in groups; the size of a group is the number
    of stages.
    """
    forwards = list[Task]()
    backwards = list[Task]()
    for first in range(0, microbatches, stages):
        group = range(first, first + stages)
        for chunk, microbatch in itertools.product(range(chunks), group):
            forwards.append(Task("F", microbatch, chunk))
            backwards.append(Task("BW", microbatch, chunks - 1 - chunk))
    warmup = 2 * (stages - 1 - stage) + (chunks - 1) * stages
    yield from alternate(forwards, backwards, warmup)


_BUILDERS: dict[str, Callable[[int, int, int, int], Iterator[Task]]] = {
    "gpipe": _gpipe,
    "1f1b": one_f_one_b,
    "interleaved": _interleaved,
    "pipedream": one_f_one_b,
}

SCHEDULES = tuple(_BUILDERS)
"""The names of all schedules."""
