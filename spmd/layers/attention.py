"""Attention for models to call, whatever the kernel and however the sequence is split.

```python
out = attend(query, key, value, window=4096, segments=document_ids)
```

The plan in scope chooses the kernel (`spmd.model_api.attention_config`), and what happens where mesh axis `sequence`
is larger than 1. Every kernel takes the softmax in float32.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention
from jaxtyping import Array, Float

from spmd.errors import ConfigError, Problem
from spmd.layers.blockwise_attention import LARGEST_CHUNK, MASK_VALUE
from spmd.layers.kv_cache import cached_attention
from spmd.layers.ring_attention import Ring, Segments, blockwise_attention, ulysses_attention
from spmd.layers.soft_cap import soft_capped
from spmd.layers.zigzag import is_zigzag
from spmd.model_api.attention_config import SPLASH_BLOCK
from spmd.plan.annotate import attention_config, remat_attention

_CHUNK_UNIT = 128


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
    """Each token attends to itself and those before it; softmax in float32.

    Args:
        query: Query heads that share a key/value head are neighbours.
        key: As many heads as divide those of the queries (grouped-query attention, Ainslie et al., arXiv:2305.13245).
            Heads that mesh axis `tensor` does not divide are repeated until it does.
        value: Like the keys.
        window: How many tokens each one sees, itself included; None for all before it.
        segments: The document of each token; those of other documents are not seen. None for one document.
        scale: Of the products of queries and keys; None for `dim ** -0.5`.
        soft_cap: What scores stay below (`spmd.layers.soft_cap`); None for no cap.
        causal: Whether tokens are seen by those behind them alone. If not, all see each other.

    Raises:
        ConfigError: The plan's kernel or its split does not fit the shapes, or what is asked for.

    Example:
        >>> x = jnp.ones((1, 4, 2, 8))
        >>> attend(x, x[:, :, :1], x[:, :, :1], window=2).shape
        (1, 4, 2, 8)
    """
    if problems := _option_problems(window, scale, soft_cap, causal):
        raise ConfigError("Nothing can be attended to:", problems)
    choice = attention_config()
    key, value = (_repeated(x, query.shape[2], choice.tensor) for x in (key, value))
    cached = cached_attention(query, key, value, segments, window=window, scale=scale, soft_cap=soft_cap, causal=causal)
    if cached is not None:
        return cached
    packed = segments is not None
    kernel = choice.choose(
        query.shape[1], query.shape[-1], query.dtype, packed=packed, capped=soft_cap is not None, causal=causal
    )
    if scale is not None:  # every kernel's own is dim ** -0.5
        query = (query.astype(jnp.float32) * (scale * query.shape[-1] ** 0.5)).astype(query.dtype)
    run = functools.partial(_KERNELS[kernel], window=window, soft_cap=soft_cap, causal=causal)
    if choice.is_ring:
        ring = Ring(choice.mesh, choice.sequence, is_zigzag(), window, soft_cap)
        run = functools.partial(_online, ring=ring)
    elif choice.mesh is not None and (choice.sequence > 1 or kernel == "splash"):
        # The compiler does not know how to split a Pallas kernel: it gets what one device holds.
        run = functools.partial(ulysses_attention, run, choice.mesh)
    return remat_attention(run, keeps_scores=kernel == "xla")(query, key, value, segments)


def _option_problems(window: int | None, scale: float | None, soft_cap: float | None, causal: bool) -> list[Problem]:
    problems = [
        Problem(name, f"is {value}", fix=f"None, or {fix}")
        for name, value, is_fit, fix in (
            ("window", window, window is None or window >= 1, "1 and more"),
            ("scale", scale, scale is None or scale > 0, "above 0"),
            ("soft_cap", soft_cap, soft_cap is None or soft_cap > 0, "above 0"),
        )
        if not is_fit
    ]
    if window is not None and not causal:
        problems.append(
            Problem("window", f"is {window}, of tokens that all see each other", fix="causal=True, or None")
        )
    return problems


def _repeated(x: Array, heads: int, parts: int) -> Array:
    """Key/value heads as often as it takes to have equally many for each of `parts` devices, if query heads divide."""
    copies = math.lcm(x.shape[2], parts) // x.shape[2]
    return x if copies == 1 or heads % (copies * x.shape[2]) else jnp.repeat(x, copies, axis=2)


def xla_attention(
    query: Array,
    key: Array,
    value: Array,
    segments: Segments,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    causal: bool = True,
    block: int | None = None,
) -> Array:
    """`jax.nn.dot_product_attention`, `block` queries at a time: 128, or an eighth of a long sequence.

    Queries go against the keys that any of them can see, so nearly half of the scores are never computed. Where all see
    everything, they go at once.
    """
    seq, dtype = query.shape[1], query.dtype
    block = block or (max(128, -(-seq // 8)) if causal else seq)
    query, key, value = _widened(query, key, value)
    blocks = []
    for start in range(0, seq, block):
        end, first = min(start + block, seq), 0 if window is None else max(0, start - window + 1)
        last = end if causal else seq
        distance = jnp.arange(start, end)[:, None] - jnp.arange(first, last)[None]
        seen = (distance >= 0) if causal else jnp.ones_like(distance, bool)
        seen = seen if window is None else seen & (distance < window)
        seen = seen[None, None]
        if segments is not None:
            seen = seen & (segments[:, start:end, None] == segments[:, None, first:last])[:, None]
        # Added, not chosen by: a mask would be kept for the backward pass, with a byte for each score.
        bias = jnp.where(seen, 0.0, MASK_VALUE) if causal or segments is not None else None
        visible = key[:, first:last], value[:, first:last]
        if soft_cap is None:
            blocks.append(jax.nn.dot_product_attention(query[:, start:end], *visible, bias=bias))
        else:
            blocks.append(_capped_attention(query[:, start:end], *visible, bias, soft_cap))
    return jnp.concatenate(blocks, axis=1).astype(dtype)


def _capped_attention(query: Array, key: Array, value: Array, bias: Array | None, soft_cap: float) -> Array:
    """What `jax.nn.dot_product_attention` computes, with a cap of the scores, which it does not have."""
    batch, seq, _, dim = query.shape
    grouped = query.reshape(batch, seq, key.shape[2], -1, dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key, preferred_element_type=jnp.float32) * dim**-0.5
    scores = soft_capped(scores, soft_cap)
    if bias is not None:
        scores = scores + bias[:, :, None]
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, value).reshape(query.shape)


def chunked_attention(
    query: Array,
    key: Array,
    value: Array,
    segments: Segments,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    causal: bool = True,
) -> Array:
    """Softmax taken online over chunks of keys; see `spmd.layers.blockwise_attention`."""
    assert causal, "spmd.model_api.attention_config refuses it"
    seq = query.shape[1]
    padding = -seq % _CHUNK_UNIT if seq > LARGEST_CHUNK else 0  # behind the last token, where no one sees it

    def pad(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))

    padded = jax.tree.map(pad, (query, key, value, segments)) if padding else (query, key, value, segments)
    return _online(*padded, ring=Ring(window=window, soft_cap=soft_cap))[:, :seq]


def _online(query: Array, key: Array, value: Array, segments: Segments, *, ring: Ring) -> Array:
    wide = _widened(query, key, value)
    return blockwise_attention(wide[0], wide[1], wide[2], segments, ring).astype(query.dtype)


def cudnn_attention(
    query: Array,
    key: Array,
    value: Array,
    segments: Segments,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    causal: bool = True,
) -> Array:
    """The fused attention of cuDNN."""
    assert segments is None, "spmd.model_api.attention_config refuses it"
    assert soft_cap is None, "spmd.model_api.attention_config refuses it"
    reach = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=causal, local_window_size=reach, implementation="cudnn"
    )


def splash_attention_tpu(
    query: Array,
    key: Array,
    value: Array,
    segments: Segments,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    causal: bool = True,
    interpret: bool = False,
) -> Array:
    """JAX's splash attention for TPUs, on what one device holds.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        segments: The document of each token, or None.
        window: How many tokens each one sees; None for all before it.
        soft_cap: The cap of scores, or None.
        causal: Whether tokens see only those before them.
        interpret: Whether to run it without a TPU, slowly, for tests.
    """
    (_, seq, heads, dim), dtype = query.shape, query.dtype
    query, key, value = _widened(query, key, value)
    if not causal:
        mask: Any = splash_attention.FullMask((seq, seq))
    elif window is None:
        mask = splash_attention.CausalMask((seq, seq))
    else:
        mask = splash_attention.LocalMask((seq, seq), (window - 1, 0), 0)
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([mask] * heads),
        block_sizes=_splash_blocks(seq),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )
    scaled = (query.astype(jnp.float32) * dim**-0.5).astype(query.dtype)
    ids = None if segments is None else splash_attention.SegmentIds(segments, segments)
    arrays = (jnp.moveaxis(x, 1, 2) for x in (scaled, key, value))
    return jnp.moveaxis(jax.vmap(kernel)(*arrays, ids), 1, 2).astype(dtype)


def _splash_blocks(seq: int) -> splash_attention.BlockSizes:
    block = next(size for size in (512, 256, SPLASH_BLOCK) if seq % size == 0)
    return splash_attention.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )


def _widened(*arrays: Array) -> tuple[Array, ...]:
    """float16 as float32: JAX sums float16 products in a way that only GPUs have."""
    return tuple(x.astype(jnp.float32) if x.dtype == np.float16 else x for x in arrays)


_KERNELS = {
    "xla": xla_attention,
    "chunked": chunked_attention,
    "cudnn": cudnn_attention,
    "splash": splash_attention_tpu,
}
