"""Scores that grow no further than a cap: `cap · tanh(scores / cap)` (Gemma 2, arXiv:2408.00118, section 2)."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def soft_capped(scores: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """The scores between −cap and cap.

    Args:
        scores: Of any shape.
        cap: Above 0; None for scores as they are.

    Example:
        >>> soft_capped(jnp.array([0.0, 1000.0]), 30.0)
        Array([ 0., 30.], dtype=float32)
    """
    return scores if cap is None else jnp.tanh(scores / cap) * cap


def before_soft_cap(gradient: Float[Array, "..."], capped: Float[Array, "..."], cap: float | None) -> Array:
    """The gradient of scores, from that of what `soft_capped` made of them: times `1 − (capped / cap)²`.

    Args:
        gradient: Of the capped scores.
        capped: The capped scores.
        cap: As for `soft_capped`.

    Example:
        >>> float(before_soft_cap(jnp.array(2.0), jnp.array(15.0), 30.0))
        1.5
    """
    return gradient if cap is None else gradient * (1.0 - jnp.square(capped / cap))
