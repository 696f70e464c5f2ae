"""A frozen parameter with a trained low-rank update: `W + scale · A · B` (LoRA, Hu et al., arXiv:2106.09685).

It replaces `W` in a tree of parameters. A layer that supports it computes `x·W + scale · (x·A)·B`, without the sum of
the matrices or its gradient; other layers get the sum.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoRAParam:
    """A parameter `W` `[..., in, out]` and its adapter `A` `[..., in, rank]`, `B` `[..., rank, out]`."""

    base: Any
    a: Any
    b: Any
    scale: float = dataclasses.field(metadata={"static": True})

    def merged(self) -> jax.Array:
        """Return the sum, computed in float32, in the dtype of the base."""
        change = jnp.einsum("...ir,...ro->...io", self.a, self.b, preferred_element_type=jnp.float32)
        return (self.base.astype(jnp.float32) + self.scale * change).astype(self.base.dtype)


def is_lora(x: Any) -> bool:
    """Return whether a node of a tree is a `LoRAParam`; for `is_leaf`."""
    return isinstance(x, LoRAParam)


def base_weight(kernel: Any) -> jax.Array:
    """Return the parameter without its adapter."""
    return kernel.base if is_lora(kernel) else kernel


def lora_delta(x: Float[Array, "batch seq in"], kernel: Any) -> Float[Array, "batch seq out"] | None:
    """Return the adapter's term of `x @ kernel`, in the dtype of `x`; None without an adapter."""
    if not is_lora(kernel):
        return None
    narrow = jnp.einsum("...i,ir->...r", x, kernel.a.astype(x.dtype))
    return jnp.einsum("...r,ro->...o", narrow, kernel.b.astype(x.dtype)) * kernel.scale
