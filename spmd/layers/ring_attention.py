"""Attention over a sequence split over devices: a ring, or all-to-alls of heads for tokens.

**Ring** (Liu et al., arXiv:2310.01889). Each device keeps its queries. Keys and values rotate: each
device sends its block to the next one while it attends to it, so after `sequence − 1` steps every
device has attended to all of them. In the backward pass they rotate again, and so do their float32
gradients, which start at the next device and accumulate until they are back. Document ids rotate
with keys and values. With n = `sequence`, each array is permuted n − 1 times forward and n − 1
times backward.

**All-to-all** (Ulysses; Jacobs et al., arXiv:2309.14509). Devices exchange heads for tokens, apply
any kernel to whole sequences of some of the heads, and exchange back: four all-to-alls forward and
four backward.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from spmd.errors import ConfigError, Problem
from spmd.layers.attention_options import AttentionOptions
from spmd.layers.blockwise_attention import (
    LARGEST_CHUNK,
    BackwardInputs,
    BlockPairs,
    OnlineSoftmax,
    backward_block,
    chunk_size,
    finalize_softmax,
    init_softmax,
    sinks_gradient,
    unmasked_pairs,
    update_softmax,
)
from spmd.layers.zigzag import zigzag
from spmd.plan.manual import permute, shard_map_over, split_axes
from spmd.sharding.mesh import BATCH_AXES, AnyMesh

Sinks = Float[Array, "heads"] | None
"""A logit of each query head, float32: a score without a key and a value in the softmax of every
query (Xiao et al., arXiv:2309.17453; gpt-oss); None for none."""

Segments = Int[Array, "batch seq"] | None
"""The document of each token of a packed sequence; None for one document.

The id of a document is the position of its first token. Tokens attend to their own document only.
"""

_PURPOSE = "context-parallel attention"
_HEADS_FIRST = P(None, None, "sequence")  # [batch, kv_heads, seq, …]
_IDS = P(None, "sequence")  # [batch, seq]


@dataclasses.dataclass(frozen=True)
class Ring:
    """Ring of devices and mask of the attention; a ring of one device is chunked attention."""

    options: AttentionOptions
    mesh: AnyMesh | None = None
    devices: int = 1  # the size of mesh axis `sequence`
    is_zigzag: bool = False

    def run(self, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Return `f` mapped over devices, each with its own tokens."""
        if self.mesh is None:
            return f
        return shard_map_over(self.mesh, ("sequence",), f, in_specs, out_specs, purpose=_PURPOSE)

    def rotate(self, arrays: Any) -> Any:
        """Send each device's arrays to the next device."""
        path = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda x: permute(x, "sequence", path), arrays)

    def block(self, local: int) -> int:
        """Return the number of contiguous tokens in a block, for `local` tokens of a device."""
        if self.is_zigzag:
            return local // 2
        return local

    def block_pairs(
        self, step: int, query: Array, segments: Segments, key_segments: Segments
    ) -> BlockPairs:
        """Return the pairs of a device's queries with the keys it holds after `step` rotations."""
        local = query.shape[2]
        chunk = chunk_size(self.block(local))
        tables = self._tables(step, local, chunk)
        counts = [len(table) for table in tables]
        most = max(counts)
        padded = [np.pad(table, ((0, most - len(table)), (0, 0))) for table in tables]
        pairs = functools.partial(
            BlockPairs,
            chunk=chunk,
            options=self.options,
            query_segments=segments,
            key_segments=key_segments,
        )
        if self.devices == 1:
            return pairs(jnp.asarray(padded[0]), counts[0])
        device = jax.lax.axis_index("sequence")
        # Equal counts are static, for the compiler to know the number of iterations.
        count: Any = most
        if min(counts) < most:
            count = jnp.asarray(counts)[device]
        table = jnp.asarray(np.stack(padded))[device]
        return pairs(table, count)

    def _tables(self, step: int, local: int, chunk: int) -> list[np.ndarray]:
        """Return the unmasked pairs of each device after `step` rotations."""
        seq = local * self.devices
        order = zigzag(seq, self.devices) if self.is_zigzag else np.arange(seq)
        starts = order.reshape(self.devices, -1)[:, ::chunk].tolist()
        tables = []
        for device, query_starts in enumerate(starts):
            key_starts = starts[(device - step) % self.devices]
            table = unmasked_pairs(query_starts, key_starts, chunk, self.options.window)
            tables.append(table)
        return tables


