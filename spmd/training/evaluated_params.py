"""Parameters that a run is evaluated, generates and is exported with, from its training state or a checkpoint of it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spmd import tree
from spmd.optim.evaluated_params import evaluated_kinds, find_evaluated_params
from spmd.optim.master_weights import unwrap_for_precision
from spmd.plan.plan import EvaluatedParams, ShardingPlan
from spmd.precision import Precision
from spmd.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class EvaluationPoint:
    """The evaluated parameters as a function of some arrays of a training state.

    Attributes:
        name: Name of the parameters; empty where they are those of the training state.
        like: Parameters, abstract.
        arrays: Path in the training state → an array that the function takes, abstract, in device memory.
        compute: `arrays` → the parameters, in the dtype that they are computed in.
    """

    name: str
    like: Any
    arrays: Mapping[str, jax.ShapeDtypeStruct]
    compute: Callable[[Mapping[str, jax.Array]], Any]


def evaluation_point(
    params: Any, optimizer_state: Any, precision: Precision, function: EvaluatedParams | None = None
) -> EvaluationPoint:
    """Return the point at which a run is evaluated, from the abstract state of its optimizer.

    Args:
        params: Parameters as `jax.ShapeDtypeStruct`s with shardings, and so the state.
        precision: The policy for which the optimizer is wrapped.
        function: Takes the place of `find_evaluated_params`; both get the state of the optimizer that was not wrapped.
    """
    abstract = jax.tree.map(_on_device, {"params": params, "optimizer_state": optimizer_state})
    leaves, structure = jax.tree.flatten(abstract)
    paths = tree.flatten(abstract)

    def compute(*leaves: Any) -> Any:
        state = jax.tree.unflatten(structure, leaves)
        found = unwrap_for_precision(state["optimizer_state"], state["params"], precision)
        with jax.numpy_dtype_promotion("standard"):
            return (function or find_evaluated_params)(*found)

    name = "evaluation_params" if function else " and ".join(evaluated_kinds(optimizer_state))
    if not name:
        return trained_point(params)
    needed = dict(zip(paths, _read_by(compute, leaves), strict=True))

    @jax.jit
    def of_table(table: Mapping[str, jax.Array]) -> Any:
        filled = [table[path] if needed[path] else jnp.zeros(x.shape, x.dtype) for path, x in paths.items()]
        return compute(*filled)

    arrays = {path: leaf for path, leaf in paths.items() if needed[path]}
    return EvaluationPoint(name, params, arrays, of_table)


def trained_point(params: Any) -> EvaluationPoint:
    """Return the point at which gradients are taken: the parameters of the training state."""

    def of_table(table: Mapping[str, jax.Array]) -> Any:
        return tree.map_with_path(lambda path, _: table[f"params/{path}"], params)

    return EvaluationPoint("", params, tree.flatten({"params": params}), of_table)


@functools.lru_cache(maxsize=8)
def plan_evaluation_point(plan: ShardingPlan) -> EvaluationPoint:
    """Return the point at which a run of this plan is evaluated."""
    return evaluation_point(plan.abstract_params, plan.abstract_optimizer_state, plan.precision, plan.evaluation_params)


def evaluated_params(plan: ShardingPlan, state: TrainState) -> Any:
    """Return the parameters that a run of this plan evaluates, stored as the plan's parameters are.

    They are those of the state, unless its optimizer is evaluated at others: averaged ones (`with_ema`, schedule-free),
    the slow ones of a lookahead, or what the plan's `evaluation_params` returns. Generate and export with the same.
    """
    point = plan_evaluation_point(plan)
    if not point.name:
        return state.params
    table = tree.flatten({"params": state.params, "optimizer_state": state.optimizer_state})
    on_device = {path: jax.device_put(table[path], leaf.sharding) for path, leaf in point.arrays.items()}
    return place_params(point.compute(on_device), plan.abstract_params)


def place_params(params: Any, like: Any) -> Any:
    """Return parameters in the dtypes and shardings of `like`."""

    def place(x: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(x if x.dtype == leaf.dtype else x.astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(place, params, like)


def _read_by(function: Callable[..., Any], arguments: list[Any]) -> list[bool]:
    """Return which arguments a function computes with or returns; random keys, which have no zero, are among them."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    read = {id(x) for equation in jaxpr.eqns for x in equation.invars} | {id(x) for x in jaxpr.outvars}
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in arguments]
    return [id(x) in read or is_key for x, is_key in zip(jaxpr.invars, keys, strict=True)]


def _on_device(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding.with_memory_kind("device")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
