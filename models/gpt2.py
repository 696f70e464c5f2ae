"""GPT-2: pre-norm decoder layers with learned positions, biases and a tied head (Radford et al., 2019).

```python
config = dataclasses.replace(PRESETS["gpt2"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from spmd.errors import ConfigError, Problem, check_fields
from spmd.layers.attention import attend
from spmd.layers.kv_cache import cache_length
from spmd.layers.lm_head import LazyLogits
from spmd.layers.ring_attention import Segments
from spmd.layers.zigzag import positions
from spmd.models.layers import LayerNorm, gelu, make_layers, run_layers
from spmd.models.linear import Dense, columns, rows
from spmd.models.llama import Embedding
from spmd.plan.annotate import annotate


class TransformerConfig(Protocol):
    """Fields that layers of GPT-2's kind use."""

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""

    @property
    def layers(self) -> int:
        """Number of layers."""

    @property
    def heads(self) -> int:
        """Attention heads; divides d_model."""

    @property
    def d_ff(self) -> int:
        """Hidden width of the MLP."""

    @property
    def norm_eps(self) -> float:
        """Added to the variance in LayerNorm."""


def transformer_problems(config: TransformerConfig, *sizes: str) -> list[Problem]:
    """Return a problem for each invalid field of a model of such layers; `sizes` are its other positive fields."""
    rules = dict.fromkeys(("d_model", "layers", "heads", "d_ff", *sizes), "at least 1")
    problems = check_fields(config, rules, prefix="model.")
    if config.heads > 0 and config.d_model % config.heads:
        arithmetic = f"{config.d_model} / {config.heads} = {config.d_model / config.heads:.4g}"
        problems.append(Problem("model.heads", "does not divide model.d_model", arithmetic, "change one of them"))
    return problems


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """Shape of a GPT-2."""

    vocab: int = 256
    """Vocabulary size."""
    d_model: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of decoder layers."""
    heads: int = 4
    """Attention heads; divides d_model."""
    d_ff: int = 512
    """Hidden width of the MLP."""
    context: int = 1024
    """Number of positions: the longest sequence."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm."""
    stacked: bool = True
    """Stack and scan layers (one compiled layer); otherwise they are a list."""
    unroll: int = 1
    """Stacked layers per iteration of the scan: more is faster and compiles longer."""

    def __post_init__(self) -> None:
        if problems := transformer_problems(self, "vocab", "context", "unroll"):
            raise ConfigError("The GPT2 is invalid:", problems)

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.d_model

    @property
    def matmul_params(self) -> int:
        """Parameters in matmuls: kernels and the output head, not the embedding lookup."""
        return self.layers * (4 * self.d_model**2 + 2 * self.d_model * self.d_ff) + self.d_model * self.vocab

    def build(self, rngs: nnx.Rngs) -> "GPT2":
        """Build the model."""
        return GPT2(self, rngs=rngs)


PRESETS = {
    "test": GPT2Config(vocab=64, d_model=32, layers=2, heads=4, d_ff=64, context=48),
    "gpt2": GPT2Config(50_257, 768, 12, 12, 3072),
    "gpt2-medium": GPT2Config(50_257, 1024, 24, 16, 4096),
    "gpt2-large": GPT2Config(50_257, 1280, 36, 20, 5120),
    "gpt2-xl": GPT2Config(50_257, 1600, 48, 25, 6400),
}
"""Published shapes by name, and a small one for tests.

The published vocabulary, 50,257 words, divides over no `tensor` above 1; see `spmd.partition_rules.gpt2`.
"""


