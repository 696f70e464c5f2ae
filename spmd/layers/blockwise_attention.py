"""Causal attention chunk by chunk, with no buffer of sequence × sequence, forward or backward.

The scores of one chunk of queries against one chunk of keys are all that ever exists. A softmax over all keys is
taken online: the largest score so far, the sum of exponentials and the weighted sum of values are corrected as larger
scores come (Milakov & Gimelshein, arXiv:1805.02867; Rabe & Staats, arXiv:2112.05682). The backward pass computes scores
again from the logarithm of that sum (Dao et al., arXiv:2205.14135, algorithm 4).

Which pairs of chunks are worth a visit is a table, so what causality or a window hides costs nothing. Arrays lie heads
first: queries `[batch, kv_heads, seq, group, dim]`, keys and values `[batch, kv_heads, seq, dim]`, where `group` query
heads share a key/value head.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spmd.layers.soft_cap import before_soft_cap, soft_capped

MASK_VALUE = -1e30
"""The score of a key that is hidden: finite, so that differences of two are no NaN."""

LARGEST_CHUNK = 512
"""Tokens of a chunk: scores of 512 × 512 for each head fill the matmul units and little memory."""


def chunk_of(length: int) -> int:
    """The largest divisor of `length` that is no larger than `LARGEST_CHUNK`.

    Example:
        >>> chunk_of(4096), chunk_of(96), chunk_of(1000)
        (512, 96, 500)
    """
    return next(size for size in range(min(length, LARGEST_CHUNK), 0, -1) if length % size == 0)


def is_awkward(length: int) -> bool:
    """Whether so many tokens divide into small chunks only, which takes many times as long.

    Example:
        >>> is_awkward(1000), is_awkward(521)
        (False, True)
    """
    return chunk_of(length) < min(length, LARGEST_CHUNK) // 8


def visible_pairs(query_starts: Sequence[int], key_starts: Sequence[int], chunk: int, window: int | None) -> np.ndarray:
    """Those pairs of chunks of which some query sees some key.

    Args:
        query_starts: The position of the first token of each chunk of queries.
        key_starts: The same of the keys.
        chunk: Tokens of a chunk.
        window: How many tokens a query sees, itself included; None for all before it.

    Returns:
        int32 `[pairs, 3]`: which chunk of queries, which of keys, and how far the first starts behind the second.

    Example:
        >>> visible_pairs([0, 4], [0, 4], 4, None).tolist()
        [[0, 0, 0], [1, 0, 4], [1, 1, 0]]
    """
    reach = np.inf if window is None else window
    pairs = [
        (i, j, query - key)
        for i, query in enumerate(query_starts)
        for j, key in enumerate(key_starts)
        if query + chunk > key and query - (key + chunk - 1) < reach
    ]
    return np.array(pairs, np.int32).reshape(-1, 3)


class Softmax(NamedTuple):
    """A softmax that has seen some of its keys, all float32; `out` is divided by `total` in the end."""

    out: Float[Array, "batch kv_heads seq group dim"]
    largest: Float[Array, "batch kv_heads seq group"]
    total: Float[Array, "batch kv_heads seq group"]


@dataclasses.dataclass(frozen=True)
class BlockPairs:
    """The chunks of one device against those of one device's keys.

    Attributes:
        pairs: From `visible_pairs`, for this device.
        count: How many of its rows are to be visited.
        chunk: Tokens of a chunk.
        window: As in `visible_pairs`.
        query_segments: The document of each query, where several share a sequence.
        key_segments: The document of each key.
        soft_cap: The cap of scores, if there is one.
    """

    pairs: Int[Array, "pairs 3"]
    count: int | Int[Array, ""]
    chunk: int
    window: int | None
    query_segments: Int[Array, "batch seq"] | None
    key_segments: Int[Array, "batch seq"] | None
    soft_cap: float | None = None

    def walk(self, visit: Callable, state: tuple) -> tuple:
        """`visit(first query, first key, which are seen, state)` for each pair, one after the other."""
        if not len(self.pairs):
            return state

        def turn(carry: tuple) -> tuple:
            number, state = carry
            i, j, behind = (self.pairs[number, column] for column in range(3))
            return number + 1, visit(i * self.chunk, j * self.chunk, self._seen(i, j, behind), state)

        # No scan: where layers are scanned, JAX takes out of it what depends on no data, the masks of all turns.
        return jax.lax.while_loop(lambda carry: carry[0] < self.count, turn, (0, state))[1]

    def _seen(self, i: Array, j: Array, behind: Array) -> Array:
        """Which keys of a chunk the queries of a chunk see: `[1 or batch, 1, chunk, 1, chunk]`."""
        tokens = jnp.arange(self.chunk)
        distance = behind + tokens[:, None] - tokens[None]
        seen = distance >= 0
        if self.window is not None:
            seen &= distance < self.window
        seen = seen[None]
        if self.query_segments is not None and self.key_segments is not None:
            queries = _part(self.query_segments, i * self.chunk, self.chunk, 1)
            keys = _part(self.key_segments, j * self.chunk, self.chunk, 1)
            seen = seen & (queries[:, :, None] == keys[:, None])
        return seen[:, None, :, None]


def init_softmax(query: Float[Array, "batch kv_heads seq group dim"]) -> Softmax:
    """The softmax before its first key."""
    rows = query.shape[:-1]
    return Softmax(
        jnp.zeros(query.shape, jnp.float32), jnp.full(rows, MASK_VALUE, jnp.float32), jnp.zeros(rows, jnp.float32)
    )


def update_softmax(visit: BlockPairs, softmax: Softmax, query: Array, key: Array, value: Array) -> Softmax:
    """The softmax after these keys as well."""
    chunk, scale = visit.chunk, query.shape[-1] ** -0.5

    def add(start: Array, at: Array, seen: Array, softmax: tuple) -> tuple:
        out, largest, total = (_part(x, start, chunk) for x in softmax)
        scores = soft_capped(_scores(_part(query, start, chunk), _part(key, at, chunk)) * scale, visit.soft_cap)
        scores = jnp.where(seen, scores, MASK_VALUE)
        new = jnp.maximum(largest, scores.max(axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new[..., None]), 0.0)
        before = jnp.exp(largest - new)
        values = _rows(weights.astype(value.dtype), _part(value, at, chunk))
        parts = out * before[..., None] + values, new, total * before + weights.sum(axis=-1)
        return tuple(_put(x, part, start) for x, part in zip(softmax, parts, strict=True))

    return Softmax(*visit.walk(add, tuple(softmax)))


def finalize_softmax(softmax: Softmax) -> tuple[Array, Array]:
    """Attention's output, and the logarithm of the sum of exponentials of each query's scores, both float32."""
    return softmax.out / softmax.total[..., None], softmax.largest + jnp.log(softmax.total)


class Backward(NamedTuple):
    """Inputs of the backward pass for each query.

    Attributes:
        query: The query.
        dout: The gradient of its output.
        log_total: From `finalize_softmax`.
        product: The sum over the head of output times gradient.
    """

    query: Float[Array, "batch kv_heads seq group dim"]
    dout: Float[Array, "batch kv_heads seq group dim"]
    log_total: Float[Array, "batch kv_heads seq group"]
    product: Float[Array, "batch kv_heads seq group"]


def backward_block(
    visit: BlockPairs, saved: Backward, gradients: tuple[Array, Array, Array], key: Array, value: Array
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values, float32, with the part of these keys added."""
    chunk, dtype, scale = visit.chunk, key.dtype, saved.query.shape[-1] ** -0.5

    def add(start: Array, at: Array, seen: Array, gradients: tuple) -> tuple:
        query, dout, log_total, product = (_part(x, start, chunk) for x in saved)
        keys, values = _part(key, at, chunk), _part(value, at, chunk)
        scores = soft_capped(_scores(query, keys) * scale, visit.soft_cap)
        weights = jnp.where(seen, jnp.exp(scores - log_total[..., None]), 0.0)
        dscores = weights * (_scores(dout, values) - product[..., None]) * scale
        dscores = before_soft_cap(dscores, scores, visit.soft_cap).astype(dtype)
        parts = _rows(dscores, keys), _columns(dscores, query), _columns(weights.astype(dtype), dout)
        places = (start, at, at)
        return tuple(
            _put(x, _part(x, place, chunk) + part, place)
            for x, part, place in zip(gradients, parts, places, strict=True)
        )

    return visit.walk(add, gradients)


def _part(x: Array, start: Array, size: int, axis: int = 2) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _put(x: Array, part: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, 2)


def _scores(query: Array, key: Array) -> Array:
    """Products `[batch, kv_heads, chunk, group, keys]`, as one matmul for each key/value head."""
    batch, heads, chunk, group, dim = query.shape
    rows = query.reshape(batch, heads, chunk * group, dim)
    scores = jnp.einsum("bhrd,bhkd->bhrk", rows, key, preferred_element_type=jnp.float32)
    return scores.reshape(batch, heads, chunk, group, -1)


def _rows(weights: Array, x: Array) -> Array:
    batch, heads, chunk, group, keys = weights.shape
    rows = weights.reshape(batch, heads, chunk * group, keys)
    return jnp.einsum("bhrk,bhkd->bhrd", rows, x, preferred_element_type=jnp.float32).reshape(
        batch, heads, chunk, group, -1
    )


def _columns(weights: Array, x: Array) -> Array:
    batch, heads, chunk, group, keys = weights.shape
    rows, x = weights.reshape(batch, heads, chunk * group, keys), x.reshape(batch, heads, chunk * group, -1)
    return jnp.einsum("bhrk,bhrd->bhkd", rows, x, preferred_element_type=jnp.float32)
