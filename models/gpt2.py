"""GPT-2: pre-norm decoder with learned positions, biases and a tied head (Radford et al., 2019).

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
from spmd.models.linear import Dense, column_parallel, row_parallel
from spmd.models.llama import Embedding
from spmd.plan.annotate import annotate


class TransformerConfig(Protocol):
    """Config fields used by the layers of GPT-2 and the vision transformer."""

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
    """Return a problem for each invalid field of a `TransformerConfig`.

    `sizes` are the names of its other positive fields.
    """
    rules = dict.fromkeys(("d_model", "layers", "heads", "d_ff", *sizes), "at least 1")
    problems = check_fields(config, rules, prefix="model.")
    if config.heads > 0 and config.d_model % config.heads:
        problem = Problem(
            "model.heads",
            "does not divide model.d_model",
            f"{config.d_model} / {config.heads} = {config.d_model / config.heads:.4g}",
            "change one of them",
        )
        problems.append(problem)
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
        problems = transformer_problems(self, "vocab", "context", "unroll")
        if problems:
            raise ConfigError("Invalid GPT2:", problems)

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.d_model

    @property
    def matmul_params(self) -> int:
        """Parameters in matmuls: kernels and the output head, not the embedding lookup."""
        width = self.d_model
        attention = 4 * width**2
        mlp = 2 * width * self.d_ff
        head = width * self.vocab
        return self.layers * (attention + mlp) + head

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

The published vocabulary, 50,257 words, divides over no `tensor` above 1; see
`spmd.partition_rules.gpt2`.
"""


class Attention(nnx.Module):
    """Multi-head attention with biases, `causal` or from every token to all."""

    def __init__(self, config: TransformerConfig, *, causal: bool = True, rngs: nnx.Rngs) -> None:
        width = config.d_model
        scale = (2 * config.layers) ** -0.5
        self.heads = config.heads
        self.causal = causal
        self.q_proj = Dense(width, width, bias=True, rngs=rngs)
        self.k_proj = Dense(width, width, bias=True, rngs=rngs)
        self.v_proj = Dense(width, width, bias=True, rngs=rngs)
        self.o_proj = Dense(width, width, scale=scale, bias=True, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch seq d"], segments: Segments = None
    ) -> Float[Array, "batch seq d"]:
        """Apply attention."""
        batch, seq, width = x.shape
        head = width // self.heads
        kernels = (self.q_proj.kernel, self.k_proj.kernel, self.v_proj.kernel)
        query, key, value = column_parallel(x, kernels, "attention_input", head)
        query = annotate(self._heads(self.q_proj.with_bias(query)), "attention_query")
        key = annotate(self._heads(self.k_proj.with_bias(key)), "attention_key")
        value = annotate(self._heads(self.v_proj.with_bias(value)), "attention_value")
        out = attend(query, key, value, segments=segments, causal=self.causal)
        out = annotate(out.reshape(batch, seq, -1), "attention_out")
        y = row_parallel(out, self.o_proj.kernel, "attention_input", head)
        return self.o_proj.with_bias(y)

    def _heads(self, y: Float[Array, "batch seq d"]) -> Float[Array, "batch seq heads dim"]:
        batch, seq, _ = y.shape
        return y.reshape(batch, seq, self.heads, -1)


class MLP(nnx.Module):
    """`down(gelu(up(x)))`, with biases (Hendrycks & Gimpel, arXiv:1606.08415).

    `approximate` selects the tanh approximation of gelu.
    """

    def __init__(
        self, config: TransformerConfig, *, approximate: bool = True, rngs: nnx.Rngs
    ) -> None:
        width = config.d_model
        hidden = config.d_ff
        scale = (2 * config.layers) ** -0.5
        self.approximate = approximate
        self.up_proj = Dense(width, hidden, bias=True, rngs=rngs)
        self.down_proj = Dense(hidden, width, scale=scale, bias=True, rngs=rngs)

    def __call__(self, x: Float[Array, "batch seq d"]) -> Float[Array, "batch seq d"]:
        """Apply the MLP."""
        (up,) = column_parallel(x, (self.up_proj.kernel,), "mlp_input")
        up = annotate(self.up_proj.with_bias(up), "mlp_up")
        hidden = annotate(gelu(up, self.approximate), "mlp_hidden")
        y = row_parallel(hidden, self.down_proj.kernel, "mlp_input")
        return self.down_proj.with_bias(y)


class Block(nnx.Module):
    """Layer: attention and MLP, each on a normalised copy of the residual stream.

    Args:
        config: The shape.
        causal: Attend to preceding tokens only.
        approximate: Use the tanh approximation of gelu.
        rngs: For the initial parameters.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        causal: bool = True,
        approximate: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        width = config.d_model
        eps = config.norm_eps
        self.attention_norm = LayerNorm(width, eps=eps)
        self.attention = Attention(config, causal=causal, rngs=rngs)
        self.mlp_norm = LayerNorm(width, eps=eps)
        self.mlp = MLP(config, approximate=approximate, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch seq d"], segments: Segments = None
    ) -> Float[Array, "batch seq d"]:
        """Return the residual stream after this layer."""
        x = annotate(x, "residual")
        y = self.attention(self.attention_norm(x), segments)
        x = annotate(x + y, "residual")
        y = self.mlp(self.mlp_norm(x))
        return annotate(x + y, "residual")


class GPT2(nnx.Module):
    """Causal language model from tokens to next-token logits."""

    position_aware = True

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        width = config.d_model
        self.config = config
        self.embed = Embedding(config.vocab, width, rngs=rngs)
        init = nnx.initializers.normal(0.01)
        table = init(rngs.params(), (config.context, width), jnp.float32)
        self.positions = nnx.Param(table, role="lookup", cast_by_layer=True)
        self.layers = make_layers(
            lambda rngs: Block(config, rngs=rngs),
            config.layers,
            rngs.params(),
            stacked=config.stacked,
        )
        self.norm = LayerNorm(width, eps=config.norm_eps)

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
        x, values = self.apply_layers(x, context)
        return self.compute_outputs(x, values)

    def embed_inputs(
        self, tokens: Int[Array, "batch seq"], segments: Segments = None
    ) -> tuple[Array, Any]:
        """Return the residual stream before the first layer, and the other inputs of every layer.

        Raises:
            ConfigError: The sequence is longer than there are positions, or may become so.
        """
        seq = tokens.shape[1]
        at = positions(seq)
        longest = seq
        if isinstance(at, jax.Array):
            longest = cache_length()  # decoding: the text may become as long as the cache
        if longest > self.config.context:
            problem = Problem(
                "sequence",
                "is longer than the model",
                f"{longest} tokens > {self.config.context} positions",
                "a shorter one, or model.context",
            )
            raise ConfigError("Sequence longer than the position embeddings:", [problem])
        x = self.embed(tokens)
        table = self.positions[...]
        if segments is not None:
            at = at - segments
        learned = table[at].astype(x.dtype)
        learned = learned.reshape(-1, seq, learned.shape[-1])
        x = x + learned
        return annotate(x, "residual"), (segments,)

    def apply_layers(self, x: Float[Array, "batch seq d"], context: Any) -> tuple[Array, None]:
        """Return the residual stream after the layers."""
        x = run_layers(self.layers, x, *context, unroll=self.config.unroll)
        return x, None

    def compute_outputs(
        self, x: Float[Array, "batch seq d"], values: None
    ) -> Float[Array, "batch seq vocab"] | LazyLogits:
        """Return the logits, from the residual stream after the last layer."""
        x = self.norm(x)
        return self.embed.attend(x)
