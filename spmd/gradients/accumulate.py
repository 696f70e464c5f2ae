"""Gradient accumulation over microbatches, equal to the gradients of the whole batch."""

from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import ConfigError, Problem
from spmd.gradients.base import GradFn, check_results
from spmd.gradients.losses import Sums
from spmd.plan.fsdp import zero_gradients


def accumulate(grad_fn: GradFn, microbatches: int) -> GradFn:
    """Return a gradient function that adds up the results of `grad_fn` on microbatches, one after the other.

    A `GradFn` returns sums, so padding does not change the result. Each microbatch passes its variables to the next. A
    batch that does not divide raises a `ConfigError` at trace time.
    """
    if not isinstance(microbatches, int) or microbatches < 1:
        problem = Problem("microbatches", f"is {microbatches}", fix="a whole number, at least 1")
        raise ConfigError("Gradients cannot be accumulated:", [problem])
    if microbatches == 1:
        return grad_fn

    def accumulated(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Sums, Any]:
        def add(carry: tuple[Any, Any], part: tuple[Any, jax.Array]) -> tuple[tuple[Any, Any], None]:
            total, variables = carry
            gradients, sums, variables = grad_fn(params, variables, *part)
            total = jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, (gradients, sums))
            return (total, variables), None

        parts = (split_microbatches(batch, microbatches), jax.random.split(key, microbatches))
        returned = jax.eval_shape(grad_fn, params, variables, *jax.tree.map(lambda x: x[0], parts))
        gradients, sums, _ = check_results(returned)
        zeros = zero_gradients(gradients), jax.tree.map(jnp.zeros_like, sums)
        ((gradients, sums), variables), _ = jax.lax.scan(add, (zeros, variables), parts)
        return gradients, sums, variables

    return accumulated


def split_microbatches(batch: Any, microbatches: int) -> Any:
    """Reshape every array `[batch, …]` to `[microbatches, batch / microbatches, …]`.

    Microbatch *i* has the examples *i*, *i* + `microbatches`, …, so each stays split over the devices of the batch.

    Example:
        >>> split_microbatches(jnp.arange(6), 2).tolist()
        [[0, 2, 4], [1, 3, 5]]
    """

    def split(x: jax.Array) -> jax.Array:
        examples = x.shape[0]
        if examples % microbatches:
            detail = f"{examples} / {microbatches} = {examples / microbatches:.4g}"
            problem = Problem("batch", "does not divide into microbatches", detail, "change one of them")
            raise ConfigError("The batch cannot be split into microbatches:", [problem])
        return jnp.swapaxes(x.reshape(examples // microbatches, microbatches, *x.shape[1:]), 0, 1)

    return jax.tree.map(split, batch)
