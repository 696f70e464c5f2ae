"""Parameters of each head of recurrent mixers: rates of decay, and biases of step sizes."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def vector_of_heads(values: Float[Array, "heads"]) -> nnx.Param:
    """Return a float32 parameter with one number for each head."""
    return nnx.Param(values.astype(jnp.float32), gathered_by_layer=True, added=True)


def initial_rates(key: Array, heads: int, least: float) -> Float[Array, "heads"]:
    """Return logarithms of rates of decay that are uniform in [least, 16]."""
    rates = jax.random.uniform(key, (heads,), minval=least, maxval=16.0)
    return jnp.log(rates)


def initial_dt_bias(key: Array, heads: int) -> Float[Array, "heads"]:
    """Return biases whose softplus is log-uniform in [0.001, 0.1] (arXiv:2312.00752, section 3.6)."""
    low, high = jnp.log(0.001), jnp.log(0.1)
    steps = jnp.exp(jax.random.uniform(key, (heads,), minval=low, maxval=high))
    return steps + jnp.log(-jnp.expm1(-steps))  # the inverse of softplus
