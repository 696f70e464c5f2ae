"""Attention over a sequence that is split over devices: ring attention, or an exchange of heads for tokens.

**Ring** (Liu et al., arXiv:2310.01889). Each device keeps its queries. Keys and values rotate: each device sends its
block to the next one while it attends to it, so after `sequence − 1` steps every device has attended to all of them. In
the backward pass they rotate again, and so do their float32 gradients, which start at the next device and accumulate
until they are back. Document ids rotate with keys and values. With n = `sequence`, each array is permuted n − 1 times
forward and n − 1 times backward.

**All-to-all** (Ulysses; Jacobs et al., arXiv:2309.14509). Devices exchange heads for tokens, apply any kernel to whole
sequences of some of the heads, and exchange back: four all-to-alls forward and four backward.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
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
    backward_block,
    chunk_size,
    finalize_softmax,
    init_softmax,
    unmasked_pairs,
    update_softmax,
)
from spmd.layers.zigzag import zigzag
from spmd.plan.manual import manual_over, split_axes
from spmd.sharding.mesh import BATCH_AXES, AnyMesh

Segments = Int[Array, "batch seq"] | None
"""The document of each token of a packed sequence, as the position at which it begins; None for one document.

Tokens attend to their own document only.
"""

_PURPOSE = "context-parallel attention"
_HEADS_FIRST, _IDS = P(None, None, "sequence"), P(None, "sequence")


@dataclasses.dataclass(frozen=True)
class Ring:
    """Ring of devices and mask of the attention; a ring of one device is chunked attention."""

    options: AttentionOptions
    mesh: AnyMesh | None = None
    devices: int = 1  # the size of mesh axis `sequence`
    is_zigzag: bool = False

    def run(self, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Return `f` on each device's tokens."""
        if self.mesh is None:
            return f
        return manual_over(self.mesh, ("sequence",), f, in_specs, out_specs, purpose=_PURPOSE)

    def rotate(self, arrays: Any) -> Any:
        """Send each device's arrays to the next device."""
        path = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, "sequence", path), arrays)

    def block_pairs(self, step: int, query: Array, segments: Segments, key_segments: Segments) -> BlockPairs:
        """Return the pairs of each device's queries and the keys that it holds after `step` rotations."""
        local = query.shape[2]
        chunk = chunk_size(local // 2 if self.is_zigzag else local)
        seq, window = local * self.devices, self.options.window
        order = zigzag(seq, self.devices) if self.is_zigzag else np.arange(seq)
        starts = order.reshape(self.devices, -1)[:, ::chunk].tolist()
        key_starts = [starts[(i - step) % self.devices] for i in range(self.devices)]
        tables = [unmasked_pairs(*pair, chunk, window) for pair in zip(starts, key_starts, strict=True)]
        counts = list(map(len, tables))
        padded = [np.pad(table, ((0, max(counts) - len(table)), (0, 0))) for table in tables]
        rest = chunk, self.options, segments, key_segments
        if self.devices == 1:
            return BlockPairs(jnp.asarray(padded[0]), counts[0], *rest)
        device = jax.lax.axis_index("sequence")
        # Equal counts are static, for the compiler to know the number of iterations.
        count = counts[0] if min(counts) == max(counts) else jnp.asarray(counts)[device]
        return BlockPairs(jnp.asarray(np.stack(padded))[device], count, *rest)


def blockwise_attention(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segments: Segments,
    ring: Ring,
) -> Float[Array, "batch seq heads dim"]:
    """Compute causal attention with an online softmax, over a ring of devices or on one."""
    batch, seq, heads, dim = query.shape
    if seq % ring.devices:
        arithmetic = f"{seq} / (sequence={ring.devices}) = {seq / ring.devices:.4g}"
        problem = Problem("sequence", "does not divide", arithmetic, f"a multiple of {ring.devices}")
        raise ConfigError("The sequence does not fit the ring:", [problem])
    block = seq // ring.devices // (2 if ring.is_zigzag else 1)
    if chunk_size(block) < min(block, LARGEST_CHUNK) // 8:
        unit = seq // block * 128
        what = f"is split into blocks of {block} tokens, which divide into chunks of at most {chunk_size(block)}"
        fix = f"a multiple of {unit}: {seq // unit * unit or unit} or {(seq // unit + 1) * unit} tokens"
        raise ConfigError("Attention over such small chunks is very slow:", [Problem("sequence", what, fix=fix)])
    grouped = query.reshape(batch, seq, key.shape[2], -1, dim)
    arrays = jnp.moveaxis(grouped, 1, 2), jnp.moveaxis(key, 1, 2), jnp.moveaxis(value, 1, 2)
    return jnp.moveaxis(_attend(*arrays, segments, ring), 2, 1).reshape(batch, seq, heads, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query: Array, key: Array, value: Array, segments: Segments, ring: Ring) -> Array:
    return _forward(query, key, value, segments, ring)[0]


def _forward(query: Array, key: Array, value: Array, segments: Segments, ring: Ring) -> tuple[Array, tuple[Any, ...]]:
    def local(query: Array, key: Array, value: Array, segments: Segments) -> tuple[Array, Array]:
        softmax, block = init_softmax(query), (key, value, segments)
        for step in range(ring.devices):
            is_last = step == ring.devices - 1
            next_block = None if is_last else ring.rotate(block)
            softmax = update_softmax(ring.block_pairs(step, query, segments, block[2]), softmax, query, *block[:2])
            if not is_last:
                # Without a barrier, XLA may send all blocks before the first is used and hold them all at once.
                block, softmax = jax.lax.optimization_barrier((next_block, softmax))
        out, log_total = finalize_softmax(softmax)
        return out.astype(query.dtype), log_total

    specs = (*(_HEADS_FIRST,) * 3, _IDS)
    out, log_total = ring.run(local, specs, (_HEADS_FIRST, _HEADS_FIRST))(query, key, value, segments)
    return out, (query, key, value, segments, out, log_total)


def _backward(ring: Ring, saved: tuple[Any, ...], dout: Array) -> tuple[Array | None, ...]:
    def local(
        query: Array, key: Array, value: Array, segments: Segments, out: Array, log_total: Array, dout: Array
    ) -> tuple[Array, ...]:
        product = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(axis=-1)
        inputs = BackwardInputs(query, dout, log_total, product)
        own = (key, value, segments)
        block = own if ring.devices == 1 else ring.rotate(own)
        dquery = jnp.zeros(query.shape, jnp.float32)
        dblock: Any = None  # gradients of the block, which rotate with it
        for step in (*range(1, ring.devices), 0):
            next_block = ring.rotate(block) if 0 < step < ring.devices - 1 else own
            received = None if dblock is None else ring.rotate(dblock)
            zeros = (jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32))
            pairs = ring.block_pairs(step, query, segments, block[2])
            dquery, *parts = backward_block(pairs, inputs, (dquery, *zeros), *block[:2])
            dblock = tuple(parts) if received is None else jax.tree.map(jnp.add, received, tuple(parts))
            if step:
                block, dquery, dblock = jax.lax.optimization_barrier((next_block, dquery, dblock))
        return tuple(d.astype(x.dtype) for d, x in zip((dquery, *dblock), (query, key, value), strict=True))

    specs = (*(_HEADS_FIRST,) * 3, _IDS, *(_HEADS_FIRST,) * 3)
    return *ring.run(local, specs, (_HEADS_FIRST,) * 3)(*saved, dout), None


