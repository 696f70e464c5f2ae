"""Load parameters of a Hugging Face folder directly into the shards of a plan.

Files are read a few rows at a time; each device gets its part of these rows, transposed and cast.
Beside the shards, a load takes a few dozen MiB, however large a tensor or a stack is.
"""

import dataclasses
import functools
import math
import mmap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import CheckpointError, Problem, first_of
from spmd.hf.family import TensorSource, tensor_sources
from spmd.hf.fields import collect_errors
from spmd.hf.folder import HFFolder, open_folder, tensor_problems
from spmd.hf.safetensors import SafetensorsFile, Tensor

BUFFER_BYTES = 4 << 20
"""Bytes that are read before they are copied to the devices; small enough for a processor's
cache."""

_THREADS = 4
_ALIGNMENT = 64
_DEVICE = "device"
# in bits NumPy tests them 30 times faster
_EXPONENTS = {np.dtype(np.float16): 0x7C00, np.dtype(jnp.bfloat16): 0x7F80}
_DEVICE_DTYPES = frozenset({np.dtype(np.float32), np.dtype(np.float16), np.dtype(jnp.bfloat16)})


def load_params(folder: Path, abstract: Any) -> Any:
    """Load the parameters of a Hugging Face folder, each device its own shards.

    `abstract` are the parameters as `jax.ShapeDtypeStruct`s with shardings, such as
    `plan.abstract_params`; tensors are cast to these dtypes. All mismatches are raised as one
    CheckpointError, before anything is allocated.
    """
    with open_folder(Path(folder)) as found:
        return load_published(found, abstract)


def load_published(found: HFFolder, abstract: Any) -> Any:
    """Load parameters as `load_params` does, from an opened folder."""
    sources = check_published(found, abstract)
    buffer, non_finite = _allocate((BUFFER_BYTES,), np.uint8), set[tuple[str, str]]()
    with ThreadPoolExecutor(_THREADS) as pool:
        params = tree.map_with_path(
            lambda path, leaf: _Loader(
                sources[path], leaf, found.files, buffer, pool, non_finite
            ).load(),
            abstract,
        )
    if non_finite:
        what, fix = (
            "has values that are NaN or infinite",
            "get the file again: training cannot mend it",
        )
        problems = [Problem(path, what, f"in the tensor {name}", fix) for path, name in non_finite]
        raise CheckpointError(f"{found.path} cannot be loaded:", first_of(problems))
    return params


def check_published(found: HFFolder, abstract: Any) -> dict[str, TensorSource]:
    """Return the tensors of each parameter.

    None may be missing, extra, or of the wrong shape or kind of dtype.
    """
    leaves = tree.flatten(abstract)
    sources: dict[str, TensorSource] = {}
    problems: list[Problem] = []
    names, ignored = found.tables
    with collect_errors(problems):
        sources = tensor_sources(names, {path: leaf.shape for path, leaf in leaves.items()})
    if not problems:
        floats = {path: jnp.issubdtype(leaf.dtype, jnp.floating) for path, leaf in leaves.items()}
        problems = [
            *tensor_problems(sources.values(), floats, ignored, found.tensors),
            *found.tied_mismatches,
        ]
    if problems:
        raise CheckpointError(f"{found.path} does not fit the model:", problems)
    return sources


@dataclasses.dataclass(frozen=True)
class _Region:
    """Region of one tensor that one device needs; full rows are read for it."""

    file: SafetensorsFile
    name: str
    slices: tuple[slice, ...]

    @property
    def key(self) -> tuple[str, int]:
        """Key of the rows that are read; devices with the same key share them."""
        return self.name, self.slices[0].start

    @property
    def tensor(self) -> Tensor:
        return self.file.tensors[self.name]


