"""State of `fp8-delayed` among the variables: the largest magnitudes of each matmul in the last steps.

Magnitudes of a step are the largest of its microbatches, on all devices.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jaxtyping import Array

from spmd import tree
from spmd.gradients.base import GradFn
from spmd.gradients.losses import Sums
from spmd.model_api.model import Model
from spmd.model_api.quantize import HISTORY
from spmd.model_api.variables import with_variables
from spmd.plan.plan import ShardingPlan
from spmd.plan.scaled_param import ASSUMED, MAGNITUDES

_WHY = "every device scales by the same magnitudes"


def remembering(plan: ShardingPlan) -> dict[str, tuple[int, ...]]:
    """Return the path of each kernel whose matmuls remember magnitudes → the stacked dimensions of its layers."""
    wrapped, found = plan.model.info().lora_kernels, {}
    for entry in plan.params:
        placed = plan.placements[entry.path]
        if entry.path in wrapped and placed.recipe is not None and placed.recipe.is_delayed:
            found[entry.path] = entry.shape[: len(placed.stacks)]
    return found


def with_magnitudes(model: Model, plan: ShardingPlan) -> Model:
    """Return the model with a history for each kernel that remembers; `plan` is that of the model without it."""
    return _with_histories(model, tuple(remembering(plan).items()))


@functools.lru_cache(maxsize=64)
def _with_histories(model: Model, layers: tuple[tuple[str, tuple[int, ...]], ...]) -> Model:
    """Return the model with the state; cached, since plans compare a model by identity."""
    shapes = {f"{path}/{name}": (*layer, *shape) for path, layer in layers for name, shape in _SHAPES.items()}

    def init(key: jax.Array) -> Any:
        return traverse_util.unflatten_dict({path: _fresh(path, shapes[path]) for path in shapes}, sep="/")

    return with_variables(model, MAGNITUDES, init, replicated=dict.fromkeys(shapes, _WHY))


_SHAPES = {"history": (len(ASSUMED), HISTORY), "now": (len(ASSUMED),)}


def _fresh(path: str, shape: tuple[int, ...]) -> Array:
    """Return a history before the first step, or the magnitudes of a step before its first microbatch."""
    is_history = path.endswith("/history")
    return jnp.broadcast_to(jnp.array([*ASSUMED.values()])[:, None], shape) if is_history else jnp.zeros(shape)


def remember(grad_fn: GradFn, plan: ShardingPlan) -> GradFn:
    """Wrap a gradient function so that each step's magnitudes enter the histories; without any, return it unchanged.

    Magnitudes that are not finite are forgotten: the loss tells.
    """
    if not any(entry.path.startswith(f"{MAGNITUDES}/") for entry in plan.variables):
        return grad_fn

    def remembered(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Sums, Any]:
        gradients, sums, after = grad_fn(params, variables, batch, key)
        return gradients, sums, {**after, MAGNITUDES: _shifted(after[MAGNITUDES])}

    return remembered


def _shifted(state: Any) -> Any:
    flat = tree.flatten(state)

    def shift(path: str, x: Array) -> Array:
        parent, _, name = path.rpartition("/")
        now = flat[f"{parent}/now"]
        if name == "now":
            return jnp.zeros_like(now)
        kept = jnp.where(jnp.isfinite(now), now, x[..., 0])
        return jnp.concatenate([kept[..., None], x[..., :-1]], axis=-1)

    return tree.map_with_path(shift, state)


def stored_magnitudes(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return what to restore of a checkpoint's histories: those of the same shape."""
    return {path: leaf for path, leaf in wanted.items() if path in stored and stored[path].shape == leaf.shape}


def adapt_magnitudes(restored: Mapping[str, Array], wanted: Mapping[str, Any]) -> dict[str, Array]:
    """Return the histories; those that the checkpoint lacks are as at the start."""
    return {
        path: restored[path] if path in restored else jax.device_put(_fresh(path, leaf.shape), leaf.sharding)
        for path, leaf in wanted.items()
    }
