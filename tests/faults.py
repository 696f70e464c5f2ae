"""Silent data corruption, made by hand: one device's copy of one shard gets other bits."""

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from spmd import tree


def altered(array, device, change):
    """The array with one device's shard replaced by `change` of its bytes: a function of uint8[elements, bytes]."""
    shards = []
    for shard in array.addressable_shards:
        data = shard.data
        if shard.device.id == device.id:
            values = np.array(data)
            size = values.dtype.itemsize
            new = change(np.frombuffer(values.tobytes(), np.uint8).reshape(-1, size).copy())
            place = SingleDeviceSharding(shard.device, memory_kind=array.sharding.memory_kind)
            data = jax.device_put(
                np.frombuffer(new.tobytes(), values.dtype).reshape(values.shape), place
            )
        shards.append(data)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def flip(array, device, element=0, bit=0):
    """The array with one bit of one element other on one device, and nowhere else."""

    def change(elements):
        elements[element, bit // 8] ^= 1 << bit % 8
        return elements

    return altered(array, device, change)


def with_flip(state, path, device, **where):
    """A tree with one bit of the array at a path flipped on one device."""
    paths = tree.flatten(state)
    assert path in paths, list(paths)
    return tree.map_with_path(lambda p, x: flip(x, device, **where) if p == path else x, state)
