"""State-space layer with scalar decay for each head: the token mixer of Mamba 2.

For each head, with a state S `[head_dim, state_dim]` and a step size dt of each token (Dao & Gu,
"Transformers are SSMs", arXiv:2405.21060, section 7):

```
S ← exp(dt · a) S + dt · x bᵀ
y = S c + d · x
```

`state_space_scan` computes a sequence by matmuls over chunks of tokens (SSD, section 6), and
`state_space_step` the next token. As in attention, c stands for queries, b for keys and x for
values.

Memory: the backward pass saves its inputs and, for each chunk, one float32 state,
`4 · batch · heads · head_dim · state_dim` bytes; everything else is recomputed chunk by chunk. With
80 heads of 64 × 128 (Mamba 2 2.7B) and 8,192 tokens, that is 64 states of 2.5 MiB = 160 MiB for
each row.
"""

from typing import Any

import jax.numpy as jnp
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

_TITLE = "Invalid state-space layer:"
_SHARED = "groups of b and c"


def state_space_scan(
    x: Float[Array, "batch seq heads head_dim"],
    dt: Float[Array, "batch seq heads"],
    a: Float[Array, "heads"],
    b: Float[Array, "batch seq groups state_dim"],
    c: Float[Array, "batch seq groups state_dim"],
    d: Float[Array, "heads"] | None = None,
    *,
    state: Float[Array, "batch heads head_dim state_dim"] | None = None,
    segments: Int[Array, "batch seq"] | None = None,
    valid: Bool[Array, "batch seq"] | None = None,
    chunk: int = CHUNK,
) -> tuple[
    Float[Array, "batch seq heads head_dim"], Float[Array, "batch heads head_dim state_dim"]
]:
    """Return the output of each token, and the float32 state after the last one.

    Matmuls are in `x`'s dtype with float32 sums; states and decays are float32. The result does not
    depend on `chunk` but for rounding.

    Args:
        x: Inputs.
        dt: Step sizes, at least 0, with their bias, softplus and limits applied.
        a: Rates of decay, below 0: `-exp(A_log)`.
        b: Directions in which inputs are written, one group for `heads / groups` consecutive heads.
        c: Directions in which the state is read.
        d: Factors of the inputs in the output; None for none.
        state: The state before the first token; None for zeros.
        segments: The document of each token. The state is zero at each document's start, but for
            the first document of a row, which continues `state`.
        valid: False for padding, which leaves the state unchanged and has an output of zero.
        chunk: The number of tokens of a chunk.

    Raises:
        ConfigError: `groups` does not divide `heads`, or `chunk` is below 1.

    Example:
        >>> ones = jnp.ones((1, 3, 1, 1))  # three tokens, one head
        >>> half = jnp.log(jnp.array([0.5]))
        >>> y, state = state_space_scan(ones, ones[..., 0], half, ones, ones)
        >>> y.ravel().tolist()
        [1.0, 1.5, 1.75]
    """
    heads = x.shape[2]
    groups = b.shape[2]
    check_heads(_TITLE, heads, groups, _SHARED, chunk)
    if state is None:
        state = jnp.zeros((x.shape[0], heads, x.shape[-1], b.shape[-1]), jnp.float32)
    starts = None
    if segments is not None:
        starts = document_starts(segments, valid)
    tokens = tuple(mask_tokens(array, valid) for array in (x, dt, b, c))

    def body(state: Array, tokens: Any) -> tuple[Array, Array]:
        inputs, *_ = tokens
        out, state = _chunk(state, a, *tokens)
        out = merge_heads(out)
        if d is not None:
            skip = to_float32(d)
            out += skip[None, :, None, None] * inputs
        return state, out.astype(x.dtype)

    grouped = group_heads(to_float32(state), groups)
    out, grouped = scan_chunks(body, grouped, (*tokens, starts), chunk)
    return out, merge_heads(grouped)


def _chunk(
    state: Float[Array, "batch groups group head_dim state_dim"],
    a: Float[Array, "heads"],
    x: Float[Array, "batch heads chunk head_dim"],
    dt: Float[Array, "batch heads chunk"],
    b: Float[Array, "batch groups chunk state_dim"],
    c: Float[Array, "batch groups chunk state_dim"],
    starts: Bool[Array, "batch chunk"] | None,
) -> tuple[Float[Array, "batch groups group chunk head_dim"], Array]:
    """Return the outputs of a chunk's tokens without `d`, and the state after them."""
    groups = b.shape[1]
    dtype = x.dtype
    steps = to_float32(dt)
    rates = to_float32(a)
    logarithms = steps * rates[None, :, None]
    decay = chunk_decay(group_heads(logarithms, groups), starts)
    inputs = group_heads(steps[..., None] * x, groups)

    scores = product("bgin,bgjn->bgij", c, b, dtype)
    decayed_scores = scores[:, :, None] * decay.pairs
    from_chunk = product("bgrij,bgrjp->bgrip", decayed_scores, inputs, dtype)
    from_state = product("bgin,bgrpn->bgrip", c, state, dtype)
    out = decay.start * from_state + from_chunk
    added = product("bgrip,bgin->bgrpn", decay.end * inputs, b, dtype)
    return out, decay.whole * state + added


def state_space_step(
    x: Float[Array, "batch heads head_dim"],
    dt: Float[Array, "batch heads"],
    a: Float[Array, "heads"],
    b: Float[Array, "batch groups state_dim"],
    c: Float[Array, "batch groups state_dim"],
    d: Float[Array, "heads"] | None = None,
    *,
    state: Float[Array, "batch heads head_dim state_dim"],
    valid: Bool[Array, "batch"] | None = None,
) -> tuple[Float[Array, "batch heads head_dim"], Float[Array, "batch heads head_dim state_dim"]]:
    """Return the output of one token of each row, and the state after it, computed in float32.

    Args are those of `state_space_scan`. A row that is not `valid` keeps its state.

    Raises:
        ConfigError: `groups` does not divide `heads`.
    """
    groups = b.shape[1]
    check_heads(_TITLE, x.shape[1], groups, _SHARED)
    inputs = to_float32(x)
    steps = to_float32(dt)
    rates = to_float32(a)
    decay = jnp.exp(steps * rates[None])
    scaled = group_heads(steps[..., None] * inputs, groups)
    writes = _rows(b)
    reads = _rows(c)

    # Products and sums, not matmuls: one row for each state gives a matmul unit nothing to do.
    decayed = to_float32(state) * decay[..., None, None]
    grouped = group_heads(decayed, groups)
    grouped += scaled[..., None] * writes
    out = merge_heads((grouped * reads).sum(axis=-1))
    if d is not None:
        skip = to_float32(d)
        out += skip[None, :, None] * inputs
    new_state = merge_heads(grouped)
    if valid is not None:
        new_state = jnp.where(valid[:, None, None, None], new_state, state)
    return out.astype(x.dtype), new_state


def _rows(x: Float[Array, "batch groups dim"]) -> Float[Array, "batch groups 1 1 dim"]:
    """Return b or c for products with states, in float32."""
    wide = to_float32(x)
    return wide[:, :, None, None]
