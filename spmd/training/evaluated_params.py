"""Parameters that a run is evaluated with: those of the training state, or their average."""

from collections.abc import Callable
from typing import Any

import jax

from spmd.optim.ema import ema_params, ema_path
from spmd.plan.plan import ShardingPlan
from spmd.training.state import TrainState


def make_evaluated_params(plan: ShardingPlan) -> Callable[[TrainState], Any]:
    """Return a function from a training state to the parameters to evaluate, stored as the plan's parameters are.

    They are the averaged ones where the optimizer keeps an average, wherever that is stored and in whatever dtype.
    """
    if ema_path(plan.abstract_optimizer_state) is None:
        return lambda state: state.params

    def as_param(x: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        on_device = jax.device_put(x, leaf.sharding.with_memory_kind("device"))
        return jax.device_put(on_device.astype(leaf.dtype), leaf.sharding)

    @jax.jit
    def averaged(ema: Any) -> Any:
        return jax.tree.map(as_param, ema, plan.abstract_params)

    return lambda state: averaged(ema_params(state.optimizer_state))
