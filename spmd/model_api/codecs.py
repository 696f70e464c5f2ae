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

    def encode(self, x: jax.Array, block: int, rows: int = 1, dim: int = -1) -> Encoded:
        """Encode `[..., n, …]` in blocks of dimension `dim`; scales are `[..., n / block, …]`, codes as `x` or packed.

        `rows` divides the last dimension but one. With 8 of them, a TPU moves nothing where blocks are of the last
        dimension: they are a tile of its memory. For other dimensions it is ignored.
        """
        tiles = _Tiles(x.ndim, dim, rows)
        blocks = tiles.of(x, block).astype(jnp.float32)
        scale = jnp.max(jnp.abs(blocks), axis=tiles.axis, keepdims=True) / self.top
        # Clipped, because a cast of more than the largest float8 is not a number.
        codes = jnp.clip(blocks / jnp.where(scale > 0, scale, 1.0), -self.top, self.top)
        codes = (jnp.round(codes) if jnp.issubdtype(self.dtype, jnp.integer) else codes).astype(self.dtype)
        if self.packed == 2:
            low, high = jnp.split(codes, 2, axis=tiles.axis)
            codes = (low & 15) | (high << 4)
        return Encoded(tiles.joined(codes, x.shape), tiles.joined(scale, x.shape))

    def decode(self, coded: Encoded, dtype: Any, rows: int = 1, dim: int = -1) -> jax.Array:
        """Return the array of some codes; `rows` and `dim` as for `encode`. With 0 rows, scales are repeated."""
        codes, scale = coded
        assert scale is not None
        if (rows, self.packed, dim) == (0, 1, -1):
            return (codes.astype(jnp.float32) * jnp.repeat(scale, codes.shape[-1] // scale.shape[-1], -1)).astype(dtype)
        tiles = _Tiles(codes.ndim, dim, rows)
        blocks = tiles.of(codes, codes.shape[dim] // scale.shape[dim])
        if self.packed == 2:  # shifts of signed integers keep the sign
            blocks = jnp.concatenate([(blocks << 4) >> 4, blocks >> 4], axis=tiles.axis)
        return tiles.joined((blocks.astype(jnp.float32) * tiles.of(scale, 1)).astype(dtype), codes.shape)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Reshape that gives the blocks of a dimension an axis of their own."""

    ndim: int
    dim: int
    rows: int

    @property
    def axis(self) -> int:
        """The axis of a block's elements."""
        return -1 if self._is_last else self.dim % self.ndim + 1

    @property
    def _is_last(self) -> bool:
        return self.dim % self.ndim == self.ndim - 1

    def of(self, x: jax.Array, block: int) -> jax.Array:
        """Reshape `[..., s, n]` to `[..., s / rows, n / block, rows, block]`, else `[..., n / block, block, …]`."""
        if self._is_last:
            return x.reshape(*x.shape[:-2], -1, self.rows, x.shape[-1] // block, block).swapaxes(-3, -2)
        at = self.dim % self.ndim
        return x.reshape(*x.shape[:at], -1, block, *x.shape[at + 1 :])

    def joined(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Undo `of`, for an array of `shape` but for the number of elements of the dimension."""
        x, at = x.swapaxes(-3, -2) if self._is_last else x, self.dim % self.ndim
        return x.reshape(*shape[:at], -1, *shape[at + 1 :])


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

WIRES: Mapping[str, BlockCodec] = {
    "int8": BlockCodec("int8", "int8", 127.0),
    "fp8": BlockCodec("fp8", "float8_e4m3fn", 448.0),
    "int4": BlockCodec("int4", "int8", 7.0, packed=2),
}
"""Name → codec of what devices send to each other."""


def block_dim(shape: Sequence[int], codec: BlockCodec) -> tuple[int, int]:
    """Return the dimension of an array to form blocks of, and the block: the largest, of the longest dimension.

    The block is 0 if no dimension has one.

    Example:
        >>> block_dim((16, 4096), WIRES["int8"]), block_dim((4096, 16), WIRES["int8"]), block_dim((9, 9), WIRES["int8"])
        ((1, 128), (0, 128), (1, 0))
    """
    block, _, dim = max((codec.block_of(size), size, dim) for dim, size in enumerate(shape))
    return dim, block


def block_of(size: int, largest: int, *, least: int = 8) -> int:
    """Return the largest block that divides a dimension, or 0 if that is too small to save memory.

    Example:
        >>> block_of(4096, 256), block_of(192, 256), block_of(50257, 256)
        (256, 64, 0)
    """
    block = math.gcd(size, largest)
    return block if block >= min(least, largest) else 0
