"""Slots of a stage: arrays `[slot, …]` in the carry of the ticks, and totals of gradients."""

from typing import Any

import jax
import jax.numpy as jnp


def zeros(like: Any, *leading: int) -> Any:
    """Return zeros like a tree of arrays, with leading dimensions."""
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), like)


def read_slot(slots: Any, slot: Any) -> Any:
    """Return the contents of a slot."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, keepdims=False), slots)


def select_chunk(chunks: Any, which: Any) -> Any:
    """Return one of several chunks; without indexing where there is only one."""
    is_single = all(w.shape[0] == 1 for w in jax.tree.leaves(chunks))
    if is_single:
        return jax.tree.map(lambda w: w[0], chunks)
    return read_slot(chunks, which)


def write_slot(slots: Any, slot: jax.Array, value: Any) -> Any:
    """Write a value into a slot; slot -1 writes nothing."""
    index = jnp.maximum(slot, 0)

    def write(x: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, jnp.where(slot >= 0, new, old), index, 0)

    return jax.tree.map(write, slots, value, read_slot(slots, index))


def take_slot(slots: Any, slot: jax.Array) -> Any:
    """Return the contents of a slot for a task, outside of its branch.

    In the branch, XLA brings all slots of an array into the layout that a product prefers, in each
    tick, to read one. Operands of a branch have the layout of the slots.
    """
    return jax.lax.optimization_barrier(read_slot(slots, slot))


def put_slot(slots: Any, slot: jax.Array, value: Any) -> Any:
    """Write a value into a slot."""

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, new, slot, 0)

    return jax.tree.map(put, slots, value)


def accumulate_at(total: Any, d: Any, index: jax.Array) -> Any:
    """Add `d` to one index of the totals, in their dtype."""

    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        y = y.astype(x.dtype)
        if x.shape[0] == 1:
            return x + y[None]
        return jax.lax.dynamic_update_index_in_dim(x, read_slot(x, index) + y, index, 0)

    return jax.tree.map(add, total, d)
