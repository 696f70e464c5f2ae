"""Several processes on this machine, as a cluster would start them, to rehearse a run before it costs anything.

Process 0 writes to the terminal; what the others say comes on stderr, each line with the process's number before it.
They share one fate: a signal goes to all, and when one fails, the others are stopped.
"""

import contextlib
import dataclasses
import errno
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO

from spmd.distributed.initialize import EXIT_LOST

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS = 0.1
_PORTS = range(20_000, 32_768)


@dataclasses.dataclass(frozen=True)
class Ending:
    """How one process ended.

    Attributes:
        process_id: Its number.
        code: Its exit code, or minus the signal that ended it.
    """

    process_id: int
    code: int

    @property
    def is_of_another(self) -> bool:
        """It ended because another process was gone."""
        return self.exit_code in (EXIT_LOST, 128 + signal.SIGABRT)

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        how = f"exit code {self.code}" if self.code >= 0 else f"signal {signal.Signals(-self.code).name}"
        return f"process {self.process_id} ended with {how}"


def free_port() -> int:
    """A port of the loopback interface that nothing listens on.

    It is none of those that systems give to connections, which begin at 32768 on Linux: before process 0 listens there,
    it starts Python and JAX, and in these seconds a connection of another program could take it.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(errno.EADDRINUSE, f"something listens on every port of {_PORTS.start} to {_PORTS.stop - 1}")


def process_commands(train: Sequence[str], processes: int, devices: int, port: int) -> list[list[str]]:
    """The command line of each process.

    Args:
        train: The arguments of `spmd`, which begin with `train`.
        processes: How many processes.
        devices: Simulated devices of each.
        port: Where process 0 listens.
    """
    # `--cluster none`: a rehearsal may itself run in a job, which knows nothing of these processes.
    together = ["--devices", devices, "--cluster", "none", "--coordinator", f"127.0.0.1:{port}"]
    command = [sys.executable, "-m", "spmd.cli", *train, *map(str, together), "--processes", str(processes)]
    return [[*command, "--process-id", str(process_id)] for process_id in range(processes)]


def launch_local(commands: Sequence[Sequence[str]], *, grace: float) -> int:
    """Runs several commands at the same time; the exit code of the first that fails, or 0.

    Args:
        commands: One for each process.
        grace: Seconds that the others have to end by themselves after one has failed.
    """
    processes: list[subprocess.Popen[str]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        for process_id, command in enumerate(commands):
            processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if process_id else None,
                    stderr=subprocess.STDOUT if process_id else None,
                    start_new_session=True,  # so that Ctrl-C comes once, from here
                    text=True,
                    errors="replace",
                )
            )
        readers = [_start_reader(i, process.stdout) for i, process in enumerate(processes) if process.stdout]
        first = _wait(processes, grace)
        for reader in readers:
            reader.join()
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    return first.exit_code if first else 0


def _start_reader(process_id: int, lines: IO[str]) -> threading.Thread:
    def read() -> None:
        with lines:
            for line in lines:
                print(f"[{process_id}] {line}", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def _wait(processes: Sequence["subprocess.Popen[str]"], grace: float) -> Ending | None:
    """Waits until all have ended; the first failure, if there was one, which ends the others after `grace` seconds."""
    first, until = None, 0.0
    while True:
        codes = [process.poll() for process in processes]
        if first is None and (failed := [Ending(i, code) for i, code in enumerate(codes) if code]):
            first, until = min(failed, key=lambda ending: ending.is_of_another), time.monotonic() + grace
            _say(f"{first}; the others have {grace:g} s to end by themselves" if None in codes else f"{first}")
        if None not in codes:
            return first
        if first and time.monotonic() > until:
            stopped = [i for i, code in enumerate(codes) if code is None]
            for process_id in stopped:
                processes[process_id].kill()
            _say(f"stopped process {', '.join(map(str, stopped))}")
            until = float("inf")
        time.sleep(_POLL_SECONDS)


def _say(text: str) -> None:
    print(f"spmd launch: {text}", file=sys.stderr, flush=True)
