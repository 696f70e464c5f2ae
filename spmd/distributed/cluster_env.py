"""Process groups from the environment variables of Slurm, Open MPI, TPU pods and Kubernetes.

`detect_process_group` merges the cluster's variables with the command line, and reports every
contradiction.

JAX's own detection is not used: it takes a batch script for one of its tasks, gives each task of
Slurm and Open MPI a single GPU, and names the coordinator only after it could not be reached.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Mapping

from spmd.distributed.accelerators import PLATFORMS
from spmd.errors import ConfigError, Problem, check_fields

Environment = Mapping[str, str]

_FIRST_PORT, _PORTS = 61440, 4096  # above Linux's ephemeral ports, which outgoing connections get
_TPU_PORT = 8482
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.%]+\]|[^\[\]:\s]+):(?P<port>\d{1,5})")


@dataclasses.dataclass(frozen=True)
class LaunchArgs:
    """Flags for the processes of one run; the cluster's variables complete them."""

    coordinator: str = ""
    """HOST:PORT where process 0 listens, when several processes train together."""
    processes: int | None = None
    """Number of processes that train together."""
    process_id: int | None = None
    """Number of this process, from 0."""
    cluster: str = "auto"
    """Cluster that started the processes: openmpi, slurm, tpu, kubernetes, auto to detect it,
    none to ignore it."""
    heartbeat: int = 30
    """Seconds without a heartbeat after which a process counts as dead, and the others stop."""
    start_timeout: int = 300
    """Seconds in which all processes must have connected."""
    platform: str = ""
    """Platform to train on: cpu, cuda, rocm or tpu; another one is refused. Empty: the one JAX
    finds, but CPUs only in a machine without accelerators."""
    expect_devices: int = 0
    """Number of devices of all processes; with another number nothing starts. 0: any."""

    def problems(self) -> list[Problem]:
        """Return a problem for each flag with an invalid value, in any environment."""
        rules = {
            "cluster": ["auto", "none", *CLUSTERS],
            "process_id": "at least 0",
            "processes": "at least 1",
            "heartbeat": "at least 1",
            "start_timeout": "at least 1",
            "platform": ["", *PLATFORMS],
            "expect_devices": "at least 0",
        }
        return check_fields(self, rules)


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """Processes of one run, and the number of this one.

    Attributes:
        processes: 2 or more; as a cluster says it, also 1, or None if the cluster does not know.
        coordinator: HOST:PORT where process 0 listens; empty if a cluster does not know.
        source: `--coordinator`, or the name of the cluster that says it.
        is_local: All processes are known to be on one machine.
    """

    processes: int | None
    process_id: int
    coordinator: str
    source: str
    is_local: bool = False


def job_port(*numbers: str) -> int:
    """Derive a port from the numbers of a job and its step, so that all processes agree on it.

    Example:
        >>> job_port("1234", "0") == job_port("1234", "0") != job_port("1235", "0")
        True
        >>> 61440 <= job_port("1234", "0") <= 65535
        True
    """
    return _FIRST_PORT + zlib.crc32(".".join(numbers).encode()) % _PORTS


def first_host(nodes: str) -> str:
    """Return the first name of a node list of Slurm.

    Example:
        >>> first_host("node7"), first_host("gpu[003-010,012]-ib,login1"), first_host("a1,b[2-3]")
        ('node7', 'gpu003-ib', 'a1')
    """
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^\[,]*)", nodes)
    if match is None:
        return nodes
    prefix, number, suffix = match.groups(default="")
    return prefix + number + suffix


def _openmpi(env: Environment) -> ProcessGroup:
    processes = env["OMPI_COMM_WORLD_SIZE"]
    process_id = env["OMPI_COMM_WORLD_RANK"]
    is_local = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == processes
    host = "127.0.0.1"
    if not is_local:
        host = _host_of_mpirun(env)
    coordinator = ""
    if host:
        port = job_port(env.get("PMIX_NAMESPACE", ""))
        coordinator = f"{host}:{port}"
    return ProcessGroup(int(processes), int(process_id), coordinator, "openmpi", is_local)


def _host_of_mpirun(env: Environment) -> str:
    """Return the machine of mpirun, empty if unknown.

    Process 0 is there, unless the host file says otherwise. Open MPI 5 does not name that machine.
    """
    tcp = re.search(r"tcp://([^,:;]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    if tcp is None:
        return ""
    return tcp[1]


def _slurm(env: Environment) -> ProcessGroup:
    port = job_port(env["SLURM_JOB_ID"], env.get("SLURM_STEP_ID", ""))
    host = first_host(env["SLURM_STEP_NODELIST"])
    is_local = env.get("SLURM_STEP_NUM_NODES") == "1"
    processes = int(env["SLURM_STEP_NUM_TASKS"])
    process_id = int(env["SLURM_PROCID"])
    return ProcessGroup(processes, process_id, f"{host}:{port}", "slurm", is_local)


def _tpu(env: Environment) -> ProcessGroup:
    hosts = env["TPU_WORKER_HOSTNAMES"].split(",")
    this_slice = int(env.get("MEGASCALE_SLICE_ID") or 0)
    process_id = this_slice * len(hosts) + int(env["TPU_WORKER_ID"])
    address = env.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0]
    host = address.split(":")[0]
    slices = int(env.get("MEGASCALE_NUM_SLICES") or 1)
    return ProcessGroup(len(hosts) * slices, process_id, f"{host}:{_TPU_PORT}", "tpu")


def _kubernetes(env: Environment) -> ProcessGroup:
    return ProcessGroup(None, int(env["JOB_COMPLETION_INDEX"]), "", "kubernetes")


