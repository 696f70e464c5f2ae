"""The mesh axes of each dimension of an array, from its spec and back."""

from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec as P

from spmd.sharding.mesh import as_entry, entry_axes, shards_of

Dims = Sequence[tuple[str, ...]]
"""Mesh axes of each dimension."""


def spec_dims(spec: P, ndim: int, axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the mesh axes of each dimension of a spec, restricted to `axes`.

    Example:
        >>> spec_dims(P(("data", "fsdp"), "tensor"), 3, ("fsdp", "tensor"))
        [('fsdp',), ('tensor',), ()]
    """
    dims: list[tuple[str, ...]] = []
    for entry in spec[:ndim]:
        kept = [axis for axis in entry_axes(entry) if axis in axes]
        dims.append(tuple(kept))
    missing = ndim - len(dims)
    return dims + [()] * missing


def dims_spec(dims: Dims) -> P:
    """Return the spec of the axes of each dimension."""
    entries = [axes or None for axes in dims]
    return P(*entries)


def local_shape(shape: Sequence[int], dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of a shard; `sizes` is axis → size."""
    local = []
    for size, axes in zip(shape, dims, strict=True):
        local.append(size // shards_of(axes, sizes))
    return tuple(local)


def extra_axes(dims: Dims, fewer: Dims) -> tuple[tuple[str, ...], ...]:
    """Return the axes of each dimension in `dims` but not in `fewer`."""
    extra = []
    for axes, kept in zip(dims, fewer, strict=True):
        extra.append(tuple(axis for axis in axes if axis not in kept))
    return tuple(extra)


def is_prefix(dims: Dims, more: Dims) -> bool:
    """Return whether `more` splits each shard of `dims` further.

    Shards of a shard are then contiguous.
    """
    return all(axes[: len(first)] == tuple(first) for first, axes in zip(dims, more, strict=True))


def with_axis(spec: P, dim: int, axis: str) -> P:
    """Return the spec with one more axis of a dimension, the last one.

    Example:
        >>> with_axis(P("fsdp"), 0, "pipe") == P(("fsdp", "pipe"))
        True
        >>> with_axis(P("fsdp"), 1, "pipe") == P("fsdp", "pipe")
        True
    """
    entries = list(spec)
    entries += [None] * (dim + 1 - len(entries))
    entries[dim] = as_entry((*entry_axes(entries[dim]), axis))
    return P(*entries)
