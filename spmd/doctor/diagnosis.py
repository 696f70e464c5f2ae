"""Diagnosis of a machine: reports and measurements of all processes, and its problems."""

import dataclasses
import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from spmd.analysis.topology import Topology
from spmd.checkpoint.versions import library_versions
from spmd.chips import chip_of
from spmd.distributed.differences import differences
from spmd.distributed.hosts import gather_json
from spmd.distributed.initialize import gpu_memory_fraction, network_environment
from spmd.distributed.shared_folder import shared_folder_problems
from spmd.doctor.machine import (
    read_drivers,
    read_transports,
    shared_memory_bytes,
)
from spmd.doctor.timing import AxisTime, PairTime, time_axes, time_pairs, time_products
from spmd.errors import Problem
from spmd.sharding.mesh import MeshShape
from spmd.step_time.network import make_network

SLOW = {"cpu": 2.5}
"""Platform → times slower than the others from which a process or link is slow. Simulated devices
share the cores of a machine."""
_SLOW = 1.25

_CLOCK_SECONDS = 5.0
_SHARED_MEMORY = 2**30
_DEVICE_FIX = (
    "look at its clocks and temperature, its other programs, and its cores for each process"
)
_LINK_FIX = "look at the cards and cables of both hosts, and at NCCL_SOCKET_IFNAME or NCCL_IB_HCA"


@dataclasses.dataclass(frozen=True)
class Report:
    """Facts about one process and its host.

    Attributes:
        devices: Kinds of its devices, one for each.
        versions: Of libraries and the backend's runtime, by name.
        drivers: Accelerator drivers in the kernel, with versions.
        transports: Network cards in words, the fastest first.
        fastest: Kind of the first card that is up; empty if there is none.
        variables: Environment variables with an effect on collectives.
        shared_memory: Bytes of `/dev/shm`.
        cores: CPU cores that the process may use.
        clock: Seconds since 1970, when all processes began.
    """

    host: str
    platform: str
    devices: list[str]
    versions: dict[str, str]
    drivers: dict[str, str]
    transports: list[str]
    fastest: str
    variables: dict[str, str]
    shared_memory: int
    cores: int
    clock: float


def gather_reports() -> list[Report]:
    """Return the reports of all processes, in order."""
    gather_json(None)  # so that all read their clocks at the same time
    clock = time.time()
    devices = jax.local_devices()
    kinds = []
    for device in devices:
        kinds.append(device.device_kind)
    transports = read_transports()
    fastest = ""
    if transports and transports[0].is_up:
        fastest = transports[0].kind
    own = Report(
        host=socket.gethostname(),
        platform=devices[0].platform,
        devices=kinds,
        versions=library_versions(),
        drivers=read_drivers(),
        transports=list(map(str, transports)),
        fastest=fastest,
        variables=network_environment(),
        shared_memory=shared_memory_bytes(),
        cores=_usable_cores(),
        clock=clock,
    )
    reports = []
    for values in gather_json(dataclasses.asdict(own)):
        reports.append(Report(**values))
    return reports


