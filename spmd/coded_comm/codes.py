"""Gathers and sums of blocks of codes, in a region manual over the mesh.

Arrays are encoded inside of the region: a partitioner would move the conversion behind the
collective, and send decoded arrays. Codes, also those of float8, are sent as 8-bit integers, for
which every backend has every collective.
"""

import dataclasses
import functools
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
"""Name scope of the gather at the end of a sum, to tell it from gathers of parameters."""


@dataclasses.dataclass(frozen=True)
class CodedGather:
    """Gather of a shard over the axes of each dimension, as codes and their scales.

    An axis over several slices may have two hops (hpZ: Wang et al., arXiv:2306.10209, section 3.2):
    `across` slices, after which a device has the parts of its counterparts in all slices, and
    `within` a slice. The backward pass gathers again from the result of the first hop, the
    secondary partition, and sends nothing over the slow network.

    Attributes:
        gathers: The axes of the gather of each dimension.
        hop: The axis with two hops, and its number of slices; None for none.
        mesh: The mesh.
    """

    codec: BlockCodec
    gathers: Dims
    hop: tuple[str, int] | None = None
    mesh: AnyMesh | None = None

    def across(self, x: Array) -> Encoded:
        """Encode a shard, and send its codes across slices: `[slice, …]`.

        Without two hops, nothing is sent: `[…]`.
        """
        coded = _encoded(x, self.codec, *self.codec.block_dim(x.shape))
        if self.hop is None:
            return coded
        axis, slices = self.hop
        _, across = _groups(axis, slices)
        gather = functools.partial(jax.lax.all_gather, axis_name=axis, axis_index_groups=across)
        return jax.tree.map(gather, coded)

    def within(self, coded: Encoded, dtype: jnp.dtype) -> Array:
        """Gather the result of `across` inside of a slice, and decode it."""
        gathered = jax.tree.map(self._within, coded)
        return _decode(gathered, self.codec, dtype)

    def _within(self, x: Array) -> Array:
        if self.hop is None:
            return gather_dims(x, self.mesh, self.gathers)
        name, _ = self.hop
        ndim = x.ndim - 1  # without the dimension of slices, in front until the hop inside of one
        for dim, axes in enumerate(self.gathers):
            for axis in reversed(axes):
                if axis == name:
                    x = self._within_slice(x, dim)
                else:
                    now = dim + x.ndim - ndim
                    x = gather_dims(x, self.mesh, _over(axis, now, x.ndim))
        return x

    def _within_slice(self, x: Array, dim: int) -> Array:
        """Gather a dimension over the axis with two hops: `[slice, …]` to `[…]`."""
        assert self.hop is not None
        axis, slices = self.hop
        x = gather_within(x, self.mesh, axis, slices)
        x = jnp.moveaxis(x, (1, 0), (dim, dim + 1))  # [member, slice, …] → [… slice, member, …]
        return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 3 :])


def _over(axis: str, dim: int, ndim: int) -> Dims:
    """Return the axes of `gather_dims` for one dimension of an array of `ndim`."""
    gathers: list[tuple[str, ...]] = [()] * ndim
    gathers[dim] = (axis,)
    return gathers


