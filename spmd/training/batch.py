"""Batches of a step: checked against the mesh, and split over it where nobody has placed them."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from spmd import tree
from spmd.errors import MeshError, check_type, first_of
from spmd.sharding.mesh import AnyMesh, batch_sharding
from spmd.sharding.rules import audit_spec

_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)
_sharding = functools.lru_cache(maxsize=64)(batch_sharding)


def check_batch(mesh: AnyMesh, batch: Any) -> None:
    """Raise a `MeshError` that lists the leaves of a batch that are no arrays, or do not divide over the mesh."""
    problems = []
    for path, x in tree.flatten(batch).items():
        where = f"batch {path}".strip()
        if wrong := check_type(where, x, _ARRAYS, "a NumPy or JAX array"):
            problems += wrong
            continue
        found = audit_spec(where, x.shape, _sharding(mesh, x.ndim).spec, mesh.shape, "the sharding of batches")
        problems += [
            dataclasses.replace(problem, fix="another size, or drop the rest of the batch") for problem in found
        ]
    if problems:
        raise MeshError("The batch does not fit the mesh:", first_of(problems, at_most=5))


def place_batch(mesh: AnyMesh, batch: Any) -> Any:
    """Return a batch whose host arrays, and those on JAX's default device, are split as `batch_sharding` says."""

    def place(x: Any) -> jax.Array:
        return x if getattr(x, "committed", False) else jax.device_put(x, _sharding(mesh, x.ndim))

    if all(getattr(x, "committed", False) for x in jax.tree.leaves(batch)):
        return batch
    check_batch(mesh, batch)
    return jax.tree.map(place, batch)
