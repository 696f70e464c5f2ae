"""Loss scaling around any gradient function: gradients are scaled back, and steps that overflow change nothing."""

from typing import Any

import jax
import jax.numpy as jnp

from spmd.gradients.base import GradFn
from spmd.gradients.losses import Sums
from spmd.model_api.precision import LOSS_SCALE, LossScale
from spmd.optim.skip_updates import all_finite


def unscale(grad_fn: GradFn, loss_scale: LossScale | None) -> GradFn:
    """The gradient function whose gradients are those of the loss itself.

    `value_and_grad` multiplies the loss by the scale that it finds among the variables, before it differentiates. A
    gradient function of your own must do the same. This wrapper goes outside of all others, so the scale is one for the
    whole batch. It looks once whether the gradients are finite; if not, no variable changes but those of the scaling
    itself.

    Args:
        grad_fn: A composition of `value_and_grad`.
        loss_scale: None leaves `grad_fn` as it is.

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
        after = _kept_unless(finite, after, variables)
        return gradients, sums, {**after, LOSS_SCALE: loss_scale.after(state, finite)}

    return unscaled


def keep_variables(grad_fn: GradFn) -> GradFn:
    """The gradient function, which leaves the variables as they were where its gradients are not finite.

    What `skip_bad_updates` is for parameters, this is for batch statistics.
    """

    def kept(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Sums, Any]:
        gradients, sums, after = grad_fn(params, variables, batch, key)
        return gradients, sums, _kept_unless(all_finite(gradients), after, variables)

    return kept


def _kept_unless(finite: jax.Array, after: Any, before: Any) -> Any:
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
