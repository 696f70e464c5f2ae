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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.distributed.hosts import gather_json
from spmd.errors import CheckpointError, Problem, first_of
from spmd.hf.family import TensorSource, mapped_variables, tensor_sources
from spmd.hf.fields import collect_errors
from spmd.hf.folder import HFFolder, open_folder, tensor_problems
from spmd.hf.safetensors import TensorReader
from spmd.hf.tensor_region import TensorRegion
from spmd.model_interface.wrapped_param import abstract_params, store_as
from spmd.resilience.consistency import check_hosts_agree
from spmd.storage.address import Location, locate

_NONE: Mapping[str, Any] = FrozenDict()
_THREADS = 4
_ALIGNMENT = 64
_DEVICE = "device"
# in bits NumPy tests them 30 times faster
_EXPONENTS = {np.dtype(np.float16): 0x7C00, np.dtype(jnp.bfloat16): 0x7F80}
_DEVICE_DTYPES = frozenset({np.dtype(np.float32), np.dtype(np.float16), np.dtype(jnp.bfloat16)})


def load_params(folder: str | Location, abstract: Any) -> Any:
    """Load the parameters of a Hugging Face folder, local or in a bucket, each device its own shards.

    `abstract` are the parameters as `jax.ShapeDtypeStruct`s with shardings, such as
    `plan.abstract_params`; tensors are cast to these dtypes. All mismatches are raised as one
    CheckpointError, before anything is allocated.
    """
    with open_folder(locate(folder)) as found:
        return load_published(found, abstract)


def load_published(found: HFFolder, abstract: Any) -> Any:
    """Load parameters as `load_params` does, from an opened folder.

    A parameter that is stored in another form is brought into it before the next one is read.

    Of several processes, all make this call, and all must have the same files.
    """
    _check_same_files(found)
    sources = check_published(found, abstract)
    buffer = _allocate((found.at_once,), np.uint8)
    non_finite = set[tuple[str, str]]()
    with ThreadPoolExecutor(_THREADS) as pool:

        def load(path: str, leaf: Any, like: Any) -> Any:
            loader = _Loader(sources[path], leaf, found.tensors, buffer, pool, non_finite)
            return store_as(like, loader.load())

        params = tree.map_with_path(load, abstract_params(abstract), abstract)
    what, fix = "has values that are NaN or infinite", "get the file again: training cannot mend it"
    problems: list[Problem] = []
    for path, name in _of_all_processes(non_finite):
        problems.append(Problem(path, what, f"in the tensor {name}", fix))
    if problems:
        raise CheckpointError(f"{found.path} cannot be loaded:", first_of(problems))
    return params


def load_model(found: HFFolder, params: Any, variables: Any) -> tuple[Any, Any]:
    """Load parameters as `load_published` does, and those variables that the checkpoint has.

    Args:
        found: The folder.
        params: Abstract parameters.
        variables: Abstract variables.

    Returns:
        Parameters, and a part of the tree of variables; empty for most models.
    """
    chosen = mapped_variables(found.family, found.config, variables)
    loaded = tree.flatten(load_published(found, tree.merge(params, chosen)))

    def take(path: str, leaf: Any) -> jax.Array:
        del leaf
        return loaded[path]

    return tree.map_with_path(take, params), tree.map_with_path(take, chosen)


