"""Zigzag order of a sequence's tokens over devices, which balances the work of causal ring attention.

In contiguous order, the device with the last tokens attends to everything and the one with the first only to itself. In
zigzag order, device i of n holds blocks i and 2n − 1 − i of 2n: an early and a late one, so the work is equal.

```
tokens       0 1 2 3 4 5 6 7        n = 2, so 4 blocks of 2 tokens
contiguous   0 1 2 3 | 4 5 6 7
zigzag       0 1 6 7 | 2 3 4 5
```

A loss function reorders its batch once (`zigzag_batch`). A loss is a sum over tokens, so the order is never undone.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from spmd.errors import ConfigError, Problem
from spmd.layers.kv_cache import token_positions
from spmd.plan.annotate import attention_config
from spmd.plan.context import current, override
from spmd.plan.manual import manual_over


def is_zigzag() -> bool:
    """Return True if the tokens that are being traced are in zigzag order."""
    return current().zigzag


def zigzag(seq: int, devices: int) -> np.ndarray:
    """Return the position of each token of a sequence in zigzag order, `[seq]`.

    Example:
        >>> zigzag(8, 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    blocks = np.arange(seq).reshape(2 * devices, -1)
    return np.concatenate([blocks[[i, 2 * devices - 1 - i]].reshape(-1) for i in range(devices)])


def positions(seq: int) -> np.ndarray | jax.Array:
    """Return the position of each token: constants `[1, seq]`, or `[batch, 1]` in decoding (`spmd.layers.kv_cache`).

    A model that takes positions from here, and mixes tokens only by `spmd.layers.attention.attend`, may set the
    attribute `position_aware = True`.

    Example:
        >>> positions(4).tolist()
        [[0, 1, 2, 3]]
    """
    if (decoded := token_positions()) is not None:
        return decoded
    return (zigzag(seq, attention_config().sequence) if is_zigzag() else np.arange(seq))[None]


@contextlib.contextmanager
def zigzag_batch(batch: Any, *, position_aware: bool) -> Iterator[Any]:
    """Reorder a batch to zigzag order inside the `with`, by two permutes of each array over `sequence`.

    The batch does not change without a plan, without a ring, or if the model is not `position_aware`.
    """
    ring = attention_config()
    if ring.mesh is None or not (ring.is_ring and position_aware):
        yield batch
        return
    seq, blocks = batch["tokens"].shape[1], 2 * ring.sequence
    if seq % blocks:
        arithmetic = f"{seq} / (2 × sequence={ring.sequence}) = {seq / blocks:.4g}"
        fix = f"a sequence of {seq // blocks * blocks or blocks} or {(seq // blocks + 1) * blocks} tokens"
        what = "does not divide into two blocks for each device"
        raise ConfigError("A ring cannot be balanced:", [Problem("sequence", what, arithmetic, fix)])
    exchange, spec = functools.partial(_exchange, devices=ring.sequence), P(None, "sequence")
    move = manual_over(ring.mesh, ("sequence",), exchange, spec, spec, purpose="zigzag order of tokens")
    with override(zigzag=True):
        yield {name: move(x) if x.shape[1:2] == (seq,) else x for name, x in batch.items()}


def _exchange(x: jax.Array, devices: int) -> jax.Array:
    """Move one device's tokens to zigzag order: even blocks in one permute, odd ones in another."""

    def owner(block: int) -> int:
        return min(block, 2 * devices - 1 - block)

    arrived = [
        jax.lax.ppermute(part, "sequence", [(i, owner(2 * i + odd)) for i in range(devices)])
        for odd, part in enumerate(jnp.split(x, 2, axis=1))
    ]
    on_even = jax.lax.axis_index("sequence") % 2 == 0
    return jnp.where(on_even, jnp.concatenate(arrived, axis=1), jnp.concatenate(arrived[::-1], axis=1))
