"""Parameters that an optimizer is evaluated with, where these are not the ones that its gradients are taken at.

An average of the parameters, a schedule-free optimizer and a lookahead keep or imply them in the optimizer's state.
They are found by the type of a state's nodes, wherever others enclose it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from optax import contrib

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.optim.lookahead import SlowParamsState


class ParamEmaState(NamedTuple):
    """Number of averaged updates (int32 scalar), the average of the parameters, and the inner optimizer's state."""

    averaged: jax.Array
    ema: Any
    inner: Any


def find_evaluated_params(state: Any, params: Any) -> Any:
    """Return the parameters to evaluate, from an optimizer's state and the parameters that its gradients are taken at.

    A part of them may have an optimizer of its own (`optax.masked`, `optax.partition`); the rest are `params`.

    Example:
        >>> from optax import contrib
        >>> optimizer, params = contrib.schedule_free_sgd(1.0, b1=0.5), {"w": jnp.array(4.0)}
        >>> _, state = optimizer.update({"w": jnp.array(1.0)}, optimizer.init(params), params)
        >>> float(find_evaluated_params(state, {"w": jnp.array(3.5)})["w"])  # (3.5 - 0.5 * 3) / 0.5
        4.0
    """
    for node in _nodes(state):
        table = _KINDS[type(node)].of_node(node, tree.flatten(params))
        params = tree.map_with_path(lambda path, x, table=table: table.get(path, x), params)
    return params


def evaluated_kinds(state: Any) -> tuple[str, ...]:
    """Return names of the parameters that `find_evaluated_params` takes from a state; none where it takes none."""
    return tuple(dict.fromkeys(_KINDS[type(node)].name for node in _nodes(state)))


def _nodes(state: Any) -> list[Any]:
    nodes = jax.tree.leaves(state, is_leaf=lambda node: type(node) in _KINDS)
    return [node for node in nodes if type(node) in _KINDS]


class _Kind(NamedTuple):
    """Name of the parameters, and a function from a node and all parameters by path to those of the node."""

    name: str
    of_node: Callable[[Any, dict[str, jax.Array]], dict[str, jax.Array]]


def _schedule_free(node: contrib.ScheduleFreeState, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return x of y = b1 * x + (1 - b1) * z (Defazio et al., arXiv:2405.15682), where y are the parameters."""

    def averaged(path: str, z: jax.Array) -> jax.Array:
        y = params[path]
        if z.shape != y.shape:
            what, detail = "is stacked along another dimension in the optimizer's state", f"{z.shape}, not {y.shape}"
            fix = "spmd.per_layer inside of schedule_free, or a stack along dimension 0"
            raise ConfigError("The averaged parameters cannot be read:", [Problem(path, what, detail, fix)])
        wide = jnp.promote_types(jnp.promote_types(y.dtype, z.dtype), jnp.float32)
        b1 = jnp.asarray(node.b1, wide)
        b1 = b1.reshape(b1.shape + (1,) * (z.ndim - b1.ndim))  # one for each layer, in `per_layer`
        return (y.astype(wide) - (1 - b1) * z.astype(wide)) / b1

    return {path: averaged(path, z) for path, z in tree.flatten(node.z).items()}


_KINDS: dict[type, _Kind] = {
    ParamEmaState: _Kind("averaged parameters", lambda node, _: tree.flatten(node.ema)),
    contrib.ScheduleFreeState: _Kind("averaged parameters", _schedule_free),
    SlowParamsState: _Kind("slow parameters", lambda node, _: tree.flatten(node.slow)),
}
