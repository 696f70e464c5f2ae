"""Optimizers for parameters that are stored in a narrower dtype than they are updated in.

An update is often smaller than the distance between two bfloat16 numbers, and would be lost. Either the optimizer's
state holds exact master weights, or the updated parameter is rounded at random so that its mean is exact.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmd.model_api.precision import Precision
from spmd.optim.skip_updates import skip_bad_updates
from spmd.optim.stochastic_rounding import round_stochastically, salt_of, seed_of
from spmd.optim.two_phase import TwoPhaseOptimizer, phases, two_phase
from spmd.tree import map_with_path


class MasterState(NamedTuple):
    """The exact parameters, laid out like them, and the inner optimizer's state."""

    master: Any
    inner: Any


class RoundedState(NamedTuple):
    """How many updates there were (int32 scalar), from which the random bits come, and the inner optimizer's state."""

    steps: jax.Array
    inner: Any


@functools.lru_cache(maxsize=64)
def wrap_optimizer_for_precision(
    optimizer: optax.GradientTransformation, precision: Precision
) -> optax.GradientTransformation:
    """The optimizer as a plan of this precision runs it; the same object for the same arguments.

    With loss scaling it leaves out steps that are not finite. It always computes in float32, whatever the parameters
    are stored in.
    """
    if precision.loss_scale:
        optimizer = skip_bad_updates(optimizer)
    if precision.params == "float32":
        return optimizer
    if precision.master:
        return with_master_weights(optimizer)
    return with_stochastic_rounding(optimizer) if precision.rounding == "stochastic" else in_float32(optimizer)


def with_master_weights(optimizer: optax.GradientTransformation) -> TwoPhaseOptimizer:
    """The optimizer on float32 master weights, which its state holds.

    The updates it returns take the parameters exactly to the master weights, rounded.
    """
    whole, rule = phases(optimizer)

    def init(params: Any) -> MasterState:
        master = _wide(params)
        return MasterState(master, rule.init(master))

    def update(updates: Any, state: MasterState, params: Any = None, **extra: Any) -> tuple[Any, MasterState]:
        updates, inner = rule.update(_wide(updates), state.inner, state.master, **extra)
        master = jax.tree.map(jnp.add, state.master, updates)
        rounded = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
        return _difference(rounded, params), MasterState(master, inner)

    return two_phase(whole, optax.GradientTransformationExtraArgs(init, update))


def with_stochastic_rounding(optimizer: optax.GradientTransformation) -> TwoPhaseOptimizer:
    """The optimizer on bfloat16 parameters, which are rounded stochastically after each update.

    The random bits depend on how many updates there were, and are the same on every mesh.
    """
    whole, rule = phases(optimizer)

    def init(params: Any) -> RoundedState:
        return RoundedState(jnp.zeros((), jnp.int32), rule.init(_wide(params)))

    def update(updates: Any, state: RoundedState, params: Any = None, **extra: Any) -> tuple[Any, RoundedState]:
        exact = _wide(params)
        updates, inner = rule.update(_wide(updates), state.inner, exact, **extra)

        def move(path: str, p: jax.Array, u: jax.Array) -> jax.Array:
            return round_stochastically(p + u, seed_of(state.steps, salt_of(path)))

        rounded = map_with_path(move, exact, updates)
        return _difference(rounded, params), RoundedState(optax.safe_increment(state.steps), inner)

    return two_phase(whole, optax.GradientTransformationExtraArgs(init, update))


def in_float32(optimizer: optax.GradientTransformation) -> TwoPhaseOptimizer:
    """The optimizer, which sees parameters and gradients in float32."""
    whole, rule = phases(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return rule.update(_wide(updates), state, _wide(params), **extra)

    return two_phase(whole, optax.GradientTransformationExtraArgs(lambda params: rule.init(_wide(params)), update))


def _wide(params: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)


def _difference(after: Any, before: Any) -> Any:
    """The updates, in float32, that take parameters from `before` to `after`."""
    return jax.tree.map(jnp.subtract, _wide(after), _wide(before))
