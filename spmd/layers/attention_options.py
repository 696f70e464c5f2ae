"""Options of one attention call, the same for every kernel."""

import dataclasses

from spmd.errors import ConfigError, Problem, check_fields


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Mask and scores of attention."""

    window: int | None = None
    """The number of tokens that each query attends to, including its own; None for all preceding
    ones."""
    scale: float | None = None
    """Factor of the products of queries and keys; None for `dim ** -0.5`."""
    soft_cap: float | None = None
    """The cap of scores (`spmd.layers.soft_cap`); None for no cap."""
    causal: bool = True
    """Attend to preceding tokens only."""

    def __post_init__(self) -> None:
        rules = {"window": "at least 1", "scale": "above 0", "soft_cap": "above 0"}
        problems = check_fields(self, rules)
        if self.window is not None and not self.causal:
            problem = Problem(
                "window", "cannot be used with causal=False", fix="causal=True, or None"
            )
            problems.append(problem)
        if problems:
            raise ConfigError("Invalid attention options:", problems)
