"""Llama: pre-norm decoder layers with rotary grouped-query attention and SwiGLU.

Source: Touvron et al., arXiv:2302.13971.

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
from spmd.models.linear import Dense, Head, column_parallel, row_parallel, unembed
from spmd.models.rope import (
    Angles,
    Llama3Scaling,
    RopeScaling,
    rotary_angles,
    rotary_problems,
    rotate,
)
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
    """Sliding window: tokens that each one attends to, itself included; 0 for all preceding
    ones."""
    head_dim: int = 0
    """Width of a head; 0 for d_model / heads."""
    rope_scaling: RopeScaling = RopeScaling()
    """Scaling of rotary frequencies for a longer context."""
    qkv_bias: bool = False
    """Add biases to queries, keys and values (Qwen 2)."""
    qk_norm: bool = False
    """Normalise each head's queries and keys (Qwen 3)."""

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            name = type(self).__name__.removesuffix("Config")
            raise ConfigError(f"The {name} is invalid:", problems)

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid field."""
        sizes = ("vocab", "d_model", "layers", "heads", "kv_heads", "d_ff", "unroll")
        rules = dict.fromkeys(sizes, "at least 1")
        rules |= dict.fromkeys(("window", "head_dim"), "at least 0")
        problems = check_fields(self, rules, prefix="model.")
        if not self.head_dim and not _divides(self.heads, self.d_model):
            problem = Problem(
                "model.heads",
                "does not divide model.d_model",
                f"{self.d_model} / {self.heads} = {self.d_model / self.heads:.4g}",
                "change one of them",
            )
            problems.append(problem)
        if not _divides(self.kv_heads, self.heads):
            problem = Problem(
                "model.kv_heads",
                "does not divide model.heads",
                f"{self.heads} / {self.kv_heads} = {self.heads / self.kv_heads:.4g}",
                "equally many query heads for each key/value head",
            )
            problems.append(problem)
        if not problems and self.head_width % 2:
            problems.append(self._odd_width())
        if not problems:
            problems = rotary_problems(self.head_width, self.rope_scaling)
        return problems

    def _odd_width(self) -> Problem:
        """Return the problem of heads of odd width, with the field to change."""
        fix = "an even width, for rotary embeddings"
        if self.head_dim:
            return Problem("model.head_dim", "is odd", f"head_dim = {self.head_dim}", fix)
        arithmetic = f"d_model / heads = {self.head_width}"
        return Problem("model.heads", "gives heads of odd width", arithmetic, fix)

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
        width = self.d_model
        attention = 2 * width * (self.attention_width + self.kv_width)
        mlp = 3 * width * self.d_ff
        head = width * self.vocab
        return self.layers * (attention + mlp) + head

    def angles(self, seq: int) -> Angles:
        """Return the rotary angles of `seq` tokens."""
        at = positions(seq)
        return rotary_angles(at, self.head_width, self.rope_theta, self.rope_scaling)

    def build(self, rngs: nnx.Rngs) -> "Llama":
        """Build the model."""
        return Llama(self, rngs=rngs)


def _divides(part: int, whole: int) -> bool:
    """Return whether a number divides another; True for one below 1, reported elsewhere."""
    return part <= 0 or whole % part == 0


_LLAMA3_8B = LlamaConfig(128_256, 4096, 32, 32, 8, 14_336, rope_theta=500_000.0)
_LLAMA3_1B = LlamaConfig(128_256, 2048, 16, 32, 8, 8192, rope_theta=500_000.0, tied=True)

PRESETS = {
    "test": LlamaConfig(vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64),
    "demo": LlamaConfig(vocab=256, d_model=192, layers=4, heads=6, kv_heads=2, d_ff=512, unroll=4),
    "tinyllama-1b": LlamaConfig(32_000, 2048, 22, 32, 4, 5632),
    "llama2-7b": LlamaConfig(32_000, 4096, 32, 32, 32, 11_008),
    "llama2-13b": LlamaConfig(32_000, 5120, 40, 40, 40, 13_824),
    "llama2-70b": LlamaConfig(32_000, 8192, 80, 64, 8, 28_672),
    "llama3-8b": _LLAMA3_8B,
    "llama3-70b": LlamaConfig(128_256, 8192, 80, 64, 8, 28_672, rope_theta=500_000.0),
    "llama3-405b": LlamaConfig(128_256, 16_384, 126, 128, 8, 53_248, rope_theta=500_000.0),
    "llama3.1-8b": dataclasses.replace(_LLAMA3_8B, rope_scaling=Llama3Scaling(factor=8.0)),
    "llama3.2-1b": dataclasses.replace(_LLAMA3_1B, rope_scaling=Llama3Scaling(factor=32.0)),
}
"""Published shapes by name, and small ones for tests and the demo."""


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions.

    Args:
        config: The shape.
        window: Overrides the window of the config.
        scale: Factor of the scores, as for `attend`.
        soft_cap: Cap of the scores, as for `attend`.
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
        width = config.d_model
        bias = config.qkv_bias
        out_scale = (2 * config.layers) ** -0.5
        self.config = config
        self.scale = scale
        self.soft_cap = soft_cap
        self.window = config.window if window is None else window
        self.q_proj = Dense(width, config.attention_width, bias=bias, rngs=rngs)
        self.k_proj = Dense(width, config.kv_width, bias=bias, rngs=rngs)
        self.v_proj = Dense(width, config.kv_width, bias=bias, rngs=rngs)
        self.o_proj = Dense(config.attention_width, width, scale=out_scale, rngs=rngs)
        self.q_norm = RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else None

    def __call__(
        self, x: Float[Array, "batch seq d"], angles: Angles, segments: Segments = None
    ) -> Float[Array, "batch seq d"]:
        """Attend from each token to itself and preceding ones of its document, in the window."""
        batch, seq, _ = x.shape
        config = self.config
        kernels = (self.q_proj.kernel, self.k_proj.kernel, self.v_proj.kernel)
        query, key, value = column_parallel(x, kernels, "attention_input", config.head_width)
        query = self.q_proj.with_bias(query)
        key = self.k_proj.with_bias(key)
        value = self.v_proj.with_bias(value)
        query = self._heads(query, config.heads)
        query = annotate(_rotated(query, angles, self.q_norm), "attention_query")
        key = self._heads(key, config.kv_heads)
        key = annotate(_rotated(key, angles, self.k_norm), "attention_key")
        value = annotate(self._heads(value, config.kv_heads), "attention_value")
        out = attend(
            query,
            key,
            value,
            window=self.window or None,
            segments=segments,
            scale=self.scale,
            soft_cap=self.soft_cap,
        )
        out = annotate(out.reshape(batch, seq, -1), "attention_out")
        return row_parallel(out, self.o_proj.kernel, "attention_input", config.head_width)

    def _heads(
        self, y: Float[Array, "batch seq hidden"], count: int
    ) -> Float[Array, "batch seq heads dim"]:
        batch, seq, _ = y.shape
        return y.reshape(batch, seq, count, self.config.head_width)


def _rotated(
    y: Float[Array, "batch seq heads dim"], angles: Angles, norm: RMSNorm | None
) -> Float[Array, "batch seq heads dim"]:
    """Rotate heads by their positions, after a norm, if any."""
    if norm is not None:
        y = norm(y)
    return rotate(y, angles)


class MLP(nnx.Module):
    """SwiGLU MLP: `down(silu(gate(x)) · up(x))` (Shazeer, arXiv:2002.05202), or another gate."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        gate: Callable[[Array, Array], Array] = gated,
        rngs: nnx.Rngs,
    ) -> None:
        width = config.d_model
        hidden = config.d_ff
        scale = (2 * config.layers) ** -0.5
        self.gate = gate
        self.gate_proj = Dense(width, hidden, rngs=rngs)
        self.up_proj = Dense(width, hidden, rngs=rngs)
        self.down_proj = Dense(hidden, width, scale=scale, rngs=rngs)

    def __call__(self, x: Float[Array, "batch seq d"]) -> Float[Array, "batch seq d"]:
        """Apply the MLP."""
        kernels = (self.gate_proj.kernel, self.up_proj.kernel)
        gate, up = column_parallel(x, kernels, "mlp_input")
        gate = annotate(gate, "mlp_gate")
        up = annotate(up, "mlp_up")
        hidden = annotate(self.gate(gate, up), "mlp_hidden")
        return row_parallel(hidden, self.down_proj.kernel, "mlp_input")


