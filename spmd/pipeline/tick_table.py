"""A pipeline schedule as tables that one SPMD program steps through.

Stages run in lock step: the output of a tick reaches the next stage in the following tick. Each tick has one forward
task, then one backward task.

```
tick        0      1      2      3
stage 0   F0 ·   F1 ·   F2 B0  F3 B1      the last stage runs a microbatch forward and backward in one tick:
stage 1    · ·   F0 B0  F1 B1  F2 B2      its forward task is the first half of its backward task
```

A backward task waits for everything that the schedule lists before it, a forward task only for its input. So GPipe is
unchanged, and 1F1B holds up to 2(p − s) − 1 microbatches at stage s instead of p − s; that many keep all stages busy if
a transfer takes a tick (eager 1F1B, Zhuang et al., arXiv:2211.05322). The length is the published one.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from fractions import Fraction

import numpy as np

from spmd.errors import Problem, ScheduleError
from spmd.pipeline.schedule import Pass, Schedule

IDLE = -1


@dataclasses.dataclass(frozen=True, eq=False)
class TickTable:
    """The tasks and the slots of every stage in every tick: `[tick, stage]` arrays of int32, -1 for none.

    A stage keeps the inputs of its tasks, from their arrival until the backward task, in `depth` slots, and gradients
    that have arrived in `gradient_depth` slots.

    Attributes:
        versions: Batches in flight, 1 or 2. Microbatches of the batch before have the numbers `microbatches`, ….
        receive_slot: Slot for the input that the previous stage sent in the tick before.
        forward: Microbatch of the forward task.
        forward_slot: Slot of its input; the first virtual stage writes it in this tick.
        gradient_receive_slot: Slot for the gradient that the next stage sent in the tick before.
        backward: Microbatch of the backward task.
        backward_slot: Slot of the input of its forward task.
        gradient_slot: Slot of its gradient; -1 on the last virtual stage, which starts from the loss.
    """

    microbatches: int
    chunks: int
    depth: int
    gradient_depth: int
    versions: int
    receive_slot: np.ndarray
    forward: np.ndarray
    forward_chunk: np.ndarray
    forward_slot: np.ndarray
    gradient_receive_slot: np.ndarray
    backward: np.ndarray
    backward_chunk: np.ndarray
    backward_slot: np.ndarray
    gradient_slot: np.ndarray

    @property
    def ticks(self) -> int:
        """Number of ticks."""
        return self.forward.shape[0]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.forward.shape[1]

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {name: getattr(self, name) for name in _COLUMNS}

    @property
    def taken(self) -> dict[str, Fraction]:
        """Share of ticks in which the busiest stage takes a branch, by its scope; of `from_loss`, of backward tasks."""
        return self._shares(lambda tasks: int(tasks.sum(axis=0).max()))

    @property
    def waited(self) -> dict[str, Fraction]:
        """Share of ticks in which any stage takes a branch, so that all wait for it; keys as of `taken`."""
        return self._shares(lambda tasks: int(tasks.any(axis=1).sum()))

    def _shares(self, count: Callable[[np.ndarray], int]) -> dict[str, Fraction]:
        forward, backward = self.forward >= 0, self.backward >= 0
        branches = {
            "pipeline_forward": forward,
            "pipeline_backward": backward,
            "pipeline_embedding": (forward & (self.forward_chunk == 0))[:, :1],
            "pipeline_embedding_backward": (backward & (self.backward_chunk == 0))[:, :1],
        }
        shares = {name: Fraction(count(tasks), self.ticks) for name, tasks in branches.items()}
        return shares | {"pipeline_from_loss": Fraction(1, self.chunks)}

    def time(self, forward: float, backward: float) -> float:
        """Return the duration, given that of a forward and of a backward task (with recomputation) of a whole stage.

        In each half of a tick, every stage waits for the slowest.
        """
        halves = ((self.forward, forward), (self.backward, backward))
        return sum((tasks >= 0).any(axis=1).sum() * time / self.chunks for tasks, time in halves)


_COLUMNS = [field.name for field in dataclasses.fields(TickTable) if field.type is np.ndarray]


def tabulate(schedule: Schedule) -> TickTable:
    """Return the tables of a schedule.

    Raises:
        ScheduleError: The reasons why the schedule cannot be executed.
    """
    if problems := _unsupported(schedule):
        raise ScheduleError("This schedule can be simulated but not executed:", problems)
    if not schedule.flush:
        return _steady_state(schedule.stages, schedule.microbatches)
    stages, last = schedule.stages, schedule.stages * schedule.chunks - 1
    ticks = _assign_ticks(schedule)
    columns = {name: np.full((1 + max(ticks.values()), stages), IDLE, np.int32) for name in _COLUMNS}
    inputs: list[dict[Pass, tuple[int, int]]] = [{} for _ in range(stages)]  # first and last tick in which it is held
    gradients: list[dict[Pass, tuple[int, int]]] = [{} for _ in range(stages)]
    for task, tick in ticks.items():
        kind, virtual_stage, i = task
        chunk, stage = divmod(virtual_stage, stages)
        if kind == "B":
            columns["backward"][tick, stage], columns["backward_chunk"][tick, stage] = i, chunk
            arrival = ticks["F", virtual_stage - 1, i] + 1 if virtual_stage else ticks["F", 0, i]
            inputs[stage][task] = arrival, tick
            if virtual_stage < last:
                gradients[stage][task] = ticks["B", virtual_stage + 1, i] + 1, tick
        elif virtual_stage < last:  # the last forward task is the first half of its backward task
            columns["forward"][tick, stage], columns["forward_chunk"][tick, stage] = i, chunk
    for stage in range(stages):
        slots, gradient_slots = _allocate_slots(inputs[stage]), _allocate_slots(gradients[stage])
        for task, (arrival, tick) in inputs[stage].items():
            _, virtual_stage, i = task
            columns["backward_slot"][tick, stage] = slots[task]
            if virtual_stage:
                columns["receive_slot"][arrival, stage] = slots[task]
            if virtual_stage < last:
                columns["forward_slot"][ticks["F", virtual_stage, i], stage] = slots[task]
        for task, (arrival, tick) in gradients[stage].items():
            columns["gradient_slot"][tick, stage] = gradient_slots[task]
            columns["gradient_receive_slot"][arrival, stage] = gradient_slots[task]
    depth, gradient_depth = (1 + int(columns[name].max()) for name in ("backward_slot", "gradient_slot"))
    return TickTable(schedule.microbatches, schedule.chunks, depth, gradient_depth, versions=1, **columns)


def describe_execution(schedule: Schedule) -> str:
    """Describe in one line the execution of a schedule, or why it is not executed.

    Example:
        >>> from spmd.pipeline.schedules import make_schedule
        >>> describe_execution(make_schedule("1f1b", stages=2, microbatches=8))
        'executed in lock step: 10 ticks of a forward and a backward task; a stage holds the inputs of at most 3 tasks'
    """
    if problems := _unsupported(schedule):
        return f"simulated, not executed: it {problems[0].what}; {problems[0].fix}"
    table = tabulate(schedule)
    ticks = f"{table.ticks} ticks of a forward and a backward task"
    held = f"a stage holds the inputs of at most {table.depth} tasks"
    if schedule.flush:
        return f"executed in lock step: {ticks}; {held}"
    return f"executed without a flush: {ticks} a batch; {held}, and the weights of the batch before"


def _unsupported(schedule: Schedule) -> list[Problem]:
    where, problems = f"schedule {schedule.name}", []
    kinds = {task.kind for order in schedule.orders for task in order}
    if split := sorted(kinds & {"B", "W"}):
        what = f"splits the backward pass into {' and '.join(split)}"
        problems.append(Problem(where, what, fix="gpipe, 1f1b, interleaved, or a file of F and BW"))
    if schedule.placement != "loop":
        problems.append(Problem(where, f"has the placement {schedule.placement!r}", fix='placement "loop"'))
    if schedule.stages == 1:
        problems.append(Problem(where, "has one stage", fix="2 stages or more, or gradient accumulation"))
    least = 2 * (schedule.stages - 1)
    if not schedule.flush and schedule.microbatches < least:
        detail = f"{schedule.microbatches} < 2 × (stages={schedule.stages} - 1)"
        fix = f"{least} microbatches or more"
        problems.append(Problem(where, "has microbatches of three batches in flight", detail, fix))
    return problems


def _assign_ticks(schedule: Schedule) -> dict[Pass, int]:
    """Return the tick of each pass, `"F"` or `"B"`; the last virtual stage's F shares its tick with others."""
    stages, last = schedule.stages, schedule.stages * schedule.chunks - 1
    forwards = [[task for task in order if task.kind == "F"] for order in schedule.orders]
    listed = [itertools.accumulate(task.kind == "F" for task in order) for order in schedule.orders]
    backwards = [  # each with the number of forward tasks that are listed before it
        [(task, count) for task, count in zip(order, counts, strict=True) if task.kind != "F"]
        for order, counts in zip(schedule.orders, listed, strict=True)
    ]
    ticks: dict[Pass, int] = {}
    next_forward, next_backward = [0] * stages, [0] * stages
    for tick in itertools.count():
        before = len(ticks)
        for stage in range(stages):
            is_free = True
            while next_forward[stage] < len(forwards[stage]):
                task = forwards[stage][next_forward[stage]]
                virtual_stage, i = task.chunk * stages + stage, task.microbatch
                has_input = virtual_stage == 0 or ticks.get(("F", virtual_stage - 1, i), tick) < tick
                if not has_input or (virtual_stage < last and not is_free):
                    break
                is_free = is_free and virtual_stage == last
                ticks["F", virtual_stage, i] = tick
                next_forward[stage] += 1
        for stage in range(stages):
            if next_backward[stage] == len(backwards[stage]):
                continue
            task, count = backwards[stage][next_backward[stage]]
            virtual_stage, i = task.chunk * stages + stage, task.microbatch
            has_gradient = virtual_stage == last or ticks.get(("B", virtual_stage + 1, i), tick) < tick
            if has_gradient and next_forward[stage] >= count:
                ticks["B", virtual_stage, i] = tick
                next_backward[stage] += 1
        if len(ticks) == sum(map(len, schedule.orders)):
            break
        assert len(ticks) > before, "a schedule that was checked has no deadlock"
    return ticks


