"""Bitwise digests of sharded arrays, and devices with different replicas.

A digest is two 32-bit sums over the words of a shard, each word mixed with its position first.
Mixing is a bijection of the word, so a change of one word always changes both sums. Any other
change is missed with probability 2⁻⁶⁴, for a mixing as good as random and shards of up to 2³²
words. Every device reads its own shards without a copy; communication is one all-gather of eight
bytes for each array.
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
from spmd.optim.stochastic_rounding import mix_bits
from spmd.sharding.mesh import AnyMesh

LANES = (0x9E3779B1, 0x85EBCA77)
"""Multiplier of the position in each of the two sums. Two words at different positions that are
equal in one sum differ in the other, because half the difference of the two is odd."""

Digests = np.ndarray
"""uint32[devices, leaves, 2]: devices as in `mesh.devices.flat`, leaves as in the tree."""


def make_digest(abstract: tree.PyTree, mesh: AnyMesh) -> Callable[[tree.PyTree], jax.Array]:
    """Compile `digest_shards` for a tree, with a replicated result.

    `abstract` is a tree of `jax.ShapeDtypeStruct`s with `NamedSharding`s on `mesh`, such as
    `abstract_state(plan)`. Of an array in host memory one layer, or a few MiB, is on the device at
    a time.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    replicated = NamedSharding(mesh, P())
    digest = jax.jit(lambda arrays: digest_shards(arrays, shardings), out_shardings=replicated)
    lowered = digest.lower(abstract)
    return lowered.compile()


def digest_arrays(arrays: tree.PyTree) -> str:
    """Return a digest of the bits, shapes and dtypes of arrays, by path, in hex.

    It does not depend on their sharding. Arrays in host memory are on the device one at a time.
    """
    digest = hashlib.sha256()
    for path, x in sorted(tree.flatten(arrays).items()):
        on_device = NamedSharding(x.sharding.mesh, x.sharding.spec)
        replicated = NamedSharding(x.sharding.mesh, P())
        sums = _whole_sums(jax.device_put(x, on_device), replicated)
        line = f"{path} {x.dtype}{list(x.shape)} {jax.device_get(sums).tolist()}\n"
        digest.update(line.encode())
    return digest.hexdigest()[:32]


