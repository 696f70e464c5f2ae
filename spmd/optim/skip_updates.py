"""Optax wrapper to skip updates with a non-finite or far too large gradient norm."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmd.optim.two_phase import TwoPhaseOptimizer, phases, treatment_of, two_phase


class SkipState(NamedTuple):
    """Numbers of skipped and taken updates, the mean gradient norm, and the inner state.

    The numbers are int32 scalars, the norm is a float32 scalar.
    """

    skipped: jax.Array
    taken: jax.Array
    usual_norm: jax.Array
    inner: Any


def skipped_steps(state: Any) -> jax.Array:
    """Return the number of skipped updates from an optimizer's state with a `SkipState` in it."""
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
    """Wrap an optimizer to skip updates with a NaN, infinite or far too large gradient norm.

    A skipped update changes no parameter, no moment and no step count (and so no learning rate), on
    any device. `optax.apply_if_finite` tests elements instead, so it misses finite gradients whose
    squares overflow.

    A norm above `factor` times the mean norm of `window` updates is too large; 0 disables the test,
    which starts after half a window.
    """
    inner_global_phase, param_phase = phases(optimizer)

    def init(params: Any) -> SkipState:
        zero = jnp.zeros((), jnp.int32)
        usual_norm = jnp.zeros((), jnp.float32)
        inner = param_phase.init(params)
        return SkipState(skipped=zero, taken=zero, usual_norm=usual_norm, inner=inner)

    def global_phase(gradients: Any) -> tuple[Any, dict[str, jax.Array]]:
        norm = optax.tree.norm(gradients)
        gradients, scalars = inner_global_phase(gradients)
        return gradients, {**scalars, "norm": norm}

    def update(
        gradients: Any, state: SkipState, params: Any = None, *, norm: Any = 0.0, **extra: Any
    ) -> tuple[Any, SkipState]:
        updates, after = param_phase.update(gradients, state.inner, params, **extra)
        take = jnp.isfinite(norm)
        if factor:
            is_early = state.taken < window // 2
            take &= is_early | (norm <= factor * state.usual_norm)

        def updated_or_zero(update: jax.Array) -> jax.Array:
            return jnp.where(take, update, jnp.zeros_like(update))

        def new_or_old(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(take, new, old)

        updates = jax.tree.map(updated_or_zero, updates)
        inner = jax.tree.map(new_or_old, after, state.inner)
        taken = state.taken + take
        mean = state.usual_norm + (norm - state.usual_norm) / jnp.clip(taken, 1, window)
        usual_norm = jnp.where(take, mean, state.usual_norm).astype(jnp.float32)
        skipped = state.skipped + jnp.logical_not(take)
        return updates, SkipState(skipped, taken, usual_norm, inner)

    skipping = optax.GradientTransformationExtraArgs(init, update)
    return two_phase(global_phase, skipping, treatment_of(optimizer))
