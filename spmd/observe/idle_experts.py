"""Experts without tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.training.loop import Hook

NAMED = 8
"""Most experts in one line."""


class IdleExperts(Hook):
    """Name the experts without a token for `steps` steps, each once until a token chooses it.

    It reads the array `expert_load`, `[layer, expert]`, of a step's metrics.
    """

    def __init__(self, say: Callable[[str], None], steps: int = 100) -> None:
        self._say = say
        self._steps = steps
        self._idle: Any = 0

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Count the steps since each expert was chosen."""
        load = metrics.get("arrays", {}).get("expert_load")
        if load is None:
            return
        self._idle = np.where(load > 0, 0, self._idle + 1)
        found = []
        for layer, expert in np.argwhere(self._idle == self._steps):
            found.append(f"{expert} of layer {layer}")
        if not found:
            return
        named = ", ".join(found[:NAMED])
        if len(found) > NAMED:
            named += f" and {len(found) - NAMED} more"
        self._say(
            f"step {step}   no token in {self._steps} steps for expert {named}: "
            "raise the router's balance or bias_rate"
        )
