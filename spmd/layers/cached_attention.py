"""Attention of a decoded token to the cached keys and values of preceding ones.

Keys and values in int8 are multiplied as codes; the scale of a token and head multiplies its score,
or its weight, so nothing is decoded.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd.errors import CacheError, Problem
from spmd.layers.attention_options import AttentionOptions
from spmd.layers.blockwise_attention import MASK_VALUE
from spmd.layers.cache_entry import CodedArray
from spmd.layers.kv_cache import SEGMENTS, TITLE, CacheSlot, KVCache, cache_slot
from spmd.layers.soft_cap import soft_capped
from spmd.plan.context import current


def cached_attention(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    segments: Array | None,
    options: AttentionOptions,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "batch 1 heads value_dim"] | None:
    """Return the attention of a decoded token; None outside of decoding.

    In prefill and decoding, the keys and values are added to the cache.
    """
    trace = current().kv_cache
    if trace is None:
        return None
    problems = []
    if segments is not None:
        problems.append(SEGMENTS)
    if not options.causal:
        fix = "True: tokens are generated from first to last"
        problems.append(Problem("causal", "is False", fix=fix))
    if problems:
        raise CacheError(TITLE, problems)
    slot = cache_slot("attend", KVCache)
    own = KVCache(key, value)
    slot.save(own)
    if slot.stored is None:
        return None
    return _attend(query, own, slot, options, sinks)


def _attend(
    query: Array,
    own: KVCache,
    slot: CacheSlot[KVCache],
    options: AttentionOptions,
    sinks: Array | None,
) -> Array:
    """Attend from one token of each row to itself and cached tokens, with a softmax in float32."""
    past: Any = slot.stored
    positions = slot.positions
    assert positions is not None
    keys, of_keys = _factor(past.key, query.dtype)
    values, of_values = _factor(past.value, own.value.dtype)
    batch, _, heads, dim = query.shape
    grouped = query.reshape(batch, own.key.shape[2], -1, dim)
    cached = slot.past_positions()
    mask = cached < positions[:, None]
    if options.window is not None:
        mask = mask & (cached > positions[:, None] - options.window)
    if options.chunk is not None:
        first = positions - positions % options.chunk
        mask = mask & (cached >= first[:, None])

    scale = options.scale or dim**-0.5

    def scores(form: str, key: Array, of_keys: Array | float = 1.0) -> Array:
        products = jnp.einsum(form, grouped, key, preferred_element_type=jnp.float32)
        return soft_capped(products * of_keys * scale, options.soft_cap)

    mask = mask[:, None, None]  # [batch, 1, 1, cached]
    before = jnp.where(mask, scores("bhgd,blhd->bhgl", keys, of_keys), MASK_VALUE)
    itself = scores("bhgd,bkhd->bhgk", own.key)
    largest = jnp.maximum(before.max(axis=-1, keepdims=True), itself)
    if sinks is not None:
        sinks = sinks.reshape(1, *grouped.shape[1:3], 1)
        largest = jnp.maximum(largest, sinks)
    before = jnp.exp(before - largest)
    itself = jnp.exp(itself - largest)
    weights = (before * of_values).astype(values.dtype)
    form = "bhgl,blhd->bhgd"
    out = jnp.einsum(form, weights, values, preferred_element_type=jnp.float32)
    out = out + itself * own.value.astype(jnp.float32).swapaxes(1, 2)
    total = before.sum(axis=-1, keepdims=True) + itself
    if sinks is not None:
        total = total + jnp.exp(sinks - largest)
    out = out / total
    out = out.reshape(batch, 1, heads, -1)
    return out.astype(query.dtype)


def _factor(x: Array | CodedArray, dtype: Any) -> tuple[Array, Array | float]:
    """Return cached keys or values as a factor in a dtype, and scales `[batch, heads, 1, length]`."""
    if not isinstance(x, CodedArray):
        return x, 1.0
    scale = jnp.moveaxis(x.scale[..., 0], 1, 2)
    return x.codes.astype(dtype), scale[:, :, None]
