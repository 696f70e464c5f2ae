"""Codecs: arrays in fewer bits, to store or to send.

| codec | bits of an element | error |
|---|---|---|
| `int8` | 8 | 1/254 of the block's largest magnitude |
| `fp8` | 8 (e4m3) | 1/16 of the element, 1/2^18 of the block's largest magnitude |
| `int4` | 4; only on the wire | 1/14 of the block's largest magnitude |
| `mask` | 1 | only the sign is kept, for the derivative of a ReLU: positive, or not |

All but `mask` also have a float32 scale for each block.
Blocks are consecutive elements of one dimension. A block that is all zero has the scale 0 and stays
zero; one with an element that is not finite decodes to elements that are not.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Encoded(NamedTuple):
    """An encoded array: codes, and a float32 scale for each block.

    The scale is None for codes without scales.
    """

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
        """Return the block for a dimension of this size; 0 if `least` elements do not divide it."""
        return block_of(size, 128, least=self.least)

    def bits(self, block: int) -> float:
        """Return the bits of one element, with its part of the scale."""
        return 8 / self.packed + 32 / block

    def block_dim(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the last dimension with the largest block, and the block; 0 without one.

        Example:
            >>> int8 = GATHERS["int8"]
            >>> int8.block_dim((256, 16, 128)), int8.block_dim((4096, 16)), int8.block_dim((9, 9))
            ((2, 128), (0, 128), (1, 0))
        """
        blocks = [self.block_of(size) for size in shape]
        largest = max(blocks)
        dims = [dim for dim, block in enumerate(blocks) if block == largest]
        return dims[-1], largest

    def encode(self, x: jax.Array, block: int, rows: int = 1, dim: int = -1) -> Encoded:
        """Encode `[..., n, …]` in blocks of dimension `dim`.

        Scales are `[..., n / block, …]`, codes have the shape of `x`, or are packed. `rows` divides
        the last dimension but one. With 8 of them, a TPU moves nothing where blocks are of the last
        dimension: they are a tile of its memory. For other dimensions it is ignored.
        """
        axis = _axis(x.ndim, dim)
        blocks = _split(x, block, axis, rows).astype(jnp.float32)
        scale = jnp.max(jnp.abs(blocks), axis=axis, keepdims=True) / self.top
        codes = blocks / jnp.where(scale > 0, scale, 1.0)
        # Clipped, because a cast of more than the largest float8 is not a number.
        codes = jnp.clip(codes, -self.top, self.top)
        if jnp.issubdtype(self.dtype, jnp.integer):
            codes = jnp.round(codes)
        codes = codes.astype(self.dtype)
        if self.packed == 2:
            low, high = jnp.split(codes, 2, axis=axis)
            codes = (low & 15) | (high << 4)
        return Encoded(_joined(codes, x.shape, axis), _joined(scale, x.shape, axis))

    def decode(self, coded: Encoded, dtype: Any, rows: int = 1, dim: int = -1) -> jax.Array:
        """Return the array of some codes; `rows` and `dim` as for `encode`.

        With 0 rows, scales are repeated.
        """
        codes, scale = coded
        assert scale is not None
        if (rows, self.packed, dim) == (0, 1, -1):
            block = codes.shape[-1] // scale.shape[-1]
            values = codes.astype(jnp.float32)
            return (values * jnp.repeat(scale, block, -1)).astype(dtype)
        axis = _axis(codes.ndim, dim)
        block = codes.shape[dim] // scale.shape[dim]
        blocks = _split(codes, block, axis, rows)
        if self.packed == 2:  # shifts of signed integers keep the sign
            low = (blocks << 4) >> 4
            high = blocks >> 4
            blocks = jnp.concatenate([low, high], axis=axis)
        values = blocks.astype(jnp.float32)
        scales = _split(scale, 1, axis, rows)
        decoded = (values * scales).astype(dtype)
        return _joined(decoded, codes.shape, axis)


@dataclasses.dataclass(frozen=True)
class GradientCodec(BlockCodec):
    """A codec with blocks along the model's width.

    Along a vocabulary or hidden units, gradients differ by orders of magnitude, and small ones
    beside large ones would be 0. Optimizers that divide by magnitudes, as Adam does, need those.
    """

    width: int = 0
    """The dimension of the width, from the end: -1 or -2; 0 where it is not known, for the shorter
    of the two."""

    def block_dim(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return a dimension and its block: the width, else another with a block.

        A dimension of 32 to 128 elements is one block.

        Example:
            >>> int8 = EXCHANGES["int8"]
            >>> int8.block_dim((16, 4096)), int8.block_dim((48, 4096))
            ((1, 128), (0, 48))
            >>> int8.block_dim((32, 4096, 64)), int8.block_dim((9, 9))
            ((2, 64), (1, 0))
        """
        blocks = {}
        for index, size in enumerate(shape):
            blocks[index - len(shape)] = self._gradient_block(size)

        def preference(dim: int) -> tuple[bool, bool, bool, int, int]:
            is_of_kernel = dim > -3  # and not of a batch of kernels, such as experts
            return blocks[dim] > 0, dim == self.width, is_of_kernel, -shape[dim], dim

        dim = max(blocks, key=preference)
        return dim + len(shape), blocks[dim]

    def _gradient_block(self, size: int) -> int:
        """Return the block for a dimension of this size; 0 for none."""
        if self.least <= size <= 128 and size % self.packed == 0:
            return size
        return self.block_of(size)


def _axis(ndim: int, dim: int) -> int:
    """Return the axis of a block's elements after `_split`: the last, or the one after `dim`."""
    dim %= ndim
    if dim == ndim - 1:
        return -1
    return dim + 1


def _split(x: jax.Array, block: int, axis: int, rows: int) -> jax.Array:
    """Divide a dimension into blocks.

    `[..., s, n]` becomes `[..., s / rows, n / block, rows, block]` for blocks of the last
    dimension, and `[..., n, …]` becomes `[..., n / block, block, …]` for others.
    """
    if axis == -1:
        tiles = x.reshape(*x.shape[:-2], -1, rows, x.shape[-1] // block, block)
        return tiles.swapaxes(-3, -2)
    return x.reshape(*x.shape[: axis - 1], -1, block, *x.shape[axis:])


def _joined(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Undo `_split`, for an array of `shape` but for the number of elements of the dimension."""
    dim = axis - 1
    if axis == -1:
        dim = len(shape) - 1
        x = x.swapaxes(-3, -2)
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
        bits = jnp.unpackbits(coded.codes, axis=-1).astype(dtype)
        return 2 * bits - jnp.ones((), dtype)


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
    """Return the largest block to divide a dimension into; 0 if too small to save memory.

    Example:
        >>> block_of(4096, 256), block_of(192, 256), block_of(50257, 256)
        (256, 64, 0)
    """
    block = math.gcd(size, largest)
    if block < min(least, largest):
        return 0
    return block
