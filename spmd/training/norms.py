"""Norms of parameters, gradients and updates by module, and by layer where layers are stacked."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spmd import tree
from spmd.plan.plan import ShardingPlan
from spmd.sharding.layer_paths import dims_of


def no_norms(before: Any, after: Any, gradients: Any) -> dict[str, jax.Array]:
    """Return nothing, for a step that reports no norms by module."""
    del before, after, gradients
    return {}


@dataclasses.dataclass(frozen=True)
class ModuleNorms:
    """Norms of the modules of a plan's model, as metrics of a step.

    A metric is `gradient_norm.attention.q_proj`, `param_norm.…` or `update_norm.…`: a float32, or
    `[layer]` of a stack of layers (`[stack, layer]` of two). Update norms are those of the change
    of the parameters in the step.

    Args:
        plan: Its rule table says which dimensions are stacks.
    """

    plan: ShardingPlan

    def __call__(self, before: Any, after: Any, gradients: Any) -> dict[str, jax.Array]:
        """Return the norms, from the parameters before and after a step and its gradients."""
        updates = jax.tree.map(
            lambda new, old: new.astype(jnp.float32) - old.astype(jnp.float32), after, before
        )
        found = dict[str, jax.Array]()
        arrays = {"param": before, "gradient": gradients, "update": updates}
        for kind, values in arrays.items():
            for module, norm in self._of_modules(tree.flatten(values)).items():
                found[f"{kind}_norm.{module}"] = norm
        return found

    def _of_modules(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return module → the norm of all its arrays."""
        rules = self.plan.rules
        squares = collections.defaultdict[str, list[jax.Array]](list)
        for path, array in arrays.items():
            name, _ = rules.layer_path(path)
            module = name.rpartition("/")[0].replace("/", ".") or name
            stacked = dims_of(path, rules.stacks)
            others = tuple(dim for dim in range(array.ndim) if dim not in stacked)
            squares[module].append(jnp.square(array.astype(jnp.float32)).sum(axis=others))
        return {module: jnp.sqrt(sum(parts[1:], parts[0])) for module, parts in squares.items()}
