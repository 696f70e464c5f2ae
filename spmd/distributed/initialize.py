"""Process start-up and exit: simulated devices, the connection to the other processes, exit codes.

Only this module and `spmd.testing` read or write environment variables.
"""

import contextlib
import errno
import logging
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import jax

from spmd.distributed.cluster_env import LaunchArgs, detect_process_group, split_address
from spmd.distributed.gpu_share import local_device_ids, visible_gpus
from spmd.distributed.launchers import ProcessGroup
from spmd.distributed.liveness import Liveness
from spmd.distributed.metadata_server import MetadataServer, on_compute_engine
from spmd.distributed.native_output import compiler_log, separate_stdout
from spmd.distributed.rendezvous import Meeting, Rendezvous, RendezvousError, Report, report_to
from spmd.errors import BusyDeviceError, ConfigError, Problem, print_traceback
from spmd.sharding.mesh import simulate_devices

EXIT_LOST = 69
"""Exit code of one of several processes whose runtime failed, mostly because another one is gone
(EX_UNAVAILABLE)."""

MOST_SIMULATED = 1024
"""Most simulated devices of a process."""

SINGLE_PROCESS = LaunchArgs(cluster="none")
"""One process, whatever the cluster says."""

# Simulated devices share cores, so one of them may reach a collective late.
_CPU_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
# Without a TPU: ask no metadata server, and let several processes load the compiler at once.
_TPU_COMPILER_VARIABLES = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
# By default the GPU compiler autotunes kernels on a GPU, and here is none.
_NO_AUTOTUNING = "--xla_gpu_autotune_level=0"

# Lines of libtpu, but not JAX's own about a TPU.
_LIBTPU = re.compile(r"^(?!.*xla_bridge).*(TPU|libtpu|InitGoogle|Source Location Trace|/tfrc/)")

# Of JAX and libtpu: another process has libtpu's lock, or the device files.
_BUSY_TPU = re.compile(
    r"TPU is already in use by|libtpu\.so already in use|/dev/(vfio/\d+|accel\d+)\W.*busy"
)
_TPU_FILE = re.compile(r"/dev/(vfio/\d+|accel\d+)")

_BIND_FIXES = {
    errno.EADDRNOTAVAIL: (
        "start process 0 on that machine, or give --coordinator HOST:PORT of this one"
    ),
    errno.EADDRINUSE: ("give --coordinator another port, or stop the program that uses this one"),
}

_BACKLOG = 1024

# gRPC reads the first of each group that is set.
_PROXY = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXY = ("no_grpc_proxy", "no_proxy")

# JAX takes a process for dead that sends no heartbeat, as one that compiles or pins memory on a busy
# machine; `Liveness` finds those that are gone much earlier.
_JAX_HEARTBEAT = 600
# JAX connects in seconds once all processes are there.
_JAX_START = 120

# The name of a Kubernetes pod is published some seconds after the pod starts.
_DNS_TIMEOUT = 60
# A process that has finished waits this long for the others: process 0 may still be writing a
# checkpoint.
_SHUTDOWN_TIMEOUT = 300


def initialize(
    devices: int = 0, launch_args: LaunchArgs = SINGLE_PROCESS, target_platform: str = ""
) -> list[str]:
    """Configure JAX and connect to the other processes; call it before the first use of a device.

    Return libtpu's lines about its search for a TPU, for a log: on a machine without one they are
    long.

    Args:
        devices: CPU devices to simulate in this process; 0 uses the real devices.
        target_platform: `tpu` or `cuda`: cross-compile for this platform, without a device of it.
    """
    _check_devices(devices)
    group = detect_process_group(launch_args, os.environ)
    # Orbax logs tracebacks of errors that it also raises.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    prepare_platform(target_platform)
    if devices:
        if _CPU_TIMEOUT.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
            _add_xla_flag(_CPU_TIMEOUT)
        simulate_devices(devices)
    if group:
        _connect(group, launch_args, simulated=bool(devices))
    return _start_backends()


def _check_devices(devices: int) -> None:
    if 0 <= devices <= MOST_SIMULATED:
        return
    what = f"is {devices}: each simulated device has threads of its own"
    fix = f"0 for the real devices, or at most {MOST_SIMULATED}; "
    fix += "spmd plan --topology cpu:N is for any number"
    problem = Problem("devices", what, fix=fix)
    raise ConfigError("Invalid process group:", [problem])


def prepare_platform(target_platform: str) -> None:
    """Prepare JAX to compile for a platform, `tpu` or `cuda`, without a device; none if empty.

    No device is started.
    """
    if not target_platform:
        return
    jax.config.update("jax_platforms", "cpu")
    for name, value in _TPU_COMPILER_VARIABLES.items():
        os.environ.setdefault(name, value)
    _add_xla_flag(_NO_AUTOTUNING)


