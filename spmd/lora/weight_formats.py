"""Formats of frozen weights in 4 or 8 bits. They are stored and sent so, and computed with decoded.

| format | bits of a weight | one scale for |
|---|---|---|
| `nf4` | 4.13 | 64 inputs of an output: 8 bits, times a float32 for 256 of them |
| `mxfp4` | 4.25 | 32 inputs of an output: a power of two |
| `int8` | 8 | an output |

`nf4` is NormalFloat with double quantization (QLoRA, Dettmers et al., arXiv:2305.14314, section 3),
with the blocks and the codes of `bitsandbytes`, but for scales between two codes: adapters trained
here fit the weights that it decodes. `mxfp4` is of the OCP Microscaling Formats (MX) Specification
1.0: elements E2M1, scales E8M0.

A weight is `[in, out]`, with any dimensions before. Two codes of 4 bits share a byte: the first
half of a block is in the low bits.
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from spmd.codecs import dequantize, divisor_of, quantize, split_blocks

_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The values of NormalFloat (QLoRA, appendix E): 16 quantiles of a normal distribution."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN = 8
_EXPONENT_OF_LARGEST = 2  # 6 is 1.5 · 2²
_NOT_A_NUMBER = 255  # the scale of blocks that are not finite

_SCALES = 256
"""Scales of `nf4` that share a scale of their own."""
_DECADES = 7
_ZERO = 127  # the code of 0, in the middle


class Parts(NamedTuple):
    """The arrays of a weight in a format, the last two optional, or the spec of each.

    Attributes:
        codes: `[..., in, out]`, or half as many rows of two codes each.
        scale: `[..., in / block, out]`; one row without blocks.
        outer_scale: `[..., block of scales]`, the scales of scales.
        offset: `[...]`, the mean of the scales.
    """

    codes: Any
    scale: Any
    outer_scale: Any = None
    offset: Any = None


@dataclasses.dataclass(frozen=True)
class WeightFormat(abc.ABC):
    """A format of weights: a frozen value, found by its name in `FORMATS`."""

    name: str
    block: int = 0
    """Inputs with one scale; 0 for all of them."""
    per_byte: int = 1
    """Codes in a byte."""

    @abc.abstractmethod
    def encode(self, weight: Float[Array, "in out"]) -> Parts:
        """Return the parts of one weight, computed in float32."""

    @abc.abstractmethod
    def decode(self, parts: Parts, dtype: jnp.dtype) -> Float[Array, "*lead in out"]:
        """Return weights, computed in float32."""

    def shape_of(self, codes: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a weight by the shape of its codes."""
        *lead, rows, outputs = codes
        return (*lead, rows * self.per_byte, outputs)

    def encode_all(self, weights: Float[Array, "*lead in out"]) -> Parts:
        """Return the parts of weights, one weight after the other."""
        lead = weights.shape[:-2]
        if not lead:
            return self.encode(weights)
        flat = weights.reshape(-1, *weights.shape[-2:])
        parts = jax.lax.map(self.encode, flat)
        return jax.tree.map(lambda part: part.reshape(*lead, *part.shape[1:]), parts)


class NormalFloat(WeightFormat):
    """`nf4`."""

    def encode(self, weight: Float[Array, "in out"]) -> Parts:
        """Return codes, the codes of scales, and the scales and the mean of scales."""
        blocks, _ = split_blocks(weight.astype(jnp.float32), {0: self.block})
        largest = jnp.max(jnp.abs(blocks), axis=1)
        divisor = divisor_of(largest)
        normalized = blocks / divisor[:, None]
        codes = _nearest(normalized, _NF4)
        by_output = largest.T.reshape(-1)
        offset = _mean(by_output)
        centered = by_output - offset
        magnitudes = jnp.abs(_padded(centered))
        outer = jnp.max(magnitudes, axis=1)
        repeated = _repeated(outer, centered.size)
        ratios = centered / divisor_of(repeated)
        values = _dynamic_values()
        scale = _nearest(ratios, values)
        scale = scale.reshape(largest.T.shape).T
        return Parts(_packed(codes), scale, outer, offset)

    def decode(self, parts: Parts, dtype: jnp.dtype) -> Float[Array, "*lead in out"]:
        """Return value × scale, and the scale is its value × outer scale + offset."""
        assert parts.outer_scale is not None
        assert parts.offset is not None
        *lead, blocks, outputs = parts.scale.shape
        outer = _repeated(parts.outer_scale, blocks * outputs)
        outer = outer.reshape(*lead, outputs, blocks).swapaxes(-1, -2)
        offset = parts.offset[..., None, None]
        scale = _dynamic_value(parts.scale) * outer + offset
        codes = _unpacked(parts)
        return _scaled(_chosen(codes, _NF4), scale, dtype)


