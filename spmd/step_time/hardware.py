"""Speeds and rates of a machine's devices, or an error where they are unknown."""

from spmd.analysis.topology import Topology
from spmd.chips import ClosedRates, Hardware, Rates
from spmd.errors import ConfigError, Problem


def hardware_of(topology: Topology) -> Hardware:
    """Return the speeds of a machine's devices; raise `ConfigError` for simulated ones."""
    speeds = topology.chip.speeds
    if speeds is None:
        fix = "a TPU or a GPU, such as v5e:16x16 or h100:16x8"
        raise _unknown(topology, "speeds", fix)
    return speeds


def closed_rates(topology: Topology) -> ClosedRates:
    """Return the rates of the closed forms on a machine; raise `ConfigError` if there are none."""
    rates = topology.chip.closed
    if rates is None:
        raise _unknown(topology, "rates", _OF_KIN)
    return rates


def compiled_rates(topology: Topology) -> Rates:
    """Return the rates of programs on a machine; raise `ConfigError` if there are none."""
    rates = topology.chip.compiled
    if rates is None:
        raise _unknown(topology, "rates of compiled programs", _OF_KIN)
    return rates


_OF_KIN = "those of its kin, in its entry of spmd/chips.py"


def _unknown(topology: Topology, what: str, fix: str) -> ConfigError:
    text = f"is {topology}: no {what} are known of {topology.kind}"
    problem = Problem("topology", text, fix=fix)
    return ConfigError("The time of a step cannot be predicted:", [problem])
