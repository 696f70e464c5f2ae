"""Exchange of rows between the devices of different experts, pass by pass.

Each device has rows sorted by expert. In a pass it sends some of them to the devices of their
experts. A device receives rows in one buffer, which is returned by the reverse exchange. All
devices know the numbers of rows, `[sender, receiver, own expert]`, so each can compute the pass of
a row and its place in the buffer.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from spmd.chips import chip_of
from spmd.layers.router import RouterConfig
from spmd.plan.scopes import comm_scope, in_scope
from spmd.sharding.mesh import AnyMesh

EXCHANGE_OF_TOKENS = "experts, exchange of tokens"
"""Purpose of collectives that move rows to experts and back."""

_TILE = 128
"""The number of rows of a buffer is a multiple of this, since kernels work on whole tiles."""

_SUBLANES = 16
"""The number of rows of a block is a multiple of this, for the same reason."""


@dataclasses.dataclass(frozen=True)
class ExpertAxes:
    """The mesh axes of experts, all of size above 1, and the exchange over them.

    Attributes:
        names: The axes; several act as one, the major one first.
        size: The product of their sizes.
        kind: The exchange: `RaggedAllToAll`, `DenseAllToAll`, or None for rows that stay on their
            device.
    """

    names: tuple[str, ...]
    size: int
    kind: "type[RaggedAllToAll | DenseAllToAll] | None"


def expert_axes(
    mesh: AnyMesh, names: tuple[str, ...], device: tuple[str, str] | None = None
) -> ExpertAxes:
    """Return the axes with the exchange for a mesh's devices, or for another `device`.

    `device` is a platform and a kind. TPUs have a ragged all-to-all, except on large slices of v5e.
    They also have a grouped matmul, so a device with all experts keeps its rows sorted. On GPUs
    XLA's latency-hiding scheduler was seen to corrupt a ragged all-to-all (marin-community/marin,
    pull request 8081).
    """
    size = math.prod(mesh.shape[name] for name in names)
    if device is None and isinstance(mesh, Mesh):
        first = mesh.devices.flat[0]
        device = first.platform, first.device_kind
    platform, device_kind = device or ("cpu", "")
    if platform != "tpu":
        return ExpertAxes(names, size, DenseAllToAll)
    if size == 1:
        return ExpertAxes(names, size, None)
    most = chip_of(device_kind).ragged_devices
    if most and mesh.size > most:
        return ExpertAxes(names, size, DenseAllToAll)
    return ExpertAxes(names, size, RaggedAllToAll)


def describe_exchange(axes: ExpertAxes, config: RouterConfig, *, slots: bool) -> str:
    """Describe in words the exchange of rows, in `slots` or not, and the kind of matmul."""
    is_batched = slots or axes.kind is DenseAllToAll
    parts: list[str] = [config.dispatch]
    if axes.size == 1:
        parts.append("no exchange")
    elif is_batched:
        parts.append("all-to-all")
    else:
        parts.append("ragged all-to-all")
    if slots:
        parts.append(f"slots of {config.capacity_factor:g} × even load")
    elif axes.kind:
        parts.append(f"buffers of {config.buffer_factor:g} × even load")
    parts.append("batched products" if is_batched else "jax.lax.ragged_dot")
    if config.chunks > 1:
        parts.append(f"{config.chunks} chunks")
    return ", ".join(parts)


def exchange(
    counts: Int[Array, "expert"], axes: ExpertAxes, rows: int, factor: float
) -> "RaggedAllToAll | DenseAllToAll | None":
    """Return the exchange of this device's rows, with a buffer of `factor` times `rows`.

    None if rows stay on their device.
    """
    if axes.kind is None:
        return None
    every = counts
    if axes.names:
        with in_scope(comm_scope(EXCHANGE_OF_TOKENS)):
            every = jax.lax.all_gather(counts, axes.names)
    return axes.kind(every.reshape(axes.size, axes.size, -1), axes, rows, factor)


def row_by_row(x: Float[Array, "row *d"]) -> Float[Array, "row *parts"]:
    """Reshape rows so that XLA:TPU stores each contiguously, as a ragged all-to-all sends them.

    In bf16 the shape is `[row, 2, d/2]`. A tile of `[row, d]` has parts of 8 rows or 16. An array
    created in this shape needs no copy into this layout.
    """
    parts = max(1, 4 // x.dtype.itemsize)
    if x.ndim != 2 or x.shape[1] % parts:
        return x
    return x.reshape(x.shape[0], parts, -1)


def _round_up(count: int, multiple: int) -> int:
    return count + -count % multiple


class RaggedAllToAll:
    """Exchange by `jax.lax.ragged_all_to_all`.

    In a pass each device receives the next rows for it, in the order of senders. Buffers start
    uninitialised: elements without a row are never used.
    """

    def __init__(
        self, every: Int[Array, "sender receiver own"], axes: ExpertAxes, rows: int, factor: float
    ) -> None:
        most = axes.size * rows
        wanted = math.ceil(factor * rows)
        self.buffer = min(most, _round_up(wanted, _TILE))
        self._axes = axes
        self._rows = rows
        self._me = jax.lax.axis_index(axes.names)
        self._sent = every.sum(axis=2)  # [sender, receiver], as the next two
        self._leaves = jnp.cumsum(self._sent, axis=1) - self._sent
        self._arrives = jnp.cumsum(self._sent, axis=0) - self._sent
        mine = jax.lax.dynamic_index_in_dim(every, self._me, axis=1, keepdims=False)
        self._mine = mine.reshape(-1)  # [sender · own expert]
        self._own = every.shape[2]
        self.passes: Any = 1
        if self.buffer < most:
            fullest = self._sent.sum(axis=0).max()
            self.passes = -(-fullest // self.buffer)

    def send(self, rows: Float[Array, "row *d"], pass_index: Any) -> Float[Array, "buffer *d"]:
        """Return the rows received by this device in a pass."""
        leaves, arrives, count = self._window(pass_index)
        buffer = self._empty(self.buffer, rows)
        received = self._move(rows, buffer, leaves, arrives, count)
        return _joined(received)

    def back(
        self, received: Float[Array, "buffer *d"], pass_index: Any, accumulate_into: Array | None
    ) -> Float[Array, "row *d"]:
        """Send rows back to their senders; `accumulate_into` has those of earlier passes."""
        leaves, arrives, count = (pairs.T for pairs in self._window(pass_index))
        received = row_by_row(received)
        accumulate_into = (
            self._empty(self._rows, received)
            if accumulate_into is None
            else row_by_row(accumulate_into)
        )
        rows = self._move(received, accumulate_into, arrives, leaves, count)
        return _joined(rows)

    def sizes(self, pass_index: Any) -> Int[Array, "own"]:
        """Return the number of received rows of each own expert."""
        first, last = self._segments(pass_index)
        counts = last - first
        return counts.reshape(-1, self._own).sum(axis=0)

    def experts(self, pass_index: Any) -> Int[Array, "buffer"] | None:
        """Return the own expert of each received row; None if rows are sorted.

        Places in the buffer without a row have the number of own experts.
        """
        if self._own == 1:
            return None
        _, ends = self._segments(pass_index)
        place = jnp.arange(self.buffer)
        segment = (place[:, None] >= ends[None]).sum(axis=1)
        return jnp.where(segment < ends.size, segment % self._own, self._own)

    def _window(self, pass_index: Any) -> tuple[Array, Array, Array]:
        """Return the send offsets, receive offsets and counts of a pass, `[sender, receiver]`."""
        low = pass_index * self.buffer
        ends = self._arrives + self._sent
        first = jnp.clip(self._arrives - low, 0, self.buffer)
        last = jnp.clip(ends - low, 0, self.buffer)
        sent_before = jnp.clip(low - self._arrives, 0, self._sent)
        return self._leaves + sent_before, first, last - first

    def _segments(self, pass_index: Any) -> tuple[Array, Array]:
        """Return the start and end, in a pass, of each sender's rows for each own expert."""
        ends = jnp.cumsum(self._mine)
        starts = ends - self._mine
        return self._place(starts, pass_index), self._place(ends, pass_index)

    def _place(self, row: Array, pass_index: Any) -> Array:
        """Return the place of received rows in the buffer of a pass, clipped to the buffer."""
        return jnp.clip(row - pass_index * self.buffer, 0, self.buffer)

    def _move(
        self, rows: Array, accumulate_into: Array, starts: Array, ends: Array, counts: Array
    ) -> Array:
        """Send rows from `starts` to `ends`, as many as `counts`; each is `[sender, receiver]`."""
        me = self._me
        offsets = starts[me], counts[me], ends[me], counts[:, me]
        with in_scope(comm_scope(EXCHANGE_OF_TOKENS)):
            return jax.lax.ragged_all_to_all(
                rows, accumulate_into, *offsets, axis_name=self._axes.names
            )

    def _empty(self, rows: int, like: Array) -> Array:
        """Return an uninitialised buffer.

        The buffer depends on arrays of the layer, so that it cannot be hoisted out of the scan over
        layers: a hoisted buffer would be live in all layers, and copied by each.
        """

        @jax.checkpoint
        def allocate(after: Array) -> Array:
            buffer = jax.lax.empty((rows, *like.shape[1:]), like.dtype)
            buffer, _ = jax.lax.optimization_barrier((buffer, after))
            return buffer

        return allocate(like)


