"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Keys and values of all heads are products of one short vector for each token, the latent. Positions
are in a rotated key beside it, one for all heads. A cache has these two alone:

```
x ─▶ kv_a_proj ─┬─ norm ─▶ latent [kv_rank] ─▶ kv_b_proj ─▶ key [heads, nope_dim], value [heads, …]
                └─ rotation ─▶ key [rope_dim], the same for all heads
```

Over `tensor`, heads are split: `q_b_proj`, `kv_b_proj` and `o_proj`. Each device computes whole
latents.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from spmd.errors import Problem, check_fields
from spmd.layers.attention import annotated_attention
from spmd.layers.attention_options import AttentionOptions
from spmd.layers.blockwise_attention import MASK_VALUE
from spmd.layers.cache_entry import CacheEntry, cached_array
from spmd.layers.kv_cache import CacheSlot, cache_slot, require_one_document, without_cache
from spmd.models.decoder.declared import TOKENS, Axes, ParamRow, TableRows, each_axis, hidden
from spmd.models.decoder.inputs import LayerInputs
from spmd.models.decoder.linear import Dense, column_parallel, row_parallel
from spmd.models.decoder.mixer import MixerSpec
from spmd.models.decoder.norms import RMSNorm
from spmd.models.decoder.rotary import Angles, Rotary, rotate
from spmd.models.decoder.sizes import Sizes
from spmd.plan.annotate import annotate
from spmd.plan.fsdp import gather, placement_of
from spmd.sharding.rules import replicate

_LATENT = "attention_latent"


