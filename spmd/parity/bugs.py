"""Bugs of a gradient function, injected as controls of a check."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.base import GradFn
from spmd.gradients.losses import Sums
from spmd.model_interface.grad_transform import Carry
from spmd.plan.context import current


def drop_weights(grad_fn: GradFn) -> GradFn:
    """Inject a bug: every token counts, padding included."""

    def every_token(
        params: Any, carry: Carry, batch: Any, key: jax.Array
    ) -> tuple[Any, Sums, Carry]:
        if not isinstance(batch, Mapping) or "weights" not in batch:
            problem = Problem(
                "token-weight",
                "needs padding, and the batch has no weights",
                fix="another bug",
            )
            raise ConfigError("The bug cannot be injected:", [problem])
        whole = {**batch, "weights": jnp.ones_like(batch["weights"])}
        return grad_fn(params, carry, whole, key)

    return every_token


def scale_gradients(grad_fn: GradFn, factor: float) -> GradFn:
    """Inject a bug: gradients are off by a factor, as if a sum were taken for a mean."""
    return _changed(grad_fn, lambda gradients: jax.tree.map(lambda g: g * factor, gradients))


def scale_one_leaf(grad_fn: GradFn, factor: float) -> GradFn:
    """Inject a bug: the gradient of one parameter is off by a factor.

    It is as if this one alone were reduced another time. The parameter is that with the median
    largest gradient of all, so that it is not rounding noise.
    """
    return _changed(grad_fn, functools.partial(_scale_median, factor=factor))


def _scale_median(gradients: Any, factor: float) -> Any:
    """Scale the gradient in the middle, by the largest value of each."""
    leaves, structure = jax.tree.flatten(gradients)
    largest = [jnp.abs(leaf).max().astype(jnp.float32) for leaf in leaves]
    order = jnp.argsort(jnp.stack(largest))
    chosen = order[len(leaves) // 2]
    scaled = []
    for number, leaf in enumerate(leaves):
        # The choice depends on values, so every leaf is selected from two.
        changed = jnp.where(chosen == number, leaf * factor, leaf)
        scaled.append(changed.astype(leaf.dtype))
    return jax.tree.unflatten(structure, scaled)


def drop_reduction(grad_fn: GradFn) -> GradFn:
    """Inject a bug: gradients are summed over half of the examples.

    It is as if a reduction skipped a batch axis.
    """
    return _gradients_of(grad_fn, functools.partial(_repeat, every=2))


def repeat_microbatch(grad_fn: GradFn) -> GradFn:
    """Inject a bug: of four microbatches one counts twice and another not at all.

    It is as if a buffer were stale.
    """
    return _gradients_of(grad_fn, functools.partial(_repeat, every=4))


def _repeat(batch: Any, every: int) -> Any:
    """Replace example 1 of each `every` of a batch by the one before it."""
    splits = current().batch.arrays(batch)

    def repeat(path: str, x: jax.Array) -> jax.Array:
        dim = splits[path].examples
        if dim is None or x.ndim <= dim:
            return x
        rows = jnp.arange(x.shape[dim])
        taken = jnp.where(rows % every == 1, rows - 1, rows)
        return jnp.take(x, taken, axis=dim)

    return tree.map_with_path(repeat, batch)


def _gradients_of(grad_fn: GradFn, change: Callable[[Any], Any]) -> GradFn:
    """Return the gradient function of a changed batch.

    The gradients are scaled to the weight of the true batch; sums and carry are of the true one.
    """

    def changed(params: Any, carry: Carry, batch: Any, key: jax.Array) -> tuple[Any, Sums, Carry]:
        _, sums, after = grad_fn(params, carry, batch, key)
        gradients, other_sums, _ = grad_fn(params, carry, change(batch), key)
        scale = sums["weight"] / other_sums["weight"]
        scaled = jax.tree.map(lambda gradient: gradient * scale, gradients)
        return scaled, sums, after

    return changed


def _changed(grad_fn: GradFn, change: Callable[[Any], Any]) -> GradFn:
    """Return a gradient function with changed gradients."""

    def changed(params: Any, carry: Carry, batch: Any, key: jax.Array) -> tuple[Any, Sums, Carry]:
        gradients, sums, carry = grad_fn(params, carry, batch, key)
        return change(gradients), sums, carry

    return changed


Bug = Literal["reduction", "token-weight", "gradient-scale", "leaf-scale", "stale-microbatch"]

BUGS: dict[str, Callable[[GradFn], GradFn]] = {
    "reduction": drop_reduction,
    "token-weight": drop_weights,
    "gradient-scale": lambda grad_fn: scale_gradients(grad_fn, 1.01),
    "leaf-scale": lambda grad_fn: scale_one_leaf(grad_fn, 1.01),
    "stale-microbatch": repeat_microbatch,
}
"""Bugs that a check must detect, by name: half of a reduction missing, padding that counts, all
gradients or those of one parameter 1 % off, a microbatch that counts twice."""