@dataclasses.dataclass(frozen=True)
class _Loader:
    """Loader of one parameter: fills its shards tensor by tensor."""

    source: TensorSource
    leaf: Any
    files: Mapping[str, SafetensorsFile]
    buffer: np.ndarray
    pool: ThreadPoolExecutor
    non_finite: set[tuple[str, str]]  # paths and tensors with NaN or infinite values

    def load(self) -> jax.Array:
        leaf = self.leaf
        boxes = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        local, depth = leaf.sharding.shard_shape(leaf.shape), len(self.source.stack_shape)
        on_host = all(device.platform == "cpu" for device in boxes)
        shards = (_HostShards if on_host else _DeviceShards)(tuple(boxes), local, leaf.dtype)
        # the tensor's first dimension
        row_dim = len(local) - 1 if self.source.mapping.layout.transposed else depth
        for place in np.ndindex(*local[:depth]):
            regions = {device: self._region(box, local, place) for device, box in boxes.items()}
            rows, at_once = local[row_dim], _rows_at_once(regions.values())
            # windows of one size, so that one program serves all
            count = -(-rows // -(-rows // at_once))
            for start in range(0, rows, count):
                offset = min(start, rows - count)  # the last window may overlap
                index = [*place, *(0 for _ in local[depth:])]
                index[row_dim] = offset
                shards.write(self._read(regions, offset, count), index, self.pool)
        sharding = NamedSharding(leaf.sharding.mesh, leaf.sharding.spec)
        loaded = jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards.arrays())
        return (
            loaded
            if leaf.sharding.memory_kind == sharding.memory_kind
            else jax.device_put(loaded, leaf.sharding)
        )

    def _region(
        self, box: tuple[slice, ...], local: tuple[int, ...], place: tuple[int, ...]
    ) -> _Region:
        """Return what a device with shard `box` needs at `place`, an index into its part of the stack."""
        depth, start = len(place), [side.start or 0 for side in box]
        name = self.source.tensor_name(
            tuple(first + i for first, i in zip(start, place, strict=False))
        )
        ours = tuple(
            slice(first, first + size)
            for first, size in zip(start[depth:], local[depth:], strict=True)
        )
        return _Region(self.files[name], name, self.source.region(ours))

    def _read(
        self, regions: Mapping[Any, _Region], offset: int, count: int
    ) -> Iterator[np.ndarray]:
        """Yield some rows of each device's region in the parameter's layout.

        Views of the buffer where possible.
        """
        layout, depth = self.source.mapping.layout, len(self.source.stack_shape)
        dtypes = {region.tensor.dtype for region in regions.values()}
        buffer, used = self.buffer, 0
        rows: dict[tuple[str, int], np.ndarray] = {}
        for region in regions.values():
            if region.key not in rows:
                start, size = region.slices[0].start + offset, count * region.tensor.row_bytes
                if size > len(buffer) - used:
                    buffer, used = _allocate((size,), np.uint8), 0  # one row exceeds the buffer
                rows[region.key] = region.file.rows(
                    region.name, start, start + count, buffer[used:]
                )
                if not _all_finite(rows[region.key]):
                    self.non_finite.add((self.source.path, region.name))
                used += -(-size // _ALIGNMENT) * _ALIGNMENT
            piece = rows[region.key][:, *region.slices[1:]]
            piece = piece.T if layout.transposed else piece
            piece = (
                piece
                if len(dtypes) == 1 and dtypes <= _DEVICE_DTYPES
                else piece.astype(self.leaf.dtype)
            )
            yield piece[(None,) * depth]


def _all_finite(x: np.ndarray) -> bool:
    exponent = _EXPONENTS.get(x.dtype)
    if exponent is None:
        return bool(np.isfinite(x).all())
    return not ((x.view(np.uint16) & exponent) == exponent).any()


def _allocate(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Allocate page-aligned memory, which a CPU device can use without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8, size).view(dtype).reshape(shape)


def _rows_at_once(regions: Collection[_Region]) -> int:
    """Return the rows per read for which neither the rows read nor the parts that devices get exceed the buffer."""
    read = sum({region.key: region.tensor.row_bytes for region in regions}.values())
    used = sum(
        math.prod(s.stop - s.start for s in r.slices[1:]) * r.tensor.dtype.itemsize for r in regions
    )
    return max(1, BUFFER_BYTES // max(read, used))


class _HostShards:
    """Shards of CPU devices: memory of this process, passed to the devices without a copy."""

    def __init__(self, devices: Sequence[jax.Device], shape: tuple[int, ...], dtype: Any) -> None:
        self._shards = {device: _allocate(shape, dtype) for device in devices}

    def write(
        self, pieces: Iterable[np.ndarray], index: Sequence[int], pool: ThreadPoolExecutor
    ) -> None:
        """Write one piece per device into its shard, all at the same index."""

        def write(device: jax.Device, piece: np.ndarray) -> None:
            if not piece.flags.c_contiguous:
                # transposes several times faster than NumPy
                piece = np.asarray(jax.device_put(piece, device))
            region = tuple(
                slice(first, first + size) for first, size in zip(index, piece.shape, strict=True)
            )
            np.copyto(self._shards[device][region], piece, casting="unsafe")

        for _ in pool.map(write, self._shards, pieces):
            pass  # raises errors, and the buffer may be reused afterwards

    def arrays(self) -> list[jax.Array]:
        return [jax.device_put(shard, device) for device, shard in self._shards.items()]


class _DeviceShards:
    """Shards of accelerators: pieces are copied to the devices and written in place.

    The host never holds a shard.
    """

    def __init__(self, devices: Sequence[jax.Device], shape: tuple[int, ...], dtype: Any) -> None:
        self._devices, self._mesh = devices, Mesh(np.array(devices), (_DEVICE,))
        self._target = _zeros((len(devices) * shape[0], *shape[1:]), dtype, self._mesh)

    def write(
        self, pieces: Iterable[np.ndarray], index: Sequence[int], pool: ThreadPoolExecutor
    ) -> None:
        sent = [
            jax.device_put(piece, device)
            for piece, device in zip(pieces, self._devices, strict=True)
        ]
        shape = (len(sent) * sent[0].shape[0], *sent[0].shape[1:])
        joined = jax.make_array_from_single_device_arrays(
            shape, NamedSharding(self._mesh, P(_DEVICE)), sent
        )
        self._target = _write_pieces(self._target, joined, np.array(index, np.int32), self._mesh)
        jax.block_until_ready(self._target)  # the buffer is reused next

    def arrays(self) -> list[jax.Array]:
        shards = {shard.device: shard.data for shard in self._target.addressable_shards}
        return [shards[device] for device in self._devices]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.Array:
    return jax.lax.with_sharding_constraint(
        jnp.zeros(shape, dtype), NamedSharding(mesh, P(_DEVICE))
    )


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _write_pieces(target: jax.Array, pieces: jax.Array, index: jax.Array, mesh: Mesh) -> jax.Array:
    def write(shard: jax.Array, piece: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(shard, piece.astype(shard.dtype), tuple(index))

    specs = P(_DEVICE), P(_DEVICE), P()
    return jax.shard_map(write, mesh=mesh, in_specs=specs, out_specs=P(_DEVICE))(
        target, pieces, index
    )
