"""How a process becomes part of a run: simulated devices, or one of several processes; and how it leaves one.

Only this room and `testing` read or write environment variables.
"""

import dataclasses
import errno
import logging
import os
import socket
import sys
import threading
import time
from types import TracebackType
from typing import NoReturn

import jax

from spmd.distributed.cluster_env import LaunchArgs, ProcessGroup, detect_process_group, split_address
from spmd.errors import ConfigError, Problem
from spmd.sharding.mesh import simulate_devices

_CPU_FLAGS = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
"""Simulated devices share cores, so one of them may be long in coming to a collective."""

_ABSENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
"""The TPU compiler without a TPU: it asks no metadata server, and several processes may use it at once."""

_NO_AUTOTUNING = "--xla_gpu_autotune_level=0"
"""The GPU compiler tries out kernels on a GPU unless told not to."""

_PROXY = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXY = ("no_grpc_proxy", "no_proxy")
"""Where gRPC reads its proxy, and which hosts it reaches without one: of both, the first that is set."""

_NAME_SECONDS = 60
"""How long a host may be unknown: the name of a pod is published a little after the pod starts."""

_SHUTDOWN_SECONDS = 300
"""How long a process that is done waits for the others to be done: process 0 may still be writing."""

ALONE = LaunchArgs(cluster="none")
"""One process, wherever it was started."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """Where this process runs.

    Attributes:
        devices: Simulate this many CPU devices in this process (0: use the real ones).
        asked: What the command line says about the processes that train together.
        absent: Compile for this platform, `tpu` or `cuda`, of which nothing is here.
    """

    devices: int = 0
    asked: LaunchArgs = ALONE
    absent: str = ""

    def __post_init__(self) -> None:
        if self.devices < 0:
            problem = Problem("devices", f"is {self.devices}", fix="0 for the real devices, or a number")
            raise ConfigError("This process cannot be started:", [problem])


def start(launch: Launch) -> None:
    """Prepares JAX as `launch` says; call it before the first use of a device.

    Raises:
        ConfigError: The processes that should train together are not known, or cannot meet.
    """
    group = detect_process_group(launch.asked, os.environ)
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
    if group:
        _join(group, launch.asked)


EXIT_LOST = 69
"""The exit code of one of several processes whose runtime failed: mostly, another one is gone (EX_UNAVAILABLE)."""


def leave(code: int) -> NoReturn:
    """Ends this process after an error.

    One of several processes is gone at once, so that the others notice within their heartbeat: by the usual way out,
    JAX would first wait for them, and they for this one.
    """
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _join(group: ProcessGroup, asked: LaunchArgs) -> None:
    """Meets the other processes."""
    if any(os.environ.get(name) for name in _PROXY):
        exempt = next((os.environ[name] for name in _NO_PROXY if os.environ.get(name)), "")
        host, _ = split_address(group.coordinator)
        os.environ[_NO_PROXY[0]] = f"{exempt},{host}".strip(",")
    # Devices of the CPU in several processes, real or simulated, have no other way to talk.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX ends the process without an exception when its own time is up, so ours is up before.
    late = threading.Timer(asked.start_timeout, _give_up, (group, asked))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            group.coordinator,
            group.processes,
            group.process_id,
            cluster_detection_method="deactivate",
            coordinator_bind_address=bind_address(group) if group.process_id == 0 else None,
            initialization_timeout=asked.start_timeout + 60,
            heartbeat_timeout_seconds=asked.heartbeat,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except jax.errors.JaxRuntimeError as error:
        problem = Problem("coordinator", f"{_described(group)}: {str(error).splitlines()[0]}")
        raise ConfigError("The processes did not meet:", [problem]) from error
    finally:
        late.cancel()
    sys.excepthook = _leave_after


def bind_address(group: ProcessGroup) -> str | None:
    """The interface and port on which process 0 listens; None for all interfaces.

    That is the coordinator's own address, and no other. Only where a cluster names a host that this machine takes for
    itself alone (Debian writes its own name beside 127.0.1.1), processes on other machines need all interfaces.

    Raises:
        ConfigError: It is not an address of this machine, or its port is in use.
    """
    host, port = split_address(group.coordinator)
    family, address = _resolve(host, group)
    is_loopback = address.startswith("127.") or address == "::1"
    everywhere = is_loopback and group.source != "--coordinator" and not group.is_local
    with socket.socket(family) as probe:
        # gRPC would share a port with another coordinator, and JAX falls over where it cannot listen.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if everywhere else address, port))
        except OSError as error:
            fixes = {
                errno.EADDRNOTAVAIL: "start process 0 on that machine, or give --coordinator HOST:PORT of this one",
                errno.EADDRINUSE: "give --coordinator another port, or end what listens there",
            }
            reason = f"process 0 cannot listen at {_described(group)}: {error.strerror}"
            problem = Problem("coordinator", reason, f"{host} is {address}", fixes.get(error.errno or 0, ""))
            raise ConfigError("The processes cannot meet:", [problem]) from error
    if everywhere:
        return None
    return f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}"


def _resolve(host: str, group: ProcessGroup) -> tuple[socket.AddressFamily, str]:
    """Family and address of a host, once its name is known."""
    until = time.monotonic() + _NAME_SECONDS
    while True:
        try:
            family, *_, place = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        except socket.gaierror as error:
            if time.monotonic() > until:
                reason = f"{_described(group)}: the name {host} has no address ({error.strerror})"
                problem = Problem("coordinator", reason, fix="give --coordinator a name or address that is known here")
                raise ConfigError("The processes cannot meet:", [problem]) from error
            time.sleep(1)
        else:
            return family, str(place[0])


def _described(group: ProcessGroup) -> str:
    source = "" if group.source == "--coordinator" else f" (as {group.source} says)"
    return f"{group.coordinator}{source}"


def _give_up(group: ProcessGroup, asked: LaunchArgs) -> None:
    """Ends a process that has met the others in vain; the thread that waits for them cannot be reached."""
    tried = "listened at" if group.process_id == 0 else "tried"
    what = f"process {group.process_id} {tried} {_described(group)}, and not all {group.processes} processes came"
    fix = "see whether all were started, and whether that port of process 0 can be reached; or --start-timeout"
    problem = Problem("coordinator", what, f"{asked.start_timeout} s have passed", fix)
    print(f"spmd: {ConfigError('The processes did not meet:', [problem])}", file=sys.stderr, flush=True)
    os._exit(2)


def _leave_after(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Reports an exception that nothing caught, and leaves."""
    sys.__excepthook__(kind, error, trace)
    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" in str(error):
        leave(1)
    who = f"process {jax.process_index()} of {jax.process_count()}"
    print(
        f"spmd: {who} cannot go on: the runtime failed, as it does when another process is gone or cannot be reached. "
        f"Look at what the others said last. This one ends with {EXIT_LOST}.",
        file=sys.stderr,
    )
    leave(EXIT_LOST)


def compiler_environment() -> dict[str, str]:
    """The variables that change what is compiled, which every process must have alike."""
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", *sorted(name for name in os.environ if name.startswith("JAX_")))
    own = ("JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_COMPILATION_CACHE_DIR")
    return {name: os.environ[name] for name in names if name in os.environ and name not in own}
