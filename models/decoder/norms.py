"""Norms of activations, computed in float32."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from spmd.models.decoder.sizes import NormSpec, Sizes
from spmd.plan.fsdp import gathered, placement_of

Norm = nnx.Module
"""A callable module from `[*tokens, d]` to the same shape and dtype."""

Width = int | tuple[int, ...]
"""Shape of a norm's parameters."""


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32 (Zhang & Sennrich, arXiv:1910.07467).

    Without `scale` there is no parameter.

    Args:
        width: Size of the last dimension, or of the last ones: each of the others has a scale of
            its own.
        eps: Added to the mean square.
        offset: Added to the scale.
        has_scale: Learn a scale.
    """

    def __init__(
        self, width: Width, *, eps: float, offset: float = 0.0, has_scale: bool = True
    ) -> None:
        self.scale = _vector_if(has_scale, width, 1.0 - offset)
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
        """Return `x / rms(x) · (offset + scale)` in the dtype of `x`."""
        if self.scale is None:
            return _rms_norm_unscaled(x, self.eps)
        return _rms_norm(x, self.scale[...], self.eps, self.offset)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(2, 3))
def _rms_norm(x: Array, scale: Array, eps: float, offset: float) -> Array:
    wide = x.astype(jnp.float32)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(square + eps)
    if offset:
        scale = scale + offset
    wide = wide * _for_tokens(scale, x)
    return wide.astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
def _rms_norm_unscaled(x: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(square + eps)
    return wide.astype(x.dtype)


class LayerNorm(nnx.Module):
    """Normalisation to mean 0 and variance 1 in float32 (Ba et al., arXiv:1607.06450).

    Scale and bias are learned, if it has them; `width` is as in `RMSNorm`.
    """

    def __init__(
        self,
        width: Width,
        *,
        eps: float,
        offset: float = 0.0,
        has_scale: bool = True,
        has_bias: bool = True,
    ) -> None:
        self.scale = _vector_if(has_scale, width, 1.0 - offset)
        self.bias = _vector_if(has_bias, width, 0.0)
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
        """Return `(x − mean(x)) / std(x) · (offset + scale) + bias` in the dtype of `x`."""
        scale = None
        if self.scale is not None:
            scale = self.scale[...]
        bias = None
        if self.bias is not None:
            bias = self.bias[...]
        return _layer_norm(x, scale, bias, self.eps, self.offset)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4))
def _layer_norm(
    x: Array, scale: Array | None, bias: Array | None, eps: float, offset: float
) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(axis=-1, keepdims=True)
    variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(variance + eps)
    if scale is not None:
        if offset:
            scale = scale + offset
        wide = wide * _for_tokens(scale, x)
    if bias is not None:
        wide = wide + _for_tokens(bias, x)
    return wide.astype(x.dtype)


class GatedRMSNorm(nnx.Module):
    """Root-mean-square normalisation with a gate, before output projections of recurrent mixers.

    Args:
        width: Number of channels.
        groups: Number of groups of consecutive channels, each normalised by itself.
        eps: Added to the mean square.
        gate_first: Multiply by the gate before the normalisation (Mamba 2, arXiv:2405.21060), not
            after it (gated delta nets, arXiv:2412.06464).
    """

    def __init__(self, width: int, *, groups: int = 1, eps: float, gate_first: bool) -> None:
        self.scale = _vector_if(True, width, 1.0)
        self.groups = groups
        self.eps = eps
        self.gate_first = gate_first

    def __call__(
        self, x: Float[Array, "*tokens d"], gate: Float[Array, "*tokens d"]
    ) -> Float[Array, "*tokens d"]:
        """Return `norm(x · silu(gate)) · scale`, or `norm(x) · scale · silu(gate)`, in `x`'s dtype."""
        assert self.scale is not None
        placed = placement_of(self.scale.get_metadata("path", None))
        scale = gathered(self.scale[...], placed)
        return _gated_norm(x, gate, scale, self.groups, self.eps, self.gate_first)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4, 5))
def _gated_norm(
    x: Array, gate: Array, scale: Array, groups: int, eps: float, gate_first: bool
) -> Array:
    opened = jax.nn.silu(gate.astype(jnp.float32))
    wide = x.astype(jnp.float32)
    if gate_first:
        wide = wide * opened
    grouped = wide.reshape(*x.shape[:-1], groups, -1)
    square = jnp.mean(grouped * grouped, axis=-1, keepdims=True)
    grouped = grouped * jax.lax.rsqrt(square + eps)
    wide = grouped.reshape(x.shape) * _for_tokens(scale, x)
    if not gate_first:
        wide = wide * opened
    return wide.astype(x.dtype)


def _vector_if(learned: bool, width: Width, value: float) -> nnx.Param | None:
    """Return equal values as a parameter; None if it is not learned."""
    if not learned:
        return None
    values = jnp.full(width, value, jnp.float32)
    if values.ndim > 1:
        return nnx.Param(values, gathered_by_layer=True, added=True)  # no matrix for optimizers
    return nnx.Param(values, gathered_by_layer=True)


def _for_tokens(values: Float[Array, "*heads d"], x: Array) -> Array:
    return jnp.expand_dims(values, tuple(range(x.ndim - values.ndim)))


def make_norm(width: Width, sizes: Sizes, norm: NormSpec | None = None) -> RMSNorm | LayerNorm:
    """Return a norm over the last dimension; of the network's kind by default."""
    norm = norm or sizes.norm
    if norm.kind == "rms":
        return RMSNorm(width, eps=sizes.norm_eps, offset=norm.offset, has_scale=norm.scale)
    return LayerNorm(
        width,
        eps=sizes.norm_eps,
        offset=norm.offset,
        has_scale=norm.scale,
        has_bias=norm.bias,
    )


def norm_params(norm: NormSpec) -> int:
    """Return the number of parameters of a norm for each channel."""
    return int(norm.scale) + int(norm.bias)


def norm_leaves(norm: NormSpec) -> list[str]:
    """Return the names of a norm's parameters."""
    leaves = []
    if norm.scale:
        leaves.append("scale")
    if norm.bias:
        leaves.append("bias")
    return leaves