def _usable_cores() -> int:
    """Return the number of cores for this process; of the machine where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def report_problems(reports: Sequence[Report]) -> list[Problem]:
    """Return the problems of differing processes and of badly equipped hosts."""
    statements = []
    clocks = []
    for report in reports:
        clocks.append(report.clock)
        statements.append(
            {
                "device kinds": ", ".join(sorted(set(report.devices))),
                "number of devices": len(report.devices),
                "version": report.versions,
                "driver": report.drivers,
                "transport": report.fastest or "none",
                "variable": report.variables,
            }
        )
    problems = differences(statements)
    usual = statistics.median_low(clocks)
    for process, report in enumerate(reports):
        where = f"process {process} ({report.host})"
        ahead = report.clock - usual
        if abs(ahead) > _CLOCK_SECONDS:
            what = f"has a clock that is {ahead:+.0f} s off"
            fix = "synchronize it (chronyd): leases and logs of runs compare times"
            problems.append(Problem(where, what, fix=fix))
        is_small = 0 < report.shared_memory < _SHARED_MEMORY
        if report.platform == "gpu" and is_small:
            what = f"has {report.shared_memory / 2**20:.0f} MiB of /dev/shm"
            fix = "give the container 1 GiB or more: docker --shm-size, or an emptyDir in memory"
            problems.append(Problem(where, what, "NCCL uses it between processes of a host", fix))
    return problems


def slow_devices(
    seconds: Sequence[Sequence[float]], hosts: Sequence[str], platform: str
) -> list[Problem]:
    """Return a problem for each process with a device much slower than the faster ones of all.

    Args:
        seconds: Of the same product on each device of each process.
    """
    usual = _quartile(np.concatenate(seconds))
    problems = []
    for process, row in enumerate(seconds):
        slow = []
        for number, each in enumerate(row):
            if each > usual * SLOW.get(platform, _SLOW):
                slow.append(str(number))
        if not slow:
            continue
        which = f"device {', '.join(slow)}"
        if len(slow) == len(row):
            which = "every device"
        what = f"is slow: {which} takes {max(row) / usual:.1f} times as long for a matrix product"
        detail = f"{max(row) * 1e3:.2f} ms, and {usual * 1e3:.2f} ms on the faster devices"
        problems.append(Problem(f"process {process} ({hosts[process]})", what, detail, _DEVICE_FIX))
    return problems


def slow_links(pairs: Sequence[PairTime], hosts: Sequence[str], platform: str) -> list[Problem]:
    """Return a problem for each pair of processes much slower than the others.

    Pairs on one host are compared with each other, and so are pairs of two hosts.
    """
    problems = []
    for is_local in (True, False):
        alike = []
        for pair in pairs:
            if (hosts[pair.first] == hosts[pair.second]) == is_local:
                alike.append(pair)
        if not alike:
            continue
        usual = _quartile([pair.seconds for pair in alike])
        for pair in alike:
            if pair.seconds > usual * SLOW.get(platform, _SLOW):
                problems.append(_slow_link(pair, hosts, usual))
    return problems


def _slow_link(pair: PairTime, hosts: Sequence[str], usual: float) -> Problem:
    first = f"process {pair.first} ({hosts[pair.first]})"
    second = f"process {pair.second} ({hosts[pair.second]})"
    what = f"exchange data {pair.seconds / usual:.1f} times as slowly as other pairs"
    own = pair.payload / pair.seconds / 1e9
    others = pair.payload / usual / 1e9
    detail = f"{own:.2f} GB/s in each direction, and {others:.2f} GB/s of the faster pairs"
    return Problem(f"{first} and {second}", what, detail, _LINK_FIX)


def _quartile(values: Sequence[float] | np.ndarray) -> float:
    """Return the first quartile: a slow half does not move it."""
    return float(np.quantile(values, 0.25))


def real_topology(hosts: Sequence[str]) -> Topology | None:
    """Return the machine of all devices; None for a kind without published speeds.

    Args:
        hosts: Of each process.
    """
    devices = jax.devices()
    chip = chip_of(devices[0].device_kind)
    if chip.speeds is None:
        return None
    if chip.platform != "tpu":
        count = len(set(hosts))
        shape: tuple[int, ...] = (count, len(devices) // count)
        return Topology("this machine", chip, shape)
    slices = {getattr(device, "slice_index", 0) for device in devices}
    coords = np.array([device.coords for device in devices])
    shape = tuple((coords.max(axis=0) + 1).tolist())[: max(chip.dims, 1)]
    return Topology("this machine", chip, shape, len(slices))


def expected_seconds(
    times: Sequence[AxisTime], mesh: Mesh, slices: Mapping[str, int], topology: Topology | None
) -> list[float | None]:
    """Return the time of each collective by published bandwidths; None where they are unknown."""
    if topology is None:
        return [None] * len(times)
    speeds = topology.chip.speeds
    assert speeds is not None
    shape = MeshShape(**mesh.shape)
    network = make_network(topology, shape, slices, speeds)
    expected: list[float | None] = []
    for each in times:
        group = network.axis_group([each.axis])
        expected.append(network.seconds(each.kind, each.payload, group))
    return expected


def slow_axes(times: Sequence[AxisTime], expected: Sequence[float | None]) -> list[Problem]:
    """Return a problem for each axis with a collective at less than half of its expected speed."""
    problems = []
    worst: dict[str, tuple[float, AxisTime]] = {}
    for each, seconds in zip(times, expected, strict=True):
        if seconds is None or each.seconds < 2 * seconds:
            continue
        ratio = each.seconds / seconds
        if ratio > worst.get(each.axis, (0.0, each))[0]:
            worst[each.axis] = (ratio, each)
    for axis, (ratio, each) in worst.items():
        what = f"{each.kind} takes {ratio:.1f} times as long as published bandwidths say"
        fix = "look at the transport above, and at docs/how-to/slow-networks.md"
        problems.append(Problem(f"axis {axis}", what, f"{each.seconds * 1e3:.2f} ms", fix))
    return problems


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Findings of `spmd doctor`.

    Attributes:
        folder: Run folder that all processes must see; empty if none was given.
        memory: Sentence on the share of memory that JAX takes; empty where it takes none.
        products: Seconds of a matrix product on each device of each process.
        expected: Seconds of each of `axes` by published bandwidths.
    """

    reports: list[Report]
    folder: str
    memory: str
    products: list[list[float]]
    axes: list[AxisTime]
    expected: list[float | None]
    pairs: list[PairTime]
    problems: list[Problem]

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return dataclasses.asdict(self)


def diagnose(mesh: Mesh, slices: Mapping[str, int], folder: str, size: int) -> Diagnosis:
    """Examine the machine under a mesh; every process makes this call.

    Args:
        slices: Axis → its parts that the slow network connects.
        folder: Run folder that all processes must see; empty if none is checked.
        size: Bytes of the arrays that are sent.
    """
    reports = gather_reports()
    hosts = [report.host for report in reports]
    platform = reports[0].platform
    problems = report_problems(reports)
    if folder:
        problems += shared_folder_problems(Path(folder), "run folder")
    products = time_products()
    problems += slow_devices(products, hosts, platform)
    axes = list(time_axes(mesh, size))
    expected = expected_seconds(axes, mesh, slices, real_topology(hosts))
    problems += slow_axes(axes, expected)
    pairs = list(time_pairs(size))
    problems += slow_links(pairs, hosts, platform)
    memory = ""
    if platform == "gpu":
        memory = f"JAX takes {gpu_memory_fraction():g} of each GPU's memory"
    return Diagnosis(reports, folder, memory, products, axes, expected, pairs, problems)
