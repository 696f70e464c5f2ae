"""Optimizers for parameters stored in a narrower dtype: master weights, or stochastic rounding.

An update is often smaller than the distance between two bfloat16 numbers, so rounding to the
nearest would lose it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmd.optim.lookahead import keep_slow_params
from spmd.optim.skip_updates import skip_bad_updates
from spmd.optim.stochastic_rounding import round_stochastically, salt_of, seed_of
from spmd.optim.two_phase import TwoPhaseOptimizer, phases, treatment_of, two_phase
from spmd.precision import Precision, cast_floats
from spmd.tree import map_with_path

_wide = functools.partial(cast_floats, dtype=jnp.float32)


class MasterState(NamedTuple):
    """Float32 master weights, and the inner optimizer's state."""

    master: Any
    inner: Any


class RoundedState(NamedTuple):
    """Number of updates (int32 scalar), and the inner optimizer's state.

    The number seeds the random bits.
    """

    steps: jax.Array
    inner: Any


@functools.lru_cache(maxsize=64)
def wrap_optimizer_for_precision(
    optimizer: optax.GradientTransformation, precision: Precision
) -> optax.GradientTransformation:
    """Wrap an optimizer for a precision; it computes in float32.

    It skips non-finite updates where the policy does. Cached because plans compare by object: equal
    arguments must give equal plans, which share one compiled step.
    """
    if precision.skips_updates:
        optimizer = skip_bad_updates(optimizer)
    if precision.params in ("float32", "float64"):
        if isinstance(optimizer, TwoPhaseOptimizer):
            return optimizer
        return keep_slow_params(optimizer)
    global_phase, param_phase = phases(optimizer)
    if precision.master:
        wrapped = _with_master_weights(param_phase)
    elif precision.rounding == "stochastic":
        wrapped = _with_stochastic_rounding(param_phase)
    else:
        wrapped = _in_float32(param_phase)
    return two_phase(global_phase, wrapped, treatment_of(optimizer))


def unwrap_for_precision(state: Any, params: Any, precision: Precision) -> tuple[Any, Any]:
    """Return the state and the parameters of the wrapped optimizer itself.

    Its parameters are the master weights, or the stored ones in float32.
    """
    if precision.params not in ("float32", "float64"):
        if precision.master:
            params = state.master
            state = state.inner
        elif precision.rounding == "stochastic":
            params = _wide(params)
            state = state.inner
        else:
            params = _wide(params)
    if precision.skips_updates:
        state = state.inner
    return state, params


def _with_master_weights(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Update float32 master weights in the state; the parameters are exactly these, rounded."""

    def init(params: Any) -> MasterState:
        master = _wide(params)
        return MasterState(master, inner.init(master))

    def update(
        updates: Any, state: MasterState, params: Any = None, **extra: Any
    ) -> tuple[Any, MasterState]:
        updates, after = inner.update(_wide(updates), state.inner, state.master, **extra)
        master = jax.tree.map(jnp.add, state.master, updates)
        rounded = jax.tree.map(_cast_like, master, params)
        return _difference(rounded, params), MasterState(master, after)

    return optax.GradientTransformationExtraArgs(init, update)


def _with_stochastic_rounding(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Round bfloat16 parameters stochastically after each update.

    The random bits are the same on every mesh.
    """

    def init(params: Any) -> RoundedState:
        steps = jnp.zeros((), jnp.int32)
        return RoundedState(steps, inner.init(_wide(params)))

    def update(
        updates: Any, state: RoundedState, params: Any = None, **extra: Any
    ) -> tuple[Any, RoundedState]:
        exact = _wide(params)
        updates, after = inner.update(_wide(updates), state.inner, exact, **extra)

        def move(path: str, p: jax.Array, u: jax.Array) -> jax.Array:
            after_update = p + u
            seed = seed_of(state.steps, salt_of(path))
            return round_stochastically(after_update, seed)

        rounded = map_with_path(move, exact, updates)
        difference = _difference(rounded, params)
        steps = optax.safe_increment(state.steps)
        return difference, RoundedState(steps, after)

    return optax.GradientTransformationExtraArgs(init, update)


def _cast_like(x: jax.Array, other: jax.Array) -> jax.Array:
    return x.astype(other.dtype)


def _in_float32(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Compute updates in float32; the parameters are rounded to the nearest."""

    def init(params: Any) -> Any:
        return inner.init(_wide(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return inner.update(_wide(updates), state, _wide(params), **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _difference(after: Any, before: Any) -> Any:
    """Return the float32 updates of parameters from `before` to `after`."""
    return jax.tree.map(jnp.subtract, _wide(after), _wide(before))
