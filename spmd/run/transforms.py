"""The transforms of the gradient that runs know, and their states in checkpoints."""

from collections.abc import Iterable

from spmd.checkpoint.tree import OptionalState
from spmd.delayed_scaling.magnitudes import MagnitudeHistory
from spmd.loss_scaling.loss_scale import LossScale
from spmd.model_api.grad_transform import GradTransform
from spmd.pipedream.grad_fn import InFlight
from spmd.powersgd.transform import PowerSGD

TRANSFORMS: tuple[type[GradTransform], ...] = (PowerSGD, InFlight, MagnitudeHistory, LossScale)
"""All that keep a state. A checkpoint has it among the variables, by its name."""


def optional_states(transforms: Iterable[GradTransform]) -> list[OptionalState]:
    """Return what a checkpoint may lack, have for another mesh, or have beside what a resumed run needs."""
    used = {transform.name: transform for transform in transforms}
    states = []
    for kind in TRANSFORMS:
        if kind.optional and kind.name in used:
            states.append(OptionalState(f"variables/{kind.name}", used[kind.name].targets, used[kind.name].adapt))
        elif kind.optional:
            states.append(OptionalState(f"variables/{kind.name}"))
    return states
