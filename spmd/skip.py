"""Leaving out steps that are not finite: an optax wrapper, so the train step need not know of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class SkipState(NamedTuple):
    """How many updates have been left out (int32 scalar), and the inner optimizer's state."""

    skipped: jax.Array
    inner: Any


def skip_nonfinite(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, which leaves out an update whose gradient has a norm that is NaN or infinite.

    Then no parameter and no moment changes, on any device, and the optimizer's own step count (and with it the learning
    rate's schedule) stands still. `optax.apply_if_finite` looks at elements instead, and lets through finite gradients
    whose squares overflow.
    """

    def init(params: Any) -> SkipState:
        return SkipState(jnp.zeros((), jnp.int32), optimizer.init(params))

    def update(gradients: Any, state: SkipState, params: Any = None) -> tuple[Any, SkipState]:
        finite = jnp.isfinite(optax.tree.norm(gradients))
        updates, inner = optimizer.update(gradients, state.inner, params)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, jnp.zeros_like(u)), updates)
        inner = jax.tree.map(lambda new, old: jnp.where(finite, new, old), inner, state.inner)
        return updates, SkipState(state.skipped + ~finite, inner)

    return optax.GradientTransformation(init, update)