class Microscaling(WeightFormat):
    """`mxfp4`."""

    def encode(self, weight: Float[Array, "in out"]) -> Parts:
        """Return codes, and the exponents of scales, biased by 127."""
        blocks, _ = split_blocks(weight.astype(jnp.float32), {0: self.block})
        largest = jnp.max(jnp.abs(blocks), axis=1)
        bits = jax.lax.bitcast_convert_type(largest, jnp.uint32)
        biased = bits >> 23
        scale = jnp.maximum(biased, _EXPONENT_OF_LARGEST) - _EXPONENT_OF_LARGEST
        scale = jnp.where(jnp.isfinite(largest), scale, _NOT_A_NUMBER).astype(jnp.uint8)
        divisor = divisor_of(_exponential(scale))
        numbers = jnp.abs(blocks / divisor[:, None])
        codes = jnp.zeros(blocks.shape, jnp.uint8)
        for index, (below, above) in enumerate(itertools.pairwise(_E2M1)):
            middle = (below + above) / 2
            # Of two neighbors as near, the one with an even code is taken.
            is_above = numbers > middle
            if index % 2:
                is_above = numbers >= middle
            codes += is_above
        signs = jnp.signbit(blocks)
        codes += _SIGN * signs.astype(jnp.uint8)
        return Parts(_packed(codes), scale)

    def decode(self, parts: Parts, dtype: jnp.dtype) -> Float[Array, "*lead in out"]:
        """Return value × 2^exponent."""
        signed = (*_E2M1, *(-value for value in _E2M1))
        codes = _unpacked(parts)
        scale = _exponential(parts.scale)
        return _scaled(_chosen(codes, signed), scale, dtype)


class Integer(WeightFormat):
    """`int8`."""

    def encode(self, weight: Float[Array, "in out"]) -> Parts:
        """Return codes, and a float32 scale for each output."""
        weight = weight.astype(jnp.float32)
        largest = jnp.max(jnp.abs(weight), axis=0, keepdims=True)
        return Parts(*quantize(weight, largest, "int8", 127.0))

    def decode(self, parts: Parts, dtype: jnp.dtype) -> Float[Array, "*lead in out"]:
        """Return code × scale."""
        return dequantize(parts.codes, parts.scale, dtype)


FORMATS: Mapping[str, WeightFormat] = {
    "nf4": NormalFloat("nf4", block=64, per_byte=2),
    "mxfp4": Microscaling("mxfp4", block=32, per_byte=2),
    "int8": Integer("int8"),
}
"""Name → format."""


def _nearest(x: Float[Array, "..."], values: Sequence[float]) -> UInt8[Array, "..."]:
    """Return the index of the nearest of some rising values."""
    table = np.asarray(values, np.float32)
    middles = (table[:-1] + table[1:]) / 2
    return jnp.searchsorted(middles, x, side="left", method="compare_all").astype(jnp.uint8)


def _chosen(codes: UInt8[Array, "..."], values: Sequence[float]) -> Float[Array, "..."]:
    """Return the value of each code, by selects: a TPU looks numbers up one after the other.

    Example:
        >>> _chosen(jnp.array([2, 0, 3], jnp.uint8), (1.0, 2.0, 4.0, 8.0)).tolist()
        [4.0, 1.0, 8.0]
    """
    left: list[Any] = [np.float32(value) for value in values]
    bit = 0
    while len(left) > 1:
        is_set = (codes >> bit) & 1 == 1
        pairs = zip(left[::2], left[1::2], strict=True)
        left = [jnp.where(is_set, odd, even) for even, odd in pairs]
        bit += 1
    return left[0]


