"""Soft cap of scores: `cap · tanh(scores / cap)` (Gemma 2, arXiv:2408.00118, section 2)."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def soft_capped(scores: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """Bound scores between −cap and cap; a cap of None changes nothing.

    Example:
        >>> soft_capped(jnp.array([0.0, 1000.0]), 30.0)
        Array([ 0., 30.], dtype=float32)
    """
    if cap is None:
        return scores
    return jnp.tanh(scores / cap) * cap


def before_soft_cap(
    gradient: Float[Array, "..."], capped: Float[Array, "..."], cap: float | None
) -> Array:
    """Return the gradient of scores from the capped scores' gradient: times `1 − (capped / cap)²`.

    Example:
        >>> float(before_soft_cap(jnp.array(2.0), jnp.array(15.0), 30.0))
        1.5
    """
    if cap is None:
        return gradient
    return gradient * (1.0 - jnp.square(capped / cap))
