"""Collectives over axes that are manual here; over a whole TPU slice in two steps: half of its devices, and pairs.

XLA:TPU makes an all-reduce, with twice the bytes on the wire, of a reduce-scatter over all devices of a slice, and on
v5e of a small all-gather over 64 devices or more; over a part of a slice it does not. Device `i` along the axis is in
the half of its parity and in the pair `{i, i ^ 1}`, so shards are in the order of a single collective (decision 0036).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from spmd.sharding.dims import Dims
from spmd.sharding.mesh import AnyMesh, is_kind

_SMALL, _MANY = 32 * 2**20, 64
"""Bytes of a gathered array below which XLA makes an all-reduce on v5e, and devices from which on it does."""


def gather_dims(x: Array, mesh: AnyMesh | None, dims: Dims) -> Array:
    """Gather each dimension over its axes."""
    for dim, axes in enumerate(dims):
        for axis in reversed(axes):
            x = all_gather(x, mesh, axis, dim)
    return x


def all_gather(x: Array, mesh: AnyMesh | None, axis: str, dim: int) -> Array:
    """Gather a dimension over an axis."""
    steps: tuple[list[list[int]] | None, ...] = (None,)
    count = jax.lax.axis_size(axis)
    if _is_small(x, count) and _spans_slice(mesh, axis, "TPU v5 lite"):
        steps = (_pairs(count), _halves(count))
    for groups in steps:
        x = jax.lax.all_gather(x, axis, axis=dim, tiled=True, axis_index_groups=groups)
    return x


def gather_within(x: Array, mesh: AnyMesh | None, axis: str, slices: int) -> Array:
    """Gather the arrays of a slice along a new first dimension, over an axis that spans some slices."""
    whole = jax.lax.axis_size(axis)
    count = whole // slices
    starts = range(0, whole, count)
    steps: tuple[list[list[int]], ...] = ([list(range(start, start + count)) for start in starts],)
    if _is_small(x, count) and _spans_slice(mesh, axis, "TPU v5 lite", slices):
        steps = (_pairs(whole), [[start + i for i in half] for start in starts for half in _halves(count)])
    x = x[None]
    for groups in steps:
        x = jax.lax.all_gather(x, axis, axis=0, tiled=True, axis_index_groups=groups)
    return x


def psum_scatter(x: Array, mesh: AnyMesh | None, axis: str, dim: int, dtype: jnp.dtype) -> Array:
    """Sum over an axis and scatter a dimension over it.

    The sum has a dtype of its own; terms are sent in that of `x`.
    """
    count, is_whole = jax.lax.axis_size(axis), _spans_slice(mesh, axis, "TPU")
    if not is_whole and not is_kind(mesh, "TPU"):
        return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True).astype(dtype)
    x = jnp.moveaxis(x, dim, 0)  # of other dimensions XLA:TPU scatters none, or a copy
    if not is_whole:
        return jnp.moveaxis(jax.lax.psum_scatter(x, axis, tiled=True).astype(dtype), 0, dim)
    if count > 2:
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True, axis_index_groups=_halves(count))
    first, second = jnp.split(x, 2)
    is_second = jax.lax.axis_index(axis) % 2 == 1
    there_and_back = [pair[::step] for pair in _pairs(count) for step in (1, -1)]
    received = jax.lax.ppermute(jnp.where(is_second, first, second), axis, there_and_back)
    return jnp.moveaxis(jnp.where(is_second, second, first).astype(dtype) + received.astype(dtype), 0, dim)


def _is_small(x: Array, count: int) -> bool:
    return count >= _MANY and count * math.prod(x.shape) * x.dtype.itemsize < _SMALL


def _halves(count: int) -> list[list[int]]:
    return [list(range(first, count, 2)) for first in range(2)]


def _pairs(count: int) -> list[list[int]]:
    return [[first, first + 1] for first in range(0, count, 2)]


def _spans_slice(mesh: AnyMesh | None, axis: str, kind: str, slices: int = 1) -> bool:
    """Return whether the devices along an axis are all those of some slices, of a kind of TPU."""
    if not is_kind(mesh, kind):
        return False
    count, numbers = mesh.shape[axis] // slices, [getattr(device, "slice_index", 0) for device in mesh.devices.flat]
    lines = np.moveaxis(np.reshape(numbers, mesh.devices.shape), mesh.axis_names.index(axis), -1).reshape(-1, count)
    return count % 2 == 0 and count == numbers.count(numbers[0]) and bool((lines == lines[..., :1]).all())
