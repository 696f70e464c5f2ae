"""Magnitudes of matmuls in the last steps, for the scales of this one (`fp8-delayed`).

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
from spmd.model_interface.grad_transform import Carry, Entered, GradTransform, StateArray

HISTORY = 16
"""Number of steps with remembered magnitudes."""

ASSUMED = {"input": 16.0, "kernel": 1.0, "gradient": 16.0}
"""Array of a matmul, in the order of a history → its magnitude assumed before the first step.

Gradients are those of the summed loss.
"""

_WHY = "every device scales by the same magnitudes"


def kernels_with_history(plan: Any) -> dict[str, tuple[int, ...]]:
    """Return path → stacked dimensions, for each kernel with a history of magnitudes."""
    wrapped = plan.model.info().wrappable
    found = {}
    for entry in plan.params:
        placed = plan.placements[entry.path]
        if entry.path in wrapped and placed.recipe is not None and placed.recipe.is_delayed:
            found[entry.path] = entry.shape[: len(placed.stacks)]
    return found


_SHAPES = {"history": (len(ASSUMED), HISTORY), "now": (len(ASSUMED),)}


def _fresh(path: str, shape: tuple[int, ...]) -> Array:
    """Return a new history, or the magnitudes of a step before its first microbatch."""
    if not path.endswith("/history"):
        return jnp.zeros(shape)
    assumed = jnp.array([*ASSUMED.values()])  # [array]
    return jnp.broadcast_to(assumed[:, None], shape)  # [*layers, array, step]


def _shifted(state: Any) -> Any:
    """Move the magnitudes of this step to the front of the histories."""
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
class AmaxHistory(GradTransform):
    """Transform of the gradient with the largest magnitudes of matmuls in earlier steps.

    The history of a kernel rides on it, and its derivative is the observed magnitudes. A magnitude
    that is not finite is replaced by that of the step before: the loss of the step shows it.
    """

    name = "magnitudes"
    observes = True
    optional = True

    def state(self, plan: Any) -> dict[str, StateArray]:
        """Return a history and the magnitudes of this step, for each kernel with a history."""
        arrays = {}
        for path, layers in kernels_with_history(plan).items():
            for name, shape in _SHAPES.items():
                array = StateArray((*layers, *shape), jnp.float32, reason=_WHY)
                arrays[f"{path}/{name}"] = array
        return arrays

    def init(self, plan: Any, key: jax.Array, params: Any) -> Any:
        """Return histories before the first step."""
        del key, params
        made = {path: _fresh(path, x.shape) for path, x in self.state(plan).items()}
        return tree.nested(made)

    def enter(self, state: Any) -> Entered:
        """Let each history ride on its kernel."""
        riders = {}
        for path, x in tree.flatten(state).items():
            kernel, _, name = path.rpartition("/")
            if name == "history":
                riders[kernel] = x
        return Entered(riders=riders)

    def leave(self, state: Any, seen: Mapping[str, Array]) -> Any:
        """Return the state with the magnitudes of a batch: the largest so far of this step."""

        def largest(path: str, x: Array) -> Array:
            kernel, _, name = path.rpartition("/")
            if name != "now":
                return x
            return jnp.maximum(x, seen[kernel][..., 0])

        return tree.map_with_path(largest, state)

    def wrap(self, grad_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a gradient function to move each step's magnitudes into the histories at its end."""

        def remembered(
            params: Any, carry: Carry, batch: Any, key: jax.Array
        ) -> tuple[Any, Any, Carry]:
            gradients, sums, after = grad_fn(params, carry, batch, key)
            shifted = _shifted(after.transforms[self.name])
            return gradients, sums, after.with_state(self.name, shifted)

        return remembered

    def adapt(self, restored: Mapping[str, Array], wanted: Mapping[str, Any]) -> dict[str, Array]:
        """Return the restored histories, and initial ones for those missing in the checkpoint."""
        adapted = {}
        for path, leaf in wanted.items():
            if path in restored:
                adapted[path] = restored[path]
            else:
                adapted[path] = jax.device_put(_fresh(path, leaf.shape), leaf.sharding)
        return adapted

    def problems(self, plan: Any) -> list[Problem]:
        """Return the reasons against observing magnitudes."""
        fix = 'quantize="fp8", which scales by this step'
        problems = []
        if not kernels_with_history(plan):
            problems.append(Problem(f"transform {self.name}", "remembers no matmul", fix=fix))
        if any(other.exchanges for other in plan.transforms):
            what = f"is {plan.quantize}, which scales by earlier steps"
            why = (
                "gradients that are exchanged once a step are sums of each device, and what it "
                "sees would be lost"
            )
            problems.append(Problem("quantize", what, why, fix))
        return problems