def _of_all_processes(found: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs that any process has found; each has read its own rows."""
    pairs: set[tuple[str, str]] = set()
    for of_process in gather_json(sorted(found)):
        for path, name in of_process:
            pairs.add((path, name))
    return sorted(pairs)


def _check_same_files(found: HFFolder) -> None:
    """Raise `AgreementError` if the folder has other files on another host."""
    if jax.process_count() == 1:
        return
    digests = dict[str, str]()
    for file in set(found.files.values()):
        digests[file.path.name] = file.stored.digest()[:16]
    check_hosts_agree({f"digest of {found.path.name}": digests})


def check_published(
    found: HFFolder, abstract: Any, variables: Any = _NONE
) -> dict[str, TensorSource]:
    """Return the tensors of each parameter, and of the variables that the checkpoint has.

    None may be missing, extra, or of the wrong shape or kind of dtype.
    """
    chosen = mapped_variables(found.family, found.config, variables)
    leaves = tree.flatten(abstract_params(abstract)) | tree.flatten(chosen)
    sources: dict[str, TensorSource] = {}
    problems: list[Problem] = []
    names, ignored = found.tables
    shapes: dict[str, tuple[int, ...]] = {}
    floats: dict[str, bool] = {}
    for path, leaf in leaves.items():
        shapes[path] = leaf.shape
        floats[path] = jnp.issubdtype(leaf.dtype, jnp.floating)
    with collect_errors(problems):
        sources = tensor_sources(names, shapes)
    if not problems:
        problems += tensor_problems(sources.values(), floats, ignored, found.tensors)
        problems += found.tied_mismatches
        problems += found.constant_mismatches
    if problems:
        raise CheckpointError(f"{found.path} does not fit the model:", problems)
    return sources


@dataclasses.dataclass(frozen=True)
class _Loader:
    """Loader of one parameter: fills its shards tensor by tensor."""

    source: TensorSource
    leaf: Any
    tensors: Mapping[str, TensorReader]
    buffer: np.ndarray
    pool: ThreadPoolExecutor
    # paths and tensors with NaN or infinite values
    non_finite: set[tuple[str, str]]

    def load(self) -> jax.Array:
        leaf = self.leaf
        boxes = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        local = leaf.sharding.shard_shape(leaf.shape)
        shards = _shards_on(tuple(boxes), local, leaf.dtype)
        depth = len(self.source.stack_shape) + self.source.shared_dims
        for place in np.ndindex(*local[:depth]):
            regions: dict[jax.Device, TensorRegion] = {}
            for device, box in boxes.items():
                regions[device] = self._region(box, local, place)
            self._copy(regions, local, place, shards)
        sharding = NamedSharding(leaf.sharding.mesh, leaf.sharding.spec)
        loaded = jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards.arrays())
        if leaf.sharding.memory_kind == sharding.memory_kind:
            return loaded
        return jax.device_put(loaded, leaf.sharding)

    def _region(
        self, box: tuple[slice, ...], local: tuple[int, ...], place: tuple[int, ...]
    ) -> TensorRegion:
        """Return the region for a device with shard `box`.

        `place` is an index into its part of the stack and of the shared dimensions.
        """
        depth = len(place)
        start = [side.start or 0 for side in box]
        index: list[int] = []
        for first, i in zip(start[:depth], place, strict=True):
            index.append(first + i)
        stack = len(self.source.stack_shape)
        name = self.source.tensor_name(tuple(index[:stack]))
        shared = _slices(index[stack:], [1] * (depth - stack))
        ours = (*shared, *_slices(start[depth:], local[depth:]))
        return TensorRegion(self.source, self.tensors[name], name, ours)

    def _copy(
        self,
        regions: Mapping[Any, TensorRegion],
        local: tuple[int, ...],
        place: tuple[int, ...],
        shards: "_HostShards | _DeviceShards",
    ) -> None:
        """Copy one tensor's regions into the shards, some rows at a time."""
        index = [*place, *[0] * (len(local) - len(place))]
        rows, row_dim = 1, None
        if len(place) < len(local):
            row_dim = len(self.source.stack_shape) + self.source.order[self.source.shared_dims]
            rows = local[row_dim]
        windows = _divide_up(rows, _rows_at_once(regions.values(), len(self.buffer)))
        # windows of one size, so that one program serves all
        count = _divide_up(rows, windows)
        for start in range(0, rows, count):
            # the last window may overlap
            offset = min(start, rows - count)
            if row_dim is not None:
                index[row_dim] = offset
            shards.write(self._read(regions, offset, count), index, self.pool)

    def _read(
        self, regions: Mapping[Any, TensorRegion], offset: int, count: int
    ) -> Iterator[np.ndarray]:
        """Yield some rows of each device's region in the parameter's layout.

        Views of the buffer where possible.
        """
        dtypes = {region.dtype for region in regions.values()}
        is_cast_later = len(dtypes) == 1 and dtypes <= _DEVICE_DTYPES
        depth = len(self.source.stack_shape) + self.source.shared_dims
        buffer, used = self.buffer, 0
        rows: dict[tuple[str, int], np.ndarray] = {}
        for region in regions.values():
            window = region.window(offset, count)
            if window.key not in rows:
                size = window.reads.rows * window.row_bytes
                if size > len(buffer) - used:
                    # one row exceeds the buffer
                    buffer, used = _allocate((size,), np.uint8), 0
                rows[window.key] = self._read_rows(window, buffer[used:])
                used += _divide_up(size, _ALIGNMENT) * _ALIGNMENT
            piece = window.piece(rows[window.key])
            if not is_cast_later:
                piece = piece.astype(self.leaf.dtype)
            yield piece[(None,) * depth]

    def _read_rows(self, window: TensorRegion, buffer: np.ndarray) -> np.ndarray:
        """Read full rows into a buffer, and note the tensor if they are not finite."""
        rows = window.read(buffer)
        if not _all_finite(window.without_other_parts(rows)):
            self.non_finite.add((self.source.path, window.name))
        return rows


def _slices(start: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    pairs = zip(start, sizes, strict=True)
    return tuple(slice(first, first + size) for first, size in pairs)


def _divide_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _all_finite(x: np.ndarray) -> bool:
    exponent = _EXPONENTS.get(x.dtype)
    if exponent is None:
        return bool(np.isfinite(x).all())
    return not ((x.view(np.uint16) & exponent) == exponent).any()


def _allocate(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Allocate page-aligned memory, so that a CPU device can use it without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8, size).view(dtype).reshape(shape)


def _rows_at_once(regions: Collection[TensorRegion], most: int) -> int:
    """Return the number of rows per read.

    Neither the rows read nor the parts of all devices exceed the buffer's bytes, unless one row does.
    """
    row_bytes: dict[tuple[str, int], int] = {}
    used = 0
    for region in regions:
        row_bytes[region.key] = _divide_up(region.reads.rows * region.row_bytes, region.row_count)
        used += region.part_bytes
    read = sum(row_bytes.values())
    return max(1, most // max(read, used))


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
            region = _slices(index, piece.shape)
            np.copyto(self._shards[device][region], piece, casting="unsafe")

        # raises errors, and the buffer may be reused afterwards
        for _ in pool.map(write, self._shards, pieces):
            pass

    def arrays(self) -> list[jax.Array]:
        return [jax.device_put(shard, device) for device, shard in self._shards.items()]


class _DeviceShards:
    """Shards of accelerators: pieces are copied to the devices and written in place.

    The host never holds a shard.
    """

    def __init__(self, devices: Sequence[jax.Device], shape: tuple[int, ...], dtype: Any) -> None:
        self._devices = devices
        self._mesh = Mesh(np.array(devices), (_DEVICE,))
        joined = (len(devices) * shape[0], *shape[1:])
        self._target = _zeros(joined, dtype, self._mesh)

    def write(
        self, pieces: Iterable[np.ndarray], index: Sequence[int], pool: ThreadPoolExecutor
    ) -> None:
        sent: list[jax.Array] = []
        for piece, device in zip(pieces, self._devices, strict=True):
            sent.append(jax.device_put(piece, device))
        rows, *others = sent[0].shape
        shape = (len(sent) * rows, *others)
        sharding = NamedSharding(self._mesh, P(_DEVICE))
        joined = jax.make_array_from_single_device_arrays(shape, sharding, sent)
        self._target = _write_pieces(self._target, joined, np.array(index, np.int32), self._mesh)
        # the buffer is reused next
        jax.block_until_ready(self._target)

    def arrays(self) -> list[jax.Array]:
        shards = {shard.device: shard.data for shard in self._target.addressable_shards}
        return [shards[device] for device in self._devices]


def _shards_on(
    devices: Sequence[jax.Device], shape: tuple[int, ...], dtype: Any
) -> _HostShards | _DeviceShards:
    if all(device.platform == "cpu" for device in devices):
        return _HostShards(devices, shape, dtype)
    return _DeviceShards(devices, shape, dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.Array:
    sharding = NamedSharding(mesh, P(_DEVICE))
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _write_pieces(target: jax.Array, pieces: jax.Array, index: jax.Array, mesh: Mesh) -> jax.Array:
    def write(shard: jax.Array, piece: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(shard, piece.astype(shard.dtype), tuple(index))

    specs = P(_DEVICE), P(_DEVICE), P()
    write_all = jax.shard_map(write, mesh=mesh, in_specs=specs, out_specs=P(_DEVICE))
    return write_all(target, pieces, index)