class Attention(nnx.Module):
    """Multi-head attention with biases, `causal` or of all tokens to all."""

    def __init__(self, config: TransformerConfig, *, causal: bool = True, rngs: nnx.Rngs) -> None:
        width = config.d_model
        self.heads, self.causal = config.heads, causal
        self.q_proj = Dense(width, width, bias=True, rngs=rngs)
        self.k_proj = Dense(width, width, bias=True, rngs=rngs)
        self.v_proj = Dense(width, width, bias=True, rngs=rngs)
        self.o_proj = Dense(width, width, scale=(2 * config.layers) ** -0.5, bias=True, rngs=rngs)

    def __call__(self, x: Float[Array, "batch seq d"], segments: Segments = None) -> Float[Array, "batch seq d"]:
        """Apply attention."""
        batch, seq, _ = x.shape
        projs = self.q_proj, self.k_proj, self.v_proj
        products = columns(x, [proj.kernel for proj in projs], "attention_input", x.shape[-1] // self.heads)
        query, key, value = (
            annotate(proj.with_bias(y).reshape(batch, seq, self.heads, -1), f"attention_{name}")
            for proj, y, name in zip(projs, products, ("query", "key", "value"), strict=True)
        )
        out = attend(query, key, value, segments=segments, causal=self.causal)
        out = annotate(out.reshape(batch, seq, -1), "attention_out")
        return self.o_proj.with_bias(rows(out, self.o_proj.kernel, "attention_input", x.shape[-1] // self.heads))


class MLP(nnx.Module):
    """`down(gelu(up(x)))`, with biases (Hendrycks & Gimpel, arXiv:1606.08415); `approximate` is gelu by tanh."""

    def __init__(self, config: TransformerConfig, *, approximate: bool = True, rngs: nnx.Rngs) -> None:
        self.approximate = approximate
        self.up_proj = Dense(config.d_model, config.d_ff, bias=True, rngs=rngs)
        self.down_proj = Dense(config.d_ff, config.d_model, scale=(2 * config.layers) ** -0.5, bias=True, rngs=rngs)

    def __call__(self, x: Float[Array, "batch seq d"]) -> Float[Array, "batch seq d"]:
        """Apply the MLP."""
        (up,) = columns(x, (self.up_proj.kernel,), "mlp_input")
        up = annotate(self.up_proj.with_bias(up), "mlp_up")
        hidden = annotate(gelu(up, self.approximate), "mlp_hidden")
        return self.down_proj.with_bias(rows(hidden, self.down_proj.kernel, "mlp_input"))


class Block(nnx.Module):
    """Layer: attention and MLP, each on a normalised copy of the residual stream.

    Args:
        config: The shape.
        causal: Attend to preceding tokens only.
        approximate: Use the tanh approximation of gelu.
        rngs: For the initial parameters.
    """

    def __init__(
        self, config: TransformerConfig, *, causal: bool = True, approximate: bool = True, rngs: nnx.Rngs
    ) -> None:
        self.attention_norm = LayerNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config, causal=causal, rngs=rngs)
        self.mlp_norm = LayerNorm(config.d_model, eps=config.norm_eps)
        self.mlp = MLP(config, approximate=approximate, rngs=rngs)

    def __call__(self, x: Float[Array, "batch seq d"], segments: Segments = None) -> Float[Array, "batch seq d"]:
        """Return the residual stream after this layer."""
        x = annotate(x, "residual")
        x = annotate(x + self.attention(self.attention_norm(x), segments), "residual")
        return annotate(x + self.mlp(self.mlp_norm(x)), "residual")


class GPT2(nnx.Module):
    """Causal language model from tokens to next-token logits."""

    position_aware = True

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = Embedding(config.vocab, config.d_model, rngs=rngs)
        table = nnx.initializers.normal(0.01)(rngs.params(), (config.context, config.d_model), jnp.float32)
        self.positions = nnx.Param(table, role="lookup", cast_by_layer=True)
        self.layers = make_layers(
            lambda rngs: Block(config, rngs=rngs), config.layers, rngs.params(), stacked=config.stacked
        )
        self.norm = LayerNorm(config.d_model, eps=config.norm_eps)

    def __call__(
        self, tokens: Int[Array, "batch seq"], segments: Segments = None
    ) -> Float[Array, "batch seq vocab"] | LazyLogits:
        """Return next-token logits or `LazyLogits`.

        Args:
            tokens: Token ids.
            segments: The document of each token of a packed sequence, at which positions restart.

        Raises:
            ConfigError: The sequence, or the cache in decoding, is longer than `context`.
        """
        x, context = self.embed_inputs(tokens, segments)
        return self.compute_outputs(*self.apply_layers(x, context))

    def embed_inputs(self, tokens: Int[Array, "batch seq"], segments: Segments = None) -> tuple[Array, Any]:
        """Return the residual stream before the first layer, and what every layer takes.

        Raises:
            ConfigError: The sequence is longer than there are positions, or may become so.
        """
        seq = tokens.shape[1]
        at = positions(seq)
        longest = (
            cache_length() if isinstance(at, jax.Array) else seq
        )  # one token of a text that may become as long as that
        if longest > self.config.context:
            arithmetic = f"{longest} tokens > {self.config.context} positions"
            problem = Problem("sequence", "is longer than the model", arithmetic, "a shorter one, or model.context")
            raise ConfigError("There are no positions for these tokens:", [problem])
        x = self.embed(tokens)
        learned = self.positions[...][at if segments is None else at - segments].astype(x.dtype)
        return annotate(x + learned.reshape(-1, seq, learned.shape[-1]), "residual"), (segments,)

    def apply_layers(self, x: Float[Array, "batch seq d"], context: Any) -> tuple[Array, None]:
        """Return the residual stream after the layers."""
        return run_layers(self.layers, x, *context, unroll=self.config.unroll), None

    def compute_outputs(
        self, x: Float[Array, "batch seq d"], values: None
    ) -> Float[Array, "batch seq vocab"] | LazyLogits:
        """Return the logits, from the residual stream after the last layer."""
        return self.embed.attend(self.norm(x))
