"""Bitwise digests of sharded arrays, and the devices whose replicas differ.

A digest is two 32-bit sums over the words of a shard, each word mixed with its position first. Mixing is a bijection of
the word, so a change of one word always changes both sums. Any other change is missed with probability 2⁻⁶⁴, for a
mixing as good as random and shards of up to 2³² words. Every device reads its own shards without a copy; communication
is one all-gather of eight bytes for each array.
"""

import collections
import functools
import hashlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import Problem
from spmd.host_memory.chunks import UpdateChunk, chunk_large_array
from spmd.sharding.mesh import AnyMesh

LANES = (0x9E3779B1, 0x85EBCA77)
"""Multiplier of the position in each of the two sums. Two words at different positions that are equal in one sum differ
in the other, because half the difference of the two is odd."""

Digests = np.ndarray
"""uint32[devices, leaves, 2]: devices as in `mesh.devices.flat`, leaves as in the tree."""


def make_digest(abstract: tree.PyTree, mesh: AnyMesh) -> Callable[[tree.PyTree], jax.Array]:
    """Compile the program that digests every shard of a tree as `digest_shards` does, replicated.

    `abstract` is a tree of `jax.ShapeDtypeStruct`s with `NamedSharding`s on `mesh`, such as `abstract_state(plan)`. Of
    an array in host memory one layer, or a few MiB, is on the device at a time.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    replicated = NamedSharding(mesh, P())
    digest = jax.jit(lambda arrays: digest_shards(arrays, shardings), out_shardings=replicated)
    return digest.lower(abstract).compile()


def digest_arrays(arrays: tree.PyTree) -> str:
    """Return a digest of the bits, shapes and dtypes of arrays, by path, in hex; it does not depend on their sharding.

    Arrays in host memory are on the device one at a time.
    """
    digest = hashlib.sha256()
    for path, x in sorted(tree.flatten(arrays).items()):
        on_device = NamedSharding(x.sharding.mesh, x.sharding.spec)
        sums = _whole_sums(jax.device_put(x, on_device), NamedSharding(x.sharding.mesh, P()))
        digest.update(f"{path} {x.dtype}{list(x.shape)} {jax.device_get(sums).tolist()}\n".encode())
    return digest.hexdigest()[:32]


@functools.partial(jax.jit, static_argnums=1)
def _whole_sums(x: jax.Array, replicated: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(_sums(x, x.shape), replicated)


def digest_shards(arrays: tree.PyTree, shardings: tree.PyTree) -> jax.Array:
    """Digest every device's shard of each array as uint32[devices, leaves, 2]; call it inside of `jax.jit`.

    `shardings` are the arrays' `NamedSharding`s, on one mesh.
    """
    leaves, flat = jax.tree.leaves(arrays), jax.tree.leaves(shardings)
    mesh = flat[0].mesh
    rows = jax.shard_map(
        lambda *shards: jnp.stack([_digest(x, sharding) for x, sharding in zip(shards, flat, strict=True)])[None],
        mesh=mesh,
        in_specs=tuple(sharding.spec for sharding in flat),
        out_specs=P(mesh.axis_names),
        check_vma=False,
    )
    return rows(*leaves)


def _digest(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    if sharding.memory_kind != "pinned_host":
        return _sums(x, x.shape)
    device = jax.memory.Space.Device
    chunk = UpdateChunk((), 0, x.shape[0]) if x.ndim > 2 else chunk_large_array("", x, P(), {})
    if chunk is None:
        return _sums(jax.device_put(x, device), x.shape)
    dim, size = chunk.dim, x.shape[chunk.dim] // chunk.chunks

    def add(index: jax.Array, sums: jax.Array) -> jax.Array:
        piece = jax.device_put(jax.lax.dynamic_slice_in_dim(x, index * size, size, dim), device)
        return sums + _sums(piece, x.shape, dim, index * size)

    return jax.lax.fori_loop(0, chunk.chunks, add, jnp.zeros(2, jnp.uint32))


def _sums(x: jax.Array, shape: tuple[int, ...], dim: int = 0, start: int | jax.Array = 0) -> jax.Array:
    """Return uint32[2] of a piece of a shard of `shape`; the piece begins at `start` of `dim`."""
    words = _words(x)
    position = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for i in reversed(range(words.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, i)
        index += jnp.asarray(start if i == dim else 0).astype(jnp.uint32)
        position += index * jnp.uint32(stride % 2**32)
        stride *= shape[i] if i < len(shape) else words.shape[i]
    return jnp.stack([_mix(words + position * jnp.uint32(lane)).sum(dtype=jnp.uint32) for lane in LANES])


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32; wide or composite elements have a last dimension for their words."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return _words(jax.random.key_data(x))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _words(jnp.stack([x.real, x.imag], axis=-1))
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = jax.dtypes.itemsize_bits(x.dtype)
    return jax.lax.bitcast_convert_type(x, f"uint{min(bits, 32)}").astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """Apply the finalizer of MurmurHash3 (Appleby, 2011), a bijection; each bit changes half of the output bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def replica_differences(digests: Digests, abstract: tree.PyTree, mesh: AnyMesh) -> list[Problem]:
    """Return a problem for each block of an array whose replicas differ; the arguments are those of `make_digest`.

    It names the devices in the minority, or all of them if no value has a majority.
    """
    problems = []
    for leaf_number, (path, leaf) in enumerate(tree.flatten(abstract).items()):
        low, high = digests[:, leaf_number, 1], digests[:, leaf_number, 0].astype(np.uint64)
        values, blocks = high << np.uint64(32) | low, _blocks(leaf.sharding, leaf.shape)
        order = np.argsort(blocks, kind="stable")
        same_block = blocks[order][1:] == blocks[order][:-1]
        differ = same_block & (values[order][1:] != values[order][:-1])
        for block in np.unique(blocks[order][1:][differ]):
            indices = np.flatnonzero(blocks == block)
            problems.append(_of_block(path, [mesh.devices.flat[i] for i in indices], values[indices].tolist(), leaf))
    return problems


