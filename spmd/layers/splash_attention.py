"""JAX's splash attention for TPUs: whole sequences, or the queries of one device with all keys.

The kernel goes through blocks of queries and keys, and skips those whose pairs are all masked. JAX
finds these by evaluating a mask of `[seq, seq]`: 74 s for 131,072 tokens. Here they follow from the
positions of the queries, of which a block has consecutive ones.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask_info,
)
from jaxtyping import Array, Float, Int

from spmd.chips import SplashBlocks
from spmd.layers.attention_options import AttentionOptions
from spmd.layers.upcast import upcast_float16
from spmd.layers.zigzag import zigzag

_BLOCKS = SplashBlocks()
_LEAST_OF_WINDOW = 512
"""Queries or keys in a block of attention in a short window, if they divide."""
_Block = tuple[int, int]
"""Queries and keys of a block."""
_Table = np.ndarray


@dataclasses.dataclass(frozen=True)
class Queries:
    """Which queries of a sequence a device has.

    Attributes:
        devices: Parts of a sequence.
        is_zigzag: The order of its tokens over devices (`spmd.layers.zigzag`).
    """

    devices: int = 1
    is_zigzag: bool = False

    def positions(self, seq: int) -> Int[np.ndarray, "devices local"]:
        """Return the position of each query of each device."""
        order = np.arange(seq)
        if self.is_zigzag:
            order = zigzag(seq, self.devices)
        return order.reshape(self.devices, -1).astype(np.int32)

    @property
    def runs(self) -> int:
        """Number of runs of consecutive tokens of all devices."""
        if self.is_zigzag:
            return 2 * self.devices
        return self.devices


_DEFAULT = AttentionOptions()
_WHOLE = Queries()


@dataclasses.dataclass(frozen=True)
class _Mask:
    """Whether queries attend to keys, by their positions; the kernel calls it."""

    window: int | None

    def __call__(self, query: Array, key: Array) -> Array:
        mask = query >= key
        if self.window is None:
            return mask
        return mask & (key > query - self.window)


def splash_attention(
    query: Float[Array, "batch local heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    segments: Int[Array, "batch local"] | None,
    sinks: Float[Array, "heads"] | None = None,
    options: AttentionOptions = _DEFAULT,
    *,
    key_segments: Int[Array, "batch seq"] | None = None,
    queries: Queries = _WHOLE,
    device: Array | int = 0,
    blocks: SplashBlocks = _BLOCKS,
    residuals: str | None = None,
    interpret: bool = False,
) -> Float[Array, "batch local heads value_dim"]:
    """Apply the kernel to the queries of one device.

    It rounds the summands of the gradient of sinks to the dtype of the queries.

    Args:
        key_segments: Documents of the keys; None for those of the queries.
        queries: Those of each device.
        device: Number of this one.
        blocks: Of the chip; smaller ones where they do not divide the sequence.
        residuals: Checkpoint name of the output and of the log-sum-exp of the scores.
        interpret: Run it without a TPU, for tests.
    """
    batch, _, heads, dim = query.shape
    dtype = query.dtype
    query, key, value = upcast_float16(query, key, value)
    scaled = (query.astype(jnp.float32) * dim**-0.5).astype(query.dtype)
    kernel = _kernel(key.shape[1], queries, device, blocks, options, residuals, interpret)
    documents = None
    if segments is not None:
        documents = splash.SegmentIds(segments, segments if key_segments is None else key_segments)
    arguments: list[Any] = [jnp.moveaxis(x, 1, 2) for x in (scaled, key, value)]
    arguments.append(documents)
    if sinks is not None:
        rows = jnp.broadcast_to(sinks, (batch, heads))
        arguments.append(_with_float32_gradient(rows))
    out = jax.vmap(kernel)(*arguments)
    return jnp.moveaxis(out, 2, 1).astype(dtype)


def _kernel(
    seq: int,
    queries: Queries,
    device: Array | int,
    blocks: SplashBlocks,
    options: AttentionOptions,
    residuals: str | None,
    interpret: bool,
) -> Any:
    """Return the kernel for one device's queries of one sequence."""
    output = _dividing(blocks.output, seq, queries, options.window)
    query_gradient = _dividing(blocks.query_gradient, seq, queries, options.window)
    key_gradient = _dividing(blocks.key_gradient, seq, queries, options.window)
    sizes = splash.BlockSizes(
        block_q=output[0],
        block_kv=output[1],
        block_kv_compute=min(output[1], blocks.keys_at_once),
        block_q_dq=query_gradient[0],
        block_kv_dq=query_gradient[1],
        block_q_dkv=key_gradient[0],
        block_kv_dkv=key_gradient[1],
        block_kv_dkv_compute=min(key_gradient[1], blocks.keys_at_once),
    )
    mask_function = None
    if options.causal:
        mask_function = _Mask(options.window)
    infos = _unmasked(seq, queries, options, (output, query_gradient, key_gradient))
    return splash_attention_kernel.SplashAttentionKernel(
        *(info.mask_info(device) for info in infos),
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=False,
        mask_value=splash_attention_kernel.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=options.soft_cap,
        residual_checkpoint_name=residuals,
        mask_function=mask_function,
        interpret=interpret,
    )


