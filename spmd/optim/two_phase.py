"""An optimizer in two stages: what is decided from the whole gradient, and what is done to each parameter.

Clipping by the global norm and leaving out steps that are not finite look at every gradient; Adam looks at one
parameter at a time. An optimizer that keeps the two apart can be run on one part of the parameters after another
(`spmd.train.offloaded_update`).
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

GlobalPhase = Callable[[Any], tuple[Any, dict[str, jax.Array]]]
"""The whole gradient → the gradient to go on with, and scalars that the rule takes as extra arguments."""


class TwoPhaseOptimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation that knows its two stages; made by `two_phase`.

    Attributes:
        whole: The first stage, which keeps no state.
        rule: The second stage, an optax transformation whose update of one parameter depends on no other.
    """

    whole: GlobalPhase
    rule: optax.GradientTransformationExtraArgs


def two_phase(whole: GlobalPhase, rule: optax.GradientTransformation) -> TwoPhaseOptimizer:
    """The optimizer that runs `rule` on what `whole` makes of the gradient; its state is the rule's.

    Example:
        >>> clip = optax.clip_by_global_norm(1.0)
        >>> optimizer = two_phase(lambda gradients: (clip.update(gradients, clip.init(None))[0], {}), optax.sgd(0.5))
        >>> optimizer.update({"w": jax.numpy.array([8.0])}, optimizer.init({"w": 0.0}))[0]["w"]
        Array([-0.5], dtype=float32)
    """
    inner = optax.with_extra_args_support(rule)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        gradients, scalars = whole(gradients)
        return inner.update(gradients, state, params, **extra, **scalars)

    optimizer = TwoPhaseOptimizer(inner.init, update)
    optimizer.whole, optimizer.rule = whole, inner
    return optimizer


def phases(optimizer: optax.GradientTransformation) -> tuple[GlobalPhase, optax.GradientTransformationExtraArgs]:
    """The two stages of an optimizer; any that is not `TwoPhaseOptimizer` is all rule."""
    if isinstance(optimizer, TwoPhaseOptimizer):
        return optimizer.whole, optimizer.rule
    return lambda gradients: (gradients, {}), optax.with_extra_args_support(optimizer)
