"""Token embedding, learned positions and the output head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from spmd.errors import ConfigError, Problem
from spmd.layers.kv_cache import cache_length
from spmd.layers.lm_head import LazyLogits
from spmd.layers.ring_attention import Segments
from spmd.layers.zigzag import positions
from spmd.models.decoder.linear import unembed
from spmd.plan.annotate import annotate, annotate_param, cast_to_compute
from spmd.plan.fsdp import placement_of


class Embedding(nnx.Module):
    """Token embedding `[vocab, d]`."""

    def __init__(self, vocab: int, width: int, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(0.02)
        table = init(rngs.params(), (vocab, width), jnp.float32)
        self.embedding = nnx.Param(table, gathered_by_layer=True, sent_exactly=True, role="lookup")

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq d"]:
        """Look up one row for each token; a rule table may shard the lookup and its result."""
        tokens = annotate(tokens, "embed_tokens")
        rows = self.embedding.at[tokens].get(mode="clip")
        rows = annotate(cast_to_compute(rows), "embed_rows")
        return annotate(rows, "embed_exchange")

    def attend(
        self,
        x: Float[Array, "batch seq d"],
        soft_cap: float | None = None,
        bias: nnx.Param | None = None,
    ) -> Float[Array, "batch seq vocab"] | LazyLogits:
        """Apply the tied head: return logits with a soft cap and a bias, if any, or `LazyLogits`."""
        placed = placement_of(self.embedding.get_metadata("path", None))
        table, placed = annotate_param(self.embedding[...], placed, "tied_columns")
        return unembed(x, table, placed, "oi", soft_cap, bias)


def make_positions(count: int, width: int, *, rngs: nnx.Rngs) -> nnx.Param:
    """Return learned positions `[count, d]`."""
    init = nnx.initializers.normal(0.01)
    table = init(rngs.params(), (count, width), jnp.float32)
    return nnx.Param(table, role="lookup", cast_by_layer=True)


def add_positions(
    x: Float[Array, "batch seq d"], learned: nnx.Param, segments: Segments, first: int = 0
) -> Float[Array, "batch seq d"]:
    """Add learned positions, from row `first` in each document of a packed sequence.

    Raises:
        ConfigError: The sequence is longer than there are positions, or may become so.
    """
    seq = x.shape[1]
    at = positions(seq)
    longest = seq
    if isinstance(at, jax.Array):
        longest = cache_length()  # decoding: the text may become as long as the cache
    count = learned.shape[0] - first
    if longest > count:
        problem = Problem(
            "sequence",
            "is longer than the model",
            f"{longest} tokens > {count} positions",
            "a shorter one, or model.positions",
        )
        raise ConfigError("Sequence longer than the position embeddings:", [problem])
    table = learned[...]
    if segments is not None:
        at = at - segments
    if first:
        at = at + first
    found = table[at].astype(x.dtype)
    return x + found.reshape(-1, seq, found.shape[-1])
