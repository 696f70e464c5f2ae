"""Axes and collectives of layers that are manual over the mesh (`jax.shard_map`)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import get_abstract_mesh
from jaxtyping import Array

from spmd.plan.context import current
from spmd.sharding.mesh import AnyMesh, entry_axes, spans_tpu_slice

Dims = Sequence[tuple[str, ...]]
"""Mesh axes of each dimension."""


def split_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Return the axes of size above 1 that are not manual yet."""
    manual = get_abstract_mesh().manual_axes
    return tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in manual)


def spec_dims(spec: P, ndim: int, axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the mesh axes of each dimension of a spec, restricted to `axes`.

    Example:
        >>> spec_dims(P(("data", "fsdp"), "tensor"), 3, ("fsdp", "tensor"))
        [('fsdp',), ('tensor',), ()]
    """
    entries = [tuple(axis for axis in entry_axes(entry) if axis in axes) for entry in spec]
    return [*entries, *((),) * ndim][:ndim]


def dims_spec(dims: Dims) -> P:
    """Return the spec of the axes of each dimension."""
    return P(*(axes or None for axes in dims))


def extra_axes(dims: Dims, fewer: Dims) -> tuple[tuple[str, ...], ...]:
    """Return the axes of each dimension that `fewer` does not have."""
    return tuple(tuple(a for a in axes if a not in kept) for axes, kept in zip(dims, fewer, strict=True))


def all_gather(x: Array, dims: Dims) -> Array:
    """Gather each dimension over its axes."""
    for dim, axes in enumerate(dims):
        x = jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x
    return x


def psum_scatter(x: Array, dims: Dims) -> Array:
    """Sum over the axes of all dimensions and scatter each dimension over its own."""
    for dim, axes in enumerate(dims):
        x = jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x
    return x


def psum(x: Array, axes: tuple[str, ...]) -> Array:
    """Sum over axes, if there are any."""
    return jax.lax.psum(x, axes) if axes else x


def sum_gradient(gradient: Array, scatters: Dims, axes: Sequence[str]) -> Array:
    """Sum a parameter's gradient over axes, and scatter each dimension over some of them.

    It is sent over each axis in the dtype of the plan's precision policy, and has its own dtype in between.
    """
    context, dtype = current(), gradient.dtype
    sent = dict.fromkeys(axes, dtype) if context.precision is None else context.precision.exchange_dtypes(axes)
    scattered = [(dim, axis) for dim, names in enumerate(scatters) for axis in names]
    for dim, axis in scattered:
        part = gradient.astype(sent.pop(axis))
        if context.mesh is not None and spans_tpu_slice(context.mesh, axis):
            gradient = _scatter_in_two_hops(part, axis, dim, dtype)
        else:
            gradient = jax.lax.psum_scatter(part, axis, scatter_dimension=dim, tiled=True).astype(dtype)
    for wire in dict.fromkeys(sent.values()):
        summed = tuple(axis for axis in sent if sent[axis] == wire)
        gradient = jax.lax.psum(gradient.astype(wire), summed).astype(dtype)
    return gradient


def _scatter_in_two_hops(x: Array, axis: str, dim: int, dtype: jnp.dtype) -> Array:
    """Sum over an axis and scatter a dimension, first among every second device and then in pairs.

    XLA:TPU makes an all-reduce, with twice the bytes, of a reduce-scatter over all devices of a slice, and none of
    one over half of them (decision 0030).
    """
    count = jax.lax.axis_size(axis)
    halves = [list(range(start, count, 2)) for start in range(2)]
    if count > 2:
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True, axis_index_groups=halves)
    first, second = jnp.split(x, 2, axis=dim)
    is_second = jax.lax.axis_index(axis) % 2 == 1
    pairs = [(device, device ^ 1) for device in range(count)]
    received = jax.lax.ppermute(jnp.where(is_second, first, second), axis, pairs)
    return jnp.where(is_second, second, first).astype(dtype) + received.astype(dtype)