@functools.lru_cache(maxsize=1024)
def _blocks(sharding: NamedSharding, shape: tuple[int, ...]) -> np.ndarray:
    """Return the number of each device's block, in the order of the mesh; replicas have equal numbers."""
    known: dict[tuple[tuple[int, int], ...], int] = {}
    bounds = [_bounds(sharding, shape, device) for device in sharding.mesh.devices.flat]
    return np.array([known.setdefault(block, len(known)) for block in bounds])


def _bounds(sharding: NamedSharding, shape: tuple[int, ...], device: jax.Device) -> tuple[tuple[int, int], ...]:
    """Return the first index and the end of a device's block in each dimension."""
    parts = sharding.devices_indices_map(shape)[device]
    return tuple(part.indices(size)[:2] for part, size in zip(parts, shape, strict=True))


def _of_block(path: str, devices: list[jax.Device], values: list[int], leaf: jax.ShapeDtypeStruct) -> Problem:
    (first, count), *rest = collections.Counter(values).most_common()
    majority = first if count > (rest[0][1] if rest else 0) else None
    odd = [device for device, value in zip(devices, values, strict=True) if value != majority]
    named = ", ".join(map(name_device, odd))
    if majority is None:
        what = f"{named} hold the same block and differ, and no value has a majority"
        fix = "restore a checkpoint from before; run spmd check on each device to find the one that miscomputes"
    else:
        what = f"{named} {'holds' if len(odd) == 1 else 'hold'} other bits than the other replicas"
        fix = f"take {named} out of service, and restore a checkpoint from before"
    block = ", ".join(f"{start}:{stop}" for start, stop in _bounds(leaf.sharding, leaf.shape, devices[0]))
    holders = collections.defaultdict(list)
    for device, value in zip(devices, values, strict=True):
        holders[value].append(str(device.id))
    held = ", ".join(f"{value:016x} on device{'s' * (len(ids) > 1)} {', '.join(ids)}" for value, ids in holders.items())
    return Problem(path, what, f"block [{block}]: {held}", fix)


def name_device(device: jax.Device) -> str:
    """Return a device's number and process: `device 0 (process 0)`."""
    return f"device {device.id} (process {device.process_index})"