def _dividing(block: _Block, seq: int, queries: Queries, window: int | None) -> _Block:
    """Return a block for runs of queries, and for all keys: each number, halved until it divides.

    It is not much longer than a window, for blocks are skipped whole.
    """
    longest = seq
    if window is not None:
        longest = max(window, _LEAST_OF_WINDOW)
    sizes = []
    for size, length in zip(block, (seq // queries.runs, seq), strict=True):
        while length % size or size > longest:
            size //= 2
        sizes.append(size)
    return sizes[0], sizes[1]


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Unmasked blocks of each device, as one kernel goes through them; None for all blocks.

    Attributes:
        data_next: Block of keys (of queries in the kernel of gradients of keys) to fetch in each
            iteration, `[device, 1, rows, columns]`.
        block_mask: 0 if the iteration has nothing to do, `[device, 1, rows, columns]`.
        positions: Of queries, `[device, local]`.
    """

    data_next: _Table | None = None
    block_mask: _Table | None = None
    positions: _Table | None = None

    def mask_info(self, device: Array | int) -> Any:
        """Return the blocks of a device in JAX's form, without stored masks."""

        def own(table: _Table | None) -> Any:
            if table is None:
                return None
            return jnp.asarray(table)[device]

        return splash_attention_mask_info.MaskInfo(
            data_next=own(self.data_next),
            mask_next=None,
            block_mask=own(self.block_mask),
            partial_mask_blocks=None,
            q_sequence=own(self.positions),
        )


@functools.lru_cache(maxsize=32)
def _unmasked(
    seq: int, queries: Queries, options: AttentionOptions, blocks: tuple[_Block, _Block, _Block]
) -> tuple[_Blocks, _Blocks, _Blocks]:
    """Return the blocks of the kernels of the output, and of gradients of queries, and of keys."""
    if not options.causal:
        return (_Blocks(),) * 3
    positions = queries.positions(seq)
    output, query_gradient, key_gradient = (
        _unmasked_blocks(positions, seq, options.window, block) for block in blocks
    )
    data_next, block_mask = _by_rows(key_gradient.swapaxes(1, 2))
    return (
        _Blocks(*_by_rows(output), positions),
        _Blocks(*_by_rows(query_gradient), positions),
        _Blocks(data_next.swapaxes(2, 3), block_mask.swapaxes(2, 3), positions),
    )


def _unmasked_blocks(
    positions: _Table, seq: int, window: int | None, block: _Block
) -> Int[np.ndarray, "devices query_blocks key_blocks"]:
    """Return 1 for unmasked blocks, in part or whole, else 0."""
    block_of_queries, block_of_keys = block
    first = positions[:, ::block_of_queries, None]
    keys = np.arange(0, seq, block_of_keys)
    is_unmasked = keys <= first + block_of_queries - 1
    if window is not None:
        is_unmasked &= keys + block_of_keys - 1 > first - window
    return is_unmasked.astype(np.int8)


def _by_rows(unmasked: _Table) -> tuple[_Table, _Table]:
    """Return the columns of unmasked blocks in each row, as `data_next`, and `block_mask`.

    Rows are as long as the longest one of all devices. Iterations after the end of a row have
    nothing to do, and fetch the first block of the next row.
    """
    counts = unmasked.sum(axis=-1)
    width = counts.max()
    columns = np.argsort(1 - unmasked, axis=-1, kind="stable")[..., :width]
    is_row = np.arange(width) < counts[..., None]
    following = np.roll(columns[..., :1], -1, axis=-2)
    data_next = np.where(is_row, columns, following)
    return _smallest(data_next)[:, None], is_row.astype(np.int8)[:, None]


def _smallest(table: _Table) -> _Table:
    """Cast to the smallest integers, since a TPU has 1 MiB of memory for scalars."""
    for dtype in (np.int8, np.int16):
        if table.max() <= np.iinfo(dtype).max:
            return table.astype(dtype)
    return table.astype(np.int32)


@jax.custom_vjp
def _with_float32_gradient(x: Array) -> Array:
    """Return `x` itself; its gradient is float32, which splash attention returns in 16 bits."""
    return x


def _float32_forward(x: Array) -> tuple[Array, None]:
    return x, None


def _float32_backward(_: None, gradient: Array) -> tuple[Array]:
    return (gradient.astype(jnp.float32),)


_with_float32_gradient.defvjp(_float32_forward, _float32_backward)