def blockwise_attention(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    segments: Segments,
    sinks: Sinks,
    ring: Ring,
) -> Float[Array, "batch seq heads value_dim"]:
    """Compute causal attention with an online softmax, over a ring of devices or on one."""
    batch, seq, heads, dim = query.shape
    _check_sequence(seq, ring)
    grouped = query.reshape(batch, seq, key.shape[2], -1, dim)
    if sinks is not None:
        sinks = sinks.reshape(1, key.shape[2], 1, -1)
    # Heads first: [batch, kv_heads, seq, group, dim] and [batch, kv_heads, seq, dim].
    arrays = [jnp.moveaxis(x, 1, 2) for x in (grouped, key, value)]
    out = _attend(*arrays, segments, sinks, ring)
    out = jnp.moveaxis(out, 2, 1)
    return out.reshape(batch, seq, heads, -1)


def _check_sequence(seq: int, ring: Ring) -> None:
    """Raise an error if a sequence does not fit a ring, or only in chunks of few tokens."""
    if seq % ring.devices:
        problem = Problem(
            "sequence",
            "does not divide",
            f"{seq} / (sequence={ring.devices}) = {seq / ring.devices:.4g}",
            f"a multiple of {ring.devices}",
        )
        raise ConfigError("The sequence does not fit the ring:", [problem])
    block = ring.block(seq // ring.devices)
    chunk = chunk_size(block)
    if chunk >= min(block, LARGEST_CHUNK) // 8:
        return
    unit = seq // block * 128
    below = seq // unit * unit or unit
    above = (seq // unit + 1) * unit
    problem = Problem(
        "sequence",
        f"is split into blocks of {block} tokens, which divide into chunks of at most {chunk}",
        fix=f"a multiple of {unit}: {below} or {above} tokens",
    )
    raise ConfigError("Attention over such small chunks is very slow:", [problem])


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    query: Array, key: Array, value: Array, segments: Segments, sinks: Array | None, ring: Ring
) -> Array:
    return _forward(query, key, value, segments, sinks, ring)[0]


def _forward(
    query: Array, key: Array, value: Array, segments: Segments, sinks: Array | None, ring: Ring
) -> tuple[Array, tuple[Any, ...]]:
    local = functools.partial(_forward_on_device, ring)
    in_specs = (_HEADS_FIRST, _HEADS_FIRST, _HEADS_FIRST, _IDS, P())
    run = ring.run(local, in_specs, (_HEADS_FIRST, _HEADS_FIRST))
    out, log_total = run(query, key, value, segments, sinks)
    return out, (query, key, value, segments, sinks, out, log_total)


def _forward_on_device(
    ring: Ring,
    query: Array,
    key: Array,
    value: Array,
    segments: Segments,
    sinks: Array | None,
) -> tuple[Array, Array]:
    """Return the output of a device's queries, and the log-sum-exp of their scores."""

    def update(step: int, softmax: OnlineSoftmax, block: tuple[Array, Array, Segments]) -> Any:
        held_key, held_value, held_segments = block
        pairs = ring.block_pairs(step, query, segments, held_segments)
        return update_softmax(pairs, softmax, query, held_key, held_value)

    softmax = init_softmax(query, value.shape[-1], sinks)
    block = (key, value, segments)
    last = ring.devices - 1
    for step in range(last):
        next_block = ring.rotate(block)
        softmax = update(step, softmax, block)
        # Without a barrier, XLA may send all blocks before the first is used and hold them all at
        # once.
        block, softmax = jax.lax.optimization_barrier((next_block, softmax))
    softmax = update(last, softmax, block)
    out, log_total = finalize_softmax(softmax)
    return out.astype(query.dtype), log_total


def _backward(ring: Ring, saved: tuple[Any, ...], dout: Array) -> tuple[Array | None, ...]:
    local = functools.partial(_backward_on_device, ring)
    arrays = (_HEADS_FIRST,) * 3
    run = ring.run(local, (*arrays, _IDS, *arrays), arrays)
    query, key, value, segments, sinks, out, log_total = saved
    gradients = run(query, key, value, segments, out, log_total, dout)
    dsinks = None
    if sinks is not None:
        dsinks = sinks_gradient(sinks, log_total, out, dout)
    return *gradients, None, dsinks


def _backward_on_device(
    ring: Ring,
    query: Array,
    key: Array,
    value: Array,
    segments: Segments,
    out: Array,
    log_total: Array,
    dout: Array,
) -> tuple[Array, ...]:
    """Return the gradients of a device's queries, keys and values."""
    product = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(axis=-1)
    inputs = BackwardInputs(query, dout, log_total, product)
    own = (key, value, segments)
    block = own if ring.devices == 1 else ring.rotate(own)
    dquery = jnp.zeros(query.shape, jnp.float32)
    dblock: Any = None  # gradients of the block, which rotate with it
    for step in (*range(1, ring.devices), 0):
        next_block = own
        if 0 < step < ring.devices - 1:
            next_block = ring.rotate(block)
        received = None
        if dblock is not None:
            received = ring.rotate(dblock)
        dkey = jnp.zeros(key.shape, jnp.float32)
        dvalue = jnp.zeros(value.shape, jnp.float32)
        held_key, held_value, held_segments = block
        pairs = ring.block_pairs(step, query, segments, held_segments)
        gradients = (dquery, dkey, dvalue)
        dquery, dkey, dvalue = backward_block(pairs, inputs, gradients, held_key, held_value)
        dblock = (dkey, dvalue)
        if received is not None:
            dblock = jax.tree.map(jnp.add, received, dblock)
        if step:
            kept = (next_block, dquery, dblock)
            block, dquery, dblock = jax.lax.optimization_barrier(kept)
    dkey, dvalue = dblock
    return dquery.astype(query.dtype), dkey.astype(key.dtype), dvalue.astype(value.dtype)


_attend.defvjp(_forward, _backward)


def ulysses_attention(
    kernel: Callable[..., Array],
    mesh: AnyMesh,
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    segments: Segments,
    sinks: Sinks,
) -> Float[Array, "batch seq heads value_dim"]:
    """Apply a kernel to whole sequences of some heads: heads are split in place of tokens.

    The kernel is `(query, key, value, segments, sinks) -> output`.
    """
    split = split_axes(mesh)
    parts: dict[str, int] = {}
    for axis in ("tensor", "sequence"):
        if axis in split:
            parts[axis] = mesh.shape[axis]
    check_division(query, key, parts)
    local = kernel
    if "sequence" in parts:
        local = functools.partial(_exchange_heads, kernel)
    # Batch axes are manual too: otherwise the compiler gathers the batch around an all-to-all.
    batch = tuple(axis for axis in BATCH_AXES if axis in split)
    names = {axis: axis for axis in parts}
    tokens = P(batch or None, names.get("sequence"), names.get("tensor"))
    # `tensor` splits heads first, and the exchange splits its parts further.
    heads = P(tuple(parts))
    in_specs = (tokens, tokens, tokens, P(batch or None), heads)
    run = shard_map_over(mesh, (*batch, *parts), local, in_specs, tokens, purpose=_PURPOSE)
    return run(query, key, value, segments, sinks)


def check_division(query: Array, key: Array, parts: Mapping[str, int]) -> None:
    """Raise an error unless heads and tokens divide over devices.

    Args:
        parts: Axis that splits heads → its size.

    Raises:
        ConfigError: A problem for each number that does not divide.
    """
    problems = []
    product = " × ".join(f"{axis}={size}" for axis, size in parts.items())
    count = math.prod(parts.values())
    fix = "a smaller mesh.tensor"
    if "sequence" in parts:
        fix = 'context "ring", which splits no heads over sequence'
    for name, heads in (("query heads", query.shape[2]), ("key/value heads", key.shape[2])):
        if heads % count:
            problem = Problem(
                name,
                "do not divide over the devices of one sequence",
                f"{heads} / ({product}) = {heads / count:.4g}",
                fix,
            )
            problems.append(problem)
    seq = query.shape[1]
    size = parts.get("sequence", 1)
    if seq % size:
        problem = Problem(
            "tokens",
            "do not divide over mesh.sequence",
            f"{seq} / (sequence={size}) = {seq / size:.4g}",
            "mesh.sequence of 1",
        )
        problems.append(problem)
    if problems:
        raise ConfigError("Heads cannot be split over devices:", problems)


def _exchange_heads(
    kernel: Callable[..., Array],
    query: Array,
    key: Array,
    value: Array,
    segments: Segments,
    sinks: Sinks,
) -> Array:
    """Exchange heads for tokens, apply a kernel to whole sequences, and exchange back."""
    exchange = functools.partial(jax.lax.all_to_all, axis_name="sequence", tiled=True)
    whole = [exchange(x, split_axis=2, concat_axis=1) for x in (query, key, value)]
    out = kernel(*whole, segments, sinks)
    return exchange(out, split_axis=1, concat_axis=2)