def scatters_codes(shape: Sequence[int], dim: int, count: int, codec: BlockCodec) -> bool:
    """Return whether the parts of a dimension for `count` devices have whole blocks."""
    if shape[dim] % count != 0:
        return False
    part = (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
    _, block = codec.block_dim(part)
    return block > 0


def scatter_codes(x: Array, axis: str, dim: int, codec: BlockCodec, slices: int) -> Array:
    """Sum over an axis and scatter a dimension over it.

    Codes are exchanged by all-to-all, and summed in float32. An axis over several slices has two
    hops, as in ZeRO++ (Wang et al., arXiv:2306.10209, section 3.3): first inside of each slice, so
    that only sums, and no terms, are sent over the slow network.
    """
    inner = jax.lax.axis_size(axis) // slices
    # Device i = slice · inner + member, so the dimension is [slice, member, part].
    parts = x.reshape(*x.shape[:dim], slices, inner, -1, *x.shape[dim + 1 :])
    parts = jnp.moveaxis(parts, (dim + 1, dim), (0, 1))  # [member, slice, …]
    within, across = _groups(axis, slices)
    if inner == 1:
        exact = parts.astype(jnp.float32)
        sums = exact.sum(0)
    else:
        sums = _exchanged(parts, axis, codec, 2, within)
    if slices == 1:
        return sums[0]
    return _exchanged(sums, axis, codec, 1, across)


def sum_codes(x: Array, mesh: AnyMesh | None, axis: str, codec: BlockCodec, slices: int) -> Array:
    """Sum over an axis by `scatter_codes`, and gather the codes of the sums.

    All devices decode the same codes, so that the sums are bitwise equal. At least one dimension
    must have parts with blocks (`scatters_codes`).
    """
    count = jax.lax.axis_size(axis)
    dims = [dim for dim in range(x.ndim) if scatters_codes(x.shape, dim, count, codec)]
    largest = max(dims, key=lambda dim: x.shape[dim])
    shard = scatter_codes(x, axis, largest, codec, slices)
    with jax.named_scope(SUM):
        gather = CodedGather(codec, _over(axis, largest, x.ndim), mesh=mesh)
        return gather.within(gather.across(shard), x.dtype)


def sum_gathered_codes(x: Array, axis: str, codec: BlockCodec) -> Array:
    """Sum over an axis in float32: each device encodes its term once and sends it to all others.

    More is sent than by `sum_codes` to more than two devices, but no sum is encoded again. `x` has
    a dimension with blocks. All devices decode the same codes, so that the sums are bitwise equal.
    """
    coded = _encoded(x, codec, *codec.block_dim(x.shape))
    gather = functools.partial(jax.lax.all_gather, axis_name=axis)
    return _decoded_sum(jax.tree.map(gather, coded), codec)


def _exchanged(
    parts: Array, axis: str, codec: BlockCodec, leading: int, groups: list[list[int]]
) -> Array:
    """Send `parts[i]` to device `i` of the group, and sum the received parts.

    `leading` is the number of dimensions before those of a part. Blocks stay a dimension of their
    own until the sum: if they were merged, a TPU would write the scales to memory, one for each
    element. A TPU also packs codes slowly along the last dimension, so this is swapped.
    """
    dim, block = codec.block_dim(parts.shape[leading:])
    dim += leading - parts.ndim  # counted from the end
    swaps = codec.packed > 1 and dim == -1
    if swaps:
        parts = parts.swapaxes(-1, -2)
        dim = -2
    shape = parts.shape[1:]
    if dim < -1:
        parts = parts.reshape(parts.shape[0], -1, block, *parts.shape[dim + 1 :])
    send = functools.partial(
        jax.lax.all_to_all,
        axis_name=axis,
        split_axis=0,
        concat_axis=0,
        axis_index_groups=groups if len(groups) > 1 else None,
        tiled=True,
    )
    received = jax.tree.map(send, _encoded(parts, codec, dim, block))
    sums = _decoded_sum(received, codec).reshape(shape)
    if swaps:
        return sums.swapaxes(-1, -2)
    return sums


def _decoded_sum(coded: Encoded, codec: BlockCodec) -> Array:
    """Return the sum of the decoded arrays of codes `[device, …]`.

    Dimensions are merged as far as possible: XLA:CPU of JAX 0.10 miscompiles a sum over blocks of
    five dimensions, which then reads memory of other arrays.
    """
    shape = coded.codes.shape
    dim = _blocked(coded)
    before = math.prod(shape[1:dim])
    after = shape[dim + 1 :]
    merged_after: tuple[int, ...] = ()
    if after:
        merged_after = (math.prod(after),)
    merged = jax.tree.map(lambda x: x.reshape(shape[0], before, -1, *merged_after), coded)
    total = _decode(merged, codec, jnp.float32).sum(axis=0)
    return total.reshape(*shape[1:dim], codec.packed * shape[dim], *after)


def _groups(axis: str, slices: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups of devices along an axis within each slice, and of counterparts across."""
    inner = jax.lax.axis_size(axis) // slices
    within = []
    for slice_index in range(slices):
        first = inner * slice_index
        within.append(list(range(first, first + inner)))
    across = [list(group) for group in zip(*within, strict=True)]
    return within, across


def _encoded(x: Array, codec: BlockCodec, dim: int, block: int) -> Encoded:
    """Encode an array; the codes are integers."""
    codes, scale = codec.encode(x, block, _rows(x), dim)
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    return Encoded(codes, scale)


def _decode(coded: Encoded, codec: BlockCodec, dtype: jnp.dtype) -> Array:
    """Undo `_encoded`."""
    codes = coded.codes
    if codes.dtype != codec.dtype:
        codes = jax.lax.bitcast_convert_type(codes, codec.dtype)
    return codec.decode(Encoded(codes, coded.scale), dtype, _rows(codes), _blocked(coded))


def _blocked(coded: Encoded) -> int:
    """Return the dimension of the blocks: the first with fewer scales than codes."""
    codes, scale = coded
    assert scale is not None
    dim = 0
    while codes.shape[dim] == scale.shape[dim]:
        dim += 1
    return dim


def _rows(x: Array) -> int:
    """Return the number of rows to encode at once: 8, a tile of a TPU's memory, or 1."""
    if x.ndim > 1 and x.shape[-2] % 8 == 0:
        return 8
    return 1
