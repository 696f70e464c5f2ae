"""A check that the weight of a loss is a constant of its parameters."""

import itertools
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.jaxpr.dependence import needed_inputs
from spmd.plan.partition_safe import TracedCall


def check_weight(call: TracedCall) -> None:
    """Raise a `ConfigError` if the sum `weight` of a loss function changes with its parameters.

    The step divides gradients of the summed loss by the weight, so a derivative of the weight would
    be missing from the gradient of the mean that is reported. A weight that depends on them in
    steps only, such as a count, has none.

    Args:
        call: A loss function's; it returns `(Sums, variables)`.
    """
    paths = tree.flatten(call.outputs)
    is_weight = [path == "0/weight" for path in paths]
    params = jax.tree.leaves(call.params)
    if not any(needed_inputs(call.jaxpr, is_weight)[: len(params)]):
        return
    others = jax.tree.leaves((call.variables, call.batch, call.others))

    def weight(*params: Any) -> Any:
        results = jaxpr_as_fun(call.jaxpr)(*params, *others)
        return results[is_weight.index(True)]

    def derivative(params: Any, tangents: Any) -> Any:
        return jax.jvp(weight, params, tangents)[1]

    jaxpr = jax.make_jaxpr(derivative)(tuple(params), tuple(params))
    by_tangents = needed_inputs(jaxpr)[len(params) :]
    names = list(itertools.compress(tree.flatten(call.params), by_tangents))
    if names:
        raise ConfigError("Loss weight depends on parameters:", [_trained_weight(names)])


def _trained_weight(names: list[str]) -> Problem:
    """Return the problem of a weight with a derivative with respect to these parameters."""
    what = f"changes with the parameters {', '.join(names[:3])}"
    if len(names) > 3:
        what += " and others"
    return Problem(
        "sum 'weight'",
        what,
        "gradients are those of loss / weight with a constant weight, and the loss that is "
        "reported is another",
        'jax.lax.stop_gradient(weight); or {"loss": loss / weight, "weight": jnp.float32(1)} '
        "for the whole mean",
    )
