"""Fields of a run's config for DiLoCo."""

import dataclasses
from typing import Literal, get_args

import optax

from spmd.errors import ConfigError, Problem, check_fields

OuterCodec = Literal["float32", "int8", "int4"]


@dataclasses.dataclass(frozen=True)
class DiLoCoConfig:
    """Replicas along mesh.data, and their outer optimizer: SGD with Nesterov momentum."""

    every: int = 0
    """Steps between two synchronizations of a parameter; 0: one model, ordinary data
    parallelism."""
    fragments: int = 1
    """Parts of the parameters, each synchronized at a step of its own (streaming DiLoCo)."""
    codec: OuterCodec = "float32"
    """How outer gradients are sent: float32, int8 or int4; they are summed in float32."""
    keep: float = 0.0
    """Share of its own parameters that a replica keeps in a synchronization."""
    learning_rate: float = 0.7
    """Learning rate of the outer optimizer."""
    momentum: float = 0.9
    """Momentum of the outer optimizer; 0 for none."""

    def __post_init__(self) -> None:
        rules = {
            "every": "at least 0",
            "fragments": "at least 1",
            "codec": get_args(OuterCodec),
            "keep": "at least 0 and below 1",
            "learning_rate": "above 0 and finite",
            "momentum": "at least 0 and below 1",
        }
        problems = check_fields(self, rules, "diloco.")
        changed = [
            field.name
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        if changed and not self.every:
            what = f"is 0, and {', '.join(changed)} would act on nothing"
            problems.append(Problem("diloco.every", what, fix="a number of steps, such as 32"))
        if problems:
            raise ConfigError("Invalid DiLoCo:", problems)

    def outer_optimizer(self) -> optax.GradientTransformation:
        """Return the outer optimizer."""
        if not self.momentum:
            return optax.sgd(self.learning_rate)
        return optax.sgd(self.learning_rate, self.momentum, nesterov=True)