def _packed(codes: UInt8[Array, "block row out"]) -> UInt8[Array, "rows out"]:
    """Put two codes into each byte."""
    low, high = jnp.split(codes, 2, axis=1)
    return (low | high << 4).reshape(-1, codes.shape[-1])


def _unpacked(parts: Parts) -> UInt8[Array, "*lead block row out"]:
    """Return the codes of each block."""
    *lead, rows, outputs = parts.codes.shape
    blocks = parts.scale.shape[-2]
    packed = parts.codes.reshape(*lead, blocks, rows // blocks, outputs)
    return jnp.concatenate([packed & 15, packed >> 4], axis=-2)


def _scaled(
    values: Float[Array, "*lead block row out"],
    scale: Float[Array, "*lead block out"],
    dtype: jnp.dtype,
) -> Float[Array, "*lead in out"]:
    """Return the values of blocks times their scales, the blocks joined."""
    weights = (values * scale[..., None, :]).astype(dtype)
    *lead, _, _, outputs = weights.shape
    return weights.reshape(*lead, -1, outputs)


def _exponential(biased: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Return 2^(code - 127); 0 for the code 0.

    The code 255 is infinite, and makes numbers that are not finite.
    """
    return jax.lax.bitcast_convert_type(biased.astype(jnp.uint32) << 23, jnp.float32)


def _mean(scales: Float[Array, "n"]) -> Float[Array, ""]:
    """Return the mean of sums in a fixed order: equal bits on all meshes."""
    sums = scales
    while sums.size > 1:
        half = (sums.size + 1) // 2
        sums = sums[:half] + jnp.pad(sums[half:], (0, sums.size % 2))
    return sums[0] / scales.size


def _padded(scales: Float[Array, "n"]) -> Float[Array, "blocks size"]:
    """Return scales in blocks, the last one filled with zeros."""
    return jnp.pad(scales, (0, -scales.size % _SCALES)).reshape(-1, _SCALES)


def _repeated(outer: Float[Array, "*lead blocks"], count: int) -> Float[Array, "*lead count"]:
    """Return the outer scale of each of `count` scales."""
    return jnp.repeat(outer, _SCALES, axis=-1)[..., :count]


def _dynamic_value(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Return the number of a code of the dynamic tree type (Dettmers, arXiv:1511.04561, section 3).

    Between ±1 a decade has 1, 2, 4, … or 64 numbers, the more the larger they are: the middles of
    as many equal parts.

    Example:
        >>> numbers = _dynamic_value(jnp.array([246, 255, 8], jnp.uint8))
        >>> [round(float(number), 3) for number in numbers]
        [0.88, 1.0, -0.88]
    """
    place = codes.astype(jnp.int32) - _ZERO
    number = jnp.abs(place)
    decade = 31 - jax.lax.clz(jnp.maximum(number, 1))
    parts = 1 << decade
    middle = 0.1 + 0.9 * (number - parts + 0.5) / parts
    powers = [10.0 ** (each - _DECADES + 1) for each in range(_DECADES)]
    value = _chosen(decade, (*powers, 1.0)) * middle
    value = jnp.where(number > _ZERO, 1.0, value)
    return jnp.sign(place) * value


@functools.cache
def _dynamic_values() -> tuple[float, ...]:
    """Return the numbers of all 256 codes, in rising order."""
    positive = list[float]()
    for decade in range(_DECADES):
        parts = 2**decade
        power = 10.0 ** (decade - _DECADES + 1)
        for part in range(parts):
            positive.append(power * (0.1 + 0.9 * (part + 0.5) / parts))
    negative = [-value for value in reversed(positive)]
    return (*negative, 0.0, *positive, 1.0)
