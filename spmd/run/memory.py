"""Copies of the training state in the memory of its supervisor, every few steps.

The copy is made between two steps: after the metrics of a step were read, and before the next one is
dispatched, which donates the state. It needs no further memory on the devices.
"""

import dataclasses
import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from spmd import tree
from spmd.checkpoint.memory import Layout, MemoryStore, Saved, memory_problem
from spmd.checkpoint.tree import from_serialized, storable
from spmd.distributed.async_gather import AsyncGather
from spmd.distributed.coordinator import machine_id
from spmd.distributed.hosts import gather_json, plain_problems, read_problems
from spmd.errors import ConfigError, Problem
from spmd.observe.metrics import human_duration
from spmd.resilience.supervisor import Worker
from spmd.run.hooks import Save, Telemetry
from spmd.run.peers import PeerCopies
from spmd.run.run_config import RecoveryConfig
from spmd.training.loop import Hook
from spmd.tree import human_bytes

COST = 0.02
"""Fraction of the time that copies may take, if the config does not say how often to make them."""

PENDING_METRICS = "pending_metrics"
"""Key in the record of a copy in memory."""

_MEASURED = 4
"""First steps, each with a copy, whose times give the number of steps between copies."""


@dataclasses.dataclass(frozen=True)
class CommonCopy:
    """Copies of one step on all processes; `own` is None if only a peer has this process's."""

    step: int
    generation: int
    own: Saved | None


