"""Activations of MLPs and experts by name; for the backward pass only their inputs are saved.

| name | function | gated |
|---|---|---|
| `silu` | x · σ(x) (arXiv:1702.03118) | SwiGLU (arXiv:2002.05202) |
| `gelu` | x · Φ(x) (arXiv:1606.08415) | GEGLU |
| `gelu_tanh` | its approximation by tanh | GEGLU |
| `relu` | max(x, 0) | ReGLU |
| `relu2` | max(x, 0)² (Primer, arXiv:2109.08668) | ReGLU, squared |
| `clamped_swiglu` | — | gpt-oss: `swiglu_limit`, `swiglu_alpha` |
| `xielu` | two learned scalars (arXiv:2411.13010) | — |

`FROM_HF` has the names of `hidden_act` in config.json.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Hidden = Float[Array, "*tokens hidden"]


@functools.partial(jax.checkpoint, prevent_cse=False)
def gated(gate: Hidden, up: Hidden) -> Hidden:
    """Return `silu(gate) · up` (SwiGLU, Shazeer, arXiv:2002.05202)."""
    return jax.nn.silu(gate) * up


@functools.partial(jax.checkpoint, prevent_cse=False)
def gelu_gated(gate: Hidden, up: Hidden) -> Hidden:
    """Return `gelu(gate) · up`, with the tanh approximation of gelu (GeGLU)."""
    return jax.nn.gelu(gate, approximate=True) * up


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
def gelu(x: Hidden, approximate: bool) -> Hidden:
    """Return `jax.nn.gelu(x)` (Hendrycks & Gimpel, arXiv:1606.08415)."""
    return jax.nn.gelu(x, approximate=approximate)


@functools.partial(jax.checkpoint, prevent_cse=False)
def exact_gelu_gated(gate: Hidden, up: Hidden) -> Hidden:
    """Return `gelu(gate) · up` (GEGLU, arXiv:2002.05202)."""
    return jax.nn.gelu(gate, approximate=False) * up


@functools.partial(jax.checkpoint, prevent_cse=False)
def relu_gated(gate: Hidden, up: Hidden) -> Hidden:
    """Return `relu(gate) · up` (ReGLU, arXiv:2002.05202)."""
    return jax.nn.relu(gate) * up


@functools.partial(jax.checkpoint, prevent_cse=False)
def relu2_gated(gate: Hidden, up: Hidden) -> Hidden:
    """Return `relu(gate)² · up`."""
    return jnp.square(jax.nn.relu(gate)) * up


SWIGLU_LIMIT = 7.0
"""Largest absolute value of hidden units in `clamped_swiglu` (gpt-oss: `swiglu_limit`)."""
SWIGLU_ALPHA = 1.702
"""Factor inside of its sigmoid (gpt-oss: `swiglu_alpha`)."""


@functools.partial(jax.checkpoint, prevent_cse=False)
def clamped_swiglu(gate: Hidden, up: Hidden) -> Hidden:
    """Return `g · σ(α · g) · (u + 1)` of a gate g below the limit and u within ± the limit.

    Source: the published code of gpt-oss; its config.json has `swiglu_limit` and `swiglu_alpha`.
    """
    gate = jnp.minimum(gate, SWIGLU_LIMIT)
    up = jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


def gelu_tanh(x: Hidden) -> Hidden:
    """Return the tanh approximation of `gelu`."""
    return gelu(x, True)  # by position: `jax.checkpoint` takes no static argument by keyword


def exact_gelu(x: Hidden) -> Hidden:
    """Return `gelu` without approximation."""
    return gelu(x, False)


@functools.partial(jax.checkpoint, prevent_cse=False)
def silu(x: Hidden) -> Hidden:
    """Return `x · σ(x)` (Elfwing et al., arXiv:1702.03118)."""
    return jax.nn.silu(x)


@functools.partial(jax.checkpoint, prevent_cse=False)
def relu2(x: Hidden) -> Hidden:
    """Return `relu(x)²` (Primer, So et al., arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


XIELU_BETA = 0.5
"""Slope of `xielu` at 0 (`beta` in Apertus' checkpoints)."""
XIELU_EPS = -1e-6
"""Largest argument of its exponential (`eps` in Apertus' checkpoints)."""


@functools.partial(jax.checkpoint, prevent_cse=False)
def xielu(x: Hidden, alpha_p: Float[Array, "1"], alpha_n: Float[Array, "1"]) -> Hidden:
    """Return xIELU (Huang & Schlag, arXiv:2411.13010, section 3), computed in float32.

    It is `a · x² + β·x` above 0 and `b · (eˣ − 1 − x) + β·x` below, with `a = softplus(alpha_p)`
    and `b = β + softplus(alpha_n)`.

    Args:
        x: Hidden units.
        alpha_p: Learned curvature above 0, before softplus.
        alpha_n: Learned curvature below 0, before softplus.
    """
    wide = x.astype(jnp.float32)
    ones = (1,) * x.ndim
    above = jax.nn.softplus(alpha_p.astype(jnp.float32)).reshape(ones)
    below = XIELU_BETA + jax.nn.softplus(alpha_n.astype(jnp.float32)).reshape(ones)
    line = XIELU_BETA * wide
    parabola = above * wide * wide + line
    exponential = (jnp.expm1(jnp.minimum(wide, XIELU_EPS)) - wide) * below + line
    return jnp.where(wide > 0, parabola, exponential).astype(x.dtype)


XIELU_INIT = {
    "alpha_p": math.log(math.expm1(0.8)),
    "alpha_n": math.log(math.expm1(0.8 - XIELU_BETA)),
}
"""Initial values of the learned scalars of `xielu`: curvatures of 0.8."""

GATED: dict[str, Callable[[Array, Array], Array]] = {
    "silu": gated,
    "gelu_tanh": gelu_gated,
    "gelu": exact_gelu_gated,
    "relu": relu_gated,
    "relu2": relu2_gated,
    "clamped_swiglu": clamped_swiglu,
}
"""Activation → function of gate and up."""

UNGATED: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "relu2": relu2,
    "gelu": exact_gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
}
"""Activation → function of the hidden units of an MLP without a gate."""

LEARNED: dict[str, Callable[[Array, Array, Array], Array]] = {"xielu": xielu}
"""Activation → function of the hidden units of an MLP without a gate, and of learned scalars."""

FROM_HF = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""Name in config.json → activation."""
