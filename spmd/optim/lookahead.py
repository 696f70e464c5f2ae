"""Slow parameters of `optax.lookahead`, kept in the optimizer's state.

So a model has its parameters once. Lookahead (Zhang et al., arXiv:1907.08610) trains the fast
parameters and moves the slow ones towards them every few updates; optax asks for both as an
`optax.LookaheadParams`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmd.optim.extra_args import update_with


class SlowParamsState(NamedTuple):
    """The slow parameters, and the state of an optimizer with a lookahead inside."""

    slow: Any
    inner: Any


def keep_slow_params(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that a lookahead takes the fast parameters alone; others are unchanged.

    Example:
        >>> lookahead = optax.lookahead(optax.sgd(1.0), sync_period=2, slow_step_size=0.5)
        >>> optimizer = keep_slow_params(lookahead)
        >>> params = {"w": jnp.array(4.0)}
        >>> state = optimizer.init(params)
        >>> for _ in range(2):  # the fast ones move to 3 and 2, and are then set to the slow ones
        ...     updates, state = optimizer.update({"w": jnp.array(1.0)}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> float(state.slow["w"]), float(params["w"])
        (3.0, 3.0)
    """

    def init(params: Any) -> Any:
        inner = optimizer.init(params)
        if not _looks_ahead(inner):
            return inner
        slow = jax.tree.map(jnp.array, params)
        return SlowParamsState(slow, inner)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if not isinstance(state, SlowParamsState):
            return update_with(optimizer, updates, state, params, extra)
        pair = optax.LookaheadParams(params, state.slow)
        moved, inner = update_with(optimizer, updates, state.inner, pair, extra)
        slow = optax.apply_updates(state.slow, moved.slow)
        return moved.fast, SlowParamsState(slow, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _looks_ahead(state: Any) -> bool:
    """Return whether a state has a lookahead without its slow parameters around it."""
    kinds = SlowParamsState | optax.LookaheadState
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(node, optax.LookaheadState) for node in nodes)
