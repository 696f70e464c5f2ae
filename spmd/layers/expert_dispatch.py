"""Token dispatch to experts and combine, by capacity or dropless.

A *row* is one choice of one token. The rows of a device are sorted by expert, sent to the devices
of their experts, and returned by the reverse exchange. Each step is linear, and combine is the
transpose of dispatch, so gradients of tokens use the same two operations.

```
        rows               receive                       give           combine
tokens ─────▶ [n, d], by expert ─────▶ rows of own experts ─────▶ [n, d] ─────▶ sums of tokens
```

Dropless dispatch has a buffer of `config.buffer_factor` times a device's rows. Rows beyond the
buffer are sent in further passes: with even load there is one pass, and no row is ever dropped.

Arguments of both kinds of dispatch are `[row, d]`, or `[row]` for one number per row; `pass_index`
is the index of a pass.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spmd.layers.expert_exchange import (
    EXCHANGE_OF_TOKENS,
    ExpertAxes,
    RaggedAllToAll,
    exchange,
    row_by_row,
)
from spmd.layers.router import RouterConfig
from spmd.plan.scopes import comm_scope, in_scope

EXTRA_PASSES = "extra_passes"
"""Scope of the loop over the passes after the first; there are none with even load."""


class Capacity:
    """Dispatch by capacity: each expert has slots for each example, filled or not.

    With `choice="expert"` a token has one choice per expert, nearly all of them empty, so its rows
    are scatter-added.
    """

    passes = 1

    def __init__(
        self,
        slots: Int[Array, "example seq choice"],
        config: RouterConfig,
        axes: ExpertAxes | None,
        capacity: int,
    ) -> None:
        """Prepare the dispatch from the slots of `spmd.layers.router.expert_slots`."""
        examples, seq, self._k = slots.shape
        size = config.experts * capacity
        first = size * jax.lax.broadcasted_iota(jnp.int32, slots.shape, 0)
        in_batch = jnp.where(slots < size, slots + first, examples * size)
        self._slot = in_batch.reshape(-1, self._k)
        self._source = _inverse(self._slot, examples * size)
        self._tokens = examples * seq
        self._scatters = config.choice == "expert"
        self._axes: tuple[str, ...] = ()
        parts = 1
        if axes is not None:
            self._axes = axes.names
            parts = axes.size
        self._parts = (examples, parts, config.experts // parts, capacity)

    def rows(self, tokens: Array) -> Array:
        """Return the token of each row, in order of experts."""
        token = self._source // self._k
        return _take(tokens, token)

    def choices(self, values: Array) -> Array:
        """Return the value of each row's choice."""
        return _take(values.reshape(-1), self._source)

    def receive(self, rows: Array, pass_index: Any) -> Array:
        """Return the rows received by this device's experts in a pass, `[own, row, d]`."""
        width = rows.shape[1:]
        own = self._parts[2]
        slots = rows.reshape(*self._parts, *width)  # [example, part, own, slot, d]
        parts = self._exchange(slots.swapaxes(0, 1))
        parts = jnp.moveaxis(parts, 2, 0)
        return parts.reshape(own, -1, *width)

    def sizes(self, pass_index: Any) -> None:
        """Return None: the expert is a dimension of received rows."""

    def send_back(self, own: Array, pass_index: Any, accumulate_into: Array | None) -> Array:
        """Send rows back to their senders; `accumulate_into` has those of earlier passes."""
        examples, parts, experts, capacity = self._parts
        width = own.shape[2:]
        slots = own.reshape(experts, parts, examples, capacity, *width)
        rows = self._exchange(jnp.moveaxis(slots, 0, 2))
        rows = rows.swapaxes(0, 1)
        return rows.reshape(-1, *width)

    def combine(self, rows: Array) -> Array:
        """Return the sum of each token's rows, in float32."""
        if not self._scatters:
            chosen = _take(rows, self._slot)
            return chosen.sum(axis=1, dtype=jnp.float32)
        sums = jnp.zeros((self._tokens, rows.shape[1]), jnp.float32)
        return sums.at[self._source // self._k].add(rows.astype(jnp.float32), mode="drop")

    def gather_weights(self, rows: Array) -> Array:
        """Return the value of each choice: the transpose of `choices`."""
        return _take(rows, self._slot)

    def _exchange(self, parts: Array) -> Array:
        if not self._axes:
            return parts
        with in_scope(comm_scope(EXCHANGE_OF_TOKENS)):
            return jax.lax.all_to_all(parts, self._axes, 0, 0, tiled=True)


class Dropless:
    """Dropless dispatch: rows sorted by expert, in as many passes as the busiest device needs."""

    def __init__(
        self,
        experts: Int[Array, "token choice"],
        config: RouterConfig,
        axes: ExpertAxes | None,
        over: Sequence[str],
    ) -> None:
        """Prepare the dispatch of each token's choices.

        Devices along the axes `over` run equally many passes.
        """
        self._k = experts.shape[1]
        count = experts.size
        queue = experts.reshape(-1)
        self._order = jnp.argsort(queue)
        is_sent = queue < config.experts
        slot = jnp.where(is_sent, jnp.argsort(self._order), count)
        self._slot = slot.reshape(-1, self._k)
        self._counts = jax.nn.one_hot(queue, config.experts, dtype=jnp.int32).sum(axis=0)
        self._exchange = None
        if axes is not None:
            self._exchange = exchange(self._counts, axes, count, config.buffer_factor)
        self.passes: Any = 1
        if self._exchange is not None:
            self.passes = self._exchange.passes
        if not isinstance(self.passes, int):
            most = jax.lax.pmax(self.passes, tuple(over))
            self.passes = jnp.maximum(1, most)

    def rows(self, tokens: Array) -> Array:
        """Return the token of each row, in order of experts."""
        if isinstance(self._exchange, RaggedAllToAll):
            tokens = row_by_row(tokens)
        return tokens.at[self._order // self._k].get(mode="promise_in_bounds")

    def choices(self, values: Array) -> Array:
        """Return the value of each row's choice."""
        values = values.reshape(-1)
        return values.at[self._order].get(mode="promise_in_bounds")

    def receive(self, rows: Array, pass_index: Any) -> Array:
        """Return the rows received by this device's experts in a pass, sorted by expert.

        Rows of the buffer after those of the last expert are undefined.
        """
        if self._exchange is None:
            return rows
        received = self._exchange.send(rows, pass_index)
        experts = self._exchange.experts(pass_index)
        if experts is None:
            return received
        order = jnp.argsort(experts)
        return received.at[order].get(mode="promise_in_bounds")

    def sizes(self, pass_index: Any) -> Array | None:
        """Return each own expert's number of rows in a pass; None if it is a dimension of rows."""
        if self._exchange is None:
            return self._counts
        return self._exchange.sizes(pass_index)

    def send_back(self, own: Array, pass_index: Any, accumulate_into: Array | None) -> Array:
        """Send rows back to their senders; `accumulate_into` has those of earlier passes."""
        if self._exchange is None:
            return own
        experts = self._exchange.experts(pass_index)
        if experts is not None:
            place = jnp.argsort(jnp.argsort(experts))  # the inverse of the order in `receive`
            own = own.at[place].get(mode="promise_in_bounds")
        return self._exchange.back(own, pass_index, accumulate_into)

    def combine(self, rows: Array) -> Array:
        """Return the sum of each token's rows, in float32."""
        chosen = _take(rows, self._slot)
        return chosen.sum(axis=1, dtype=jnp.float32)

    def gather_weights(self, rows: Array) -> Array:
        """Return the value of each choice: the transpose of `choices`."""
        return _take(rows, self._slot)


Dispatch = Capacity | Dropless


def _inverse(slot: Int[Array, "..."], size: int) -> Int[Array, "slot"]:
    """Return the position of each of `size` slots in `slot`, out of range for an empty slot."""
    slot = slot.reshape(-1)
    empty = jnp.full_like(slot, slot.size, shape=(size,))
    return empty.at[slot].set(jnp.arange(slot.size), mode="drop")


def _take(x: Float[Array, "row *d"], index: Int[Array, "*taken"]) -> Array:
    """Return rows by index, zeros for an index out of range."""
    return x.at[index].get(mode="fill", fill_value=0)
