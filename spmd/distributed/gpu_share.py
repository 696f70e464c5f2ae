"""Share of a machine's GPUs for each of several processes with the same view of them.

A launcher may start one process for each GPU and show it all of them, so that NCCL finds its
neighbours (`srun` without `--gpus-per-task`, mpirun, torchrun); or it may show each process its own
GPUs only. The reports of all processes tell which it is.
"""

from collections.abc import Sequence
from pathlib import Path

from spmd.distributed.launchers import Environment
from spmd.distributed.rendezvous import Report
from spmd.errors import Problem

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


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
) -> tuple[list[int] | None, list[Problem]]:
    """Return the numbers of this process's GPUs among the visible ones; None for all of them.

    GPUs that several processes of a machine see are divided among those, in the order of the
    processes. Processes that see fewer GPUs than they are have their own.

    Args:
        reports: Reports of all processes, in order.

    Example:
        >>> gpus = ("0", "1", "2", "3")
        >>> reports = [Report(i, 2, "node1", "a", gpus) for i in range(2)]
        >>> local_device_ids(1, reports, {})
        ([2, 3], [])
    """
    own = reports[process_id]
    neighbours: list[int] = []
    for report in reports:
        if report.machine == own.machine and report.gpus == own.gpus:
            neighbours.append(report.process_id)
    gpus = len(own.gpus)
    count = len(neighbours)
    if count == 1 or gpus < count or _is_divided(environment):
        return None, []
    if gpus % count:
        what = f"do not divide: {count} processes on {own.host} see the same {gpus} GPUs"
        fix = "start a number of processes on each machine that divides its GPUs"
        return None, [Problem("processes", what, f"{gpus} / {count} = {gpus / count:g}", fix)]
    share = gpus // count
    first = neighbours.index(process_id) * share
    return list(range(first, first + share)), []


def _is_divided(environment: Environment) -> bool:
    """Return whether Slurm gave each task GPUs of its own, perhaps numbered from 0 for each."""
    if environment.get("SLURM_GPUS_PER_TASK"):
        return True
    return "gpu" in environment.get("SLURM_TRES_PER_TASK", "")
