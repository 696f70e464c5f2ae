"""Process groups from the environment variables of each launcher: Slurm, MPI, torchrun, clouds.

`LAUNCHERS` has a reader for each; `spmd.distributed.cluster_env` chooses among those that started
this process.
"""

import dataclasses
import itertools
import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

Environment = Mapping[str, str]

_FIRST_PORT, _PORTS = 61440, 4096  # above Linux's ephemeral ports, which outgoing connections get
_TPU_PORT = 8482
_LOOPBACK = "127.0.0.1"
# A comma between names, not one inside of brackets.
_BETWEEN_NAMES = re.compile(r",(?![^\[]*\])")
_PARTS_OF_NAME = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """Processes of one run, and the number of this one.

    Attributes:
        processes: 2 or more; as a launcher says it, also 1, or None if it does not know.
        coordinator: HOST:PORT where process 0 listens; empty if the launcher does not know.
        source: `--coordinator`, or the name of the launcher that says it.
        is_local: All processes are known to be on one machine.
        hosts: Host of each process; empty if unknown.
        agents: Number of processes of an outer launcher that started these; None if there is none.
    """

    processes: int | None
    process_id: int
    coordinator: str
    source: str
    is_local: bool = False
    hosts: tuple[str, ...] = ()
    agents: int | None = None


@dataclasses.dataclass(frozen=True)
class Launcher:
    """Environment variables of a launcher, and their reader.

    Attributes:
        variables: Set for each process that it starts.
        has_daemons: Its processes are started by daemons of its own, so the variables of an outer
            launcher describe a daemon.
    """

    variables: tuple[str, ...]
    read: Callable[[Environment], ProcessGroup]
    has_daemons: bool = False


def job_port(*numbers: str) -> int:
    """Derive a port from the numbers of a job and its step, so that all processes agree on it.

    Example:
        >>> job_port("1234", "0") == job_port("1234", "0") != job_port("1235", "0")
        True
        >>> 61440 <= job_port("1234", "0") <= 65535
        True
    """
    return _FIRST_PORT + zlib.crc32(".".join(numbers).encode()) % _PORTS


def expand_nodes(nodes: str) -> list[str]:
    """Return the names of a node list of Slurm, in its order for up to two ranges in a name.

    Example:
        >>> expand_nodes("gpu[009-010,012]-ib,login1")
        ['gpu009-ib', 'gpu010-ib', 'gpu012-ib', 'login1']
        >>> expand_nodes("rack[1-2]n[01-02]")
        ['rack1n01', 'rack1n02', 'rack2n01', 'rack2n02']
    """
    names: list[str] = []
    for name in _BETWEEN_NAMES.split(nodes):
        choices: list[list[str]] = []
        for ranges, text in _PARTS_OF_NAME.findall(name):
            choices.append(_expand_ranges(ranges) or [text])
        names += map("".join, itertools.product(*choices))
    return names


def _expand_ranges(ranges: str) -> list[str]:
    """Return the numbers of `003-010,012`, with their leading zeros; none of an empty text."""
    numbers: list[str] = []
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            numbers.append(str(number).zfill(len(first)))
    return numbers


def _at(host: str, port: int) -> str:
    """Return HOST:PORT, empty without a host."""
    if not host:
        return ""
    if ":" in host:
        host = f"[{host}]"
    return f"{host}:{port}"


def _torchrun(env: Environment) -> ProcessGroup:
    """Read torchrun's variables; PyTorchJobs and many job scripts set them as well."""
    processes = int(env["WORLD_SIZE"])
    port = int(env["MASTER_PORT"])
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself listens there
        port = job_port(env["MASTER_PORT"], env.get("TORCHELASTIC_RUN_ID", ""))
    is_local = env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]
    host = env["MASTER_ADDR"]
    if is_local:
        host = _LOOPBACK
    agents: int | None = None
    if "GROUP_WORLD_SIZE" in env:
        agents = int(env["GROUP_WORLD_SIZE"])
    process_id = int(env["RANK"])
    coordinator = _at(host, port)
    return ProcessGroup(processes, process_id, coordinator, "torchrun", is_local, agents=agents)


def _openmpi(env: Environment) -> ProcessGroup:
    processes = env["OMPI_COMM_WORLD_SIZE"]
    process_id = env["OMPI_COMM_WORLD_RANK"]
    is_local = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == processes
    host = _LOOPBACK
    if not is_local:
        host = _host_of_mpirun(env)
    coordinator = _at(host, job_port(env.get("PMIX_NAMESPACE", "")))
    return ProcessGroup(int(processes), int(process_id), coordinator, "openmpi", is_local)


