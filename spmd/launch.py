"""How a process becomes part of a run: simulated devices, or one of several processes.

Only this room and `testing` read or write environment variables.
"""

import dataclasses
import logging
import os

import jax

from spmd.errors import ConfigError, Problem
from spmd.mesh import simulate_devices

_CPU_FLAGS = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
"""Simulated devices share cores, so one of them may be long in coming to a collective."""

_ABSENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
"""The TPU compiler without a TPU: it asks no metadata server, and several processes may use it at once."""

_NO_AUTOTUNING = "--xla_gpu_autotune_level=0"
"""The GPU compiler tries out kernels on a GPU unless told not to."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """Where this process runs."""

    devices: int = 0
    """Simulate this many CPU devices in this process (0: use the real ones)."""
    coordinator: str = ""
    """HOST:PORT of process 0, when several processes train together."""
    processes: int = 1
    """How many processes train together."""
    process_id: int = 0
    """The number of this process, from 0."""
    absent: str = ""
    """Compile for this platform, `tpu` or `cuda`, of which nothing is here."""

    def __post_init__(self) -> None:
        problems = []
        if self.devices < 0:
            problems.append(Problem("devices", f"is {self.devices}", fix="0 for the real devices, or a number"))
        if not 0 <= self.process_id < self.processes:
            problems.append(
                Problem("process-id", f"is {self.process_id} of {self.processes} processes", fix="count from 0")
            )
        if (self.processes > 1) != bool(self.coordinator):
            fix = "give --coordinator HOST:PORT and --processes N together"
            problems.append(Problem("coordinator", f"is {self.coordinator!r} for {self.processes} processes", fix=fix))
        if problems:
            raise ConfigError("This process cannot be started:", problems)


def start(launch: Launch) -> None:
    """Prepares JAX as `launch` says; call it before the first use of a device."""
    # Orbax logs its own tracebacks of errors that it also raises, and that we report.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    if launch.absent:
        jax.config.update("jax_platforms", "cpu")
        for name, value in _ABSENT.items():
            os.environ.setdefault(name, value)
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_NO_AUTOTUNING}".strip()
    if launch.devices:
        flags = os.environ.get("XLA_FLAGS", "")
        if "xla_cpu_collective_call_terminate_timeout_seconds" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {_CPU_FLAGS}".strip()
        simulate_devices(launch.devices)
    if launch.processes > 1:
        if launch.devices:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(launch.coordinator, launch.processes, launch.process_id)


def compiler_environment() -> dict[str, str]:
    """The variables that change what is compiled, which every process must have alike."""
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", *sorted(name for name in os.environ if name.startswith("JAX_")))
    own = ("JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS", "JAX_COORDINATOR_BIND_ADDRESS")
    return {name: os.environ[name] for name in names if name in os.environ and name not in own}
