"""A frozen parameter with a trained low-rank update: `W + scale · A · B`.

LoRA: Hu et al., arXiv:2106.09685. It replaces `W` in a tree of parameters. A layer that supports it
computes `x·W + scale · (x·A)·B`, without the sum of the matrices or its gradient; other layers get
the sum.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd.model_interface.wrapped_param import (
    WrappedParam,
    has_fetched,
    is_stored,
    operand_of,
    start_layer,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoRAParam(WrappedParam):
    """A parameter and its adapter, not merged.

    The parameter is `base` `[..., in, out]`; the adapter is `a` `[..., in, rank]` and `b`
    `[..., rank, out]`.
    """

    base: Any
    a: Any
    b: Any
    scale: float = dataclasses.field(metadata={"static": True})

    def merged(self) -> jax.Array:
        """Return the sum, computed in float32, in the dtype of the base."""
        change = jnp.einsum(
            "...ir,...ro->...io", self.a, self.b, preferred_element_type=jnp.float32
        )
        base = self.base
        if is_stored(base):
            base = base.decoded(jnp.float32)
        return (base.astype(jnp.float32) + self.scale * change).astype(self.base.dtype)

    @property
    def is_fetched(self) -> bool:
        """Whether the frozen kernel is fetched by its layer."""
        return has_fetched(self.base)

    def at_layer(self) -> "LoRAParam":
        """Return the frozen kernel, fetched if need be, and its adapter, for the layer."""
        return dataclasses.replace(self, base=start_layer(self.base))

    def operand(self) -> jax.Array:
        """Return the parameter without its adapter."""
        return operand_of(self.base)

    def addend(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Return the adapter's term of `x @ kernel`, in the dtype of `x`."""
        narrow = jnp.einsum("...i,ir->...r", x, self.a.astype(x.dtype))
        return jnp.einsum("...r,ro->...o", narrow, self.b.astype(x.dtype)) * self.scale
