"""Batches of a step: checked against the plan, and split by it where nobody has placed them."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import MeshError, Problem, check_type, first_of
from spmd.plan.plan import ShardingPlan
from spmd.sharding.mesh import spec_axes
from spmd.sharding.rules import audit_spec

_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)


def check_batch(plan: ShardingPlan, batch: Any) -> None:
    """Raise a `MeshError` if leaves of a batch are no arrays, or do not divide over the mesh.

    A row of the batch table that splits tokens and matches no leaf is an error, too. The first 5
    problems are listed.
    """
    leaves = tree.flatten(batch)
    table = plan.rules.batch_table
    arrays = table.arrays(batch)
    problems = table.unused(list(leaves), plan.mesh.shape)
    for path, x in leaves.items():
        problems += _leaf_problems(plan, path, x, arrays[path].spec)
    if problems:
        raise MeshError("The batch does not fit the mesh:", first_of(problems, at_most=5))


def _leaf_problems(plan: ShardingPlan, path: str, x: Any, spec: P) -> list[Problem]:
    """Return the problems of a leaf: it is no array, or does not divide over the mesh."""
    where = f"batch {path}".strip()
    wrong = check_type(where, x, _ARRAYS, "a NumPy or JAX array")
    if wrong:
        return wrong
    axes = spec_axes(spec)
    unknown = [axis for axis in axes if axis not in plan.mesh.shape]
    if unknown:
        what = f"is split over {', '.join(unknown)}, which the plan's mesh does not have"
        return [Problem(where, what, fix="place it on the mesh of the plan")]
    found = audit_spec(where, x.shape, spec, plan.mesh.shape, "the sharding of batches")
    fix = (
        "another size, or drop the rest of the batch; or say in Rules(batch=…) which "
        "dimension is the examples"
    )
    return [dataclasses.replace(problem, fix=fix) for problem in found]


def place_batch(plan: ShardingPlan, batch: Any) -> Any:
    """Split arrays of a batch as the plan says, if on the host or on JAX's default device.

    Each array is split by examples, its first dimension, unless the rules' batch table or a mark
    (`spmd.whole`) says otherwise. An array that a row declares whole is copied to every device,
    also if it is on the mesh.
    """
    is_placed = all(map(_is_placed, jax.tree.leaves(batch)))
    if is_placed and not plan.rules.batch_table.has_whole_rows:
        return batch
    if not is_placed:
        check_batch(plan, batch)
    shardings = plan.batch_shardings(batch)
    if jax.tree.all(jax.tree.map(_is_in_place, batch, shardings)):
        return batch
    return jax.tree.map(_place, batch, shardings)


def _place(x: Any, sharding: NamedSharding) -> jax.Array:
    if _is_in_place(x, sharding):
        return x
    return jax.device_put(x, sharding)


def _is_in_place(x: Any, sharding: NamedSharding) -> bool:
    """Return whether an array is placed; one that is to be whole, on every device."""
    if not _is_placed(x):
        return False
    if not sharding.is_fully_replicated:
        return True
    is_everywhere = x.sharding.device_set == sharding.device_set
    return bool(is_everywhere and x.sharding.is_fully_replicated)


def _is_placed(x: Any) -> bool:
    """Return whether somebody has chosen the devices of an array, and it is in their memory."""
    if not getattr(x, "committed", False):
        return False
    return x.sharding.memory_kind != "pinned_host"


def count_examples(plan: ShardingPlan, batch: Any) -> int:
    """Return the number of examples in a batch of arrays or shapes; 1 for a batch without any."""
    splits = plan.rules.batch_table.arrays(batch)
    for path, x in tree.flatten(batch).items():
        dim = splits[path].examples
        if dim is not None and x.ndim > dim:
            return int(x.shape[dim])
    return 1
