"""A pipeline schedule as tables for one SPMD program, a row for each tick.

Stages run in lock step: the output of a tick reaches the next stage in the following tick. Each
tick has one forward task, then one backward task.

```
tick        0      1      2      3        the last stage runs a microbatch
stage 0   F0 ·   F1 ·   F2 B0  F3 B1      forward and backward in one tick
stage 1    · ·   F0 B0  F1 B1  F2 B2
```

Between the two tasks of a microbatch a stage keeps what the remat policy saves, in slots, or its
input alone. In the second case the backward task runs the forward pass again, and the forward task
of the last stage is the first half of its backward task.

A backward task waits for everything that the schedule lists before it, a forward task only for its
input. So GPipe is unchanged, and 1F1B holds up to 2(p − s) − 1 microbatches at stage s instead of p
− s; that many keep all stages busy if a transfer takes a tick (eager 1F1B, Zhuang et al.,
arXiv:2211.05322). The length is the published one.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from fractions import Fraction

import numpy as np

from spmd.errors import Problem, ScheduleError
from spmd.pipeline.schedule import Pass, Schedule
from spmd.pipeline.schedules import is_one_f_one_b

IDLE = -1


@dataclasses.dataclass(frozen=True, eq=False)
class TickTable:
    """The tasks and slots of every stage in every tick: int32 arrays `[tick, stage]`, -1 for none.

    A stage keeps the inputs of its tasks in `depth` slots, from their arrival until the last task
    that reads them; what the remat policy saves in `saved_depth` slots, from the forward task until
    the backward task; and gradients that have arrived in `gradient_depth` slots.

    Attributes:
        saved_depth: 0 if backward tasks run the forward pass again, from the input.
        versions: Batches in flight, 1 or 2. Microbatches of the previous batch are numbered from
            `microbatches` on.
        receive_slot: Slot for the input that the previous stage sent in the tick before.
        forward: Microbatch of the forward task.
        forward_slot: Slot of its input; the first virtual stage writes it in this tick.
        forward_saved_slot: Slot for what the policy saves of it.
        gradient_receive_slot: Slot for the gradient that the next stage sent in the tick before.
        backward: Microbatch of the backward task.
        backward_slot: Slot of the input of its forward task; -1 if what the policy saves is kept.
        backward_saved_slot: Slot of what the policy saved of its forward task.
        gradient_slot: Slot of its gradient; -1 on the last virtual stage, which starts from the
            loss.
    """

    microbatches: int
    chunks: int
    depth: int
    saved_depth: int
    gradient_depth: int
    versions: int
    receive_slot: np.ndarray
    forward: np.ndarray
    forward_chunk: np.ndarray
    forward_slot: np.ndarray
    forward_saved_slot: np.ndarray
    gradient_receive_slot: np.ndarray
    backward: np.ndarray
    backward_chunk: np.ndarray
    backward_slot: np.ndarray
    backward_saved_slot: np.ndarray
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
    def is_in_order(self) -> bool:
        """Whether each virtual stage runs the microbatches in their order."""
        in_order = np.arange(self.microbatches)
        is_recomputing = not self.saved_depth
        for stage, chunk in itertools.product(range(self.stages), range(self.chunks)):
            tasks, chunks = self.forward, self.forward_chunk
            is_last = (stage, chunk) == (self.stages - 1, self.chunks - 1)
            if is_recomputing and is_last:  # it has no forward tasks
                tasks, chunks = self.backward, self.backward_chunk
            own = (tasks[:, stage] >= 0) & (chunks[:, stage] == chunk)
            if not np.array_equal(tasks[own, stage], in_order):
                return False
        return True

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {name: getattr(self, name) for name in _COLUMNS}

    @property
    def taken(self) -> dict[str, Fraction]:
        """Share of ticks with a branch taken by the busiest stage, by the scope of the branch.

        `head` is a branch of its own if what remat saves is kept, otherwise `from_loss`, in a
        backward task. The share of `from_loss` is of backward tasks, that of `more_layers` of tasks of the stages
        with the most layers.
        """
        return self._shares(lambda tasks: int(tasks.sum(axis=0).max()))

    @property
    def waited(self) -> dict[str, Fraction]:
        """Share of ticks with a branch taken by any stage, so that all wait; keys as in `taken`."""
        return self._shares(lambda tasks: int(tasks.any(axis=1).sum()))

    def _shares(self, count: Callable[[np.ndarray], int]) -> dict[str, Fraction]:
        forward = self.forward >= 0
        backward = self.backward >= 0
        branches = {
            "pipeline_forward": forward,
            "pipeline_backward": backward,
            "pipeline_embedding": (forward & (self.forward_chunk == 0))[:, :1],
            "pipeline_embedding_backward": (backward & (self.backward_chunk == 0))[:, :1],
            "pipeline_head": (backward & (self.backward_chunk == self.chunks - 1))[:, -1:],
        }
        branches["pipeline_last_stage_head"] = branches["pipeline_head"]
        shares = dict[str, Fraction]()
        for name, tasks in branches.items():
            shares[name] = Fraction(count(tasks), self.ticks)
        # One of as many microbatches as there are stages.
        groups = -(-self.microbatches // self.stages)
        for name in ("pipeline_first_layers", "pipeline_first_layers_backward"):
            shares[name] = Fraction(groups, self.ticks)
        shares["pipeline_from_loss"] = Fraction(1, self.chunks)
        shares["pipeline_more_layers"] = Fraction(1)
        return shares

    def time(self, forward: float, backward: float) -> float:
        """Return the duration of all ticks.

        In each half of a tick, every stage waits for the slowest.

        Args:
            forward: Time of a forward task of a whole stage.
            backward: Time of a backward task of a whole stage, with what it computes again.
        """
        forward_ticks = (self.forward >= 0).any(axis=1).sum()
        backward_ticks = (self.backward >= 0).any(axis=1).sum()
        return forward_ticks * forward / self.chunks + backward_ticks * backward / self.chunks


_COLUMNS = [field.name for field in dataclasses.fields(TickTable) if field.type is np.ndarray]


def tabulate(schedule: Schedule, *, recompute: bool = False) -> TickTable:
    """Return the tables of a schedule.

    Args:
        recompute: Whether a stage keeps the inputs of tasks alone, and backward tasks run the
            forward pass again; always so without a flush.

    Raises:
        ScheduleError: The reasons why the schedule cannot be executed.
    """
    problems = _unsupported(schedule)
    if problems:
        raise ScheduleError("This schedule can be simulated but not executed:", problems)
    if not schedule.flush:
        return _steady_state(schedule.stages, schedule.microbatches)
    ticks = _assign_ticks(schedule, recompute=recompute)
    shape = (1 + max(ticks.values()), schedule.stages)
    columns = {name: np.full(shape, IDLE, np.int32) for name in _COLUMNS}
    _fill_tasks(columns, schedule, ticks, recompute=recompute)
    for stage in range(schedule.stages):
        _fill_input_slots(columns, schedule, ticks, stage, recompute=recompute)
        _fill_gradient_slots(columns, schedule, ticks, stage)
        if not recompute:
            _fill_saved_slots(columns, schedule, ticks, stage)
    slots_of_inputs = columns["receive_slot"], columns["forward_slot"], columns["backward_slot"]
    return TickTable(
        schedule.microbatches,
        schedule.chunks,
        depth=1 + int(np.max(slots_of_inputs)),
        saved_depth=1 + int(columns["forward_saved_slot"].max()),
        gradient_depth=1 + int(columns["gradient_slot"].max()),
        versions=1,
        **columns,
    )


def _last_virtual_stage(schedule: Schedule) -> int:
    return schedule.stages * schedule.chunks - 1


def _fill_tasks(
    columns: Mapping[str, np.ndarray],
    schedule: Schedule,
    ticks: Mapping[Pass, int],
    *,
    recompute: bool,
) -> None:
    """Write the microbatches and the chunks of all tasks."""
    last = _last_virtual_stage(schedule)
    for (kind, virtual_stage, i), tick in ticks.items():
        chunk, stage = divmod(virtual_stage, schedule.stages)
        if kind == "BW":
            columns["backward"][tick, stage] = i
            columns["backward_chunk"][tick, stage] = chunk
            continue
        if recompute and virtual_stage == last:
            continue  # the last forward task is the first half of its backward task
        columns["forward"][tick, stage] = i
        columns["forward_chunk"][tick, stage] = chunk


def _fill_input_slots(
    columns: Mapping[str, np.ndarray],
    schedule: Schedule,
    ticks: Mapping[Pass, int],
    stage: int,
    *,
    recompute: bool,
) -> None:
    """Write the slots of the inputs of a stage, each held until its last reader."""
    held: dict[Pass, tuple[int, int]] = {}  # first and last tick
    for task, tick in ticks.items():
        kind, virtual_stage, i = task
        if kind != "F" or virtual_stage % schedule.stages != stage:
            continue
        arrival = tick  # the embedding is written in the tick of the forward task
        if virtual_stage > 0:
            arrival = ticks["F", virtual_stage - 1, i] + 1
        last = tick
        if recompute:
            last = ticks["BW", virtual_stage, i]
        held[task] = arrival, last
    slots = _allocate_slots(held)
    for task, (arrival, last) in held.items():
        _, virtual_stage, _ = task
        if virtual_stage > 0:
            columns["receive_slot"][arrival, stage] = slots[task]
        if recompute:
            columns["backward_slot"][last, stage] = slots[task]
        if not recompute or virtual_stage < _last_virtual_stage(schedule):
            columns["forward_slot"][ticks[task], stage] = slots[task]


def _fill_saved_slots(
    columns: Mapping[str, np.ndarray], schedule: Schedule, ticks: Mapping[Pass, int], stage: int
) -> None:
    """Write the slots of saved arrays, held from a forward task to its backward task."""
    held: dict[Pass, tuple[int, int]] = {}  # first and last tick
    for task, tick in ticks.items():
        kind, virtual_stage, i = task
        if kind == "F" and virtual_stage % schedule.stages == stage:
            held[task] = tick, ticks["BW", virtual_stage, i]
    slots = _allocate_slots(held)
    for task, (forward, backward) in held.items():
        columns["forward_saved_slot"][forward, stage] = slots[task]
        columns["backward_saved_slot"][backward, stage] = slots[task]


def _fill_gradient_slots(
    columns: Mapping[str, np.ndarray], schedule: Schedule, ticks: Mapping[Pass, int], stage: int
) -> None:
    """Write the slots of the gradients received by a stage."""
    last = _last_virtual_stage(schedule)
    held: dict[Pass, tuple[int, int]] = {}  # first and last tick
    for task, tick in ticks.items():
        kind, virtual_stage, i = task
        is_own = virtual_stage % schedule.stages == stage
        if kind == "BW" and is_own and virtual_stage < last:
            held[task] = ticks["BW", virtual_stage + 1, i] + 1, tick
    slots = _allocate_slots(held)
    for task, (arrival, tick) in held.items():
        columns["gradient_slot"][tick, stage] = slots[task]
        columns["gradient_receive_slot"][arrival, stage] = slots[task]


def describe_execution(schedule: Schedule, *, recompute: bool = False) -> str:
    """Describe in one line the execution of a schedule, or the reason against it.

    Args:
        recompute: As of `tabulate`.

    Example:
        >>> from spmd.pipeline.schedules import make_schedule
        >>> text = describe_execution(make_schedule("1f1b", stages=2, microbatches=8))
        >>> for part in text.split("; "):
        ...     print(part)
        executed in lock step: 10 ticks of a forward and a backward task
        a stage holds what remat saves of at most 3 tasks
    """
    problems = _unsupported(schedule)
    if problems:
        return f"simulated, not executed: it {problems[0].what}; {problems[0].fix}"
    table = tabulate(schedule, recompute=recompute)
    ticks = f"{table.ticks} ticks of a forward and a backward task"
    held = f"a stage holds what remat saves of at most {table.saved_depth} tasks"
    if not table.saved_depth:
        held = f"a stage holds the inputs of at most {table.depth} tasks, and runs forward again"
    if schedule.flush:
        return f"executed in lock step: {ticks}; {held}"
    return f"executed without a flush: {ticks} a batch; {held}, and the weights of the batch before"


def _unsupported(schedule: Schedule) -> list[Problem]:
    """Return the reasons why a schedule cannot be executed."""
    where = f"schedule {schedule.name}"
    problems = list[Problem]()
    if schedule.stages == 1:
        fix = "2 stages or more, or gradient accumulation"
        problems.append(Problem(where, "has one stage", fix=fix))
    if not schedule.flush and not is_one_f_one_b(schedule):
        what = "has no flush, and another order than 1F1B's"
        problems.append(Problem(where, what, fix="schedule pipedream, or a flush"))
    least = 2 * (schedule.stages - 1)
    if not schedule.flush and schedule.microbatches < least:
        detail = f"{schedule.microbatches} < 2 × (stages={schedule.stages} - 1)"
        fix = f"{least} microbatches or more"
        problems.append(Problem(where, "has microbatches of three batches in flight", detail, fix))
    return problems


def _assign_ticks(schedule: Schedule, *, recompute: bool) -> dict[Pass, int]:
    """Return the tick of each pass, `"F"` or `"BW"`.

    If backward tasks run the forward pass again, the last virtual stage's F is a part of its BW, and
    takes no time of its own.
    """
    free = None
    if recompute:
        free = _last_virtual_stage(schedule)
    waiting = [_WaitingTasks(schedule, stage, free) for stage in range(schedule.stages)]
    count = sum(map(len, schedule.orders))
    ticks: dict[Pass, int] = {}
    for tick in itertools.count():
        before = len(ticks)
        for stage in waiting:
            stage.run_forwards(ticks, tick)
        for stage in waiting:
            stage.run_backward(ticks, tick)
        if len(ticks) == count:
            break
        assert len(ticks) > before, "a schedule that was checked has no deadlock"
    return ticks


class _WaitingTasks:
    """The tasks of a stage without a tick yet.

    Attributes:
        forwards: Virtual stage and microbatch of each forward task.
        backwards: Virtual stage and microbatch of each backward task, and the number of forward
            tasks listed before it.
        last: The last virtual stage.
        free: The virtual stage whose forward tasks take no time; None if there is none.
        ran: The number of forward tasks with a tick.
    """

    def __init__(self, schedule: Schedule, stage: int, free: int | None) -> None:
        self.free = free
        self.forwards = deque[tuple[int, int]]()
        self.backwards = deque[tuple[int, int, int]]()
        self.last = _last_virtual_stage(schedule)
        self.ran = 0
        for task in schedule.orders[stage]:
            virtual_stage = schedule.virtual_stage(stage, task.chunk)
            if task.kind == "F":
                self.forwards.append((virtual_stage, task.microbatch))
            else:
                listed = len(self.forwards)
                self.backwards.append((virtual_stage, task.microbatch, listed))

    def run_forwards(self, ticks: dict[Pass, int], tick: int) -> None:
        """Run the next forward task in this tick, and tasks without a time of their own.

        Each runs only if its input has arrived.
        """
        is_idle = True
        while self.forwards:
            virtual_stage, i = self.forwards[0]
            takes_none = virtual_stage == self.free
            sent = ticks.get(("F", virtual_stage - 1, i), tick)
            has_input = virtual_stage == 0 or sent < tick
            if not has_input or not (takes_none or is_idle):
                return
            if not takes_none:
                is_idle = False
            ticks["F", virtual_stage, i] = tick
            self.forwards.popleft()
            self.ran += 1

    def run_backward(self, ticks: dict[Pass, int], tick: int) -> None:
        """Run the next backward task in this tick, if it has its gradient.

        All forward tasks listed before it must be done.
        """
        if not self.backwards:
            return
        virtual_stage, i, listed = self.backwards[0]
        sent = ticks.get(("BW", virtual_stage + 1, i), tick)
        has_gradient = virtual_stage == self.last or sent < tick
        if has_gradient and self.ran >= listed:
            ticks["BW", virtual_stage, i] = tick
            self.backwards.popleft()


def _steady_state(stages: int, microbatches: int) -> TickTable:
    """Return 1F1B in its steady state.

    Every stage has a forward and a backward task in every tick of a batch. At the start of a batch
    the last microbatches of the previous batch are in flight, numbered from `microbatches` on. The
    slot of a microbatch is its index modulo `depth`, counted from the start of this batch (negative
    for the previous one).
    """
    depth = 2 * stages - 1
    tick = np.arange(microbatches)[:, None]
    stage = np.arange(stages)[None]
    forward = tick - stage  # [tick, stage]
    backward = tick - (2 * (stages - 1) - stage)
    zeros = np.zeros_like(forward)

    def number(i: np.ndarray) -> np.ndarray:
        return np.where(i < 0, i + 2 * microbatches, i)

    receives = zeros + stage > 0
    sends = zeros + stage < stages - 1
    columns = {
        "receive_slot": np.where(receives, forward % depth, IDLE),
        "forward": np.where(sends, number(forward), IDLE),
        "forward_chunk": np.where(sends, 0, IDLE),
        "forward_slot": np.where(sends, forward % depth, IDLE),
        "forward_saved_slot": zeros + IDLE,
        "gradient_receive_slot": np.where(sends, 0, IDLE),
        "backward": number(backward),
        "backward_chunk": zeros,
        "backward_slot": backward % depth,
        "backward_saved_slot": zeros + IDLE,
        "gradient_slot": np.where(sends, 0, IDLE),
    }
    int32 = {name: column.astype(np.int32) for name, column in columns.items()}
    return TickTable(microbatches, 1, depth, saved_depth=0, gradient_depth=1, versions=2, **int32)


def _allocate_slots(lifetimes: Mapping[Pass, tuple[int, int]]) -> dict[Pass, int]:
    """Assign a slot to each array, given the first and the last tick of its lifetime."""

    def order(task: Pass) -> tuple[tuple[int, int], int, int]:
        _, virtual_stage, i = task
        return lifetimes[task], i, virtual_stage

    until: list[int] = []  # the last tick in which each slot is used
    slots = dict[Pass, int]()
    for task in sorted(lifetimes, key=order):
        first, last = lifetimes[task]
        free = [slot for slot, end in enumerate(until) if end < first]
        if free:
            slot = free[0]
            until[slot] = last
        else:
            slot = len(until)
            until.append(last)
        slots[task] = slot
    return slots
