"""Gated delta rule: linear attention whose state forgets, and corrects what a key recalls.

For each head, with a state S `[key_dim, value_dim]`, a decay α in (0, 1] and a strength β in [0, 1]
of each token (Yang, Kautz & Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464, equation 10):

```
S ← α S
S ← S + β k (v − Sᵀ k)ᵀ
out = Sᵀ q
```

`gated_delta_rule` computes a sequence by matmuls over chunks of tokens, and `gated_delta_step` the
next token. In a chunk, the corrections u of all tokens solve one triangular system: with D the
decays between tokens and d those from the state before the chunk (section 3.2, the WY form),

```
(I + tril₋₁(β K Kᵀ ∘ D)) U = β (V − d K S)
out = d Q S + tril(Q Kᵀ ∘ D) U
```

Memory: the backward pass saves its inputs and, for each chunk, one float32 state,
`4 · batch · heads · key_dim · value_dim` bytes; everything else is recomputed chunk by chunk. With
32 heads of 128 × 128 and 8,192 tokens, that is 64 states of 2 MiB = 128 MiB for each row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spmd.layers.recurrence import (
    CHUNK,
    check_heads,
    chunk_decay,
    document_starts,
    group_heads,
    mask_tokens,
    merge_heads,
    product,
    scan_chunks,
    to_float32,
)

_TITLE = "Invalid gated delta rule:"
_SHARED = "heads of keys"


def l2_normalized(x: Float[Array, "... dim"], epsilon: float = 1e-6) -> Float[Array, "... dim"]:
    """Divide by `sqrt(sum of squares + epsilon)`, in float32, as Qwen 3 Next does queries and keys.

    Example:
        >>> l2_normalized(jnp.array([0.0, -4.0])).round(4).tolist()
        [0.0, -1.0]
    """
    wide = to_float32(x)
    squares = jnp.square(wide).sum(axis=-1, keepdims=True)
    normalized = wide * jax.lax.rsqrt(squares + epsilon)
    return normalized.astype(x.dtype)


def gated_delta_rule(
    query: Float[Array, "batch seq key_heads key_dim"],
    key: Float[Array, "batch seq key_heads key_dim"],
    value: Float[Array, "batch seq heads value_dim"],
    log_decay: Float[Array, "batch seq heads"],
    beta: Float[Array, "batch seq heads"],
    *,
    state: Float[Array, "batch heads key_dim value_dim"] | None = None,
    segments: Int[Array, "batch seq"] | None = None,
    valid: Bool[Array, "batch seq"] | None = None,
    scale: float | None = None,
    chunk: int = CHUNK,
) -> tuple[
    Float[Array, "batch seq heads value_dim"], Float[Array, "batch heads key_dim value_dim"]
]:
    """Return the output of each token, and the float32 state after the last one.

    Matmuls are in `value`'s dtype with float32 sums; states, decays and the triangular system are
    float32. The result does not depend on `chunk` but for rounding.

    Args:
        query: Queries, one head for `heads / key_heads` consecutive heads of values. The caller
            normalizes queries and keys (`l2_normalized`).
        key: Keys, of norm at most 1 for a stable recurrence.
        value: Values.
        log_decay: Logarithms of α, at most 0.
        beta: β.
        state: The state before the first token; None for zeros.
        segments: The document of each token. The state is zero at each document's start, but for
            the first document of a row, which continues `state`.
        valid: False for padding, which leaves the state unchanged and has an output of zero.
        scale: Factor of queries; None for `key_dim ** -0.5`.
        chunk: The number of tokens of a chunk.

    Raises:
        ConfigError: `key_heads` does not divide `heads`, or `chunk` is below 1.

    Example:
        >>> key = jnp.eye(2)[None, :, None]  # two tokens, one head
        >>> beta = jnp.ones((1, 2, 1))
        >>> out, state = gated_delta_rule(key, key, 5 * key, 0 * beta, beta, scale=1.0)
        >>> state[0, 0].tolist()
        [[5.0, 0.0], [0.0, 5.0]]
    """
    key_heads = key.shape[2]
    heads = value.shape[2]
    check_heads(_TITLE, heads, key_heads, _SHARED, chunk)
    if state is None:
        state = _zeros(key, value)
    starts = None
    if segments is not None:
        starts = document_starts(segments, valid)
    arrays = (query, key, value, log_decay, beta)
    tokens = tuple(mask_tokens(x, valid) for x in arrays)
    factor = _scale(query, scale)

    def body(state: Array, tokens: Any) -> tuple[Array, Array]:
        out, state = _chunk(state, *tokens)
        scaled = merge_heads(out * factor)
        return state, scaled.astype(value.dtype)

    grouped = group_heads(to_float32(state), key_heads)
    out, grouped = scan_chunks(body, grouped, (*tokens, starts), chunk)
    return out, merge_heads(grouped)


def _zeros(key: Array, value: Array) -> Array:
    """Return the state before the first token."""
    batch = value.shape[0]
    heads = value.shape[2]
    return jnp.zeros((batch, heads, key.shape[-1], value.shape[-1]), jnp.float32)


def _scale(query: Array, scale: float | None) -> float:
    if scale is None:
        return float(query.shape[-1] ** -0.5)
    return scale


def _chunk(
    state: Float[Array, "batch key_heads group key_dim value_dim"],
    query: Float[Array, "batch key_heads chunk key_dim"],
    key: Float[Array, "batch key_heads chunk key_dim"],
    value: Float[Array, "batch heads chunk value_dim"],
    log_decay: Float[Array, "batch heads chunk"],
    beta: Float[Array, "batch heads chunk"],
    starts: Bool[Array, "batch chunk"] | None,
) -> tuple[Float[Array, "batch key_heads group chunk value_dim"], Array]:
    """Return the unscaled outputs of a chunk's tokens, and the state after them."""
    groups = key.shape[1]
    dtype = value.dtype
    logarithms = group_heads(to_float32(log_decay), groups)
    decay = chunk_decay(logarithms, starts)
    strength = group_heads(to_float32(beta), groups)
    strength = strength[..., None]
    values = group_heads(value, groups)

    overlap = product("bgid,bgjd->bgij", key, key, dtype)
    decayed_overlap = overlap[:, :, None] * decay.pairs
    system = jnp.tril(strength * decayed_overlap, k=-1)
    inverse = _unit_lower_inverse(system, _inverse_precision(dtype))
    recalled = product("bgid,bgrdv->bgriv", key, state, dtype)
    errors = strength * (values - decay.start * recalled)
    updates = product("bgrij,bgrjv->bgriv", inverse, errors, dtype)

    scores = product("bgid,bgjd->bgij", query, key, dtype)
    decayed_scores = scores[:, :, None] * decay.pairs
    from_chunk = product("bgrij,bgrjv->bgriv", decayed_scores, updates, dtype)
    from_state = product("bgid,bgrdv->bgriv", query, state, dtype)
    out = decay.start * from_state + from_chunk
    added = product("bgid,bgriv->bgrdv", key, decay.end * updates, dtype)
    return out, decay.whole * state + added


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _unit_lower_inverse(
    lower: Float[Array, "... chunk chunk"], precision: str
) -> Float[Array, "... chunk chunk"]:
    """Return `(I + lower)⁻¹` of a strictly lower triangular matrix, in float32.

    Inverses of diagonal blocks are joined in pairs, from blocks of 1: with X the inverses of blocks
    of some size and L the part of `lower` that joins two, X − X L X has twice the size. Each step
    is two matmuls. A Neumann series would need as many, but its terms grow as binomials do.
    """
    size = lower.shape[-1]
    matmul = functools.partial(jnp.matmul, precision=precision)
    inverse = jnp.broadcast_to(np.eye(size, dtype=np.float32), lower.shape)
    width = 1
    while width < size:
        mask = jnp.broadcast_to(_joining(size, width), lower.shape)
        joining = jnp.where(mask, lower, 0.0)
        half = matmul(inverse, joining)
        inverse -= matmul(half, inverse)
        width *= 2
    return inverse


