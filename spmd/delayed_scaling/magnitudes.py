"""Magnitudes of matmuls in the last steps, which scale those of this one (`fp8-delayed`).

Magnitudes of a step are the largest of its microbatches, on all devices.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from spmd import tree
from spmd.errors import Problem
from spmd.model_api.grad_transform import Carry, Entered, GradTransform, StateArray

HISTORY = 16
"""Steps whose largest magnitudes are remembered."""

ASSUMED = {"input": 16.0, "kernel": 1.0, "gradient": 16.0}
"""What a history is of, in order → the largest magnitude before any has been seen: of gradients of the summed loss."""

_WHY = "every device scales by the same magnitudes"


def remembering(plan: Any) -> dict[str, tuple[int, ...]]:
    """Return the path of each kernel whose matmuls remember magnitudes → the stacked dimensions of its layers."""
    wrapped, found = plan.model.info().wrappable, {}
    for entry in plan.params:
        placed = plan.placements[entry.path]
        if entry.path in wrapped and placed.recipe is not None and placed.recipe.is_delayed:
            found[entry.path] = entry.shape[: len(placed.stacks)]
    return found


_SHAPES = {"history": (len(ASSUMED), HISTORY), "now": (len(ASSUMED),)}


def _fresh(path: str, shape: tuple[int, ...]) -> Array:
    """Return a history before the first step, or the magnitudes of a step before its first microbatch."""
    is_history = path.endswith("/history")
    return jnp.broadcast_to(jnp.array([*ASSUMED.values()])[:, None], shape) if is_history else jnp.zeros(shape)


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


@dataclasses.dataclass(frozen=True)
class MagnitudeHistory(GradTransform):
    """The largest magnitudes of each matmul that is scaled by earlier steps, as a transform of the gradient.

    The history of a kernel rides on it, and its derivative is what was seen. Magnitudes that are not finite are
    forgotten: the loss tells.
    """

    name = "magnitudes"
    observes = True
    optional = True

    def state(self, plan: Any) -> dict[str, StateArray]:
        """Return a history and the magnitudes of this step, for each kernel that remembers."""
        return {
            f"{path}/{name}": StateArray((*layers, *shape), jnp.float32, reason=_WHY)
            for path, layers in remembering(plan).items()
            for name, shape in _SHAPES.items()
        }

    def init(self, plan: Any, key: jax.Array, params: Any) -> Any:
        """Return histories before the first step."""
        del key, params
        made = {path: _fresh(path, x.shape) for path, x in self.state(plan).items()}
        return tree.nested(made)

    def enter(self, state: Any) -> Entered:
        """Let each history ride on its kernel."""
        ending = "/history"
        flat = tree.flatten(state)
        return Entered(riders={path.removesuffix(ending): x for path, x in flat.items() if path.endswith(ending)})

    def leave(self, state: Any, seen: Mapping[str, Array]) -> Any:
        """Return the state with what a batch has seen: the largest so far of this step."""

        def largest(path: str, x: Array) -> Array:
            kernel, _, name = path.rpartition("/")
            return jnp.maximum(x, seen[kernel][..., 0]) if name == "now" else x

        return tree.map_with_path(largest, state)

    def wrap(self, grad_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a gradient function after which each step's magnitudes are in the histories."""

        def remembered(params: Any, carry: Carry, batch: Any, key: jax.Array) -> tuple[Any, Any, Carry]:
            gradients, sums, after = grad_fn(params, carry, batch, key)
            return gradients, sums, after.with_state(self.name, _shifted(after.transforms[self.name]))

        return remembered

    def adapt(self, restored: Mapping[str, Array], wanted: Mapping[str, Any]) -> dict[str, Array]:
        """Return the histories; those that the checkpoint lacks are as at the start."""
        return {
            path: restored[path] if path in restored else jax.device_put(_fresh(path, leaf.shape), leaf.sharding)
            for path, leaf in wanted.items()
        }

    def problems(self, plan: Any) -> list[Problem]:
        """Return what would keep magnitudes from being seen."""
        problems = []
        if not remembering(plan):
            what, fix = "remembers no matmul", "--quantize fp8, which scales by this step"
            problems.append(Problem(f"transform {self.name}", what, fix=fix))
        if any(other.exchanges for other in plan.transforms):
            what = f"is {plan.quantize}, which scales by earlier steps"
            why = "gradients that are exchanged once a step are sums of each device, and what it sees would be lost"
            problems.append(Problem("quantize", what, why, "--quantize fp8, which scales by this step"))
        return problems