_attend.defvjp(_forward, _backward)


def ulysses_attention(
    kernel: Callable[..., Array],
    mesh: AnyMesh,
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segments: Segments,
) -> Float[Array, "batch seq heads dim"]:
    """Apply a kernel `(query, key, value, segments) -> output` to whole sequences, with heads split instead."""
    split = split_axes(mesh)
    parts = {axis: mesh.shape[axis] for axis in ("tensor", "sequence") if axis in split}
    product, count = " × ".join(f"{axis}={size}" for axis, size in parts.items()), math.prod(parts.values())
    what = "do not divide over the devices of one sequence"
    fix = 'context "ring", which splits no heads over sequence' if "sequence" in parts else "a smaller mesh.tensor"
    problems = [
        Problem(name, what, f"{heads} / ({product}) = {heads / count:.4g}", fix)
        for name, heads in (("query heads", query.shape[2]), ("key/value heads", key.shape[2]))
        if heads % count
    ]
    if query.shape[1] % parts.get("sequence", 1):
        arithmetic = f"{query.shape[1]} / (sequence={parts['sequence']}) = {query.shape[1] / parts['sequence']:.4g}"
        problems.append(Problem("tokens", "do not divide over mesh.sequence", arithmetic, "mesh.sequence of 1"))
    if problems:
        raise ConfigError("Heads cannot be split over devices:", problems)

    def exchange(x: Array, split: int, join: int) -> Array:
        return jax.lax.all_to_all(x, "sequence", split, join, tiled=True) if "sequence" in parts else x

    def local(query: Array, key: Array, value: Array, segments: Segments) -> Array:
        return exchange(kernel(*(exchange(x, 2, 1) for x in (query, key, value)), segments), 1, 2)

    # Batch axes are manual too: otherwise the compiler gathers the batch around an all-to-all.
    batch = tuple(axis for axis in BATCH_AXES if axis in split)
    tokens = P(batch or None, *(axis if axis in parts else None for axis in ("sequence", "tensor")))
    specs = (tokens, tokens, tokens, P(batch or None))
    return manual_over(mesh, (*batch, *parts), local, specs, tokens, purpose=_PURPOSE)(query, key, value, segments)