@_unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(precision: str, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Differentiate the inverse X: −X dL X."""
    matmul = functools.partial(jnp.matmul, precision=precision)
    inverse = _unit_lower_inverse(*primals, precision)
    half = matmul(inverse, *tangents)
    return inverse, -matmul(half, inverse)


def _inverse_precision(dtype: Any) -> str:
    """Return the precision of matmuls of the inverse, which amplifies errors.

    An inverse that is rounded to a narrow dtype needs no more than three bfloat16 passes.
    """
    if jnp.finfo(dtype).bits < 32:
        return "high"
    return "highest"


def _joining(size: int, width: int) -> np.ndarray:
    """Return the mask of the lower left blocks that join pairs of diagonal blocks of a width."""
    block = np.arange(size) // width
    rows = block[:, None]
    columns = block[None]
    return (rows % 2 == 1) & (columns == rows - 1)


def gated_delta_step(
    query: Float[Array, "batch key_heads key_dim"],
    key: Float[Array, "batch key_heads key_dim"],
    value: Float[Array, "batch heads value_dim"],
    log_decay: Float[Array, "batch heads"],
    beta: Float[Array, "batch heads"],
    *,
    state: Float[Array, "batch heads key_dim value_dim"],
    valid: Bool[Array, "batch"] | None = None,
    scale: float | None = None,
) -> tuple[Float[Array, "batch heads value_dim"], Float[Array, "batch heads key_dim value_dim"]]:
    """Return the output of one token of each row, and the state after it, computed in float32.

    Args are those of `gated_delta_rule`. A row that is not `valid` keeps its state.

    Raises:
        ConfigError: `key_heads` does not divide `heads`.
    """
    groups = key.shape[1]
    check_heads(_TITLE, value.shape[1], groups, _SHARED)
    queries = _columns(query)
    keys = _columns(key)
    values = group_heads(to_float32(value), groups)
    strength = group_heads(to_float32(beta), groups)
    decay = jnp.exp(to_float32(log_decay))

    # Products and sums, not matmuls: one row for each state gives a matmul unit nothing to do.
    decayed = to_float32(state) * decay[..., None, None]
    grouped = group_heads(decayed, groups)
    recalled = (grouped * keys).sum(axis=-2)
    update = strength[..., None] * (values - recalled)
    grouped += keys * update[..., None, :]
    out = (grouped * queries).sum(axis=-2)
    out *= _scale(query, scale)
    new_state = merge_heads(grouped)
    if valid is not None:
        new_state = jnp.where(valid[:, None, None, None], new_state, state)
    return merge_heads(out).astype(value.dtype), new_state


def _columns(x: Float[Array, "batch heads dim"]) -> Float[Array, "batch heads 1 dim 1"]:
    """Return queries or keys for products with states, in float32."""
    wide = to_float32(x)
    return wide[:, :, None, :, None]
