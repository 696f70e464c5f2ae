"""What a gradient function is, and the plain one.

A `GradFn` returns gradients *of the summed loss* and the sums themselves. Sums add up, so accumulation, pipelines
and loss scaling compose without knowing of each other; the step divides by the weight once.
"""

from collections.abc import Callable
from typing import Any

import jax

from spmd.loss import LossFn, Sums

GradFn = Callable[[Any, Any, Any, jax.Array], tuple[Any, Sums, Any]]
"""`(params, variables, batch, key) -> (gradients of sums["loss"], sums, variables afterwards)`."""


def value_and_grad(loss_fn: LossFn) -> GradFn:
    """Gradients of the whole batch at once, by reverse-mode differentiation.

    Example:
        >>> import jax.numpy as jnp
        >>> loss_fn = lambda w, none, x, key: ({"loss": (w * x).sum(), "weight": jnp.float32(x.size)}, none)
        >>> grads, sums, _ = value_and_grad(loss_fn)(jnp.float32(2), {}, jnp.ones(3), jax.random.key(0))
        >>> float(grads), float(sums["loss"])
        (3.0, 6.0)
    """

    def objective(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, tuple[Sums, Any]]:
        sums, variables = loss_fn(params, variables, batch, key)
        return sums["loss"], (sums, variables)

    def grad_fn(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Sums, Any]:
        gradients, (sums, variables) = jax.grad(objective, has_aux=True)(params, variables, batch, key)
        return gradients, sums, variables

    return grad_fn