class StateMemory:
    """Copies of the state of one process, and how to restore them.

    Args:
        worker: This process under its supervisor; None without one, and then there are no copies.
        recovery: Steps between copies and processes for second ones, as the config says.
        generation: Number of the lease of the run folder.
        abstract: Path → shape, dtype and sharding of the state to save.
        say: Shows a line.

    Raises:
        ConfigError: The config asks for copies, and they do not fit into the memory of a host.
    """

    def __init__(
        self,
        worker: Worker | None,
        recovery: RecoveryConfig,
        generation: int,
        abstract: Mapping[str, Any],
        say: Callable[[str], object],
    ) -> None:
        self.generation = generation
        self.every = recovery.memory_every
        self._worker = worker
        self._abstract = dict(abstract)
        self._say = say
        self.layout = Layout.of(self._abstract)
        self.peers: PeerCopies | None = None
        self.is_on = self.every >= 0 and all(gather_json(worker is not None))
        if not self.is_on:
            return
        assert worker is not None
        nbytes = self.layout.nbytes
        if jax.process_count() > 1:
            self.peers = PeerCopies.connect(
                worker.address, machine_id(), nbytes, recovery.memory_peer, worker.peer_memory
            )
        self._check_memory()
        if self.is_on:
            threading.Thread(target=self._reserve, name="memory", daemon=True).start()

    @property
    def worker(self) -> Worker:
        """This process under its supervisor."""
        assert self._worker is not None, "is on"
        return self._worker

    @property
    def store(self) -> MemoryStore:
        """Copies of the state of this process."""
        return self.worker.memory

    def _reserve(self) -> None:
        """Take the memory of all copies, while the step is compiled."""
        self.store.reserve(self.layout.nbytes)
        if self.peers is not None:
            self.worker.peer_memory.reserve(self.peers.source_bytes)

    def _check_memory(self) -> None:
        """Make no copies if they do not fit on some host; an error if the config asks for them."""
        others = 0
        if self.peers is not None:
            others = self.peers.source_bytes
        machines = gather_json(machine_id())
        processes = machines.count(machine_id())
        problem: Problem | None = None
        if not self.worker.is_restart:  # which has the memory already
            problem = memory_problem(self.layout.nbytes, others, processes)
        plain = [plain_problems([problem] if problem else [])]
        problems = [
            each for rows in gather_json(plain) for row in rows for each in read_problems(row)
        ]
        if problems and self.every > 0:
            raise ConfigError("Nothing was started:", problems[:1])
        if problems:
            self._say(f"no copies of the state in memory: {problems[0].what}: {problems[0].detail}")
            self.is_on = False

    def recall_every(self) -> None:
        """Take the steps between copies from the process before, if all processes know them."""
        if self.every or not self.is_on:
            return
        known = gather_json(self.worker.control.read().every)
        if len(set(known)) == 1:
            self.every = int(known[0])

    def choose_every(self, every: int) -> None:
        """Set the steps between copies, for the next process too."""
        self.every = every
        self.worker.control.change(every=every)

    def find(self) -> CommonCopy | None:
        """Return the newest step with copies of all processes, their own or a peer's.

        Copies count that were made since no other run has had the folder.
        """
        if not self.is_on:
            return None
        own = {(saved.step, saved.generation): saved for saved in self.store.saved()}
        kept = list[tuple[int, int, int]]()
        if self.peers is not None:
            for saved in self.worker.peer_memory.saved():
                kept.append((saved.step, saved.generation, saved.process))
        oldest = self.worker.control.read().oldest
        rows = gather_json([oldest, list(own), kept])
        common = _common_steps(rows)
        if not common:
            return None
        step, generation = max(common)
        return CommonCopy(step, generation, own.get((step, generation)))

    def read(self, found: CommonCopy) -> tuple[dict[str, jax.Array], dict[str, Any]] | None:
        """Return the arrays of a copy and its record; None if some process cannot use its copy."""
        own = found.own
        if own is None and self.peers is not None:
            self.peers.fetch(found.step, found.generation, self.store)
            for saved in self.store.saved():
                if (saved.step, saved.generation) == (found.step, found.generation):
                    own = saved
        read = None
        if own is not None:
            read = self.store.read(own, self._abstract)
        if not all(gather_json(read is not None)):
            return None
        return read

    def write(self, step: int, state: Any, record: Mapping[str, Any]) -> None:
        """Copy a state, and send the copy to another process; return once it may be donated."""
        self.finish()
        arrays = storable(state)
        process = jax.process_index()
        self.store.write(step, self.generation, process, arrays, record, self.layout)
        if self.peers is not None:
            self.peers.send(self.store)

    def finish(self) -> None:
        """Wait until the last copy counts, and was sent to another process."""
        self.store.wait()
        if self.peers is not None:
            self.peers.wait()

    def send_seconds(self) -> float:
        """Return the seconds to send a copy to another process; 0 without one."""
        if self.peers is None or not self.peers.seconds:
            return 0.0
        return min(self.peers.seconds)

    def clear(self, after: int) -> None:
        """Drop copies of later steps."""
        if not self.is_on:
            return
        self.finish()
        self.store.clear(after)
        all_done = gather_json(True)  # no copy of another process is on its way
        assert all_done
        self.worker.peer_memory.clear(after)


def _common_steps(rows: Sequence[Any]) -> set[tuple[int, int]]:
    """Return the steps and generations with copies of all processes, their own or a peer's.

    Args:
        rows: Of each process: its oldest generation, its own copies and those of others. A process
            that has missed a generation knows none before that; the others know them.
    """
    oldest = min(row[0] for row in rows)
    common: set[tuple[int, int]] | None = None
    for process, (_, own, _) in enumerate(rows):
        copies = {(step, generation) for step, generation in own}
        for _, _, kept in rows:
            copies |= {(step, generation) for step, generation, of in kept if of == process}
        usable = {(step, generation) for step, generation in copies if generation >= oldest}
        common = usable if common is None else common & usable
    return common or set()


def restored_state(abstract: Any, arrays: Mapping[str, jax.Array]) -> Any:
    """Return a state from arrays in their serialized form; leaves without one stay abstract."""

    def fill(path: str, leaf: Any) -> Any:
        if path not in arrays:
            return leaf
        return from_serialized(arrays[path], leaf)

    return tree.map_with_path(fill, abstract)


