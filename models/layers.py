"""The layers that the model families share."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from spmd.annotate import checkpoint_layer, tokens_are_whole

Initializer = Callable[..., Array]


@functools.partial(jax.custom_vjp)
def matmul(x: Float[Array, "tokens in"], kernel: Float[Array, "in out"]) -> Float[Array, "tokens out"]:
    """`x @ kernel` in the dtype of `x`, whose weight gradient leaves the matmul in the kernel's dtype.

    With bfloat16 activations and float32 kernels, gradients are therefore summed over devices in float32.
    """
    return x @ kernel.astype(x.dtype)


def _matmul_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return matmul(x, kernel), (x, kernel)


def _matmul_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = saved
    leading = tuple(range(x.ndim - 1))
    dx = dy @ kernel.astype(dy.dtype).T
    dkernel = jax.lax.dot_general(x, dy, ((leading, leading), ((), ())), preferred_element_type=kernel.dtype)
    return dx, dkernel


matmul.defvjp(_matmul_forward, _matmul_backward)


def dense(x: Float[Array, "batch seq in"], kernel: Float[Array, "in out"]) -> Float[Array, "batch seq out"]:
    """A dense layer on every token, as one matmul over `[batch·seq, in]` where the sequence is whole.

    XLA:CPU runs that form about 18 % faster than a 3-D one; other backends do not care. Where the sequence is split
    over devices, merging it with the batch would move it, so it stays 3-D.
    """
    if not tokens_are_whole():
        return matmul(x, kernel)
    return matmul(x.reshape(-1, x.shape[-1]), kernel).reshape(*x.shape[:-1], kernel.shape[-1])


class Dense(nnx.Module):
    """A linear layer without bias; its `kernel` is `[in, out]`, drawn with variance 1 / in."""

    def __init__(self, inputs: int, outputs: int, *, scale: float = 1.0, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(scale * inputs**-0.5)
        self.kernel = nnx.Param(init(rngs.params(), (inputs, outputs), jnp.float32))

    def __call__(self, x: Float[Array, "batch seq in"]) -> Float[Array, "batch seq out"]:
        """`x @ kernel` on every token."""
        return dense(x, self.kernel[...])


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32 (Zhang & Sennrich, arXiv:1910.07467)."""

    def __init__(self, width: int, *, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "batch seq d"]) -> Float[Array, "batch seq d"]:
        """`x / rms(x) · scale`, in the dtype of `x`."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...][None, None]).astype(x.dtype)


def rotary_angles(positions: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Cosines and sines `[seq, head_dim / 2]` of rotary embeddings (Su et al., arXiv:2104.09864), in float32."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "batch seq heads dim"], angles: tuple[Array, Array]) -> Float[Array, "batch seq heads dim"]:
    """Rotates each head's pairs `(i, i + dim/2)` by their position's angle."""
    cos, sin = (a[None, :, None].astype(x.dtype) for a in angles)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def make_layers(make: Callable[[nnx.Rngs], nnx.Module], count: int, key: Array, *, stacked: bool) -> nnx.Module:
    """`count` equal layers: one module whose parameters have a leading layer dimension, or a list of modules.

    Layer *i* draws from `jax.random.split(key, count)[i]`, so both forms start bitwise equal.
    """
    keys = jax.random.split(key, count)
    if not stacked:
        return nnx.List([make(nnx.Rngs(k)) for k in keys])
    graph = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))[0]
    return nnx.merge(graph, jax.vmap(lambda k: nnx.state(make(nnx.Rngs(k))))(keys))


def run_layers(layers: nnx.Module, x: Array, *context: Array | tuple[Array, ...]) -> Array:
    """Runs layers made by `make_layers` one after the other, each under the plan's remat policy."""
    if isinstance(layers, nnx.List):
        for layer in layers:
            graph, state = nnx.split(layer)
            x = checkpoint_layer(_call(graph), scanned=False)(state, x, *context)
        return x
    graph, state = nnx.split(layers)
    body = checkpoint_layer(_call(graph), scanned=True)
    return jax.lax.scan(lambda x, layer: (body(layer, x, *context), None), x, state)[0]


def _call(graph: nnx.GraphDef) -> Callable[..., Array]:
    return lambda state, x, *context: nnx.merge(graph, state)(x, *context)
