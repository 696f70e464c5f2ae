"""Leaving out steps that are not finite: an optax wrapper, so the train step need not know of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmd.staged import Staged, staged, stages


class SkipState(NamedTuple):
    """How many updates have been left out (int32 scalar), and the inner optimizer's state."""

    skipped: jax.Array
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


def skip_nonfinite(optimizer: optax.GradientTransformation) -> Staged:
    """The optimizer, which leaves out an update whose gradient has a norm that is NaN or infinite.

    Then no parameter and no moment changes, on any device, and the optimizer's own step count (and with it the learning
    rate's schedule) stands still. `optax.apply_if_finite` looks at elements instead, and lets through finite gradients
    whose squares overflow.
    """

    first, rule = stages(optimizer)

    def init(params: Any) -> SkipState:
        return SkipState(jnp.zeros((), jnp.int32), rule.init(params))

    def whole(gradients: Any) -> tuple[Any, dict[str, jax.Array]]:
        finite = all_finite(gradients)
        gradients, scalars = first(gradients)
        return gradients, {**scalars, "finite": finite}

    def update(
        gradients: Any, state: SkipState, params: Any = None, *, finite: Any = True, **extra: Any
    ) -> tuple[Any, SkipState]:
        updates, inner = rule.update(gradients, state.inner, params, **extra)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, jnp.zeros_like(u)), updates)
        inner = jax.tree.map(lambda new, old: jnp.where(finite, new, old), inner, state.inner)
        return updates, SkipState(state.skipped + jnp.logical_not(finite), inner)

    return staged(whole, optax.GradientTransformationExtraArgs(init, update))
