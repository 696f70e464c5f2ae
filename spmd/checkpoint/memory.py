"""Newest state of a process in host memory, beyond the end of the process.

A supervisor makes a `MemoryStore` before it forks the training process: two slots, each an anonymous
file in memory (memfd_create(2)). The training process writes its shards into the older slot, and the
next process reads the newer one. The files have no name: the kernel frees them with the last process
that has them open, and the size of /dev/shm, 64 MiB in most containers, does not limit them.

A slot counts once its header is written, which is last, and has a checksum of everything before it.
So a process that is killed while it writes leaves the other slot.

No shard is on the host twice: each is copied from its device straight into the slot, through a
buffer of at most `CHUNK` bytes where devices have memory of their own.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from spmd.checkpoint.tree import serialized
from spmd.errors import Problem
from spmd.tree import human_bytes

SLOTS = 2
"""Copies of the state of one process: one is complete while the other is written."""
CHUNK = 256 << 20
"""Bytes of shards that are copied from devices to the host at once."""
MEMORY_SHARE = 0.8
"""Fraction of the available memory that copies may take."""

_PAGE = 4096
_ALIGNMENT = 64
_RECORD_BYTES = 1 << 20
# valid, step, generation, process, bytes of the record and of the arrays, CRC of both, of these
_HEADER = struct.Struct("<qqqqqqqq")
_FINGERPRINT = 32  # bytes of SHA-256, after the header
_HEADER_BYTES = 256


@dataclasses.dataclass(frozen=True)
class _Part:
    """Shard of an array in a slot; `shard` is its place among the array's addressable ones."""

    path: str
    shard: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Layout:
    """Places of the shards of a state in a slot: each distinct shard of this process once.

    Attributes:
        parts: In their order in the slot.
        part_of: Path → the part of each addressable device, by its number.
        nbytes: Size of all shards.
        fingerprint: SHA-256 of paths, dtypes, shapes and shards.
    """

    parts: tuple[_Part, ...]
    part_of: Mapping[str, Mapping[int, int]]
    nbytes: int
    fingerprint: bytes

    @classmethod
    def of(cls, leaves: Mapping[str, Any]) -> Self:
        """Return the layout of arrays, or of their shapes with shardings, by path."""
        parts = list[_Part]()
        part_of = dict[str, dict[int, int]]()
        described = list[Any]()
        offset = 0
        for path, leaf in leaves.items():
            stored = serialized(leaf)
            found = dict[str, int]()
            part_of[path] = {}
            devices = _device_indices(leaf.sharding, leaf.shape)
            for number, (device, index) in enumerate(devices.items()):
                whole = (slice(None),) * (len(stored.shape) - len(leaf.shape))
                key = str((*index, *whole))
                if key not in found:
                    found[key] = len(parts)
                    shape = leaf.sharding.shard_shape(leaf.shape) + stored.shape[len(leaf.shape) :]
                    part = _Part(path, number, shape, stored.dtype, offset)
                    parts.append(part)
                    offset += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
                part_of[path][device.id] = found[key]
            described.append([path, str(stored.dtype), stored.shape, list(found)])
        text = json.dumps(described).encode()
        return cls(tuple(parts), part_of, offset, hashlib.sha256(text).digest())


def _device_indices(sharding: Sharding, shape: tuple[int, ...]) -> dict[jax.Device, Any]:
    """Return the index of the shard of each addressable device, in the order of shards."""
    found: dict[Any, Any] = dict(sharding.addressable_devices_indices_map(shape))
    return dict(sorted(found.items(), key=lambda item: item[0].id))


@dataclasses.dataclass(frozen=True)
class Saved:
    """Complete copy in a slot: its step, and its writer by generation and process."""

    slot: int
    step: int
    generation: int
    process: int
    fingerprint: bytes


