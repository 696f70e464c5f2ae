"""Processes of one machine that see the same GPUs divide them; those that were given their own keep them."""

import pytest

from spmd.distributed.gpu_share import local_device_ids, visible_gpus
from spmd.distributed.rendezvous import Report
from spmd.errors import ConfigError

ALL = tuple("01234567")


def reports(*machines):
    """A report for each pair of a machine and the GPUs that a process there sees."""
    group = []
    for number, (machine, gpus) in enumerate(machines):
        group.append(Report(number, len(machines), f"host-{machine}", machine, tuple(gpus)))
    return group


def shares(group, **environment):
    return [local_device_ids(number, group, environment) for number in range(len(group))]


def test_each_process_gets_its_share():
    """One GPU for each, or an equal number, in the order of the processes of a machine, whoever started them."""
    assert shares(reports(*[("a", ALL)] * 8)) == [[gpu] for gpu in range(8)]
    assert shares(reports(*[("a", ALL)] * 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    two_nodes = reports(("a", "01"), ("a", "01"), ("b", "01"), ("b", "01"))
    assert shares(two_nodes) == [[0], [1], [0], [1]]
    cyclic = reports(("a", "01"), ("b", "01"), ("a", "01"), ("b", "01"))
    assert shares(cyclic) == [[0], [0], [1], [1]]


@pytest.mark.parametrize(
    ("group", "environment"),
    [
        (reports(("a", ALL), ("b", ALL)), {}),
        (reports(("a", "0"), ("a", "1")), {}),
        (reports(("a", "0"), ("a", "0")), {}),
        (reports(("a", "0123"), ("a", "4567")), {}),
        (reports(("a", "01"), ("a", "01")), {"SLURM_GPUS_PER_TASK": "2"}),
        (reports(("a", "01"), ("a", "01")), {"SLURM_TRES_PER_TASK": "cpu=8,gres/gpu=2"}),
        (reports(("a", ()), ("a", ())), {}),
    ],
    ids=[
        "one-on-each-machine",
        "own-by-variable",
        "own-by-cgroup",
        "own-halves",
        "gpus-per-task",
        "tres-per-task",
        "no-gpus",
    ],
)
def test_own_gpus_are_kept(group, environment):
    """A launcher that shows each process its own, or a process alone on a machine: all that it sees."""
    assert shares(group, **environment) == [None, None]


def test_a_task_with_cpus_alone_is_not_divided_by_slurm():
    """The control of `SLURM_TRES_PER_TASK`, which names CPUs as well."""
    group = reports(("a", "01"), ("a", "01"))
    assert shares(group, SLURM_TRES_PER_TASK="cpu=8") == [[0], [1]]


def test_gpus_that_do_not_divide_are_an_error():
    """Eight GPUs and three processes on a machine: every process, also of other machines, has the arithmetic."""
    group = reports(("b", ALL), *[("a", ALL)] * 3)
    for number in range(4):
        with pytest.raises(ConfigError, match="8 / 3") as caught:
            local_device_ids(number, group, {})
        assert "host-a" in str(caught.value)


def test_visible_gpus(tmp_path):
    """Variables of CUDA and ROCm come before device files; CUDA's list ends at an invalid entry."""
    dev, nodes = tmp_path / "dev", tmp_path / "nodes"
    dev.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (dev / name).touch()
    assert visible_gpus({}, dev, nodes) == ("nvidia0", "nvidia1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, dev, nodes) == ("1",)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, dev, nodes) == ()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, dev, nodes) == ("0",)
    assert visible_gpus({"ROCR_VISIBLE_DEVICES": "0,1"}, tmp_path, nodes) == ("0", "1")
    for node, gpu_id in (("0", "0"), ("1", "51022"), ("2", "4097")):  # the first is a CPU
        (nodes / node).mkdir(parents=True)
        (nodes / node / "gpu_id").write_text(f"{gpu_id}\n")
    assert visible_gpus({}, tmp_path, nodes) == ("1", "2")


@pytest.mark.parametrize("name", ["JAX_LOCAL_DEVICE_IDS", "JAX_CUDA_VISIBLE_DEVICES"])
def test_a_division_of_the_user_stays(name):
    """JAX reads its own variables; the control divides."""
    gpus = ("0", "1", "2", "3")
    reports = [Report(i, 2, "node1", "a", gpus) for i in range(2)]
    assert local_device_ids(1, reports, {name: "0"}) is None
    assert local_device_ids(1, reports, {}) == [2, 3]
