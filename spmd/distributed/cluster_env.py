"""Process groups from the environment variables of Slurm, Open MPI, TPU pods and Kubernetes.

`detect_process_group` merges what the cluster says with the command line, and reports every
contradiction.

JAX's own detection is not used: it takes a batch script for one of its tasks, gives each task of
Slurm and Open MPI a single GPU, and names the coordinator only after it could not be reached.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Mapping

from spmd.errors import ConfigError, Problem, check_fields

Environment = Mapping[str, str]

_FIRST_PORT, _PORTS = 61440, 4096  # above Linux's ephemeral ports, which outgoing connections get
_TPU_PORT = 8482
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.%]+\]|[^\[\]:\s]+):(?P<port>\d{1,5})")


@dataclasses.dataclass(frozen=True)
class LaunchArgs:
    """Flags for the processes that train together; the cluster gives what they leave out."""

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

    def problems(self) -> list[Problem]:
        """Return what is wrong in any environment."""
        positive = dict.fromkeys(("processes", "heartbeat", "start_timeout"), "at least 1")
        return check_fields(
            self, {"cluster": ["auto", "none", *CLUSTERS], "process_id": "at least 0", **positive}
        )


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """Processes that train together, and the number of this one.

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
    """Return the port that follows from the numbers of a job and its step, so that all processes agree on it.

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
    return "".join(part or "" for part in match.groups()) if match else nodes


def _openmpi(env: Environment) -> ProcessGroup:
    """Process 0 is where mpirun runs, unless its host file says otherwise.

    Open MPI 5 does not name that machine.
    """
    processes, process_id = env["OMPI_COMM_WORLD_SIZE"], env["OMPI_COMM_WORLD_RANK"]
    is_local = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == processes
    tcp = re.search(r"tcp://([^,:;]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    host = "127.0.0.1" if is_local else tcp[1] if tcp else ""
    coordinator = f"{host}:{job_port(env.get('PMIX_NAMESPACE', ''))}" if host else ""
    return ProcessGroup(int(processes), int(process_id), coordinator, "openmpi", is_local)


def _slurm(env: Environment) -> ProcessGroup:
    port = job_port(env["SLURM_JOB_ID"], env.get("SLURM_STEP_ID", ""))
    coordinator = f"{first_host(env['SLURM_STEP_NODELIST'])}:{port}"
    is_local = env.get("SLURM_STEP_NUM_NODES") == "1"
    return ProcessGroup(
        int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_PROCID"]), coordinator, "slurm", is_local
    )


def _tpu(env: Environment) -> ProcessGroup:
    hosts = env["TPU_WORKER_HOSTNAMES"].split(",")
    process_id = int(env.get("MEGASCALE_SLICE_ID") or 0) * len(hosts) + int(env["TPU_WORKER_ID"])
    host = (env.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0]).split(":")[0]
    processes = len(hosts) * int(env.get("MEGASCALE_NUM_SLICES") or 1)
    return ProcessGroup(processes, process_id, f"{host}:{_TPU_PORT}", "tpu")


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
    """Return the processes that train together, or None if this one trains alone.

    Flags and cluster complete each other, and must not contradict each other.
    """
    problems, group, seen = launch_args.problems(), None, ""
    processes, process_id, coordinator = (
        launch_args.processes,
        launch_args.process_id,
        launch_args.coordinator,
    )
    try:
        group, seen = _read_cluster(launch_args.cluster, environment)
    except ValueError as error:
        fix = "correct the variable, or --cluster none to ignore it"
        problems.append(
            Problem("cluster", f"an environment variable is not a number: {error}", fix=fix)
        )
    if group:
        flags = {
            "processes": (processes, group.processes),
            "process_id": (process_id, group.process_id),
        }
        for name, (flag, value) in flags.items():
            if None not in (flag, value) and flag != value:
                fix = (
                    f"remove --{name.replace('_', '-')}, or --cluster none to ignore {group.source}"
                )
                problems.append(
                    Problem(name, f"is {flag}, but {group.source} says {value}", seen, fix)
                )
        processes = group.processes if processes is None else processes
        process_id = group.process_id if process_id is None else process_id
        coordinator = coordinator or group.coordinator
    elif launch_args.cluster in CLUSTERS:
        fix = f"{', '.join(CLUSTERS[launch_args.cluster][0])} must be set, for several processes; or --cluster auto"
        problems.append(
            Problem(
                "cluster", f"{launch_args.cluster} did not start this process with others", fix=fix
            )
        )
    problems += _incomplete(processes, process_id, coordinator, seen)
    if problems:
        raise ConfigError("Invalid process group:", problems)
    if processes is None or process_id is None or processes == 1:
        return None
    if launch_args.coordinator or not group:
        return ProcessGroup(processes, process_id, coordinator, "--coordinator")
    return dataclasses.replace(group, processes=processes, process_id=process_id)


def _read_cluster(cluster: str, environment: Environment) -> tuple[ProcessGroup | None, str]:
    """Return the group, and its variables with their values."""
    for name, (variables, read) in CLUSTERS.items():
        if cluster in ("auto", name) and all(environment.get(variable) for variable in variables):
            group = read(environment)
            if group.processes != 1:
                return group, ", ".join(
                    f"{variable}={environment[variable]}" for variable in variables
                )
    return None, ""


def _incomplete(
    processes: int | None, process_id: int | None, coordinator: str, seen: str
) -> list[Problem]:
    fix = "give --coordinator HOST:PORT, --processes N and --process-id I together"
    fix += ", or --cluster none for a process that trains alone" if seen else ""
    given = {"process_id": process_id, "coordinator": coordinator or None}
    if processes is None:
        values = [f"{name} {value}" for name, value in given.items() if value is not None]
        return (
            [Problem("processes", f"is missing beside {' and '.join(values)}", seen, fix)]
            if values
            else []
        )
    missing = [name for name, value in given.items() if value is None and processes > 1]
    problems = [
        Problem(name, f"is missing for {processes} processes", seen, fix) for name in missing
    ]
    if process_id is not None and process_id >= processes:
        problems.append(
            Problem("process_id", f"is {process_id} of {processes} processes", seen, "count from 0")
        )
    if processes == 1 and coordinator:
        problems.append(Problem("coordinator", f"is {coordinator!r} for 1 process", seen, fix))
    if coordinator:
        try:
            split_address(coordinator)
        except ValueError as error:
            problems.append(
                Problem("coordinator", str(error), fix="such as 10.0.0.1:7777 or [fd00::1]:7777")
            )
    return problems


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT, an IPv6 address without its brackets.

    A ValueError for another text.

    Example:
        >>> split_address("node1:7777"), split_address("[fd00::1]:7777")
        (('node1', 7777), ('fd00::1', 7777))
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return match["host"].strip("[]"), int(match["port"])
