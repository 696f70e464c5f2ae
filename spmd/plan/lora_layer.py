"""A frozen parameter with a trained low-rank change: `W + scale · A · B` (LoRA, Hu et al., arXiv:2106.09685).

It stands in a tree of parameters where `W` would. A layer that multiplies with it computes `x·W + scale · (x·A)·B`, so
that neither the sum nor its gradient is ever made; everything else is given the sum.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoRAParam:
    """A parameter and its adapter, of one layer or of a stack of them.

    Attributes:
        base: `W`, `[..., in, out]`.
        a: `A`, `[..., in, rank]`.
        b: `B`, `[..., rank, out]`.
        scale: What the product of `A` and `B` is multiplied with.
    """

    base: Any
    a: Any
    b: Any
    scale: float = dataclasses.field(metadata={"static": True})

    def merged(self) -> jax.Array:
        """The sum, computed in float32, in the dtype of the base."""
        change = jnp.einsum("...ir,...ro->...io", self.a, self.b, preferred_element_type=jnp.float32)
        return (self.base.astype(jnp.float32) + self.scale * change).astype(self.base.dtype)


def is_lora(x: Any) -> bool:
    """Whether a node of a tree is an `LoRAParam` parameter; for `is_leaf`."""
    return isinstance(x, LoRAParam)


def base_weight(kernel: Any) -> jax.Array:
    """The parameter without its adapter, if it has one."""
    return kernel.base if is_lora(kernel) else kernel


def lora_delta(x: Float[Array, "batch seq in"], kernel: Any) -> Float[Array, "batch seq out"] | None:
    """What a kernel's adapter adds to `x @ kernel`, in the dtype of `x`; None where it has none.

    Args:
        x: Activations.
        kernel: A parameter of one layer.
    """
    if not is_lora(kernel):
        return None
    narrow = jnp.einsum("...i,ir->...r", x, kernel.a.astype(x.dtype))
    return jnp.einsum("...r,ro->...o", narrow, kernel.b.astype(x.dtype)) * kernel.scale