class Block(nnx.Module):
    """Decoder layer: attention and MLP, each on a normalised copy of the residual stream."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        width = config.d_model
        eps = config.norm_eps
        self.attention_norm = RMSNorm(width, eps=eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(width, eps=eps)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch seq d"], angles: Angles, segments: Segments = None
    ) -> Float[Array, "batch seq d"]:
        """Return the residual stream after this layer.

        The layer's input is annotated too, for remat policies that offload it.
        """
        x = annotate(x, "residual")
        x = annotate(x + self.attention(self.attention_norm(x), angles, segments), "residual")
        y = self.mlp(self.mlp_norm(x))
        return annotate(x + y, "residual")


class Embedding(nnx.Module):
    """Token embedding `[vocab, d]`."""

    def __init__(self, vocab: int, width: int, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(0.02)
        table = init(rngs.params(), (vocab, width), jnp.float32)
        self.embedding = nnx.Param(table, gathered_by_layer=True, sent_exactly=True, role="lookup")

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq d"]:
        """Look up one row for each token; a rule table may shard the lookup and its result."""
        tokens = annotate(tokens, "embed_tokens")
        row_parallel = self.embedding.at[tokens].get(mode="clip")
        row_parallel = annotate(cast_to_compute(row_parallel), "embed_rows")
        return annotate(row_parallel, "embed_exchange")

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
        width = config.d_model
        self.config = config
        self.embed = Embedding(config.vocab, width, rngs=rngs)
        self.layers = make_layers(
            lambda rngs: Block(config, rngs=rngs),
            config.layers,
            rngs.params(),
            stacked=config.stacked,
        )
        self.norm = RMSNorm(width, eps=config.norm_eps)
        self.lm_head = None if config.tied else Head(width, config.vocab, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "batch seq"], segments: Segments = None
    ) -> Float[Array, "batch seq vocab"] | LazyLogits:
        """Return next-token logits or `LazyLogits`.

        `segments` is the document of each token of a packed sequence.
        """
        x, context = self.embed_inputs(tokens, segments)
        x, values = self.apply_layers(x, context)
        return self.compute_outputs(x, values)

    def embed_inputs(
        self, tokens: Int[Array, "batch seq"], segments: Segments = None
    ) -> tuple[Array, Any]:
        """Return the residual stream before the first layer, and other inputs of every layer."""
        x = annotate(self.embed(tokens), "residual")
        angles = self.config.angles(tokens.shape[1])
        return x, (angles, segments)

    def apply_layers(self, x: Float[Array, "batch seq d"], context: Any) -> tuple[Array, None]:
        """Return the residual stream after the layers."""
        x = run_layers(self.layers, x, *context, unroll=self.config.unroll)
        return x, None

    def compute_outputs(
        self, x: Float[Array, "batch seq d"], values: None
    ) -> Float[Array, "batch seq vocab"] | LazyLogits:
        """Return the logits, from the residual stream after the last layer."""
        x = self.norm(x)
        if self.lm_head is None:
            return self.embed.attend(x)
        return self.lm_head(x)
