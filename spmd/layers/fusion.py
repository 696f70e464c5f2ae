"""Limits to what a compiler fuses."""

import jax

from spmd.plan.linear_call import linear_call


def unfused_gradient(x: jax.Array) -> jax.Array:
    """Return `x`; its gradient is not fused with the operations that read it.

    XLA:TPU fuses the gradient of a norm with the product that yields the last part of the norm's
    cotangent, and such a product is slower than both apart.
    """
    return linear_call(lambda x: x, jax.lax.optimization_barrier, x)