class MemoryStore:
    """Two slots for the shards of one process, shared with processes forked later."""

    def __init__(self, page: mmap.mmap, files: Sequence[int]) -> None:
        self._page = page
        self._files = tuple(files)
        self._maps: dict[int, mmap.mmap] = {}
        self._pool = ThreadPoolExecutor(1, "memory")
        self._sealing: Future[None] | None = None
        self._incoming: tuple[Saved, int, int] | None = None

    @classmethod
    def create(cls) -> Self:
        """Return an empty store; it takes no memory before the first copy."""
        files = [os.memfd_create(f"spmd-state-{slot}") for slot in range(SLOTS)]
        return cls(mmap.mmap(-1, _PAGE), files)

    def newest(self) -> Saved | None:
        """Return the newest complete copy."""
        return max(self.saved(), key=lambda saved: (saved.step, saved.generation), default=None)

    def saved(self) -> list[Saved]:
        """Return all complete copies, without a check of their checksums."""
        found = list[Saved]()
        for slot in range(SLOTS):
            header = self._header(slot)
            if header is not None:
                found.append(header)
        return found

    def clear(self, after: int = -1) -> None:
        """Drop copies of later steps than `after`; by default, all."""
        self.wait()
        for saved in self.saved():
            if saved.step > after:
                self._invalidate(saved.slot)

    def wait(self) -> None:
        """Wait until the last copy has its checksum and counts."""
        sealing = self._sealing
        if sealing is not None:
            sealing.result()

    def reserve(self, nbytes: int) -> None:
        """Take the memory of all slots for copies of so many bytes, as the first ones are slow."""
        for slot in range(SLOTS):
            self._mapped(slot, nbytes + _RECORD_BYTES)

    def write(
        self,
        step: int,
        generation: int,
        process: int,
        arrays: Mapping[str, jax.Array],
        record: Mapping[str, Any],
        layout: Layout,
    ) -> int:
        """Copy arrays in their serialized form into the older slot, and return its number.

        Returns once the copies are made, so arrays may be donated then; the copy counts a little
        later, when a thread has computed its checksum.
        """
        self.wait()
        slot = self._older_slot()
        self._invalidate(slot)
        text = json.dumps(dict(record)).encode()
        start = _data_start(text)
        mapped = self._mapped(slot, start + layout.nbytes)
        mapped[: len(text)] = text
        _copy_shards(arrays, layout, np.frombuffer(mapped, np.uint8)[start:])
        size = start + layout.nbytes
        fields = step, generation, process, len(text), layout.nbytes
        self._sealing = self._pool.submit(
            self._seal, slot, mapped, size, fields, layout.fingerprint
        )
        return slot

    def read(
        self, saved: Saved, leaves: Mapping[str, Any]
    ) -> tuple[dict[str, jax.Array], dict[str, Any]] | None:
        """Return the arrays of a copy, each in the sharding of its leaf, and its record.

        None if the copy has other arrays or shards, or has changed since it was written.

        Args:
            leaves: Path → shape, dtype and sharding.
        """
        layout = Layout.of(leaves)
        content = self.content(saved)
        if content is None or saved.fingerprint != layout.fingerprint:
            return None
        text, data = content
        return _place(leaves, layout, data), json.loads(text)

    def content(self, saved: Saved) -> tuple[bytes, np.ndarray] | None:
        """Return the record of a copy as text, and its bytes; None if its checksum differs."""
        *_, checksum, _ = self._fields(saved.slot)
        found = self.bytes_of(saved)
        if found is None:
            return None
        record, data = found
        mapped = self._maps[saved.slot]
        if _checksum(mapped, _data_start(record) + len(data)) != checksum:
            return None
        return found

    def bytes_of(self, saved: Saved) -> tuple[bytes, np.ndarray] | None:
        """Return the record of a copy as text, and its bytes, not verified; None if they are gone."""
        *_, record_bytes, nbytes, _, _ = self._fields(saved.slot)
        start = _data_start_of(record_bytes)
        if not record_bytes or os.fstat(self._files[saved.slot]).st_size < start + nbytes:
            return None
        mapped = self._mapped(saved.slot, start + nbytes)
        data = np.frombuffer(mapped, np.uint8)[start : start + nbytes]
        return bytes(mapped[:record_bytes]), data

    def put(self, copy: Saved, record: bytes, nbytes: int) -> np.ndarray:
        """Return the bytes of the older slot, to fill with a copy of another process; then `seal`.

        Args:
            copy: What it is of; its slot is that in the other process.
        """
        slot = self._older_slot()
        self._invalidate(slot)
        start = _data_start(record)
        mapped = self._mapped(slot, start + nbytes)
        mapped[: len(record)] = record
        self._incoming = dataclasses.replace(copy, slot=slot), len(record), nbytes
        return np.frombuffer(mapped, np.uint8)[start : start + nbytes]

    def seal(self) -> None:
        """Complete the copy of `put`."""
        assert self._incoming is not None, "was put"
        copy, record_bytes, nbytes = self._incoming
        size = _data_start_of(record_bytes) + nbytes
        fields = copy.step, copy.generation, copy.process, record_bytes, nbytes
        self._seal(copy.slot, self._mapped(copy.slot, size), size, fields, copy.fingerprint)

    def _seal(
        self,
        slot: int,
        mapped: mmap.mmap,
        size: int,
        fields: tuple[int, ...],
        fingerprint: bytes,
    ) -> None:
        """Write the header of a slot: from now on it counts."""
        values = 1, *fields, _checksum(mapped, size)
        own = _checksum_of_header(values, fingerprint)
        at = slot * _HEADER_BYTES
        self._page[at + _HEADER.size : at + _HEADER.size + _FINGERPRINT] = fingerprint
        _HEADER.pack_into(self._page, at, *values, own)

    def _invalidate(self, slot: int) -> None:
        at = slot * _HEADER_BYTES
        self._page[at : at + _HEADER.size] = bytes(_HEADER.size)

    def _fields(self, slot: int) -> tuple[int, ...]:
        return _HEADER.unpack_from(self._page, slot * _HEADER_BYTES)

    def _header(self, slot: int) -> Saved | None:
        """Return the header of a slot; None if it is not complete."""
        *values, own = self._fields(slot)
        at = slot * _HEADER_BYTES + _HEADER.size
        fingerprint = self._page[at : at + _FINGERPRINT]
        if not values[0] or _checksum_of_header(values, fingerprint) != own:
            return None
        return Saved(slot, values[1], values[2], values[3], fingerprint)

    def _older_slot(self) -> int:
        """Return a slot without a complete copy, or else the older one."""
        order = {slot: (-1, -1) for slot in range(SLOTS)}
        for saved in self.saved():
            order[saved.slot] = saved.step, saved.generation
        return min(order, key=lambda slot: order[slot])

    def _mapped(self, slot: int, size: int) -> mmap.mmap:
        """Return the memory of a slot, made larger if it is too small."""
        file = self._files[slot]
        if os.fstat(file).st_size < size:
            os.posix_fallocate(file, 0, size)
            self._maps.pop(slot, None)
        mapped = self._maps.get(slot)
        if mapped is None or len(mapped) < size:
            # with page tables: otherwise the first copies into it are slower
            mapped = mmap.mmap(file, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._maps[slot] = mapped
        return mapped


def _data_start(record: bytes) -> int:
    return _data_start_of(len(record))


def _data_start_of(record_bytes: int) -> int:
    """Return the first byte of the arrays: on a page after the record."""
    return -(-record_bytes // _PAGE) * _PAGE


def _checksum(mapped: mmap.mmap, size: int) -> int:
    with memoryview(mapped) as whole, whole[:size] as content:
        return zlib.crc32(content)


def _checksum_of_header(values: Sequence[int], fingerprint: bytes) -> int:
    return zlib.crc32(repr(tuple(values)).encode() + fingerprint)


def _copy_shards(arrays: Mapping[str, jax.Array], layout: Layout, target: np.ndarray) -> None:
    """Copy each distinct shard to its place in a slot."""
    shards_of = {path: _sorted_shards(array) for path, array in arrays.items()}
    for parts in _chunks(layout.parts):
        shards = [shards_of[part.path][part.shard] for part in parts]
        for part, shard in zip(parts, _on_host(shards), strict=True):
            place = target[part.offset : part.offset + part.nbytes]
            np.copyto(place.view(part.dtype).reshape(part.shape), np.asarray(shard))


def _chunks(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Yield parts of at most `CHUNK` bytes together, or a single one."""
    chunk = list[_Part]()
    size = 0
    for part in parts:
        if chunk and size + part.nbytes > CHUNK:
            yield chunk
            chunk = []
            size = 0
        chunk.append(part)
        size += part.nbytes
    if chunk:
        yield chunk


def _sorted_shards(array: jax.Array) -> list[jax.Array]:
    """Return the addressable shards in the order of their devices, as `Layout.of` counts them."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    return [shard.data for shard in shards]


def _on_host(shards: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Return shards in host memory; those of CPU devices are there already."""
    if all(_device_of(shard).platform == "cpu" for shard in shards):
        return shards
    places = [_host_of(_device_of(shard)) for shard in shards]
    return jax.block_until_ready(jax.device_put(list(shards), places, may_alias=False))


def _device_of(shard: jax.Array) -> jax.Device:
    return next(iter(shard.devices()))


@functools.cache
def _host_of(device: jax.Device) -> SingleDeviceSharding:
    return SingleDeviceSharding(device, memory_kind="pinned_host")


def _place(leaves: Mapping[str, Any], layout: Layout, data: np.ndarray) -> dict[str, jax.Array]:
    """Copy the shards of a slot to their devices."""
    views = list[np.ndarray]()
    for part in layout.parts:
        place = data[part.offset : part.offset + part.nbytes]
        views.append(place.view(part.dtype).reshape(part.shape))
    values = list[np.ndarray]()
    places = list[SingleDeviceSharding]()
    for path, leaf in leaves.items():
        kind = leaf.sharding.memory_kind
        for device in _device_indices(leaf.sharding, leaf.shape):
            values.append(views[layout.part_of[path][device.id]])
            places.append(SingleDeviceSharding(device, memory_kind=kind))
    copies = iter(jax.device_put(values, places, may_alias=False))
    placed = dict[str, jax.Array]()
    for path, leaf in leaves.items():
        own = [next(copies) for _ in layout.part_of[path]]
        shape = serialized(leaf).shape
        placed[path] = jax.make_array_from_single_device_arrays(shape, leaf.sharding, own)
    jax.block_until_ready(placed)  # the slot may be written again
    return placed


def memory_problem(
    nbytes: int, others: int = 0, processes: int = 1, available: int | None = None
) -> Problem | None:
    """Return a problem if copies of the state do not fit into the memory of this host.

    Args:
        nbytes: Size of the state of one process.
        others: Size of that of another process, which is kept for it.
        processes: Processes on this host.
        available: Free bytes; by default, those of this machine and of its control group.
    """
    if available is None:
        available = available_memory()
    needed = processes * SLOTS * (nbytes + others)
    if available is None or needed <= MEMORY_SHARE * available:
        return None
    states = human_bytes(nbytes)
    if others:
        states = f"({states} + {human_bytes(others)} of another process)"
    detail = f"{SLOTS} copies × {states}"
    if processes > 1:
        detail += f" × {processes} processes"
    detail += f" = {human_bytes(needed)}, and {MEMORY_SHARE:.0%} of {human_bytes(available)} "
    detail += f"available are {human_bytes(MEMORY_SHARE * available)}"
    what = "is too small for copies of the state"
    fix = "recovery.memory_every=-1, for no copies"
    if others:
        fix += "; or recovery.memory_peer=never, for no copies of other processes"
    return Problem("host memory", what, detail, fix)


def available_memory() -> int | None:
    """Return the bytes of memory available to this process; None if unknown."""
    found = list[int]()
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(1024 * int(line.split()[1]))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        most = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        found.append(most - used)
    return min(found, default=None)
