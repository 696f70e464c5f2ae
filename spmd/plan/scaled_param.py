"""A kernel with the largest magnitudes of its matmuls in earlier steps, which scale those of this one (`fp8-delayed`).

It replaces a kernel in a tree of parameters. The derivative of its history is no derivative: it is the magnitudes that
a layer has just seen, which reach the gradient function as gradients do, of every layer, microbatch and device.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd import tree

ASSUMED = {"input": 16.0, "kernel": 1.0, "gradient": 16.0}
"""What a history is of, in order → the largest magnitude before any has been seen: of gradients of the summed loss."""

_HISTORY = "/history"

History = Float[Array, "*layer 3 step"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledParam:
    """A kernel and its history."""

    kernel: Any
    history: History


def is_scaled(x: Any) -> bool:
    """Return whether a node of a tree is a `ScaledParam`; for `is_leaf`."""
    return isinstance(x, ScaledParam)


def histories_of(state: Any) -> dict[str, History]:
    """Return the path of each kernel → its history, from the state of all."""
    return {path.removesuffix(_HISTORY): x for path, x in tree.flatten(state).items() if path.endswith(_HISTORY)}


def with_seen(state: Any, seen: Mapping[str, History]) -> Any:
    """Return the state with what a batch has seen, the derivatives of histories: the largest so far of this step."""

    def largest(path: str, x: Array) -> Array:
        kernel, _, name = path.rpartition("/")
        return jnp.maximum(x, seen[kernel][..., 0]) if name == "now" else x

    return tree.map_with_path(largest, state)


def with_scales(value: Any) -> tuple[Any, History | None]:
    """Return a parameter and its history, None without one."""
    return (value.kernel, value.history) if is_scaled(value) else (value, None)
