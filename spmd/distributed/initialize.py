"""Process start-up and exit: simulated devices, the connection to the other processes, exit codes.

Only this module and `spmd.testing` read or write environment variables.
"""

import contextlib
import functools
import importlib.util
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import jax

from spmd.distributed.accelerators import Machine, device_problems, start_problems
from spmd.distributed.busy_tpu import busy_tpu_error
from spmd.distributed.cluster_env import LaunchArgs, detect_process_group, split_address
from spmd.distributed.coordinator import address_in, connection_error, meet, name_address
from spmd.distributed.gpu_memory import DEFAULT_FRACTION, FRACTION_VARIABLE, read_fraction
from spmd.distributed.gpu_share import local_device_ids, visible_gpus
from spmd.distributed.launchers import ProcessGroup
from spmd.distributed.liveness import Liveness
from spmd.distributed.metadata_server import MetadataServer, on_compute_engine
from spmd.distributed.native_output import compiler_log, separate_stdout
from spmd.errors import ConfigError, Problem, print_traceback
from spmd.sharding.mesh import simulate_devices

EXIT_LOST = 69
"""Exit code of one of several processes whose runtime failed, mostly because another one is gone
(EX_UNAVAILABLE)."""

MOST_SIMULATED = 1024
"""Most simulated devices of a process."""

SINGLE_PROCESS = LaunchArgs(cluster="none")
"""One process, whatever the cluster says."""

_WRONG_DEVICES = "Not the devices to run on:"

MACHINE_ROOT = Path("/")
"""Folder with the device files of this machine."""

# Simulated devices share cores, so one of them may reach a collective late.
_CPU_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
# Without a TPU: ask no metadata server, and let several processes load the compiler at once.
_TPU_COMPILER_VARIABLES = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
# By default the GPU compiler autotunes kernels on a GPU, and here is none.
_NO_AUTOTUNING = "--xla_gpu_autotune_level=0"

# Prefixes of the variables with an effect on collectives and memory.
_NETWORK_VARIABLES = (
    *("NCCL_", "RCCL_", "NVSHMEM_", "FI_", "UCX_", "GLOO_", "MEGASCALE_", "LIBTPU_"),
    *("XLA_PYTHON_CLIENT_", "XLA_CLIENT_"),
)

# Those that name the network cards of a machine, what is logged and where, or a process.
_OF_MACHINE = re.compile(
    r".*(DEBUG|_LOG|DUMP|IFNAME|IFACE|HCA|NET_DEVICES|TOPO_FILE|HOSTID)|MEGASCALE_SLICE_ID$"
)

# Lines of libtpu, but not JAX's own about a TPU.
_LIBTPU = re.compile(r"^(?!.*xla_bridge).*(TPU|libtpu|InitGoogle|Source Location Trace|/tfrc/)")

_ERROR = re.compile(r"\w*Error: ")

# gRPC reads the first of each group that is set.
_PROXY = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXY = ("no_grpc_proxy", "no_proxy")

# JAX takes a process for dead that sends no heartbeat, as one that compiles or pins memory on a busy
# machine; `Liveness` finds those that are gone much earlier.
_JAX_HEARTBEAT = 600
# JAX connects in seconds once all processes are there.
_JAX_START = 120

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
    _choose_platform(devices, launch_args.platform)
    # Orbax logs tracebacks of errors that it also raises.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    prepare_platform(target_platform)
    if devices:
        if _CPU_TIMEOUT.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
            _add_xla_flag(_CPU_TIMEOUT)
        simulate_devices(devices)
    elif not target_platform:
        _take_gpu_memory()
    connect(launch_args, simulated=bool(devices))
    log = _start_backends(launch_args)
    if not target_platform:
        _check_accelerators(devices, launch_args, log)
    return _print_log(log)


def connect(launch_args: LaunchArgs, *, simulated: bool = False) -> None:
    """Connect to the other processes, if there are any; no device is started.

    A process that is connected stays so.

    Args:
        simulated: The devices are simulated, so the processes share no GPUs.
    """
    if jax.distributed.is_initialized():
        return
    group = detect_process_group(launch_args, os.environ)
    if group:
        _connect(group, launch_args, simulated)


def is_first_process(launch_args: LaunchArgs) -> bool:
    """Return true in process 0 of a group, and without a group; nothing is connected."""
    if jax.distributed.is_initialized():
        return jax.process_index() == 0
    group = detect_process_group(launch_args, os.environ)
    return group is None or group.process_id == 0