class FinishCopy(Hook):
    """Waits for the last copy before the metrics of the step of the next one are written.

    So a process that is killed then has computed no more steps twice than are between two copies.
    """

    def __init__(self, memory: StateMemory) -> None:
        self._memory = memory

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Wait, if a copy of this step follows."""
        every = self._memory.every
        if self._memory.is_on and every > 0 and step % every == 0:
            self._memory.finish()


class SaveInMemory(Hook):
    """Copies the state every few steps, as few as cost at most `COST` of the time.

    After each of the first steps the state is copied, and the time of a copy and of a step is
    measured; the slowest process decides.

    Args:
        save: Hook of the checkpoints, for what is saved and its record.
        pending_metrics: Metrics until now that would be lost with this process, for the record.
    """

    def __init__(
        self,
        memory: StateMemory,
        save: Save,
        telemetry: Telemetry,
        say: Callable[[str], object],
        pending_metrics: Callable[[], Mapping[str, Any] | None],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._memory = memory
        self._save = save
        self._telemetry = telemetry
        self._say = say
        self._pending_metrics = pending_metrics
        self._now = now
        memory.recall_every()
        self._start = 0
        self._finished: list[float] = []
        self._copies: list[float] = []
        self._gather: AsyncGather | None = None
        if jax.process_count() > 1:
            self._gather = AsyncGather()

    def on_start(self, step: int) -> None:
        """Count the steps to measure from here."""
        self._start = step

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Take the time of a step."""
        if not self._memory.every:
            self._finished.append(self._now())

    def on_dispatch(self, step: int) -> None:
        """Choose the steps between copies, once the first steps were measured."""
        if self._memory.every or not self._memory.is_on:
            return
        measured = step - self._start - 1
        if self._gather is None and measured == _MEASURED:
            self._choose([self._measured()])
        elif self._gather is not None and measured >= _MEASURED:
            rows = self._gather.gather(self._measured())
            if rows is not None:
                self._choose(rows.tolist())

    def wants_state(self, step: int) -> bool:
        """Return true at the interval."""
        if not self._memory.is_on or self._memory.every < 0 or step == self._save.last_step:
            return False
        return self._memory.every == 0 or step % self._memory.every == 0

    def on_state(self, step: int, state: Any) -> None:
        """Copy the state."""
        began = self._now()
        with self._telemetry.stopwatch.measure("checkpoint"):
            record = {**self._save.record_at(step), PENDING_METRICS: self._pending_metrics()}
            self._memory.write(step, self._save.saved(state), record)
        self._telemetry.watchdog.reset(f"copying the state of step {step} in memory")
        if not self._memory.every:
            self._copies.append(self._now() - began)

    def _measured(self) -> list[float]:
        """Return the seconds of a copy, of a step without it, and to send a copy.

        The first copy takes memory, and the first steps load programs.
        """
        copy = min(self._copies[1:_MEASURED])
        times = self._finished[1 : _MEASURED + 1]
        intervals = [later - earlier for earlier, later in itertools.pairwise(times)]
        step = max(statistics.median(intervals) - copy, copy / 1000)
        return [copy, step, self._memory.send_seconds()]

    def _choose(self, rows: Sequence[Sequence[float]]) -> None:
        """Choose the interval by the slowest process, and show it."""
        copy, step, _ = max(rows, key=lambda row: row[0] / row[1])
        # a copy is sent before the next one is made
        sending = max(math.ceil(send / own_step) for _, own_step, send in rows)
        every = max(steps_between(copy, step), sending)
        self._memory.choose_every(every)
        size = human_bytes(self._memory.layout.nbytes)
        peers = self._memory.peers
        second = f", and on process {peers.target}" if peers is not None else ""
        steps = f"{every} steps"
        if every == 1:
            steps = "step"
        share = copy / (every * step)
        self._say(
            f"the state is copied in memory{second} every {steps}: {size} in "
            f"{human_duration(copy)}, {share:.1%} of {every} × {human_duration(step)}"
        )


def steps_between(copy: float, step: float) -> int:
    """Return the fewest steps between copies within `COST`, a fraction of the time.

    Args:
        copy: Seconds of a copy.
        step: Seconds of a step.

    Example:
        >>> steps_between(copy=0.1, step=1.0), steps_between(copy=0.01, step=1.0)
        (5, 1)
    """
    return max(math.ceil(round(copy / (COST * step), 6)), 1)
