"""A chip of one's own is a TOML file, whose problems are all said at once."""

import pytest

from spmd.analysis.topology import missing_extra, parse_topology
from spmd.chips import CHIPS
from spmd.errors import ConfigError, MeshError
from spmd.step_time.hardware import closed_rates, hardware_of

ALONE = """
platform = "cuda"
device_kind = "NVIDIA Mine"
memory = 32e9

[speeds]
peak = 200e12
memory_bandwidth = 1000e9
link = 32e9
network = 1e9
host = 32e9
"""


@pytest.fixture(autouse=True)
def chips(monkeypatch):
    """Remove the chips of files after a test."""
    before = dict(CHIPS)
    yield
    CHIPS.clear()
    CHIPS.update(before)


def parse(tmp_path, text, name="mine.toml"):
    """Return the machine of 2 hosts with 8 GPUs of a file's chip."""
    file = tmp_path / name
    file.write_text(text)
    return parse_topology(f"{file}:2x8")


def test_a_file_is_a_chip(tmp_path):
    """All fields are the file's; its time is not calibrated, and the next parse knows it by name."""
    machine = parse(tmp_path, ALONE)
    assert (str(machine), machine.devices, machine.hosts) == ("mine:2x8", 16, 2)
    assert machine.chip.memory == 32 * 10**9
    assert hardware_of(machine).peak == 200e12
    assert closed_rates(machine).spread == 0.3
    assert "not calibrated" in machine.chip.calibration
    assert parse_topology("mine:1x8").chip is machine.chip
    absent = missing_extra(machine)
    assert absent is not None
    assert "[gpu]" in absent.what


def test_a_file_takes_fields_from_a_chip(tmp_path):
    """Of tables too; control: the chip itself keeps its own."""
    text = 'like = "l40s"\nmemory = 16e9\n[speeds]\nlink = 64e9\n'
    machine = parse(tmp_path, text)
    kin = CHIPS["l40s"]
    assert kin.speeds is not None
    assert hardware_of(machine).link == 64e9
    assert hardware_of(machine).peak == kin.speeds.peak
    assert (kin.speeds.link, kin.memory) == (32e9, 46068 * 2**20)
    assert machine.chip.gpu == kin.gpu
    assert machine.chip.rates_of == kin.rates_of


def test_own_rates_are_calibrated(tmp_path):
    """A table of rates replaces those of its kin."""
    machine = parse(tmp_path, 'like = "a100"\n[closed]\nmatmul = 0.6\nspread = 0.1\n')
    assert (closed_rates(machine).matmul, closed_rates(machine).spread) == (0.6, 0.1)
    assert machine.chip.calibration == ""


def test_all_problems_of_a_file_are_said_at_once(tmp_path):
    """Unknown and missing fields, types, signs and texts."""
    text = """
platform = "tpu"
memory = -1
pcie = "no"
memmory = 5
[speeds]
peak = "fast"
memory_bandwith = 1e12
products = {int4 = 0.5}
[gpu]
capability = 9
"""
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, text)
    found = {problem.where for problem in caught.value.problems}
    assert found == {
        *("platform", "memory", "pcie", "memmory", "device_kind"),
        *("speeds.peak", "speeds.memory_bandwith", "speeds.products"),
        *("speeds.memory_bandwidth", "speeds.link", "speeds.network", "speeds.host"),
        *("gpu.capability", "gpu.cores", "gpu.l2_cache", "gpu.clock_ghz", "gpu.shared_memory"),
    }
    assert 'did you mean "memory"?' in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("mine.toml", "peak =", "is not TOML"),
        ("h100.toml", ALONE, "has the name of a chip, h100"),
        ("mine.toml", 'like = "h10"', 'did you mean "h100"'),
        ("mine.toml", 'like = "v4"', "like: is"),
    ],
)
def test_other_files_are_refused(tmp_path, name, text, complaint):
    """Text that is no TOML, names that are taken, and TPUs; control: a missing file."""
    with pytest.raises(ConfigError, match=r".") as caught:
        parse(tmp_path, text, name)
    assert complaint in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        parse_topology(f"{tmp_path}/absent.toml:1x8")


def test_the_shape_of_a_file_is_checked(tmp_path):
    """As for any other chip."""
    (tmp_path / "mine.toml").write_text(ALONE)
    with pytest.raises(MeshError, match="mine:HOSTSxGPUS"):
        parse_topology(f"{tmp_path}/mine.toml:8")