def starts_alone(launch_args: LaunchArgs) -> bool:
    """Return true in a process without others to connect to; nothing is connected."""
    if jax.distributed.is_initialized():
        return False
    return detect_process_group(launch_args, os.environ) is None


@contextlib.contextmanager
def no_accelerators() -> Iterator[None]:
    """Keep JAX from the accelerators of this machine in the block: another process has them.

    A process that has started CPU devices in the block is ended: it could not have others then.
    """
    platforms = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", "cpu")
    yield
    if _has_started():
        os._exit(1)
    jax.config.update("jax_platforms", platforms)


def _has_started() -> bool:
    """Return whether JAX has started devices: then their number cannot be set."""
    count = jax.config.values["jax_num_cpu_devices"]
    try:
        jax.config.update("jax_num_cpu_devices", max(count, 0) + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def own_address(launch_args: LaunchArgs) -> str:
    """Return the address of this host for the other processes; empty if there are none."""
    group = detect_process_group(launch_args, os.environ)
    if group is None:
        return ""
    return address_in(group)


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


def gpu_memory_fraction() -> float:
    """Return JAX's share of each GPU's memory: the user's, or the default."""
    fraction = read_fraction(os.environ)
    if fraction is None:
        fraction = DEFAULT_FRACTION
    return fraction


def _take_gpu_memory() -> None:
    """Set JAX's share of GPU memory to the one of plans; a variable of the user stays."""
    if read_fraction(os.environ) is None:
        os.environ[FRACTION_VARIABLE] = str(DEFAULT_FRACTION)


def _choose_platform(devices: int, platform: str) -> None:
    """Let JAX use CPUs only where they were asked for; raise if flags contradict each other."""
    configured = _configured_platforms()
    problems = []
    if devices and platform not in ("", "cpu"):
        what = f"is {platform}, but {devices} simulated devices are CPUs"
        problems.append(Problem("platform", what, fix='devices=0, or platform="cpu"'))
    names = [platform]
    if platform in ("cuda", "rocm"):
        names.append("gpu")
    if platform and configured and not set(names) & set(configured):
        what = f"is {platform}, but JAX_PLATFORMS={','.join(configured)}"
        problems.append(Problem("platform", what, fix="unset JAX_PLATFORMS, or drop --platform"))
    if problems:
        raise ConfigError("Contradicting platforms:", problems)
    if platform == "cpu" and not configured:
        jax.config.update("jax_platforms", "cpu")


def _configured_platforms() -> list[str]:
    """Return the platforms of JAX_PLATFORMS, or of JAX's own setting."""
    configured = str(jax.config.values["jax_platforms"] or "")
    return [name for name in configured.split(",") if name]


def _this_machine() -> Machine:
    return Machine(MACHINE_ROOT, os.environ, _has_module)


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _check_accelerators(devices: int, launch_args: LaunchArgs, log: list[str]) -> None:
    """Raise if JAX found other devices than were asked for, or CPUs beside an accelerator.

    Args:
        log: Lines that JAX printed while it searched for devices.
    """
    asked = launch_args.platform
    if devices or _configured_platforms()[:1] == ["cpu"]:
        asked = "cpu"
    problems = device_problems(
        _this_machine(),
        jax.devices(),
        asked,
        launch_args.expect_devices,
        functools.partial(_platform_failure, log),
    )
    if problems:
        raise ConfigError(_WRONG_DEVICES, problems)


def _platform_failure(log: list[str], platform: str) -> str:
    """Return JAX's reason against a platform: its last error, or its answer to a request."""
    printed = _last_error(log)
    if printed:
        return printed
    try:
        jax.devices(platform)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def _last_error(log: list[str]) -> str:
    """Return the last error in JAX's lines; after a plugin's traceback it is the last line."""
    errors = [line for line in log if _ERROR.match(line)]
    if not errors:
        return ""
    return errors[-1]


def _start_backends(launch_args: LaunchArgs) -> list[str]:
    """Let JAX find the devices; return its lines and those of libtpu."""
    failure: Exception | None = None
    with compiler_log(pass_on=False) as log:
        try:
            jax.devices()
        except (RuntimeError, AssertionError) as error:
            # An assertion where JAX_PLATFORMS names a platform without a plugin.
            failure = error
    if failure is None:
        return log
    busy = busy_tpu_error(str(failure))
    if busy is not None:
        raise busy from failure
    platforms = _configured_platforms()
    if launch_args.platform:
        platforms = [launch_args.platform]
    if not platforms:
        _print_log(log)
        raise failure
    reason = _last_error(log) or str(failure).partition("\n")[0]
    problems = start_problems(_this_machine(), platforms[0], reason)
    raise ConfigError(_WRONG_DEVICES, problems) from failure


def _print_log(log: list[str]) -> list[str]:
    """Return libtpu's lines, and print the other ones."""
    of_libtpu: list[str] = []
    for line in log:
        if _LIBTPU.search(line):
            of_libtpu.append(line)
        else:
            print(line, file=sys.stderr)
    return of_libtpu


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
    debug = native_debug()
    separate_stdout(keep=bool(debug))
    if debug:
        print(f"{debug}: output of C++ libraries goes to standard error", file=sys.stderr)
    # The only collectives between CPU devices, real or simulated, of several processes.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    gpus = visible_gpus(os.environ)
    if simulated or launch_args.platform == "cpu":
        gpus = ()
    variables = collectives_environment()
    meeting, own_address = meet(group, launch_args.start_timeout, gpus, variables)
    device_ids = local_device_ids(group.process_id, meeting.reports, os.environ)
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
        raise connection_error(f"{name_address(group)}: {str(error).splitlines()[0]}") from error
    finally:
        timer.cancel()
    sys.excepthook = _excepthook
    Liveness(meeting, group.process_id, launch_args.heartbeat, EXIT_LOST).start()


def _exempt_from_proxy(coordinator: str) -> None:
    """Let gRPC connect to the coordinator directly, although there is a proxy."""
    if not any(map(os.environ.get, _PROXY)):
        return
    exempt = ""
    for name in _NO_PROXY:
        exempt = exempt or os.environ.get(name, "")
    host, _ = split_address(coordinator)
    os.environ[_NO_PROXY[0]] = f"{exempt},{host}".strip(",")


def _exit_at_timeout(group: ProcessGroup) -> None:
    """Exit from a timer's thread, because the main thread blocks inside of JAX."""
    what = f"process {group.process_id}: all processes are there, and JAX did not connect them at "
    what += f"{name_address(group)}"
    fix = "check that nothing else uses that port, or give --coordinator another one"
    error = connection_error(what, f"{_JAX_START} s have passed", fix)
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


def native_debug() -> str:
    """Return NCCL_DEBUG and its value if it asks for output on standard output; else empty.

    RCCL has the same variables.
    """
    value = os.environ.get("NCCL_DEBUG", "")
    if not value or os.environ.get("NCCL_DEBUG_FILE"):
        return ""
    return f"NCCL_DEBUG={value}"


def collectives_environment() -> dict[str, str]:
    """Return the variables of libraries of collectives, to compare between processes.

    They choose algorithms and protocols: processes with other ones hang. LIBTPU_INIT_ARGS has flags
    of both collectives and the compiler.
    """
    found = {}
    for name, value in network_environment().items():
        if not name.startswith("XLA_") and not _OF_MACHINE.match(name):
            found[name] = value
    return found


def user_xla_flags() -> dict[str, str]:
    """Return the user's XLA flags in the environment by name.

    Those that spmd itself has added are no choice of the user. A flag without a value is true, as
    for XLA. A variable that does not begin with a dash is the name of a file of flags.
    """
    found = {}
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        text = os.environ.get(variable, "").strip()
        if text and not text.startswith("-"):
            text = _text_of(Path(text))
        for word in text.split():
            name, equals, value = word.lstrip("-").partition("=")
            if word in (_CPU_TIMEOUT, _NO_AUTOTUNING):
                continue
            if not equals:
                value = "true"
            found[name] = value
    return found


def _text_of(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read, as XLA itself reports."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    return ""


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
    for name in ("XLA_FLAGS", *of_jax):
        if name in os.environ and name not in own:
            found[name] = os.environ[name]
    return found


def network_environment() -> dict[str, str]:
    """Return the variables with an effect on collectives and memory."""
    found = {}
    for name in sorted(os.environ):
        if name.startswith(_NETWORK_VARIABLES):
            found[name] = os.environ[name]
    return found
