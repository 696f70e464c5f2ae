"""State trees as flat tables of arrays: conversion for storage, and comparison of a stored state with a wanted one."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from spmd import tree
from spmd.checkpoint.manifest import read_object
from spmd.errors import CheckpointError, Problem

PyTree = Any

_METADATA_MAX_BYTES = 64 << 20


def storable(state: PyTree) -> dict[str, jax.Array]:
    """Flatten a state by path, with PRNG keys as their integers; an error lists all leaves that cannot be stored."""
    table = tree.flatten(state)
    problems = []
    for path, leaf in table.items():
        if not isinstance(leaf, jax.Array):
            fix = "store it as a jax.Array, or in the record"
            problems.append(Problem(path, f"is a {type(leaf).__name__}", fix=fix))
        elif leaf.size == 0:
            problems.append(Problem(path, "has no elements and cannot be stored", f"shape {leaf.shape}", "remove it"))
    if (clash := len(jax.tree.leaves(state)) - len(table)) > 0:
        problems.append(Problem("state", f"{clash} arrays share a path", fix='remove "/" from the keys'))
    if not table:
        problems.append(Problem("state", "holds no array", fix="save at least the parameters"))
    if problems:
        raise CheckpointError("nothing was saved", problems)
    return {path: jax.random.key_data(leaf) if _is_key(leaf) else leaf for path, leaf in table.items()}


def host_copies(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Copy arrays to host memory, one copy of each distinct shard per process; done on return.

    Replicas within a process are not copied, so state replicated over the devices of a machine takes its memory once.
    """
    shardings = {path: _one_replica_per_process(array.sharding) for path, array in arrays.items()}
    shards = [
        (path, shard.device, shard.data)
        for path, array in arrays.items()
        for shard in array.addressable_shards
        if shard.device in shardings[path].device_set
    ]
    on_host = [SingleDeviceSharding(device, memory_kind="pinned_host") for _, device, _ in shards]
    copies = jax.block_until_ready(jax.device_put([data for *_, data in shards], on_host, may_alias=False))
    parts: dict[str, list[jax.Array]] = {path: [] for path in arrays}
    for (path, *_), copy in zip(shards, copies, strict=True):
        parts[path].append(copy)
    return {
        path: jax.make_array_from_single_device_arrays(
            array.shape, shardings[path].with_memory_kind("pinned_host"), parts[path]
        )
        for path, array in arrays.items()
    }


@functools.cache
def _one_replica_per_process(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Remove devices whose shards are replicas of another device of the same process."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh, used = sharding.mesh, set(jax.tree.leaves(tuple(sharding.spec)))
    devices = mesh.devices
    for axis, name in enumerate(mesh.axis_names):
        if name not in used:
            rows = np.moveaxis(devices, axis, 0).reshape(devices.shape[axis], -1)
            owners = np.array([[device.process_index for device in row] for row in rows])
            devices = np.take(devices, sorted(np.unique(owners, axis=0, return_index=True)[1]), axis)
    return NamedSharding(Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types), sharding.spec)


@dataclasses.dataclass(frozen=True)
class OptionalState:
    """State below a path that a checkpoint may lack, or have in other shapes.

    Attributes:
        path: Such as `variables/compression`.
        targets: `(stored, wanted)` → what to restore of it, with shardings; other stored arrays are not read.
        complete: `(restored, wanted)` → the wanted arrays.
    """

    path: str
    targets: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, jax.ShapeDtypeStruct]] = lambda *_: {}
    complete: Callable[[Mapping[str, jax.Array], Mapping[str, Any]], dict[str, jax.Array]] = lambda *_: {}

    def below(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a table that is below the path."""
        return {path: leaf for path, leaf in table.items() if path.startswith(f"{self.path}/")}


def structure_mismatches(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], branches: Sequence[str] = ("",)
) -> list[Problem]:
    """Return all differences between stored and wanted arrays; arrays that are not wanted only count in `branches`."""
    missing = [path for path in wanted if path not in stored]
    heads = tuple(f"{branch}/" if branch else "" for branch in branches)
    extra = [path for path in stored if path not in wanted and path.startswith(heads)]
    problems = []
    for path in missing:
        detail, fix = f"state {_describe(wanted[path])}", _rename_hint(path, extra, "the checkpoint")
        problems.append(Problem(path, "missing: the state has it, the checkpoint does not", detail, fix))
    for path in extra:
        detail, fix = f"checkpoint {_describe(stored[path])}", _rename_hint(path, missing, "the state")
        problems.append(Problem(path, "extra: the checkpoint has it, the state does not", detail, fix))
    for path, leaf in wanted.items():
        if getattr(leaf, "sharding", None) is None:
            fix = "jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
            problems.append(Problem(path, "sharding: the state has none", fix=fix))
        if path not in stored:
            continue
        theirs, ours = serialized(stored[path]), serialized(leaf)
        if theirs.shape != ours.shape:
            detail = f"checkpoint {theirs.shape}, state {ours.shape}"
            problems.append(Problem(path, "shape differs", detail, "restore with the configuration that wrote it"))
        if theirs.dtype != ours.dtype:
            detail = f"checkpoint {theirs.dtype}, state {ours.dtype}"
            problems.append(Problem(path, "dtype differs", detail, f"restore as {theirs.dtype} and cast it afterwards"))
    return problems


def from_serialized(array: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Convert a restored array to the leaf's dtype: the inverse of the conversion in `storable`."""
    return jax.random.wrap_key_data(array, impl=tree.key_implementation(leaf)) if _is_key(leaf) else array


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def serialized(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the stored shape and dtype of a leaf; PRNG keys are stored as their integers."""
    if _is_key(leaf):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype))


def _describe(leaf: Any) -> str:
    leaf = serialized(leaf)
    return f"{leaf.dtype}{list(leaf.shape)}"


def _rename_hint(path: str, others: Sequence[str], owner: str) -> str:
    near = difflib.get_close_matches(path, others, n=1)
    return f'{owner} has "{near[0]}": was it renamed?' if near else "restore with the model and optimizer that wrote it"


def layout_problems(folder: Path) -> list[Problem]:
    """Return problems of an Orbax folder that could make Orbax read files outside of it.

    In an OCDBT store the name of an array is a key. Without one it is a path, which Orbax would follow.
    """
    try:
        found = read_object(folder / "_METADATA", _METADATA_MAX_BYTES)
        names = ["/".join(str(key["key"]) for key in leaf["key_metadata"]) for leaf in found["tree_metadata"].values()]
        in_one_store = found["use_ocdbt"] is True and (folder / "manifest.ocdbt").is_file()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [Problem("state/_METADATA", f"is not a list of arrays: {type(error).__name__}: {error}")]
    problems = [
        Problem("state/_METADATA", f"names an array {name!r}, which is outside of the checkpoint")
        for name in names
        if name.startswith("/") or ".." in name.split("/")
    ]
    if not in_one_store:
        problems.append(Problem("state/manifest.ocdbt", "is not an OCDBT store of all arrays"))
    return problems
