"""Collectives over manual axes.

Over a whole TPU slice they take two steps: over half of the devices, and over pairs. XLA:TPU
compiles a reduce-scatter over all devices of a slice to an all-reduce, with twice the bytes on the
wire, and on v5e also a small all-gather over 64 devices or more; over a part of a slice it does
not. Device `i` along the axis is in the half of its parity and in the pair `{i, i ^ 1}`, so shards
are in the order of a single collective (decision 0036).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from spmd.sharding.dims import Dims
from spmd.sharding.mesh import AnyMesh, chip_of_mesh, is_tpu

_Groups = list[list[int]]
"""Indices along an axis of the devices of each group."""


def gather_dims(x: Array, mesh: AnyMesh | None, dims: Dims) -> Array:
    """Gather each dimension over its axes."""
    for dim, axes in enumerate(dims):
        for axis in reversed(axes):
            x = all_gather(x, mesh, axis, dim)
    return x


def all_gather(x: Array, mesh: AnyMesh | None, axis: str, dim: int) -> Array:
    """Gather a dimension over an axis."""
    steps: tuple[_Groups | None, ...] = (None,)
    count = jax.lax.axis_size(axis)
    if _is_small(mesh, x, count) and _spans_slice(mesh, axis):
        steps = (_pairs(count), _halves(count))
    for groups in steps:
        x = jax.lax.all_gather(x, axis, axis=dim, tiled=True, axis_index_groups=groups)
    return x


def gather_within(x: Array, mesh: AnyMesh | None, axis: str, slices: int) -> Array:
    """Gather the arrays of each slice along a new first dimension, over an axis across slices."""
    whole = jax.lax.axis_size(axis)
    count = whole // slices
    by_slice: _Groups = []
    halves: _Groups = []
    for start in range(0, whole, count):
        stop = start + count
        by_slice.append(list(range(start, stop)))
        for first in (start, start + 1):
            halves.append(list(range(first, stop, 2)))
    steps: tuple[_Groups, ...] = (by_slice,)
    if _is_small(mesh, x, count) and _spans_slice(mesh, axis, slices):
        steps = (_pairs(whole), halves)
    x = x[None]  # [device of the slice, …]
    for groups in steps:
        x = jax.lax.all_gather(x, axis, axis=0, tiled=True, axis_index_groups=groups)
    return x


def psum_scatter(x: Array, mesh: AnyMesh | None, axis: str, dim: int, dtype: jnp.dtype) -> Array:
    """Sum over an axis and scatter a dimension over it.

    The sum has a dtype of its own; terms are sent in that of `x`.
    """
    count = jax.lax.axis_size(axis)
    is_whole = _spans_slice(mesh, axis)
    if not is_whole and not is_tpu(mesh):
        return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True).astype(dtype)
    x = jnp.moveaxis(x, dim, 0)  # of other dimensions XLA:TPU scatters none, or a copy
    if is_whole:
        total = _psum_scatter_in_two_steps(x, axis, count, dtype)
    else:
        total = jax.lax.psum_scatter(x, axis, tiled=True).astype(dtype)
    return jnp.moveaxis(total, 0, dim)


def _psum_scatter_in_two_steps(x: Array, axis: str, count: int, dtype: jnp.dtype) -> Array:
    """Sum over an axis and scatter the first dimension: over half of the devices, then in pairs."""
    if count > 2:
        halves = _halves(count)
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True, axis_index_groups=halves)
    first, second = jnp.split(x, 2)
    is_second = jax.lax.axis_index(axis) % 2 == 1
    there_and_back = []
    for one, other in _pairs(count):
        there_and_back += [[one, other], [other, one]]
    received = jax.lax.ppermute(jnp.where(is_second, first, second), axis, there_and_back)
    own = jnp.where(is_second, second, first)
    return own.astype(dtype) + received.astype(dtype)


def _is_small(mesh: AnyMesh | None, x: Array, count: int) -> bool:
    """Return whether XLA compiles the gather of this shard over a slice to an all-reduce."""
    limits = chip_of_mesh(mesh).small_gathers
    if limits is None or count < limits.devices:
        return False
    return count * math.prod(x.shape) * x.dtype.itemsize < limits.size


def _halves(count: int) -> _Groups:
    """Return the groups of even and of odd indices."""
    return [list(range(0, count, 2)), list(range(1, count, 2))]


def _pairs(count: int) -> _Groups:
    """Return the groups of an even index and the next one."""
    return [[first, first + 1] for first in range(0, count, 2)]


def _spans_slice(mesh: AnyMesh | None, axis: str, slices: int = 1) -> bool:
    """Return whether the devices along an axis form `slices` whole slices of TPUs."""
    if not is_tpu(mesh):
        return False
    count = mesh.shape[axis] // slices
    numbers = [getattr(device, "slice_index", 0) for device in mesh.devices.flat]
    if count % 2 or count != numbers.count(numbers[0]):
        return False
    by_axis = np.reshape(numbers, mesh.devices.shape)
    lines = np.moveaxis(by_axis, mesh.axis_names.index(axis), -1).reshape(-1, count)
    return bool((lines == lines[:, :1]).all())
