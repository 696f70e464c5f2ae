"""Settings of distillation: the loss of a model beside a larger, frozen teacher.

The loss of a token is (1 − w) · cross-entropy + w · T² · KL(teacher ‖ student), both distributions at
the temperature T (Hinton et al., arXiv:1503.02531, section 2).
"""

import dataclasses

from spmd.errors import ConfigError, check_fields


@dataclasses.dataclass(frozen=True)
class DistillationConfig:
    """Loss beside a teacher.

    Raises:
        ConfigError: A value is out of range.
    """

    weight: float = 0.5
    """Share w of the divergence; the rest is the cross-entropy."""
    temperature: float = 1.0
    """Temperature T of both distributions in the divergence."""
    reverse: bool = False
    """KL(student ‖ teacher) instead, which seeks modes (Gu et al., arXiv:2306.08543)."""

    def __post_init__(self) -> None:
        rules = {"weight": "above 0 and at most 1", "temperature": "above 0"}
        problems = check_fields(self, rules, "distillation.")
        if problems:
            raise ConfigError("Invalid distillation:", problems)
