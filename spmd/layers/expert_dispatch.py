"""Dispatch of tokens to experts, by capacity or dropless, and combination of the experts' outputs.

Rows are the tokens of one device. With experts split over a mesh axis, rows are sent to the devices of their experts by
an all-to-all, and the outputs back by another. `mlp` is `(rows, sizes) -> rows`: with `sizes` None rows are `[expert,
row, d]`, else `[row, d]` sorted by expert.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spmd.layers.router import RouterConfig

MLP = Callable[[Array, Array | None], Array]


@dataclasses.dataclass(frozen=True)
class ExpertAxis:
    """Mesh axis that experts are split over; `ragged` selects `jax.lax.ragged_all_to_all`, which XLA:CPU lacks."""

    name: str
    size: int
    ragged: bool


def dispatch_capacity(
    rows: Float[Array, "token d"],
    slots: Int[Array, "example seq choice"],
    weights: Float[Array, "token choice"],
    config: RouterConfig,
    capacity: int,
    mlp: MLP,
    axis: ExpertAxis | None,
) -> Float[Array, "token d"]:
    """Apply experts to `capacity` slots per example and expert, filled or not; `slots` are from `expert_slots`."""
    examples, _, k = slots.shape
    size, n, d = config.experts * capacity, rows.shape[0] * k, rows.shape[1]
    first = size * jax.lax.broadcasted_iota(jnp.int32, slots.shape, 0)
    slot = jnp.where(slots < size, slots + first, examples * size).reshape(-1, k)
    source = _inverse(slot, examples * size)

    def exchange(parts: Float[Array, "part example expert slot d"]) -> Float[Array, "part example expert slot d"]:
        return jax.lax.all_to_all(parts, axis.name, 0, 0, tiled=True) if axis else parts

    # With expert choice a token has one choice per expert, nearly all of them empty, so outputs are scatter-added.
    scatter = config.choice == "expert"
    sent = _rows(rows, source // k) if scatter else _take(rows, source // k, slot)
    parts = exchange(sent.reshape(examples, axis.size if axis else 1, -1, capacity, d).swapaxes(0, 1))
    own = jnp.moveaxis(parts, 2, 0)
    own = mlp(own.reshape(own.shape[0], -1, d), None).reshape(own.shape)
    outputs = exchange(jnp.moveaxis(own, 0, 2)).swapaxes(0, 1).reshape(-1, d)
    if scatter:
        weighted = _rows(weights.reshape(-1, 1), source) * outputs
        return jnp.zeros_like(rows, jnp.float32).at[source // k].add(weighted, mode="drop")
    return _combine(_take(outputs, slot.reshape(n), source[:, None]), weights)


def dispatch_dropless(
    rows: Float[Array, "token d"],
    experts: Int[Array, "token choice"],
    weights: Float[Array, "token choice"],
    count: int,
    mlp: MLP,
    axis: ExpertAxis | None,
) -> Float[Array, "token d"]:
    """Apply experts to every choice: rows are sorted by expert and sent to the expert's device.

    Receive buffers hold all rows of every device, so nothing is ever dropped. `count` is the number of experts.
    """
    if axis is None:
        return _combine(_by_expert(rows, experts, count, mlp), weights)
    n, k, d, own = experts.size, experts.shape[1], rows.shape[1], count // axis.size
    queue = experts.reshape(-1)
    sizes = _group_sizes(queue, count)
    sent = sizes.reshape(axis.size, own).sum(axis=1)
    owner = jnp.minimum(queue // own, axis.size - 1)
    rank = jnp.argsort(jnp.argsort(queue))
    end = axis.size * n
    slot = jnp.where(queue < count, owner * n + rank - (jnp.cumsum(sent) - sent)[owner], end).reshape(-1, k)
    source = _inverse(slot, end)

    all_sizes = jax.lax.all_gather(sizes, axis.name)  # [part, expert]
    own_sizes = jax.lax.dynamic_slice_in_dim(all_sizes, jax.lax.axis_index(axis.name) * own, own, axis=1)
    received = own_sizes.sum(axis=1)
    inputs = _exchange(_take(rows, source // k, slot).reshape(axis.size, n, d), sent, received, axis)
    position = jax.lax.broadcasted_iota(jnp.int32, (axis.size, n, own), 1)
    expert = (position >= jnp.cumsum(own_sizes, axis=1)[:, None]).sum(axis=-1).reshape(-1, 1)  # `own` for an empty row
    outputs = _by_expert(inputs.reshape(-1, d), expert, own, mlp)
    outputs = _exchange(outputs.reshape(axis.size, n, d), received, sent, axis).reshape(-1, d)
    return _combine(_take(outputs, slot.reshape(n), source[:, None]), weights)


def _by_expert(
    rows: Float[Array, "token d"], experts: Int[Array, "token choice"], count: int, mlp: MLP
) -> Float[Array, "row d"]:
    """Sort rows by expert, apply `mlp` and undo the order: one row per choice, zeros for one that is not followed."""
    n, k = experts.size, experts.shape[1]
    queue = experts.reshape(-1)
    slot = jnp.where(queue < count, jnp.argsort(jnp.argsort(queue)), n)
    source = _inverse(slot, n)
    return _take(mlp(_take(rows, source // k, slot.reshape(-1, k)), _group_sizes(queue, count)), slot, source[:, None])


def _combine(outputs: Float[Array, "row d"], weights: Float[Array, "token choice"]) -> Float[Array, "token d"]:
    """Return the weighted sum of each token's rows, in float32."""
    return (outputs.reshape(*weights.shape, -1) * weights[..., None]).sum(axis=1)


