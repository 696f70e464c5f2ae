"""Where a process was detected: the clusters that are known, as a table, and what each says about a process.

Whoever starts several processes (srun, mpirun, a Kubernetes Job) tells each of them in environment variables how many
they are and which one it is. `detect_process_group` reads that, merges it with the command line, and reports every
contradiction. Nothing here reads the real environment: a mapping is passed in.

JAX has a detection of its own, which is not used, because it takes a batch script for one of its tasks, gives each task
of Slurm and Open MPI a single GPU, and does not say where the coordinator is before it has failed to reach it.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Mapping

from spmd.errors import ConfigError, Problem, did_you_mean

Environment = Mapping[str, str]

_FIRST_PORT, _PORTS = 61440, 4096
"""Ports above those that Linux gives to outgoing connections; a run takes the one that its job's number falls on."""

_TPU_PORT = 8482
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.%]+\]|[^\[\]:\s]+):(?P<port>\d{1,5})")


@dataclasses.dataclass(frozen=True)
class LaunchArgs:
    """What the command line says about the processes that train together; the rest comes from the cluster."""

    coordinator: str = ""
    """HOST:PORT where process 0 listens, when several processes train together."""
    processes: int | None = None
    """How many processes train together."""
    process_id: int | None = None
    """The number of this process, from 0."""
    cluster: str = "auto"
    """Who detected the processes: openmpi, slurm, tpu, kubernetes, auto to find out, none to take no notice."""
    heartbeat: int = 30
    """Seconds without a sign of life after which a process is dead, and the others stop."""
    start_timeout: int = 300
    """Seconds in which all processes must have met."""

    def problems(self) -> list[Problem]:
        """What no environment could make right."""
        problems = []
        known = ["auto", "none", *(cluster.name for cluster in CLUSTERS)]
        if self.cluster not in known:
            problems.append(Problem("cluster", f"{self.cluster!r} is not known", fix=did_you_mean(self.cluster, known)))
        if self.processes is not None and self.processes < 1:
            problems.append(Problem("processes", f"is {self.processes}", fix="1 or more"))
        if self.process_id is not None and self.process_id < 0:
            problems.append(Problem("process-id", f"is {self.process_id}", fix="count from 0"))
        for field in ("heartbeat", "start_timeout"):
            if getattr(self, field) < 1:
                problems.append(Problem(field.replace("_", "-"), f"is {getattr(self, field)} seconds", fix="1 or more"))
        return problems


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """Several processes that train together, and which of them this one is.

    Attributes:
        processes: How many they are, 2 or more.
        process_id: Which one this is, from 0.
        coordinator: HOST:PORT where process 0 listens.
        source: Who says where that is: `--coordinator`, or the name of a cluster.
        is_local: All processes are known to be on one machine.
    """

    processes: int
    process_id: int
    coordinator: str
    source: str
    is_local: bool = False


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What one way of starting processes tells each of them.

    Attributes:
        name: What `--cluster` calls it.
        env_vars: The variables that are all set where it detected this process.
        count: How many processes it detected; None where it does not say.
        process_id: Which of them this is.
        coordinator: HOST:PORT for process 0, the same on every process; empty where it does not say.
        is_local: Whether all processes are on one machine, as far as it says.
    """

    name: str
    env_vars: tuple[str, ...]
    count: Callable[[Environment], int | None]
    process_id: Callable[[Environment], int]
    coordinator: Callable[[Environment], str]
    is_local: Callable[[Environment], bool]

    def detected(self, environment: Environment) -> bool:
        """Whether it detected this process together with others.

        Raises:
            ValueError: A variable that should hold a number does not.
        """
        return all(environment.get(sign) for sign in self.env_vars) and self.count(environment) != 1

    def describe(self, environment: Environment) -> str:
        """The variables that say so, with their values."""
        return ", ".join(f"{sign}={environment.get(sign, '')}" for sign in self.env_vars)


def job_port(*numbers: str) -> int:
    """The port that the processes of one job agree upon without talking, from its number and its step's.

    Example:
        >>> job_port("1234", "0") == job_port("1234", "0") != job_port("1235", "0")
        True
        >>> 61440 <= job_port("1234", "0") <= 65535
        True
    """
    return _FIRST_PORT + zlib.crc32(".".join(numbers).encode()) % _PORTS


def first_host(nodes: str) -> str:
    """The first name in a list of nodes as Slurm writes it.

    Example:
        >>> first_host("node7"), first_host("gpu[003-010,012]-ib,login1"), first_host("a1,b[2-3]")
        ('node7', 'gpu003-ib', 'a1')
    """
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^\[,]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def _slurm_coordinator(environment: Environment) -> str:
    port = job_port(environment["SLURM_JOB_ID"], environment.get("SLURM_STEP_ID", ""))
    return f"{first_host(environment['SLURM_STEP_NODELIST'])}:{port}"


def _is_one_machine(environment: Environment) -> bool:
    return environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environment["OMPI_COMM_WORLD_SIZE"]


def _openmpi_coordinator(environment: Environment) -> str:
    """The machine where mpirun runs, which is the first one unless its host file says otherwise.

    Open MPI 4 says where that is; Open MPI 5 does not, and only processes on one machine can do without.
    """
    port = job_port(environment.get("PMIX_NAMESPACE", ""))
    if _is_one_machine(environment):
        return f"127.0.0.1:{port}"
    tcp = re.search(r"tcp://([^,:;]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    return f"{tcp[1]}:{port}" if tcp else ""


def _tpu_hosts(environment: Environment) -> list[str]:
    return environment["TPU_WORKER_HOSTNAMES"].split(",")


def _tpu_process(environment: Environment) -> int:
    place = int(environment.get("MEGASCALE_SLICE_ID") or 0)
    return place * len(_tpu_hosts(environment)) + int(environment["TPU_WORKER_ID"])


def _tpu_coordinator(environment: Environment) -> str:
    host = environment.get("MEGASCALE_COORDINATOR_ADDRESS") or _tpu_hosts(environment)[0]
    return f"{host.split(':')[0]}:{_TPU_PORT}"


# In order: what is detected inside another comes first, such as mpirun in a job of Slurm.
CLUSTERS = (
    Cluster(
        "openmpi",
        env_vars=("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        count=lambda environment: int(environment["OMPI_COMM_WORLD_SIZE"]),
        process_id=lambda environment: int(environment["OMPI_COMM_WORLD_RANK"]),
        coordinator=_openmpi_coordinator,
        is_local=_is_one_machine,
    ),
    Cluster(
        "slurm",
        # A batch script has no step, and a shell in an allocation is a step of one task.
        env_vars=("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        count=lambda environment: int(environment["SLURM_STEP_NUM_TASKS"]),
        process_id=lambda environment: int(environment["SLURM_PROCID"]),
        coordinator=_slurm_coordinator,
        is_local=lambda environment: environment.get("SLURM_STEP_NUM_NODES") == "1",
    ),
    Cluster(
        "tpu",  # a slice of several hosts on Google Kubernetes Engine, or several slices
        env_vars=("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"),
        count=lambda environment: len(_tpu_hosts(environment)) * int(environment.get("MEGASCALE_NUM_SLICES") or 1),
        process_id=_tpu_process,
        coordinator=_tpu_coordinator,
        is_local=lambda environment: False,
    ),
    Cluster(
        "kubernetes",  # a pod of an indexed Job knows its index, and neither the others nor their number
        env_vars=("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"),
        count=lambda environment: None,
        process_id=lambda environment: int(environment["JOB_COMPLETION_INDEX"]),
        coordinator=lambda environment: "",
        is_local=lambda environment: False,
    ),
)


def detect_process_group(asked: LaunchArgs, environment: Environment) -> ProcessGroup | None:
    """The processes that train together, or None where this one trains alone.

    What the command line gives and what the cluster says must agree; what one of them leaves out, the other may give.

    Args:
        asked: The flags.
        environment: The variables of this process.

    Raises:
        ConfigError: The flags are not complete, or contradict the cluster.
    """
    problems = asked.problems()
    cluster, count, process_id, address = None, None, None, ""
    try:
        cluster = next((c for c in CLUSTERS if asked.cluster in ("auto", c.name) and c.detected(environment)), None)
        if cluster:
            count, process_id = cluster.count(environment), cluster.process_id(environment)
            address = cluster.coordinator(environment)
    except ValueError as error:
        fix = "mend the variable, or --cluster none to take no notice of it"
        problems.append(Problem("cluster", f"a variable of the environment holds no number: {error}", fix=fix))
    describe = cluster.describe(environment) if cluster else ""
    for name, given, found in (("processes", asked.processes, count), ("process-id", asked.process_id, process_id)):
        if cluster and None not in (given, found) and given != found:
            fix = f"leave out --{name}, or --cluster none to take no notice of {cluster.name}"
            problems.append(Problem(name, f"is {given}, but {cluster.name} says {found}", describe, fix))
    named = {c.name: c for c in CLUSTERS}.get(asked.cluster)
    if named and not cluster:
        fix = f"{', '.join(named.env_vars)} must be set, for more than one process; or --cluster auto"
        problems.append(Problem("cluster", f"{named.name} did not start this process with others", fix=fix))
    processes = count if asked.processes is None else asked.processes
    process_id = process_id if asked.process_id is None else asked.process_id
    coordinator = asked.coordinator or address
    problems += _incomplete(processes, process_id, coordinator, describe)
    if problems:
        raise ConfigError("This process cannot be detected:", problems)
    if processes is None or process_id is None or processes == 1:
        return None
    if asked.coordinator or not cluster:
        return ProcessGroup(processes, process_id, coordinator, "--coordinator")
    return ProcessGroup(processes, process_id, coordinator, cluster.name, cluster.is_local(environment))


def _incomplete(processes: int | None, process_id: int | None, coordinator: str, describe: str) -> list[Problem]:
    """What is missing or does not fit together, once nothing contradicts anything."""
    fix = "give --coordinator HOST:PORT, --processes N and --process-id I together"
    if describe:
        fix += ", or --cluster none for a process that trains alone"
    if processes is None:
        given = {"process-id": process_id, "coordinator": coordinator or None}
        values = [f"{name} {value}" for name, value in given.items() if value is not None]
        return [Problem("processes", f"is missing beside {' and '.join(values)}", describe, fix)] if values else []
    problems = []
    if process_id is None and processes > 1:
        problems.append(Problem("process-id", f"is missing for {processes} processes", describe, fix))
    if process_id is not None and process_id >= processes:
        problems.append(Problem("process-id", f"is {process_id} of {processes} processes", describe, "count from 0"))
    if processes > 1 and not coordinator:
        problems.append(Problem("coordinator", f"is missing for {processes} processes", describe, fix))
    if processes == 1 and coordinator:
        problems.append(Problem("coordinator", f"is {coordinator!r} for 1 process", describe, fix))
    if coordinator and not is_address(coordinator):
        where = Problem(
            "coordinator", f"{coordinator!r} is not HOST:PORT", fix="such as 10.0.0.1:7777 or [fd00::1]:7777"
        )
        problems.append(where)
    return problems


def is_address(text: str) -> bool:
    """Whether a text is HOST:PORT.

    Example:
        >>> is_address("10.0.0.1:7777"), is_address("[fd00::1]:7777"), is_address("node1"), is_address("node1:70000")
        (True, True, False, False)
    """
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match["port"]) < 65536


def split_address(address: str) -> tuple[str, int]:
    """Host and port of an address; an IPv6 address without its brackets.

    Example:
        >>> split_address("node1:7777"), split_address("[fd00::1]:7777")
        (('node1', 7777), ('fd00::1', 7777))
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
