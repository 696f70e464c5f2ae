"""Attention for models to call, with any kernel and any split of the sequence.

The plan in scope chooses the kernel (`spmd.model_interface.attention_config`) and the algorithm for
a mesh axis `sequence` larger than 1. Every kernel computes the softmax in float32.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spmd.errors import ConfigError, Problem
from spmd.jaxpr.examples import per_example
from spmd.layers.attention_options import AttentionOptions
from spmd.layers.blockwise_attention import LARGEST_CHUNK, MASK_VALUE
from spmd.layers.cached_attention import cached_attention
from spmd.layers.gathered_attention import gathered_attention
from spmd.layers.ring_attention import (
    Ring,
    Segments,
    Sinks,
    blockwise_attention,
    ulysses_attention,
)
from spmd.layers.soft_cap import soft_capped
from spmd.layers.splash_attention import Queries, splash_attention
from spmd.layers.upcast import upcast_float16
from spmd.layers.zigzag import is_zigzag, positions
from spmd.model_interface.attention_config import AttentionCall, AttentionConfig
from spmd.plan.annotate import (
    annotate,
    attention_config,
    clip_activation,
    constrain_like,
    remat_attention,
)
from spmd.plan.context import current
from spmd.plan.scopes import ATTENTION, in_scope
from spmd.sharding.mesh import chip_of_mesh

_CHUNK_UNIT = 128


def attend(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    *,
    window: int | None = None,
    segments: Segments = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    causal: bool = True,
    chunk: int | None = None,
    sinks: Sinks = None,
) -> Float[Array, "batch seq heads value_dim"]:
    """Attend from each token to itself and preceding tokens; softmax in float32.

    Args:
        query: Query heads that share a key/value head are adjacent.
        key: The number of heads divides that of the queries (grouped-query attention, Ainslie et
            al., arXiv:2305.13245). Heads that mesh axis `tensor` does not divide are repeated until
            it does.
        value: `value_dim` may be another one than that of queries and keys.
        segments: The document of each token, which attends to its own document only; None for one
            document.
        chunk: Chunks are counted from the start of each document.
        sinks: A logit of each query head that takes part in every softmax, without a value
            (`spmd.layers.ring_attention.Sinks`). A soft cap does not act on it.
        window: This and the other options are as in `AttentionOptions`.

    Example:
        >>> x = jnp.ones((1, 4, 2, 8))
        >>> attend(x, x[:, :, :1], x[:, :, :1], window=2).shape
        (1, 4, 2, 8)
    """
    options = AttentionOptions(window, scale, soft_cap, causal, chunk)
    out, _ = _attend(query, key, value, segments, sinks, options)
    return out


def annotated_attention(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    name: str,
    *,
    segments: Segments = None,
    sinks: Sinks = None,
    options: AttentionOptions,
) -> Float[Array, "batch seq values"]:
    """Attend as `attend` does, and annotate the output, with heads side by side, as an activation.

    A remat policy that saves the activation saves with it what the backward pass of splash
    attention reads, so the kernel is not run again.

    Args:
        name: Name of the activation.
    """
    batch, seq = query.shape[:2]
    # Elsewhere than on the device, and in codes, the annotated activation is saved.
    residuals = name if name in current().remat.save else None
    out, kernel = _attend(query, key, value, segments, sinks, options, residuals)
    out = out.reshape(batch, seq, -1)
    if residuals and kernel == "splash":
        return clip_activation(constrain_like(out, name), name)
    return annotate(out, name)


def _attend(
    query: Array,
    key: Array,
    value: Array,
    segments: Segments,
    sinks: Sinks,
    options: AttentionOptions,
    residuals: str | None = None,
) -> tuple[Array, str]:
    """Return the output and the kernel, which names its residuals if it is splash."""
    config = attention_config()
    heads = query.shape[2]
    sinks = _checked_sinks(sinks, heads)
    key = _repeat_heads(key, heads, config.tensor)
    value = _repeat_heads(value, heads, config.tensor)
    cached = cached_attention(query, key, value, segments, options, sinks)
    if cached is not None:
        return cached, ""
    batch, seq, _, head_dim = query.shape
    chunk = options.chunk
    if chunk is not None and chunk >= seq:
        chunk = None  # it masks nothing, and needs no kernel with chunks
    queries = Queries(config.sequence, is_zigzag())
    call = AttentionCall(
        seq,
        head_dim,
        query.dtype,
        value_dim=value.shape[-1],
        packed=segments is not None,
        capped=options.soft_cap is not None,
        causal=options.causal,
        chunks=chunk is not None,
        sinks=sinks is not None,
        runs=queries.runs,
    )
    kernel = config.choose(call)
    if options.scale is not None:
        query = _rescaled(query, options.scale)
    reach = options.window
    if chunk is not None:
        # A chunk is a document for kernels; as a window, it lets them skip what precedes it.
        segments = _chunk_starts(batch, seq, segments, chunk)
        reach = chunk
    bound = AttentionOptions(reach, None, options.soft_cap, options.causal)
    run = _bind(config, kernel, queries, bound, residuals)
    with in_scope(ATTENTION):
        attention = remat_attention(per_example(run), keeps_scores=kernel == "xla")
        return attention(query, key, value, segments, sinks), kernel


def _checked_sinks(sinks: Sinks, heads: int) -> Sinks:
    """Return the sinks in float32."""
    if sinks is None:
        return None
    if sinks.shape != (heads,):
        what = f"have the shape {sinks.shape}"
        problem = Problem("sinks", what, fix=f"a logit of each query head: {(heads,)}")
        raise ConfigError("Invalid attention options:", [problem])
    return sinks.astype(jnp.float32)


def _chunk_starts(batch: int, seq: int, segments: Segments, chunk: int) -> Int[Array, "batch seq"]:
    """Return the position of the first token of each token's chunk, as ids of documents.

    The position in a document is that in the sequence minus its id, the position of its start.
    """
    order = jnp.asarray(positions(seq), jnp.int32)
    if segments is None:
        segments = jnp.zeros((batch, seq), jnp.int32)
    return order - (order - segments) % chunk


def _rescaled(query: Array, scale: float) -> Array:
    """Scale queries for a kernel: kernels always scale by dim ** -0.5 themselves."""
    factor = scale * query.shape[-1] ** 0.5
    scaled = query.astype(jnp.float32) * factor
    return scaled.astype(query.dtype)


def _bind(
    config: AttentionConfig,
    kernel: str,
    queries: Queries,
    options: AttentionOptions,
    residuals: str | None,
) -> Callable[..., Array]:
    """Return attention `(query, key, value, segments, sinks) -> output` over the plan's mesh."""
    run: Callable[..., Array] = functools.partial(_KERNELS[kernel], options=options)
    blocks = chip_of_mesh(config.mesh).splash_blocks
    if kernel == "splash":
        run = functools.partial(run, blocks=blocks, residuals=residuals)
    if config.mesh is None:
        return run
    context = config.context_of(kernel)
    if context == "ring":
        ring = Ring(options, config.mesh, config.sequence, queries.is_zigzag)
        return functools.partial(_blockwise, ring=ring)
    if context == "gather":
        return functools.partial(
            gathered_attention,
            mesh=config.mesh,
            queries=queries,
            options=options,
            blocks=blocks,
            residuals=residuals,
        )
    if context == "" and kernel not in _LOCAL:
        return run
    # Run on each device's part: no compiler can partition a Pallas kernel, and JAX partitions
    # cuDNN's only where no axis is manual yet.
    return functools.partial(ulysses_attention, run, config.mesh)


