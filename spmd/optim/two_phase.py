"""Optimizers in two phases: a global phase on the whole gradient, and a phase for each parameter.

Clipping by the global norm and skipping non-finite updates need every gradient; Adam needs one parameter at a time. An
optimizer with separate phases can update parameters chunk by chunk (`spmd.host_memory.update`).
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from spmd import tree
from spmd.errors import ConfigError
from spmd.optim.lookahead import keep_slow_params
from spmd.optim.treatment import Treatment

GlobalPhase = Callable[[Any], tuple[Any, dict[str, jax.Array]]]
"""Stateless function from the whole gradient to the new one, and to scalars: extra arguments of the second phase."""


class TwoPhaseOptimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation made by `two_phase`."""

    global_phase: GlobalPhase
    param_phase: optax.GradientTransformationExtraArgs
    treatment: Treatment | None


def two_phase(
    global_phase: GlobalPhase, param_phase: optax.GradientTransformation, treatment: Treatment | None = None
) -> TwoPhaseOptimizer:
    """Apply `param_phase`, whose update of one parameter depends on no other, to the gradient from `global_phase`.

    A `treatment` is the description of what it does to each parameter, for plans; its state is made only where nothing
    contradicts it.

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

    def init(params: Any) -> Any:
        if treatment is not None:
            shapes = {path: param.shape for path, param in tree.flatten(params).items() if hasattr(param, "shape")}
            if problems := treatment.problems(shapes):
                raise ConfigError("The optimizer does not fit these parameters:", problems)
        return inner.init(params)

    optimizer = TwoPhaseOptimizer(init, update)
    optimizer.global_phase, optimizer.param_phase, optimizer.treatment = global_phase, inner, treatment
    return optimizer


def treatment_of(optimizer: optax.GradientTransformation) -> Treatment | None:
    """Return what an optimizer of a config does to each parameter; None for any other optimizer."""
    return optimizer.treatment if isinstance(optimizer, TwoPhaseOptimizer) else None


def phases(optimizer: optax.GradientTransformation) -> tuple[GlobalPhase, optax.GradientTransformationExtraArgs]:
    """Return the two phases of any optimizer; the global phase may be the identity."""
    if isinstance(optimizer, TwoPhaseOptimizer):
        return optimizer.global_phase, optimizer.param_phase
    return lambda gradients: (gradients, {}), keep_slow_params(optimizer)
