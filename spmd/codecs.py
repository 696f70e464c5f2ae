"""Codecs: arrays in fewer bits, for what is stored or sent.

| codec | bits of an element | error |
|---|---|---|
| `int8` | 8, and a float32 for each block | 1/254 of the block's largest magnitude |
| `fp8` | 8 (e4m3), and a float32 for each block | 1/16 of the element, 1/2^18 of the block's largest magnitude |
| `int4` | 4, and a float32 for each block; only on the wire | 1/14 of the block's largest magnitude |
| `mask` | 1 | only whether the element is positive is kept: what the derivative of a ReLU needs |

Blocks are consecutive elements of one dimension. A block that is all zero has the scale 0 and stays zero; one with
an element that is not finite decodes to elements that are not.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Encoded(NamedTuple):
    """An encoded array: codes, and a float32 scale for each block; None for codes without scales."""

    codes: jax.Array
    scale: jax.Array | None


@dataclasses.dataclass(frozen=True)
class BlockCodec:
    """Codes of `dtype`, at most `top`, times a scale for each block.

    Example:
        >>> int8 = CODECS["int8"]
        >>> coded = int8.encode(jnp.array([0.0, -1.0, 0.5, 2.0]), 2)
        >>> coded.codes.tolist(), int8.decode(coded, "float32").tolist()[:2]
        ([0, -127, 32, 127], [0.0, -1.0])
    """

    name: str
    dtype: str
    top: float
    least: int = 32
    packed: int = 1
    """Codes in one element of `dtype`: 2 for `int4`, the first half of a block in the low bits."""

    def block_of(self, size: int) -> int:
        """Return the block for a dimension of this size, or 0 if `least` elements do not divide it."""
        return block_of(size, 128, least=self.least)

    def bits(self, block: int) -> float:
        """Return the bits of one element, with its part of the scale."""
        return 8 / self.packed + 32 / block

    def block_dim(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the dimension with the largest block, the last of those, and the block; 0 if none has one.

        Example:
            >>> [GATHERS["int8"].block_dim(shape) for shape in ((256, 16, 128), (4096, 16), (9, 9))]
            [(2, 128), (0, 128), (1, 0)]
        """
        block, dim = max((self.block_of(size), dim) for dim, size in enumerate(shape))
        return dim, block

    def encode(self, x: jax.Array, block: int, rows: int = 1, dim: int = -1) -> Encoded:
        """Encode `[..., n, …]` in blocks of dimension `dim`; scales are `[..., n / block, …]`, codes as `x` or packed.

        `rows` divides the last dimension but one. With 8 of them, a TPU moves nothing where blocks are of the last
        dimension: they are a tile of its memory. For other dimensions it is ignored.
        """
        axis = _axis(x.ndim, dim)
        blocks = _split(x, block, axis, rows).astype(jnp.float32)
        scale = jnp.max(jnp.abs(blocks), axis=axis, keepdims=True) / self.top
        # Clipped, because a cast of more than the largest float8 is not a number.
        codes = jnp.clip(blocks / jnp.where(scale > 0, scale, 1.0), -self.top, self.top)
        codes = (jnp.round(codes) if jnp.issubdtype(self.dtype, jnp.integer) else codes).astype(self.dtype)
        if self.packed == 2:
            low, high = jnp.split(codes, 2, axis=axis)
            codes = (low & 15) | (high << 4)
        return Encoded(_joined(codes, x.shape, axis), _joined(scale, x.shape, axis))

    def decode(self, coded: Encoded, dtype: Any, rows: int = 1, dim: int = -1) -> jax.Array:
        """Return the array of some codes; `rows` and `dim` as for `encode`. With 0 rows, scales are repeated."""
        codes, scale = coded
        assert scale is not None
        if (rows, self.packed, dim) == (0, 1, -1):
            return (codes.astype(jnp.float32) * jnp.repeat(scale, codes.shape[-1] // scale.shape[-1], -1)).astype(dtype)
        axis = _axis(codes.ndim, dim)
        blocks = _split(codes, codes.shape[dim] // scale.shape[dim], axis, rows)
        if self.packed == 2:  # shifts of signed integers keep the sign
            blocks = jnp.concatenate([(blocks << 4) >> 4, blocks >> 4], axis=axis)
        return _joined((blocks.astype(jnp.float32) * _split(scale, 1, axis, rows)).astype(dtype), codes.shape, axis)


@dataclasses.dataclass(frozen=True)
class GradientCodec(BlockCodec):
    """A codec with blocks along the model's width.

    Along a vocabulary or hidden units, gradients differ by orders of magnitude, and small ones beside large ones would
    be 0. Optimizers that divide by magnitudes, as Adam does, need those.
    """

    width: int = 0
    """The dimension of the width, from the end: -1 or -2; 0 where it is not known, for the shorter of the two."""

    def block_dim(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return a dimension and its block: the width, else another with a block; from 32 to 128 elements are one.

        Example:
            >>> [EXCHANGES["int8"].block_dim(shape) for shape in ((16, 4096), (48, 4096), (32, 4096, 64), (9, 9))]
            [(1, 128), (0, 48), (2, 64), (1, 0)]
        """
        blocks = {
            i - len(shape): n if self.least <= n <= 128 and n % self.packed == 0 else self.block_of(n)
            for i, n in enumerate(shape)
        }
        dim = max(blocks, key=lambda dim: (blocks[dim] > 0, dim == self.width, dim > -3, -shape[dim], dim))
        return dim + len(shape), blocks[dim]


def _axis(ndim: int, dim: int) -> int:
    """Return the axis of a block's elements in what `_split` returns: the last, or the one behind the dimension."""
    return -1 if dim % ndim == ndim - 1 else dim % ndim + 1


def _split(x: jax.Array, block: int, axis: int, rows: int) -> jax.Array:
    """Reshape `[..., s, n]` to `[..., s / rows, n / block, rows, block]`, else `[..., n / block, block, …]`."""
    if axis == -1:
        return x.reshape(*x.shape[:-2], -1, rows, x.shape[-1] // block, block).swapaxes(-3, -2)
    return x.reshape(*x.shape[: axis - 1], -1, block, *x.shape[axis:])


def _joined(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Undo `_split`, for an array of `shape` but for the number of elements of the dimension."""
    x, dim = (x.swapaxes(-3, -2), len(shape) - 1) if axis == -1 else (x, axis - 1)
    return x.reshape(*shape[:dim], -1, *shape[dim + 1 :])


@dataclasses.dataclass(frozen=True)
class MaskCodec:
    """One bit for each element, eight to a byte: decoded to 1 where it was positive, else to -1."""

    name: str = "mask"
    least: int = 8

    def block_of(self, size: int) -> int:
        """Return the elements of a byte, or 0 if they do not divide a dimension of this size."""
        return block_of(size, 8)

    def bits(self, block: int) -> float:
        """Return the bits of one element."""
        return 1

    def encode(self, x: jax.Array, block: int, rows: int = 1) -> Encoded:
        """Encode `[..., n]` as bytes `[..., n / 8]`."""
        return Encoded(jnp.packbits(x > 0, axis=-1), None)

    def decode(self, coded: Encoded, dtype: Any, rows: int = 1) -> jax.Array:
        """Return an array of 1 and -1."""
        return 2 * jnp.unpackbits(coded.codes, axis=-1).astype(dtype) - jnp.ones((), dtype)


Codec = BlockCodec | MaskCodec

CODECS: Mapping[str, Codec] = {
    "int8": BlockCodec("int8", "int8", 127.0),
    "fp8": BlockCodec("fp8", "float8_e4m3fn", 448.0),
    "mask": MaskCodec(),
}
"""Name → codec of stored activations."""

GATHERS = {name: codec for name, codec in CODECS.items() if isinstance(codec, BlockCodec)}
"""Name → codec of gathered parameters."""

EXCHANGES: Mapping[str, GradientCodec] = {
    "int8": GradientCodec("int8", "int8", 127.0),
    "int4": GradientCodec("int4", "int8", 7.0, packed=2),
}
"""Name → codec of the terms of a gradient's sum over devices."""


def block_of(size: int, largest: int, *, least: int = 8) -> int:
    """Return the largest block that divides a dimension, or 0 if that is too small to save memory.

    Example:
        >>> block_of(4096, 256), block_of(192, 256), block_of(50257, 256)
        (256, 64, 0)
    """
    block = math.gcd(size, largest)
    return block if block >= min(least, largest) else 0
