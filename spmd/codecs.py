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

`quantize` and `dequantize` convert numbers to codes and back, for arrays that are stored or sent
here and for those that are multiplied in fewer bits (`spmd.layers.quantized_matmul`). Moments of
optimizers have codes of another kind (`spmd.optim.quantized`).
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


def quantize(
    x: jax.Array,
    largest: jax.Array,
    dtype: str,
    top: float,
    *,
    has_exact_scales: bool = False,
    divides: bool = True,
    clips: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Quantize numbers to codes of `dtype`, the nearest to `x / scale`; return codes and scale.

    Bfloat16 is converted to float8 as it is, all else in float32. Numbers are divided by the scale,
    or multiplied by its rounded inverse, `x · (1 / scale)`, which takes one division for each
    scale. The two differ by rounding, unless the scale is a power of two.

    Args:
        largest: The largest magnitude to represent, for each scale; it broadcasts to `x`.
        top: The code of the largest magnitude.
        has_exact_scales: Whether scales are rounded up to powers of two, so that numbers are
            divided exactly; else they are `largest / top`.
        divides: Whether numbers are divided.
        clips: Whether numbers beyond `largest` are clipped. A cast of more than the largest float8
            is not a number.

    Example:
        >>> x = jnp.array([0.5, -3.0])
        >>> quantize(x, jnp.float32(3), "int8", 127.0)[0].tolist()
        [21, -127]
        >>> codes, scale = quantize(x, jnp.float32(3), "int8", 127.0, has_exact_scales=True)
        >>> codes.tolist(), float(scale), dequantize(codes, scale, "float32").tolist()
        ([16, -96], 0.03125, [0.5, -3.0])
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    scale = largest / top
    if has_exact_scales:
        scale = power_of_two(scale)
    if is_integer or x.dtype != jnp.bfloat16:
        x = x.astype(jnp.float32)
    divisor = divisor_of(scale)
    if divides:
        codes = x / divisor
    else:
        inverse = 1 / divisor
        codes = x * inverse.astype(x.dtype)
    if clips:
        codes = jnp.clip(codes, -top, top)
    if is_integer:
        codes = jnp.round(codes)
    return codes.astype(dtype), scale


def dequantize(codes: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Return codes times their scales, multiplied in float32.

    Scales broadcast to the shape of the codes.
    """
    return (codes.astype(jnp.float32) * scale).astype(dtype)


def divisor_of(scale: jax.Array) -> jax.Array:
    """Return the divisor of numbers with a scale: 1 for the scale 0 of zeros, so they stay zero."""
    return jnp.where(scale > 0, scale, 1.0)


def largest_code(dtype: str) -> float:
    """Return the largest finite number of a dtype.

    Example:
        >>> [largest_code(dtype) for dtype in ("int8", "float8_e4m3fn", "float8_e5m2")]
        [127.0, 448.0, 57344.0]
    """
    if jnp.issubdtype(dtype, jnp.integer):
        return float(jnp.iinfo(dtype).max)
    return float(jnp.finfo(dtype).max)


def power_of_two(x: jax.Array) -> jax.Array:
    """Round up to a power of two, exactly; zero stays zero.

    Example:
        >>> power_of_two(jnp.array([0.0, 0.75, 1.0, 1.5])).tolist()
        [0.0, 1.0, 1.0, 2.0]
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    exponent = (bits + 0x7FFFFF) & 0x7F800000
    return jax.lax.bitcast_convert_type(exponent, jnp.float32)


def split_blocks(x: jax.Array, blocks: Mapping[int, int]) -> tuple[jax.Array, tuple[int, ...]]:
    """Divide dimensions into blocks; return the dimensions of a block's elements as well.

    `[…, n, …]` becomes `[…, n / block, block, …]`.

    Args:
        blocks: Dimension → the elements of a block, a divisor of its size.

    Example:
        >>> blocks, inner = split_blocks(jnp.zeros((8, 5, 6)), {0: 4, 2: 3})
        >>> blocks.shape, inner
        ((2, 4, 5, 2, 3), (1, 4))
    """
    shape = list[int]()
    inner = list[int]()
    for dim, size in enumerate(x.shape):
        if dim not in blocks:
            shape.append(size)
            continue
        inner.append(len(shape) + 1)
        shape += [size // blocks[dim], blocks[dim]]
    return x.reshape(shape), tuple(inner)


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
        largest = jnp.max(jnp.abs(blocks), axis=axis, keepdims=True)
        codes, scale = quantize(blocks, largest, self.dtype, self.top)
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
            return dequantize(values, jnp.repeat(scale, block, -1), dtype)
        axis = _axis(codes.ndim, dim)
        block = codes.shape[dim] // scale.shape[dim]
        blocks = _split(codes, block, axis, rows)
        if self.packed == 2:  # shifts of signed integers keep the sign
            low = (blocks << 4) >> 4
            high = blocks >> 4
            blocks = jnp.concatenate([low, high], axis=axis)
        values = blocks.astype(jnp.float32)
        scales = _split(scale, 1, axis, rows)
        decoded = dequantize(values, scales, dtype)
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
    blocks, _ = split_blocks(x, {axis - 1: block})
    return blocks


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
    "int8": BlockCodec("int8", "int8", largest_code("int8")),
    "fp8": BlockCodec("fp8", "float8_e4m3fn", largest_code("float8_e4m3fn")),
    "mask": MaskCodec(),
}
"""Name → codec of stored activations."""

GATHERS = {name: codec for name, codec in CODECS.items() if isinstance(codec, BlockCodec)}
"""Name → codec of gathered parameters."""

EXCHANGES: Mapping[str, GradientCodec] = {
    "int8": GradientCodec("int8", "int8", largest_code("int8")),
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
