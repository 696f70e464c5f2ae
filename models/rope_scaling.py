"""Rotary positions for longer contexts than a model was first trained on."""

import dataclasses

import numpy as np

from spmd.errors import ConfigError, Problem


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those of the first training (Llama 3.1).

    Source: Grattafiori et al., arXiv:2407.21783, section 3.4.2 and the published code of the model. A frequency that
    turns fewer than `low_frequency_factor` times in the original context is divided by `factor`, one that turns more
    than `high_frequency_factor` times stays as it is, and between them the two are mixed.
    """

    factor: float = 1.0
    """How many times longer low frequencies get; 1 for no scaling."""
    low_frequency_factor: float = 1.0
    """Turns in the original context up to which a frequency is divided."""
    high_frequency_factor: float = 4.0
    """Turns in the original context from which a frequency stays."""
    original_context: int = 8192
    """Tokens of the sequences of the first training."""

    def __post_init__(self) -> None:
        problems = [
            Problem(f"rope_scaling.{name}", f"is {getattr(self, name)}", fix=f"{least} or more")
            for name, least in (("factor", 1), ("original_context", 1))
            if not getattr(self, name) >= least
        ]
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if not 0 < low < high:
            arithmetic = f"low {low}, high {high}"
            fix = "0 < low_frequency_factor < high_frequency_factor"
            problems.append(Problem("rope_scaling", "has factors in no order", arithmetic, fix))
        if problems:
            raise ConfigError("Rotary frequencies cannot be scaled so:", problems)

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """The frequencies, in radians for each token, after scaling.

        Example:
            >>> RopeScaling(8.0).scaled(np.array([1.0, 1e-5])).tolist()
            [1.0, 1.25e-06]
        """
        if self.factor == 1:
            return frequencies
        turns = self.original_context * frequencies / (2 * np.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)
