"""Optax wrapper that skips updates whose gradient norm is not finite or far too large."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmd.optim.two_phase import TwoPhaseOptimizer, phases, treatment_of, two_phase


class SkipState(NamedTuple):
    """Numbers of skipped and taken updates (int32 scalars), mean gradient norm, and the inner optimizer's state."""

    skipped: jax.Array
    taken: jax.Array
    usual_norm: jax.Array
    inner: Any


def skipped_steps(state: Any) -> jax.Array:
    """Return the number of skipped updates from an optimizer's state that contains a `SkipState`."""
    return next(_skip_states(state)).skipped


def counts_skips(state: Any) -> bool:
    """Return whether an optimizer's state has a count of skipped updates."""
    return next(_skip_states(state), None) is not None


def _skip_states(state: Any) -> Iterator[SkipState]:
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, SkipState))
    return (node for node in nodes if isinstance(node, SkipState))


def skip_bad_updates(
    optimizer: optax.GradientTransformation, factor: float = 0.0, window: int = 50
) -> TwoPhaseOptimizer:
    """Wrap an optimizer to skip updates whose gradient norm is NaN, infinite or far too large.

    A skipped update changes no parameter, no moment and no step count (and so no learning rate), on any device.
    `optax.apply_if_finite` tests elements instead, so it misses finite gradients whose squares overflow.

    A norm above `factor` times the mean norm of `window` updates is too large; 0 disables the test, which starts after
    half a window.
    """
    inner_global_phase, param_phase = phases(optimizer)

    def init(params: Any) -> SkipState:
        zero = jnp.zeros((), jnp.int32)
        return SkipState(zero, zero, jnp.zeros((), jnp.float32), param_phase.init(params))

    def global_phase(gradients: Any) -> tuple[Any, dict[str, jax.Array]]:
        norm = optax.tree.norm(gradients)
        gradients, scalars = inner_global_phase(gradients)
        return gradients, {**scalars, "norm": norm}

    def update(
        gradients: Any, state: SkipState, params: Any = None, *, norm: Any = 0.0, **extra: Any
    ) -> tuple[Any, SkipState]:
        updates, inner = param_phase.update(gradients, state.inner, params, **extra)
        take = jnp.isfinite(norm)
        if factor:
            take &= (state.taken < window // 2) | (norm <= factor * state.usual_norm)
        updates = jax.tree.map(lambda u: jnp.where(take, u, jnp.zeros_like(u)), updates)
        inner = jax.tree.map(lambda new, old: jnp.where(take, new, old), inner, state.inner)
        taken = state.taken + take
        mean = state.usual_norm + (norm - state.usual_norm) / jnp.clip(taken, 1, window)
        usual = jnp.where(take, mean, state.usual_norm).astype(jnp.float32)
        return updates, SkipState(state.skipped + jnp.logical_not(take), taken, usual, inner)

    skipping = optax.GradientTransformationExtraArgs(init, update)
    return two_phase(global_phase, skipping, treatment_of(optimizer))
