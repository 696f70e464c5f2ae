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

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spmd.layers.expert_exchange import EXCHANGE_OF_TOKENS, ExpertAxes, Ragged, exchange, row_by_row
from spmd.layers.router import RouterConfig
from spmd.plan.scopes import comm_scope, in_scope

EXTRA_PASSES = "extra_passes"
"""Scope of the loop over the passes after the first, of which there are none with even load."""


class Capacity:
    """Dispatch by capacity: each expert has slots for each example, filled or not.

    With `choice="expert"` a token has one choice per expert, nearly all of them empty, so its rows are scatter-added.
    """

    passes = 1

    def __init__(
        self, slots: Int[Array, "example seq choice"], config: RouterConfig, axes: ExpertAxes | None, capacity: int
    ) -> None:
        """Take the slots of `spmd.layers.router.expert_slots`."""
        examples, seq, self._k = slots.shape
        size = config.experts * capacity
        first = size * jax.lax.broadcasted_iota(jnp.int32, slots.shape, 0)
        self._slot = jnp.where(slots < size, slots + first, examples * size).reshape(-1, self._k)
        self._source = _inverse(self._slot, examples * size)
        self._axes, self._tokens, self._scatters = axes.names if axes else (), examples * seq, config.choice == "expert"
        parts = axes.size if axes else 1
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
        if not self._axes:
            return parts
        with in_scope(comm_scope(EXCHANGE_OF_TOKENS)):
            return jax.lax.all_to_all(parts, self._axes, 0, 0, tiled=True)


class Dropless:
    """Dropless dispatch: rows sorted by expert, in as many passes as the fullest device's experts need."""

    def __init__(
        self, experts: Int[Array, "token choice"], config: RouterConfig, axes: ExpertAxes | None, over: Sequence[str]
    ) -> None:
        """Take each token's choices, and the axes over which devices make equally many passes."""
        self._k, n = experts.shape[1], experts.size
        queue = experts.reshape(-1)
        self._order = jnp.argsort(queue)
        self._slot = jnp.where(queue < config.experts, jnp.argsort(self._order), n).reshape(-1, self._k)
        self._counts = jax.nn.one_hot(queue, config.experts, dtype=jnp.int32).sum(axis=0)
        self._exchange = exchange(self._counts, axes, n, config.buffer_factor) if axes else None
        most = self._exchange.passes if self._exchange else 1
        self.passes = most if isinstance(most, int) else jnp.maximum(1, jax.lax.pmax(most, tuple(over)))

    def rows(self, tokens: Array) -> Array:
        """Return the token of each row, in order of experts."""
        tokens = row_by_row(tokens) if isinstance(self._exchange, Ragged) else tokens
        return tokens.at[self._order // self._k].get(mode="promise_in_bounds")

    def choices(self, values: Array) -> Array:
        """Return the value of each row's choice."""
        return values.reshape(-1).at[self._order].get(mode="promise_in_bounds")

    def receive(self, rows: Array, turn: Any) -> Array:
        """Return the rows that this device's experts get in a pass, sorted by expert; later ones have no meaning."""
        if self._exchange is None:
            return rows
        received, experts = self._exchange.send(rows, turn), self._exchange.experts(turn)
        return received if experts is None else received.at[jnp.argsort(experts)].get(mode="promise_in_bounds")

    def sizes(self, turn: Any) -> Array | None:
        """Return the number of rows of each own expert in a pass; None if the expert is a dimension of them."""
        return self._exchange.sizes(turn) if self._exchange else self._counts

    def give(self, own: Array, turn: Any, onto: Array | None) -> Array:
        """Return received rows to their senders, `onto` those of other passes."""
        if self._exchange is None:
            return own
        experts = self._exchange.experts(turn)
        if experts is not None:
            own = own.at[jnp.argsort(jnp.argsort(experts))].get(mode="promise_in_bounds")
        return self._exchange.back(own, turn, onto)

    def combine(self, rows: Array) -> Array:
        """Return the sum of each token's rows, in float32."""
        return _take(rows, self._slot).sum(axis=1, dtype=jnp.float32)

    def uncombined(self, rows: Array) -> Array:
        """Return the value of each choice: the transpose of `choices`."""
        return _take(rows, self._slot)


Dispatch = Capacity | Dropless


def _inverse(slot: Int[Array, "..."], size: int) -> Int[Array, "slot"]:
    """Return the position of each of `size` slots in `slot`; the number of positions for an empty slot."""
    slot = slot.reshape(-1)
    return jnp.full_like(slot, slot.size, shape=(size,)).at[slot].set(jnp.arange(slot.size), mode="drop")


def _take(x: Float[Array, "row *d"], index: Int[Array, "*taken"]) -> Array:
    """Return rows by index, zeros for an index out of range."""
    return x.at[index].get(mode="fill", fill_value=0)
