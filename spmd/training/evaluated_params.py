"""Parameters for evaluation, generation and export, from a training state or a checkpoint of it."""

import dataclasses
import functools
import itertools
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
        arrays: Path in the training state → an array that the function takes, abstract, in device
            memory.
        compute: `arrays` → the parameters, in the dtype that they are computed in.
    """

    name: str
    like: Any
    arrays: Mapping[str, jax.ShapeDtypeStruct]
    compute: Callable[[Mapping[str, jax.Array]], Any]


def evaluation_point(
    params: Any, optimizer_state: Any, precision: Precision, function: EvaluatedParams | None = None
) -> EvaluationPoint:
    """Return the evaluation point of a run, from the abstract state of its optimizer.

    Args:
        params: Parameters as `jax.ShapeDtypeStruct`s with shardings, and so the state.
        precision: The policy for which the optimizer is wrapped.
        function: Takes the place of `find_evaluated_params`; both get the state of the optimizer
            that was not wrapped.
    """
    abstract = jax.tree.map(_on_device, {"params": params, "optimizer_state": optimizer_state})
    leaves, structure = jax.tree.flatten(abstract)
    paths = tree.flatten(abstract)

    find = function or find_evaluated_params

    def compute(*leaves: Any) -> Any:
        state = jax.tree.unflatten(structure, leaves)
        found = unwrap_for_precision(state["optimizer_state"], state["params"], precision)
        with jax.numpy_dtype_promotion("standard"):
            return find(*found)

    name = "evaluation_params"
    if not function:
        name = " and ".join(evaluated_kinds(optimizer_state))
    if not name:
        return trained_point(params)
    is_read = _read_by(compute, leaves)
    arrays = dict(itertools.compress(paths.items(), is_read))

    @jax.jit
    def of_table(table: Mapping[str, jax.Array]) -> Any:
        filled = list[jax.Array]()
        for path, x in paths.items():
            if path in arrays:
                filled.append(table[path])
            else:
                filled.append(jnp.zeros(x.shape, x.dtype))
        return compute(*filled)

    return EvaluationPoint(name, params, arrays, of_table)


def trained_point(params: Any) -> EvaluationPoint:
    """Return the point of the gradients: the parameters of the training state."""

    def of_table(table: Mapping[str, jax.Array]) -> Any:
        return tree.map_with_path(lambda path, _: table[f"params/{path}"], params)

    return EvaluationPoint("", params, tree.flatten({"params": params}), of_table)


@functools.lru_cache(maxsize=8)
def plan_evaluation_point(plan: ShardingPlan) -> EvaluationPoint:
    """Return the evaluation point of a run of this plan."""
    return evaluation_point(
        plan.abstract_params, plan.abstract_optimizer_state, plan.precision, plan.evaluation_params
    )


def evaluated_params(plan: ShardingPlan, state: TrainState) -> Any:
    """Return the parameters for the evaluation of a run, stored as the plan's parameters are.

    They are those of the state, unless its optimizer is evaluated at others: averaged ones
    (`with_ema`, schedule-free), the slow ones of a lookahead, or what the plan's
    `evaluation_params` returns. Generate and export with the same.
    """
    point = plan_evaluation_point(plan)
    if not point.name:
        return state.params
    table = tree.flatten({"params": state.params, "optimizer_state": state.optimizer_state})
    on_device = dict[str, jax.Array]()
    for path, leaf in point.arrays.items():
        on_device[path] = jax.device_put(table[path], leaf.sharding)
    return place_params(point.compute(on_device), plan.abstract_params)


def place_params(params: Any, like: Any) -> Any:
    """Return parameters in the dtypes and shardings of `like`."""

    def place(x: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if x.dtype != leaf.dtype:
            x = x.astype(leaf.dtype)
        return jax.device_put(x, leaf.sharding)

    return jax.tree.map(place, params, like)


def _read_by(function: Callable[..., Any], arguments: list[Any]) -> list[bool]:
    """Return whether each argument is returned, is computed with, or is a random key.

    Keys have no zero to take the place of an array that is not read.
    """
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    read = {id(x) for x in jaxpr.outvars}
    for equation in jaxpr.eqns:
        read.update(id(x) for x in equation.invars)
    is_read = list[bool]()
    for variable, argument in zip(jaxpr.invars, arguments, strict=True):
        is_key = jnp.issubdtype(argument.dtype, jax.dtypes.prng_key)
        is_read.append(is_key or id(variable) in read)
    return is_read


def _on_device(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding.with_memory_kind("device")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
