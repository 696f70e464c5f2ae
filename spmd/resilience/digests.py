"""Bitwise digests of arrays where they lie, and which devices hold other bits than their replicas.

A digest is two 32-bit sums over the words of a shard, each word mixed with its place first. Mixing is a bijection of
the word, so a change of one word, of any bits in it, always changes both sums. Any other change, such as two words that
change places, is missed with a probability of 2⁻⁶⁴, for a mixing as good as random and shards of up to 2³² words.

Every device reads its own shards and makes no copy of them. What is sent is one all-gather of eight bytes for each
array, so that every process comes to the same verdict.
"""

import collections
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import Problem
from spmd.optim.offload_chunks import UpdateChunk, chunk_large_array
from spmd.sharding.mesh import AnyMesh

LANES = (0x9E3779B1, 0x85EBCA77)
"""What a place is multiplied with in each of the two sums. Two words at different places that give the same in one sum
do not in the other, because half the difference of the two is odd."""

Digests = np.ndarray
"""uint32[devices, leaves, 2]: devices as in `mesh.devices.flat`, leaves as in the tree."""


def make_digest(abstract: tree.PyTree, mesh: AnyMesh) -> Callable[[tree.PyTree], jax.Array]:
    """The compiled program that digests every shard of a tree.

    Args:
        abstract: A tree of `jax.ShapeDtypeStruct`s with `NamedSharding`s on `mesh`, such as `abstract_state(plan)`.
            Of an array in host memory one layer, or a few MiB, is on the device at a time.
        mesh: With devices.

    Returns:
        The tree → uint32[devices, leaves, 2], the same on every device.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    whole = NamedSharding(mesh, P())
    digest = jax.jit(lambda arrays: digest_shards(arrays, shardings), out_shardings=whole)
    return digest.lower(abstract).compile()


def digest_shards(arrays: tree.PyTree, shardings: tree.PyTree) -> jax.Array:
    """Digests every device's shard of each array; to be traced inside of a compiled program.

    Args:
        arrays: A tree of arrays.
        shardings: Their `NamedSharding`s, a tree like it, on one mesh.

    Returns:
        uint32[devices, leaves, 2].
    """
    leaves, places = jax.tree.leaves(arrays), jax.tree.leaves(shardings)
    mesh = places[0].mesh
    rows = jax.shard_map(
        lambda *shards: jnp.stack([_digest(x, place) for x, place in zip(shards, places, strict=True)])[None],
        mesh=mesh,
        in_specs=tuple(place.spec for place in places),
        out_specs=P(mesh.axis_names),
        check_vma=False,
    )
    return rows(*leaves)


def _digest(x: jax.Array, place: NamedSharding) -> jax.Array:
    """uint32[2] of one shard."""
    if place.memory_kind != "pinned_host":
        return _sums(x, x.shape)
    device = jax.memory.Space.Device
    cut = UpdateChunk((), 0, x.shape[0]) if x.ndim > 2 else chunk_large_array("", x, P(), {})
    if cut is None:
        return _sums(jax.device_put(x, device), x.shape)
    dim, size = cut.dim, x.shape[cut.dim] // cut.chunks

    def add(index: jax.Array, sums: jax.Array) -> jax.Array:
        piece = jax.device_put(jax.lax.dynamic_slice_in_dim(x, index * size, size, dim), device)
        return sums + _sums(piece, x.shape, dim, index * size)

    return jax.lax.fori_loop(0, cut.chunks, add, jnp.zeros(2, jnp.uint32))


def _sums(x: jax.Array, shape: tuple[int, ...], dim: int = 0, start: int | jax.Array = 0) -> jax.Array:
    """uint32[2] of a piece of a shard of `shape` that begins at `start` of `dim`."""
    words = _words(x)
    place = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for i in reversed(range(words.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, i)
        along += jnp.asarray(start if i == dim else 0).astype(jnp.uint32)
        place += along * jnp.uint32(stride % 2**32)
        stride *= shape[i] if i < len(shape) else words.shape[i]
    return jnp.stack([_mixed(words + place * jnp.uint32(lane)).sum(dtype=jnp.uint32) for lane in LANES])


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as uint32; wide or composite elements have a last dimension for their parts."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return _words(jax.random.key_data(x))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _words(jnp.stack([x.real, x.imag], axis=-1))
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = jax.dtypes.itemsize_bits(x.dtype)
    return jax.lax.bitcast_convert_type(x, f"uint{min(bits, 32)}").astype(jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    """The last step of MurmurHash3 (Appleby, 2011), a bijection of 32 bits in which each bit changes half of all."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def replica_differences(digests: Digests, abstract: tree.PyTree, mesh: AnyMesh) -> list[Problem]:
    """Which devices hold other bits than the replicas of the same block.

    Args:
        digests: From `make_digest`, on the host.
        abstract: The tree it was made for.
        mesh: Its mesh.

    Returns:
        A problem for each block of an array whose replicas are not all equal, none where all are. The devices in the
        minority are named; where no value has a majority, all of them are.
    """
    return [
        problem
        for number, (path, leaf) in enumerate(tree.flatten(abstract).items())
        for problem in _of_leaf(path, digests[:, number], leaf, mesh)
    ]


