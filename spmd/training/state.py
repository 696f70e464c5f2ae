"""The training state, created sharded: no array ever exists whole on one device."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem, check_type, describe_value, first_of
from spmd.model_interface.grad_transform import Carry
from spmd.model_interface.model import PRNG
from spmd.plan.plan import ShardingPlan
from spmd.precision import cast_floats
from spmd.training.batch import check_batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Training state: input and output of a step.

    Attributes:
        step: int32 scalar: the number of steps taken.
        variables: The arrays that the model changes by itself; empty for most models.
        key: uint32[2]: the data of the key from which every step's key is derived.
        transforms: Name → state of each transform of the gradient
            (`spmd.model_interface.grad_transform`).
    """

    step: Any
    params: Any
    variables: Any
    optimizer_state: Any
    key: Any
    transforms: Any = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        parts = [f"params {tree.describe_arrays(self.params)}"]
        if jax.tree.leaves(self.variables):
            parts.append(f"variables {tree.describe_arrays(self.variables)}")
        parts.append(f"optimizer_state {tree.describe_arrays(self.optimizer_state)}")
        if jax.tree.leaves(self.transforms):
            parts.append(f"transforms {tree.describe_arrays(self.transforms)}")
        return f"TrainState(step {_shown_step(self.step)}: {', '.join(parts)})"

    @property
    def carry(self) -> Carry:
        """Carry of a gradient function: variables, and states of transforms."""
        return Carry(self.variables, self.transforms)

    def step_key(self) -> jax.Array:
        """Return the key of the next step."""
        return jax.random.fold_in(jax.random.wrap_key_data(self.key, impl=PRNG), self.step)


def _shown_step(step: Any) -> str:
    """Return the step of a state, or a word about one without a value."""
    if not isinstance(step, jax.Array) or isinstance(step, jax.core.Tracer):
        return describe_value(step)
    if step.is_deleted():
        return "deleted, as the state was donated"
    return str(step)


@dataclasses.dataclass(frozen=True)
class ModelState:
    """A model's part of a training state: parameters and variables."""

    params: Any
    variables: Any


def abstract_state(plan: ShardingPlan) -> TrainState:
    """Return the training state as `jax.ShapeDtypeStruct`s with shardings, to restore into."""
    replicated = NamedSharding(plan.mesh, P())
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=replicated)
    return TrainState(
        step=step,
        params=plan.abstract_params,
        variables=plan.abstract_variables,
        optimizer_state=plan.abstract_optimizer_state,
        key=key,
        transforms=plan.abstract_transforms,
    )


def as_stored(state: TrainState) -> TrainState:
    """Return a state in the form of checkpoints: with states of transforms among the variables."""
    variables = {**state.variables, **state.transforms}
    return dataclasses.replace(state, variables=variables, transforms={})


def from_stored(stored: TrainState, plan: ShardingPlan) -> TrainState:
    """Return a state of a plan from the form of `as_stored`."""
    variables = dict(stored.variables)
    transforms = {name: variables.pop(name) for name in plan.abstract_transforms}
    return dataclasses.replace(stored, variables=variables, transforms=transforms)


def abstract_arguments(plan: ShardingPlan, batch: Any) -> tuple[TrainState, Any]:
    """Return the abstract arguments of a step, a state and a batch, with shardings."""
    check_batch(plan, batch)

    def place(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return abstract_state(plan), jax.tree.map(place, batch, plan.batch_shardings(batch))


def check_state(plan: ShardingPlan, state: Any) -> None:
    """Raise a `ConfigError` if a state was donated, or does not fit the plan."""
    problems = check_type(
        "state", state, TrainState, "step(state, batch), with state from spmd.init_state"
    )
    fix = "use what the step returned: state, metrics = step(state, batch)"
    problems = problems or check_alive("state", state, fix)
    problems = problems or tree.check_like(state, abstract_state(plan), "state")
    if problems:
        raise ConfigError("The step cannot take this state:", first_of(problems, at_most=5))


def place_state(plan: ShardingPlan, state: TrainState) -> TrainState:
    """Move the arrays of a state to their places in the plan, if they are not there."""

    def place(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        is_committed = getattr(x, "committed", False)
        if is_committed and x.sharding.is_equivalent_to(like.sharding, x.ndim):
            return x
        return jax.device_put(x, like.sharding)

    return jax.tree.map(place, state, abstract_state(plan))


def check_alive(where: str, arrays: Any, fix: str) -> list[Problem]:
    """Return a problem if some arrays are deleted, as donated ones are."""
    table = tree.flatten(arrays)
    deleted = [path for path, x in table.items() if _is_deleted(x)]
    if not deleted:
        return []
    what = f"was donated to another call: {len(deleted)} of its {len(table)} arrays are gone"
    return [Problem(where, what, f"such as {deleted[0]}", fix)]


def _is_deleted(x: Any) -> bool:
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return False
    return x.is_deleted()


@functools.lru_cache(maxsize=1)
def init_program(plan: ShardingPlan) -> Any:
    """Return the jitted initialisation of the state, shard by shard.

    Its arguments are a key's data, given parameters or None, and given variables.
    """

    def create(key_data: jax.Array, params: Any, given: Mapping[str, Any]) -> TrainState:
        key = jax.random.wrap_key_data(key_data, impl=PRNG)
        model_key = jax.random.fold_in(key, 0)
        if params is None:
            params = cast_floats(plan.model.init(model_key), plan.precision.params_dtype)
        variables = tree.merge(plan.model.init_variables(model_key), given)
        step_key = jax.random.fold_in(key, 1)
        data = jax.random.key_data(step_key)
        transforms = dict[str, Any]()
        for transform in plan.transforms:
            if transform.name in plan.abstract_transforms:
                made = transform.init_beside(plan, model_key, params, variables)
                transforms[transform.name] = made
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            variables=variables,
            optimizer_state=plan.optimizer.init(params),
            key=data,
            transforms=transforms,
        )

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(plan))
    return jax.jit(create, out_shardings=shardings, donate_argnums=(1, 2))


def init_state(
    plan: ShardingPlan,
    seed: int = 0,
    params: Any = None,
    variables: Mapping[str, Any] | None = None,
) -> TrainState:
    """Create the state at step 0.

    The same seed gives bitwise the same parameters on every mesh, for initialisers that draw each
    element independently (normal, truncated normal, uniform, and the variance scalings of them).

    Args:
        seed: An integer between -2³¹ and 2³².
        params: Parameters to begin with instead of drawn ones, placed as the plan says; donated.
        variables: Variables to begin with instead of the model's own, by their first name; donated.
    """
    problems = list[Problem]()
    if not isinstance(seed, int | np.integer) or not -(2**31) <= seed < 2**32:
        fix = "a whole number, at least -2³¹ and below 2³²"
        problems.append(Problem("seed", f"is {describe_value(seed)}", fix=fix))
    if isinstance(plan.mesh, AbstractMesh):
        fix = "a plan with a mesh from spmd.make_mesh"
        problems.append(Problem("plan.mesh", "has no devices", fix=fix))
    if params is not None:
        problems += check_alive("params", params, "give parameters that no other call has taken")
        problems += tree.check_like(params, plan.abstract_params, "params")
    if problems:
        raise ConfigError("Invalid training state:", problems)
    data = jax.random.key_data(jax.random.key(seed, impl=PRNG))
    replicated = jax.device_put(data, NamedSharding(plan.mesh, P()))
    return init_program(plan)(replicated, params, variables or {})
