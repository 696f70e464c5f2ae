"""Quantized optimizer moments: float32 in computation, two bytes or one in storage.

| kind | storage of one element | relative error |
|---|---|---|
| `float32` | 4 bytes | 6e-8 |
| `bfloat16` | 2 bytes | 0.4 % |
| `8bit` | 1 byte, and 4 for each block | 4.5 % |

A moment is an exponential average: with a decay of 0.999 it moves by 0.1 % in a step, less than the
distance between two numbers of a narrow dtype. Round-to-nearest would lose every update, so all
rounding is stochastic.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmd.codecs import Encoded, block_of, divisor_of, split_blocks
from spmd.errors import ConfigError, Problem
from spmd.optim.stochastic_rounding import random_bits, round_stochastically, salt_of, seed_of
from spmd.sharding.layer_paths import Stack, dims_of, read_stacked
from spmd.tree import PyTree, flatten, map_with_path

Kind = Literal["float32", "bfloat16", "8bit"]

BLOCK = 256
"""Largest number of elements of the last dimension that share a scale."""

_PER_OCTAVE = 8


class QuantizedState(NamedTuple):
    """Number of updates (int32 scalar), and the transform's state with its moments as stored."""

    steps: jax.Array
    inner: Any


def check_block(field: str, block: int) -> list[Problem]:
    """Return a problem if `block` is not a power of two."""
    is_power_of_two = block > 0 and block & (block - 1) == 0
    if is_power_of_two:
        return []
    return [Problem(field, f"is {block}", fix="a power of two")]


def quantize_moments(
    transform: optax.GradientTransformation,
    kind: Kind,
    block: int = BLOCK,
    stacked: Any = ("layers",),
) -> optax.GradientTransformationExtraArgs:
    """Wrap a transform to store its moments as `kind`.

    Blocks have a power of two of elements, at most `block`. Moments are the fields of its state
    with the structure of the parameters. Arrays whose last dimension has no block, and those whose
    last dimension is stacked, stay float32. Blocks divide the last dimension, so layers share none.

    `transform` must have a flat state, as `optax.scale_by_adam`, `scale_by_lion` and `trace` have.

    Example:
        >>> adam = quantize_moments(optax.scale_by_adam(), "8bit")
        >>> adam.init({"kernel": jnp.ones((2, 512))}).inner.mu["kernel"].scale.shape
        (2, 2)
    """
    problems = check_block("block", block)
    if problems:
        raise ConfigError("Moments cannot be quantized:", problems)
    inner = optax.with_extra_args_support(transform)
    if kind == "float32":
        return inner
    storage = _MomentStorage(kind, block, read_stacked(stacked))

    def init(params: PyTree) -> QuantizedState:
        count = jnp.zeros((), jnp.int32)
        state = inner.init(params)
        return QuantizedState(count, storage.store(state, params, count))

    def update(
        updates: PyTree, state: QuantizedState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, QuantizedState]:
        updates, after = inner.update(updates, _load(state.inner), params, **extra)
        count = optax.safe_increment(state.steps)
        return updates, QuantizedState(count, storage.store(after, updates, count))

    return optax.GradientTransformationExtraArgs(init, update)


class _MomentStorage(NamedTuple):
    """Conversion of the moments of a state to their stored form; `_load` is the inverse."""

    kind: Kind
    block: int
    stacks: Mapping[str, Stack]

    def store(self, state: PyTree, params: PyTree, count: jax.Array) -> PyTree:
        """Return a state with stored moments; `count` seeds the random bits."""
        fields = {}
        for name in state._fields:
            value = getattr(state, name)
            if _is_moment(value, params):
                value = self.store_moment(name, value, count)
            fields[name] = value
        return state._replace(**fields)

    def store_moment(self, name: str, moment: PyTree, count: jax.Array) -> PyTree:
        """Return the stored form of one moment of all parameters."""

        def store_array(path: str, x: jax.Array) -> Any:
            seed = seed_of(count, salt_of(f"{name}/{path}"))
            if self.kind == "bfloat16":
                return round_stochastically(x, seed)
            size = self.block_size(path, x.shape)
            if not size:
                return x
            return quantize(x, size, seed, signed=name != "nu")  # `nu` holds squares

        return map_with_path(store_array, moment)

    def block_size(self, path: str, shape: tuple[int, ...]) -> int:
        """Return the number of elements in a block of an array; 0 without blocks."""
        last = len(shape) - 1
        if last == -1 or last in dims_of(path, self.stacks):
            return 0
        return block_of(shape[last], self.block)