@functools.partial(jax.jit, static_argnums=1)
def _whole_sums(x: jax.Array, replicated: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(_sums(x, x.shape), replicated)


def digest_shards(arrays: tree.PyTree, shardings: tree.PyTree) -> jax.Array:
    """Digest every device's shard of each array as uint32[devices, leaves, 2].

    Call it inside of `jax.jit`. `shardings` are the arrays' `NamedSharding`s, on one mesh.
    """
    leaves = jax.tree.leaves(arrays)
    flat = jax.tree.leaves(shardings)
    mesh = flat[0].mesh

    def digest_local(*shards: jax.Array) -> jax.Array:
        sums = [_digest(x, sharding) for x, sharding in zip(shards, flat, strict=True)]
        return jnp.stack(sums)[None]  # [1, leaves, 2]

    digest = jax.shard_map(
        digest_local,
        mesh=mesh,
        in_specs=tuple(sharding.spec for sharding in flat),
        out_specs=P(mesh.axis_names),
        check_vma=False,
    )
    return digest(*leaves)


def _digest(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return uint32[2] of a shard; one in host memory is digested in chunks."""
    if sharding.memory_kind != "pinned_host":
        return _sums(x, x.shape)
    device = jax.memory.Space.Device
    chunk = _chunk(x)
    if chunk is None:
        return _sums(jax.device_put(x, device), x.shape)
    dim = chunk.dim
    size = x.shape[dim] // chunk.chunks

    def add(index: jax.Array, sums: jax.Array) -> jax.Array:
        piece = jax.lax.dynamic_slice_in_dim(x, index * size, size, dim)
        piece = jax.device_put(piece, device)
        return sums + _sums(piece, x.shape, dim, index * size)

    zeros = jnp.zeros(2, jnp.uint32)
    return jax.lax.fori_loop(0, chunk.chunks, add, zeros)


def _chunk(x: jax.Array) -> UpdateChunk | None:
    """Return the chunks of a shard in host memory, such as its layers; None if it is small."""
    if x.ndim > 2:
        return UpdateChunk((), 0, x.shape[0])
    return chunk_large_array("", x, P(), {})


def _sums(
    x: jax.Array, shape: tuple[int, ...], dim: int = 0, start: int | jax.Array = 0
) -> jax.Array:
    """Return uint32[2] of a piece of a shard of `shape`; the piece begins at `start` of `dim`."""
    words = _words(x)
    # A last dimension may hold the words of an element.
    sizes = (*shape, *words.shape[len(shape) :])
    position = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for i in reversed(range(words.ndim)):
        offset = start if i == dim else 0
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, i)
        index += jnp.asarray(offset).astype(jnp.uint32)
        position += index * jnp.uint32(stride % 2**32)
        stride *= sizes[i]
    sums = []
    for lane in LANES:
        mixed = mix_bits(words + position * jnp.uint32(lane))
        sums.append(mixed.sum(dtype=jnp.uint32))
    return jnp.stack(sums)


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32.

    Wide or composite elements have a last dimension for their words.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return _words(jax.random.key_data(x))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _words(jnp.stack([x.real, x.imag], axis=-1))
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = min(jax.dtypes.itemsize_bits(x.dtype), 32)
    words = jax.lax.bitcast_convert_type(x, f"uint{bits}")
    return words.astype(jnp.uint32)


def replica_differences(digests: Digests, abstract: tree.PyTree, mesh: AnyMesh) -> list[Problem]:
    """Return a problem for each block of an array with different replicas.

    The arguments are those of `make_digest`. It names the devices in the minority, or all of them
    if no value has a majority.
    """
    problems = []
    for leaf_number, (path, leaf) in enumerate(tree.flatten(abstract).items()):
        high = digests[:, leaf_number, 0].astype(np.uint64)
        low = digests[:, leaf_number, 1]
        values = high << np.uint64(32) | low  # [device]
        blocks = _blocks(leaf.sharding, leaf.shape)  # [device]
        order = np.argsort(blocks, kind="stable")
        sorted_blocks = blocks[order]
        sorted_values = values[order]
        same_block = sorted_blocks[1:] == sorted_blocks[:-1]
        differ = same_block & (sorted_values[1:] != sorted_values[:-1])
        for block in np.unique(sorted_blocks[1:][differ]):
            indices = np.flatnonzero(blocks == block)
            devices = [mesh.devices.flat[i] for i in indices]
            problems.append(_of_block(path, devices, values[indices].tolist(), leaf))
    return problems


@functools.lru_cache(maxsize=1024)
def _blocks(sharding: NamedSharding, shape: tuple[int, ...]) -> np.ndarray:
    """Return the number of each device's block, in the order of the mesh.

    Replicas have equal numbers.
    """
    known: dict[tuple[tuple[int, int], ...], int] = {}
    numbers = []
    for device in sharding.mesh.devices.flat:
        block = _bounds(sharding, shape, device)
        numbers.append(known.setdefault(block, len(known)))
    return np.array(numbers)


def _bounds(
    sharding: NamedSharding, shape: tuple[int, ...], device: jax.Device
) -> tuple[tuple[int, int], ...]:
    """Return the first index and the end of a device's block in each dimension."""
    slices = sharding.devices_indices_map(shape)[device]
    bounds = []
    for part, size in zip(slices, shape, strict=True):
        start, stop, _ = part.indices(size)
        bounds.append((start, stop))
    return tuple(bounds)


def _of_block(
    path: str, devices: list[jax.Device], values: list[int], leaf: jax.ShapeDtypeStruct
) -> Problem:
    """Return the problem of a block: its devices, and their different values."""
    majority = _majority(values)
    odd = [device for device, value in zip(devices, values, strict=True) if value != majority]
    named = ", ".join(map(name_device, odd))
    if majority is None:
        what = f"{named} hold the same block and differ, and no value has a majority"
        fix = (
            "restore a checkpoint from before; run spmd check on each device to find the one "
            "that miscomputes"
        )
    else:
        holds = "holds" if len(odd) == 1 else "hold"
        what = f"{named} {holds} other bits than the other replicas"
        fix = f"take {named} out of service, and restore a checkpoint from before"
    bounds = _bounds(leaf.sharding, leaf.shape, devices[0])
    block = ", ".join(f"{start}:{stop}" for start, stop in bounds)
    return Problem(path, what, f"block [{block}]: {_held(devices, values)}", fix)


def _majority(values: list[int]) -> int | None:
    """Return the most common value; None if another one is equally common."""
    (first, count), *others = collections.Counter(values).most_common()
    if others and others[0][1] == count:
        return None
    return first


def _held(devices: list[jax.Device], values: list[int]) -> str:
    """Return each value with its devices, in words."""
    holders = collections.defaultdict(list)
    for device, value in zip(devices, values, strict=True):
        holders[value].append(str(device.id))
    held = []
    for value, ids in holders.items():
        noun = "device" if len(ids) == 1 else "devices"
        held.append(f"{value:016x} on {noun} {', '.join(ids)}")
    return ", ".join(held)


def name_device(device: jax.Device) -> str:
    """Return a device's number and process: `device 0 (process 0)`."""
    return f"device {device.id} (process {device.process_index})"
