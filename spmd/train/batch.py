"""Batches of a step: checked against the mesh, and split over it where nobody has placed them."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from spmd import tree
from spmd.errors import MeshError, Problem, check_type
from spmd.sharding.mesh import AnyMesh, batch_sharding
from spmd.sharding.rules import audit_spec

_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)
_sharding = functools.lru_cache(maxsize=64)(batch_sharding)


def check_batch(mesh: AnyMesh, batch: Any) -> None:
    """Raise a `MeshError` that lists what a step under this mesh cannot take: concrete arrays or abstract ones."""
    problems = []
    for path, x in tree.flatten(batch).items():
        where = f"batch {path}".strip()
        if wrong := check_type(where, x, _ARRAYS, "a NumPy or JAX array"):
            problems += wrong
            continue
        wanted, fix = _sharding(mesh, x.ndim), "another size, or a batch without the rest"
        found = audit_spec(where, x.shape, wanted.spec, mesh.shape, "the sharding of batches")
        problems += [dataclasses.replace(problem, fix=fix) for problem in found]
        if _committed(x) and not x.sharding.is_equivalent_to(wanted, x.ndim):
            fix = f"jax.device_put(x, spmd.batch_sharding(mesh, {x.ndim}))"
            problems.append(Problem(where, f"is placed as {x.sharding}", f"the step takes {wanted}", fix))
        elif not isinstance(x, jax.ShapeDtypeStruct) and not wanted.is_fully_addressable and not _committed(x):
            fix = "jax.make_array_from_process_local_data(spmd.batch_sharding(mesh), x)"
            problems.append(Problem(where, "is of one process, and the mesh spans several", fix=fix))
    if problems:
        raise MeshError("The batch does not fit the mesh:", problems)


def place_batch(mesh: AnyMesh, batch: Any) -> Any:
    """Return a batch whose host arrays, and those on JAX's default device, are split as `batch_sharding` says.

    Raises:
        MeshError: Something was placed in another way, is no array, does not divide, or is of one process of several.
    """
    if all(getattr(x, "sharding", None) == _sharding(mesh, np.ndim(x)) for x in jax.tree.leaves(batch)):
        return batch
    check_batch(mesh, batch)
    return jax.tree.map(lambda x: x if _committed(x) else jax.device_put(x, _sharding(mesh, x.ndim)), batch)


def _committed(x: Any) -> bool:
    return getattr(x, "committed", False)