def _is_moment(value: PyTree, params: PyTree) -> bool:
    """Return whether a field of a state has a floating-point array for each parameter."""
    leaves = jax.tree.leaves(value)
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in leaves):
        return False
    return flatten(value).keys() == flatten(params).keys()


def _load(state: PyTree) -> PyTree:
    """Return a state with its moments in float32."""

    def wide(node: Any) -> Any:
        if isinstance(node, Encoded):
            return dequantize(node)
        if node.dtype == jnp.bfloat16:
            return node.astype(jnp.float32)
        return node

    return jax.tree.map(wide, state, is_leaf=lambda node: isinstance(node, Encoded))


def quantize(x: jax.Array, block: int, seed: jax.Array, *, signed: bool) -> Encoded:
    """Quantize a float32 array `[..., n]` to 8 bits per element, rounded stochastically.

    Codes are logarithms: a code `c` is the magnitude `2^((c - top) / 8) · scale`, with the block's
    largest for `scale`. Those of `spmd.codecs.quantize` are multiples, `c · scale / top`, which span
    7 powers of two, and are rounded to the nearest.

    Scales per block are from Dettmers et al. (arXiv:2110.02861, section 2.1). Their codes are a
    table with an exponent of variable length; these are evenly spaced logarithms, 9 % apart over 16
    (signed) or 32 powers of two, which need no table. The largest code is the magnitude 1. An
    all-zero block has the scale 0.

    Code 0 is zero if `signed`. Squares have at least the code 1, as a denominator of zero would
    turn a tiny gradient into a huge step (Li et al., arXiv:2309.01507, section 4.1).
    """
    dtype = jnp.int8 if signed else jnp.uint8
    top = jnp.iinfo(dtype).max
    blocks, _ = split_blocks(x, {x.ndim - 1: block})  # [..., block, element]
    scale = jnp.max(jnp.abs(blocks), axis=-1)
    part = jnp.abs(blocks) / divisor_of(scale)[..., None]
    # Round up with the probability that makes the mean exact; below level 1, to level 1 or 0.
    level = jnp.clip(jnp.floor(top + _PER_OCTAVE * jnp.log2(part)), 0, top - 1)
    low = _magnitude(level, top)
    high = _magnitude(level + 1, top)
    # Bits depend on an element's place in the whole last dimension, not in its block.
    whole = level.reshape(x.shape).astype(jnp.uint32)
    bits = random_bits(whole, seed).reshape(level.shape)
    chance = (bits >> 8).astype(jnp.float32) * 2.0**-24  # 24 bits are exact in float32
    level = level + (chance < (part - low) / (high - low))
    codes = jnp.sign(blocks) * level if signed else jnp.maximum(level, 1)
    return Encoded(codes.astype(dtype).reshape(x.shape), scale)


def dequantize(stored: Encoded) -> jax.Array:
    """Return the float32 array of quantized blocks."""
    assert stored.scale is not None
    top = jnp.iinfo(stored.codes.dtype).max
    codes = stored.codes.reshape(*stored.scale.shape, -1)  # [..., block, element]
    blocks = codes.astype(jnp.float32)
    magnitude = _magnitude(jnp.abs(blocks), top) * stored.scale[..., None]
    return (jnp.sign(blocks) * magnitude).reshape(stored.codes.shape)


def _magnitude(level: jax.Array, top: int) -> jax.Array:
    """Return the magnitude of a level, from 0 at level 0 to 1 at the top."""
    return jnp.where(level > 0, jnp.exp2((level - top) / _PER_OCTAVE), 0.0)
