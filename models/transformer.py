"""Llama with a choice of MLP and attention windows, for plans and benchmarks of published shapes.

```python
config = TransformerConfig(32_768, 5120, 32, 32, 32, 32_768, head_dim=256, mlp="relu", tied=True)
```

Where windows differ, a scanned layer is a group with one of each: `layers/block_0/…`,
`layers/block_1/…`. Pipeline stages hold whole groups, and for a remat policy a group is one layer.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
from flax import nnx
from jaxtyping import Array, Float

from spmd.errors import Problem
from spmd.layers.ring_attention import Segments
from spmd.models.layers import RMSNorm, gated, gelu, gelu_gated, make_layers
from spmd.models.linear import Dense, Head, column_parallel, row_parallel
from spmd.models.llama import MLP as GatedMLP
from spmd.models.llama import Attention, Embedding, Llama, LlamaConfig
from spmd.models.rope import Angles
from spmd.plan.annotate import annotate

_GATES = {"swiglu": gated, "geglu": gelu_gated}


def _gelu(x: Array) -> Array:
    return gelu(x, True)  # by position: `jax.checkpoint` takes no static argument by keyword


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"gelu": _gelu, "relu": jax.nn.relu}


@dataclasses.dataclass(frozen=True)
class TransformerConfig(LlamaConfig):
    """Shape of a decoder."""

    mlp: Literal["swiglu", "geglu", "gelu", "relu"] = "swiglu"
    """MLP: swiglu and geglu have three matrices (Shazeer, arXiv:2002.05202), gelu and relu two."""
    windows: tuple[int, ...] = ()
    """Sliding windows of consecutive layers, repeated; 0 for all preceding tokens, empty for
    `window` everywhere."""

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid field."""
        problems = super().problems()
        if any(window < 0 for window in self.windows):
            problems.append(Problem("model.windows", f"is {self.windows}", fix="at least 0 each"))
        count = len(self.windows)
        if count and self.layers % count:
            problem = Problem(
                "model.layers",
                "is no multiple of the windows",
                f"{self.layers} / {count} = {self.layers / count:.4g}",
                "change one of them",
            )
            problems.append(problem)
        return problems

    @property
    def matmul_params(self) -> int:
        """Parameters in matmuls: kernels and the output head, not the embedding lookup."""
        params = super().matmul_params
        if self.mlp in _GATES:
            return params
        gates = self.layers * self.d_model * self.d_ff
        return params - gates

    def build(self, rngs: nnx.Rngs) -> "Transformer":
        """Build the model."""
        return Transformer(self, rngs=rngs)


PRESETS = {
    "test": TransformerConfig(
        vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64, mlp="relu", tied=True
    ),
    "test-windows": TransformerConfig(64, 32, 4, 4, 2, 64, mlp="geglu", windows=(5, 0)),
}
"""Small shapes for tests."""


class MLP(nnx.Module):
    """`down(f(up(x)))` without biases."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        width = config.d_model
        hidden = config.d_ff
        scale = (2 * config.layers) ** -0.5
        self.kind = config.mlp
        self.up_proj = Dense(width, hidden, rngs=rngs)
        self.down_proj = Dense(hidden, width, scale=scale, rngs=rngs)

    def __call__(self, x: Float[Array, "batch seq d"]) -> Float[Array, "batch seq d"]:
        """Apply the MLP."""
        (up,) = column_parallel(x, (self.up_proj.kernel,), "mlp_input")
        up = annotate(up, "mlp_up")
        activation = _ACTIVATIONS[self.kind]
        hidden = annotate(activation(up), "mlp_hidden")
        return row_parallel(hidden, self.down_proj.kernel, "mlp_input")


class Block(nnx.Module):
    """Decoder layer: attention and MLP, each on a normalised copy of the residual stream.

    Its input has its own checkpoint name, `layer_input`, so that remat policies may offload it
    alone.
    """

    def __init__(self, config: TransformerConfig, *, window: int, rngs: nnx.Rngs) -> None:
        width = config.d_model
        eps = config.norm_eps
        self.attention_norm = RMSNorm(width, eps=eps)
        self.attention = Attention(config, window=window, rngs=rngs)
        self.mlp_norm = RMSNorm(width, eps=eps)
        gate = _GATES.get(config.mlp)
        self.mlp = GatedMLP(config, gate=gate, rngs=rngs) if gate else MLP(config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch seq d"], angles: Angles, segments: Segments = None
    ) -> Float[Array, "batch seq d"]:
        """Return the residual stream after this layer."""
        x = annotate(x, "layer_input")
        attended = self.attention(self.attention_norm(x), angles, segments)
        x = annotate(x + attended, "residual")
        y = self.mlp(self.mlp_norm(x))
        return annotate(x + y, "residual")


class Group(nnx.Module):
    """Consecutive layers, one for each window."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        for number, window in enumerate(config.windows):
            block = Block(config, window=window, rngs=rngs)
            setattr(self, f"block_{number}", block)
        self.count = len(config.windows)

    def __call__(
        self, x: Float[Array, "batch seq d"], angles: Angles, segments: Segments = None
    ) -> Float[Array, "batch seq d"]:
        """Return the residual stream after all layers of the group."""
        for number in range(self.count):
            block = getattr(self, f"block_{number}")
            x = block(x, angles, segments)
        return x


class Transformer(Llama):
    """Causal language model from tokens to next-token logits."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        def make(rngs: nnx.Rngs) -> nnx.Module:
            if config.windows:
                return Group(config, rngs=rngs)
            return Block(config, window=config.window, rngs=rngs)

        width = config.d_model
        self.config = config
        self.embed = Embedding(config.vocab, width, rngs=rngs)
        group = max(1, len(config.windows))
        count = config.layers // group
        self.layers = make_layers(make, count, rngs.params(), stacked=config.stacked)
        self.norm = RMSNorm(width, eps=config.norm_eps)
        self.lm_head = None if config.tied else Head(width, config.vocab, rngs=rngs)
