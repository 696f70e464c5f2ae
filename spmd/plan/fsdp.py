"""Gather parameters over `fsdp` and `sequence` for their use; reduce gradients to the plan's sharding.

Outside a plan every function here is the identity.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.model_interface.wrapped_param import RiddenParam, StoredParam, is_stored
from spmd.plan.context import constrain, current
from spmd.plan.linear_call import linear_call
from spmd.plan.manual import shard_map_over, split_axes
from spmd.plan.records import ParamPlacement
from spmd.plan.scopes import in_scope
from spmd.plan.sharded_param import sharded_param
from spmd.precision import cast_floats
from spmd.sharding.collectives import gather_dims
from spmd.sharding.dims import spec_dims
from spmd.sharding.local_layout import LocalLayout


def placement_of(path: str | None) -> ParamPlacement | None:
    """Return the placement of one layer's parameter; None outside a plan.

    Args:
        path: The path from `spmd.plan.nnx_model`.
    """
    if path is None:
        return None
    context = current()
    placement = context.placements.get(path)
    if placement is None or not context.regather:
        return placement
    return dataclasses.replace(placement, save_gathered=False)


def saves_gathered(placement: ParamPlacement | None) -> bool:
    """Return whether the backward pass keeps the gathered parameter, and does not gather again."""
    return placement is None or placement.save_gathered


def named_after(placement: ParamPlacement | None) -> contextlib.AbstractContextManager:
    """Name the operations inside after a parameter, for the audit of collectives."""
    if placement is None:
        return in_scope("")
    return in_scope(placement.scope)


def prepare(kernel: jax.Array, placement: ParamPlacement | None) -> Any:
    """Return the source of both passes' gathers of a layer's parameter, for `gather_prepared`.

    Only the parameter's `ParamComm` reads this tree. By default it is the parameter itself, as it is
    stored.
    """
    if placement is None or is_stored(kernel):
        return kernel
    param = sharded_param(placement, kernel.ndim)
    if not param.prepares:
        return kernel
    kernel = constrain(kernel, placement.mesh, placement.param_spec, "a layer's parameter")
    with named_after(placement):
        return param.prepare(kernel, placement.mesh)


def gather_prepared(
    prepared: Any, placement: ParamPlacement | None, dtype: Any, *, ndim: int
) -> jax.Array:
    """Apply `gather` to the result of `prepare` of a parameter of `ndim` dimensions."""
    if placement is None or is_stored(prepared):
        return gather(prepared, placement, dtype)
    param = sharded_param(placement, ndim)
    if not param.prepares:
        return gather(prepared, placement, dtype)
    mesh = placement.mesh
    local = functools.partial(param.gather_prepared, dtype=dtype)
    in_specs = (param.prepared_specs,)
    _, used, _ = param.specs
    with named_after(placement):
        return shard_map_over(mesh, split_axes(mesh), local, in_specs, used)(prepared)


def gather(kernel: Any, placement: ParamPlacement | None, dtype: Any) -> jax.Array:
    """Gather a layer's parameter in a dtype.

    The remat policy decides whether the backward pass keeps the gathered parameter. The parameter
    is cast before the gather, unless its `ParamComm` takes it as stored. One that is stored in
    another form is gathered so, and decoded after it.
    """
    if is_stored(kernel):
        return _gather_stored(kernel, placement, dtype)
    if placement is None:
        return kernel.astype(dtype)
    mesh = placement.mesh
    param = sharded_param(placement, kernel.ndim)
    if not (param.is_gathered and param.comm.takes_uncast):
        kernel = kernel.astype(dtype)
    with named_after(placement):
        if not param.is_gathered:
            return constrain(kernel, mesh, placement.compute_spec, "a layer's parameter")
        kernel = constrain(kernel, mesh, placement.param_spec, "a layer's parameter")
        local = functools.partial(param.gather, dtype=dtype)
        stored, used, _ = param.specs
        return shard_map_over(mesh, split_axes(mesh), local, stored, used)(kernel)


def _gather_stored(stored: StoredParam, placement: ParamPlacement | None, dtype: Any) -> jax.Array:
    """Gather the arrays of a stored parameter as they are, and decode them."""
    if placement is None:
        return stored.decoded(dtype)
    mesh = placement.mesh
    kept = stored.specs_by(placement.param_spec)
    used = stored.specs_by(placement.compute_spec)
    axes = split_axes(mesh)

    def gather_part(part: jax.Array, kept: P, used: P) -> jax.Array:
        part = constrain(part, mesh, kept, "a part of a layer's parameter")
        dims = spec_dims(used, part.ndim, axes)
        layout = LocalLayout(spec_dims(kept, part.ndim, axes), dims, dims, mesh)
        if not layout.is_gathered:
            return constrain(part, mesh, used, "a part of a layer's parameter")
        # In a manual region: of a constraint the partitioner may make a gather of what is decoded.
        local = functools.partial(gather_dims, mesh=mesh, dims=layout.gathers)
        stored_spec, used_spec, _ = layout.specs
        return shard_map_over(mesh, axes, local, stored_spec, used_spec)(part)

    with named_after(placement):
        whole = jax.tree.map(gather_part, stored, kept, used).decoded(dtype)
        return constrain(whole, mesh, placement.compute_spec, "a layer's parameter")


def decode_shards(stored: StoredParam, path: str, dtype: Any, *, is_stack: bool) -> jax.Array:
    """Decode a stored parameter into its shards, for a layer that gathers no codes.

    Args:
        path: Its path in the model.
        is_stack: Whether it is of all layers of its stack.
    """
    placement = current().placements.get(path)
    if placement is None:
        return stored.decoded(dtype)
    if is_stack:
        placement = placement.of_stack()

    def split(part: jax.Array, spec: P) -> jax.Array:
        return constrain(part, placement.mesh, spec, "a part of a layer's parameter")

    with named_after(placement):
        shards = jax.tree.map(split, stored, stored.specs_by(placement.param_spec))
        return split(shards.decoded(dtype), placement.param_spec)


def scatter(gradient: jax.Array, placement: ParamPlacement | None) -> jax.Array:
    """Sum a layer's gradient over devices, into its sharding in the plan."""
    if placement is None:
        return gradient
    with named_after(placement):
        return constrain(gradient, placement.mesh, placement.grad_spec, "a layer's gradient")


