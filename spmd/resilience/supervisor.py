"""Supervisor of a training process: it outlives the process, and starts the next one at once.

`spmd train` imports everything, reads its config, and forks: the child trains, and the parent is its
supervisor. The parent has imported everything and started no device, so a fork of it is a prepared
process. It forwards signals, and ends as the child ends: with its exit code, or by its signal. Only
after a crash it forks the next one, which goes on from the state in memory (`spmd.resilience.memory`)
or from a checkpoint.

Linux alone has what this needs: anonymous files in memory, and a signal to a child whose parent is
gone. Elsewhere, and where threads were started before the fork, there is no supervisor.

Once training has begun, a second child is forked ahead, the standby: it does everything before the
first use of a device, such as a trace of the step, and waits until it is needed. So a supervisor
itself stays as it was after the imports, and a standby that fails costs nothing: the next process is
forked when it is needed.
"""

import contextlib
import dataclasses
import gc
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from spmd.checkpoint.memory import MemoryStore
from spmd.distributed.initialize import EXIT_LOST
from spmd.resilience.control import Control, Report
from spmd.resilience.forked_call import end_with_parent
from spmd.resilience.generations import Generations
from spmd.resilience.watchdog import EXIT_HUNG

ATTEMPTS = 3
"""Ends in a row without a newer state after which a supervisor starts no further process."""

_STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_CRASHES = (
    *(signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS),
    *(signal.SIGFPE, signal.SIGILL),
)
_CRASH_CODES = (EXIT_LOST, EXIT_HUNG, 128 + signal.SIGABRT, 128 + signal.SIGKILL)
_POLL_SECONDS = 0.2
# Time for the end of a process that was told of a loss, such as its last lines.
_LOSS_SECONDS = 1.0
_INTERRUPT_SECONDS = 5.0
_NO_REPORT = Report()
# Training time before a standby is prepared, which a short run does not need.
_STANDBY_SECONDS = 5.0
# Threads of libraries that survive a fork, as they start again in the child.
_SAFE_THREADS = ("jemalloc_bg_thd",)


@dataclasses.dataclass(frozen=True)
class Worker:
    """Training process under a supervisor.

    Attributes:
        control: Page of memory that it shares with its supervisor.
        number: Count of the processes that its supervisor has started before.
        began: Time at which the process before had ended, in seconds since the epoch; None for the
            first one.
        before: Last report of the process before.
        reason: End of the process before.
        memory: Copies of the state of this process.
        peer_memory: Copies of the state of another process.
        address: Address of this host for the other processes; empty for a process alone.
    """

    control: Control
    memory: MemoryStore
    peer_memory: MemoryStore
    number: int = 0
    began: float | None = None
    before: Report = _NO_REPORT
    reason: str = ""
    address: str = ""

    @property
    def is_restart(self) -> bool:
        """Whether a process before this one has crashed."""
        return self.number > 0

    def newest_step(self, checkpoint: int | None) -> int | None:
        """Return the step of the newest state: of the newest checkpoint, or one in memory."""
        in_memory = self.memory.newest()
        if in_memory is None:
            return checkpoint
        return max(in_memory.step, checkpoint or 0)


@dataclasses.dataclass(frozen=True)
class _End:
    """End of a process: an exit code, or minus the number of a signal."""

    code: int

    @property
    def is_crash(self) -> bool:
        """Whether a restart may help: no error of the user, and no requested end."""
        return -self.code in _CRASHES or self.code in _CRASH_CODES

    def __str__(self) -> str:
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        return f"was ended by {signal.Signals(-self.code).name}"


def native_threads() -> dict[str, str]:
    """Return the native threads of this process: number → name; empty where the system has no list.

    Example:
        >>> str(threading.get_native_id()) in native_threads()
        True
    """
    threads = dict[str, str]()
    with contextlib.suppress(OSError):
        for number in os.listdir("/proc/self/task"):
            threads[number] = Path(f"/proc/self/task/{number}/comm").read_text().strip()
    return threads


def fork_obstacle(before: Collection[str]) -> str:
    """Return a reason against a fork of this process; empty if there is none.

    Args:
        before: Native threads after the imports. A config that starts a device or a pool of threads
            has more, and these would be missing in a child.
    """
    if sys.platform != "linux":
        return f"{sys.platform} does not end a child with its parent"
    if threading.current_thread() is not threading.main_thread():
        return "this is not the main thread"
    new = list[str]()
    for number, name in native_threads().items():
        if number not in before and name not in _SAFE_THREADS:
            new.append(name)
    if new:
        return f"the config has started threads: {', '.join(sorted(set(new)))}"
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("spmd"))
    except OSError as error:  # an old kernel, or a sandbox
        return f"the kernel has no process handles or files in memory: {error.strerror}"
    return ""


