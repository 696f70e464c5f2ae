"""Attention over a sequence that is split over devices: keys and values go around a ring, or heads for tokens.

**Ring** (Liu et al., arXiv:2310.01889). Each device keeps its queries. Keys and values travel to the next device while
those that are there are attended to; after `sequence − 1` turns every device has seen all of them. The backward pass
sends them around once more, and their gradients along with them: these begin one device further and add up until they
come home. With n = `sequence`, one layer takes

| | permutes of keys and of values | of their gradients, float32 | of document ids, where there are some |
|---|---|---|---|
| forward | n − 1 each | | n − 1 |
| backward | n − 1 each | n − 1 each | n − 1 |

**All-to-all** (Jacobs et al., arXiv:2309.14509). Devices exchange heads for tokens, attend to whole sequences of some
of the heads with any kernel, and exchange back: four all-to-alls forward and four backward.
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
from jax.sharding import get_abstract_mesh
from jaxtyping import Array, Float, Int

from spmd.errors import ConfigError, Problem
from spmd.layers.blockwise_attention import (
    Backward,
    BlockPairs,
    backward_block,
    chunk_of,
    finalize_softmax,
    init_softmax,
    is_awkward,
    update_softmax,
    visible_pairs,
)
from spmd.layers.zigzag import zigzag
from spmd.plan.annotate import manual_over
from spmd.sharding.mesh import BATCH_AXES, AnyMesh

Segments = Int[Array, "batch seq"] | None
"""The document of each token, where several share a sequence; tokens of different documents do not see each other."""

_QUERY, _KEY, _IDS = P(None, None, "sequence"), P(None, None, "sequence"), P(None, "sequence")


@dataclasses.dataclass(frozen=True)
class Ring:
    """Who sees what, and where the keys are at each turn. A ring of one device is chunked attention.

    Attributes:
        mesh: The mesh, of more than one device along `sequence`; None for a ring of one.
        devices: Along `sequence`.
        is_balanced: Whether tokens are in zigzag order.
        window: How many tokens each one sees, itself included; None for all before it.
        soft_cap: The cap of scores; None for none.
    """

    mesh: AnyMesh | None = None
    devices: int = 1
    is_balanced: bool = False
    window: int | None = None
    soft_cap: float | None = None

    def run(self, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`f` on each device's tokens."""
        return f if self.mesh is None else manual_over(self.mesh, ("sequence",), f, in_specs, out_specs)

    def rotate(self, arrays: Any) -> Any:
        """What each device holds, sent to the next."""
        path = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, "sequence", path), arrays)

    def visit(self, turn: int, query: Array, segments: Segments, key_segments: Segments) -> BlockPairs:
        """What each device's queries see of the keys that are there after so many turns."""
        local = query.shape[2]
        chunk = chunk_of(local // 2 if self.is_balanced else local)
        seq = local * self.devices
        order = zigzag(seq, self.devices) if self.is_balanced else np.arange(seq)
        starts = order.reshape(self.devices, -1)[:, ::chunk].tolist()
        tables = [
            visible_pairs(starts[i], starts[(i - turn) % self.devices], chunk, self.window) for i in range(self.devices)
        ]
        counts = [len(table) for table in tables]
        padded = [np.pad(table, ((0, max(counts) - len(table)), (0, 0))) for table in tables]
        rest = chunk, self.window, segments, key_segments, self.soft_cap
        if self.devices == 1:
            return BlockPairs(jnp.asarray(padded[0]), counts[0], *rest)
        device = jax.lax.axis_index("sequence")
        # Where all devices do the same work, the compiler is told how much.
        count = counts[0] if min(counts) == max(counts) else jnp.asarray(counts)[device]
        return BlockPairs(jnp.asarray(np.stack(padded))[device], count, *rest)


def blockwise_attention(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segments: Segments,
    ring: Ring,
) -> Float[Array, "batch seq heads dim"]:
    """Attention with online softmax: of sequences that are whole, or split over a ring of devices.

    Args:
        query: Query heads that share a key/value head are neighbours.
        key: As many heads as divide those of the queries.
        value: Like the keys.
        segments: The document of each token, or None.
        ring: The devices and the mask.

    Raises:
        ConfigError: The sequence does not divide over the ring.
    """
    batch, seq, heads, dim = query.shape
    if seq % ring.devices:
        arithmetic = f"{seq} / (sequence={ring.devices}) = {seq / ring.devices:.4g}"
        fix = f"a multiple of {ring.devices}"
        raise ConfigError("A ring cannot be formed:", [Problem("sequence", "does not divide", arithmetic, fix)])
    block = seq // ring.devices // (2 if ring.is_balanced else 1)
    if is_awkward(block):
        unit = seq // block * 128
        what = f"is cut into blocks of {block} tokens, which divide into chunks of no more than {chunk_of(block)}"
        fix = f"a multiple of {unit}: {seq // unit * unit or unit} or {(seq // unit + 1) * unit} tokens"
        raise ConfigError("A ring would take very long:", [Problem("sequence", what, fix=fix)])
    grouped = query.reshape(batch, seq, key.shape[2], -1, dim)
    arrays = jnp.moveaxis(grouped, 1, 2), jnp.moveaxis(key, 1, 2), jnp.moveaxis(value, 1, 2)
    return jnp.moveaxis(_attend(*arrays, segments, ring), 2, 1).reshape(batch, seq, heads, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query: Array, key: Array, value: Array, segments: Segments, ring: Ring) -> Array:
    return _forward(query, key, value, segments, ring)[0]


def _forward(query: Array, key: Array, value: Array, segments: Segments, ring: Ring) -> tuple[Array, tuple[Any, ...]]:
    def around(query: Array, key: Array, value: Array, segments: Segments) -> tuple[Array, Array]:
        softmax, here = init_softmax(query), (key, value, segments)
        for turn in range(ring.devices):
            is_last = turn == ring.devices - 1
            coming = None if is_last else ring.rotate(here)
            softmax = update_softmax(ring.visit(turn, query, segments, here[2]), softmax, query, *here[:2])
            if not is_last:
                # Without a barrier, all keys may be sent before the first are used, and be there at once.
                here, softmax = jax.lax.optimization_barrier((coming, softmax))
        out, log_total = finalize_softmax(softmax)
        return out.astype(query.dtype), log_total

    specs = (_QUERY, _KEY, _KEY, _IDS)
    out, log_total = ring.run(around, specs, (_QUERY, _QUERY))(query, key, value, segments)
    return out, (query, key, value, segments, out, log_total)


def _backward(ring: Ring, saved: tuple[Any, ...], dout: Array) -> tuple[Array | None, ...]:
    def around(
        query: Array, key: Array, value: Array, segments: Segments, out: Array, log_total: Array, dout: Array
    ) -> tuple[Array, ...]:
        product = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(axis=-1)
        known = Backward(query, dout, log_total, product)
        own = (key, value, segments)
        here = own if ring.devices == 1 else ring.rotate(own)
        dquery = jnp.zeros(query.shape, jnp.float32)
        travelling: Any = None
        for turn in (*range(1, ring.devices), 0):
            coming = ring.rotate(here) if 0 < turn < ring.devices - 1 else own
            arrived = None if travelling is None else ring.rotate(travelling)
            zeros = (jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32))
            visit = ring.visit(turn, query, segments, here[2])
            dquery, *parts = backward_block(visit, known, (dquery, *zeros), *here[:2])
            travelling = tuple(parts) if arrived is None else jax.tree.map(jnp.add, arrived, tuple(parts))
            if turn:
                here, dquery, travelling = jax.lax.optimization_barrier((coming, dquery, travelling))
        return tuple(d.astype(x.dtype) for d, x in zip((dquery, *travelling), (query, key, value), strict=True))

    specs = (_QUERY, _KEY, _KEY, _IDS, _QUERY, _QUERY, _QUERY)
    return *ring.run(around, specs, (_QUERY, _KEY, _KEY))(*saved, dout), None


