"""Save and restore the arrays of a checkpoint with Orbax."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore

from spmd import tree
from spmd.checkpoint.tree import OptionalState, layout_problems, serialized, structure_mismatches
from spmd.errors import CheckpointError, Problem

_UNREADABLE = "restore another step; this one is damaged or was written by another tool"
_WRITTEN_AT_ONCE = 128 << 20
"""Bytes that a process copies at a time while it writes."""
_READ_AT_ONCE = 32 << 20
"""Bytes that a process reads at a time, so that its memory does not hold the state twice."""


def save_arrays(folder: Path, arrays: Mapping[str, jax.Array]) -> None:
    """Write arrays by path, and wait until all processes have written their shards."""
    with contextlib.closing(_make_checkpointer(arrays.values(), _WRITTEN_AT_ONCE)) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(arrays))


def restore_arrays(
    folder: Path,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    branches: Sequence[str],
    optional: Sequence[OptionalState] = (),
) -> dict[str, jax.Array]:
    """Restore arrays by path, in their serialized form, each directly into its sharding.

    A CheckpointError lists all differences in paths, shapes and dtypes. For `branches` and `optional` see
    `CheckpointManager.restore`.
    """
    if problems := layout_problems(folder):
        raise CheckpointError(f"checkpoint {folder.parent} was not written by spmd", problems)
    with contextlib.closing(_make_checkpointer(wanted.values(), _READ_AT_ONCE)) as checkpointer:
        with read_errors(folder):
            stored = tree.flatten(checkpointer.handler.metadata(folder).tree)
        asked, wanted = wanted, dict(wanted)
        for part in optional:
            held, needed = part.below(stored), part.below(wanted)
            targets = part.targets(held, needed)
            stored = {path: leaf for path, leaf in stored.items() if path not in held or path in targets}
            wanted = {path: leaf for path, leaf in wanted.items() if path not in needed} | targets
        if problems := structure_mismatches(stored, wanted, branches):
            raise CheckpointError(f"checkpoint {folder.parent} does not fit the state", problems)
        with read_errors(folder):
            targets = {path: serialized(leaf).update(sharding=leaf.sharding) for path, leaf in wanted.items()}
            restore_args = ocp.checkpoint_utils.construct_restore_args(targets)
            args = ocp.args.PyTreeRestore(targets, restore_args=restore_args, partial_restore=True)
            restored: dict[str, jax.Array] = checkpointer.restore(folder, args=args)
    for part in optional:
        restored |= part.complete(part.below(restored), part.below(asked))
    return restored


def bytes_read() -> int:
    """Return the bytes that TensorStore has read in this process, from any storage."""
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/")
    return sum(
        value["value"]
        for metric in metrics
        if metric["name"].endswith("/bytes_read") and "/ocdbt/" not in metric["name"]  # which reads from the others
        for value in metric["values"]
    )


def _make_checkpointer(arrays: Iterable[jax.Array | jax.ShapeDtypeStruct], in_flight: int) -> Any:
    # Orbax would let each replica write a part of an array and slice it on the device, which runs beside training.
    array = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, array))
    # With explicit process indices, barriers use the coordinator. Otherwise they are collectives over all devices,
    # whose order relative to those of training would differ between processes.
    everyone = ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count())))
    shards = (math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays if x.sharding)
    gb = max(in_flight, *(size + 1 for size in shards)) / 10**9  # Orbax rejects shards of at least this size
    # Compression saves a twelfth of random floats, and costs a processor beside training and 300 MiB.
    handler = ocp.PyTreeCheckpointHandler(
        type_handler_registry=registry,
        multiprocessing_options=everyone,
        save_concurrent_gb=gb,
        restore_concurrent_gb=gb,  # Orbax would allow 96
        use_compression=False,
    )
    return ocp.Checkpointer(handler, multiprocessing_options=everyone)


@contextlib.contextmanager
def disk_errors(where: Path, action: str, fix: str) -> Iterator[None]:
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
