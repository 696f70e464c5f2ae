"""Pipeline schedules by name.

| name | order of one stage | source |
|---|---|---|
| `gpipe` | all forwards, then all backwards | Huang et al., arXiv:1811.06965 |
| `1f1b` | a few forwards, then forward and backward in turn | Narayanan et al., PipeDream, SOSP 2019 |
| `interleaved` | 1F1B over several chunks of layers per stage | Narayanan et al., arXiv:2104.04473, section 2.2 |
| `zero-bubble` | 1F1B whose weight gradients fill the gaps: ZB-H1 | Qi et al., arXiv:2401.10241, section 2.1 |
| `pipedream` | 1F1B without a flush between batches | Narayanan et al., PipeDream-2BW, arXiv:2006.09503 |
| `zb-h2` | 1F1B with twice the activations, and no bubble but the skew of the stages | the same, section 2.2 |
| `zb-v` | through the stages and back, in two chunks: as `zb-h2`, with the memory of 1F1B | the same, section 6 |
"""

from collections.abc import Callable, Iterator

from spmd.errors import Problem, ScheduleError, did_you_mean
from spmd.pipeline.schedule import Schedule, Task, below_one, in_turn
from spmd.pipeline.zero_bubble import fill_bubbles


def make_schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule of that name.

    Args:
        name: One of `SCHEDULES`.
        stages: Stages of the pipeline (p).
        microbatches: Microbatches of one batch (m). `interleaved` takes multiples of the stages, `zero-bubble` and
            `pipedream` at least as many as stages.
        chunks: Chunks of layers per stage (v): 2 or more for `interleaved`, 1 for the others.

    Raises:
        ScheduleError: Everything about the arguments that the schedule cannot do with.

    Example:
        >>> for order in make_schedule("1f1b", stages=2, microbatches=3).orders:
        ...     print(*order)
        F0 F1 BW0 F2 BW1 BW2
        F0 BW0 F1 BW1 F2 BW2
    """
    problems = list(below_one(stages=stages, microbatches=microbatches, chunks=chunks))
    if name not in SCHEDULES:
        problems.append(Problem("schedule", f"there is no {name!r}", fix=did_you_mean(name, SCHEDULES)))
    elif not problems:
        problems.extend(misfits(name, stages, microbatches, chunks))
    if problems:
        raise ScheduleError("The schedule cannot be built:", problems)
    if name in FILLED:
        return fill_bubbles(stages, microbatches, 2 * stages, placement=FILLED[name])
    orders = tuple(tuple(BUILDERS[name](stage, stages, microbatches, chunks)) for stage in range(stages))
    return Schedule(name, microbatches, chunks, orders, flush=name != "pipedream")


def misfits(name: str, stages: int, microbatches: int, chunks: int) -> Iterator[Problem]:
    """What a schedule asks for beyond positive numbers, and does not get."""
    if name == "interleaved":
        if chunks < 2:
            yield Problem("chunks", "interleaved runs several chunks of layers per stage", f"chunks = {chunks}", "2")
        if microbatches % stages:
            arithmetic = f"{microbatches} / (stages={stages}) = {microbatches / stages:.4g}"
            fix = f"{-(-microbatches // stages) * stages} microbatches"
            yield Problem("microbatches", "interleaved runs them in groups of as many as stages", arithmetic, fix)
        return
    if chunks > 1:
        fix = '1, or schedule = "interleaved"'
        yield Problem("chunks", f"{name} has one chunk of layers per stage", f"chunks = {chunks}", fix)
    if name in ("zero-bubble", "pipedream") and microbatches < stages:
        arithmetic = f"{microbatches} < stages = {stages}"
        yield Problem("microbatches", f"{name} needs one for each stage", arithmetic, f"{stages} or more")


def gpipe(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Task]:
    """All forwards, then all backwards; both from the first microbatch on, so that every schedule sums alike."""
    yield from (Task("F", i) for i in range(microbatches))
    yield from (Task("BW", i) for i in range(microbatches))


def one_forward_one_backward(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Task]:
    """As many forwards as there are stages behind this one, then a forward and a backward in turn."""
    forwards, backwards = ([Task(kind, i) for i in range(microbatches)] for kind in ("F", "BW"))
    yield from in_turn(forwards, backwards, ahead=stages - 1 - stage)


def interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Task]:
    """1F1B over chunks: groups of as many microbatches as stages go through all chunks, one chunk after the other."""
    groups = range(0, microbatches, stages)
    steps = [(first + i, chunk) for first in groups for chunk in range(chunks) for i in range(stages)]
    forwards = [Task("F", microbatch, chunk) for microbatch, chunk in steps]
    backwards = [Task("BW", microbatch, chunks - 1 - chunk) for microbatch, chunk in steps]
    yield from in_turn(forwards, backwards, ahead=2 * (stages - 1 - stage) + (chunks - 1) * stages)


def zero_bubble(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Task]:
    """1F1B whose weight gradients come as many microbatches late as there are stages before this one.

    So every stage holds at most as much as the first stage of 1F1B, and has weight gradients left to compute when its
    last input gradient is out. The bubble is (p-1) max(F + B - W, F, B): the paper's (p-1) (F + B - W) unless W is the
    largest.
    """
    for task in one_forward_one_backward(stage, stages, microbatches, chunks):
        if task.kind == "F":
            yield task
            continue
        yield Task("B", task.microbatch)
        if task.microbatch >= stage:
            yield Task("W", task.microbatch - stage)
    yield from (Task("W", i) for i in range(microbatches - stage, microbatches))


Builder = Callable[[int, int, int, int], Iterator[Task]]
BUILDERS: dict[str, Builder] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
    "pipedream": one_forward_one_backward,
}
FILLED = {"zb-h2": "loop", "zb-v": "v"}
"""Name → placement, of schedules that are found by filling bubbles, with twice as many activations as stages."""

SCHEDULES = (*BUILDERS, *FILLED)
"""The names of all."""