def _steady_state(stages: int, microbatches: int) -> TickTable:
    """Return 1F1B in its steady state: every stage has a forward and a backward task in every tick of a batch.

    At the start of a batch the last microbatches of the batch before are in flight, numbered `microbatches`, …. The
    slot of a microbatch is its number modulo `depth`, counted from the start of this batch (negative for the last).
    """
    depth = 2 * stages - 1
    tick, stage = np.arange(microbatches)[:, None], np.arange(stages)[None]
    forward, backward = tick - stage, tick - (2 * (stages - 1) - stage)
    zeros = np.zeros_like(forward)

    def number(i: np.ndarray) -> np.ndarray:
        return np.where(i < 0, i + 2 * microbatches, i)

    receives, sends = zeros + stage > 0, zeros + stage < stages - 1
    columns = {
        "receive_slot": np.where(receives, forward % depth, IDLE),
        "forward": np.where(sends, number(forward), IDLE),
        "forward_chunk": np.where(sends, 0, IDLE),
        "forward_slot": np.where(sends, forward % depth, IDLE),
        "gradient_receive_slot": np.where(sends, 0, IDLE),
        "backward": number(backward),
        "backward_chunk": zeros,
        "backward_slot": backward % depth,
        "gradient_slot": np.where(sends, 0, IDLE),
    }
    int32 = {name: column.astype(np.int32) for name, column in columns.items()}
    return TickTable(microbatches, 1, depth, gradient_depth=1, versions=2, **int32)


def _allocate_slots(lifetimes: Mapping[Pass, tuple[int, int]]) -> dict[Pass, int]:
    """Assign a slot to each array, given the first and the last tick in which it is held."""
    until: list[int] = []  # the last tick in which each slot is used
    slots = {}
    for name, (first, last) in sorted(lifetimes.items(), key=lambda item: (item[1], item[0][2], item[0][1])):
        free = [slot for slot, end in enumerate(until) if end < first]
        slot = free[0] if free else len(until)
        until[slot : slot + 1] = [last]
        slots[name] = slot
    return slots
