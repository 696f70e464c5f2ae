"""The mesh axes of each dimension of an array, from its spec and back."""

from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec as P

from spmd.sharding.mesh import entry_axes, shards_of

Dims = Sequence[tuple[str, ...]]
"""Mesh axes of each dimension."""


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


def local_shape(shape: Sequence[int], dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of a shard; `sizes` is axis → size."""
    return tuple(size // shards_of(axes, sizes) for size, axes in zip(shape, dims, strict=True))


def extra_axes(dims: Dims, fewer: Dims) -> tuple[tuple[str, ...], ...]:
    """Return the axes of each dimension that `fewer` does not have."""
    return tuple(tuple(a for a in axes if a not in kept) for axes, kept in zip(dims, fewer, strict=True))


def is_prefix(dims: Dims, more: Dims) -> bool:
    """Return whether `more` splits each shard of `dims` further, so that shards of a shard are contiguous."""
    return all(names[: len(first)] == tuple(first) for first, names in zip(dims, more, strict=True))
