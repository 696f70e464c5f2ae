"""JAX's splash attention for TPUs: whole sequences, or the queries of one device with all keys.

The kernel goes through blocks of queries and keys, and skips those whose pairs are all masked. JAX
finds these by evaluating a mask of `[seq, seq]`: 74 s for 131,072 tokens. Here they follow from the
positions of the queries, of which a block has consecutive ones.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
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
from spmd.layers.added_copies import with_added_copies
from spmd.layers.attention_options import AttentionOptions
from spmd.layers.upcast import upcast_float16
from spmd.layers.zigzag import zigzag

_BLOCKS = SplashBlocks()
_LEAST_OF_WINDOW = 512
"""Queries or keys in a block of attention in a short window, if they divide."""
_MOST_COPIES = 8
"""Gradients of all queries of a device, each for one block of keys, that are in memory at once."""
_SHORTEST = 4
"""Of an odd sequence, blocks of keys may be a fourth of the chip's: copies of more take too long."""
_WIDTH = 128
"""Of heads for which a chip's blocks of all gradients are meant; wider ones have shorter blocks."""
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


@dataclasses.dataclass(frozen=True)
class KernelBlocks:
    """Queries and keys in a block of each kernel.

    Attributes:
        query_gradient: None if the kernel of the gradients of keys and values computes those of
            queries too.
        groups: Groups of heads that run one after another.
    """

    output: _Block
    query_gradient: _Block | None
    key_gradient: _Block
    groups: int = 1

    def sizes(self, keys_at_once: int) -> splash.BlockSizes:
        """Return the blocks in JAX's form."""
        of_queries: tuple[int | None, int | None] = (None, None)
        if self.query_gradient is not None:
            of_queries = self.query_gradient
        return splash.BlockSizes(
            block_q=self.output[0],
            block_kv=self.output[1],
            block_kv_compute=min(self.output[1], keys_at_once),
            block_q_dq=of_queries[0],
            block_kv_dq=of_queries[1],
            block_q_dkv=self.key_gradient[0],
            block_kv_dkv=self.key_gradient[1],
            block_kv_dkv_compute=min(self.key_gradient[1], keys_at_once),
            use_fused_bwd_kernel=self.query_gradient is None,
        )


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
    seq, kv_heads = key.shape[1:3]
    of_kernels = kernel_blocks(blocks, seq, kv_heads, dim, queries, options.window)
    build = functools.partial(
        _kernel, blocks, of_kernels, options, residuals=residuals, interpret=interpret
    )
    unmasked = _mask_infos(seq, queries, device, of_kernels, options)
    documents = None
    if segments is not None:
        documents = splash.SegmentIds(segments, segments if key_segments is None else key_segments)
    by_head: list[Any] = [jnp.moveaxis(x, 1, 2) for x in (scaled, key, value)]
    if sinks is not None:
        rows = jnp.broadcast_to(sinks, (batch, heads))
        by_head.append(_with_float32_gradient(rows))

    of_batch = functools.partial(_of_batch, build)
    if of_kernels.query_gradient is None:
        of_batch = functools.partial(with_added_copies, of_batch)
    run = functools.partial(of_batch, (unmasked, documents))
    out = _in_groups(run, by_head, of_kernels.groups)
    return jnp.moveaxis(out, 2, 1).astype(dtype)


def _of_batch(
    build: Callable[..., Any],
    fixed: tuple[Any, Any],
    query: Array,
    key: Array,
    value: Array,
    *sinks: Array,
) -> Array:
    """Apply a kernel to each sequence of a batch.

    Args:
        build: Returns the kernel, given its unmasked blocks.
        fixed: These, and the documents or None.
    """
    unmasked, documents = fixed
    return jax.vmap(build(unmasked))(query, key, value, documents, *sinks)


