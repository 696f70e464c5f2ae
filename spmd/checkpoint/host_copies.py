"""Copies of a state in host memory, from which a checkpoint is written while training goes on."""

import collections
import functools
import mmap
import operator
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

_ALIGNMENT = 64  # of the bytes that an array of a CPU device can take without a copy


class HostCopies:
    """Copies of arrays in host memory, those of one save at a time.

    The allocators of accelerators keep pinned memory for the next copy. That of CPU devices returns
    it, and new memory is ten times slower to write than known memory: 160 against 13 ms for 236 MB.
    So for CPU devices a buffer is kept here.
    """

    def __init__(self) -> None:
        self._buffer = np.zeros(0, np.uint8)

    def of(self, arrays: Mapping[str, jax.Array]) -> Callable[[], dict[str, jax.Array]]:
        """Copy arrays, one copy of each distinct shard per process; done on return.

        Replicas within a process are not copied, so state replicated over the devices of a machine
        takes its memory once.

        Returns:
            Makes arrays of the copies, also in another thread; they are valid until the next call.
        """
        shapes = dict[str, tuple[int, ...]]()
        shardings = dict[str, Sharding]()
        paths = list[str]()  # of each shard to copy
        shards = list[jax.Array]()
        for path, array in arrays.items():
            shapes[path] = array.shape
            shardings[path] = _one_replica_per_process(array.sharding)
            devices = shardings[path].device_set
            for shard in array.addressable_shards:
                if shard.device in devices:
                    paths.append(path)
                    shards.append(shard.data)
        return functools.partial(_assemble, shapes, shardings, paths, self._copies(shards))

    def _copies(self, shards: Sequence[jax.Array]) -> Callable[[], Sequence[jax.Array]]:
        """Copy shards, each of one device; the result makes arrays of the copies."""
        places = list[SingleDeviceSharding]()
        are_of_cpus = True
        for shard in shards:
            (device,) = shard.devices()
            places.append(SingleDeviceSharding(device, memory_kind="pinned_host"))
            are_of_cpus &= device.platform == "cpu"
        if are_of_cpus:
            values = self._in_buffer(list(map(np.asarray, shards)))
            return lambda: _aliases(values, places)
        copies = jax.block_until_ready(jax.device_put(list(shards), places, may_alias=False))
        return lambda: copies

    def _in_buffer(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Copy arrays into the buffer; return them there."""
        starts = list[int]()
        size = 0
        for value in values:
            starts.append(size)
            size += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        if len(self._buffer) < size:
            self._buffer = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        copies = list[np.ndarray]()
        for start, value in zip(starts, values, strict=True):
            place = self._buffer[start : start + value.nbytes]
            copies.append(place.view(value.dtype).reshape(value.shape))
        for copy, value in zip(copies, values, strict=True):
            np.copyto(copy, value)
        return copies


def _assemble(
    shapes: Mapping[str, tuple[int, ...]],
    shardings: Mapping[str, Sharding],
    paths: Sequence[str],
    copies: Callable[[], Sequence[jax.Array]],
) -> dict[str, jax.Array]:
    """Return arrays of copies, each of the path in its place in `paths`."""
    parts = collections.defaultdict[str, list[jax.Array]](list)
    for path, copy in zip(paths, copies(), strict=True):
        parts[path].append(copy)
    assembled = dict[str, jax.Array]()
    for path, shape in shapes.items():
        sharding = shardings[path].with_memory_kind("pinned_host")
        assembled[path] = jax.make_array_from_single_device_arrays(shape, sharding, parts[path])
    return assembled


def _aliases(
    values: Sequence[np.ndarray], places: Sequence[SingleDeviceSharding]
) -> Sequence[jax.Array]:
    """Return arrays of CPU devices in the memory of others."""
    with jax.enable_x64(True):  # otherwise arrays of 64 bits, made under it, would be cast
        return jax.device_put(list(values), list(places), may_alias=True)


@functools.cache
def _one_replica_per_process(sharding: Sharding) -> Sharding:
    """Keep one device for each distinct shard in a process."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = sharding.mesh
    used = set(jax.tree.leaves(tuple(sharding.spec)))
    process_of = np.vectorize(operator.attrgetter("process_index"), otypes=[int])
    devices = mesh.devices
    for axis, name in enumerate(mesh.axis_names):
        if name not in used:
            rows = np.moveaxis(devices, axis, 0).reshape(devices.shape[axis], -1)
            _, first = np.unique(process_of(rows), axis=0, return_index=True)
            devices = np.take(devices, sorted(first), axis)
    kept = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    return NamedSharding(kept, sharding.spec)
