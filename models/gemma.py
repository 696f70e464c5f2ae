"""Gemma: GeGLU, wide heads and a scaled, tied embedding (arXiv:2403.08295), and Gemma 2.

Gemma 2 (arXiv:2408.00118) has alternating local and global attention, soft caps, and norms after
attention and MLP.

```python
config = dataclasses.replace(PRESETS["gemma2-2b"], layers=4)
model = spmd.from_nnx(config.build)
```

A scanned layer of Gemma 2 is a pair: `layers/local_block/…` with a window and
`layers/global_block/…` without. Pipeline stages hold whole pairs, and for a remat policy a pair is
one layer.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from spmd.errors import Problem, check_fields
from spmd.layers.lm_head import LazyLogits
from spmd.layers.ring_attention import Segments
from spmd.models.layers import RMSNorm, gelu_gated, make_layers, run_layers
from spmd.models.llama import MLP, Attention, Embedding, LlamaConfig
from spmd.models.rope import Angles
from spmd.plan.annotate import annotate


@dataclasses.dataclass(frozen=True)
class GemmaConfig(LlamaConfig):
    """Shape of a Gemma."""

    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    tied: bool = True
    """Always true: the output head is the embedding's transpose."""

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid field."""
        problems = super().problems()
        if not self.tied:
            fix = "True: a Gemma has one table for embedding and head"
            problems.append(Problem("model.tied", "is False", fix=fix))
        return problems

    def build(self, rngs: nnx.Rngs) -> "Gemma":
        """Build the model."""
        return Gemma(self, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Gemma2Config(GemmaConfig):
    """Shape of a Gemma 2; layers 0, 2, … have the sliding window."""

    window: int = 4096
    """Tokens that each one attends to in every other layer, itself included."""
    query_scale: int = 256
    """Products of queries and keys are divided by the square root of this
    (`query_pre_attn_scalar`)."""
    attention_soft_cap: float = 50.0
    """Soft cap of attention scores."""
    logits_soft_cap: float = 30.0
    """Soft cap of logits."""

    @property
    def windows(self) -> tuple[int, int]:
        """Windows of a pair of layers; 0 for all preceding tokens."""
        return self.window, 0

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid field."""
        problems = [p for p in super().problems() if p.where != "model.window"]
        positive = ("window", "query_scale", "attention_soft_cap", "logits_soft_cap")
        rules = dict.fromkeys(positive, "above 0")
        problems += check_fields(self, rules, prefix="model.")
        if self.layers % 2:
            problem = Problem(
                "model.layers",
                "is odd, and layers are pairs",
                f"{self.layers} / 2 = {self.layers / 2}",
                "an even number",
            )
            problems.append(problem)
        return problems


PRESETS = {
    "test-gemma": GemmaConfig(
        vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64, head_dim=16
    ),
    "test-gemma2": Gemma2Config(
        vocab=64,
        d_model=32,
        layers=4,
        heads=4,
        kv_heads=2,
        d_ff=64,
        head_dim=16,
        window=5,
        query_scale=9,
        attention_soft_cap=2.0,
        logits_soft_cap=3.0,
    ),
    "gemma-2b": GemmaConfig(256_000, 2048, 18, 8, 1, 16_384, head_dim=256),
    "gemma-7b": GemmaConfig(256_000, 3072, 28, 16, 16, 24_576, head_dim=256),
    "gemma2-2b": Gemma2Config(256_000, 2304, 26, 8, 4, 9216, head_dim=256),
    "gemma2-9b": Gemma2Config(256_000, 3584, 42, 16, 8, 14_336, head_dim=256),
    "gemma2-27b": Gemma2Config(256_000, 4608, 46, 32, 16, 36_864, head_dim=128, query_scale=144),
}
"""Published shapes by name, and small ones for tests."""


def _norm(config: GemmaConfig) -> RMSNorm:
    return RMSNorm(config.d_model, eps=config.norm_eps, offset=1.0)


class Block(nnx.Module):
    """Decoder layer.

    Args:
        config: The shape.
        window: Tokens that each one attends to; 0 for all preceding ones.
        scale: Factor of the scores, as for `attend`.
        soft_cap: Cap of the scores, as for `attend`.
        post_norms: Normalise the outputs of attention and MLP too.
        rngs: For the initial parameters.
    """

    def __init__(
        self,
        config: GemmaConfig,
        *,
        window: int,
        scale: float | None = None,
        soft_cap: float | None = None,
        post_norms: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        self.attention_norm = _norm(config)
        self.attention = Attention(config, window=window, scale=scale, soft_cap=soft_cap, rngs=rngs)
        self.attention_post_norm = _norm(config) if post_norms else None
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config, gate=gelu_gated, rngs=rngs)
        self.mlp_post_norm = _norm(config) if post_norms else None

    def __call__(
        self, x: Float[Array, "batch seq d"], angles: Angles, segments: Segments = None
    ) -> Float[Array, "batch seq d"]:
        """Return the residual stream after this layer."""
        x = annotate(x, "residual")
        y = self.attention(self.attention_norm(x), angles, segments)
        x = _add(x, y, self.attention_post_norm)
        y = self.mlp(self.mlp_norm(x))
        return _add(x, y, self.mlp_post_norm)


def _add(x: Array, y: Array, norm: RMSNorm | None) -> Array:
    """Add a result to the residual stream, after a norm, if any."""
    if norm is not None:
        y = norm(y)
    return annotate(x + y, "residual")


class Pair(nnx.Module):
    """Two layers of a Gemma 2: a local one, with the window, and a global one."""

    def __init__(self, config: Gemma2Config, *, rngs: nnx.Rngs) -> None:
        make = functools.partial(
            Block,
            config,
            scale=config.query_scale**-0.5,
            soft_cap=config.attention_soft_cap,
            post_norms=True,
            rngs=rngs,
        )
        self.local_block = make(window=config.window)
        self.global_block = make(window=0)

    def __call__(
        self, x: Float[Array, "batch seq d"], angles: Angles, segments: Segments = None
    ) -> Float[Array, "batch seq d"]:
        """Return the residual stream after both layers."""
        x = self.local_block(x, angles, segments)
        return self.global_block(x, angles, segments)


class Gemma(nnx.Module):
    """Causal language model from tokens to next-token logits."""

    position_aware = True

    def __init__(self, config: GemmaConfig, *, rngs: nnx.Rngs) -> None:
        make: Callable[..., nnx.Module] = functools.partial(Block, config, window=config.window)
        count = config.layers
        self.soft_cap: float | None = None
        if isinstance(config, Gemma2Config):
            make = functools.partial(Pair, config)
            count = config.layers // 2
            self.soft_cap = config.logits_soft_cap
        self.config = config
        width = config.d_model
        self.embed = Embedding(config.vocab, width, rngs=rngs)
        self.layers = make_layers(
            lambda rngs: make(rngs=rngs), count, rngs.params(), stacked=config.stacked
        )
        self.norm = _norm(config)

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
        x = self.embed(tokens)
        scale = jnp.asarray(self.config.d_model**0.5, x.dtype)
        x = annotate(x * scale, "residual")
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
        return self.embed.attend(x, self.soft_cap)