def _in_groups(run: Callable[..., Array], by_head: list[Any], groups: int) -> Array:
    """Run a function of arrays `[batch, heads, …]` for groups of their heads, one after another."""
    if groups == 1:
        return run(*by_head)
    parts = []
    for x in by_head:
        batch, heads, *rest = x.shape
        part = x.reshape(batch, groups, heads // groups, *rest)
        parts.append(jnp.moveaxis(part, 1, 0))
    out = jnp.moveaxis(jax.lax.map(lambda group: run(*group), parts), 0, 1)
    batch, _, _, *rest = out.shape
    return out.reshape(batch, -1, *rest)


def _mask_infos(
    seq: int,
    queries: Queries,
    device: Array | int,
    of_kernels: KernelBlocks,
    options: AttentionOptions,
) -> tuple[Any, Any, Any]:
    """Return the unmasked blocks of the kernels for one device, in JAX's form."""
    output, query_gradient, key_gradient = _unmasked(seq, queries, options, of_kernels)
    of_queries = None
    if query_gradient is not None:
        of_queries = query_gradient.mask_info(device)
    return output.mask_info(device), of_queries, key_gradient.mask_info(device)


def _kernel(
    blocks: SplashBlocks,
    of_kernels: KernelBlocks,
    options: AttentionOptions,
    unmasked: tuple[Any, Any, Any],
    *,
    residuals: str | None,
    interpret: bool,
) -> Any:
    """Return the kernel for one device's queries of one sequence."""
    mask_function = None
    if options.causal:
        mask_function = _Mask(options.window)
    return splash_attention_kernel.SplashAttentionKernel(
        *unmasked,
        block_sizes=of_kernels.sizes(blocks.keys_at_once),
        is_mqa=False,
        save_residuals=False,
        mask_value=splash_attention_kernel.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=options.soft_cap,
        residual_checkpoint_name=residuals,
        mask_function=mask_function,
        interpret=interpret,
    )


def kernel_blocks(
    blocks: SplashBlocks, seq: int, kv_heads: int, width: int, queries: Queries, window: int | None
) -> KernelBlocks:
    """Return the blocks of the kernels for a sequence, given those of the chip.

    One kernel computes scores once for all gradients: five matmuls instead of seven. It writes a
    gradient of all queries for each block of keys, and goes through masked blocks too, which of a
    window are most.

    Args:
        width: Of a head of queries.
    """
    output = _dividing(blocks.output, seq, queries, window)
    if blocks.all_gradients is not None and window is None:
        of_queries, of_keys = blocks.all_gradients
        of_keys //= 2 ** math.ceil(math.log2(math.ceil(width / _WIDTH)))
        block = _dividing((of_queries, of_keys), seq, queries, None)
        groups = _least_groups(kv_heads, copies=seq // block[1])
        is_long = _SHORTEST * block[1] >= of_keys or block[1] == seq
        if groups is not None and is_long:
            return KernelBlocks(output, None, block, groups)
    query_gradient = _dividing(blocks.query_gradient, seq, queries, window)
    key_gradient = _dividing(blocks.key_gradient, seq, queries, window)
    return KernelBlocks(output, query_gradient, key_gradient)


def _least_groups(kv_heads: int, copies: int) -> int | None:
    """Return the least groups of heads for so many copies in turn; None if no number is enough."""
    for groups in range(1, kv_heads + 1):
        if kv_heads % groups == 0 and copies <= _MOST_COPIES * groups:
            return groups
    return None


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
    seq: int, queries: Queries, options: AttentionOptions, blocks: KernelBlocks
) -> tuple[_Blocks, _Blocks | None, _Blocks]:
    """Return the blocks of the kernels of the output, and of gradients of queries, and of keys."""
    if not options.causal:
        every = _Blocks()
        if blocks.query_gradient is None:
            return every, None, every
        return every, every, every
    positions = queries.positions(seq)

    def unmasked(block: _Block) -> _Table:
        return _unmasked_blocks(positions, seq, options.window, block)

    output = _Blocks(*_by_rows(unmasked(blocks.output)), positions)
    by_key = unmasked(blocks.key_gradient).swapaxes(1, 2)
    if blocks.query_gradient is None:
        data_next, block_mask = _whole_rows(by_key)
        query_gradient = None
    else:
        data_next, block_mask = _by_rows(by_key)
        query_gradient = _Blocks(*_by_rows(unmasked(blocks.query_gradient)), positions)
    key_gradient = _Blocks(data_next.swapaxes(2, 3), block_mask.swapaxes(2, 3), positions)
    return output, query_gradient, key_gradient


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


def _whole_rows(unmasked: _Table) -> tuple[_Table, _Table]:
    """Return `data_next` and `block_mask` of a kernel with iterations for all columns of a row.

    In a masked block it fetches the next unmasked one.
    """
    rows, columns = unmasked.shape[-2:]
    flat = unmasked.reshape(-1, rows * columns)
    places = np.where(flat > 0, np.arange(rows * columns), rows * columns)
    following = np.minimum.accumulate(places[:, ::-1], axis=-1)[:, ::-1]
    data_next = (following % columns).reshape(unmasked.shape)
    return _smallest(data_next)[:, None], unmasked[:, None]


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
