"""A frozen parameter with a trained low-rank update: `W + scale · A · B`.

LoRA: Hu et al., arXiv:2106.09685. It replaces `W` in a tree of parameters. A layer that supports it
computes `x·W + scale · (x·A)·B`, without the sum of the matrices or its gradient; other layers get
the sum. With a magnitude (DoRA: Liu et al., arXiv:2402.09353) each output is then multiplied by
the ratio of its magnitude to that of its weights in the sum.
"""

import dataclasses
from typing import Any, Self

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
        return self._sum().astype(self.base.dtype)

    def _sum(self) -> jax.Array:
        change = jnp.einsum(
            "...ir,...ro->...io", self.a, self.b, preferred_element_type=jnp.float32
        )
        return self._whole_base() + self.scale * change

    def _whole_base(self) -> jax.Array:
        """Return the frozen kernel in float32."""
        if is_stored(self.base):
            return self.base.decoded(jnp.float32)
        return self.base.astype(jnp.float32)

    @property
    def is_fetched(self) -> bool:
        """Whether the frozen kernel is fetched by its layer."""
        return has_fetched(self.base)

    def at_layer(self) -> Self:
        """Return the frozen kernel, fetched if need be, and its adapter, for the layer."""
        return dataclasses.replace(self, base=start_layer(self.base))

    def operand(self) -> jax.Array:
        """Return the parameter without its adapter."""
        return operand_of(self.base)

    def completed(
        self, y: Float[Array, "*batch out"], x: Float[Array, "*batch in"]
    ) -> Float[Array, "*batch out"]:
        """Add the adapter's term to `x @ kernel`, in the dtype of `x`."""
        narrow = jnp.einsum("...i,ir->...r", x, self.a.astype(x.dtype))
        return y + jnp.einsum("...r,ro->...o", narrow, self.b.astype(x.dtype)) * self.scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DoRAParam(LoRAParam):
    """A parameter with an adapter and trained magnitudes.

    Attributes:
        magnitude: `[..., out]`, the change of each output's magnitude, from that of its frozen
            weights.
    """

    magnitude: Any

    def merged(self) -> jax.Array:
        """Return the sum with these magnitudes, computed in float32, in the dtype of the base."""
        return (self._sum() * self._ratio()[..., None, :]).astype(self.base.dtype)

    def completed(
        self, y: Float[Array, "*batch out"], x: Float[Array, "*batch in"]
    ) -> Float[Array, "*batch out"]:
        """Complete `x @ kernel` in the dtype of `x`."""
        ratio = self._ratio().astype(x.dtype)
        return super().completed(y, x) * jnp.expand_dims(ratio, range(y.ndim - 1))

    def _ratio(self) -> Float[Array, "*layer out"]:
        """Return magnitude / ‖sum‖ of each output; the norm is a constant of the derivative.

        Norms follow from products with A, so the sum is not computed and a shard of the kernel
        suffices: ‖w + s·A·b‖² = ‖w‖² + 2s (Aᵀw)·b + s² b·(AᵀA)·b.
        """
        base = self._whole_base()
        a, b = jax.lax.stop_gradient((self.a, self.b))
        own = jnp.sum(base**2, axis=-2)
        both = jnp.einsum("...io,...ir->...ro", base, a, preferred_element_type=jnp.float32)
        of_a = jnp.einsum("...ir,...is->...rs", a, a, preferred_element_type=jnp.float32)
        change = jnp.einsum("...rs,...so->...ro", of_a, b, preferred_element_type=jnp.float32)
        terms = 2 * self.scale * both + self.scale**2 * change
        total = own + jnp.sum(terms * b, axis=-2)
        ratio = (jnp.sqrt(own) + self.magnitude) / jnp.sqrt(jnp.where(total > 0, total, 1.0))
        return jnp.where(total > 0, ratio, 1.0)  # weights that are all zero have no direction