def gathered(
    param: jax.Array,
    placement: ParamPlacement | None,
    *,
    dtype: Any = None,
    sum_first: bool = False,
) -> jax.Array:
    """Apply `gather`, with `scatter` as the transpose, for a parameter used as it is, like a bias.

    This holds for derivatives of any order: the cotangent of a gradient is gathered as the
    parameter is.

    Args:
        dtype: The only dtype in which the parameter is used, if it is narrower: the parameter is
            gathered in it.
        sum_first: Whether to sum a gradient before it is scattered, instead of leaving that choice
            to XLA.
    """
    if placement is None:
        return param

    def gather_as_used(x: jax.Array) -> jax.Array:
        return gather(x, placement, dtype or x.dtype).astype(x.dtype)

    def scatter_gradient(gradient: jax.Array) -> jax.Array:
        if sum_first:
            with named_after(placement):
                gradient = constrain(
                    gradient, placement.mesh, placement.compute_spec, "a layer's gradient"
                )
        return scatter(gradient, placement)

    return linear_call(gather_as_used, scatter_gradient, param)


_NO_RIDERS: Mapping[str, jax.Array] = MappingProxyType({})


def grad_targets(params: Any) -> Any:
    """Return the arrays to differentiate with respect to: parameters in the dtype of gradients.

    This is the dtype in which the plan sums gradients. A parameter in host memory is replaced by an
    array of zeros on the device.
    """
    context = current()
    if context.precision is None:
        return params
    dtype = context.precision.gradients_dtype

    def target(path: str, param: jax.Array) -> jax.Array:
        placement = context.placements.get(path)
        if placement is not None and placement.on_host:
            param = jnp.zeros(param.shape, param.dtype)
        return cast_floats(param, dtype)

    return tree.map_with_path(target, params)


def params_for_forward(
    params: Any, targets: Any = None, riders: Mapping[str, jax.Array] = _NO_RIDERS
) -> Any:
    """Return the parameters for a model; each layer copies its own from host memory.

    Args:
        targets: From `grad_targets`, to differentiate with respect to them, or None.
        riders: Path → the array carried along with a parameter
            (`spmd.model_interface.grad_transform`).
    """
    context = current()
    seen = params if targets is None else targets
    if context.mesh is None:
        return seen
    mesh = context.mesh
    proxies = {} if targets is None else tree.flatten(targets)

    def take(path: str, param: jax.Array, seen: Any) -> Any:
        placement = context.placements.get(path)
        if placement is not None and placement.on_host:
            sharding = NamedSharding(mesh, placement.param_spec, memory_kind="device")
            seen = context.storage.at_forward(path, param, proxies.get(path), sharding)
        if path not in riders:
            return seen
        return RiddenParam(seen, riders[path])

    return tree.map_with_path(take, params, seen)


def zero_gradients(like: Any) -> Any:
    """Return zeros of the shapes of gradients, in the dtype of sums over microbatches."""
    precision = current().precision

    def zeros(gradient: jax.Array) -> jax.Array:
        dtype = precision.accumulation if precision else gradient.dtype
        return jnp.zeros(gradient.shape, dtype)

    return jax.tree.map(zeros, like)
