"""Codecs: arrays in fewer bits, for what is stored or sent.

| codec | bits of an element | error |
|---|---|---|
| `int8` | 8, and a float32 for each block | 1/254 of the block's largest magnitude |
| `fp8` | 8 (e4m3), and a float32 for each block | 1/16 of the element, 1/2^18 of the block's largest magnitude |
| `mask` | 1 | only whether the element is positive is kept: what the derivative of a ReLU needs |

Blocks are consecutive elements of the last dimension. A block that is all zero has the scale 0 and stays zero.
"""

import dataclasses
import math
from collections.abc import Mapping
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

    def block_of(self, size: int) -> int:
        """Return the block for a dimension of this size, or 0 if `least` elements do not divide it."""
        return block_of(size, 128, least=self.least)

    def bits(self, block: int) -> float:
        """Return the bits of one element, with its part of the scale."""
        return 8 + 32 / block

    def encode(self, x: jax.Array, block: int, rows: int = 1) -> Encoded:
        """Encode `[..., n]` in blocks of `n`; codes have the shape of `x`, scales `[..., n / block]`.

        `rows` divides the last dimension but one. With 8 of them, a TPU moves nothing: they are a tile of its memory.
        """
        blocks = _tiles(x, block, rows).astype(jnp.float32)
        scale = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / self.top
        # Clipped, because a cast of more than the largest float8 is not a number.
        codes = jnp.clip(blocks / jnp.where(scale > 0, scale, 1.0), -self.top, self.top)
        codes = jnp.round(codes) if jnp.issubdtype(self.dtype, jnp.integer) else codes
        return Encoded(_untiled(codes.astype(self.dtype), x.shape), _untiled(scale, (*x.shape[:-1], -1)))

    def decode(self, coded: Encoded, dtype: Any, rows: int = 1) -> jax.Array:
        """Return the array of some codes; `rows` as for `encode`."""
        codes, scale = coded
        assert scale is not None
        blocks = _tiles(codes, codes.shape[-1] // scale.shape[-1], rows).astype(jnp.float32)
        return _untiled((blocks * _tiles(scale, 1, rows)).astype(dtype), codes.shape)


def _tiles(x: jax.Array, block: int, rows: int) -> jax.Array:
    """Reshape `[..., s, n]` to `[..., s / rows, n / block, rows, block]`."""
    return x.reshape(*x.shape[:-2], -1, rows, x.shape[-1] // block, block).swapaxes(-3, -2)


def _untiled(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x.swapaxes(-3, -2).reshape(shape)


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
"""Name → codec."""


def block_of(size: int, largest: int, *, least: int = 8) -> int:
    """Return the largest block that divides a dimension, or 0 if that is too small to save memory.

    Example:
        >>> block_of(4096, 256), block_of(192, 256), block_of(50257, 256)
        (256, 64, 0)
    """
    block = math.gcd(size, largest)
    return block if block >= min(least, largest) else 0