def supervise(
    generations: Generations,
    progress: Callable[[], int],
    prepare: Callable[[], object],
    attempts: int = ATTEMPTS,
    standby_delay: float = _STANDBY_SECONDS,
) -> Worker | int:
    """Fork a training process, and further ones after crashes.

    Return twice: a `Worker` in each training process, and the exit code in the supervisor, after the
    last one.

    Args:
        generations: Record of failed generations, which supervisors of several processes share.
        progress: Step of the newest checkpoint.
        prepare: Called in a process that is forked ahead, whose output is dropped.
        attempts: Crashes in a row without progress, after which the supervisor ends as well.
        standby_delay: Seconds of training before a process is forked ahead.
    """
    supervisor = _Supervisor(generations, progress, prepare, attempts, standby_delay)
    return supervisor.run()


@dataclasses.dataclass(frozen=True)
class _Standby:
    """Process forked ahead, and a pipe: its first line makes it the training process."""

    process: int
    pipe: int

    def start(self, worker: Worker) -> bool:
        """Let it go on as a worker; return false if it has ended."""
        values = {
            "number": worker.number,
            "began": worker.began,
            "before": dataclasses.asdict(worker.before),
            "reason": worker.reason,
        }
        try:
            os.write(self.pipe, json.dumps(values).encode() + b"\n")
        except OSError:
            return False
        finally:
            os.close(self.pipe)
        return _has_not_ended(self.process)


