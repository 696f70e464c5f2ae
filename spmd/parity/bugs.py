"""Bugs of a gradient function, injected to prove that a check detects them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import ConfigError, Problem
from spmd.gradients.base import GradFn
from spmd.gradients.losses import Sums
from spmd.model_api.grad_transform import Carry


def drop_weights(grad_fn: GradFn) -> GradFn:
    """Inject a bug: every token counts, padding included."""

    def every_token(params: Any, carry: Carry, batch: Any, key: jax.Array) -> tuple[Any, Sums, Carry]:
        if not isinstance(batch, Mapping) or "weights" not in batch:
            problem = Problem("token-weight", "needs padding, and the batch has no weights", fix="another bug")
            raise ConfigError("The bug cannot be injected:", [problem])
        return grad_fn(params, carry, {**batch, "weights": jnp.ones_like(batch["weights"])}, key)

    return every_token


def scale_gradients(grad_fn: GradFn, factor: float) -> GradFn:
    """Inject a bug: gradients are off by a factor, as if a sum were taken for a mean."""
    return _changed(grad_fn, lambda gradients: jax.tree.map(lambda g: g * factor, gradients))


def scale_one_leaf(grad_fn: GradFn, factor: float) -> GradFn:
    """Inject a bug: the gradient of one parameter is off by a factor, as if it alone were reduced another time.

    It is the parameter whose largest gradient is the median of all, so that it is not rounding noise.
    """

    def change(gradients: Any) -> Any:
        leaves, structure = jax.tree.flatten(gradients)
        order = jnp.argsort(jnp.stack([jnp.abs(g).max().astype(jnp.float32) for g in leaves]))
        chosen = order[len(leaves) // 2]
        scaled = [jnp.where(chosen == i, g * factor, g).astype(g.dtype) for i, g in enumerate(leaves)]
        return jax.tree.unflatten(structure, scaled)

    return _changed(grad_fn, change)


def drop_reduction(grad_fn: GradFn) -> GradFn:
    """Inject a bug: gradients are summed over half of the examples, as if a reduction skipped a batch axis."""
    return _gradients_of(grad_fn, lambda x: _repeat(x, every=2))


def repeat_microbatch(grad_fn: GradFn) -> GradFn:
    """Inject a bug: of four microbatches one counts twice and another not at all, as if a buffer were stale."""
    return _gradients_of(grad_fn, lambda x: _repeat(x, every=4))


def _repeat(x: jax.Array, every: int) -> jax.Array:
    """Replace example 1 of each `every` by the one before it."""
    rows = jnp.arange(x.shape[0])
    return x[jnp.where(rows % every == 1, rows - 1, rows)]


def _gradients_of(grad_fn: GradFn, change: Callable[[jax.Array], jax.Array]) -> GradFn:
    """Return the gradients of a changed batch of the same weight, beside the sums and carry of the true one."""

    def changed(params: Any, carry: Carry, batch: Any, key: jax.Array) -> tuple[Any, Sums, Carry]:
        _, sums, after = grad_fn(params, carry, batch, key)
        gradients, other_sums, _ = grad_fn(params, carry, jax.tree.map(change, batch), key)
        scale = sums["weight"] / other_sums["weight"]
        return jax.tree.map(lambda g: g * scale, gradients), sums, after

    return changed


def _changed(grad_fn: GradFn, change: Callable[[Any], Any]) -> GradFn:
    def changed(params: Any, carry: Carry, batch: Any, key: jax.Array) -> tuple[Any, Sums, Carry]:
        gradients, sums, carry = grad_fn(params, carry, batch, key)
        return change(gradients), sums, carry

    return changed


BUGS: dict[str, Callable[[GradFn], GradFn]] = {
    "reduction": drop_reduction,
    "token-weight": drop_weights,
    "gradient-scale": lambda grad_fn: scale_gradients(grad_fn, 1.01),
    "leaf-scale": lambda grad_fn: scale_one_leaf(grad_fn, 1.01),
    "stale-microbatch": repeat_microbatch,
}
"""Bugs that a check must detect, by name: half of a reduction missing, padding that counts, all gradients or those of
one parameter 1 % off, a microbatch that counts twice."""
