"""Attention for models to call, with any kernel and any split of the sequence.

The plan in scope chooses the kernel (`spmd.model_api.attention_config`) and the algorithm for a mesh axis `sequence`
larger than 1. Every kernel computes the softmax in float32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention
from jaxtyping import Array, Float

from spmd.jaxpr.examples import per_example
from spmd.layers.attention_options import AttentionOptions
from spmd.layers.blockwise_attention import LARGEST_CHUNK, MASK_VALUE
from spmd.layers.kv_cache import cached_attention
from spmd.layers.ring_attention import Ring, Segments, blockwise_attention, ulysses_attention
from spmd.layers.soft_cap import soft_capped
from spmd.layers.zigzag import is_zigzag
from spmd.model_api.attention_config import SPLASH_BLOCK
from spmd.plan.annotate import attention_config, remat_attention
from spmd.plan.scopes import ATTENTION, in_scope

_CHUNK_UNIT = 128
_SPLASH_BLOCKS = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")


def attend(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    *,
    window: int | None = None,
    segments: Segments = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    causal: bool = True,
) -> Float[Array, "batch seq heads dim"]:
    """Attend from each token to itself and preceding tokens; softmax in float32.

    Args:
        query: Query heads that share a key/value head are adjacent.
        key: The number of heads divides that of the queries (grouped-query attention, Ainslie et al.,
            arXiv:2305.13245). Heads that mesh axis `tensor` does not divide are repeated until it does.
        segments: The document of each token, which attends to its own document only; None for one document.
        window: This and the other options are as in `AttentionOptions`.

    Example:
        >>> x = jnp.ones((1, 4, 2, 8))
        >>> attend(x, x[:, :, :1], x[:, :, :1], window=2).shape
        (1, 4, 2, 8)
    """
    options = AttentionOptions(window, scale, soft_cap, causal)
    config = attention_config()
    key, value = (_repeat_heads(x, query.shape[2], config.tensor) for x in (key, value))
    cached = cached_attention(query, key, value, segments, options)
    if cached is not None:
        return cached
    features = {"packed": segments is not None, "capped": soft_cap is not None, "causal": causal}
    kernel = config.choose(query.shape[1], query.shape[-1], query.dtype, **features)
    if scale is not None:  # kernels always scale by dim ** -0.5
        query = (query.astype(jnp.float32) * (scale * query.shape[-1] ** 0.5)).astype(query.dtype)
    options = dataclasses.replace(options, scale=None)
    run = functools.partial(_KERNELS[kernel], options=options)
    if config.is_ring:
        run = functools.partial(_blockwise, ring=Ring(options, config.mesh, config.sequence, is_zigzag()))
    elif config.mesh is not None and (config.sequence > 1 or kernel in _LOCAL):
        # Run on each device's part: no compiler can partition a Pallas kernel, and JAX partitions cuDNN's only where no
        # axis is manual yet.
        run = functools.partial(ulysses_attention, run, config.mesh)
    with in_scope(ATTENTION):
        return remat_attention(per_example(run), keeps_scores=kernel == "xla")(query, key, value, segments)


def _repeat_heads(x: Array, heads: int, parts: int) -> Array:
    """Repeat key/value heads until they divide over `parts` devices, if the query heads allow it."""
    copies = math.lcm(x.shape[2], parts) // x.shape[2]
    return x if copies == 1 or heads % (copies * x.shape[2]) else jnp.repeat(x, copies, axis=2)


_LOCAL = ("cudnn", "splash")
_DEFAULT = AttentionOptions()


def xla_attention(
    query: Array,
    key: Array,
    value: Array,
    segments: Segments,
    options: AttentionOptions = _DEFAULT,
    *,
    block: int | None = None,
) -> Array:
    """Apply `jax.nn.dot_product_attention` to `block` queries at a time: 128, or an eighth of a long sequence.

    Each block uses only the keys that one of its queries attends to, so nearly half of the scores are never computed.
    Without causality there is a single block.
    """
    seq, dtype = query.shape[1], query.dtype
    window, causal = options.window, options.causal
    block = block or (max(128, -(-seq // 8)) if causal else seq)
    query, key, value = _upcast_float16(query, key, value)
    attention: Callable[..., Array] = jax.nn.dot_product_attention
    if options.soft_cap is not None:
        attention = functools.partial(_capped_attention, soft_cap=options.soft_cap)
    blocks = []
    for start in range(0, seq, block):
        end, first = min(start + block, seq), 0 if window is None else max(0, start - window + 1)
        last = end if causal else seq
        distance = jnp.arange(start, end)[:, None] - jnp.arange(first, last)[None]
        mask = (distance >= 0) if causal else jnp.ones_like(distance, bool)
        mask = mask if window is None else mask & (distance < window)
        mask = mask[None, None]
        if segments is not None:
            mask = mask & (segments[:, start:end, None] == segments[:, None, first:last])[:, None]
        # A bias: a boolean mask would be saved for the backward pass, with a byte for each score.
        bias = jnp.where(mask, 0.0, MASK_VALUE) if causal or segments is not None else None
        blocks.append(attention(query[:, start:end], key[:, first:last], value[:, first:last], bias=bias))
    return jnp.concatenate(blocks, axis=1).astype(dtype)


def _capped_attention(query: Array, key: Array, value: Array, bias: Array | None, soft_cap: float) -> Array:
    """Compute `jax.nn.dot_product_attention` with a soft cap, which it does not have."""
    batch, seq, _, dim = query.shape
    grouped = query.reshape(batch, seq, key.shape[2], -1, dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key, preferred_element_type=jnp.float32) * dim**-0.5
    scores = soft_capped(scores, soft_cap)
    if bias is not None:
        scores = scores + bias[:, :, None]
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, value).reshape(query.shape)


def chunked_attention(
    query: Array, key: Array, value: Array, segments: Segments, options: AttentionOptions = _DEFAULT
) -> Array:
    """Compute attention by `spmd.layers.blockwise_attention` on one device, with padding to whole chunks."""
    assert options.causal, "spmd.model_api.attention_config refuses it"
    seq = query.shape[1]
    padding = -seq % _CHUNK_UNIT if seq > LARGEST_CHUNK else 0  # at the end, where causality masks it

    def pad(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))

    padded = jax.tree.map(pad, (query, key, value, segments)) if padding else (query, key, value, segments)
    return _blockwise(*padded, ring=Ring(options))[:, :seq]


def _blockwise(query: Array, key: Array, value: Array, segments: Segments, *, ring: Ring) -> Array:
    wide = _upcast_float16(query, key, value)
    return blockwise_attention(wide[0], wide[1], wide[2], segments, ring).astype(query.dtype)


def cudnn_attention(
    query: Array, key: Array, value: Array, segments: Segments, options: AttentionOptions = _DEFAULT
) -> Array:
    """Apply the fused attention of cuDNN."""
    assert segments is None, "spmd.model_api.attention_config refuses it"
    assert options.soft_cap is None, "spmd.model_api.attention_config refuses it"
    local = None if options.window is None else (options.window - 1, 0)
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=options.causal, local_window_size=local, implementation="cudnn"
    )


def splash_attention_tpu(
    query: Array,
    key: Array,
    value: Array,
    segments: Segments,
    options: AttentionOptions = _DEFAULT,
    *,
    interpret: bool = False,
) -> Array:
    """Apply JAX's splash attention for TPUs to one device's part; `interpret` runs it without a TPU, for tests."""
    (_, seq, heads, dim), dtype = query.shape, query.dtype
    query, key, value = _upcast_float16(query, key, value)
    if not options.causal:
        mask: Any = splash_attention.FullMask((seq, seq))
    elif options.window is None:
        mask = splash_attention.CausalMask((seq, seq))
    else:
        mask = splash_attention.LocalMask((seq, seq), (options.window - 1, 0), 0)
    block = next(size for size in (512, 256, SPLASH_BLOCK) if seq % size == 0)
    sizes: dict[str, Any] = dict.fromkeys(_SPLASH_BLOCKS, block)
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([mask] * heads),
        block_sizes=splash_attention.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=options.soft_cap,
        interpret=interpret,
    )
    scaled = (query.astype(jnp.float32) * dim**-0.5).astype(query.dtype)
    ids = None if segments is None else splash_attention.SegmentIds(segments, segments)
    arrays = (jnp.moveaxis(x, 1, 2) for x in (scaled, key, value))
    return jnp.moveaxis(jax.vmap(kernel)(*arrays, ids), 1, 2).astype(dtype)


def _upcast_float16(*arrays: Array) -> tuple[Array, ...]:
    """Cast float16 to float32: JAX accumulates float16 products in a way that only GPUs support."""
    return tuple(x.astype(jnp.float32) if x.dtype == np.float16 else x for x in arrays)


_KERNELS = {
    "xla": xla_attention,
    "chunked": chunked_attention,
    "cudnn": cudnn_attention,
    "splash": splash_attention_tpu,
}
