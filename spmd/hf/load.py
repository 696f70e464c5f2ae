"""Parameters from a Hugging Face folder, straight into the shards of a plan.

Files are read a few rows at a time. Each device gets its part of these rows, turned and cast, where it belongs in the
shard. So beside the shards themselves there are never more than a few dozen MiB, however large a tensor or a stack is.
"""

import dataclasses
import functools
import itertools
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
from spmd.errors import CheckpointError, Problem
from spmd.hf.family import TensorSource, tensor_sources
from spmd.hf.fields import collect_errors
from spmd.hf.folder import HFFolder, open_folder, tensor_problems
from spmd.hf.safetensors import SafetensorsFile

AT_ONCE = 4 << 20
"""Bytes that are read before they go to the devices: few enough to stay in a processor's cache."""

_THREADS = 4
_ALIGNMENT = 64
_DEVICE = "device"
_ON_DEVICES = frozenset({np.dtype(np.float32), np.dtype(np.float16), np.dtype(jnp.bfloat16)})


def load_params(folder: Path, abstract: Any) -> Any:
    """The parameters of a Hugging Face folder, each device its own shards.

    Args:
        folder: Holds config.json and safetensors files.
        abstract: The parameters as `jax.ShapeDtypeStruct`s with shardings, such as `plan.abstract_params`; they are
            cast to these dtypes.

    Raises:
        CheckpointError: Everything that keeps the folder from being these parameters; nothing has been allocated.
    """
    with open_folder(Path(folder)) as found:
        return load_published(found, abstract)


def load_published(found: HFFolder, abstract: Any) -> Any:
    """`load_params`, from a folder that is open.

    Args:
        found: The folder.
        abstract: The parameters as `jax.ShapeDtypeStruct`s with shardings.
    """
    table = check_published(found, abstract)
    memory = _memory((AT_ONCE,), np.uint8)
    with ThreadPoolExecutor(_THREADS) as pool:
        return tree.map_with_path(
            lambda path, leaf: _Loader(table[path], leaf, found.files, memory, pool).load(), abstract
        )


def check_published(found: HFFolder, abstract: Any) -> dict[str, TensorSource]:
    """Which tensors each parameter is made of.

    Raises:
        CheckpointError: Tensors that are missing, extra, or of another shape or kind, all of them.
    """
    leaves = tree.flatten(abstract)
    table: dict[str, TensorSource] = {}
    problems: list[Problem] = []
    names, ignored = found.family.lines(found.config, found.files)
    with collect_errors(problems):
        table = tensor_sources(names, {path: leaf.shape for path, leaf in leaves.items()})
    if not problems:
        floats = {path: jnp.issubdtype(leaf.dtype, jnp.floating) for path, leaf in leaves.items()}
        tensors = {name: found.tensor(name) for name in found.files}
        problems = [*tensor_problems(table.values(), floats, ignored, tensors), *found.copies]
    if problems:
        raise CheckpointError(f"{found.path} does not fit the model:", problems)
    return table


