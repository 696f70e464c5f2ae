"""Commands in several processes: one connection, one output, one error and one exit code.

`spmd eval` and the other commands of `IN_PROCESSES` may be started like `spmd train`, one process
on each machine, for models larger than a machine. Process 0 prints, and the others are silent.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from spmd.checkpoint.versions import library_versions
from spmd.commands.parsing import launch_args_of, value_of
from spmd.distributed.barrier import all_reach
from spmd.distributed.hosts import broadcast_from_first
from spmd.distributed.initialize import (
    compiler_environment,
    connect,
    initialize,
    is_first_process,
)
from spmd.errors import AgreementError, MeshError
from spmd.resilience.consistency import check_hosts_agree, source_fingerprint
from spmd.run.config import config_values
from spmd.sharding.mesh import simulate_devices

IN_PROCESSES = ("doctor", "check", "eval", "generate", "import", "export")
"""Commands that run in several processes together, besides `train`."""

OF_FIRST_PROCESS = ("search",)
"""Commands that process 0 runs alone, as they use no device: a search compiles for an absent machine."""

_REFUSED = 2
"""Exit code of a mistake that process 0 reports."""

_ERROR_SECONDS = 15.0
"""Seconds in which the other processes find the same error, or have another one."""


def run_command(name: str, run: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a command in this process, and with others if something started several; return its code.

    Processes connect before the command is parsed, so that its errors are reported once, and a
    file of the user may use devices: JAX connects processes before the first use of one.
    """
    if name in OF_FIRST_PROCESS and not is_first_process(launch_args_of(arguments)):
        said = f"spmd {name}: process 0 does it alone; --cluster none for this process"
        print(said, file=sys.stderr)
        return 0
    if name not in IN_PROCESSES:
        return run(arguments)
    launch_args = launch_args_of(arguments)
    is_first = is_first_process(launch_args)
    try:
        simulated = name == "export" or _simulated_devices(arguments) > 0
        connect(launch_args, simulated=simulated)
    except AgreementError:  # on every process
        if is_first:
            raise
        return _REFUSED
    shown: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not is_first:
        shown = _silent()
    with shown:
        return _common_exit_code(run(arguments))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Drop the output of Python in the block, but not the error at its end."""
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def start_devices(devices: int, command: Any) -> None:
    """Start the devices of all processes of a command.

    Every process must have the same command, versions and environment.

    Args:
        devices: CPU devices to simulate in each process; 0 uses the real ones.
    """
    initialize(devices, command.launch_args)
    if jax.process_count() == 1:
        return
    statements = {
        "command": _statements(command),
        "versions": library_versions(),
        "source": source_fingerprint(),
        "environment": compiler_environment(),
        "devices": f"{jax.local_device_count()} {jax.local_devices()[0].device_kind}",
    }
    check_hosts_agree(statements)


def _statements(command: Any) -> Mapping[str, Any]:
    """Return the values of a command to compare between processes."""
    statements: dict[str, Any] = {}
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if field.name == "config":
            statements["config"] = config_values(value)
        elif field.name != "launch_args":
            statements[field.name] = str(value)
    return statements


def is_common_error(arguments: Sequence[str], error: str) -> bool:
    """Return true if all processes of a command have ended with the same error.

    They wait for each other, so that process 0 can report it, and all exit together. A process with
    an error of its own reports it.
    """
    is_in_processes = bool(arguments) and arguments[0] in IN_PROCESSES
    if not is_in_processes or not jax.distributed.is_initialized():
        return False
    # Where no device was started yet: a barrier needs JAX's count of processes, which needs devices.
    with contextlib.suppress(MeshError):
        simulate_devices(max(_simulated_devices(list(arguments)), 1))
    return all_reach(error, _ERROR_SECONDS)


def _simulated_devices(arguments: list[str]) -> int:
    """Return the simulated devices of a command before it is parsed; 0 if no flag says so."""
    given = value_of("--devices", arguments)
    if not given.isdigit():
        return 0
    return int(given)


def _common_exit_code(code: int) -> int:
    """Return the exit code of process 0 on every process."""
    if not jax.distributed.is_initialized():
        return code
    sys.stdout.flush()
    common: int = broadcast_from_first(lambda: code)
    return common
