"""Arguments of an optimizer besides gradients, state and parameters: optax's extra arguments.

A learning rate that follows the loss takes `value`; a line search takes `value`, `grad` and
`value_fn` (L-BFGS). They are named as in `optax.GradientTransformationExtraArgs`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd.errors import Problem, reason_of

NAMES = ("value", "grad", "value_fn")
"""The mean loss, its gradients, and the function from parameters to the mean loss of this batch."""

OF_PARTS = ("value",)
"""Those that an update of some of the parameters gets."""


def extra_args(
    value: jax.Array, gradients: Any, value_fn: Callable[[Any], jax.Array]
) -> dict[str, Any]:
    """Return the extra arguments of one update by name."""
    return {"value": value, "grad": gradients, "value_fn": value_fn}


def update_with(
    optimizer: optax.GradientTransformation,
    gradients: Any,
    state: Any,
    params: Any,
    extra: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Return the updates and the state of an optimizer.

    It gets the extra arguments that its signature has.
    """
    if not isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return optimizer.update(gradients, state, params)
    parameters = inspect.signature(optimizer.update).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    taken = dict(extra)
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        taken = {name: x for name, x in extra.items() if name in parameters}
    return optimizer.update(gradients, state, params, **taken)


def example_update(
    optimizer: optax.GradientTransformation,
    gradients: Any,
    state: Any,
    params: Any,
    given: tuple[str, ...] = NAMES,
) -> tuple[Any, Any]:
    """Return the updates and the state for the extra arguments of a quadratic loss."""
    dtype = jnp.promote_types(jnp.float32, jnp.result_type(*jax.tree.leaves(params)))

    def value_fn(params: Any) -> jax.Array:
        return optax.tree.norm(params, squared=True).astype(dtype) / 2

    extra = extra_args(jnp.zeros((), dtype), gradients, value_fn)
    taken = {name: extra[name] for name in given}
    with jax.numpy_dtype_promotion("standard"):
        return update_with(optimizer, gradients, state, params, taken)


def check_update(
    optimizer: optax.GradientTransformation, params: Any, *, whole: bool = True
) -> list[Problem]:
    """Return a problem if the update cannot be traced: an argument is missing in a step.

    Args:
        params: Abstract parameters.
        whole: Whether all parameters are updated at once; else parts of them are, and only `value`
            is given.
    """
    fix = "an optimizer that needs no other arguments"
    given: tuple[str, ...] = NAMES
    if not whole:
        fix = f"offload nothing, or {fix}"
        given = OF_PARTS
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    state = jax.eval_shape(optimizer.init, params)

    def update(gradients: Any, state: Any, params: Any) -> Any:
        return example_update(optimizer, gradients, state, params, given)

    try:
        jax.eval_shape(update, params, state, params)
    except (TypeError, ValueError, AttributeError) as error:
        what = f"cannot be updated in a step: {reason_of(error)}"
        detail = f"it gets {', '.join(given)}, the gradients, its state and the parameters"
        return [Problem("optimizer", what, detail, fix)]
    return []
