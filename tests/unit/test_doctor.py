"""What `spmd doctor` reads from a machine, and what it calls slow. The network cards are stubs: folders like /sys."""

import dataclasses
from pathlib import Path

import pytest

from spmd.doctor.diagnosis import (
    Diagnosis,
    Report,
    report_problems,
    slow_axes,
    slow_devices,
    slow_links,
)
from spmd.doctor.machine import Transport, read_drivers, read_transports
from spmd.doctor.text import format_diagnosis
from spmd.doctor.timing import AxisTime, PairTime

VERSIONS = dict.fromkeys(
    ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "spmd", "python", "runtime"), "1"
)
REPORT = Report(
    host="a",
    platform="gpu",
    devices=["NVIDIA H100 80GB HBM3"] * 2,
    versions=VERSIONS,
    drivers={"nvidia": "580.1"},
    transports=["InfiniBand mlx5_0 (400 Gbit/s)"],
    fastest="InfiniBand",
    variables={},
    shared_memory=2**34,
    cores=8,
    clock=1000.0,
)


def fake(root: Path, **files: str) -> None:
    """Write files below a folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def test_each_kind_of_network_card_is_told_apart(tmp_path: Path) -> None:
    """InfiniBand, RoCE and EFA are one class of the kernel; Slingshot has its own; virtual cards are skipped."""
    fake(
        tmp_path,
        **{
            "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
            "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
            "sys/class/infiniband/mlx5_1/ports/1/link_layer": "Ethernet",
            "sys/class/infiniband/mlx5_1/ports/1/rate": "100 Gb/sec (2X HDR)",
            "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
            "sys/class/infiniband/rdmap0/device/vendor": "0x1d0f",
            "sys/class/infiniband/rdmap0/ports/1/link_layer": "Unspecified",
            "sys/class/infiniband/rdmap0/ports/1/rate": "100 Gb/sec (4X EDR)",
            "sys/class/infiniband/rdmap0/ports/1/state": "4: ACTIVE",
            "sys/class/cxi/cxi0/device/properties/speed": "200 Gbps",
            "sys/class/net/eth0/device/vendor": "0x15b3",
            "sys/class/net/eth0/speed": "25000",
            "sys/class/net/eth0/operstate": "up",
            "sys/class/net/hsn0/device/vendor": "0x17db",
            "sys/class/net/docker0/speed": "10000",
        },
    )
    assert read_transports(tmp_path) == [
        Transport("InfiniBand", "mlx5_0", 400.0, True),
        Transport("Slingshot", "cxi0", 200.0, True),
        Transport("EFA", "rdmap0", 100.0, True),
        Transport("TCP", "eth0", 25.0, True),
        Transport("RoCE", "mlx5_1", 100.0, False),
    ]


def test_a_machine_without_cards_and_drivers_has_none(tmp_path: Path) -> None:
    assert read_transports(tmp_path) == []
    assert read_drivers(tmp_path) == {}
    fake(tmp_path, **{"sys/module/nvidia/version": "580.65.06"})
    assert read_drivers(tmp_path) == {"nvidia": "580.65.06"}


def test_a_slow_process_and_a_slow_device_are_named() -> None:
    """Also where half of all are slow; devices that differ by a tenth are not."""
    hosts = ["a", "b"]
    [found] = slow_devices([[0.01, 0.011], [0.04, 0.04]], hosts, "gpu")
    assert found.where == "process 1 (b)"
    assert "every device takes 3.7 times as long" in found.what
    [found] = slow_devices([[0.01, 0.02], [0.01, 0.01]], hosts, "gpu")
    assert (found.where, "device 1 takes 2.0 times" in found.what) == ("process 0 (a)", True)
    assert slow_devices([[0.01, 0.011], [0.01, 0.0105]], hosts, "gpu") == []


def test_a_slow_link_is_compared_with_links_of_its_kind() -> None:
    """Links between hosts are slower than those inside, which is no problem."""
    hosts = ["a", "a", "b", "b"]
    pairs = [
        PairTime(0, 1, 10**9, 0.01),
        PairTime(2, 3, 10**9, 0.01),
        PairTime(0, 2, 10**9, 0.1),
        PairTime(1, 3, 10**9, 0.1),
    ]
    assert slow_links(pairs, hosts, "gpu") == []
    pairs[3] = dataclasses.replace(pairs[3], seconds=0.5)
    [found] = slow_links(pairs, hosts, "gpu")
    assert found.where == "process 1 (a) and process 3 (b)"
    assert found.detail.startswith("2.00 GB/s in each direction, and 5.00 GB/s")


def test_an_axis_far_below_its_bandwidth_is_named_by_its_worst_collective() -> None:
    times = [
        AxisTime("fsdp", 8, "all-gather", 10**9, 0.010),
        AxisTime("fsdp", 8, "all-reduce", 10**9, 0.060),
        AxisTime("tensor", 8, "all-reduce", 10**9, 0.011),
        AxisTime("data", 2, "all-reduce", 10**9, 9.0),
    ]
    [found] = slow_axes(times, [0.004, 0.01, 0.01, None])
    assert found.where == "axis fsdp"
    assert "all-reduce takes 6.0 times" in found.what


def test_processes_that_differ_are_named() -> None:
    """By version, driver, variable, clock and shared memory; equal ones are no problem."""
    assert report_problems([REPORT] * 3) == []
    other = dataclasses.replace(
        REPORT,
        host="c",
        versions={**VERSIONS, "jax": "2"},
        variables={"NCCL_ALGO": "Tree"},
        drivers={},
        shared_memory=2**26,
        clock=1009.0,
    )
    text = "\n".join(map(str, report_problems([REPORT, REPORT, other])))
    assert "process 2: version.jax is 2" in text
    assert "process 2: variable.NCCL_ALGO is Tree" in text
    assert "process 2: driver.nvidia is nothing" in text
    assert "process 2 (c): has a clock that is +9 s off" in text
    assert "process 2 (c): has 64 MiB of /dev/shm" in text


@pytest.mark.parametrize("problems", [0, 1])
def test_the_text_ends_with_the_verdict(problems: int) -> None:
    found = Diagnosis(
        [REPORT, REPORT],
        folder="",
        memory="",
        products=[[0.01, 0.01], [0.04, 0.04]],
        axes=[AxisTime("fsdp", 4, "all-gather", 2**20, 0.001)],
        expected=[0.0005],
        pairs=[PairTime(0, 1, 2**20, 0.001)],
        problems=slow_devices([[0.01, 0.01], [0.04, 0.04]], ["a", "a"], "gpu")[:problems],
    )
    text = format_diagnosis(found)
    assert text.startswith(
        "4 devices of the kind NVIDIA H100 80GB HBM3 (gpu), 2 processes, 1 host\n"
    )
    assert "fsdp  4        all-gather  1 MiB  1.00  1.05  0.50" in text
    ends = ["no problem found", "its cores for each process"]
    assert text.endswith(ends[problems])
