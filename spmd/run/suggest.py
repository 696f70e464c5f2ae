"""Settings under which a step fits into the memory of a chip that it exceeds."""

import dataclasses
from typing import Any

from spmd.analysis.topology import Topology
from spmd.errors import SpmdError
from spmd.run.build import TrainSetup, make_setup
from spmd.run.preflight import check_microbatches, estimate_step


def suggest_memory_settings(setup: TrainSetup, topology: Topology) -> list[tuple[str, int]]:
    """Return flags with which the step fits by the estimate, and the bytes per device.

    The cheapest settings are tried first: ZeRO 3, rematerialization, offloading of optimizer state and then of
    parameters, and smaller microbatches; each alone and together with the previous ones.
    """
    config, together = setup.config, dict[str, Any]()
    smaller = [("accumulate", config.accumulate * parts) for parts in (2, 4, 8)]
    offload = [("offload", ("optimizer_state",)), ("offload", ("optimizer_state", "params"))]
    for name, value in (("zero", 3), ("remat", "full"), *offload, *smaller):
        if getattr(config, name) == value:
            continue
        found: list[tuple[str, int]] = []
        alone, combined = {name: value}, {**together, name: value}
        for settings in [alone] if alone == combined else [alone, combined]:
            try:
                other = make_setup(dataclasses.replace(config, **settings), setup.mesh)
                check_microbatches(other)
                total = estimate_step(other, topology.platform).total
            except SpmdError:  # such as a batch that does not divide into so many microbatches
                continue
            if topology.memory is None or total <= topology.memory:
                found.append((" ".join(_flag(*setting) for setting in settings.items()), total))
            if settings.keys() >= together.keys():
                together = settings
        if found:
            return found
    return []


def _flag(name: str, value: Any) -> str:
    return f"--{name} {' '.join(value) if isinstance(value, tuple) else value}"