def _repeat_heads(x: Array, heads: int, parts: int) -> Array:
    """Repeat key/value heads until they divide over `parts` devices, if query heads allow it."""
    copies = math.lcm(x.shape[2], parts) // x.shape[2]
    if copies == 1 or heads % (copies * x.shape[2]):
        return x
    return jnp.repeat(x, copies, axis=2)


_LOCAL = ("cudnn", "splash")
_DEFAULT = AttentionOptions()


def xla_attention(
    query: Array,
    key: Array,
    value: Array,
    segments: Segments,
    sinks: Sinks = None,
    options: AttentionOptions = _DEFAULT,
    *,
    block: int | None = None,
) -> Array:
    """Apply `jax.nn.dot_product_attention` to `block` queries at a time.

    By default a block is 128 queries, or an eighth of a long sequence; without causality there is a
    single one. Each block uses only the keys that one of its queries attends to, so nearly half of
    the scores are never computed. JAX has no option for a soft cap, sinks, and values of another
    width than keys: these are computed here.
    """
    seq = query.shape[1]
    dtype = query.dtype
    if not block:
        block = max(128, -(-seq // 8)) if options.causal else seq
    query, key, value = upcast_float16(query, key, value)
    attention: Callable[..., Array] = jax.nn.dot_product_attention
    is_plain = options.soft_cap is None and sinks is None
    if not is_plain or value.shape[-1] != query.shape[-1]:
        attention = functools.partial(_attention, sinks=sinks, soft_cap=options.soft_cap)
    blocks = []
    for start in range(0, seq, block):
        end = min(start + block, seq)
        queries = range(start, end)
        keys = _attended_keys(queries, seq, options)
        bias = _bias(queries, keys, segments, options)
        own = query[:, queries.start : queries.stop]
        attended = slice(keys.start, keys.stop)
        blocks.append(attention(own, key[:, attended], value[:, attended], bias=bias))
    out = jnp.concatenate(blocks, axis=1)
    return out.astype(dtype)


def _attended_keys(queries: range, seq: int, options: AttentionOptions) -> range:
    """Return the positions of the keys attended to by any of the queries."""
    if not options.causal:
        return range(seq)
    first = 0
    if options.window is not None:
        first = max(0, queries.start - options.window + 1)
    return range(first, queries.stop)


def _bias(
    queries: range, keys: range, segments: Segments, options: AttentionOptions
) -> Float[Array, "#batch 1 query key"] | None:
    """Return the additive mask of scores, 0 or `MASK_VALUE`; None if nothing is masked.

    A boolean mask would be saved for the backward pass, with a byte for each score.
    """
    query_positions = jnp.arange(queries.start, queries.stop)
    distance = query_positions[:, None] - jnp.arange(keys.start, keys.stop)[None]
    mask = _mask(distance, options)[None, None]
    if segments is not None:
        query_segments = segments[:, queries.start : queries.stop, None]
        is_same = query_segments == segments[:, None, keys.start : keys.stop]
        mask = mask & is_same[:, None]
    if not options.causal and segments is None:
        return None
    return jnp.where(mask, 0.0, MASK_VALUE)


def _mask(distance: Array, options: AttentionOptions) -> Array:
    """Return whether a query attends to a key, by the distance between them."""
    if not options.causal:
        return jnp.ones_like(distance, bool)
    mask = distance >= 0
    if options.window is None:
        return mask
    return mask & (distance < options.window)


def _attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    sinks: Sinks,
    soft_cap: float | None,
) -> Array:
    """Compute attention with all options of scores."""
    batch, seq, _, dim = query.shape
    grouped = query.reshape(batch, seq, key.shape[2], -1, dim)
    products = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key, preferred_element_type=jnp.float32)
    scores = soft_capped(products * dim**-0.5, soft_cap)
    if bias is not None:
        scores = scores + bias[:, :, None]
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        weights = _softmax_with_sinks(scores, sinks)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(value.dtype), value)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _softmax_with_sinks(
    scores: Float[Array, "batch kv_heads group query key"], sinks: Float[Array, "heads"]
) -> Array:
    """Return the weights of keys, whose sum is 1 less the weight of the sink."""
    kv_heads, group = scores.shape[1:3]
    sinks = sinks.reshape(1, kv_heads, group, 1, 1)
    largest = jnp.maximum(scores.max(axis=-1, keepdims=True), sinks)
    largest = jax.lax.stop_gradient(largest)
    weights = jnp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sinks - largest)
    return weights / total


