"""Optimizers in two phases: a global phase on the whole gradient, and a phase for each parameter.

Clipping by the global norm and skipping non-finite updates need every gradient; Adam needs one parameter at a time. An
optimizer with separate phases can update parameters chunk by chunk (`spmd.training.offloaded_update`).
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

GlobalPhase = Callable[[Any], tuple[Any, dict[str, jax.Array]]]
"""Stateless function from the whole gradient to the new one, and to scalars: extra arguments of the second phase."""


class TwoPhaseOptimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation made by `two_phase`."""

    global_phase: GlobalPhase
    param_phase: optax.GradientTransformationExtraArgs


def two_phase(global_phase: GlobalPhase, param_phase: optax.GradientTransformation) -> TwoPhaseOptimizer:
    """Apply `param_phase`, whose update of one parameter depends on no other, to the gradient from `global_phase`.

    Example:
        >>> clip = optax.clip_by_global_norm(1.0)
        >>> optimizer = two_phase(lambda gradients: (clip.update(gradients, clip.init(None))[0], {}), optax.sgd(0.5))
        >>> optimizer.update({"w": jax.numpy.array([8.0])}, optimizer.init({"w": 0.0}))[0]["w"]
        Array([-0.5], dtype=float32)
    """
    inner = optax.with_extra_args_support(param_phase)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        gradients, scalars = global_phase(gradients)
        return inner.update(gradients, state, params, **extra, **scalars)

    optimizer = TwoPhaseOptimizer(inner.init, update)
    optimizer.global_phase, optimizer.param_phase = global_phase, inner
    return optimizer


def phases(optimizer: optax.GradientTransformation) -> tuple[GlobalPhase, optax.GradientTransformationExtraArgs]:
    """Return the two phases of any optimizer; the global phase may be the identity."""
    if isinstance(optimizer, TwoPhaseOptimizer):
        return optimizer.global_phase, optimizer.param_phase
    return lambda gradients: (gradients, {}), optax.with_extra_args_support(optimizer)
