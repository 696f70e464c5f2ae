"""Leaving out steps that are not finite, or far too large: an optax wrapper, so the train step need not know of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmd.optim.two_phase import TwoPhaseOptimizer, phases, two_phase


class SkipState(NamedTuple):
    """How many updates were left out and taken (int32 scalars), their usual norm, and the inner optimizer's state."""

    skipped: jax.Array
    taken: jax.Array
    usual_norm: jax.Array
    inner: Any


def all_finite(gradients: Any) -> jax.Array:
    """Whether the norm of the whole gradient is neither NaN nor infinite: one boolean, the same on every device.

    Example:
        >>> bool(all_finite({"a": jnp.ones(2), "b": jnp.array(jnp.nan)}))
        False
    """
    return jnp.isfinite(optax.tree.norm(gradients))


def skipped_steps(state: Any) -> jax.Array:
    """How many updates have been left out, from an optimizer's state with a `SkipState` anywhere in it."""

    def found(node: Any) -> bool:
        return isinstance(node, SkipState)

    return next(node.skipped for node in jax.tree.leaves(state, is_leaf=found) if found(node))


def skip_bad_updates(
    optimizer: optax.GradientTransformation, factor: float = 0.0, window: int = 50
) -> TwoPhaseOptimizer:
    """The optimizer, which leaves out an update whose gradient has a norm that is NaN, infinite or far too large.

    Then no parameter and no moment changes, on any device, and the optimizer's own step count (and with it the learning
    rate's schedule) stands still. `optax.apply_if_finite` looks at elements instead, and lets through finite gradients
    whose squares overflow.

    Args:
        optimizer: What takes the other updates.
        factor: A norm above this many means of those before is too large; 0: none is.
        window: Over about how many updates that mean goes; before half as many were taken, no norm is too large.
    """
    first, rule = phases(optimizer)

    def init(params: Any) -> SkipState:
        zero = jnp.zeros((), jnp.int32)
        return SkipState(zero, zero, jnp.zeros((), jnp.float32), rule.init(params))

    def whole(gradients: Any) -> tuple[Any, dict[str, jax.Array]]:
        norm = optax.tree.norm(gradients)
        gradients, scalars = first(gradients)
        return gradients, {**scalars, "norm": norm}

    def update(
        gradients: Any, state: SkipState, params: Any = None, *, norm: Any = 0.0, **extra: Any
    ) -> tuple[Any, SkipState]:
        updates, inner = rule.update(gradients, state.inner, params, **extra)
        take = jnp.isfinite(norm)
        if factor:
            take &= (state.taken < window // 2) | (norm <= factor * state.usual_norm)
        updates = jax.tree.map(lambda u: jnp.where(take, u, jnp.zeros_like(u)), updates)
        inner = jax.tree.map(lambda new, old: jnp.where(take, new, old), inner, state.inner)
        taken = state.taken + take
        mean = state.usual_norm + (norm - state.usual_norm) / jnp.clip(taken, 1, window)
        usual = jnp.where(take, mean, state.usual_norm).astype(jnp.float32)
        return updates, SkipState(state.skipped + jnp.logical_not(take), taken, usual, inner)

    return two_phase(whole, optax.GradientTransformationExtraArgs(init, update))