class _Supervisor:
    def __init__(
        self,
        generations: Generations,
        progress: Callable[[], int],
        prepare: Callable[[], object],
        attempts: int,
        standby_delay: float,
    ) -> None:
        self._generations = generations
        self._progress = progress
        self._prepare = prepare
        self._attempts = attempts
        self._delay = standby_delay
        self._control = Control.create()
        self._memory = MemoryStore.create()
        self._child = 0
        self._standby: _Standby | None = None
        self._is_stopping = False
        self._is_over = False
        self._not_forwarded: list[int] = []
        self._handlers: dict[int, Any] = {}
        self._forwarded = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup starts a process
            self._forwarded.append(signal.SIGHUP)
        self._before = _End(0)
        self._newest = -1
        self._stuck = 0

    def run(self) -> Worker | int:
        """Return twice, as `supervise` says; after Ctrl-C, when the training process has ended."""
        supervisor = os.getpid()
        try:
            return self._run()
        except KeyboardInterrupt:
            if os.getpid() == supervisor and self._child:
                self._interrupt_child()
            raise

    def _run(self) -> Worker | int:
        worker = Worker(self._control, self._memory, MemoryStore.create())
        if self._fork():
            return worker
        while True:
            found = self._wait(worker)
            if isinstance(found, Worker):
                return found
            ended_at = time.time()
            report = self._control.read()
            if not self._may_restart(found):
                if not self._is_stopping and worker.is_restart and not report.generation:
                    found = self._before  # it was not possible to go on
                if found.code:
                    self._generations.end(report.newest, str(found))
                return self._end_as(found)
            self._before = found
            self._generations.fail(report.generation, str(found))
            _say(f"the training process {found} after step {report.step}; starting the next one")
            self._control.change(generation=0, is_lost=0)
            worker = dataclasses.replace(
                worker, number=worker.number + 1, began=ended_at, before=report, reason=str(found)
            )
            if not self._start_standby(worker) and self._fork():
                return worker

    def _start_standby(self, worker: Worker) -> bool:
        """Make the standby the training process; return false if there is none."""
        standby = self._standby
        self._standby = None
        if standby is None or not standby.start(worker):
            return False
        self._set_child(standby.process)
        return True

    def _fork(self) -> bool:
        """Fork the training process, and return true in the child."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the child is known
        child = self._fork_child()
        if child:
            self._set_child(child)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        return child == 0

    def _set_child(self, process: int) -> None:
        """Set the training process, and forward the signals from before to it."""
        self._child = process
        for number in self._not_forwarded:
            os.kill(process, number)
        self._not_forwarded.clear()

    def _fork_child(self) -> int:
        """Fork; signals wait until both processes have their handlers."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        gc.freeze()  # objects of imports are not looked at again, so their memory stays shared
        signal.pthread_sigmask(signal.SIG_BLOCK, self._forwarded)
        with warnings.catch_warnings():
            # Python from 3.12 on warns of threads: those of NumPy and of Ctrl-C start again.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child:
            for number in self._forwarded:
                before = signal.signal(number, self._forward)
                self._handlers.setdefault(number, before)
        else:
            end_with_parent(parent)
            for handled, before in self._handlers.items():
                signal.signal(handled, before)
            signal.set_wakeup_fd(-1)  # Ctrl-C ends the supervisor at once, and so this process
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._forwarded)
        return child

    def _fork_standby(self, worker: Worker) -> Worker | None:
        """Fork a standby; in it, wait, and return the worker for it to become."""
        read, write = os.pipe()
        child = self._fork_child()
        if child:
            os.close(read)
            self._standby = _Standby(child, write)
            return None
        os.close(write)
        with _silent():
            values = self._await_start(read)
        before = Report(**values.pop("before"))
        return dataclasses.replace(worker, before=before, **values)

    def _await_start(self, pipe: int) -> dict[str, Any]:
        """Prepare, and return the values of the worker to become.

        Without them, after an error and after Ctrl-C a standby ends in silence.
        """
        values: dict[str, Any] | None = None
        try:
            self._prepare()
            gc.freeze()
            with os.fdopen(pipe, "rb") as lines:
                values = json.loads(lines.readline())
        finally:
            if values is None:
                os._exit(1)
        return values

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if number in _STOPPING:
            self._is_stopping = True
        if self._child:
            os.kill(self._child, number)
        else:
            self._not_forwarded.append(number)

    def _wait(self, worker: Worker) -> "_End | Worker":
        """Wait for the end of the child; end it if its generation has failed elsewhere.

        Return a worker in a standby, once it is needed.
        """
        with _process_handle(self._child) as handle:
            told = 0.0
            trained_since = 0.0
            while not select.select([handle], [], [], _POLL_SECONDS)[0]:
                report = self._control.read()
                if told and time.monotonic() > told + _LOSS_SECONDS:
                    os.kill(self._child, signal.SIGKILL)
                is_lost = report.is_lost or self._generations.has_failed(report.generation)
                if not report.generation and self._generations.has_ended(report.newest):
                    self._is_over = True
                    os.kill(self._child, signal.SIGKILL)
                if is_lost and not told:
                    told = time.monotonic()
                has_begun = report.generation and report.step > worker.before.step
                if has_begun and not trained_since:
                    trained_since = time.monotonic()
                is_time = time.monotonic() > trained_since + self._delay
                if has_begun and is_time and not is_lost and self._standby is None:
                    found = self._fork_standby(worker)
                    if found is not None:
                        return found
        child = self._child
        self._child = 0  # its number may be used again from here on
        _, status = os.waitpid(child, 0)
        return _End(os.waitstatus_to_exitcode(status))

    def _interrupt_child(self) -> None:
        """Wait for the end of the child after Ctrl-C, which it has as well from a terminal."""
        with _process_handle(self._child) as handle:
            if select.select([handle], [], [], _INTERRUPT_SECONDS)[0]:
                return
            os.kill(self._child, signal.SIGINT)  # it was sent to the supervisor alone
            select.select([handle], [], [], _INTERRUPT_SECONDS)

    def _may_restart(self, end: _End) -> bool:
        """Return whether to start a further process.

        The first one must have begun to train: a start that fails is left to whoever started it.
        """
        if self._is_stopping or self._is_over or not end.is_crash:
            return False
        if not self._control.read().newest:
            return False
        newest = self._progress()
        in_memory = self._memory.newest()
        if in_memory is not None:
            newest = max(newest, in_memory.step)
        if newest > self._newest:
            self._stuck = 0
        self._newest = max(newest, self._newest)
        self._stuck += 1
        if self._stuck <= self._attempts:
            return True
        _say(f"{self._attempts} processes in a row got no further than step {newest}")
        return False

    def _end_as(self, end: _End) -> int:
        """Return the exit code of the child; end by its signal if one has ended it."""
        for number, before in self._handlers.items():
            signal.signal(number, before)
        if end.code >= 0:
            return end.code
        ended_by = signal.Signals(-end.code)
        sys.stdout.flush()
        sys.stderr.flush()
        # a dump of the supervisor's memory shows nothing
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if ended_by != signal.SIGKILL:
            signal.signal(ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), ended_by)
        return 128 + ended_by


@contextlib.contextmanager
def _process_handle(process: int) -> Iterator[int]:
    """Yield a file descriptor, readable after the end of the process."""
    handle = os.pidfd_open(process)
    try:
        yield handle
    finally:
        os.close(handle)


def _has_not_ended(process: int) -> bool:
    """Return true for a running child; wait for one that has ended."""
    found, _ = os.waitpid(process, os.WNOHANG)
    return found == 0


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Drop the output of this process in the block, of Python and of C++."""
    kept = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(nowhere)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"spmd: {text}", file=sys.stderr, flush=True)
