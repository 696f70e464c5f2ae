"""Arrays of a checkpoint as zarr 3 arrays in a key-value store of TensorStore.

Each process writes its shards. A chunk is a shard or an equal part of one, uncompressed, with a
CRC-32C that is verified as it is read:

```
params/embed/embedding/zarr.json   shape, dtype, chunks, as zarr 3 describes them
params/embed/embedding/c/0/1       one chunk, by its position in the grid
```

Zarr: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html.
"""

import collections
import dataclasses
import functools
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore
from jax.sharding import SingleDeviceSharding

from spmd.checkpoint.arrays import shard_owners

MOST_CHUNK_BYTES = 256 << 20
"""Largest chunk: an object that fails is sent again as a whole."""
_WRITTEN_AT_ONCE = 128 << 20
_READ_AT_ONCE = 64 << 20
"""Bytes in flight of one process, or one chunk if it is larger."""

_CODECS = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]
_STORED_AS_BYTES = ("uint4", "uint2", "float8_e8m0fnu")
"""Dtypes of one byte that zarr 3 does not name; their bytes are stored as uint8."""
_Slices = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """Stored form of an array.

    Attributes:
        chunks: Shape of a chunk; it divides `shape`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each dimension."""
        return _grid(self.shape, self.chunks)

    @property
    def stored_dtype(self) -> np.dtype:
        """Dtype in the store."""
        if self.dtype.name in _STORED_AS_BYTES:
            return np.dtype(np.uint8)
        return self.dtype

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of zarr 3."""
        name = self.stored_dtype.name
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunks)}},
            "chunk_key_encoding": {"name": "default"},
            "fill_value": False if name == "bool" else 0,
            "codecs": _CODECS,
        }

    def keys(self) -> Iterator[str]:
        """Yield the name of each chunk, below the array's path."""
        for position in np.ndindex(self.grid):
            yield "/".join(["c", *map(str, position)])

    def to_json(self) -> list[Any]:
        """Return shape, dtype and chunks as JSON values."""
        return [list(self.shape), self.dtype.name, list(self.chunks)]

    @classmethod
    def from_json(cls, plain: Sequence[Any]) -> "StoredArray":
        """Invert `to_json`; a ValueError or TypeError if it is of another form."""
        shape, dtype, chunks = plain
        stored = cls(tuple(map(int, shape)), jax.numpy.dtype(dtype), tuple(map(int, chunks)))
        for size, chunk in zip(stored.shape, stored.chunks, strict=True):
            if chunk < 1 or size % chunk:
                raise ValueError(f"chunks {stored.chunks} do not divide {stored.shape}")
        return stored


def stored_array(array: jax.Array | jax.ShapeDtypeStruct) -> StoredArray:
    """Return the stored form of an array, by its shards."""
    shard = array.sharding.shard_shape(array.shape)
    return StoredArray(tuple(array.shape), np.dtype(array.dtype), _chunks(shard, array.dtype))


