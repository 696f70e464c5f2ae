"""Activations of MLPs and experts; for the backward pass only their inputs are saved."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@functools.partial(jax.checkpoint, prevent_cse=False)
def gated(
    gate: Float[Array, "batch seq d"], up: Float[Array, "batch seq d"]
) -> Float[Array, "batch seq d"]:
    """Return `silu(gate) · up` (SwiGLU, Shazeer, arXiv:2002.05202)."""
    return jax.nn.silu(gate) * up


@functools.partial(jax.checkpoint, prevent_cse=False)
def gelu_gated(
    gate: Float[Array, "batch seq d"], up: Float[Array, "batch seq d"]
) -> Float[Array, "batch seq d"]:
    """Return `gelu(gate) · up`, with the tanh approximation of gelu (GeGLU)."""
    return jax.nn.gelu(gate, approximate=True) * up


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
def gelu(x: Float[Array, "batch seq d"], approximate: bool) -> Float[Array, "batch seq d"]:
    """Return `jax.nn.gelu(x)` (Hendrycks & Gimpel, arXiv:1606.08415)."""
    return jax.nn.gelu(x, approximate=approximate)


@functools.partial(jax.checkpoint, prevent_cse=False)
def relu2(x: Float[Array, "batch seq d"]) -> Float[Array, "batch seq d"]:
    """Return `relu(x)²` (Primer, So et al., arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


def _gelu_tanh(x: Array) -> Array:
    return gelu(x, True)  # by position: `jax.checkpoint` takes no static argument by keyword


def _gelu_exact(x: Array) -> Array:
    return gelu(x, False)


GATED: dict[str, Callable[[Array, Array], Array]] = {"silu": gated, "gelu_tanh": gelu_gated}
"""Activation → function of gate and up."""

UNGATED: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "relu2": relu2,
    "gelu": _gelu_exact,
    "gelu_tanh": _gelu_tanh,
}
"""Activation → function of the hidden units of an MLP without a gate."""
