"""Loss scaling of a gradient function: unscales its gradients, and keeps variables in steps that overflow."""

from typing import Any

import jax
import jax.numpy as jnp

from spmd.gradients.base import GradFn, with_loss_of
from spmd.gradients.losses import Sums
from spmd.model_api.precision import LOSS_SCALE, LossScale
from spmd.optim.skip_updates import all_finite


def unscale(grad_fn: GradFn, loss_scale: LossScale | None) -> GradFn:
    """Wrap a gradient function of the scaled loss; None as the loss scale returns it unchanged.

    `value_and_grad` multiplies the loss by the scale among the variables; a custom gradient function must do the same.
    This is the outermost wrapper, so the whole batch has one scale. If the gradients are not finite, only the
    loss-scale state changes, and no other variable.

    Example:
        >>> from spmd.gradients.base import value_and_grad
        >>> loss_fn = lambda w, none, x, key: ({"loss": (w * x).sum(), "weight": jnp.float32(x.size)}, none)
        >>> grad_fn = unscale(value_and_grad(loss_fn), LossScale(initial=8))
        >>> variables = {"loss_scale": LossScale(initial=8).init()}
        >>> float(grad_fn(jnp.float32(2), variables, jnp.ones(3), jax.random.key(0))[0])
        3.0
    """
    if loss_scale is None:
        return grad_fn

    def unscaled(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Sums, Any]:
        state = variables[LOSS_SCALE]
        gradients, sums, after = grad_fn(params, variables, batch, key)
        gradients = jax.tree.map(lambda g: g / state["scale"], gradients)
        finite = all_finite(gradients)
        return gradients, sums, {**_select(finite, after, variables), LOSS_SCALE: loss_scale.after(state, finite)}

    return unscaled


def keep_variables(grad_fn: GradFn) -> GradFn:
    """Wrap a gradient function so that non-finite gradients leave the variables, such as batch statistics, unchanged.

    The counterpart for parameters is `skip_bad_updates`.
    """

    def wrapped(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Sums, Any]:
        gradients, sums, after = grad_fn(params, variables, batch, key)
        return gradients, sums, _select(all_finite(gradients), after, variables)

    return with_loss_of(grad_fn, wrapped)


def _select(finite: jax.Array, after: Any, before: Any) -> Any:
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
