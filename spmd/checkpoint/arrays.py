"""Save and restore the arrays of a checkpoint with Orbax."""

import collections
import contextlib
import functools
import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from spmd import tree
from spmd.checkpoint.tree import (
    OptionalState,
    layout_problems,
    serialized,
    structure_mismatches,
    with_optional,
)
from spmd.errors import CheckpointError, Problem

_UNREADABLE = "restore another step; this one is damaged or was written by another tool"
_WRITTEN_AT_ONCE = 128 << 20
"""Bytes that a process copies at a time while it writes."""
_READ_AT_ONCE = 32 << 20
"""Bytes that a process reads at a time, so that its memory does not hold the state twice."""


def save_arrays(folder: Path, arrays: Mapping[str, jax.Array]) -> None:
    """Write arrays by path, and wait until all processes have written their shards."""
    made = _make_checkpointer(arrays.values(), _WRITTEN_AT_ONCE)
    with contextlib.closing(made) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(arrays))


def missing_shards(folder: Path, arrays: Mapping[str, jax.Array]) -> dict[int, int]:
    """Return process → number of its shards missing in a written folder.

    Orbax merges what this process finds, and a folder that is not shared has its own shards alone.
    """
    base = {"driver": "file", "path": f"{folder}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    written = set(store.list().result())
    # Of a large state there are millions of chunks: count first, and look for each only if needed.
    counts = collections.Counter(key.rpartition(b"/")[0] for key in written)
    layouts = {path: store.read(f"{path}/.zarray") for path in arrays}
    missing: collections.Counter[int] = collections.Counter()
    for path, array in arrays.items():
        layout = layouts[path].result().value
        chunk = array.sharding.shard_shape(array.shape)
        if layout:
            chunk = tuple(json.loads(layout)["chunks"])
        grid = tuple(map(_divide_up, array.shape, chunk))
        if counts[path.encode()] == math.prod(grid) + 1:  # all chunks, and the layout
            continue
        owners = shard_owners(array.sharding, array.shape)
        for shard in _missing_starts(path, array, chunk, grid, written):
            missing[owners[shard]] += 1
    return dict(missing)


def _missing_starts(
    path: str,
    array: jax.Array,
    chunk: tuple[int, ...],
    grid: tuple[int, ...],
    written: Container[bytes],
) -> set[tuple[int, ...]]:
    """Return the first index of each shard without all of its chunks."""
    shard = array.sharding.shard_shape(array.shape)
    starts = set[tuple[int, ...]]()
    for numbers in np.ndindex(grid):
        name = ".".join(map(str, numbers)) or "0"
        if f"{path}/{name}".encode() in written:
            continue
        first = np.multiply(numbers, chunk)
        start = first - first % np.array(shard, np.int64)
        starts.add(tuple(start.tolist()))
    return starts


def _divide_up(size: int, part: int) -> int:
    return -(-size // part)


@functools.lru_cache(maxsize=256)
def shard_owners(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> dict[tuple[int, ...], int]:
    """Return the first index of each shard → the process of its replica 0, its writer."""
    owners: dict[tuple[int, ...], int] = {}
    indices: Mapping[Any, tuple[slice, ...]] = sharding.devices_indices_map(shape)
    for device, index in indices.items():
        start = tuple(part.start or 0 for part in index)
        owners.setdefault(start, device.process_index)
    return owners


def restore_arrays(
    folder: Path,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    branches: Sequence[str],
    optional: Sequence[OptionalState] = (),
) -> dict[str, jax.Array]:
    """Restore arrays by path, in their serialized form, each directly into its sharding.

    A CheckpointError lists all differences in paths, shapes and dtypes. For `branches` and
    `optional` see `CheckpointManager.restore`.
    """
    problems = layout_problems(folder)
    if problems:
        raise CheckpointError(f"checkpoint {folder.parent} was not written by spmd", problems)
    made = _make_checkpointer(wanted.values(), _READ_AT_ONCE)
    with contextlib.closing(made) as checkpointer:
        with read_errors(folder):
            stored = tree.flatten(checkpointer.handler.metadata(folder).tree)
        present, targets = with_optional(stored, wanted, optional)
        problems = structure_mismatches(present, targets, branches)
        if problems:
            raise CheckpointError(f"checkpoint {folder.parent} does not fit the state", problems)
        with read_errors(folder):
            restored = _restore(checkpointer, folder, targets)
    for part in optional:
        restored |= part.complete(part.below(restored), part.below(wanted))
    return restored


def _restore(
    checkpointer: Any, folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Restore arrays by path, in their serialized form, each into its sharding."""
    targets = dict[str, jax.ShapeDtypeStruct]()
    for path, leaf in wanted.items():
        targets[path] = serialized(leaf).update(sharding=leaf.sharding)
    restore_args = ocp.checkpoint_utils.construct_restore_args(targets)
    args = ocp.args.PyTreeRestore(targets, restore_args=restore_args, partial_restore=True)
    restored: dict[str, jax.Array] = checkpointer.restore(folder, args=args)
    return restored


def bytes_read() -> int:
    """Return the bytes read by TensorStore in this process, from any storage."""
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/")
    count = 0
    for metric in metrics:
        name = metric["name"]
        if name.endswith("/bytes_read") and "/ocdbt/" not in name:  # OCDBT reads from the others
            count += sum(value["value"] for value in metric["values"])
    return count


def _make_checkpointer(arrays: Iterable[jax.Array | jax.ShapeDtypeStruct], in_flight: int) -> Any:
    # Orbax would let each replica write a part of an array and slice it on the device, which runs
    # beside training.
    array = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, array))
    # With explicit process indices, barriers use the coordinator. Otherwise they are collectives
    # over all devices, whose order relative to those of training would differ between processes.
    everyone = ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count())))
    most = max(in_flight, 1 + _largest_shard(arrays))  # Orbax rejects shards of at least this size
    gb = most / 10**9
    # Compression saves a twelfth of random floats, and costs a processor beside training and 300
    # MiB.
    handler = ocp.PyTreeCheckpointHandler(
        type_handler_registry=registry,
        multiprocessing_options=everyone,
        save_concurrent_gb=gb,
        restore_concurrent_gb=gb,  # Orbax would allow 96
        use_compression=False,
    )
    return ocp.Checkpointer(handler, multiprocessing_options=everyone)


def _largest_shard(arrays: Iterable[jax.Array | jax.ShapeDtypeStruct]) -> int:
    """Return the bytes of the largest shard."""
    most = 0
    for x in arrays:
        if x.sharding:
            shard = x.sharding.shard_shape(x.shape)
            most = max(most, math.prod(shard) * x.dtype.itemsize)
    return most


@contextlib.contextmanager
def disk_errors(where: Path | str, action: str, fix: str) -> Iterator[None]:
    """Convert errors of the disk to a CheckpointError; those of TensorStore are ValueErrors."""
    try:
        yield
    except (CheckpointError, jax.errors.JaxRuntimeError):
        raise  # the latter is about device memory or another process
    except (OSError, RuntimeError, ValueError) as error:
        problem = Problem(str(where), f"{type(error).__name__}: {error}", fix=fix)
        raise CheckpointError(f"{action} failed", [problem]) from error


def read_errors(where: Path) -> contextlib.AbstractContextManager[None]:
    """Convert errors in reading a checkpoint to a CheckpointError."""
    return disk_errors(where, "reading the checkpoint", _UNREADABLE)
