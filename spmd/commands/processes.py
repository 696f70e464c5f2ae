"""Commands in several processes: one connection, one output, one error and one exit code.

`spmd eval` and the other commands of `IN_PROCESSES` may be started like `spmd train`, one process
on each machine, for models larger than a machine. Process 0 prints, and the others are silent.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from spmd.checkpoint.versions import library_versions
from spmd.commands.parsing import launch_args_of
from spmd.distributed.barrier import all_reach
from spmd.distributed.hosts import broadcast_from_first
from spmd.distributed.initialize import compiler_environment, connect, initialize
from spmd.distributed.native_output import silence_stdout
from spmd.errors import MeshError
from spmd.resilience.consistency import check_hosts_agree, source_fingerprint
from spmd.run.config import config_values
from spmd.sharding.mesh import simulate_devices

IN_PROCESSES = ("check", "eval", "generate", "import", "export")
"""Commands that run in several processes together, besides `train`."""

_ERROR_SECONDS = 15.0
"""Seconds in which the other processes find the same error, or have another one."""


def connect_command(arguments: Sequence[str]) -> None:
    """Connect the processes of a command before it is parsed, so that its errors are reported once.

    A file of the user may then use devices: JAX connects processes before the first use of one.
    """
    connect(launch_args_of(arguments))


def start_devices(devices: int, command: Any) -> None:
    """Start the devices of all processes of a command.

    Every process must have the same command, versions and environment. All but process 0 are silent
    from here on.

    Args:
        devices: CPU devices to simulate in each process; 0 uses the real ones.
    """
    initialize(devices)
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
    if jax.process_index() != 0:
        silence_stdout()


def _statements(command: Any) -> Mapping[str, Any]:
    """Return the fields of a command, but not those that differ between processes."""
    statements: dict[str, Any] = {}
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if field.name == "config":
            statements["config"] = config_values(value)
        elif field.name != "launch_args":
            statements[field.name] = str(value)
    return statements


def is_reported_elsewhere(error: str) -> bool:
    """Return true if process 0 reports the same error, and this is another process.

    Processes that find the same error wait for each other; one with an error of its own reports it.
    """
    if not jax.distributed.is_initialized():
        return False
    # before a device was started: the error needs none
    with contextlib.suppress(MeshError):
        simulate_devices(1)
    return all_reach(error, _ERROR_SECONDS) and jax.process_index() != 0


def common_exit_code(code: int) -> int:
    """Return the exit code of process 0 on every process."""
    if not jax.distributed.is_initialized():
        return code
    sys.stdout.flush()
    common: int = broadcast_from_first(lambda: code)
    return common