CLUSTERS: Mapping[str, tuple[tuple[str, ...], Callable[[Environment], ProcessGroup]]] = {
    "openmpi": (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), _openmpi),
    # A batch script has no step, and a shell in an allocation is a step of one task.
    "slurm": (
        ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        _slurm,
    ),
    # One or several slices of several hosts on Google Kubernetes Engine.
    "tpu": (("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"), _tpu),
    # A pod of an indexed Job knows its index only.
    "kubernetes": (("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"), _kubernetes),
}
"""Name of a cluster → variables that it sets for each process, and the function that reads them.

Inner ones come first, such as mpirun in a Slurm job: the first that started several processes
counts."""


def detect_process_group(launch_args: LaunchArgs, environment: Environment) -> ProcessGroup | None:
    """Return the processes of this run, or None if this one trains alone.

    Flags and cluster complete each other, and must not contradict each other.
    """
    problems = launch_args.problems()
    group: ProcessGroup | None = None
    seen = ""
    try:
        group, seen = _read_cluster(launch_args.cluster, environment)
    except ValueError as error:
        what = f"an environment variable is not a number: {error}"
        fix = "correct the variable, or --cluster none to ignore it"
        problems.append(Problem("cluster", what, fix=fix))
    completed = launch_args
    if group:
        problems += _contradictions(launch_args, group, seen)
        completed = _complete(launch_args, group)
    elif launch_args.cluster in CLUSTERS:
        problems.append(_not_started_by(launch_args.cluster))
    problems += _incomplete(completed, seen)
    if problems:
        raise ConfigError("Invalid process group:", problems)
    processes, process_id = completed.processes, completed.process_id
    if processes is None or process_id is None or processes == 1:
        return None
    if launch_args.coordinator or not group:
        return ProcessGroup(processes, process_id, completed.coordinator, "--coordinator")
    return dataclasses.replace(group, processes=processes, process_id=process_id)


def _read_cluster(cluster: str, environment: Environment) -> tuple[ProcessGroup | None, str]:
    """Return the group, and its variables with their values."""
    for name, (variables, read) in CLUSTERS.items():
        if cluster not in ("auto", name):
            continue
        if not all(map(environment.get, variables)):
            continue
        group = read(environment)
        if group.processes != 1:
            seen = [f"{variable}={environment[variable]}" for variable in variables]
            return group, ", ".join(seen)
    return None, ""


def _contradictions(launch_args: LaunchArgs, group: ProcessGroup, seen: str) -> list[Problem]:
    """Return a problem for each flag with another value than the cluster's."""
    problems: list[Problem] = []
    for name in ("processes", "process_id"):
        flag, value = getattr(launch_args, name), getattr(group, name)
        if None in (flag, value) or flag == value:
            continue
        what = f"is {flag}, but {group.source} says {value}"
        option = name.replace("_", "-")
        fix = f"remove --{option}, or --cluster none to ignore {group.source}"
        problems.append(Problem(name, what, seen, fix))
    return problems


def _complete(launch_args: LaunchArgs, group: ProcessGroup) -> LaunchArgs:
    """Take the missing flags from the cluster."""
    processes, process_id = launch_args.processes, launch_args.process_id
    if processes is None:
        processes = group.processes
    if process_id is None:
        process_id = group.process_id
    coordinator = launch_args.coordinator or group.coordinator
    return dataclasses.replace(
        launch_args, processes=processes, process_id=process_id, coordinator=coordinator
    )


def _not_started_by(cluster: str) -> Problem:
    variables, _ = CLUSTERS[cluster]
    what = f"{cluster} did not start this process with others"
    fix = f"{', '.join(variables)} must be set, for several processes; or --cluster auto"
    return Problem("cluster", what, fix=fix)


def _incomplete(launch_args: LaunchArgs, seen: str) -> list[Problem]:
    """Return a problem for each missing flag, and for each in contradiction to the others."""
    fix = "give --coordinator HOST:PORT, --processes N and --process-id I together"
    if seen:
        fix += ", or --cluster none for a process that trains alone"
    processes, process_id = launch_args.processes, launch_args.process_id
    coordinator = launch_args.coordinator
    given, missing = _given_and_missing(launch_args)
    if processes is None:
        if not given:
            return []
        return [Problem("processes", f"is missing beside {' and '.join(given)}", seen, fix)]
    problems: list[Problem] = []
    if processes > 1:
        for name in missing:
            problems.append(Problem(name, f"is missing for {processes} processes", seen, fix))
    if process_id is not None and process_id >= processes:
        what = f"is {process_id} of {processes} processes"
        problems.append(Problem("process_id", what, seen, "count from 0"))
    if processes == 1 and coordinator:
        problems.append(Problem("coordinator", f"is {coordinator!r} for 1 process", seen, fix))
    if coordinator:
        problems += _address_problems(coordinator)
    return problems


def _given_and_missing(launch_args: LaunchArgs) -> tuple[list[str], list[str]]:
    """Return the given flags with their values, and the names of the missing ones."""
    given: list[str] = []
    missing: list[str] = []
    for name in ("process_id", "coordinator"):
        value = getattr(launch_args, name)
        if value is None or value == "":
            missing.append(name)
        else:
            given.append(f"{name} {value}")
    return given, missing


def _address_problems(coordinator: str) -> list[Problem]:
    try:
        split_address(coordinator)
    except ValueError as error:
        fix = "such as 10.0.0.1:7777 or [fd00::1]:7777"
        return [Problem("coordinator", str(error), fix=fix)]
    return []


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT, an IPv6 address without its brackets.

    Any other text is a ValueError.

    Example:
        >>> split_address("node1:7777"), split_address("[fd00::1]:7777")
        (('node1', 7777), ('fd00::1', 7777))
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return match["host"].strip("[]"), int(match["port"])