@dataclasses.dataclass(frozen=True)
class _Cut:
    """What one device needs of one tensor: a region of it, whose rows are read whole."""

    file: SafetensorsFile
    tensor: str
    region: tuple[slice, ...]

    @property
    def rows(self) -> tuple[str, int]:
        """What is read for it: devices that need the same rows share them."""
        return self.tensor, self.region[0].start

    @property
    def kind(self) -> np.dtype:
        """The tensor's dtype."""
        return self.file.tensors[self.tensor].dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the tensor."""
        return self.file.tensors[self.tensor].row_bytes


@dataclasses.dataclass(frozen=True)
class _Loader:
    """Fills the shards of one parameter, one tensor after the other."""

    source: TensorSource
    leaf: Any
    files: Mapping[str, SafetensorsFile]
    memory: np.ndarray
    pool: ThreadPoolExecutor

    def load(self) -> jax.Array:
        """The parameter."""
        leaf = self.leaf
        boxes = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        local, depth = leaf.sharding.shard_shape(leaf.shape), len(self.source.stack)
        on_host = all(device.platform == "cpu" for device in boxes)
        shards = (_HostShards if on_host else _DeviceShards)(tuple(boxes), local, leaf.dtype, self.pool)
        rows = len(local) - 1 if self.source.name.how.transposed else depth  # our dimension along which files are read
        for place in itertools.product(*map(range, local[:depth])):
            cuts = {device: self._cut(box, local, place) for device, box in boxes.items()}
            for offset, count in _windows(local[rows], _rows_at_once(cuts.values())):
                index = [*place, *(0 for _ in local[depth:])]
                index[rows] = offset
                shards.write(self._read(cuts, offset, count), index)
        sharding = NamedSharding(leaf.sharding.mesh, leaf.sharding.spec)
        loaded = jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards.arrays())
        return loaded if leaf.sharding.memory_kind == sharding.memory_kind else jax.device_put(loaded, leaf.sharding)

    def _cut(self, box: tuple[slice, ...], local: tuple[int, ...], place: tuple[int, ...]) -> _Cut:
        """What a device with that part of the parameter needs at a place of its own stack."""
        depth, start = len(place), [side.start or 0 for side in box]
        name = self.source.tensor(tuple(first + i for first, i in zip(start, place, strict=False)))
        ours = tuple(slice(first, first + size) for first, size in zip(start[depth:], local[depth:], strict=True))
        return _Cut(self.files[name], name, self.source.region(ours))

    def _read(self, cuts: Mapping[Any, _Cut], offset: int, count: int) -> Iterator[np.ndarray]:
        """Some rows of what each device needs, turned as the parameter is; views of what is read."""
        how, depth = self.source.name.how, len(self.source.stack)
        kinds = {cut.kind for cut in cuts.values()}
        memory, used = self.memory, 0
        there: dict[tuple[str, int], np.ndarray] = {}
        for cut in cuts.values():
            if cut.rows not in there:
                start, size = cut.region[0].start + offset, count * cut.row_bytes
                if size > len(memory) - used:
                    memory, used = _memory((size,), np.uint8), 0  # a row that is larger than what is read at once
                there[cut.rows] = cut.file.rows(cut.tensor, start, start + count, memory[used:])
                used += -(-size // _ALIGNMENT) * _ALIGNMENT
            piece = there[cut.rows][:, *cut.region[1:]]
            piece = piece.T if how.transposed else piece
            piece = piece if len(kinds) == 1 and kinds <= _ON_DEVICES else piece.astype(self.leaf.dtype)
            yield piece[(None,) * depth]


def _memory(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Pages of this process' own, so aligned that a CPU device may take them as they are."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8, size).view(dtype).reshape(shape)


def _rows_at_once(cuts: Collection[_Cut]) -> int:
    """How many rows each device gets at once, so that neither what is read nor what devices get is too much."""
    read = sum({cut.rows: cut.row_bytes for cut in cuts}.values())
    kept = sum(math.prod(side.stop - side.start for side in cut.region[1:]) * cut.kind.itemsize for cut in cuts)
    return max(1, AT_ONCE // max(read, kept))


def _windows(rows: int, at_once: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows: windows of one size, so that one program serves all; the last may reach back."""
    parts = -(-rows // at_once)
    size = -(-rows // parts)
    for part in range(parts):
        yield min(part * size, rows - size), size


class _HostShards:
    """The shards of CPU devices: memory of this process, which becomes theirs as it is.

    Args:
        devices: Whose shards.
        shape: Of each.
        dtype: Of each.
        pool: Threads for what takes the host a while.
    """

    def __init__(
        self, devices: tuple[jax.Device, ...], shape: tuple[int, ...], dtype: Any, pool: ThreadPoolExecutor
    ) -> None:
        self._shards, self._pool = {device: _memory(shape, dtype) for device in devices}, pool

    def write(self, pieces: Iterable[np.ndarray], index: Sequence[int]) -> None:
        """Writes each device's piece into its shard, all at one place."""

        def write(device: jax.Device, piece: np.ndarray) -> None:
            if not piece.flags.c_contiguous:
                piece = np.asarray(jax.device_put(piece, device))  # turns a matrix several times faster than NumPy
            region = tuple(slice(first, first + size) for first, size in zip(index, piece.shape, strict=True))
            np.copyto(self._shards[device][region], piece, casting="unsafe")

        for _ in self._pool.map(write, self._shards, pieces):
            pass  # errors are raised, and what was read may be read over

    def arrays(self) -> list[jax.Array]:
        """The shards."""
        return [jax.device_put(shard, device) for device, shard in self._shards.items()]


class _DeviceShards:
    """The shards of accelerators: pieces travel there and are written in place, so the host never has a shard.

    Args:
        devices: Whose shards.
        shape: Of each.
        dtype: Of each.
        pool: Threads for what takes the host a while.
    """

    def __init__(
        self, devices: tuple[jax.Device, ...], shape: tuple[int, ...], dtype: Any, pool: ThreadPoolExecutor
    ) -> None:
        self._devices, self._mesh = devices, Mesh(np.array(devices), (_DEVICE,))
        self._target = _zeros((len(devices) * shape[0], *shape[1:]), dtype, self._mesh)

    def write(self, pieces: Iterable[np.ndarray], index: Sequence[int]) -> None:
        """Writes each device's piece into its shard, all at one place."""
        there = [jax.device_put(piece, device) for piece, device in zip(pieces, self._devices, strict=True)]
        shape = (len(there) * there[0].shape[0], *there[0].shape[1:])
        joined = jax.make_array_from_single_device_arrays(shape, NamedSharding(self._mesh, P(_DEVICE)), there)
        self._target = _place(self._target, joined, np.array(index, np.int32), self._mesh)
        jax.block_until_ready(self._target)  # what was read is read over next

    def arrays(self) -> list[jax.Array]:
        """The shards."""
        shards = {shard.device: shard.data for shard in self._target.addressable_shards}
        return [shards[device] for device in self._devices]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), NamedSharding(mesh, P(_DEVICE)))


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _place(target: jax.Array, pieces: jax.Array, index: jax.Array, mesh: Mesh) -> jax.Array:
    def place(shard: jax.Array, piece: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(shard, piece.astype(shard.dtype), tuple(index))

    specs = P(_DEVICE), P(_DEVICE), P()
    return jax.shard_map(place, mesh=mesh, in_specs=specs, out_specs=P(_DEVICE))(target, pieces, index)
