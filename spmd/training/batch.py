"""Batches of a step: checked against the plan, and split as it says where nobody has placed them."""

import dataclasses
from typing import Any

import jax
import numpy as np

from spmd import tree
from spmd.errors import MeshError, check_type, first_of
from spmd.plan.plan import ShardingPlan
from spmd.sharding.rules import audit_spec

_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)


def check_batch(plan: ShardingPlan, batch: Any) -> None:
    """Raise a `MeshError` that lists the leaves of a batch that are no arrays, or do not divide over the mesh."""
    table, axes, leaves = plan.rules.batch_table, plan.mesh.shape, tree.flatten(batch)
    problems = table.unused(list(leaves), axes)
    for path, x in leaves.items():
        where = f"batch {path}".strip()
        if wrong := check_type(where, x, _ARRAYS, "a NumPy or JAX array"):
            problems += wrong
            continue
        found = audit_spec(where, x.shape, table.spec(path, x.ndim), axes, "the sharding of batches")
        fix = "another size, or drop the rest of the batch; or say in Rules(batch=…) which dimension is the examples"
        problems += [dataclasses.replace(problem, fix=fix) for problem in found]
    if problems:
        raise MeshError("The batch does not fit the mesh:", first_of(problems, at_most=5))


def place_batch(plan: ShardingPlan, batch: Any) -> Any:
    """Return a batch whose host arrays, and those on JAX's default device, are split as the plan says.

    Each array is split by examples, its first dimension, unless the rules' batch table says otherwise.
    """

    def place(path: str, x: Any) -> jax.Array:
        if getattr(x, "committed", False):
            return x
        return jax.device_put(x, plan.batch_sharding(path, x.ndim))

    if all(getattr(x, "committed", False) for x in jax.tree.leaves(batch)):
        return batch
    check_batch(plan, batch)
    return tree.map_with_path(place, batch)