def _host_of_mpirun(env: Environment) -> str:
    """Return the machine of mpirun, empty if unknown.

    Process 0 is there, unless the host file says otherwise. Open MPI 5 does not name that machine.
    """
    tcp = re.search(r"tcp://([^,:;]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    if tcp is None:
        return ""
    return tcp[1]


def _pmi(env: Environment, source: str = "pmi") -> ProcessGroup:
    """Read the variables of PMI: those of MPICH, Intel MPI, Cray's PALS, and of Slurm for MPI."""
    processes = env["PMI_SIZE"]
    is_local = processes in (env.get("MPI_LOCALNRANKS"), env.get("PMI_LOCAL_SIZE"))
    host = _LOOPBACK
    if not is_local:
        host = _first_node(env)
    coordinator = _at(host, _mpi_port(env))
    return ProcessGroup(int(processes), int(env["PMI_RANK"]), coordinator, source, is_local)


def _mpich(env: Environment) -> ProcessGroup:
    return _pmi(env, "mpich")


def _pals(env: Environment) -> ProcessGroup:
    """Read the variables of Cray's PALS without PMI, without a number of processes."""
    coordinator = _at(_first_node(env), _mpi_port(env))
    return ProcessGroup(None, int(env["PALS_RANKID"]), coordinator, "pals")


def _first_node(env: Environment) -> str:
    """Return the first node of a job of PBS or Slurm, empty if there is none."""
    node_file = env.get("PBS_NODEFILE", "")
    if node_file and Path(node_file).is_file():
        lines = Path(node_file).read_text().split()
        return next(iter(lines), "")
    return next(iter(expand_nodes(env.get("SLURM_JOB_NODELIST", ""))), "")


def _mpi_port(env: Environment) -> int:
    names = ("PBS_JOBID", "SLURM_JOB_ID", "PALS_APID", "PMI_JOBID")
    return job_port(*(env.get(name, "") for name in names))


def _slurm(env: Environment) -> ProcessGroup:
    nodes = expand_nodes(env["SLURM_STEP_NODELIST"])
    port = job_port(env["SLURM_JOB_ID"], env.get("SLURM_STEP_ID", ""))
    is_local = len(nodes) == 1
    host = nodes[0]
    if is_local:
        host = _LOOPBACK
    processes = int(env["SLURM_STEP_NUM_TASKS"])
    process_id = int(env["SLURM_PROCID"])
    hosts = _hosts_of_tasks(env, nodes, processes)
    return ProcessGroup(processes, process_id, _at(host, port), "slurm", is_local, hosts)


def _hosts_of_tasks(env: Environment, nodes: list[str], tasks: int) -> tuple[str, ...]:
    """Return the node of each task, if Slurm fills one node after the other; else nothing."""
    if not env.get("SLURM_DISTRIBUTION", "block").startswith("block"):
        return ()
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return ()
        counts += [int(match[1])] * int(match[2] or 1)
    hosts: list[str] = []
    for node, count in zip(nodes, counts, strict=False):
        hosts += [node] * count
    if len(hosts) != tasks:
        return ()
    return tuple(hosts)


def read_tpu(env: Environment, source: str = "tpu") -> ProcessGroup:
    """Read the variables of one or several TPU slices, as Google Kubernetes Engine sets them."""
    hosts = env["TPU_WORKER_HOSTNAMES"].split(",")
    this_slice = int(env.get("MEGASCALE_SLICE_ID") or 0)
    process_id = this_slice * len(hosts) + int(env["TPU_WORKER_ID"])
    address = env.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0]
    host = address.split(":")[0]
    slices = int(env.get("MEGASCALE_NUM_SLICES") or 1)
    processes = len(hosts) * slices
    known = tuple(hosts)
    if slices > 1:
        known = _hosts_of_slices(hosts, slices, this_slice)
    return ProcessGroup(processes, process_id, _at(host, _TPU_PORT), source, hosts=known)


def _hosts_of_slices(hosts: list[str], slices: int, this_slice: int) -> tuple[str, ...]:
    """Return the host of each process: of other slices, the worker's number."""
    known: list[str] = []
    for number in range(slices):
        for worker, host in enumerate(hosts):
            if number == this_slice:
                known.append(host)
            else:
                known.append(f"worker {worker} of slice {number}")
    return tuple(known)


def _skypilot(env: Environment) -> ProcessGroup:
    hosts = env["SKYPILOT_NODE_IPS"].split()
    nodes = env.get("SKYPILOT_NUM_NODES", str(len(hosts)))
    if int(nodes) != len(hosts):
        raise ValueError(f"SKYPILOT_NUM_NODES is {nodes}, SKYPILOT_NODE_IPS has {len(hosts)}")
    coordinator = _at(hosts[0], job_port(env.get("SKYPILOT_TASK_ID", "")))
    process_id = int(env["SKYPILOT_NODE_RANK"])
    return ProcessGroup(len(hosts), process_id, coordinator, "skypilot", hosts=tuple(hosts))


def _sagemaker(env: Environment) -> ProcessGroup:
    hosts = json.loads(env["SM_HOSTS"])
    current = env["SM_CURRENT_HOST"]
    if not isinstance(hosts, list) or current not in hosts:
        raise ValueError(f"SM_CURRENT_HOST={current} is not in SM_HOSTS={env['SM_HOSTS']}")
    coordinator = _at(hosts[0], job_port(env.get("TRAINING_JOB_NAME", "")))
    process_id = hosts.index(current)
    return ProcessGroup(len(hosts), process_id, coordinator, "sagemaker", hosts=tuple(hosts))


def _kubernetes(env: Environment) -> ProcessGroup:
    return ProcessGroup(None, int(env["JOB_COMPLETION_INDEX"]), "", "kubernetes")


LAUNCHERS: Mapping[str, Launcher] = {
    "torchrun": Launcher(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), _torchrun),
    "openmpi": Launcher(
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), _openmpi, has_daemons=True
    ),
    "mpich": Launcher(("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"), _mpich, has_daemons=True),
    "pmi": Launcher(("PMI_SIZE", "PMI_RANK"), _pmi),
    "pals": Launcher(("PALS_RANKID",), _pals),
    # A batch script has no step, and a shell in an allocation is a step of one task.
    "slurm": Launcher(
        ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), _slurm
    ),
    # One or several slices of several hosts on Google Kubernetes Engine.
    "tpu": Launcher(("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"), read_tpu),
    "skypilot": Launcher(("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"), _skypilot),
    "sagemaker": Launcher(("SM_HOSTS", "SM_CURRENT_HOST"), _sagemaker),
    # A pod of an indexed Job knows its index only.
    "kubernetes": Launcher(("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"), _kubernetes),
}
"""Name → launcher. Inner ones come first, such as mpirun in a Slurm job: the first that started
several processes counts."""