def _of_leaf(path: str, digests: Digests, leaf: jax.ShapeDtypeStruct, mesh: AnyMesh) -> list[Problem]:
    values = digests[:, 0].astype(np.uint64) << np.uint64(32) | digests[:, 1]
    numbers = _blocks(leaf.sharding, leaf.shape)
    order = np.argsort(numbers, kind="stable")
    same_block = numbers[order][1:] == numbers[order][:-1]
    differ = same_block & (values[order][1:] != values[order][:-1])
    problems = []
    for number in np.unique(numbers[order][1:][differ]):
        places = np.flatnonzero(numbers == number)
        problems.append(_of_block(path, [mesh.devices.flat[i] for i in places], values[places], leaf))
    return problems


@functools.lru_cache(maxsize=1024)
def _blocks(sharding: NamedSharding, shape: tuple[int, ...]) -> np.ndarray:
    """For each device of the mesh the number of the block that it holds; replicas have one number."""
    known: dict[tuple[tuple[int, int, int], ...], int] = {}
    held = sharding.devices_indices_map(shape)
    keys = [
        tuple(cut.indices(size) for cut, size in zip(held[device], shape, strict=True))
        for device in sharding.mesh.devices.flat
    ]
    return np.array([known.setdefault(key, len(known)) for key in keys])


def _of_block(path: str, devices: list[jax.Device], values: np.ndarray, leaf: jax.ShapeDtypeStruct) -> Problem:
    (first, count), *rest = collections.Counter(values.tolist()).most_common()
    most = first if count > (rest[0][1] if rest else 0) else None
    cuts = leaf.sharding.devices_indices_map(leaf.shape)[devices[0]]
    block = ", ".join(f"{a}:{b}" for a, b, _ in (c.indices(n) for c, n in zip(cuts, leaf.shape, strict=True)))
    odd = [device for device, value in zip(devices, values.tolist(), strict=True) if value != most]
    named = ", ".join(map(name_device, odd))
    if most is None:
        what = f"{named} hold the same block and differ, and no value has a majority"
        fix = "restore a checkpoint from before; run spmd check on each device to find the one that miscomputes"
    else:
        what = f"{named} {'holds' if len(odd) == 1 else 'hold'} other bits than the other replicas"
        fix = f"take {named} out of service, and restore a checkpoint from before"
    held = ", ".join(f"{value:016x} on {_numbers(devices, values, value)}" for value in dict.fromkeys(values.tolist()))
    return Problem(path, what, f"block [{block}]: {held}", fix)


def name_device(device: jax.Device) -> str:
    """A device as a person finds it.

    Example:
        >>> name_device(jax.devices()[0])
        'device 0 (process 0)'
    """
    return f"device {device.id} (process {device.process_index})"


def _numbers(devices: list[jax.Device], values: np.ndarray, value: int) -> str:
    holders = [str(d.id) for d, v in zip(devices, values.tolist(), strict=True) if v == value]
    return f"{'device' if len(holders) == 1 else 'devices'} {', '.join(holders)}"