@dataclasses.dataclass(frozen=True)
class LatentAttentionSpec(MixerSpec):
    """Latent attention of one kind of layer; a field of 0 has the network's value."""

    heads: int = 0
    """Heads of queries, keys and values."""
    q_rank: int = 0
    """Width of the latents of queries (`q_lora_rank`); 0 for a projection without latents, as in
    DeepSeek-V2-Lite."""
    kv_rank: int = 512
    """Width of the latents of keys and values (`kv_lora_rank`)."""
    nope_dim: int = 128
    """Width of the part of a query or key without positions (`qk_nope_head_dim`)."""
    rope_dim: int = 64
    """Width of their rotated part (`qk_rope_head_dim`)."""
    value_dim: int = 128
    """Width of a head of values (`v_head_dim`)."""
    rotary: Rotary = Rotary(interleaved=True)
    """Rotary positions of the rotated part. """
    bias: bool = False
    """Add biases to the projections into latents, and to the output (`attention_bias`)."""
    latent_norm_eps: float = 1e-6
    """Added to the mean square in the norms of latents."""

    name = "attention"
    """Name of the module in a layer."""

    def resolve(self, sizes: Sizes) -> "LatentAttentionSpec":
        """Return the spec with the network's values where it has none of its own."""
        rotary = self.rotary.resolve(sizes.rope_theta, sizes.rope_scaling)
        return dataclasses.replace(self, heads=self.heads or sizes.heads, rotary=rotary)

    def problems(self, where: str, sizes: Sizes) -> list[Problem]:
        """Return a problem for each invalid field of a resolved spec."""
        positive = ("heads", "kv_rank", "nope_dim", "rope_dim", "value_dim")
        rules: dict[str, Any] = dict.fromkeys(positive, "at least 1")
        rules |= {"q_rank": "at least 0", "latent_norm_eps": "at least 0 and finite"}
        problems = check_fields(self, rules, prefix=where)
        if sizes.window:
            what = "acts on no layer with latent attention"
            problems.append(Problem("model.window", what, f"it is {sizes.window}", "0"))
        if not problems and self.rotary.fraction != 1:
            what = "is not 1, and only the part of rope_dim is rotated"
            problems.append(Problem(f"{where}rotary.fraction", what, fix="1, and rope_dim"))
        if problems:
            return problems
        found = []
        for problem in self.rotary.problems(where, self.rope_dim):
            if problem.where == f"{where}head_dim":
                problem = dataclasses.replace(problem, where=f"{where}rope_dim")
            found.append(problem)
        return found

    @property
    def rotary_key(self) -> tuple[Rotary, int]:
        """Rotary positions and the width of the rotated part."""
        return self.rotary, self.rope_dim

    @property
    def key_dim(self) -> int:
        """Width of a head of queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def scale(self) -> float:
        """Factor of the scores: key_dim^−½ and that of the scaling of positions."""
        return self.key_dim**-0.5 * self.score_scaling

    @property
    def score_scaling(self) -> float:
        """Factor of the scores from the scaling of positions (`mscale_all_dim`)."""
        assert self.rotary.scaling is not None, "the spec is not resolved"
        return self.rotary.scaling.score_scaling

    @property
    def attention_width(self) -> int:
        """Width of all heads, on average of those of queries and values."""
        return self.heads * (self.key_dim + self.value_dim) // 2

    @property
    def kv_width(self) -> int:
        """Width of all heads, on average of those of keys and values."""
        return self.attention_width

    def matmul_params(self, sizes: Sizes) -> int:
        """Return the number of parameters in the matmuls of one token."""
        width = sizes.d_model
        queries = self.heads * self.key_dim
        count = width * queries
        if self.q_rank:
            count = self.q_rank * (width + queries)
        count += width * (self.kv_rank + self.rope_dim)
        count += self.kv_rank * self.heads * (self.nope_dim + self.value_dim)
        return count + self.heads * self.value_dim * width

    def other_params(self, sizes: Sizes) -> int:
        """Return the number of all other parameters: biases and norms."""
        count = self.q_rank + self.kv_rank
        if self.bias:
            count += self.q_rank + self.kv_rank + self.rope_dim + sizes.d_model
        return count

    def rows(self, fsdp: Axes) -> TableRows:
        """Return the rows of the rule table."""
        # A rank is short, and many devices divide the columns of all heads alone.
        columns = ("tensor", *each_axis(fsdp))
        # Layers with and without latents of queries have the same rows for latents of keys.
        of_latents = ["kv_a"]
        of_heads = "q_proj|kv_b_proj"
        if self.q_rank:
            of_latents.append("q_a")
            of_heads = "(q|kv)_b_proj"
        params: list[ParamRow] = []
        for name in of_latents:
            norm = replicate("one vector of a layer")
            params.append((f"attention/{name}_proj/kernel", P(fsdp)))  # [d, rank]
            params.append((f"attention/{name}_norm/scale", norm))
            if self.bias:
                bias = replicate("added to whole latents")
                params.append((f"attention/{name}_proj/bias", bias))
        params.append((f"attention/({of_heads})/kernel", P(None, columns)))  # [in, heads · width]
        params.append(("attention/o_proj/kernel", P("tensor", fsdp)))  # [heads · value_dim, d]
        if self.bias:
            reason = replicate("added once, where rows are summed over tensor")
            params.append(("attention/o_proj/bias", reason))
        activations = (
            ("attention_input", TOKENS),
            (_LATENT, TOKENS),  # [batch, seq, rank]
            # [batch, seq, heads, width]
            *hidden("attention_query", "attention_key", "attention_value"),
            *hidden("attention_out"),  # [batch, seq, heads · value_dim]
        )
        return TableRows(tuple(params), activations)

    def build(self, sizes: Sizes, angles: int, rngs: nnx.Rngs) -> "LatentAttention":
        """Build the module of a resolved spec.

        `angles` is the number of its angles in `LayerInputs.angles`.
        """
        return LatentAttention(self, sizes, angles, rngs=rngs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentCache(CacheEntry):
    """The latents and rotated keys of one call, stacked for a stack of layers."""

    latent: Float[Array, "*layer batch length rank"] = cached_array("batch length _")
    key: Float[Array, "*layer batch length rope"] = cached_array("batch length _")


class LatentAttention(nnx.Module):
    """Latent attention of a resolved spec."""

    def __init__(
        self, spec: LatentAttentionSpec, sizes: Sizes, angles: int, *, rngs: nnx.Rngs
    ) -> None:
        width = sizes.d_model
        queries = spec.heads * spec.key_dim
        keys_and_values = spec.heads * (spec.nope_dim + spec.value_dim)
        self.spec = spec
        self.angles = angles
        if spec.q_rank:
            self.q_a_proj = Dense(width, spec.q_rank, bias=spec.bias, rngs=rngs)
            self.q_a_norm = RMSNorm(spec.q_rank, eps=spec.latent_norm_eps)
            self.q_b_proj = Dense(spec.q_rank, queries, rngs=rngs)
        else:
            self.q_proj = Dense(width, queries, rngs=rngs)
        self.kv_a_proj = Dense(width, spec.kv_rank + spec.rope_dim, bias=spec.bias, rngs=rngs)
        self.kv_a_norm = RMSNorm(spec.kv_rank, eps=spec.latent_norm_eps)
        self.kv_b_proj = Dense(spec.kv_rank, keys_and_values, rngs=rngs)
        # Decoding multiplies with parts of the kernel itself.
        self.kv_b_proj.kernel.set_metadata(takes_wrapped=False, linear=False)
        self.o_proj = Dense(
            spec.heads * spec.value_dim, width, scale=sizes.out_scale, bias=spec.bias, rngs=rngs
        )

    def __call__(
        self, x: Float[Array, "batch seq d"], inputs: LayerInputs
    ) -> Float[Array, "batch seq d"]:
        """Attend from each token to itself and preceding ones of its document."""
        require_one_document(inputs.segments)
        angles = inputs.angles[self.angles]
        query, own = self._projected(x, angles)
        slot = cache_slot("latent attention", LatentCache)
        slot.save(own)
        if slot.past is None:
            out = self._attended(query, own, inputs)
        else:
            out = annotate(self._decoded(query, own, slot), "attention_out")
        y = row_parallel(out, self.o_proj.kernel, "attention_input", self.spec.value_dim)
        return self.o_proj.with_bias(y)

    def _projected(
        self, x: Float[Array, "batch seq d"], angles: Angles
    ) -> tuple[Float[Array, "batch seq heads dim"], LatentCache]:
        """Return rotated queries, and the latents and rotated keys."""
        spec = self.spec
        of_queries = self.q_a_proj.kernel if spec.q_rank else self.q_proj.kernel
        kernels: tuple[nnx.Param, ...] = (of_queries, self.kv_a_proj.kernel)
        query, latent_and_key = column_parallel(x, kernels, "attention_input")
        if spec.q_rank:
            query = self._latent(self.q_a_proj.with_bias(query), self.q_a_norm)
            kernels = (self.q_b_proj.kernel,)
            (query,) = column_parallel(query, kernels, _LATENT, spec.key_dim, stream=_LATENT)
        query = query.reshape(*query.shape[:2], spec.heads, -1)
        nope, rope = jnp.split(query, [spec.nope_dim], axis=-1)
        rope = rotate(rope, angles, spec.rotary.interleaved)
        query = annotate(jnp.concatenate([nope, rope], axis=-1), "attention_query")
        latent_and_key = self.kv_a_proj.with_bias(latent_and_key)
        latent, key = jnp.split(latent_and_key, [spec.kv_rank], axis=-1)
        latent = self._latent(latent, self.kv_a_norm)
        key = rotate(key[:, :, None], angles, spec.rotary.interleaved)[:, :, 0]
        return query, LatentCache(latent, key)

    def _latent(
        self, x: Float[Array, "batch seq rank"], norm: RMSNorm
    ) -> Float[Array, "batch seq rank"]:
        return annotate(norm(annotate(x, _LATENT)), _LATENT)

    def _attended(
        self, query: Float[Array, "batch seq heads dim"], own: LatentCache, inputs: LayerInputs
    ) -> Float[Array, "batch seq values"]:
        """Attend with the keys and values of all heads; annotate the output."""
        spec = self.spec
        batch, seq, heads, _ = query.shape
        kernels = (self.kv_b_proj.kernel,)
        width = spec.nope_dim + spec.value_dim
        (both,) = column_parallel(own.latent, kernels, _LATENT, width, stream=_LATENT)
        both = both.reshape(batch, seq, heads, width)
        nope, value = jnp.split(both, [spec.nope_dim], axis=-1)
        rope = jnp.broadcast_to(own.key[:, :, None], (batch, seq, heads, spec.rope_dim))
        key = annotate(jnp.concatenate([nope, rope], axis=-1), "attention_key")
        value = annotate(value, "attention_value")
        scale = None
        if spec.score_scaling != 1:
            scale = spec.scale
        with without_cache():  # which has the latents
            return annotated_attention(
                query,
                key,
                value,
                "attention_out",
                segments=inputs.segments,
                options=AttentionOptions(scale=scale),
            )

    def _decoded(
        self,
        query: Float[Array, "batch 1 heads dim"],
        own: LatentCache,
        slot: CacheSlot[LatentCache],
    ) -> Float[Array, "batch 1 values"]:
        """Attend to latents: queries are multiplied by the kernel of keys, outputs by that of values.

        Keys and values of preceding tokens are never computed (DeepSeek-V2, section 2.1.2).
        """
        spec = self.spec
        param = self.kv_b_proj.kernel
        kernel = gather(param[...], placement_of(param.get_metadata("path", None)), query.dtype)
        kernel = kernel.reshape(spec.kv_rank, spec.heads, -1)
        of_keys, of_values = jnp.split(kernel, [spec.nope_dim], axis=-1)
        nope, rope = jnp.split(query[:, 0], [spec.nope_dim], axis=-1)
        in_latents = jnp.einsum("bhn,rhn->bhr", nope, of_keys)
        out = _attend_to_latents(in_latents, rope, own, slot, spec.scale)
        values = jnp.einsum("bhr,rhv->bhv", out.astype(query.dtype), of_values)
        return values.reshape(values.shape[0], 1, -1)


def _attend_to_latents(
    query: Float[Array, "batch heads rank"],
    rope: Float[Array, "batch heads rope"],
    own: LatentCache,
    slot: CacheSlot[LatentCache],
    scale: float,
) -> Float[Array, "batch heads rank"]:
    """Attend from one token of each row to itself and cached tokens, with a softmax in float32."""
    past = slot.past
    positions = slot.positions
    assert past is not None
    assert positions is not None

    def scores(cache: LatentCache) -> Float[Array, "batch heads length"]:
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        of_latents = product("bhr,blr->bhl", query, cache.latent)
        of_positions = product("bhp,blp->bhl", rope, cache.key)
        return (of_latents + of_positions) * scale

    mask = slot.past_positions() < positions[:, None]
    before = jnp.where(mask[:, None], scores(past), MASK_VALUE)
    itself = scores(own)
    largest = jnp.maximum(before.max(axis=-1, keepdims=True), itself)
    before = jnp.exp(before - largest)
    itself = jnp.exp(itself - largest)
    weights = before.astype(past.latent.dtype)
    out = jnp.einsum("bhl,blr->bhr", weights, past.latent, preferred_element_type=jnp.float32)
    out = out + itself * own.latent.astype(jnp.float32)
    return out / (before.sum(axis=-1, keepdims=True) + itself)
