"""Axes and collectives of layers that are manual over the mesh (`jax.shard_map`)."""

from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec as P
from jax.sharding import get_abstract_mesh
from jaxtyping import Array

from spmd.sharding.mesh import AnyMesh, entry_axes

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
