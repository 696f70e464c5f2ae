"""What can be stored, and what keeps a stored state from filling another: every difference at once, by path."""

import difflib
import functools
from collections.abc import Mapping, Sequence
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

_METADATA_AT_MOST = 64 << 20


def storable(state: PyTree) -> dict[str, jax.Array]:
    """The state by path, random keys as their integers.

    Raises:
        CheckpointError: Something in it cannot be stored; all of that is listed.
    """
    table = tree.flatten(state)
    problems = [
        Problem(path, f"is a {type(leaf).__name__}", fix="store it as a jax.Array, or in the record")
        for path, leaf in table.items()
        if not isinstance(leaf, jax.Array)
    ]
    problems += [
        Problem(path, "has no elements, and cannot be stored", f"shape {leaf.shape}", "leave it out")
        for path, leaf in table.items()
        if isinstance(leaf, jax.Array) and leaf.size == 0
    ]
    if (clash := len(jax.tree.leaves(state)) - len(table)) > 0:
        problems.append(Problem("state", f"{clash} arrays share a path", fix='take "/" out of the keys'))
    if not table:
        problems.append(Problem("state", "holds no array", fix="save the parameters at least"))
    if problems:
        raise CheckpointError("nothing was saved", problems)
    return {path: jax.random.key_data(leaf) if _is_key(leaf) else leaf for path, leaf in table.items()}


def host_copies(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Copies in host memory, of which each process holds one of every shard it has; taken once this returns.

    What a mesh holds several times is copied once in each process, so that state replicated over the devices of a
    machine does not fill its memory.
    """
    shardings = {path: _one_replica_per_process(array.sharding) for path, array in arrays.items()}
    shards = [
        (path, shard.device, shard.data)
        for path, array in arrays.items()
        for shard in array.addressable_shards
        if shard.device in shardings[path].device_set
    ]
    places = [SingleDeviceSharding(device, memory_kind="pinned_host") for _, device, _ in shards]
    copies = jax.block_until_ready(jax.device_put([data for *_, data in shards], places, may_alias=False))
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
    """The sharding without devices that hold what another device of the same process holds."""
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


def structure_mismatches(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], branches: Sequence[str] = ("",)
) -> list[Problem]:
    """Everything that keeps a checkpoint from filling a state, by path; of the rest, what is in one of the branches."""
    missing = [path for path in wanted if path not in stored]
    heads = tuple(f"{branch}/" if branch else "" for branch in branches)
    extra = [path for path in stored if path not in wanted and path.startswith(heads)]
    problems = []
    for path in missing:
        has = f"state {_describe(wanted[path])}"
        fix = _renamed(path, extra, "the checkpoint") or "restore with the model and optimizer that wrote it"
        problems.append(Problem(path, "missing: the state has it, the checkpoint does not", has, fix))
    for path in extra:
        has = f"checkpoint {_describe(stored[path])}"
        fix = _renamed(path, missing, "the state") or "restore with the model and optimizer that wrote it"
        problems.append(Problem(path, "extra: the checkpoint has it, the state does not", has, fix))
    for path, leaf in wanted.items():
        if getattr(leaf, "sharding", None) is None:
            fix = "jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
            problems.append(Problem(path, "sharding: the state does not say where it goes", fix=fix))
        if path not in stored:
            continue
        there, here = _on_disk(stored[path]), _on_disk(leaf)
        if there.shape != here.shape:
            both = f"checkpoint {there.shape}, state {here.shape}"
            problems.append(Problem(path, "shape differs", both, "restore with the configuration that wrote it"))
        if there.dtype != here.dtype:
            both = f"checkpoint {there.dtype}, state {here.dtype}"
            problems.append(Problem(path, "dtype differs", both, f"ask for {there.dtype} and cast it afterwards"))
    return problems


def serialized_spec(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What a leaf is stored as, in the leaf's sharding: random keys as their integers."""
    stored = _on_disk(leaf)
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=leaf.sharding)


def from_serialized(array: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """The inverse of `serialized_spec`, for the array that was restored."""
    if not _is_key(leaf):
        return array
    implementations: list[Any] = []
    jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(array, impl=implementations[0])


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _on_disk(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype as they are stored."""
    if _is_key(leaf):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype))


def _describe(leaf: Any) -> str:
    leaf = _on_disk(leaf)
    return f"{leaf.dtype}{list(leaf.shape)}"


def _renamed(path: str, others: Sequence[str], who: str) -> str:
    near = difflib.get_close_matches(path, others, n=1)
    return f'{who} has "{near[0]}": was it renamed?' if near else ""


def layout_problems(folder: Path) -> list[Problem]:
    """What a folder of stored arrays holds that could lead out of it.

    In one OCDBT store the name of an array is a key. Without one it is a path, and Orbax would follow it.

    Args:
        folder: Where Orbax keeps the arrays of one state.
    """
    try:
        found = read_object(folder / "_METADATA", _METADATA_AT_MOST)
        names = ["/".join(str(key["key"]) for key in leaf["key_metadata"]) for leaf in found["tree_metadata"].values()]
        in_one_store = found["use_ocdbt"] is True and (folder / "manifest.ocdbt").is_file()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [Problem("state/_METADATA", f"is no list of arrays: {type(error).__name__}: {error}")]
    problems = [
        Problem("state/_METADATA", f"names an array {name!r}, which leads out of the checkpoint")
        for name in names
        if name.startswith("/") or ".." in name.split("/")
    ]
    if not in_one_store:
        problems.append(Problem("state/manifest.ocdbt", "is no store of all arrays, as every checkpoint of ours has"))
    return problems