def _chunks(shard: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    """Return the largest equal parts of a shard with at most `MOST_CHUNK_BYTES`."""
    chunks = list(shard)
    for dimension, size in enumerate(shard):
        others = math.prod(chunks) // max(size, 1) * np.dtype(dtype).itemsize
        parts = 1
        while parts < size and (size % parts or size // parts * others > MOST_CHUNK_BYTES):
            parts += 1
        chunks[dimension] = size // parts
        if chunks[dimension] * others <= MOST_CHUNK_BYTES:
            break
    return tuple(chunks)


def write_arrays(kvstore: Any, arrays: Mapping[str, jax.Array]) -> None:
    """Write the shards of this process, and on process 0 the metadata; return once all are stored."""
    started = _Started(_WRITTEN_AT_ONCE)
    for path, array in arrays.items():
        stored = stored_array(array)
        if jax.process_index() == 0:
            text = json.dumps(stored.metadata())
            started.add(len(text), kvstore.write(f"{path}/zarr.json", text))
        opened = _open(kvstore, path, stored)
        owners = shard_owners(array.sharding, array.shape)
        written = set[tuple[int, ...]]()
        for shard in array.addressable_shards:
            start = tuple(part.start or 0 for part in shard.index)
            if owners[start] != jax.process_index() or start in written:
                continue
            written.add(start)
            values = np.asarray(shard.data).view(stored.stored_dtype)
            for inner in _parts(shard.data.shape, stored.chunks):
                part = values[inner]
                future = opened[_moved(inner, start)].write(
                    part, can_reference_source_data_indefinitely=True
                )
                started.add(part.nbytes, future.commit)
    started.wait()


def missing_chunks(
    present: Iterable[str], arrays: Mapping[str, StoredArray]
) -> dict[str, list[tuple[int, ...]]]:
    """Return path → positions of the absent chunks of each incomplete array.

    Absent metadata counts as the first chunk.
    """
    present = set(present)
    missing: dict[str, list[tuple[int, ...]]] = collections.defaultdict(list)
    for path, stored in arrays.items():
        for position, key in zip(np.ndindex(stored.grid), stored.keys(), strict=True):
            needs = {f"{path}/{key}"}
            if not any(position):
                needs.add(f"{path}/zarr.json")
            if not needs <= present:
                missing[path].append(position)
    return dict(missing)


def missing_by_process(present: Iterable[str], arrays: Mapping[str, jax.Array]) -> dict[int, int]:
    """Return process → number of its chunks absent from a store."""
    stored = {path: stored_array(array) for path, array in arrays.items()}
    counts: collections.Counter[int] = collections.Counter()
    for path, positions in missing_chunks(present, stored).items():
        array = arrays[path]
        owners = shard_owners(array.sharding, array.shape)
        shard = array.sharding.shard_shape(array.shape)
        for position in positions:
            start = []
            for number, chunk, size in zip(position, stored[path].chunks, shard, strict=True):
                start.append(number * chunk // size * size)
            counts[owners[tuple(start)]] += 1
    return dict(counts)


def read_arrays(
    kvstore: Any,
    stored: Mapping[str, StoredArray],
    targets: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
    """Read arrays by path, each directly into its sharding.

    Of each process, only the parts on its devices are read, each once.

    Raises:
        ValueError: A chunk is absent, or differs from its checksum.
    """
    pieces: dict[str, list[jax.Array]] = {path: [] for path in targets}
    reads = _Started(_READ_AT_ONCE)
    for path, target in targets.items():
        opened = _open(kvstore, path, stored[path])
        for index, devices in _local_regions(target):
            part = opened[index]
            place = functools.partial(_place, pieces[path], target, devices)
            reads.add(part.size * target.dtype.itemsize, part.read(), place)
    reads.wait()
    restored = dict[str, jax.Array]()
    for path, target in targets.items():
        restored[path] = jax.make_array_from_single_device_arrays(
            target.shape, target.sharding, pieces[path]
        )
    return restored


def _place(
    pieces: list[jax.Array],
    target: jax.ShapeDtypeStruct,
    devices: Sequence[jax.Device],
    values: np.ndarray,
) -> None:
    """Put a part of an array on its devices."""
    values = values.view(target.dtype)
    for device in devices:
        sharding = SingleDeviceSharding(device, memory_kind=target.sharding.memory_kind)
        # The copy is needed: the device's array may share the memory of the one that was read.
        pieces.append(jax.device_put(values, sharding, may_alias=False))


def _local_regions(target: jax.ShapeDtypeStruct) -> list[tuple[_Slices, list[jax.Device]]]:
    """Return the parts of an array on this process's devices, each with its devices."""
    devices_of: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    indices = target.sharding.addressable_devices_indices_map(target.shape)
    for device, index in indices.items():
        bounds = []
        for part, size in zip(index, target.shape, strict=True):
            start, stop, _ = part.indices(size)
            bounds.append((start, stop))
        devices_of.setdefault(tuple(bounds), []).append(device)
    regions = []
    for key, devices in devices_of.items():
        regions.append((tuple(itertools.starmap(slice, key)), devices))
    return regions


def _open(kvstore: Any, path: str, stored: StoredArray) -> Any:
    """Open an array for reading and writing, without a request."""
    spec = {
        "driver": "zarr3",
        "metadata": stored.metadata(),
        # Zeros are stored, too: an absent chunk is damage.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }
    below = kvstore / f"{path}/"
    return tensorstore.open(spec, kvstore=below, open=True, assume_metadata=True).result()


def _parts(shape: tuple[int, ...], chunks: tuple[int, ...]) -> Iterator[_Slices]:
    """Yield the chunks of a shard, as slices of it."""
    for position in np.ndindex(_grid(shape, chunks)):
        part = []
        for number, chunk in zip(position, chunks, strict=True):
            part.append(slice(number * chunk, (number + 1) * chunk))
        yield tuple(part)


def _grid(shape: tuple[int, ...], chunks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of chunks along each dimension."""
    return tuple(map(operator.floordiv, shape, chunks))


def _moved(index: _Slices, start: Sequence[int]) -> _Slices:
    """Return slices of a shard as slices of the array, from the shard's first index."""
    moved = []
    for part, first in zip(index, start, strict=True):
        moved.append(slice(part.start + first, part.stop + first))
    return tuple(moved)


class _Started:
    """Requests in flight, of at most some bytes together.

    The first request that fails raises its error.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = 0
        self._pending: collections.deque[tuple[int, Any, Callable[[Any], object]]] = (
            collections.deque()
        )

    def add(
        self, size: int, future: Any, use: Callable[[Any], object] = lambda result: None
    ) -> None:
        """Add a started request of some bytes; `use` is called with its result, in order."""
        self._pending.append((size, future, use))
        self._bytes += size
        while self._bytes > self._most and len(self._pending) > 1:
            self._finish_first()

    def wait(self) -> None:
        """Wait for all requests."""
        while self._pending:
            self._finish_first()

    def _finish_first(self) -> None:
        size, future, use = self._pending.popleft()
        use(future.result())
        self._bytes -= size
