"""Clipping of the gradient of an activation, token by token.

A loss is a sum over tokens, so the gradient of a token's vector does not depend on the size of the
batch, the microbatches or the mesh, and neither does what is clipped of it.
"""

import functools

import jax
import jax.numpy as jnp

from spmd.plan.scopes import clip_scope, in_scope


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def clip_gradient(
    x: jax.Array, limit: float, axes: tuple[str, ...] = (), name: str = ""
) -> jax.Array:
    """Return `x`, with a gradient of at most a norm in each vector along the last dimension.

    Args:
        x: `[…, features]`.
        limit: The largest norm; a longer vector is scaled down to it.
        axes: Manual axes that split the features.
        name: Name of the activation, for the scope of what is computed.

    Example:
        >>> x = jnp.array([[3.0, 4.0], [0.3, 0.4]])
        >>> weigh = lambda y: (clip_gradient(y, 1.0) * jax.lax.stop_gradient(x)).sum()
        >>> [f"{norm:.2f}" for norm in jnp.linalg.norm(jax.grad(weigh)(x), axis=1)]
        ['1.00', '0.50']
    """
    del limit, axes, name
    return x


def _forward(
    x: jax.Array, limit: float, axes: tuple[str, ...], name: str
) -> tuple[jax.Array, None]:
    del limit, axes, name
    return x, None


def _backward(
    limit: float, axes: tuple[str, ...], name: str, saved: None, gradient: jax.Array
) -> tuple[jax.Array]:
    del saved
    with in_scope(clip_scope(name)):
        squares = jnp.square(gradient.astype(jnp.float32)).sum(axis=-1, keepdims=True)
        if axes:
            squares = jax.lax.psum(squares, axes)
        scale = limit / jnp.maximum(jnp.sqrt(squares), limit)
        return ((gradient * scale.astype(gradient.dtype)).astype(gradient.dtype),)


clip_gradient.defvjp(_forward, _backward)
