"""Gathers and sums of blocks of codes, in a region that is manual over the mesh.

Encoded inside of the region: a partitioner would move the conversion behind the collective, and send what is decoded.
Codes travel as 8-bit integers, of which every backend has every collective; float8 is only what they mean.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from spmd.model_api.codecs import BlockCodec, Encoded, block_dim
from spmd.plan.manual import all_gather
from spmd.sharding.dims import Dims

SUM = "sum_of_codes"
"""Name scope of the gather that ends a sum, which is not one of a parameter."""


def gather_codes(x: Array, dims: Dims, codec: BlockCodec, dtype: jnp.dtype) -> Array:
    """Gather each dimension of a shard over its axes: its codes and their scales, which are then decoded."""
    dim, block = block_dim(x.shape, codec)
    if not block:
        return all_gather(x.astype(dtype), dims)
    coded = _as_bytes(_encode(x, codec, dim, block))
    codes, scale = (all_gather(part, dims) for part in coded)
    return _decode(Encoded(codes, scale), codec, dim, dtype)


def scatters_codes(shape: Sequence[int], dim: int, count: int, codec: BlockCodec) -> bool:
    """Return whether the parts of a dimension, one for each of `count` devices, have blocks."""
    part = (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
    return shape[dim] % count == 0 and block_dim(part, codec)[1] > 0


def scatter_codes(x: Array, axis: str, dim: int, codec: BlockCodec, slices: int) -> Array:
    """Sum over an axis and scatter a dimension over it: codes are exchanged by all-to-all, and summed in float32.

    An axis over several slices has two hops, as in ZeRO++ (Wang et al., arXiv:2306.10209, section 3.3): first inside of
    each slice, so that devices send their sums, and no terms, over the slow network.
    """
    count = jax.lax.axis_size(axis)
    inner = count // slices
    parts = x.reshape(*x.shape[:dim], slices, inner, -1, *x.shape[dim + 1 :])  # device i = slice · inner + member
    parts = jnp.moveaxis(parts, (dim + 1, dim), (0, 1))
    across = [[member + inner * s for s in range(slices)] for member in range(inner)]
    within = [[inner * s + member for member in range(inner)] for s in range(slices)]
    sums = parts.astype(jnp.float32).sum(0) if inner == 1 else _exchanged(parts, axis, codec, 2, within)
    return sums[0] if slices == 1 else _exchanged(sums, axis, codec, 1, across)


def sum_codes(x: Array, axis: str, codec: BlockCodec, slices: int) -> Array:
    """Sum over an axis: parts are summed as in `scatter_codes`, and the codes of the sums gathered.

    All devices decode the same codes, so that the sums are bitwise equal. A dimension has parts with blocks.
    """
    count = jax.lax.axis_size(axis)
    fitting = [dim for dim in range(x.ndim) if scatters_codes(x.shape, dim, count, codec)]
    dim = max(fitting, key=lambda dim: x.shape[dim])
    shard = scatter_codes(x, axis, dim, codec, slices)
    with jax.named_scope(SUM):
        return gather_codes(shard, [(axis,) * (i == dim) for i in range(x.ndim)], codec, x.dtype)


def _exchanged(parts: Array, axis: str, codec: BlockCodec, leading: int, groups: list[list[int]]) -> Array:
    """Send `parts[i]` to device `i` of the group, and sum what is received."""
    dim, block = block_dim(parts.shape[leading:], codec)
    coded = _as_bytes(_encode(parts, codec, dim + leading, block))
    some = groups if len(groups) > 1 else None
    codes, scale = (jax.lax.all_to_all(part, axis, 0, 0, axis_index_groups=some, tiled=True) for part in coded)
    return _decode(Encoded(codes, scale), codec, dim + leading, jnp.float32).sum(axis=0)


def _encode(x: Array, codec: BlockCodec, dim: int, block: int) -> Encoded:
    return codec.encode(x, block, _rows(x), dim)


def _decode(coded: Encoded, codec: BlockCodec, dim: int, dtype: jnp.dtype) -> Array:
    codes = coded.codes if coded.codes.dtype == codec.dtype else jax.lax.bitcast_convert_type(coded.codes, codec.dtype)
    return codec.decode(Encoded(codes, coded.scale), dtype, _rows(codes), dim)


def _as_bytes(coded: Encoded) -> tuple[Array, Array]:
    codes, scale = coded
    assert scale is not None
    is_integer = jnp.issubdtype(codes.dtype, jnp.integer)
    return codes if is_integer else jax.lax.bitcast_convert_type(codes, jnp.uint8), scale


def _rows(x: Array) -> int:
    """Return the rows to form blocks of at once: 8 are a tile of a TPU's memory."""
    return 8 if x.ndim > 1 and x.shape[-2] % 8 == 0 else 1
