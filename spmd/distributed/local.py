"""Several processes on this machine, started as a cluster would start them.

Process 0 writes to the terminal. Output of the others comes on stderr, each line with the number of
its process. Signals are forwarded to all processes; SIGINT ends all of them at once. When one
fails, the others are stopped.
"""

import contextlib
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
from typing import IO, Any

from spmd.distributed.initialize import EXIT_LOST

_FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS = 0.1
# Below Linux's ephemeral ports: while process 0 starts, an outgoing connection could take one of
# those.
_PORTS = range(20_000, 32_768)


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on, and that no outgoing connection gets."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(
        errno.EADDRINUSE, f"something listens on every port of {_PORTS.start} to {_PORTS.stop - 1}"
    )


def process_commands(
    train: Sequence[str], processes: int, devices: int, port: int
) -> list[list[str]]:
    """Return the command line of each process, from arguments of `spmd` that begin with `train`."""
    # `--cluster none`: this process may itself run in a job, whose variables do not describe these
    # processes.
    flags = [
        "--devices",
        devices,
        "--cluster",
        "none",
        "--coordinator",
        f"127.0.0.1:{port}",
        "--processes",
        processes,
    ]
    command = [sys.executable, "-m", "spmd_command", *train, *map(str, flags)]
    return [[*command, "--process-id", str(process_id)] for process_id in range(processes)]


def launch_local(commands: Sequence[Sequence[str]], *, grace: float) -> int:
    """Run one process for each command; return the exit code of the first that fails, or 0.

    After a failure the other processes have `grace` seconds to end by themselves. At SIGINT all are
    killed, and `KeyboardInterrupt` is raised.
    """
    processes: list[subprocess.Popen[str]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    interrupted = threading.Event()
    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
    try:
        for command in commands:
            pipes: dict[str, Any] = (
                {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if processes else {}
            )
            pipes |= {"stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
            # In a session of its own, so that Ctrl-C comes once, from here.
            processes.append(subprocess.Popen(command, start_new_session=True, **pipes))
        others = [(i, process.stdout) for i, process in enumerate(processes) if process.stdout]
        readers = [
            threading.Thread(target=_copy_output, args=output, daemon=True) for output in others
        ]
        for reader in readers:
            reader.start()
        first = _wait(processes, grace, interrupted)
        for reader in readers:
            reader.join()
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    return first


def _copy_output(process_id: int, lines: IO[str]) -> None:
    with lines:
        for line in lines:
            print(f"[{process_id}] {line}", end="", file=sys.stderr, flush=True)


def _wait(
    processes: Sequence["subprocess.Popen[str]"], grace: float, interrupted: threading.Event
) -> int:
    """Wait until all have ended.

    Return the exit code of the first failure, as a shell reports it, or 0.
    """
    first, deadline = 0, float("inf")
    while True:
        codes = [process.poll() for process in processes]
        if not first and (failed := [i for i, code in enumerate(codes) if code]):
            # Others may fail in the same moment, because the first one is gone.
            i = min(
                failed, key=lambda i: codes[i] in (EXIT_LOST, -signal.SIGABRT, 128 + signal.SIGABRT)
            )
            code = codes[i] or 0
            first, deadline = code if code > 0 else 128 - code, time.monotonic() + grace
            reason = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
            rest = f"; the others have {grace:g} s to end by themselves" if None in codes else ""
            _log(f"process {i} ended with {reason}{rest}")
        if None not in codes:
            return first
        if time.monotonic() > deadline:
            running = [i for i, code in enumerate(codes) if code is None]
            for i in running:
                processes[i].kill()
            _log(f"stopped process {', '.join(map(str, running))}")
            deadline = float("inf")
        if interrupted.wait(_POLL_SECONDS):
            raise KeyboardInterrupt


def _log(text: str) -> None:
    print(f"spmd launch: {text}", file=sys.stderr, flush=True)
