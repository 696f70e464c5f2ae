"""Optimizers in two phases: a global phase on the whole gradient, and a phase for each parameter.

Clipping by the global norm and skipping non-finite updates need every gradient; Adam needs one
parameter at a time. An optimizer with separate phases can update parameters chunk by chunk
(`spmd.host_memory.update`).
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
"""Stateless function from the whole gradient to the new one, and to scalars: extra arguments of the
second phase."""


class TwoPhaseOptimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation made by `two_phase`."""

    global_phase: GlobalPhase
    param_phase: optax.GradientTransformationExtraArgs
    treatment: Treatment | None


def two_phase(
    global_phase: GlobalPhase,
    param_phase: optax.GradientTransformation,
    treatment: Treatment | None = None,
) -> TwoPhaseOptimizer:
    """Apply `param_phase` to the gradient from `global_phase`.

    In `param_phase`, the update of one parameter depends on no other. A `treatment` describes, for
    plans, how each parameter is updated; the state is made only where nothing contradicts it.

    Example:
        >>> clip = optax.clip_by_global_norm(1.0)
        >>> def global_phase(gradients):
        ...     return clip.update(gradients, clip.init(None))[0], {}
        >>> optimizer = two_phase(global_phase, optax.sgd(0.5))
        >>> optimizer.update({"w": jax.numpy.array([8.0])}, optimizer.init({"w": 0.0}))[0]["w"]
        Array([-0.5], dtype=float32)
    """
    inner = optax.with_extra_args_support(param_phase)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        gradients, scalars = global_phase(gradients)
        return inner.update(gradients, state, params, **extra, **scalars)

    def init(params: Any) -> Any:
        if treatment is not None:
            _check_treatment(treatment, params)
        return inner.init(params)

    optimizer = TwoPhaseOptimizer(init, update)
    optimizer.global_phase = global_phase
    optimizer.param_phase = inner
    optimizer.treatment = treatment
    return optimizer


def _check_treatment(treatment: Treatment, params: Any) -> None:
    """Raise ConfigError if the parameters contradict the rules about them."""
    shapes = {}
    for path, param in tree.flatten(params).items():
        if hasattr(param, "shape"):
            shapes[path] = param.shape
    problems = treatment.problems(shapes)
    if problems:
        raise ConfigError("The optimizer does not fit these parameters:", problems)


def treatment_of(optimizer: optax.GradientTransformation) -> Treatment | None:
    """Return the treatment of parameters by an optimizer of a config; None for any other."""
    if isinstance(optimizer, TwoPhaseOptimizer):
        return optimizer.treatment
    return None


def phases(
    optimizer: optax.GradientTransformation,
) -> tuple[GlobalPhase, optax.GradientTransformationExtraArgs]:
    """Return the two phases of any optimizer; the global phase may be the identity."""
    if isinstance(optimizer, TwoPhaseOptimizer):
        return optimizer.global_phase, optimizer.param_phase

    def identity(gradients: Any) -> tuple[Any, dict[str, jax.Array]]:
        return gradients, {}

    return identity, keep_slow_params(optimizer)
