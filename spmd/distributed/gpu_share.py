"""Share of a machine's GPUs for each of several processes with the same view of them.

A launcher may start one process for each GPU and show it all of them, so that NCCL finds its
neighbours (`srun` without `--gpus-per-task`, mpirun, torchrun); or it may show each process its own
GPUs only. The reports of all processes tell which it is.
"""

import collections
from collections.abc import Sequence
from pathlib import Path

from spmd.distributed.launchers import Environment
from spmd.distributed.rendezvous import Report
from spmd.errors import ConfigError, Problem

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")

_DIVIDED_BY_USER = (
    "JAX_LOCAL_DEVICE_IDS",
    "JAX_CUDA_VISIBLE_DEVICES",
    "JAX_ROCM_VISIBLE_DEVICES",
)
"""JAX's own variables for the GPUs of a process."""


def visible_gpus(
    environment: Environment,
    dev: Path = Path("/dev"),
    nodes: Path = Path("/sys/class/kfd/kfd/topology/nodes"),
) -> tuple[str, ...]:
    """Return the GPUs visible to this process; no driver is asked.

    Example:
        >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"})
        ('0', '1')
    """
    for name in _VISIBLE:
        if name in environment:
            return _until_invalid(environment[name])
    nvidia = sorted(path.name for path in dev.glob("nvidia[0-9]*"))
    if nvidia:
        return tuple(nvidia)
    amd: list[str] = []
    for file in sorted(nodes.glob("*/gpu_id")):
        if file.read_text().strip() not in ("", "0"):  # CPUs are nodes, too
            amd.append(file.parent.name)
    return tuple(amd)


def _until_invalid(listed: str) -> tuple[str, ...]:
    """Return the GPUs of a list; CUDA ignores those after an invalid one, such as -1."""
    gpus: list[str] = []
    for gpu in listed.split(","):
        if gpu.strip() in ("", "-1", "NoDevFiles"):
            break
        gpus.append(gpu.strip())
    return tuple(gpus)


def local_device_ids(
    process_id: int, reports: Sequence[Report], environment: Environment
) -> list[int] | None:
    """Return the numbers of this process's GPUs among the visible ones; None for all of them.

    GPUs that several processes of a machine see are divided among those, in the order of the
    processes. Processes that see fewer GPUs than they are have their own.

    Args:
        reports: Reports of all processes, in order.

    Raises:
        ConfigError: The GPUs of some machine do not divide; the same on all processes.

    Example:
        >>> gpus = ("0", "1", "2", "3")
        >>> reports = [Report(i, 2, "node1", "a", gpus) for i in range(2)]
        >>> local_device_ids(1, reports, {})
        [2, 3]
    """
    neighbours = collections.defaultdict[tuple[str, tuple[str, ...]], list[int]](list)
    for report in reports:
        neighbours[report.machine, report.gpus].append(report.process_id)
    if _is_divided(environment):
        return None
    problems: list[Problem] = []
    for (_, gpus), processes in neighbours.items():
        if len(gpus) > len(processes) and len(gpus) % len(processes):
            problems.append(_indivisible(reports[processes[0]].host, len(gpus), len(processes)))
    if problems:
        raise ConfigError("The GPUs of a machine cannot be shared:", problems)
    own = reports[process_id]
    sharing = neighbours[own.machine, own.gpus]
    share = len(own.gpus) // len(sharing)
    if len(sharing) == 1 or share == 0:
        return None
    first = sharing.index(process_id) * share
    return list(range(first, first + share))


def _indivisible(host: str, gpus: int, processes: int) -> Problem:
    what = f"do not divide: {processes} processes on {host} see the same {gpus} GPUs"
    fix = "start a number of processes on each machine that divides its GPUs; or set "
    fix += f"{_DIVIDED_BY_USER[0]} of each process to its own; or --platform cpu"
    return Problem("processes", what, f"{gpus} / {processes} = {gpus / processes:g}", fix)


def _is_divided(environment: Environment) -> bool:
    """Return whether the user or Slurm gave each process GPUs of its own.

    Those of Slurm are perhaps numbered from 0 for each.
    """
    if any(map(environment.get, _DIVIDED_BY_USER)):
        return True
    if environment.get("SLURM_GPUS_PER_TASK"):
        return True
    return "gpu" in environment.get("SLURM_TRES_PER_TASK", "")
