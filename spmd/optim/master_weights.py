"""Optimizers for parameters stored in a narrower dtype: master weights, or stochastic rounding.

An update is often smaller than the distance between two bfloat16 numbers, so rounding to the nearest would lose it.
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
    """Float32 master weights, and the inner optimizer's state."""

    master: Any
    inner: Any


class RoundedState(NamedTuple):
    """Number of updates (int32 scalar), which seeds the random bits, and the inner optimizer's state."""

    steps: jax.Array
    inner: Any


@functools.lru_cache(maxsize=64)
def wrap_optimizer_for_precision(
    optimizer: optax.GradientTransformation, precision: Precision
) -> optax.GradientTransformation:
    """Wrap an optimizer for a precision; it computes in float32, and with loss scaling skips non-finite updates.

    Cached because plans compare by object: equal arguments must give equal plans, which share one compiled step.
    """
    if precision.loss_scale:
        optimizer = skip_bad_updates(optimizer)
    if precision.params == "float32":
        return optimizer
    if precision.master:
        return with_master_weights(optimizer)
    return with_stochastic_rounding(optimizer) if precision.rounding == "stochastic" else in_float32(optimizer)


def with_master_weights(optimizer: optax.GradientTransformation) -> TwoPhaseOptimizer:
    """Wrap an optimizer to update float32 master weights in its state.

    Its updates set the parameters to the rounded master weights exactly.
    """
    global_phase, param_phase = phases(optimizer)

    def init(params: Any) -> MasterState:
        master = _wide(params)
        return MasterState(master, param_phase.init(master))

    def update(updates: Any, state: MasterState, params: Any = None, **extra: Any) -> tuple[Any, MasterState]:
        updates, inner = param_phase.update(_wide(updates), state.inner, state.master, **extra)
        master = jax.tree.map(jnp.add, state.master, updates)
        rounded = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
        return _difference(rounded, params), MasterState(master, inner)

    return two_phase(global_phase, optax.GradientTransformationExtraArgs(init, update))


def with_stochastic_rounding(optimizer: optax.GradientTransformation) -> TwoPhaseOptimizer:
    """Wrap an optimizer to round bfloat16 parameters stochastically after each update.

    The random bits depend on the number of updates, and are the same on every mesh.
    """
    global_phase, param_phase = phases(optimizer)

    def init(params: Any) -> RoundedState:
        return RoundedState(jnp.zeros((), jnp.int32), param_phase.init(_wide(params)))

    def update(updates: Any, state: RoundedState, params: Any = None, **extra: Any) -> tuple[Any, RoundedState]:
        exact = _wide(params)
        updates, inner = param_phase.update(_wide(updates), state.inner, exact, **extra)

        def move(path: str, p: jax.Array, u: jax.Array) -> jax.Array:
            return round_stochastically(p + u, seed_of(state.steps, salt_of(path)))

        rounded = map_with_path(move, exact, updates)
        return _difference(rounded, params), RoundedState(optax.safe_increment(state.steps), inner)

    return two_phase(global_phase, optax.GradientTransformationExtraArgs(init, update))


def in_float32(optimizer: optax.GradientTransformation) -> TwoPhaseOptimizer:
    """Wrap an optimizer to receive parameters and gradients in float32."""
    global_phase, param_phase = phases(optimizer)

    def init(params: Any) -> Any:
        return param_phase.init(_wide(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return param_phase.update(_wide(updates), state, _wide(params), **extra)

    return two_phase(global_phase, optax.GradientTransformationExtraArgs(init, update))


def _wide(params: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)


def _difference(after: Any, before: Any) -> Any:
    """Return the float32 updates that change parameters from `before` to `after`."""
    return jax.tree.map(jnp.subtract, _wide(after), _wide(before))