_attend.defvjp(_forward, _backward)


def ulysses_attention(
    kernel: Callable[..., Array],
    mesh: AnyMesh,
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segments: Segments,
) -> Float[Array, "batch seq heads dim"]:
    """A kernel on whole sequences of those heads that a device has: its own of `tensor`, and its part of them where
    sequences are split over `sequence`.

    Args:
        kernel: `(query, key, value, segments)` → the output, on what one device holds.
        mesh: The mesh.
        query: The queries of all heads.
        key: The keys.
        value: The values.
        segments: The document of each token, or None; every device gets those of all its examples' tokens.

    Raises:
        ConfigError: Heads do not divide over the devices.
    """
    split = [axis for axis, n in mesh.shape.items() if n > 1 and axis not in get_abstract_mesh().manual_axes]
    parts = {axis: mesh.shape[axis] for axis in ("tensor", "sequence") if axis in split}
    product, count = " × ".join(f"{axis}={size}" for axis, size in parts.items()), math.prod(parts.values())
    problems = [
        Problem(
            what,
            "do not divide over the devices of one sequence",
            f"{heads} / ({product}) = {heads / count:.4g}",
            'context "ring", which splits no heads over sequence' if "sequence" in parts else "fewer along tensor",
        )
        for what, heads in (("query heads", query.shape[2]), ("key/value heads", key.shape[2]))
        if heads % count
    ]
    if query.shape[1] % parts.get("sequence", 1):
        arithmetic = f"{query.shape[1]} / (sequence={parts['sequence']}) = {query.shape[1] / parts['sequence']:.4g}"
        problems.append(Problem("tokens", "do not divide over mesh.sequence", arithmetic, "mesh.sequence of 1"))
    if problems:
        raise ConfigError("Heads cannot be split over devices:", problems)

    def swap(x: Array, split: int, join: int) -> Array:
        return jax.lax.all_to_all(x, "sequence", split, join, tiled=True) if "sequence" in parts else x

    def local(query: Array, key: Array, value: Array, segments: Segments) -> Array:
        return swap(kernel(*(swap(x, 2, 1) for x in (query, key, value)), segments), 1, 2)

    # Batch axes too: left to the compiler, it gathers the batch around an all-to-all.
    batch = tuple(axis for axis in BATCH_AXES if axis in split)
    held = P(batch or None, *(axis if axis in parts else None for axis in ("sequence", "tensor")))
    specs = (held, held, held, P(batch or None))
    return manual_over(mesh, (*batch, *parts), local, specs, held)(query, key, value, segments)