def _start_backends() -> list[str]:
    """Let JAX find the devices; return libtpu's lines, and print the other ones."""
    with compiler_log(pass_on=False) as log:
        try:
            jax.devices()
        except RuntimeError as error:
            busy = busy_tpu_error(str(error))
            if busy is None:
                raise
            raise busy from error
    of_libtpu: list[str] = []
    for line in log:
        if _LIBTPU.search(line):
            of_libtpu.append(line)
        else:
            print(line, file=sys.stderr)
    return of_libtpu


def busy_tpu_error(reason: str, processes: Path = Path("/proc")) -> BusyDeviceError | None:
    """Return the error of a TPU held by another process; None of another reason.

    Args:
        reason: Text of JAX's exception.
    """
    if not _BUSY_TPU.search(reason):
        return None
    pid = _holder_of_tpu(processes)
    named = re.search(r"by process with pid (\d+)", reason)
    if named:
        pid = named[1]
    what = f"is held by process {pid}, probably a leftover of an earlier run"
    fix = f"kill {pid}, and start again"
    if not pid:
        what = "is held by another process, probably of another user"
        fix = "find it by `sudo lsof /dev/accel* /dev/vfio/*`, stop it, and start again; "
        fix += "if there is none, remove /tmp/libtpu_lockfile"
    problem = Problem("TPU", what, reason.splitlines()[0], fix)
    return BusyDeviceError("The TPU of this machine cannot be used:", [problem])


def _holder_of_tpu(processes: Path) -> str:
    """Return the number of another process with an open device file of a TPU, empty if unknown."""
    for link in processes.glob("[0-9]*/fd/*"):
        pid = link.parts[-3]
        with contextlib.suppress(OSError):  # of another user, or gone
            target = os.readlink(link)
            if pid != str(os.getpid()) and _TPU_FILE.fullmatch(target):
                return pid
    return ""


def metadata_server() -> MetadataServer | None:
    """Return the metadata server of this machine, if it is one of Compute Engine."""
    if not on_compute_engine(os.environ):
        return None
    return MetadataServer.of(os.environ)


def _add_xla_flag(flag: str) -> None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def exit_process(code: int) -> NoReturn:
    """Exit after an error.

    One of several processes skips JAX's shutdown barrier, so that the others notice within their
    heartbeat timeout.
    """
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _connect(group: ProcessGroup, launch_args: LaunchArgs, simulated: bool) -> None:
    """Meet the other processes, and connect JAX to them."""
    _exempt_from_proxy(group.coordinator)
    separate_stdout()
    # The only collectives between CPU devices, real or simulated, of several processes.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    own_address: str | None = None
    listener: socket.socket | None = None
    if group.process_id == 0:
        listener, own_address = listen(group)
    meeting = _meet(group, launch_args, listener)
    device_ids: list[int] | None = None
    if not simulated:
        device_ids, problems = local_device_ids(group.process_id, meeting.reports, os.environ)
        if problems:
            raise ConfigError("The GPUs of a machine cannot be shared:", problems)
    # At its own timeout JAX aborts the process without an exception, so this timer fires before.
    timer = threading.Timer(_JAX_START, _exit_at_timeout, (group,))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            group.coordinator,
            group.processes,
            group.process_id,
            local_device_ids=device_ids,
            cluster_detection_method="deactivate",
            coordinator_bind_address=own_address,
            initialization_timeout=2 * _JAX_START,
            heartbeat_timeout_seconds=max(launch_args.heartbeat, _JAX_HEARTBEAT),
            shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT,
        )
    except jax.errors.JaxRuntimeError as error:
        raise _connection_error(f"{_named(group)}: {str(error).splitlines()[0]}") from error
    finally:
        timer.cancel()
    sys.excepthook = _excepthook
    Liveness(meeting, group.process_id, launch_args.heartbeat, EXIT_LOST).start()


def _meet(group: ProcessGroup, launch_args: LaunchArgs, listener: socket.socket | None) -> Meeting:
    """Return the reports of all processes; `listener` is process 0's."""
    own = Report(
        group.process_id,
        group.processes or 1,
        socket.gethostname(),
        _machine_id(),
        visible_gpus(os.environ),
    )
    seconds = launch_args.start_timeout

    def missing(names: str) -> Problem:
        what = f"process 0 listened at {_named(group)}, and not all {group.processes} processes "
        what += f"connected: {names} did not"
        return _timeout_problem(what, seconds)

    def unreachable(reason: str) -> Problem:
        what = f"process {group.process_id} tried {_named(group)} and found no process 0 ({reason})"
        return _timeout_problem(what, seconds)

    try:
        if listener:
            return Rendezvous(listener, own, group).collect(seconds, missing)
        return report_to(split_address(group.coordinator), own, seconds, unreachable)
    except RendezvousError as error:
        raise ConfigError("The processes cannot connect:", [error.problem]) from error


