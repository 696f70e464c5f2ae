"""Dispatch of tokens to experts, by capacity or dropless: which row of whom goes where, and back.

A *row* is one choice of one token. Rows of a device are put in order of their experts, exchanged with the devices of
these, and come back the same way. Each step is linear, and the way back is the transpose of the way there, so that the
gradients of tokens go the same two ways.

```
tokens ──rows──▶ [n, d], by expert ──receive──▶ rows of own experts ──give──▶ [n, d] ──combine──▶ sums of tokens
```

Dropless dispatch has a buffer of `config.buffer_factor` times a device's rows. What does not fit in it follows in
further passes: with even load there is one, and nothing is ever dropped.

Arguments of both kinds of dispatch are `[row, d]`, or `[row]` for a number of each; `turn` is the number of a pass.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spmd.layers.router import RouterConfig

EXTRA_PASSES = "extra_passes"
"""Scope of the loop over the passes after the first, of which there are none with even load."""

_TILE = 128
"""Rows of a buffer are a multiple of this: kernels of grouped products work on whole tiles."""


@dataclasses.dataclass(frozen=True)
class ExpertAxis:
    """Mesh axis that experts are split over; `ragged` selects `jax.lax.ragged_all_to_all`, which XLA:CPU lacks."""

    name: str
    size: int
    ragged: bool


class Capacity:
    """Dispatch by capacity: each expert has slots for each example, filled or not.

    With `choice="expert"` a token has one choice per expert, nearly all of them empty, so its rows are scatter-added.
    """

    passes = 1

    def __init__(
        self, slots: Int[Array, "example seq choice"], config: RouterConfig, axis: ExpertAxis | None, capacity: int
    ) -> None:
        """Take the slots of `spmd.layers.router.expert_slots`."""
        examples, seq, self._k = slots.shape
        size = config.experts * capacity
        first = size * jax.lax.broadcasted_iota(jnp.int32, slots.shape, 0)
        self._slot = jnp.where(slots < size, slots + first, examples * size).reshape(-1, self._k)
        self._source = _inverse(self._slot, examples * size)
        self._axis, self._tokens, self._scatters = axis, examples * seq, config.choice == "expert"
        parts = axis.size if axis else 1
        self._parts = examples, parts, config.experts // parts, capacity

    def rows(self, tokens: Array) -> Array:
        """Return the token of each row, in order of experts."""
        return _take(tokens, self._source // self._k)

    def choices(self, values: Array) -> Array:
        """Return the value of each row's choice."""
        return _take(values.reshape(-1), self._source)

    def receive(self, rows: Array, turn: Any) -> Array:
        """Return the rows that this device's experts get in a pass, `[own, row, d]`."""
        parts = self._exchange(rows.reshape(*self._parts, *rows.shape[1:]).swapaxes(0, 1))
        return jnp.moveaxis(parts, 2, 0).reshape(self._parts[2], -1, *rows.shape[1:])

    def sizes(self, turn: Any) -> None:
        """Return None: the expert is a dimension of received rows."""

    def give(self, own: Array, turn: Any, onto: Array | None) -> Array:
        """Return received rows to their senders, `onto` those of other passes."""
        examples, parts, experts, capacity = self._parts
        rows = jnp.moveaxis(own.reshape(experts, parts, examples, capacity, *own.shape[2:]), 0, 2)
        return self._exchange(rows).swapaxes(0, 1).reshape(-1, *own.shape[2:])

    def combine(self, rows: Array) -> Array:
        """Return the sum of each token's rows, in float32."""
        if not self._scatters:
            return _take(rows, self._slot).sum(axis=1, dtype=jnp.float32)
        sums = jnp.zeros((self._tokens, rows.shape[1]), jnp.float32)
        return sums.at[self._source // self._k].add(rows.astype(jnp.float32), mode="drop")

    def uncombined(self, rows: Array) -> Array:
        """Return the value of each choice: the transpose of `choices`."""
        return _take(rows, self._slot)

    def _exchange(self, parts: Array) -> Array:
        return jax.lax.all_to_all(parts, self._axis.name, 0, 0, tiled=True) if self._axis else parts


class Dropless:
    """Dropless dispatch: rows sorted by expert, in as many passes as the fullest device's experts need.

    A device's own experts get the rows of the first device, then those of the second, and so on; each pass takes the
    next `buffer` of them.
    """

    def __init__(
        self, experts: Int[Array, "token choice"], config: RouterConfig, axis: ExpertAxis | None, over: Sequence[str]
    ) -> None:
        """Take each token's choices, and the axes over which devices make equally many passes."""
        self._k, self._axis, n = experts.shape[1], axis, experts.size
        queue = experts.reshape(-1)
        self._order = jnp.argsort(queue)
        slot = jnp.argsort(self._order)
        self._slot = jnp.where(queue < config.experts, slot, n).reshape(-1, self._k)
        counts = jax.nn.one_hot(queue, config.experts, dtype=jnp.int32).sum(axis=0)
        self.passes: Array | int = 1
        if axis is None:
            self._counts = counts
            return
        wanted = math.ceil(config.buffer_factor * n)
        self._buffer, self._me = min(axis.size * n, wanted + -wanted % _TILE), jax.lax.axis_index(axis.name)
        # Of each device for each expert; below `[sender, receiver]`.
        self._by_expert = jax.lax.all_gather(counts, axis.name).reshape(axis.size, axis.size, -1)
        self._sent = self._by_expert.sum(axis=2)
        self._arrives = jnp.cumsum(self._sent, axis=0) - self._sent
        self._leaves = jnp.cumsum(self._sent, axis=1) - self._sent
        if self._buffer < axis.size * n:
            most = jax.lax.pmax(self._sent.sum(axis=0).max(), tuple(over))
            self.passes = jnp.maximum(1, -(-most // self._buffer))

    def rows(self, tokens: Array) -> Array:
        """Return the token of each row, in order of experts."""
        return tokens.at[self._order // self._k].get(mode="promise_in_bounds")

    def choices(self, values: Array) -> Array:
        """Return the value of each row's choice."""
        return values.reshape(-1).at[self._order].get(mode="promise_in_bounds")

    def receive(self, rows: Array, turn: Any) -> Array:
        """Return the rows that this device's experts get in a pass, sorted by expert."""
        if self._axis is None:
            return rows
        leaves, arrives, count = self._window(turn)
        onto = self._empty(self._buffer, rows)
        own = _exchange(rows, onto, leaves, arrives, count, self._me, self._axis)
        order = self._own_order(turn)
        return own if order is None else own.at[order].get(mode="promise_in_bounds")

    def sizes(self, turn: Any) -> Array:
        """Return the number of rows of each own expert in a pass; later rows have no meaning."""
        return self._counts if self._axis is None else self._segments(turn).sum(axis=0)

    def give(self, own: Array, turn: Any, onto: Array | None) -> Array:
        """Return received rows to their senders, `onto` those of other passes."""
        if self._axis is None:
            return own
        leaves, arrives, count = (pairs.T for pairs in self._window(turn))
        order = self._own_order(turn)
        own = own if order is None else own.at[jnp.argsort(order)].get(mode="promise_in_bounds")
        onto = self._empty(self._order.size, own) if onto is None else onto
        return _exchange(own, onto, arrives, leaves, count, self._me, self._axis)

    def combine(self, rows: Array) -> Array:
        """Return the sum of each token's rows, in float32."""
        return _take(rows, self._slot).sum(axis=1, dtype=jnp.float32)

    def uncombined(self, rows: Array) -> Array:
        """Return the value of each choice: the transpose of `choices`."""
        return _take(rows, self._slot)

    def _window(self, turn: Any) -> tuple[Array, Array, Array]:
        """Return, `[sender, receiver]`, where the rows of a pass leave and arrive, and their number."""
        low = turn * self._buffer
        first, last = (jnp.clip(x - low, 0, self._buffer) for x in (self._arrives, self._arrives + self._sent))
        return self._leaves + jnp.clip(low - self._arrives, 0, self._sent), first, last - first

    def _segments(self, turn: Any) -> Array:
        """Return the number of rows of a pass, `[sender, own expert]`."""
        mine = jax.lax.dynamic_index_in_dim(self._by_expert, self._me, axis=1, keepdims=False)
        ends = jnp.cumsum(mine.reshape(-1))
        first, last = (jnp.clip(x - turn * self._buffer, 0, self._buffer) for x in (ends - mine.reshape(-1), ends))
        return (last - first).reshape(mine.shape)

    def _own_order(self, turn: Any) -> Array | None:
        """Return the order that sorts the rows of a pass by expert; None for one expert."""
        segments = self._segments(turn)
        if segments.shape[1] == 1:
            return None
        ends = jnp.cumsum(segments.reshape(-1))
        segment = (jnp.arange(self._buffer)[:, None] >= ends[None]).sum(axis=1)
        empty = segments.shape[1]
        return jnp.argsort(jnp.where(segment < ends.size, segment % empty, empty))

    def _empty(self, rows: int, like: Array) -> Array:
        """Return rows for others to write; those that nobody writes are read by nobody on TPUs and GPUs."""
        make = jax.lax.empty if self._axis and self._axis.ragged else jnp.zeros
        return make((rows, *like.shape[1:]), like.dtype)


Dispatch = Capacity | Dropless


def _inverse(slot: Int[Array, "..."], size: int) -> Int[Array, "slot"]:
    """Return the position of each of `size` slots in `slot`; the number of positions for an empty slot."""
    slot = slot.reshape(-1)
    return jnp.full_like(slot, slot.size, shape=(size,)).at[slot].set(jnp.arange(slot.size), mode="drop")


def _take(x: Float[Array, "row *d"], index: Int[Array, "*taken"]) -> Array:
    """Return rows by index, zeros for an index out of range."""
    return x.at[index].get(mode="fill", fill_value=0)


def _exchange(
    rows: Float[Array, "row *d"],
    onto: Float[Array, "received *d"],
    starts: Int[Array, "sender receiver"],
    ends: Int[Array, "sender receiver"],
    counts: Int[Array, "sender receiver"],
    me: Int[Array, ""],
    axis: ExpertAxis,
) -> Float[Array, "received *d"]:
    """Send `counts` rows, from `starts` in the sender's to `ends` in `onto` of the receiver, and return this."""
    if axis.ragged:
        own = starts[me], counts[me], ends[me], counts[:, me]
        return jax.lax.ragged_all_to_all(rows, onto, *own, axis_name=axis.name)
    most = min(rows.shape[0], onto.shape[0])
    place = jnp.arange(most)[None]
    parts = _take(rows, jnp.where(place < counts[me][:, None], starts[me][:, None] + place, rows.shape[0]))
    parts = jax.lax.all_to_all(parts, axis.name, 0, 0, tiled=True).reshape(-1, *rows.shape[1:])
    place = jnp.arange(onto.shape[0])[:, None] - ends[:, me][None]
    is_from = (place >= 0) & (place < counts[:, me][None])
    source = jnp.where(is_from, most * jnp.arange(axis.size)[None] + place, 0).sum(axis=1)
    written = is_from.any(axis=1).reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.where(written, parts.at[source].get(mode="promise_in_bounds"), onto)
