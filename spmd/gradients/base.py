"""What a gradient function is, and the plain one.

A `GradFn` returns gradients *of the summed loss* and the sums themselves. Sums add up, so accumulation, pipelines
and loss scaling compose without knowing of each other; the step divides by the weight once.
"""

from collections.abc import Callable
from typing import Any

import jax

from spmd.gradients.losses import LossFn, Sums
from spmd.model_api.precision import scale_loss, split_loss_scale
from spmd.plan.fsdp import grad_targets, params_for_forward

GradFn = Callable[[Any, Any, Any, jax.Array], tuple[Any, Sums, Any]]
"""`(params, variables, batch, key) -> (gradients of sums["loss"], sums, variables afterwards)`."""


def value_and_grad(loss_fn: LossFn) -> GradFn:
    """Gradients of the whole batch at once, by reverse-mode differentiation.

    Under a plan they are in the dtype that its precision sums gradients in, whatever the parameters are stored in. If
    the variables hold a loss scale, they are gradients of the scaled loss, for `unscale` to scale back.

    Example:
        >>> import jax.numpy as jnp
        >>> loss_fn = lambda w, none, x, key: ({"loss": (w * x).sum(), "weight": jnp.float32(x.size)}, none)
        >>> grads, sums, _ = value_and_grad(loss_fn)(jnp.float32(2), {}, jnp.ones(3), jax.random.key(0))
        >>> float(grads), float(sums["loss"])
        (3.0, 6.0)
    """

    def grad_fn(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Sums, Any]:
        own, scaling = split_loss_scale(variables)

        def objective(view: Any) -> tuple[jax.Array, tuple[Sums, Any]]:
            sums, after = loss_fn(params_for_forward(params, view), own, batch, key)
            return scale_loss(sums["loss"], scaling), (sums, after)

        gradients, (sums, after) = jax.grad(objective, has_aux=True)(grad_targets(params))
        return gradients, sums, {**after, **scaling} if scaling else after

    return grad_fn
