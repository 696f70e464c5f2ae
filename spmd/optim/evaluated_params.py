"""Parameters to evaluate an optimizer with, if its gradients are taken at others.

An average of the parameters, a schedule-free optimizer and a lookahead keep or imply them in the
optimizer's state. They are found by the type of a state's nodes, wherever others enclose it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from optax import contrib

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.optim.lookahead import SlowParamsState


class ParamEmaState(NamedTuple):
    """Number of averaged updates, the average of the parameters, and the inner state.

    The number is an int32 scalar.
    """

    averaged: jax.Array
    ema: Any
    inner: Any


def find_evaluated_params(state: Any, params: Any) -> Any:
    """Return the parameters to evaluate.

    `params` are those that the gradients are taken at, `state` is the optimizer's. A part of them
    may have an optimizer of its own (`optax.masked`, `optax.partition`); the rest are `params`.

    Example:
        >>> from optax import contrib
        >>> optimizer = contrib.schedule_free_sgd(1.0, b1=0.5)
        >>> params = {"w": jnp.array(4.0)}
        >>> _, state = optimizer.update({"w": jnp.array(1.0)}, optimizer.init(params), params)
        >>> float(find_evaluated_params(state, {"w": jnp.array(3.5)})["w"])  # (3.5 - 0.5 * 3) / 0.5
        4.0
    """
    for node in _nodes(state):
        kind = _KINDS[type(node)]
        evaluated = kind.of_node(node, tree.flatten(params))
        params = _replace_leaves(params, evaluated)
    return params


def _replace_leaves(params: Any, replaced: Mapping[str, jax.Array]) -> Any:
    """Replace the leaves of a tree by those with the same path."""

    def replace(path: str, leaf: jax.Array) -> jax.Array:
        return replaced.get(path, leaf)

    return tree.map_with_path(replace, params)


def evaluated_kinds(state: Any) -> tuple[str, ...]:
    """Return the kinds of parameters to evaluate in a state, by name; empty without any.

    They are those of `find_evaluated_params`.
    """
    names = [_KINDS[type(node)].name for node in _nodes(state)]
    return tuple(dict.fromkeys(names))


def _nodes(state: Any) -> list[Any]:
    """Return the nodes of a state of a type in `_KINDS`."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: type(node) in _KINDS)
    return [node for node in nodes if type(node) in _KINDS]


class _Kind(NamedTuple):
    """Name of the parameters, and a function from a node and all parameters to the node's own."""

    name: str
    of_node: Callable[[Any, dict[str, jax.Array]], dict[str, jax.Array]]


def _averaged(node: ParamEmaState, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    del params
    return tree.flatten(node.ema)


def _slow(node: SlowParamsState, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    del params
    return tree.flatten(node.slow)


def _schedule_free(
    node: contrib.ScheduleFreeState, params: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Return x of y = b1 * x + (1 - b1) * z, where y are the parameters.

    See Defazio et al. (arXiv:2405.15682).
    """
    averaged = {}
    for path, z in tree.flatten(node.z).items():
        y = params[path]
        _check_same_shape(path, z, y)
        wide = jnp.promote_types(jnp.promote_types(y.dtype, z.dtype), jnp.float32)
        b1 = jnp.asarray(node.b1, wide)
        b1 = b1.reshape(b1.shape + (1,) * (z.ndim - b1.ndim))  # one for each layer, in `per_layer`
        averaged[path] = (y.astype(wide) - (1 - b1) * z.astype(wide)) / b1
    return averaged


def _check_same_shape(path: str, z: jax.Array, y: jax.Array) -> None:
    """Raise ConfigError if a parameter has another shape in the optimizer's state."""
    if z.shape == y.shape:
        return
    problem = Problem(
        path,
        "is stacked along another dimension in the optimizer's state",
        f"{z.shape}, not {y.shape}",
        "spmd.per_layer inside of schedule_free, or a stack along dimension 0",
    )
    raise ConfigError("The averaged parameters cannot be read:", [problem])


_KINDS: dict[type, _Kind] = {
    ParamEmaState: _Kind("averaged parameters", _averaged),
    contrib.ScheduleFreeState: _Kind("averaged parameters", _schedule_free),
    SlowParamsState: _Kind("slow parameters", _slow),
}
