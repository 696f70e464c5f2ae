"""The layers that the model families share."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from spmd.annotate import checkpoint_layer

Initializer = Callable[..., Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dense(
    x: Float[Array, "batch seq in"], kernel: Float[Array, "in out"], dtype: Any = None
) -> Float[Array, "batch seq out"]:
    """`x @ kernel` in the dtype of `x`, whose weight gradient leaves its matmul in the kernel's dtype.

    With bfloat16 activations and float32 kernels, gradients are therefore summed over devices in float32.

    Args:
        x: Activations.
        kernel: Weights; cast to the dtype of `x`.
        dtype: The product's dtype, that of `x` by default.
    """
    return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=dtype or x.dtype)


def _dense_forward(x: Array, kernel: Array, dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    return dense(x, kernel, dtype), (x, kernel)


def _dense_backward(dtype: Any, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = saved
    dy = dy.astype(x.dtype)
    dkernel = jnp.einsum("...i,...o->io", x, dy, preferred_element_type=kernel.dtype)
    return jnp.einsum("...o,io->...i", dy, kernel.astype(x.dtype)), dkernel


dense.defvjp(_dense_forward, _dense_backward)


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


def causal_attention(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    block: int = 128,
) -> Float[Array, "batch seq heads dim"]:
    """Each token attends to itself and those before it; softmax in float32.

    Queries go `block` at a time against the keys that any of them can see, so nearly half of the scores are never
    computed, and no buffer is sequence² in size. Query heads that share a key/value head are next to each other.
    """
    seq = query.shape[1]
    blocks = []
    for start in range(0, seq, block):
        end = min(start + block, seq)
        visible = np.tril(np.ones((end - start, end), bool), k=start)[None, None]
        blocks.append(jax.nn.dot_product_attention(query[:, start:end], key[:, :end], value[:, :end], mask=visible))
    return jnp.concatenate(blocks, axis=1)


def make_layers(make: Callable[[nnx.Rngs], nnx.Module], count: int, key: Array, *, stacked: bool) -> nnx.Module:
    """`count` equal layers: one module whose parameters have a leading layer dimension, or a list of modules.

    Layer *i* draws from `jax.random.split(key, count)[i]`, so both forms start bitwise equal.
    """
    keys = jax.random.split(key, count)
    if not stacked:
        return nnx.List([make(nnx.Rngs(k)) for k in keys])
    graph = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))[0]
    return nnx.merge(graph, jax.vmap(lambda k: nnx.state(make(nnx.Rngs(k))))(keys))


def run_layers(layers: nnx.Module, x: Array, *context: Array | tuple[Array, ...], unroll: int = 1) -> Array:
    """Runs layers made by `make_layers` one after the other, each under the plan's remat policy.

    Stacked layers are scanned, `unroll` of them in each turn of the loop.
    """
    if isinstance(layers, nnx.List):
        for layer in layers:
            graph, state = nnx.split(layer)
            x = checkpoint_layer(_call(graph), scanned=False)(state, x, *context)
        return x
    graph, state = nnx.split(layers)
    body = checkpoint_layer(_call(graph), scanned=True)
    return jax.lax.scan(lambda x, layer: (body(layer, x, *context), None), x, state, unroll=unroll)[0]


def _call(graph: nnx.GraphDef) -> Callable[..., Array]:
    return lambda state, x, *context: nnx.merge(graph, state)(x, *context)
