"""Causal depthwise convolution over a few tokens, before recurrent mixers and in LFM 2.

Each channel is a weighted sum of its last `width` inputs, in PyTorch's order of weights
(`torch.nn.Conv1d` with `groups=channels`, transposed):

```
out[t] = activation(bias + Σ_i kernel[i] · x[t − width + 1 + i])
```

`short_convolution` computes a sequence and `short_convolution_step` the next token. The state is
the last `width − 1` inputs. Qwen 3 Next (`linear_conv_kernel_dim`) and Mamba 2 (`conv_kernel`) have
a width of 4 and SiLU, LFM 2 (`conv_L_cache`) a width of 3 and no activation.

Memory: the backward pass saves the inputs only. As sums of shifted inputs, the convolution has no
matmuls and no collectives over batch and channels. A sequence split over the mesh axis `sequence`
is not supported.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spmd.errors import ConfigError, Problem
from spmd.layers.recurrence import document_starts, mask_tokens, to_float32

Activation = Callable[[Array], Array]


def short_convolution(
    x: Float[Array, "batch seq channels"],
    kernel: Float[Array, "width channels"],
    bias: Float[Array, "channels"] | None = None,
    *,
    activation: Activation | None = None,
    state: Float[Array, "batch width-1 channels"] | None = None,
    segments: Int[Array, "batch seq"] | None = None,
    valid: Bool[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch width-1 channels"]]:
    """Return the output of each token, and the last `width − 1` inputs, both in `x`'s dtype.

    Sums and the activation are float32.

    Args:
        x: Inputs.
        kernel: Weights; the last row is of the token itself.
        bias: Added before the activation; None for none.
        activation: A function such as `jax.nn.silu`; None for none.
        state: The inputs before the first token; None for zeros.
        segments: The document of each token. Inputs of other documents count as zeros; the first
            document of a row continues `state`.
        valid: False for padding, which is passed over: the inputs before a token are the valid ones
            before it. Its output is zero.

    Raises:
        ConfigError: `state` is not of `width − 1` inputs.

    Example:
        >>> x = jnp.array([[[1.0], [2.0], [3.0]]])
        >>> out, state = short_convolution(x, jnp.array([[10.0], [1.0]]))
        >>> out.ravel().tolist(), state.ravel().tolist()
        ([1.0, 12.0, 23.0], [3.0])
    """
    before = kernel.shape[0] - 1
    if state is None:
        state = jnp.zeros((x.shape[0], before, x.shape[-1]), x.dtype)
    _check_state(state, before)
    count = None
    if valid is not None:
        # Valid tokens first, in their order: padding may be anywhere.
        order = jnp.argsort(~valid, axis=1, stable=True)
        count = valid.sum(axis=1)
        x = _take(mask_tokens(x, valid), order)
        if segments is not None:
            segments = _take(segments, order)
    inputs = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    documents = None
    if segments is not None:
        starts = document_starts(segments)
        numbers = jnp.cumsum(starts, axis=1)
        documents = jnp.pad(numbers, [(0, 0), (before, 0)])
    convolve = jax.checkpoint(_convolve, static_argnums=4)
    out = convolve(inputs, kernel, bias, documents, activation)
    if valid is not None:
        rank = jnp.cumsum(valid, axis=1) - 1
        out = mask_tokens(_take(out, rank), valid)
    return out, _last_inputs(inputs, documents, count, before)


def _check_state(state: Array, before: int) -> None:
    """Check the length of a state.

    Raises:
        ConfigError: It is another one.
    """
    if state.shape[1] == before:
        return
    what = f"has {state.shape[1]} inputs"
    detail = f"a kernel of width {before + 1} reads {before} preceding inputs"
    raise ConfigError("Invalid short convolution:", [Problem("state", what, detail)])


def _take(x: Array, tokens: Int[Array, "batch seq"]) -> Array:
    """Return some tokens of each row of `x`, `[batch, seq, …]`; the nearest one for one outside."""
    take_row = functools.partial(jnp.take, axis=0, mode="clip")
    take_rows = jax.vmap(take_row)
    return take_rows(x, tokens)


def _convolve(
    inputs: Float[Array, "batch length channels"],
    kernel: Float[Array, "width channels"],
    bias: Float[Array, "channels"] | None,
    documents: Int[Array, "batch length"] | None,
    activation: Activation | None,
) -> Float[Array, "batch seq channels"]:
    """Return the outputs of all inputs but the first `width − 1`."""
    width = kernel.shape[0]
    seq = inputs.shape[1] - width + 1
    weights = to_float32(kernel)
    total = jnp.zeros((), jnp.float32)
    for first in range(width):
        tokens = slice(first, first + seq)
        window = inputs[:, tokens]
        if documents is not None:
            same = documents[:, tokens] == documents[:, width - 1 :]
            window = mask_tokens(window, same)
        tap = weights[first]
        total += tap[None, None] * window
    if bias is not None:
        total += to_float32(bias)[None, None]
    if activation is not None:
        total = activation(total)
    return total.astype(inputs.dtype)


def _last_inputs(
    inputs: Float[Array, "batch length channels"],
    documents: Int[Array, "batch length"] | None,
    count: Int[Array, "batch"] | None,
    before: int,
) -> Float[Array, "batch width-1 channels"]:
    """Return the state after the first `count` tokens of each row, or after all."""
    if before == 0:
        return inputs[:, :0]
    if count is None:
        count = jnp.full(inputs.shape[:1], inputs.shape[1] - before)
    tokens = count[:, None] + jnp.arange(before)[None]
    state = _take(inputs, tokens)
    if documents is None:
        return state
    numbers = _take(documents, tokens)
    same = numbers == numbers[:, -1:]
    return mask_tokens(state, same)


def short_convolution_step(
    x: Float[Array, "batch channels"],
    kernel: Float[Array, "width channels"],
    bias: Float[Array, "channels"] | None = None,
    *,
    state: Float[Array, "batch width-1 channels"],
    activation: Activation | None = None,
    valid: Bool[Array, "batch"] | None = None,
) -> tuple[Float[Array, "batch channels"], Float[Array, "batch width-1 channels"]]:
    """Return the output of one token of each row, and the state after it.

    Args are those of `short_convolution`. A row that is not `valid` keeps its state.

    Raises:
        ConfigError: `state` is not of `width − 1` inputs.
    """
    _check_state(state, kernel.shape[0] - 1)
    inputs = jnp.concatenate([state.astype(x.dtype), x[:, None]], axis=1)
    out = _convolve(inputs, kernel, bias, None, activation)
    new_state = inputs[:, 1:]
    if valid is not None:
        new_state = jnp.where(valid[:, None, None], new_state, state.astype(x.dtype))
    return out[:, 0], new_state
