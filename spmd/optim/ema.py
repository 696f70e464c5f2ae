"""Exponential moving average of the parameters, kept in the optimizer's state.

The average is optimizer state like Adam's moments: it is sharded by the parameters' rules, saved,
resharded and kept in host memory with them, and the train step does not know it. `ema_params` reads
it.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd.errors import ConfigError, Problem, describe_value
from spmd.optim.evaluated_params import ParamEmaState, find_evaluated_params
from spmd.optim.skip_updates import counts_skips
from spmd.optim.two_phase import TwoPhaseOptimizer, phases, treatment_of, two_phase


def with_ema(
    optimizer: optax.GradientTransformation, decay: float, *, debias: bool = True
) -> TwoPhaseOptimizer:
    """Wrap an optimizer to average the parameters after each of its updates.

    The updates stay as they are. The average after t updates is the sum of `decay**(t - i) *
    params[i]` over i = 1 … t, divided by the sum of these weights: an exponential moving average
    with the bias correction of Kingma and Ba (arXiv:1412.6980, section 3), so that the initial
    parameters have no weight. It moves by `(1 - decay) / (1 - decay**t)` of the distance, and needs
    no correction when it is read. Wrap it in `skip_bad_updates`, not the reverse: a skipped update
    does not move it. Of an optimizer that is evaluated at other parameters (schedule-free,
    lookahead), it averages these.

    Args:
        decay: Above 0 and below 1; the average is of about the last `1 / (1 - decay)` updates.
        debias: Whether the initial parameters have no weight. If not, the average begins at them
            and moves by `1 - decay` of the distance, as target networks (Polyak averaging) and
            teachers do.

    Example:
        >>> optimizer = with_ema(optax.sgd(1.0), decay=0.5)
        >>> params = {"w": jnp.array(4.0)}
        >>> state = optimizer.init(params)
        >>> for _ in range(2):  # w is 3, then 2
        ...     updates, state = optimizer.update({"w": jnp.array(1.0)}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> ema_params(state)["w"]  # (3 / 2 + 2) / (1 / 2 + 1)
        Array(2.3333333, dtype=float32)
    """
    if not 0 < decay < 1:
        fix = "above 0 and below 1, such as 0.999"
        problem = Problem("decay", f"is {describe_value(decay)}", fix=fix)
        raise ConfigError("Parameters cannot be averaged:", [problem])
    global_phase, param_phase = phases(optimizer)

    def init(params: Any) -> ParamEmaState:
        inner = param_phase.init(params)
        if counts_skips(inner):
            problem = Problem(
                "optimizer",
                "skips updates that the average would count",
                fix="skip_bad_updates(with_ema(optimizer, decay))",
            )
            raise ConfigError("Parameters cannot be averaged:", [problem])
        averaged = jnp.zeros((), jnp.int32)
        ema = jax.tree.map(jnp.array, params)
        return ParamEmaState(averaged, ema, inner)

    def update(
        updates: Any, state: ParamEmaState, params: Any = None, **extra: Any
    ) -> tuple[Any, ParamEmaState]:
        updates, inner = param_phase.update(updates, state.inner, params, **extra)
        count = optax.safe_increment(state.averaged)
        weight = jnp.float32(1 - decay)
        if debias:  # (1 - decay) / (1 - decay**count)
            weight = (1 - decay) / -jnp.expm1(count.astype(jnp.float32) * math.log(decay))
        after = find_evaluated_params(inner, optax.apply_updates(params, updates))

        def move(old: jax.Array, new: jax.Array) -> jax.Array:
            return (old + weight * (new - old)).astype(old.dtype)

        ema = jax.tree.map(move, state.ema, after)
        return updates, ParamEmaState(count, ema, inner)

    param_phase_with_ema = optax.GradientTransformationExtraArgs(init, update)
    return two_phase(global_phase, param_phase_with_ema, treatment_of(optimizer))


def ema_params(state: Any) -> Any:
    """Return the averaged parameters in an optimizer's state, as stored.

    Raises:
        ConfigError: The optimizer keeps no average.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, ParamEmaState))
    for node in nodes:
        if isinstance(node, ParamEmaState):
            return node.ema
    problem = Problem(
        "optimizer",
        "keeps no average of the parameters",
        fix="spmd.with_ema(optimizer, decay=0.999)",
    )
    raise ConfigError("No averaged parameters:", [problem])
