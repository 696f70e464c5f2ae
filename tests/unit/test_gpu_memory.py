"""One share of a GPU's memory for plans, searches and runs: the user's, or 0.9."""

import os

import pytest

from spmd.analysis.topology import parse_topology
from spmd.distributed import initialize as distributed
from spmd.distributed.gpu_memory import FRACTION_VARIABLE, read_fraction
from spmd.errors import ConfigError

OLD = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither variable is set."""
    monkeypatch.delenv(FRACTION_VARIABLE, raising=False)
    monkeypatch.delenv(OLD, raising=False)


def share(name: str) -> float:
    """Usable memory of a machine's device, as a share of the chip's."""
    topology = parse_topology(name)
    assert topology.memory is not None
    assert topology.chip.memory is not None
    return topology.memory / topology.chip.memory


def test_a_plan_counts_with_what_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.9 of the 79.6 GiB of an H100, or the user's share; all of a TPU. The control: 0.75 is another limit."""
    memory = parse_topology("h100:1x8").memory
    assert memory is not None
    assert memory / 2**30 == pytest.approx(71.7, abs=0.02)
    assert share("v5e:2x4") == 1
    for name in (FRACTION_VARIABLE, OLD):
        with monkeypatch.context() as context:
            context.setenv(name, "0.75")
            memory = parse_topology("h100:1x8").memory
            assert memory is not None
            assert memory / 2**30 == pytest.approx(59.7, abs=0.05)


@pytest.mark.parametrize(("name", "value"), [(FRACTION_VARIABLE, "0.5"), (OLD, "0.5"), ("", "0.9")])
def test_a_run_sets_what_the_plan_counted_with(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before JAX starts; the user's own variable stays the only one, as jaxlib refuses both."""
    if name:
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "_start_backends", lambda launch_args: [])
    distributed.initialize()
    set_now = {each: os.environ[each] for each in (FRACTION_VARIABLE, OLD) if each in os.environ}
    assert set_now == {name or FRACTION_VARIABLE: value}


def test_simulated_devices_set_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_start_backends", lambda launch_args: [])
    monkeypatch.setattr(distributed, "simulate_devices", lambda count: None)
    distributed.initialize(2)
    assert FRACTION_VARIABLE not in os.environ


def test_a_wrong_share_is_one_error() -> None:
    """Both names, and values that are no share, each with the fix."""
    with pytest.raises(ConfigError, match="is set twice") as caught:
        read_fraction({FRACTION_VARIABLE: "0.9", OLD: "much"})
    assert "is 'much', and no share" in str(caught.value)
    with pytest.raises(ConfigError, match="is '0', and no share"):
        read_fraction({OLD: "0"})
