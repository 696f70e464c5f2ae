"""Regions manual over axes of the mesh (`jax.shard_map`): their axes, specs and collectives."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import get_abstract_mesh
from jaxtyping import Array

from spmd.plan.context import current
from spmd.plan.scopes import comm_scope, in_scope
from spmd.sharding.collectives import gather_dims
from spmd.sharding.dims import Dims
from spmd.sharding.mesh import BATCH_AXES, AnyMesh, is_cpu

F = TypeVar("F", bound=Callable)


def split_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Return the axes of size above 1, except those manual already."""
    manual = get_abstract_mesh().manual_axes
    return tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in manual)


def manual_axes() -> tuple[str, ...]:
    """Return the manual axes of the region traced here that split the mesh of the plan in scope.

    Replicas that train by themselves (`spmd.diloco`) are along an axis of the region's mesh that
    has size 1 in their own plan's, so nothing is summed over it.
    """
    around = get_abstract_mesh()
    sizes = around.shape
    mesh = current().mesh
    if mesh is not None:
        sizes = mesh.shape
    return tuple(axis for axis in around.manual_axes if sizes[axis] > 1)


def is_partly_manual() -> bool:
    """Return whether the region traced here is manual over some axes and leaves others to XLA."""
    mesh = get_abstract_mesh()
    return bool(mesh.manual_axes) and bool(split_axes(mesh))


def is_in_stage() -> bool:
    """Return whether a pipeline's stages are traced."""
    return "pipe" in manual_axes()


def shard_map_over(
    mesh: AnyMesh, axes: tuple[str, ...], f: F, in_specs: Any, out_specs: Any, *, purpose: str = ""
) -> F:
    """Map `f` over the shards along some axes of size above 1; leave the others to the compiler.

    If all axes are manual already, `f` is returned unchanged. Where no other axis is larger than 1,
    the region is manual over all axes of the mesh: a Pallas kernel needs that. Varying axes are not
    checked, so an enclosing region must not check them either (`check_vma=False`), or JAX refuses
    its derivative.

    Args:
        purpose: The purpose of the region's collectives, for their audit
            (`spmd.plan.scopes.comm_scope`).
    """
    around = get_abstract_mesh().manual_axes
    axes = tuple(axis for axis in axes if axis not in around)
    if not axes:
        return f
    names = set(axes)
    left = set(split_axes(mesh)) - names
    if not left:
        names = set(mesh.axis_names) - set(around)
    region = jax.shard_map(
        f,
        mesh=None if around else mesh,  # inside another such region, that one's mesh
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=names,
        check_vma=False,
    )
    if not purpose:
        return region

    def run(*args: Any) -> Any:
        with in_scope(comm_scope(purpose)):
            return region(*args)

    return cast(F, run)


def all_gather(x: Array, dims: Dims) -> Array:
    """Gather each dimension over its axes."""
    return gather_dims(x, current().mesh, dims)


def psum_scatter(x: Array, dims: Dims) -> Array:
    """Sum over the axes of all dimensions and scatter each dimension over its own."""
    for dim, axes in enumerate(dims):
        if axes:
            x = jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    return x


def psum(x: Array, axes: tuple[str, ...]) -> Array:
    """Sum over axes, if there are any."""
    if not axes:
        return x
    return jax.lax.psum(x, axes)


def permute(x: Array, axis: str, pairs: Sequence[tuple[int, int]]) -> Array:
    """Send each device's array along an axis, by pairs of a source and a target, each once.

    Stages of a pipeline on simulated devices gather the arrays instead, and read one: in their
    tasks a permute of XLA:CPU waits for stages that have none.
    """
    mesh = current().mesh
    if not (is_in_stage() and is_cpu(mesh)):
        return jax.lax.ppermute(x, axis, pairs)
    sources = [0] * len(pairs)
    for source, target in pairs:
        sources[target] = source
    own = jnp.asarray(sources)[jax.lax.axis_index(axis)]
    return jax.lax.dynamic_index_in_dim(jax.lax.all_gather(x, axis), own, keepdims=False)


def batch_sum(x: Array) -> Array:
    """Sum over the manual axes of the batch, for a sum over the examples of all devices."""
    return psum(x, _manual_batch_axes())


def batch_mean(x: Array, valid: Array) -> Array:
    """Return the mean over the valid examples, or tokens, of all devices; 0 if there are none.

    Args:
        x: Values, whose first dimensions are those of `valid`.
        valid: Mask of valid examples or tokens.
    """
    over = tuple(range(valid.ndim))
    mask = jnp.expand_dims(valid, tuple(range(valid.ndim, x.ndim)))
    count = batch_sum(valid.sum(dtype=x.dtype))
    total = batch_sum(jnp.where(mask, x, 0).sum(axis=over))
    return total / jnp.maximum(count, 1)


def global_max(x: Array) -> Array:
    """Return the element-wise maximum over all manual axes but `pipe`.

    Stages of a pipeline have values of their own.
    """
    axes = tuple(axis for axis in manual_axes() if axis != "pipe")
    if not axes:
        return x
    return jax.lax.pmax(x, axes)


def _manual_batch_axes() -> tuple[str, ...]:
    manual = manual_axes()
    return tuple(axis for axis in BATCH_AXES if axis in manual)
