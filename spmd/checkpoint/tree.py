"""State trees as flat tables of arrays: conversion for storage, comparison with stored ones."""

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd import tree
from spmd.checkpoint.manifest import read_object
from spmd.errors import CheckpointError, Problem

PyTree = Any

_METADATA_MAX_BYTES = 64 << 20


def storable(state: PyTree) -> dict[str, jax.Array]:
    """Flatten a state by path, with PRNG keys as their integers.

    Raises:
        CheckpointError: All leaves that cannot be stored.
    """
    table = tree.flatten(state)
    problems = list[Problem]()
    for path, leaf in table.items():
        if not isinstance(leaf, jax.Array):
            fix = "store it as a jax.Array, or in the record"
            problems.append(Problem(path, f"is a {type(leaf).__name__}", fix=fix))
        elif leaf.size == 0:
            what = "has no elements and cannot be stored"
            problems.append(Problem(path, what, f"shape {leaf.shape}", "remove it"))
    clash = len(jax.tree.leaves(state)) - len(table)
    if clash > 0:
        fix = 'remove "/" from the keys'
        problems.append(Problem("state", f"{clash} arrays share a path", fix=fix))
    if not table:
        problems.append(Problem("state", "holds no array", fix="save at least the parameters"))
    if problems:
        raise CheckpointError("nothing was saved", problems)
    arrays = dict[str, jax.Array]()
    for path, leaf in table.items():
        arrays[path] = leaf
        if _is_key(leaf):
            arrays[path] = jax.random.key_data(leaf)
    return arrays


@dataclasses.dataclass(frozen=True)
class OptionalState:
    """State below a path, optional in a checkpoint: missing, or with other shapes.

    Attributes:
        path: Such as `variables/compression`.
        targets: `(stored, wanted)` → the arrays to restore, abstract, with shardings; other stored
            arrays are not read.
        complete: `(restored, wanted)` → the wanted arrays.
    """

    path: str
    targets: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, jax.ShapeDtypeStruct]] = (
        lambda *_: {}
    )
    complete: Callable[[Mapping[str, jax.Array], Mapping[str, Any]], dict[str, jax.Array]] = (
        lambda *_: {}
    )

    def below(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a table below the path."""
        return {path: leaf for path, leaf in table.items() if path.startswith(f"{self.path}/")}


def with_optional(
    stored: Mapping[str, Any],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    optional: Sequence[OptionalState],
) -> tuple[dict[str, Any], dict[str, jax.ShapeDtypeStruct]]:
    """Return stored arrays, without unread ones of optional state, and the arrays to restore."""
    present = dict(stored)
    targets = dict(wanted)
    for part in optional:
        held = part.below(present)
        needed = part.below(targets)
        own = part.targets(held, needed)
        for path in held.keys() - own.keys():
            del present[path]
        for path in needed:
            del targets[path]
        targets |= own
    return present, targets


def structure_mismatches(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], branches: Sequence[str] = ("",)
) -> list[Problem]:
    """Return all differences between stored and wanted arrays.

    Stored arrays that are not wanted are differences only below one of `branches`.
    """
    missing = [path for path in wanted if path not in stored]
    extra = list[str]()
    for path in stored:
        if path not in wanted and _is_below(path, branches):
            extra.append(path)
    problems = list[Problem]()
    for path in missing:
        what = "missing: the state has it, the checkpoint does not"
        fix = _rename_hint(path, extra, "the checkpoint")
        problems.append(Problem(path, what, f"state {_describe(wanted[path])}", fix))
    for path in extra:
        what = "extra: the checkpoint has it, the state does not"
        fix = _rename_hint(path, missing, "the state")
        problems.append(Problem(path, what, f"checkpoint {_describe(stored[path])}", fix))
    for path, leaf in wanted.items():
        if getattr(leaf, "sharding", None) is None:
            fix = "jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
            problems.append(Problem(path, "sharding: the state has none", fix=fix))
        if path in stored:
            problems += _type_mismatches(path, stored[path], leaf)
    return problems


def _is_below(path: str, branches: Sequence[str]) -> bool:
    """Return whether a path is in one of the branches; in an empty one is every path."""
    return any(branch == "" or path.startswith(f"{branch}/") for branch in branches)


def _type_mismatches(path: str, stored: Any, wanted: Any) -> Iterator[Problem]:
    """Yield the differences of an array's shape and dtype."""
    theirs = serialized(stored)
    ours = serialized(wanted)
    if theirs.shape != ours.shape:
        detail = f"checkpoint {theirs.shape}, state {ours.shape}"
        fix = "restore with the configuration that wrote it"
        yield Problem(path, "shape differs", detail, fix)
    if theirs.dtype != ours.dtype:
        detail = f"checkpoint {theirs.dtype}, state {ours.dtype}"
        fix = f"restore as {theirs.dtype} and cast it afterwards"
        yield Problem(path, "dtype differs", detail, fix)


def from_serialized(array: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Convert a restored array to the leaf's dtype: the inverse of the conversion in `storable`."""
    if not _is_key(leaf):
        return array
    return jax.random.wrap_key_data(array, impl=tree.key_implementation(leaf))


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
    if near:
        return f'{owner} has "{near[0]}": was it renamed?'
    return "restore with the model and optimizer that wrote it"


def layout_problems(folder: Path) -> list[Problem]:
    """Return the dangers of reads outside of an Orbax folder, as problems.

    In an OCDBT store the name of an array is a key. Without one it is a path, which Orbax would
    follow.
    """
    where = "state/_METADATA"
    try:
        found = read_object(folder / "_METADATA", _METADATA_MAX_BYTES)
        names = [_stored_name(leaf) for leaf in found["tree_metadata"].values()]
        in_one_store = found["use_ocdbt"] is True and (folder / "manifest.ocdbt").is_file()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"is not a list of arrays: {type(error).__name__}: {error}"
        return [Problem(where, what)]
    problems = list[Problem]()
    for name in names:
        if name.startswith("/") or ".." in name.split("/"):
            what = f"names an array {name!r}, which is outside of the checkpoint"
            problems.append(Problem(where, what))
    if not in_one_store:
        problems.append(Problem("state/manifest.ocdbt", "is not an OCDBT store of all arrays"))
    return problems


def _stored_name(leaf: Any) -> str:
    """Return the name of an array in Orbax's metadata."""
    return "/".join(str(key["key"]) for key in leaf["key_metadata"])