def _joined(rows: Float[Array, "row *parts"]) -> Float[Array, "row *d"]:
    """Undo `row_by_row`."""
    if rows.ndim == 1:
        return rows.reshape(rows.shape[0])
    return rows.reshape(rows.shape[0], -1)


class DenseAllToAll:
    """Exchange by an all-to-all of blocks, one of each sender for each expert.

    A pass has the next rows of each block. The expert is a dimension of received rows, so matmuls
    are batched: CPUs and GPUs have no grouped matmul.
    """

    def __init__(
        self, every: Int[Array, "sender receiver own"], axes: ExpertAxes, rows: int, factor: float
    ) -> None:
        self._axes = axes
        self._rows = rows
        self._own = every.shape[2]
        blocks = axes.size * self._own
        wanted = math.ceil(factor * rows / blocks)
        self._block = min(rows, _round_up(wanted, _SUBLANES))
        mine = every
        if axes.names:
            mine = every[jax.lax.axis_index(axes.names)]
        counts = mine.reshape(-1)  # [expert], as the next two
        self._counts = counts[:, None]
        self._ends = jnp.cumsum(counts)
        self.passes: Any = 1
        if self._block < rows:
            self.passes = -(-every.max() // self._block)

    def send(self, rows: Float[Array, "row *d"], pass_index: Any) -> Float[Array, "own row *d"]:
        """Return the rows received by this device in a pass, with blocks padded by zeros."""
        place = pass_index * self._block + jnp.arange(self._block)[None]
        is_row = place < self._counts
        row = self._ends[:, None] - self._counts + place
        source = jnp.where(is_row, row, self._rows)
        width = rows.shape[1:]
        blocks = rows.at[source].get(mode="fill", fill_value=0)
        blocks = blocks.reshape(self._axes.size, self._own, self._block, *width)
        blocks = self._swap(blocks)
        blocks = blocks.swapaxes(0, 1)
        return blocks.reshape(self._own, -1, *width)

    def back(
        self, received: Float[Array, "own row *d"], pass_index: Any, accumulate_into: Array | None
    ) -> Float[Array, "row *d"]:
        """Send rows back to their senders; `accumulate_into` has those of earlier passes."""
        width = received.shape[2:]
        blocks = received.reshape(self._own, self._axes.size, self._block, *width)
        blocks = self._swap(blocks.swapaxes(0, 1))
        row = jnp.arange(self._rows)
        expert = (row[:, None] >= self._ends[None]).sum(axis=1)
        starts = self._ends - self._counts[:, 0]
        place = row - starts.at[expert].get(mode="clip") - pass_index * self._block
        is_here = (expert < self._ends.size) & (place >= 0) & (place < self._block)
        sent = blocks.reshape(-1, *width)
        found = sent.at[expert * self._block + place].get(mode="clip")
        if accumulate_into is None:
            accumulate_into = jnp.zeros_like(found)
        ones = (1,) * len(width)
        is_here = is_here.reshape(-1, *ones)
        return jnp.where(is_here, found, accumulate_into)

    def sizes(self, pass_index: Any) -> None:
        """Return None: the expert is a dimension of received rows."""

    def experts(self, pass_index: Any) -> None:
        """Return None: received rows are sorted."""

    def _swap(self, blocks: Array) -> Array:
        if not self._axes.names:
            return blocks
        with in_scope(comm_scope(EXCHANGE_OF_TOKENS)):
            return jax.lax.all_to_all(blocks, self._axes.names, 0, 0, tiled=True)
