"""Gather parameters over `fsdp` where they are used, and reduce their gradients to where the plan keeps them.

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

from spmd import tree
from spmd.model_api.wrapped_param import RiddenParam
from spmd.plan.context import constrain, current
from spmd.plan.linear_call import linear_call
from spmd.plan.local_param import local_param
from spmd.plan.manual import manual_over, split_axes
from spmd.plan.records import ParamPlacement
from spmd.plan.scopes import in_scope
from spmd.precision import cast_floats


def placement_of(path: str | None) -> ParamPlacement | None:
    """Return the placement of one layer's parameter by the path that `spmd.plan.flax` gave it; None outside a plan."""
    context = current()
    placement = None if path is None else context.placements.get(path)
    if placement is None or not context.regather:
        return placement
    return dataclasses.replace(placement, save_gathered=False)


def saves_gathered(placement: ParamPlacement | None) -> bool:
    """Return whether the backward pass keeps the gathered parameter, instead of gathering it again."""
    return placement is None or placement.save_gathered


def named_after(placement: ParamPlacement | None) -> contextlib.AbstractContextManager:
    """Name the operations inside after a parameter, for the audit of collectives."""
    return in_scope(placement.scope if placement else "")


def prepare(kernel: jax.Array, placement: ParamPlacement | None) -> Any:
    """Return what both passes gather a layer's parameter from, for `gather_prepared`: itself, if its plan says no more.

    It is a tree that the parameter's `ParamComm` alone reads.
    """
    if placement is None or not (param := local_param(placement, kernel.ndim)).prepares:
        return kernel
    kernel = constrain(kernel, placement.mesh, placement.stored, "a layer's parameter")
    with named_after(placement):
        return param.prepare(kernel, placement.mesh)


def gather_prepared(prepared: Any, placement: ParamPlacement | None, dtype: Any, *, ndim: int) -> jax.Array:
    """Apply `gather` to what `prepare` returned of a parameter of `ndim` dimensions."""
    if placement is None or not (param := local_param(placement, ndim)).prepares:
        return gather(prepared, placement, dtype)
    mesh, local = placement.mesh, functools.partial(param.gather_prepared, dtype=dtype)
    with named_after(placement):
        return manual_over(mesh, split_axes(mesh), local, (param.prepared_specs,), param.specs[1])(prepared)


def gather(kernel: jax.Array, placement: ParamPlacement | None, dtype: Any) -> jax.Array:
    """Gather a layer's parameter over `fsdp` in a dtype. The remat policy decides if the backward pass keeps it.

    What is sent has that dtype, unless the parameter's `ParamComm` takes the parameter as it is stored.
    """
    if placement is None:
        return kernel.astype(dtype)
    mesh, param = placement.mesh, local_param(placement, kernel.ndim)
    if not (param.is_gathered and param.comm.takes_uncast):
        kernel = kernel.astype(dtype)
    with named_after(placement):
        if not param.is_gathered:
            return constrain(kernel, mesh, placement.used, "a layer's parameter")
        kernel = constrain(kernel, mesh, placement.stored, "a layer's parameter")
        local = functools.partial(param.gather, dtype=dtype)
        return manual_over(mesh, split_axes(mesh), local, *param.specs[:2])(kernel)


def scatter(gradient: jax.Array, placement: ParamPlacement | None) -> jax.Array:
    """Sum a layer's gradient over devices, into the sharding in which the plan keeps it."""
    if placement is None:
        return gradient
    with named_after(placement):
        return constrain(gradient, placement.mesh, placement.gradient, "a layer's gradient")


def gathered(
    param: jax.Array, placement: ParamPlacement | None, *, dtype: Any = None, sum_first: bool = False
) -> jax.Array:
    """Apply `gather`, with `scatter` as the transpose: for a parameter that is used as it is, such as a bias.

    Cotangents of any order go the same way: that of a gradient is gathered as the parameter is.

    Args:
        dtype: The only dtype in which the parameter is used, if it is narrower: what is sent has it.
        sum_first: Whether to sum a gradient before it is scattered, instead of leaving that choice to XLA.
    """
    if placement is None:
        return param

    def sum_and_scatter(gradient: jax.Array) -> jax.Array:
        with named_after(placement):
            summed = constrain(gradient, placement.mesh, placement.used, "a layer's gradient")
        return scatter(summed, placement)

    transpose = sum_and_scatter if sum_first else functools.partial(scatter, placement=placement)
    return linear_call(lambda x: gather(x, placement, dtype or x.dtype).astype(x.dtype), transpose, param)


_NO_RIDERS: Mapping[str, jax.Array] = MappingProxyType({})


def grad_targets(params: Any) -> Any:
    """Return the arrays to differentiate with respect to: parameters in the dtype in which the plan sums gradients.

    For a parameter in host memory it is an array of zeros on the device.
    """
    context = current()
    if context.precision is None:
        return params
    dtype = context.precision.gradients_dtype

    def target(path: str, param: jax.Array) -> jax.Array:
        placement = context.placements.get(path)
        on_host = placement is not None and placement.on_host
        return cast_floats(jnp.zeros(param.shape, param.dtype) if on_host else param, dtype)

    return tree.map_with_path(target, params)


def params_for_forward(params: Any, targets: Any = None, riders: Mapping[str, jax.Array] = _NO_RIDERS) -> Any:
    """Return the parameters that a model takes: each layer itself copies those in host memory to the device.

    Args:
        targets: From `grad_targets`, to differentiate with respect to them, or None.
        riders: Path → the array that rides on a parameter (`spmd.model_api.grad_transform`).
    """
    context = current()
    seen = params if targets is None else targets
    if context.mesh is None:
        return seen
    mesh, proxies = context.mesh, {} if targets is None else tree.flatten(targets)

    def take(path: str, param: jax.Array, seen: Any) -> Any:
        placement = context.placements.get(path)
        if placement is not None and placement.on_host:
            sharding = NamedSharding(mesh, placement.stored, memory_kind="device")
            seen = context.storage.at_forward(path, param, proxies.get(path), sharding)
        return RiddenParam(seen, riders[path]) if path in riders else seen

    return tree.map_with_path(take, params, seen)


def zero_gradients(like: Any) -> Any:
    """Return zeros of the shapes of gradients, in the dtype in which those of microbatches are accumulated."""
    precision = current().precision
    return jax.tree.map(lambda g: jnp.zeros(g.shape, precision.accumulation if precision else g.dtype), like)
