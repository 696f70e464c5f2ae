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

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS = 0.1
# Below Linux's ephemeral ports: while process 0 starts, an outgoing connection could take one of
# those.
_PORTS = range(20_000, 32_768)


def free_port() -> int:
    """Return a free port of the loopback interface, below the ports of outgoing connections."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    ports = f"{_PORTS.start} to {_PORTS.stop - 1}"
    raise OSError(errno.EADDRINUSE, f"something listens on every port of {ports}")


def process_commands(
    train: Sequence[str], processes: int, devices: int, port: int
) -> list[list[str]]:
    """Return the command line of each process, from arguments of `spmd` such as `train CONFIG`."""
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
    """Run one process for each command; return the exit code of the first failure, or 0.

    After a failure the other processes have `grace` seconds to end by themselves. At SIGINT all are
    killed, and `KeyboardInterrupt` is raised.
    """
    processes: list[subprocess.Popen[str]] = []
    interrupted = threading.Event()
    before = _handle_signals(processes, interrupted)
    try:
        for command in commands:
            processes.append(_start(command, is_first=not processes))
        readers = _start_readers(processes)
        first = _wait(processes, grace, interrupted)
        for reader in readers:
            reader.join()
    finally:
        _kill(processes)
        for number, handler in before.items():
            signal.signal(number, handler)
    return first


def _handle_signals(
    processes: Sequence["subprocess.Popen[str]"], interrupted: threading.Event
) -> dict[int, Any]:
    """Forward signals to the processes, also to later ones, and set `interrupted` at SIGINT.

    A SIGHUP that is ignored, as `nohup` starts a process, stays so here and in the processes.

    Return the handlers before, by signal.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    before: dict[int, Any] = {}
    for number in _FORWARDED:
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue
        before[number] = signal.signal(number, forward)
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
    return before


def _start(command: Sequence[str], *, is_first: bool) -> "subprocess.Popen[str]":
    """Start a process; all but the first have their output in a pipe."""
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    if is_first:
        output = {}
    # In a session of its own, so that Ctrl-C comes once, from here.
    return subprocess.Popen(
        command,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        **output,
    )


def _start_readers(processes: Sequence["subprocess.Popen[str]"]) -> list[threading.Thread]:
    """Start a thread to print the lines of each pipe."""
    readers = []
    for process_id, process in enumerate(processes):
        if process.stdout:
            arguments = (process_id, process.stdout)
            readers.append(threading.Thread(target=_copy_output, args=arguments, daemon=True))
    for reader in readers:
        reader.start()
    return readers


def _kill(processes: Sequence["subprocess.Popen[str]"]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


def _copy_output(process_id: int, lines: IO[str]) -> None:
    with lines:
        for line in lines:
            # Read on without a reader of our own, since the process waits while the pipe is full.
            with contextlib.suppress(OSError):
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
        if not first and any(codes):
            process_id, code = _first_failure(codes)
            first, reason = _status(code)
            deadline = time.monotonic() + grace
            rest = ""
            if None in codes:
                rest = f"; the others have {grace:g} s to end by themselves"
            _log(f"process {process_id} ended with {reason}{rest}")
        if None not in codes:
            return first
        if time.monotonic() > deadline:
            _stop_running(processes, codes)
            deadline = float("inf")
        if interrupted.wait(_POLL_SECONDS):
            raise KeyboardInterrupt


def _first_failure(codes: Sequence[int | None]) -> tuple[int, int]:
    """Return the number and the exit code of the process to blame.

    Others may fail in the same moment, because the first one is gone.
    """
    failed = [(process_id, code) for process_id, code in enumerate(codes) if code]
    for process_id, code in failed:
        if code not in (EXIT_LOST, -signal.SIGABRT, 128 + signal.SIGABRT):
            return process_id, code
    return failed[0]


def _status(code: int) -> tuple[int, str]:
    """Return the exit code of a failed process as a shell reports it, and in words."""
    if code > 0:
        return code, f"exit code {code}"
    return 128 - code, f"signal {signal.Signals(-code).name}"


def _stop_running(
    processes: Sequence["subprocess.Popen[str]"], codes: Sequence[int | None]
) -> None:
    running = []
    for process_id, process in enumerate(processes):
        if codes[process_id] is None:
            process.kill()
            running.append(str(process_id))
    _log(f"stopped process {', '.join(running)}")


def _log(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"spmd launch: {text}", file=sys.stderr, flush=True)
