"""Process group of this run, from the launcher's environment variables and the command line.

`detect_process_group` merges both, and reports every contradiction.

JAX's own detection is not used: it takes a batch script for one of its tasks, gives each task of
Slurm and Open MPI a single GPU, and names the coordinator only after it could not be reached.
"""

import dataclasses
import re

from spmd.distributed.accelerators import PLATFORMS
from spmd.distributed.launchers import LAUNCHERS, Environment, Launcher, ProcessGroup, read_tpu
from spmd.distributed.metadata_server import MetadataError, MetadataServer, has_tpu, slice_variables
from spmd.errors import ConfigError, Problem, check_fields

TPU_VM = "tpu-vm"
"""Name of the metadata server of Google's virtual machines, as a launcher."""

_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.%]+\]|[^\[\]:\s]+):(?P<port>\d{1,5})")
_NUMERIC = re.compile(r"[\d.]+|\[.*\]")
# These say that a machine with TPU chips is no part of a slice that has a metadata server.
_TPU_ELSEWHERE = ("TPU_SKIP_MDS_QUERY", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")


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
    """Launcher that started the processes: torchrun, openmpi, mpich, pmi, pals, slurm, tpu,
    tpu-vm, skypilot, sagemaker, kubernetes, auto to detect it, none to ignore it."""
    coordinator_suffix: str = ""
    """Suffix of the name of process 0's host in the network to use, if the launcher names the host,
    such as i for node1i."""
    heartbeat: int = 100
    """Seconds without an answer of a machine after which its processes count as gone, and the
    others stop."""
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
            "cluster": ["auto", "none", *LAUNCHERS, TPU_VM],
            "process_id": "at least 0",
            "processes": "at least 1",
            "heartbeat": "at least 1",
            "start_timeout": "at least 1",
            "platform": ["", *PLATFORMS],
            "expect_devices": "at least 0",
        }
        return check_fields(self, rules)

    @property
    def is_complete(self) -> bool:
        """Return whether the flags alone say where the processes meet."""
        return None not in (self.processes, self.process_id) and bool(self.coordinator)


def detect_process_group(launch_args: LaunchArgs, environment: Environment) -> ProcessGroup | None:
    """Return the processes of this run, or None if this one trains alone.

    Flags and cluster complete each other, and must not contradict each other.
    """
    problems = launch_args.problems()
    found: list[tuple[ProcessGroup, str]] = []
    try:
        found = _read_launchers(launch_args.cluster, environment)
    except ValueError as error:
        what = f"an environment variable is invalid: {error}"
        fix = "correct the variable, or --cluster none to ignore it"
        problems.append(Problem("cluster", what, fix=fix))
    if not found and not problems and _asks_metadata(launch_args, environment):
        found = _read_metadata(environment)
    group, seen = None, ""
    completed = launch_args
    if found:
        problems += _conflicts(found)
        group, seen = _chosen(found)
        problems += _contradictions(launch_args, group, seen)
        group, more = _with_suffix(group, launch_args)
        problems += more
        completed = _complete(launch_args, group)
    else:
        problems += _unused(launch_args)
    problems += _incomplete(completed, seen)
    if problems:
        raise ConfigError("Invalid process group:", problems)
    processes, process_id = completed.processes, completed.process_id
    if processes is None or process_id is None or processes == 1:
        return None
    if group is None:
        return ProcessGroup(processes, process_id, completed.coordinator, "--coordinator")
    if launch_args.coordinator:
        group = dataclasses.replace(
            group, coordinator=launch_args.coordinator, source="--coordinator"
        )
    return dataclasses.replace(group, processes=processes, process_id=process_id)


def _read_launchers(cluster: str, environment: Environment) -> list[tuple[ProcessGroup, str]]:
    """Return the group of each launcher, with its variables, the innermost launcher first."""
    found: list[tuple[ProcessGroup, str]] = []
    for name, launcher in LAUNCHERS.items():
        if cluster not in ("auto", name):
            continue
        if not all(map(environment.get, launcher.variables)):
            continue
        group = launcher.read(environment)
        if group.processes != 1:
            found.append((group, _seen(launcher, environment)))
    return found


def _seen(launcher: Launcher, environment: Environment) -> str:
    return ", ".join(f"{name}={environment[name]}" for name in launcher.variables)