def _group_sizes(experts: Int[Array, "row"], count: int) -> Int[Array, "expert"]:
    return jax.nn.one_hot(experts, count, dtype=jnp.int32).sum(axis=0)


def _inverse(slot: Int[Array, "..."], size: int) -> Int[Array, "slot"]:
    """Return the position of each of `size` slots in `slot`; the number of positions for an empty slot."""
    slot = slot.reshape(-1)
    return jnp.full_like(slot, slot.size, shape=(size,)).at[slot].set(jnp.arange(slot.size), mode="drop")


def _rows(x: Float[Array, "row d"], index: Int[Array, "..."]) -> Float[Array, "... d"]:
    """Return rows by index, zeros for an index out of range."""
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _take(
    x: Float[Array, "row d"], index: Int[Array, "taken"], back: Int[Array, "row copies"]
) -> Float[Array, "taken d"]:
    """Return `_rows`; its derivative gathers by `back`, the destinations of each row, instead of scattering."""
    return _rows(x, index)


_take.defvjp(
    lambda x, index, back: (_rows(x, index), back),
    lambda back, dy: (_rows(dy, back).sum(axis=1), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _exchange(
    rows: Float[Array, "part row d"], sent: Int[Array, "part"], received: Int[Array, "part"], axis: ExpertAxis
) -> Float[Array, "part row d"]:
    """All-to-all: the first `sent[p]` rows of part *p* go to device *p*, and `received[p]` rows come from it."""
    if not axis.ragged:
        return jax.lax.all_to_all(rows, axis.name, 0, 0, tiled=True)
    parts, n, d = rows.shape
    starts = n * jnp.arange(parts, dtype=jnp.int32)
    remote_starts = jnp.full_like(starts, n) * jax.lax.axis_index(axis.name)
    flat = rows.reshape(parts * n, d)
    return jax.lax.ragged_all_to_all(
        flat, jnp.zeros_like(flat), starts, sent, remote_starts, received, axis_name=axis.name
    ).reshape(rows.shape)


_exchange.defvjp(
    lambda rows, sent, received, axis: (_exchange(rows, sent, received, axis), (sent, received)),
    lambda axis, sizes, dy: (_exchange(dy, *sizes[::-1], axis), None, None),
)
