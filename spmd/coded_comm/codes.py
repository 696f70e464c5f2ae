"""Gathers and sums of blocks of codes, in a region that is manual over the mesh.

Encoded inside of the region: a partitioner would move the conversion behind the collective, and send what is decoded.
Codes travel as 8-bit integers, of which every backend has every collective; float8 is only what they mean.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from spmd.codecs import BlockCodec, Encoded
from spmd.sharding.collectives import gather_dims, gather_within
from spmd.sharding.dims import Dims
from spmd.sharding.mesh import AnyMesh

SUM = "sum_of_codes"
"""Name scope of the gather that ends a sum, which is not one of a parameter."""


@dataclasses.dataclass(frozen=True)
class CodedGather:
    """Gather of a shard over the axes of each dimension, as codes and their scales.

    An axis over several slices may have two hops (hpZ: Wang et al., arXiv:2306.10209, section 3.2): `across` slices,
    after which a device has the part of its member number of each slice, and inside of one. The backward pass gathers
    again from the result of the first, the secondary partition, and sends nothing over the slow network.

    Attributes:
        gathers: The axes that each dimension is gathered over.
        hop: The axis with two hops, and its slices; None for none.
        mesh: The mesh.
    """

    codec: BlockCodec
    gathers: Dims
    hop: tuple[str, int] | None = None
    mesh: AnyMesh | None = None

    def across(self, x: Array) -> Encoded:
        """Encode a shard, and send its codes across slices: `[slice, …]`; without two hops, the codes of the shard."""
        coded = _encoded(x, self.codec, *self.codec.block_dim(x.shape))
        if self.hop is None:
            return coded
        axis, slices = self.hop
        return Encoded(*(jax.lax.all_gather(part, axis, axis_index_groups=_groups(axis, slices)[1]) for part in coded))

    def within(self, coded: Encoded, dtype: jnp.dtype) -> Array:
        """Gather what `across` returned inside of a slice, and decode it."""
        return _decode(jax.tree.map(self._within, coded), self.codec, dtype)

    def _within(self, x: Array) -> Array:
        if self.hop is None:
            return gather_dims(x, self.mesh, self.gathers)
        (name, slices), ndim = self.hop, x.ndim - 1
        for dim, axes in enumerate(self.gathers):
            for axis in reversed(axes):
                if axis != name:
                    x = gather_dims(x, self.mesh, [(axis,) * (i == dim + x.ndim - ndim) for i in range(x.ndim)])
                    continue
                x = gather_within(x, self.mesh, axis, slices)
                x = jnp.moveaxis(x, (1, 0), (dim, dim + 1))  # [member, slice, …] → [… slice, member, …]
                x = x.reshape(*x.shape[:dim], -1, *x.shape[dim + 3 :])
        return x


def scatters_codes(shape: Sequence[int], dim: int, count: int, codec: BlockCodec) -> bool:
    """Return whether the parts of a dimension, one for each of `count` devices, have blocks."""
    part = (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
    return shape[dim] % count == 0 and codec.block_dim(part)[1] > 0


def scatter_codes(x: Array, axis: str, dim: int, codec: BlockCodec, slices: int) -> Array:
    """Sum over an axis and scatter a dimension over it: codes are exchanged by all-to-all, and summed in float32.

    An axis over several slices has two hops, as in ZeRO++ (Wang et al., arXiv:2306.10209, section 3.3): first inside of
    each slice, so that devices send their sums, and no terms, over the slow network.
    """
    inner = jax.lax.axis_size(axis) // slices
    parts = x.reshape(*x.shape[:dim], slices, inner, -1, *x.shape[dim + 1 :])  # device i = slice · inner + member
    parts = jnp.moveaxis(parts, (dim + 1, dim), (0, 1))
    within, across = _groups(axis, slices)
    sums = parts.astype(jnp.float32).sum(0) if inner == 1 else _exchanged(parts, axis, codec, 2, within)
    return sums[0] if slices == 1 else _exchanged(sums, axis, codec, 1, across)


def sum_codes(x: Array, mesh: AnyMesh | None, axis: str, codec: BlockCodec, slices: int) -> Array:
    """Sum over an axis: parts are summed as in `scatter_codes`, and the codes of the sums gathered.

    All devices decode the same codes, so that the sums are bitwise equal. A dimension has parts with blocks.
    """
    count = jax.lax.axis_size(axis)
    dim = max((i for i in range(x.ndim) if scatters_codes(x.shape, i, count, codec)), key=lambda i: x.shape[i])
    shard = scatter_codes(x, axis, dim, codec, slices)
    with jax.named_scope(SUM):
        gather = CodedGather(codec, [(axis,) * (i == dim) for i in range(x.ndim)], mesh=mesh)
        return gather.within(gather.across(shard), x.dtype)


def _exchanged(parts: Array, axis: str, codec: BlockCodec, leading: int, groups: list[list[int]]) -> Array:
    """Send `parts[i]` to device `i` of the group, and sum what is received.

    Blocks stay apart until the sum: a TPU would write the scales of joined ones to memory, one for each element. And it
    packs codes slowly along the last dimension.
    """
    dim, block = codec.block_dim(parts.shape[leading:])
    dim += leading - parts.ndim
    if swaps := codec.packed > 1 and dim == -1:
        parts, dim = parts.swapaxes(-1, -2), -2
    shape, some = parts.shape[1:], groups if len(groups) > 1 else None
    if dim < -1:
        parts = parts.reshape(parts.shape[0], -1, block, *parts.shape[dim + 1 :])
    sent = _encoded(parts, codec, dim, block)
    codes, scale = (jax.lax.all_to_all(part, axis, 0, 0, axis_index_groups=some, tiled=True) for part in sent)
    sums = _decoded_sum(Encoded(codes, scale), codec).reshape(shape)
    return sums.swapaxes(-1, -2) if swaps else sums


def _decoded_sum(coded: Encoded, codec: BlockCodec) -> Array:
    """Return the sum of what codes `[device, …]` stand for.

    In as few dimensions as possible: XLA:CPU of JAX 0.10 compiles a sum over blocks of five into one that reads memory
    of others.
    """
    shape, dim = coded.codes.shape, _blocked(coded)
    before, after = math.prod(shape[1:dim]), shape[dim + 1 :]
    merged = (x.reshape(shape[0], before, -1, *(math.prod(after),) * bool(after)) for x in coded if x is not None)
    total = _decode(Encoded(*merged), codec, jnp.float32).sum(axis=0)
    return total.reshape(*shape[1:dim], codec.packed * shape[dim], *after)


def _groups(axis: str, slices: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the devices along an axis that are in one slice, and those with one number in all slices."""
    inner = jax.lax.axis_size(axis) // slices
    within = [[inner * s + member for member in range(inner)] for s in range(slices)]
    return within, [list(group) for group in zip(*within, strict=True)]


def _encoded(x: Array, codec: BlockCodec, dim: int, block: int) -> Encoded:
    codes, scale = codec.encode(x, block, _rows(x), dim)
    is_integer = jnp.issubdtype(codes.dtype, jnp.integer)
    return Encoded(codes if is_integer else jax.lax.bitcast_convert_type(codes, jnp.uint8), scale)


def _decode(coded: Encoded, codec: BlockCodec, dtype: jnp.dtype) -> Array:
    codes = coded.codes if coded.codes.dtype == codec.dtype else jax.lax.bitcast_convert_type(coded.codes, codec.dtype)
    return codec.decode(Encoded(codes, coded.scale), dtype, _rows(codes), _blocked(coded))


def _blocked(coded: Encoded) -> int:
    """Return the dimension of the blocks."""
    codes, scale = coded
    assert scale is not None
    return next(dim for dim, size in enumerate(codes.shape) if size != scale.shape[dim])


def _rows(x: Array) -> int:
    """Return the rows to form blocks of at once: 8 are a tile of a TPU's memory."""
    return 8 if x.ndim > 1 and x.shape[-2] % 8 == 0 else 1