def chunked_attention(
    query: Array,
    key: Array,
    value: Array,
    segments: Segments,
    sinks: Sinks = None,
    options: AttentionOptions = _DEFAULT,
) -> Array:
    """Compute attention by `spmd.layers.blockwise_attention` on one device.

    Tokens are padded to whole chunks.
    """
    assert options.causal, "spmd.model_interface.attention_config refuses it"
    seq = query.shape[1]
    padding = 0
    if seq > LARGEST_CHUNK:
        padding = -seq % _CHUNK_UNIT
    arrays: Any = (query, key, value, segments)
    if padding:
        # At the end, where the causal mask excludes padding.
        arrays = jax.tree.map(functools.partial(_pad_tokens, padding=padding), arrays)
    run = functools.partial(_blockwise, sinks=sinks, ring=Ring(options))
    return run(*arrays)[:, :seq]


def _pad_tokens(x: Array, padding: int) -> Array:
    unpadded = ((0, 0),) * (x.ndim - 2)
    return jnp.pad(x, ((0, 0), (0, padding), *unpadded))


def _blockwise(
    query: Array, key: Array, value: Array, segments: Segments, sinks: Sinks, *, ring: Ring
) -> Array:
    dtype = query.dtype
    query, key, value = upcast_float16(query, key, value)
    out = blockwise_attention(query, key, value, segments, sinks, ring)
    return out.astype(dtype)


def cudnn_attention(
    query: Array,
    key: Array,
    value: Array,
    segments: Segments,
    sinks: Sinks = None,
    options: AttentionOptions = _DEFAULT,
) -> Array:
    """Apply the fused attention of cuDNN.

    JAX's interface to it takes values as wide as keys: narrower ones are padded with zeros.
    """
    is_supported = segments is None and sinks is None and options.soft_cap is None
    assert is_supported, "spmd.model_interface.attention_config refuses it"
    width = value.shape[-1]
    padding = key.shape[-1] - width
    if padding:
        value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, padding)))
    window = None
    if options.window is not None:
        window = (options.window - 1, 0)
    out = jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=options.causal,
        local_window_size=window,
        implementation="cudnn",
    )
    if padding:
        out = out[..., :width]
    return out


_KERNELS = {
    "xla": xla_attention,
    "chunked": chunked_attention,
    "cudnn": cudnn_attention,
    "splash": splash_attention,
}
