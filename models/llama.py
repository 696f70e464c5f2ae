"""Llama: pre-norm decoder layers with rotary grouped-query attention and SwiGLU (Touvron et al., arXiv:2302.13971).

```python
config = dataclasses.replace(PRESETS["tinyllama-1b"], layers=4)
model = spmd.plan.flax.from_nnx(lambda rngs: Llama(config, rngs=rngs))
```
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from spmd.errors import ConfigError, Problem, check_fields
from spmd.layers.attention import attend
from spmd.layers.lm_head import LazyLogits
from spmd.layers.ring_attention import Segments
from spmd.layers.zigzag import positions
from spmd.models.layers import RMSNorm, gated, make_layers, run_layers
from spmd.models.linear import Dense, Head, columns, rows, unembed
from spmd.models.rope import Angles, RopeScaling, rotary_angles, rotate
from spmd.plan.annotate import annotate, annotate_param, cast_to_compute
from spmd.plan.fsdp import placement_of


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama."""

    vocab: int = 256
    """Vocabulary size."""
    d_model: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of decoder layers."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key/value heads (grouped-query attention); divides heads."""
    d_ff: int = 384
    """Hidden width of the SwiGLU MLP."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tied: bool = False
    """Use the embedding's transpose as the output head."""
    stacked: bool = True
    """Stack and scan layers (one compiled layer); otherwise they are a list."""
    unroll: int = 1
    """Stacked layers per iteration of the scan: more is faster and compiles longer."""
    window: int = 0
    """Sliding window: tokens that each one attends to, itself included; 0 for all preceding ones."""
    head_dim: int = 0
    """Width of a head; 0 for d_model / heads."""
    rope_scaling: RopeScaling = RopeScaling()
    """Scaling of rotary frequencies for a longer context (Llama 3.1)."""
    qkv_bias: bool = False
    """Add biases to queries, keys and values (Qwen 2)."""
    qk_norm: bool = False
    """Normalise each head's queries and keys (Qwen 3)."""

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ConfigError(f"The {type(self).__name__.removesuffix('Config')} is invalid:", problems)

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid field."""
        sizes = ("vocab", "d_model", "layers", "heads", "kv_heads", "d_ff", "unroll")
        optional = dict.fromkeys(("window", "head_dim"), "at least 0")
        problems = check_fields(self, {**dict.fromkeys(sizes, "at least 1"), **optional}, prefix="model.")
        problems += [
            Problem(f"model.{name}", f"does not divide model.{of}", f"{whole} / {part} = {whole / part:.4g}", fix)
            for of, whole, name, part, fix in (
                *([("d_model", self.d_model, "heads", self.heads, "change one of them")] if not self.head_dim else []),
                ("heads", self.heads, "kv_heads", self.kv_heads, "equally many query heads for each key/value head"),
            )
            if part > 0 and whole % part
        ]
        if not problems and self.head_width % 2:
            pairs = "an even width, for rotary embeddings"
            if self.head_dim:
                problems.append(Problem("model.head_dim", "is odd", f"head_dim = {self.head_dim}", pairs))
            else:
                arithmetic = f"d_model / heads = {self.head_width}"
                problems.append(Problem("model.heads", "gives heads of odd width", arithmetic, pairs))
        return problems

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.d_model // self.heads

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_width

    @property
    def matmul_params(self) -> int:
        """Parameters in matmuls: kernels and the output head, not the embedding lookup."""
        attention = 2 * self.d_model * (self.attention_width + self.kv_width)
        return self.layers * (attention + 3 * self.d_model * self.d_ff) + self.d_model * self.vocab

    def angles(self, seq: int) -> Angles:
        """Return the rotary angles of `seq` tokens."""
        return rotary_angles(positions(seq), self.head_width, self.rope_theta, self.rope_scaling)

    def build(self, rngs: nnx.Rngs) -> "Llama":
        """Build the model."""
        return Llama(self, rngs=rngs)


PRESETS = {
    "test": LlamaConfig(vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64),
    "demo": LlamaConfig(vocab=256, d_model=192, layers=4, heads=6, kv_heads=2, d_ff=512, unroll=4),
    "tinyllama-1b": LlamaConfig(32_000, 2048, 22, 32, 4, 5632),
    "llama2-7b": LlamaConfig(32_000, 4096, 32, 32, 32, 11_008),
    "llama2-13b": LlamaConfig(32_000, 5120, 40, 40, 40, 13_824),
    "llama2-70b": LlamaConfig(32_000, 8192, 80, 64, 8, 28_672),
    "llama3-8b": LlamaConfig(128_256, 4096, 32, 32, 8, 14_336, rope_theta=500_000.0),
    "llama3-70b": LlamaConfig(128_256, 8192, 80, 64, 8, 28_672, rope_theta=500_000.0),
    "llama3-405b": LlamaConfig(128_256, 16_384, 126, 128, 8, 53_248, rope_theta=500_000.0),
    "llama3.1-8b": LlamaConfig(
        *(128_256, 4096, 32, 32, 8, 14_336), rope_theta=500_000.0, rope_scaling=RopeScaling(factor=8.0)
    ),
    "llama3.2-1b": LlamaConfig(
        *(128_256, 2048, 16, 32, 8, 8192), rope_theta=500_000.0, rope_scaling=RopeScaling(factor=32.0), tied=True
    ),
}
"""Published shapes by name, and small ones for tests and the demo."""


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions.

    Args:
        config: The shape.
        window: Overrides the window of the config.
        scale: As for `attend`, as is the next one.
        soft_cap: The cap of scores.
        rngs: For the initial parameters.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        width, bias = config.attention_width, config.qkv_bias
        self.config, self.scale, self.soft_cap = config, scale, soft_cap
        self.window = config.window if window is None else window
        self.q_proj = Dense(config.d_model, width, bias=bias, rngs=rngs)
        self.k_proj = Dense(config.d_model, config.kv_width, bias=bias, rngs=rngs)
        self.v_proj = Dense(config.d_model, config.kv_width, bias=bias, rngs=rngs)
        self.o_proj = Dense(width, config.d_model, scale=(2 * config.layers) ** -0.5, rngs=rngs)
        self.q_norm = RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else None

    def __call__(
        self, x: Float[Array, "batch seq d"], angles: Angles, segments: Segments = None
    ) -> Float[Array, "batch seq d"]:
        """Attend from each token to itself and preceding ones of its document, within the window."""
        batch, seq, _ = x.shape

        def heads(y: Array, count: int) -> Float[Array, "batch seq heads dim"]:
            return y.reshape(batch, seq, count, self.config.head_width)

        def rotated(y: Array, norm: RMSNorm | None) -> Float[Array, "batch seq heads dim"]:
            return rotate(y if norm is None else norm(y), angles)

        projs = self.q_proj, self.k_proj, self.v_proj
        products = columns(x, [proj.kernel for proj in projs], "attention_input", self.config.head_width)
        query, key, value = (proj.with_bias(y) for proj, y in zip(projs, products, strict=True))
        query = annotate(rotated(heads(query, self.config.heads), self.q_norm), "attention_query")
        key = annotate(rotated(heads(key, self.config.kv_heads), self.k_norm), "attention_key")
        value = annotate(heads(value, self.config.kv_heads), "attention_value")
        out = attend(
            *(query, key, value),
            window=self.window or None,
            segments=segments,
            scale=self.scale,
            soft_cap=self.soft_cap,
        )
        out = annotate(out.reshape(batch, seq, -1), "attention_out")
        return rows(out, self.o_proj.kernel, "attention_input", self.config.head_width)


class MLP(nnx.Module):
    """SwiGLU MLP: `down(silu(gate(x)) · up(x))` (Shazeer, arXiv:2002.05202), or with another gate."""

    def __init__(self, config: LlamaConfig, *, gate: Callable[[Array, Array], Array] = gated, rngs: nnx.Rngs) -> None:
        self.gate = gate
        self.gate_proj = Dense(config.d_model, config.d_ff, rngs=rngs)
        self.up_proj = Dense(config.d_model, config.d_ff, rngs=rngs)
        self.down_proj = Dense(config.d_ff, config.d_model, scale=(2 * config.layers) ** -0.5, rngs=rngs)

    def __call__(self, x: Float[Array, "batch seq d"]) -> Float[Array, "batch seq d"]:
        """Apply the MLP."""
        gate, up = columns(x, (self.gate_proj.kernel, self.up_proj.kernel), "mlp_input")
        hidden = annotate(self.gate(annotate(gate, "mlp_gate"), annotate(up, "mlp_up")), "mlp_hidden")
        return rows(hidden, self.down_proj.kernel, "mlp_input")


class Block(nnx.Module):
    """Decoder layer: attention and MLP, each on a normalised copy of the residual stream."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch seq d"], angles: Angles, segments: Segments = None
    ) -> Float[Array, "batch seq d"]:
        """Return the residual stream after this layer.

        It is annotated as an input too, for remat policies that offload a layer's input.
        """
        x = annotate(x, "residual")
        x = annotate(x + self.attention(self.attention_norm(x), angles, segments), "residual")
        return annotate(x + self.mlp(self.mlp_norm(x)), "residual")