def _timeout_problem(what: str, seconds: int) -> Problem:
    fix = "start the same command on every machine, and check that each can reach that port of "
    fix += "process 0; or raise --start-timeout"
    return Problem("coordinator", what, f"{seconds} s have passed", fix)


def _machine_id() -> str:
    """Return the identity of the running kernel: machines may share a name."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    if boot_id.is_file():
        return boot_id.read_text().strip()
    return socket.gethostname()


def _exempt_from_proxy(coordinator: str) -> None:
    """Let gRPC connect to the coordinator directly, although there is a proxy."""
    if not any(map(os.environ.get, _PROXY)):
        return
    exempt = ""
    for name in _NO_PROXY:
        exempt = exempt or os.environ.get(name, "")
    host, _ = split_address(coordinator)
    os.environ[_NO_PROXY[0]] = f"{exempt},{host}".strip(",")


def listen(group: ProcessGroup) -> tuple[socket.socket, str | None]:
    """Return process 0's listening socket, and its HOST:PORT, or None for all interfaces.

    At the address of a coordinator, process 0 listens on that interface. At a name, it listens on
    all: machines have several networks, and the others may resolve the name to another one of its
    addresses (jax#20562). The name must be one of this machine.
    """
    host, port = split_address(group.coordinator)
    family, address = _resolve(host, group)
    probed = socket.socket(family)
    try:
        # gRPC would share the port with another coordinator, and JAX crashes where it cannot
        # listen.
        probed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probed.bind((address, port))
        if address == host:
            probed.listen(_BACKLOG)
            return probed, _host_and_port(address, port)
        probed.close()
        return _listen_everywhere(port), None
    except OSError as error:
        probed.close()
        what = f"process 0 cannot listen at {_named(group)}: {error.strerror}"
        fix = _BIND_FIXES.get(error.errno or 0, "")
        raise _connection_error(what, f"{host} is {address}", fix) from error


def _listen_everywhere(port: int) -> socket.socket:
    """Return a listening socket on all interfaces."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=_BACKLOG)


def _host_and_port(address: str, port: int) -> str:
    if ":" in address:
        return f"[{address}]:{port}"
    return f"{address}:{port}"


def _resolve(host: str, group: ProcessGroup) -> tuple[socket.AddressFamily, str]:
    """Return the address family and the address of a host, once DNS knows it."""
    deadline = time.monotonic() + _DNS_TIMEOUT
    while True:
        try:
            family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
            return family, str(address[0])
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                what = f"{_named(group)}: the name {host} has no address ({error.strerror})"
                fix = "give --coordinator a name or address that this machine can resolve"
                raise _connection_error(what, fix=fix) from error
            time.sleep(1)


def _connection_error(what: str, detail: str = "", fix: str = "") -> ConfigError:
    return ConfigError("The processes cannot connect:", [Problem("coordinator", what, detail, fix)])


def _named(group: ProcessGroup) -> str:
    if group.source == "--coordinator":
        return group.coordinator
    return f"{group.coordinator} (as {group.source} says)"


def _exit_at_timeout(group: ProcessGroup) -> None:
    """Exit from a timer's thread, because the main thread blocks inside of JAX."""
    what = f"process {group.process_id}: all processes are there, and JAX did not connect them at "
    what += f"{_named(group)}"
    fix = "check that nothing else uses that port, or give --coordinator another one"
    error = _connection_error(what, f"{_JAX_START} s have passed", fix)
    print(f"spmd: {error}", file=sys.stderr, flush=True)
    os._exit(2)


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    print_traceback(kind, error, trace)
    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" in str(error):
        exit_process(1)
    print(
        f"spmd: process {jax.process_index()} of {jax.process_count()} stops: "
        "the runtime failed, usually because another process is gone or unreachable. "
        f"See the last output of the others. Exit code {EXIT_LOST}.",
        file=sys.stderr,
    )
    exit_process(EXIT_LOST)


def compiler_environment() -> dict[str, str]:
    """Return the variables with an effect on compilation; they must be equal on all processes."""
    of_jax = sorted(name for name in os.environ if name.startswith("JAX_"))
    own = (
        "JAX_PROCESS_ID",
        "JAX_LOCAL_DEVICE_IDS",
        "JAX_COORDINATOR_BIND_ADDRESS",
        "JAX_COMPILATION_CACHE_DIR",
    )
    found = {}
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", *of_jax):
        if name in os.environ and name not in own:
            found[name] = os.environ[name]
    return found