def _conflicts(found: list[tuple[ProcessGroup, str]]) -> list[Problem]:
    """Return a problem for each outer launcher in contradiction to the innermost."""
    inner, seen = found[0]
    problems: list[Problem] = []
    if len(found) == 1 or LAUNCHERS[inner.source].has_daemons:
        return problems
    for outer, seen_of_outer in found[1:]:
        if outer.processes is None or _agree(inner, outer) or inner.agents == outer.processes:
            continue
        what = f"{inner.source} and {outer.source} contradict each other: "
        what += f"process {inner.process_id} of {inner.processes}, "
        what += f"process {outer.process_id} of {outer.processes}"
        fix = f"--cluster {inner.source} or --cluster {outer.source}, "
        fix += "or unset the variables of the other"
        problems.append(Problem("cluster", what, f"{seen}; {seen_of_outer}", fix))
    return problems


def _agree(one: ProcessGroup, other: ProcessGroup) -> bool:
    return (one.processes, one.process_id) == (other.processes, other.process_id)


def _chosen(found: list[tuple[ProcessGroup, str]]) -> tuple[ProcessGroup, str]:
    """Return the innermost launcher, or an agreeing outer one with the address of process 0.

    Slurm sets variables of MPI as well, and knows the nodes of its step.
    """
    chosen = found[0]
    if len(found) == 1 or LAUNCHERS[chosen[0].source].has_daemons:
        return chosen
    for group, seen in found[1:]:
        if _agree(group, chosen[0]) and group.coordinator:
            chosen = group, seen
    return chosen


def _asks_metadata(launch_args: LaunchArgs, environment: Environment) -> bool:
    """Return whether to ask for the hosts of a TPU slice: no variable has them."""
    if launch_args.cluster == TPU_VM:
        return True
    if launch_args.cluster != "auto" or launch_args.is_complete:
        return False
    return has_tpu() and not any(map(environment.get, _TPU_ELSEWHERE))


def _read_metadata(environment: Environment) -> list[tuple[ProcessGroup, str]]:
    """Return the group of the hosts of this TPU slice, or of several; nothing for one host."""
    server = MetadataServer.of(environment)
    try:
        variables = slice_variables(server, environment)
        if not variables:
            return []
        group = read_tpu(variables, TPU_VM)
    except (MetadataError, ValueError) as error:
        what = f"the metadata server {server.host} of this TPU VM {error}"
        fix = "--cluster none for a process that trains alone, or give --coordinator HOST:PORT, "
        fix += "--processes N and --process-id I"
        problem = Problem("cluster", what, fix=fix)
        raise ConfigError("Invalid process group:", [problem]) from error
    if group.processes == 1:
        return []
    return [(group, ", ".join(f"{name}={value}" for name, value in variables.items()))]


def _with_suffix(
    group: ProcessGroup, launch_args: LaunchArgs
) -> tuple[ProcessGroup, list[Problem]]:
    """Append the suffix to the name of process 0's host, before its domain."""
    suffix = launch_args.coordinator_suffix
    if not suffix or group.is_local:  # one machine needs no network
        return group, []
    host, _, port = group.coordinator.rpartition(":")
    if launch_args.coordinator or not host or _NUMERIC.fullmatch(host):
        named = launch_args.coordinator or group.coordinator or "no host"
        what = f"is {suffix!r}, and {named} has no name of a launcher that could end in it"
        fix = "give the whole address as --coordinator HOST:PORT"
        return group, [Problem("coordinator_suffix", what, fix=fix)]
    name, dot, domain = host.partition(".")
    coordinator = f"{name}{suffix}{dot}{domain}:{port}"
    return dataclasses.replace(group, coordinator=coordinator), []


def _unused(launch_args: LaunchArgs) -> list[Problem]:
    """Return a problem for each flag about a launcher, where there is none."""
    problems: list[Problem] = []
    if launch_args.cluster in (*LAUNCHERS, TPU_VM):
        problems.append(_not_started_by(launch_args.cluster))
    elif launch_args.coordinator_suffix and launch_args.coordinator:
        fix = "add the suffix to the host of --coordinator"
        problems.append(
            Problem("coordinator_suffix", "is for hosts that a launcher names", fix=fix)
        )
    return problems


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
    what = f"{cluster} did not start this process with others"
    if cluster == TPU_VM:
        what = "this machine is not one of several hosts of a TPU slice, says the metadata server"
        return Problem("cluster", what, fix="--cluster auto")
    variables = ", ".join(LAUNCHERS[cluster].variables)
    fix = f"{variables} must be set, for several processes; or --cluster auto"
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
