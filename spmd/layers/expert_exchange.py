"""Exchange of rows between the devices that experts are split over, pass by pass.

Each device has rows sorted by expert. In a pass it sends some of them to the devices of their experts, each of which
receives them in one buffer; the buffer goes back the same way. Numbers of rows are known to all, `[sender, receiver,
own expert]`, so each device knows which pass a row is in, and where.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from spmd.layers.router import RouterConfig
from spmd.plan.scopes import comm_scope, in_scope
from spmd.sharding.mesh import AnyMesh

EXCHANGE_OF_TOKENS = "experts, exchange of tokens"
"""Purpose of collectives that move rows to experts and back."""

_TILE, _SUBLANES = 128, 16
"""Rows of a buffer, and of a block, are multiples of these: kernels work on whole tiles."""

_ROUTED = 16
"""Most TPU v5e in a slice whose links allow a ragged all-to-all (XLA: "limited ICI routing")."""


@dataclasses.dataclass(frozen=True)
class ExpertAxes:
    """Mesh axes that experts are split over, none of them of size 1.

    Attributes:
        names: Several make up one, the first is the major one.
        size: Of all together.
        kind: What sends rows: `Ragged`, `Blocks`, or None for rows that stay where they are.
    """

    names: tuple[str, ...]
    size: int
    kind: "type[Ragged | Blocks] | None"


def expert_axes(mesh: AnyMesh, names: tuple[str, ...], device: tuple[str, str] | None = None) -> ExpertAxes:
    """Return the axes with the exchange for a mesh's devices, or for a platform and kind of `device`.

    TPUs have a ragged all-to-all, but for large slices of v5e, and a grouped matmul, so that a device with all experts
    keeps its rows sorted. On GPUs XLA's latency-hiding scheduler was seen to corrupt a ragged all-to-all
    (marin-community/marin, pull request 8081).
    """
    size = math.prod(mesh.shape[name] for name in names)
    if device is None and isinstance(mesh, Mesh):
        device = mesh.devices.flat[0].platform, mesh.devices.flat[0].device_kind
    platform, kind = device or ("cpu", "")
    if platform != "tpu":
        return ExpertAxes(names, size, Blocks)
    is_large_v5e = kind.startswith("TPU v5 lite") and mesh.size > _ROUTED
    return ExpertAxes(names, size, None if size == 1 else Blocks if is_large_v5e else Ragged)


def describe_exchange(axes: ExpertAxes, config: RouterConfig, *, slots: bool) -> str:
    """Return how rows are sent to experts, in `slots` or not, and what multiplies them there."""
    factor, is_batched = (config.capacity_factor if slots else config.buffer_factor), slots or axes.kind is Blocks
    parts = (
        config.dispatch,
        "no exchange" if axes.size == 1 else "all-to-all" if is_batched else "ragged all-to-all",
        f"{'slots' if slots else 'buffers'} of {factor:g} × even load" if slots or axes.kind else "",
        "batched products" if is_batched else "jax.lax.ragged_dot",
        f"{config.chunks} chunks" if config.chunks > 1 else "",
    )
    return ", ".join(filter(None, parts))


def exchange(counts: Int[Array, "expert"], axes: ExpertAxes, rows: int, factor: float) -> "Ragged | Blocks | None":
    """Return the exchange of this device's `rows`, with a buffer of `factor` times as many."""
    if axes.kind is None:
        return None
    every = counts
    if axes.names:
        with in_scope(comm_scope(EXCHANGE_OF_TOKENS)):
            every = jax.lax.all_gather(counts, axes.names)
    return axes.kind(every.reshape(axes.size, axes.size, -1), axes, rows, factor)


