"""Causal attention over chunks of queries and keys, with no `[seq, seq]` buffer in either pass.

An online softmax over the keys updates the maximum, the sum of exponentials and the weighted sum of
values chunk by chunk (Milakov & Gimelshein, arXiv:1805.02867; Rabe & Staats, arXiv:2112.05682). The
backward pass recomputes scores from the logarithm of that sum (Dao et al., arXiv:2205.14135,
algorithm 4). Pairs of chunks that causality or a window masks completely are skipped. Queries are
`[batch, kv_heads, seq, group, dim]`, keys and values `[batch, kv_heads, seq, dim]`, where `group`
query heads share a key/value head. Values may have a `dim` of their own. A sink is a score without
a key: the softmax starts from it, and its gradient follows from the log-sum-exp.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spmd.layers.attention_options import AttentionOptions
from spmd.layers.soft_cap import before_soft_cap, soft_capped

MASK_VALUE = -1e30
"""The score of a masked key: finite, so that the difference of two is not NaN."""

LARGEST_CHUNK = 512
"""Tokens of a chunk: scores of 512 × 512 for each head fill the matmul units and little memory."""


def chunk_size(length: int) -> int:
    """Return the largest divisor of `length` up to `LARGEST_CHUNK`.

    Example:
        >>> chunk_size(4096), chunk_size(96), chunk_size(1000)
        (512, 96, 500)
    """
    size = min(length, LARGEST_CHUNK)
    while length % size:
        size -= 1
    return size


def unmasked_pairs(
    query_starts: Sequence[int], key_starts: Sequence[int], chunk: int, window: int | None
) -> np.ndarray:
    """Return the pairs of query chunk and key chunk without the fully masked ones.

    Chunks are given by the positions of their first tokens. The result is int32 `[pairs, 3]`: query
    chunk, key chunk, and the offset of the first one's start from the second's.

    Example:
        >>> unmasked_pairs([0, 4], [0, 4], 4, None).tolist()
        [[0, 0, 0], [1, 0, 4], [1, 1, 0]]
    """
    limit = np.inf if window is None else window
    pairs = []
    for i, query in enumerate(query_starts):
        for j, key in enumerate(key_starts):
            last_query = query + chunk - 1
            last_key = key + chunk - 1
            if last_query >= key and query - last_key < limit:
                pairs.append((i, j, query - key))
    table = np.array(pairs, np.int32)
    return table.reshape(-1, 3)


class OnlineSoftmax(NamedTuple):
    """State of the online softmax, float32; `finalize_softmax` divides `out` by `total`."""

    out: Float[Array, "batch kv_heads seq group value_dim"]
    largest: Float[Array, "batch kv_heads seq group"]
    total: Float[Array, "batch kv_heads seq group"]


@dataclasses.dataclass(frozen=True)
class BlockPairs:
    """Pairs of chunks of a block of queries and a block of keys, with their mask."""

    table: Int[Array, "pairs 3"]  # from `unmasked_pairs`, for this device
    count: int | Int[Array, ""]  # rows to process; the others are padding
    chunk: int
    options: AttentionOptions
    query_segments: Int[Array, "batch seq"] | None
    key_segments: Int[Array, "batch seq"] | None

    def fold(self, update: Callable, state: tuple) -> tuple:
        """Apply `update(first query, first key, mask, state) -> state` to each pair in order."""
        if not len(self.table):
            return state

        def step(carry: tuple) -> tuple:
            number, state = carry
            i, j, offset = (self.table[number, column] for column in range(3))
            following = number + 1
            query_start = i * self.chunk
            key_start = j * self.chunk
            mask = self._mask(i, j, offset)
            return following, update(query_start, key_start, mask, state)

        def is_left(carry: tuple) -> Any:
            number, _ = carry
            return number < self.count

        # Not a scan: inside a scan over layers, JAX would hoist the masks of all pairs, which
        # depend on no data.
        _, state = jax.lax.while_loop(is_left, step, (0, state))
        return state

    def _mask(self, i: Array, j: Array, offset: Array) -> Array:
        """Return the mask of a pair, `[1 or batch, 1, chunk, 1, chunk]`."""
        tokens = jnp.arange(self.chunk)
        distance = offset + tokens[:, None] - tokens[None]
        mask = distance >= 0
        if self.options.window is not None:
            mask &= distance < self.options.window
        mask = mask[None]
        if self.query_segments is not None and self.key_segments is not None:
            queries = _slice(self.query_segments, i * self.chunk, self.chunk, 1)
            keys = _slice(self.key_segments, j * self.chunk, self.chunk, 1)
            mask = mask & (queries[:, :, None] == keys[:, None])
        return mask[:, None, :, None]


def init_softmax(
    query: Float[Array, "batch kv_heads seq group dim"],
    value_dim: int,
    sinks: Float[Array, "1 kv_heads 1 group"] | None,
) -> OnlineSoftmax:
    """Return the state before the first key, with the sinks, if any, as the only scores."""
    rows = query.shape[:-1]
    out = jnp.zeros((*rows, value_dim), jnp.float32)
    if sinks is not None:
        return OnlineSoftmax(out, jnp.broadcast_to(sinks, rows), jnp.ones(rows, jnp.float32))
    largest = jnp.full(rows, MASK_VALUE, jnp.float32)
    total = jnp.zeros(rows, jnp.float32)
    return OnlineSoftmax(out, largest, total)


def update_softmax(
    pairs: BlockPairs, softmax: OnlineSoftmax, query: Array, key: Array, value: Array
) -> OnlineSoftmax:
    """Return the state after a block of keys."""
    chunk = pairs.chunk

    def update(start: Array, at: Array, mask: Array, softmax: tuple) -> tuple:
        out, largest, total = (_slice(x, start, chunk) for x in softmax)
        queries = _slice(query, start, chunk)
        keys = _slice(key, at, chunk)
        scores = _capped_scores(queries, keys, pairs.options)
        scores = jnp.where(mask, scores, MASK_VALUE)
        new = jnp.maximum(largest, scores.max(axis=-1))
        weights = jnp.where(mask, jnp.exp(scores - new[..., None]), 0.0)
        correction = jnp.exp(largest - new)
        narrow = weights.astype(value.dtype)
        values = _rows(narrow, _slice(value, at, chunk))
        out = out * correction[..., None] + values
        total = total * correction + weights.sum(axis=-1)
        parts = (out, new, total)
        return tuple(_write(x, part, start) for x, part in zip(softmax, parts, strict=True))

    state = pairs.fold(update, tuple(softmax))
    return OnlineSoftmax(*state)


def finalize_softmax(softmax: OnlineSoftmax) -> tuple[Array, Array]:
    """Return the output, and the log-sum-exp of each query's scores, both float32."""
    return softmax.out / softmax.total[..., None], softmax.largest + jnp.log(softmax.total)


