"""Gradient accumulation: a large batch in several small passes, with the numbers of the large one."""

from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import ConfigError, Problem
from spmd.gradients.base import GradFn
from spmd.gradients.losses import Sums
from spmd.plan.fsdp import accumulation_dtype


def accumulate(grad_fn: GradFn, microbatches: int) -> GradFn:
    """Runs `grad_fn` on `microbatches` equal parts of the batch, one after the other, and adds up.

    Args:
        grad_fn: The gradient function of one microbatch.
        microbatches: Into how many parts the leading (batch) dimension of every array is cut. Each part takes every
            `microbatches`-th example, so it stays spread over the devices that hold the batch.

    Returns:
        A gradient function of the whole batch. Since a `GradFn` returns sums, padding makes no difference. Variables
        go from one microbatch to the next.

    Raises:
        ConfigError: At trace time, a batch that does not divide.
    """
    if microbatches < 1:
        raise ConfigError(
            "Gradients cannot be accumulated:",
            [Problem("microbatches", f"is {microbatches}", fix="1 or more")],
        )
    if microbatches == 1:
        return grad_fn

    def accumulated(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Sums, Any]:
        def add(carry: tuple[Any, Any], part: tuple[Any, jax.Array]) -> tuple[tuple[Any, Any], None]:
            total, variables = carry
            gradients, sums, variables = grad_fn(params, variables, *part)
            total = jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, (gradients, sums))
            return (total, variables), None

        parts = (split_microbatches(batch, microbatches), jax.random.split(key, microbatches))
        gradients, sums, _ = jax.eval_shape(grad_fn, params, variables, *jax.tree.map(lambda x: x[0], parts))
        zeros = (
            jax.tree.map(lambda g: jnp.zeros(g.shape, accumulation_dtype(g.dtype)), gradients),
            jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums),
        )
        ((gradients, sums), variables), _ = jax.lax.scan(add, (zeros, variables), parts)
        return gradients, sums, variables

    return accumulated


def split_microbatches(batch: Any, microbatches: int) -> Any:
    """The batch in equal parts: every array `[batch, …]` as `[microbatches, batch / microbatches, …]`.

    Part *i* takes the examples *i*, *i* + `microbatches`, …, so it stays spread over the devices that hold the batch.

    Raises:
        ConfigError: The batch does not divide.

    Example:
        >>> cut_batch(jnp.arange(6), 2).tolist()
        [[0, 2, 4], [1, 3, 5]]
    """

    def cut(x: jax.Array) -> jax.Array:
        examples = x.shape[0]
        if examples % microbatches:
            arithmetic = f"{examples} / {microbatches} = {examples / microbatches:.4g}"
            problem = Problem("batch", "does not divide into microbatches", arithmetic, "change one of them")
            raise ConfigError("The batch cannot be cut into microbatches:", [problem])
        return jnp.swapaxes(x.reshape(examples // microbatches, microbatches, *x.shape[1:]), 0, 1)

    return jax.tree.map(cut, batch)