def row_by_row(x: Float[Array, "row *d"]) -> Float[Array, "row *parts"]:
    """Reshape rows to where XLA:TPU keeps each by itself, as a ragged all-to-all moves them: `[row, 2, d/2]` in bf16.

    A tile of `[row, d]` has parts of 8 rows or 16. What is made in this shape need not be copied into it.
    """
    parts = max(1, 4 // x.dtype.itemsize)
    return x.reshape(x.shape[0], parts, -1) if x.ndim == 2 and x.shape[1] % parts == 0 else x


class Ragged:
    """Exchange by `jax.lax.ragged_all_to_all`: a pass has the next rows of each receiver, in the order of senders.

    Buffers begin uninitialised: what nobody writes, nobody reads.
    """

    def __init__(self, every: Int[Array, "sender receiver own"], axes: ExpertAxes, rows: int, factor: float) -> None:
        wanted = math.ceil(factor * rows)
        self.buffer = min(axes.size * rows, wanted + -wanted % _TILE)
        self._axes, self._rows, self._me = axes, rows, jax.lax.axis_index(axes.names)
        self._sent = every.sum(axis=2)
        self._leaves = jnp.cumsum(self._sent, axis=1) - self._sent
        self._arrives = jnp.cumsum(self._sent, axis=0) - self._sent
        self._mine = jax.lax.dynamic_index_in_dim(every, self._me, axis=1, keepdims=False).reshape(-1)
        self._own = every.shape[2]
        is_bounded = self.buffer < axes.size * rows
        self.passes = -(-self._sent.sum(axis=0).max() // self.buffer) if is_bounded else 1

    def send(self, rows: Float[Array, "row *d"], turn: Any) -> Float[Array, "buffer *d"]:
        """Return the rows that this device receives in a pass."""
        leaves, arrives, count = self._window(turn)
        received = self._move(rows, self._empty(self.buffer, rows), leaves, arrives, count)
        return received.reshape(self.buffer, *(-1,) * (rows.ndim > 1))

    def back(self, received: Float[Array, "buffer *d"], turn: Any, onto: Array | None) -> Float[Array, "row *d"]:
        """Return received rows to their senders, `onto` those of other passes."""
        leaves, arrives, count = (pairs.T for pairs in self._window(turn))
        received = row_by_row(received)
        onto = self._empty(self._rows, received) if onto is None else row_by_row(onto)
        rows = self._move(received, onto, arrives, leaves, count)
        return rows.reshape(self._rows, *(-1,) * (rows.ndim > 1))

    def sizes(self, turn: Any) -> Int[Array, "own"]:
        """Return the number of received rows of each own expert."""
        first, last = self._segments(turn)
        return (last - first).reshape(-1, self._own).sum(axis=0)

    def experts(self, turn: Any) -> Int[Array, "buffer"] | None:
        """Return the own expert of each received row, their number where there is none; None if rows are sorted."""
        if self._own == 1:
            return None
        _, ends = self._segments(turn)
        segment = (jnp.arange(self.buffer)[:, None] >= ends[None]).sum(axis=1)
        return jnp.where(segment < ends.size, segment % self._own, self._own)

    def _window(self, turn: Any) -> tuple[Array, Array, Array]:
        """Return, `[sender, receiver]`, where the rows of a pass leave and arrive, and their number."""
        low = turn * self.buffer
        first, last = (jnp.clip(x - low, 0, self.buffer) for x in (self._arrives, self._arrives + self._sent))
        return self._leaves + jnp.clip(low - self._arrives, 0, self._sent), first, last - first

    def _segments(self, turn: Any) -> tuple[Array, Array]:
        """Return where the rows of each sender for each own expert begin and end."""
        ends = jnp.cumsum(self._mine)
        first, last = (jnp.clip(x - turn * self.buffer, 0, self.buffer) for x in (ends - self._mine, ends))
        return first, last

    def _move(self, rows: Array, onto: Array, starts: Array, ends: Array, counts: Array) -> Array:
        me = self._me
        offsets = starts[me], counts[me], ends[me], counts[:, me]
        with in_scope(comm_scope(EXCHANGE_OF_TOKENS)):
            return jax.lax.ragged_all_to_all(rows, onto, *offsets, axis_name=self._axes.names)

    def _empty(self, rows: int, like: Array) -> Array:
        """Return an uninitialised buffer.

        It depends on a layer's numbers, and cannot be known before them: a buffer made before the scan over layers
        would be held by all of them, and copied by each.
        """

        @jax.checkpoint
        def allocate(after: Array) -> Array:
            buffer = jax.lax.empty((rows, *like.shape[1:]), like.dtype)
            return jax.lax.optimization_barrier((buffer, after))[0]

        return allocate(like)


class Blocks:
    """Exchange by an all-to-all: each sender has a block for each expert, and a pass has the next rows of each.

    The expert is a dimension of received rows, so their products are batched: CPUs and GPUs have no grouped ones.
    """

    def __init__(self, every: Int[Array, "sender receiver own"], axes: ExpertAxes, rows: int, factor: float) -> None:
        self._axes, self._rows, self._own = axes, rows, every.shape[2]
        wanted = math.ceil(factor * rows / (axes.size * self._own))
        self._block = min(rows, wanted + -wanted % _SUBLANES)
        counts = (every[jax.lax.axis_index(axes.names)] if axes.names else every).reshape(-1)
        self._counts, self._ends = counts[:, None], jnp.cumsum(counts)
        self.passes = -(-every.max() // self._block) if self._block < rows else 1

    def send(self, rows: Float[Array, "row *d"], turn: Any) -> Float[Array, "own row *d"]:
        """Return the rows that this device receives in a pass, zeros where there is none."""
        place = turn * self._block + jnp.arange(self._block)[None]
        source = jnp.where(place < self._counts, self._ends[:, None] - self._counts + place, self._rows)
        blocks = rows.at[source].get(mode="fill", fill_value=0)
        blocks = self._swap(blocks.reshape(self._axes.size, self._own, self._block, *rows.shape[1:]))
        return blocks.swapaxes(0, 1).reshape(self._own, -1, *rows.shape[1:])

    def back(self, received: Float[Array, "own row *d"], turn: Any, onto: Array | None) -> Float[Array, "row *d"]:
        """Return received rows to their senders, `onto` those of other passes."""
        kind = received.shape[2:]
        blocks = self._swap(received.reshape(self._own, self._axes.size, self._block, *kind).swapaxes(0, 1))
        row = jnp.arange(self._rows)
        expert = (row[:, None] >= self._ends[None]).sum(axis=1)
        place = row - (self._ends - self._counts[:, 0]).at[expert].get(mode="clip") - turn * self._block
        is_here = (expert < self._ends.size) & (place >= 0) & (place < self._block)
        found = blocks.reshape(-1, *kind).at[expert * self._block + place].get(mode="clip")
        before = jnp.zeros_like(found) if onto is None else onto
        return jnp.where(is_here.reshape(-1, *(1,) * len(kind)), found, before)

    def sizes(self, turn: Any) -> None:
        """Return None: the expert is a dimension of received rows."""

    def experts(self, turn: Any) -> None:
        """Return None: received rows are sorted."""

    def _swap(self, blocks: Array) -> Array:
        if not self._axes.names:
            return blocks
        with in_scope(comm_scope(EXCHANGE_OF_TOKENS)):
            return jax.lax.all_to_all(blocks, self._axes.names, 0, 0, tiled=True)