class Embedding(nnx.Module):
    """Token embedding `[vocab, d]`."""

    def __init__(self, vocab: int, width: int, *, rngs: nnx.Rngs) -> None:
        table = nnx.initializers.normal(0.02)(rngs.params(), (vocab, width), jnp.float32)
        self.embedding = nnx.Param(table, gathered_by_layer=True, sent_exactly=True, role="lookup")

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq d"]:
        """Look up one row for each token; annotations let a table shard the lookup and its result."""
        tokens = annotate(tokens, "embed_tokens")
        rows = cast_to_compute(self.embedding.at[tokens].get(mode="clip"))
        return annotate(annotate(rows, "embed_rows"), "embed_exchange")

    def attend(
        self, x: Float[Array, "batch seq d"], soft_cap: float | None = None
    ) -> Float[Array, "batch seq vocab"] | LazyLogits:
        """Apply the tied head: return logits with an optional soft cap, or `LazyLogits`."""
        placed = placement_of(self.embedding.get_metadata("path", None))
        table, placed = annotate_param(self.embedding[...], placed, "tied_columns")
        return unembed(x, table, placed, "oi", soft_cap)


class Llama(nnx.Module):
    """Causal language model from tokens to next-token logits."""

    position_aware = True

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = Embedding(config.vocab, config.d_model, rngs=rngs)
        self.layers = make_layers(
            lambda rngs: Block(config, rngs=rngs), config.layers, rngs.params(), stacked=config.stacked
        )
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.lm_head = None if config.tied else Head(config.d_model, config.vocab, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "batch seq"], segments: Segments = None
    ) -> Float[Array, "batch seq vocab"] | LazyLogits:
        """Return next-token logits or `LazyLogits`; `segments` is the document of each token of a packed sequence."""
        x, context = self.embed_inputs(tokens, segments)
        return self.compute_outputs(*self.apply_layers(x, context))

    def embed_inputs(self, tokens: Int[Array, "batch seq"], segments: Segments = None) -> tuple[Array, Any]:
        """Return the residual stream before the first layer, and the other inputs of every layer."""
        return annotate(self.embed(tokens), "residual"), (self.config.angles(tokens.shape[1]), segments)

    def apply_layers(self, x: Float[Array, "batch seq d"], context: Any) -> tuple[Array, None]:
        """Return the residual stream after the layers."""
        return run_layers(self.layers, x, *context, unroll=self.config.unroll), None

    def compute_outputs(
        self, x: Float[Array, "batch seq d"], values: None
    ) -> Float[Array, "batch seq vocab"] | LazyLogits:
        """Return the logits, from the residual stream after the last layer."""
        x = self.norm(x)
        return self.lm_head(x) if self.lm_head else self.embed.attend(x)
