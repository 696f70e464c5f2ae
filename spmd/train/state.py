"""The training state, created sharded: no array ever exists whole on one device."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.model_api.model import PRNG
from spmd.model_api.precision import cast_floats
from spmd.plan.plan import ShardingPlan
from spmd.sharding.mesh import batch_sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State that a step reads and writes.

    Attributes:
        step: int32 scalar: the number of steps taken.
        variables: The arrays that the model changes by itself; empty for most models.
        key: uint32[2]: the data of the key from which every step's key is derived.
    """

    step: Any
    params: Any
    variables: Any
    optimizer_state: Any
    key: Any

    def step_key(self) -> jax.Array:
        """Return the key of the next step."""
        return jax.random.fold_in(jax.random.wrap_key_data(self.key, impl=PRNG), self.step)


@dataclasses.dataclass(frozen=True)
class ModelState:
    """The part of a training state that a model computes with: parameters and variables."""

    params: Any
    variables: Any


def abstract_state(plan: ShardingPlan) -> TrainState:
    """Return the training state as `jax.ShapeDtypeStruct`s with shardings, into which a checkpoint is restored."""
    replicated = NamedSharding(plan.mesh, P())
    return TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated),
        params=plan.abstract_params,
        variables=plan.abstract_variables,
        optimizer_state=plan.abstract_optimizer_state,
        key=jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=replicated),
    )


def abstract_arguments(plan: ShardingPlan, batch: Any) -> tuple[TrainState, Any]:
    """Return the arguments of a step, the state and a batch of this shape, as abstract values with shardings."""

    def place(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(plan.mesh, len(x.shape)))

    return abstract_state(plan), jax.tree.map(place, batch)


@functools.lru_cache(maxsize=1)
def init_program(plan: ShardingPlan) -> Any:
    """Return the jitted function that creates the state from a key's data and given arrays, shard by shard."""

    def create(key_data: jax.Array, params: Any, given: Mapping[str, Any]) -> TrainState:
        key = jax.random.wrap_key_data(key_data, impl=PRNG)
        model_key = jax.random.fold_in(key, 0)
        if params is None:
            params = cast_floats(plan.model.init(model_key), plan.precision.params_dtype)
        variables = {**plan.model.init_variables(model_key), **given}
        data = jax.random.key_data(jax.random.fold_in(key, 1))
        return TrainState(jnp.zeros((), jnp.int32), params, variables, plan.optimizer.init(params), data)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(plan))
    return jax.jit(create, out_shardings=shardings, donate_argnums=(1, 2))


def init_state(
    plan: ShardingPlan, seed: int = 0, params: Any = None, variables: Mapping[str, Any] | None = None
) -> TrainState:
    """Create the state at step 0.

    The same seed gives bitwise the same parameters on every mesh, for initialisers that draw each element
    independently (normal, truncated normal, uniform, and the variance scalings of them).

    Args:
        seed: Any integer below 2³².
        params: Parameters to begin with instead of drawn ones, placed as the plan says; donated.
        variables: Variables to begin with instead of the model's own, by their first name; donated.
    """
    key = jax.device_put(jax.random.key_data(jax.random.key(seed, impl=PRNG)), NamedSharding(plan.mesh, P()))
    return init_program(plan)(key, params, variables or {})
