"""A kernel with the largest magnitudes of its matmuls in earlier steps, which scale those of this one (`fp8-delayed`).

It replaces a kernel in a tree of parameters. The derivative of its history is no derivative: it is the magnitudes that
a layer has just seen, which reach the gradient function as gradients do, of every layer, microbatch and device.
"""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

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


def with_scales(value: Any) -> tuple[Any, History | None]:
    """Return a parameter and its history, None without one."""
    return (value.kernel, value.history) if is_scaled(value) else (value, None)
