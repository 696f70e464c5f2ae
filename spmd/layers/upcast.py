"""Wider dtypes for products of 16-bit floats."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def upcast_float16(*arrays: Array) -> tuple[Array, ...]:
    """Cast float16 to float32: only GPUs support JAX's accumulation of float16 products."""
    wide = []
    for x in arrays:
        if x.dtype == np.float16:
            x = x.astype(jnp.float32)
        wide.append(x)
    return tuple(wide)