class BackwardInputs(NamedTuple):
    """Inputs of the backward pass for each query.

    `product` is the sum of output times gradient over the head.
    """

    query: Float[Array, "batch kv_heads seq group dim"]
    dout: Float[Array, "batch kv_heads seq group value_dim"]
    log_total: Float[Array, "batch kv_heads seq group"]
    product: Float[Array, "batch kv_heads seq group"]


def backward_block(
    pairs: BlockPairs,
    saved: BackwardInputs,
    gradients: tuple[Array, Array, Array],
    key: Array,
    value: Array,
) -> tuple[Array, Array, Array]:
    """Add a block's part to the float32 gradients of queries, keys and values."""
    chunk = pairs.chunk
    dtype = key.dtype
    scale = saved.query.shape[-1] ** -0.5

    def update(start: Array, at: Array, mask: Array, gradients: tuple) -> tuple:
        query, dout, log_total, product = (_slice(x, start, chunk) for x in saved)
        keys = _slice(key, at, chunk)
        values = _slice(value, at, chunk)
        scores = _capped_scores(query, keys, pairs.options)
        weights = jnp.where(mask, jnp.exp(scores - log_total[..., None]), 0.0)
        dweights = _scores(dout, values) - product[..., None]
        dscores = weights * dweights * scale
        dscores = before_soft_cap(dscores, scores, pairs.options.soft_cap).astype(dtype)
        dquery = _rows(dscores, keys)
        dkey = _columns(dscores, query)
        dvalue = _columns(weights.astype(dtype), dout)
        parts = (dquery, dkey, dvalue)
        sums = []
        for total, part, first in zip(gradients, parts, (start, at, at), strict=True):
            before = _slice(total, first, chunk)
            sums.append(_write(total, before + part, first))
        return tuple(sums)

    return pairs.fold(update, gradients)


def sinks_gradient(
    sinks: Float[Array, "1 kv_heads 1 group"],
    log_total: Float[Array, "batch kv_heads seq group"],
    out: Float[Array, "batch kv_heads seq group value_dim"],
    dout: Float[Array, "batch kv_heads seq group value_dim"],
) -> Float[Array, "1 kv_heads 1 group"]:
    """Return the gradient of sinks, float32.

    A sink has the weight `exp(sink − log_total)` and no value, so its score's gradient is minus the
    weight times `out · dout`, summed over all queries.
    """
    product = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(axis=-1)
    weights = jnp.exp(sinks - log_total)
    return -(weights * product).sum(axis=(0, 2), keepdims=True)


def _capped_scores(queries: Array, keys: Array, options: AttentionOptions) -> Array:
    """Return scaled scores with the soft cap, if any."""
    scale = queries.shape[-1] ** -0.5
    scores = _scores(queries, keys) * scale
    return soft_capped(scores, options.soft_cap)


def _slice(x: Array, start: Array, size: int, axis: int = 2) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _write(x: Array, part: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, 2)


def _scores(query: Array, key: Array) -> Array:
    """Return products `[batch, kv_heads, chunk, group, keys]`, by one matmul for each kv head."""
    batch, heads, chunk, group, dim = query.shape
    rows = query.reshape(batch, heads, chunk * group, dim)
    scores = jnp.einsum("bhrd,bhkd->bhrk", rows, key, preferred_element_type=jnp.float32)
    return scores.reshape(batch, heads, chunk, group, -1)


def _rows(weights: Array, x: Array) -> Array:
    """Return `weights @ x`, one row for each query."""
    batch, heads, chunk, group, keys = weights.shape
    rows = weights.reshape(batch, heads, chunk * group, keys)
    out = jnp.einsum("bhrk,bhkd->bhrd", rows, x, preferred_element_type=jnp.float32)
    return out.reshape(batch, heads, chunk, group, -1)


def _columns(weights: Array, x: Array) -> Array:
    """Return `weightsᵀ @ x`, one row for each key."""
    batch, heads, chunk, group, keys = weights.shape
    rows = weights.reshape(batch, heads, chunk * group, keys)
    x = x.reshape(batch, heads, chunk * group, -1)
    return jnp.einsum("bhrk,bhrd->bhkd", rows, x, preferred_element_type=jnp.float32)
