"""Parameters of recurrent mixers besides kernels: vectors with a number for each head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from spmd.plan.fsdp import gathered, placement_of

_LEAST_STEP = 0.001
_LARGEST_STEP = 0.1


def of_heads(values: Float[Array, "heads"]) -> nnx.Param:
    """Return a parameter with a number for each head, in float32; it has no weight decay."""
    return nnx.Param(values.astype(jnp.float32), gathered_by_layer=True, added=True)


def whole(param: nnx.Param) -> Array:
    """Return a parameter gathered over `fsdp`, in its own dtype."""
    return gathered(param[...], placement_of(param.get_metadata("path", None)))


def initial_rates(key: Array, heads: int, least: float) -> Float[Array, "heads"]:
    """Return logarithms of rates of decay, uniform in [least, 16]."""
    return jnp.log(jax.random.uniform(key, (heads,), minval=least, maxval=16.0))


def initial_dt_bias(key: Array, heads: int) -> Float[Array, "heads"]:
    """Return biases of step sizes; their softplus is log-uniform in [0.001, 0.1].

    Source: arXiv:2312.00752, section 3.6.
    """
    low, high = jnp.log(_LEAST_STEP), jnp.log(_LARGEST_STEP)
    steps = jnp.exp(jax.random.uniform(key, (heads,), minval=low, maxval=high))
    return steps + jnp.log(-jnp.expm1(-steps))  # the inverse of softplus
