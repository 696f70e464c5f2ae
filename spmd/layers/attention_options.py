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
    chunk: int | None = None
    """The number of tokens of a chunk of a document: a query attends within its own chunk only
    (config.json's `attention_chunk_size` of Llama 4); None for no chunks."""

    def __post_init__(self) -> None:
        rules = {
            "window": "at least 1",
            "scale": "above 0",
            "soft_cap": "above 0",
            "chunk": "at least 1",
        }
        problems = check_fields(self, rules)
        for name in ("window", "chunk"):
            if getattr(self, name) is not None and not self.causal:
                what = "cannot be used with causal=False"
                problems.append(Problem(name, what, fix="causal=True, or None"))
        if self.window is not None and self.chunk is not None:
            problem = Problem("chunk", "cannot be used with a window", fix="only one of the two")
            problems.append(problem)
        if problems:
            raise ConfigError("Invalid attention options:", problems)
