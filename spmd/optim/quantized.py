"""Optimizer moments in two bytes or one: any transform whose state is small when stored, and float32 while it is used.

| kind | each moment of an element | exact to |
|---|---|---|
| `float32` | 4 bytes | 6e-8 |
| `bfloat16` | 2 bytes | 0.4 % |
| `8bit` | 1 byte, and 4 for each block | 4.5 % |

A moment is an exponential average: with a decay of 0.999 it moves by 0.1 % in a step, less than the distance between
two numbers of a narrow dtype. Rounded to the nearest it would stand still, so all rounding here is stochastic.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmd.errors import ConfigError, Problem
from spmd.optim.stochastic_rounding import random_bits, round_stochastically, salt_of, seed_of
from spmd.sharding.layer_paths import stacks_of
from spmd.tree import PyTree, flatten, map_with_path

Kind = Literal["float32", "bfloat16", "8bit"]

BLOCK = 256
"""Elements of the last dimension that share a scale."""

_LEAST_BLOCK = 8
_PER_OCTAVE = 8
_NOT_NEGATIVE = ("nu",)
"""Names of the fields of optax's states that hold squares."""


class Blocks(NamedTuple):
    """An array in 8 bits for each element.

    Attributes:
        codes: uint8 (numbers of one sign) or int8, of the array's shape.
        scale: float32: the largest magnitude of each block of the last dimension.
    """

    codes: jax.Array
    scale: jax.Array


class QuantizedState(NamedTuple):
    """How many updates there were (int32 scalar), and the transform's state with its moments as they are stored."""

    steps: jax.Array
    inner: Any


def block_of(size: int, largest: int = BLOCK) -> int:
    """The block of a last dimension, the largest that divides it; 0 where that is too small to save anything.

    Example:
        >>> block_of(4096), block_of(192), block_of(50257)
        (256, 64, 0)
    """
    block = math.gcd(size, largest)
    return block if block >= min(_LEAST_BLOCK, largest) else 0


def quantize_moments(
    transform: optax.GradientTransformation, kind: Kind, block: int = BLOCK, stacked: Sequence[str] = ("layers",)
) -> optax.GradientTransformationExtraArgs:
    """The transform with every moment stored as `kind`.

    A moment is a field of its state that is laid out like the parameters. An array whose last dimension has no block
    stays float32, and so do stacked scalars. Blocks lie within the last dimension, so layers of a stack share none.

    Args:
        transform: One with a flat state, such as `optax.scale_by_adam`, `scale_by_lion` or `trace`.
        kind: How moments are stored.
        block: The largest block, a power of two. The parameter's last dimension, cut into shards, must be whole blocks.
        stacked: Path components whose parameters are stacked layers.

    Raises:
        ConfigError: `block` is no power of two.

    Example:
        >>> adam = quantize_moments(optax.scale_by_adam(), "8bit")
        >>> adam.init({"kernel": jnp.ones((2, 512))}).inner.mu["kernel"].scale.shape
        (2, 2)
    """
    if block < 1 or block & (block - 1):
        raise ConfigError("Moments cannot be stored so:", [Problem("block", f"is {block}", fix="a power of two")])
    inner = optax.with_extra_args_support(transform)
    if kind == "float32":
        return inner

    def store(state: PyTree, params: PyTree, count: jax.Array) -> PyTree:
        def field(name: str, value: PyTree) -> PyTree:
            floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(value))
            if not floats or flatten(value).keys() != flatten(params).keys():
                return value

            def one(path: str, x: jax.Array) -> Any:
                seed = seed_of(count, salt_of(f"{name}/{path}"))
                if kind == "bfloat16":
                    return round_stochastically(x, seed)
                size = block_of(x.shape[-1], block) if x.ndim > len(stacks_of(path, stacked)) else 0
                return quantize(x, size, seed, signed=name not in _NOT_NEGATIVE) if size else x

            return map_with_path(one, value)

        return state._replace(**{name: field(name, getattr(state, name)) for name in state._fields})

    def init(params: PyTree) -> QuantizedState:
        count = jnp.zeros((), jnp.int32)
        return QuantizedState(count, store(inner.init(params), params, count))

    def update(
        updates: PyTree, state: QuantizedState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, QuantizedState]:
        updates, after = inner.update(updates, _load(state.inner), params, **extra)
        count = optax.safe_increment(state.steps)
        return updates, QuantizedState(count, store(after, updates, count))

    return optax.GradientTransformationExtraArgs(init, update)


def _load(state: PyTree) -> PyTree:
    """A state with its moments in float32."""

    def stored(node: Any) -> bool:
        return isinstance(node, Blocks)

    def wide(node: Any) -> Any:
        if stored(node):
            return dequantize(node)
        return node.astype(jnp.float32) if node.dtype == jnp.bfloat16 else node

    return jax.tree.map(wide, state, is_leaf=stored)


@dataclasses.dataclass(frozen=True)
class _Code:
    """Magnitudes from 1 downwards, `_PER_OCTAVE` to each power of two, at the levels `top`, `top - 1`, …, 1.

    Level 0 is zero itself where numbers have signs. Squares have none: one that is too small becomes the least level,
    for a denominator of zero would make a huge step of a tiny gradient (Li et al., arXiv:2309.01507, section 4.1).
    """

    dtype: Any
    top: int
    signed: bool


_SIGNED, _SQUARES = _Code(jnp.int8, 127, True), _Code(jnp.uint8, 255, False)


def quantize(x: jax.Array, block: int, seed: jax.Array, *, signed: bool) -> Blocks:
    """A float32 array in 8 bits for each element, rounded stochastically.

    Blocks with a scale each are from Dettmers et al. (arXiv:2110.02861, section 2.1). Their codes are a table with an
    exponent of varying length; these are evenly spaced logarithms, 9 % apart over 16 (with a sign) or 32 powers of two,
    which need no table. An all-zero block has the scale 0.

    Args:
        x: float32, `[..., n]`.
        block: A divisor of `n`.
        seed: A uint32 scalar, another in each step.
        signed: Whether numbers may be negative.
    """
    code = _SIGNED if signed else _SQUARES
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    scale = jnp.max(jnp.abs(blocks), axis=-1)
    part = jnp.abs(blocks) / jnp.where(scale > 0, scale, 1.0)[..., None]
    # Between two levels, up with the probability that makes the mean exact; below the least level, between it and 0.
    level = jnp.clip(jnp.floor(code.top + _PER_OCTAVE * jnp.log2(part)), 0, code.top - 1)
    low, high = _magnitude(level, code), _magnitude(level + 1, code)
    bits = random_bits(level.reshape(x.shape).astype(jnp.uint32), seed).reshape(level.shape)
    chance = (bits >> 8).astype(jnp.float32) * 2.0**-24
    level = level + (chance < (part - low) / (high - low))
    codes = (jnp.sign(blocks) * level if code.signed else jnp.maximum(level, 1)).astype(code.dtype)
    return Blocks(codes.reshape(x.shape), scale)


def dequantize(stored: Blocks) -> jax.Array:
    """The float32 array that `quantize` stored."""
    code = _SIGNED if stored.codes.dtype == jnp.int8 else _SQUARES
    blocks = stored.codes.reshape(*stored.scale.shape, -1).astype(jnp.float32)
    magnitude = _magnitude(jnp.abs(blocks), code) * stored.scale[..., None]
    return (jnp.sign(blocks) * magnitude).reshape(stored.codes.shape)


def _magnitude(level: jax.Array, code: _Code) -> jax.Array:
    return jnp.where(level > 0, jnp.exp2((level - code.top) / _PER_OCTAVE), 0.0)
