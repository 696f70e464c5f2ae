"""Transforms of the gradient, and their states in checkpoints."""

from collections.abc import Iterable

from spmd.checkpoint.tree import OptionalState
from spmd.delayed_scaling.amax_history import AmaxHistory
from spmd.diloco.transform import DiLoCo
from spmd.loss_scaling.loss_scale import LossScale
from spmd.model_interface.grad_transform import GradTransform
from spmd.pipedream.grad_fn import InFlight
from spmd.powersgd.transform import PowerSGD

TRANSFORMS: tuple[type[GradTransform], ...] = (PowerSGD, InFlight, AmaxHistory, LossScale, DiLoCo)
"""All of them with a state. A checkpoint has it among the variables, by its name."""


def optional_states(transforms: Iterable[GradTransform], prefix: str = "") -> list[OptionalState]:
    """Return the optional states of checkpoints.

    A checkpoint may lack them, have them for another mesh, or have more than a resumed run needs.

    Args:
        prefix: Prefix of the paths of one of several networks, `name/`.
    """
    used = {transform.name: transform for transform in transforms}
    states = []
    for kind in TRANSFORMS:
        if not kind.optional:
            continue
        path = f"{prefix}variables/{kind.name}"
        if kind.name in used:
            transform = used[kind.name]
            states.append(OptionalState(path, transform.targets, transform.adapt))
        else:
            states.append(OptionalState(path))
    return states
