"""The order of a sequence's tokens on the devices that share it: as they are, or zigzag, so that all work equally.

Of a causal sequence in its own order, the device with the last tokens attends to everything and the one with the first
to itself. In zigzag order, device i of n holds blocks i and 2n − 1 − i of 2n: an early one and a late one, and every
device sees as much as the others.

```
tokens       0 1 2 3 4 5 6 7        n = 2, so 4 blocks of 2 tokens
contiguous   0 1 2 3 | 4 5 6 7
zigzag       0 1 6 7 | 2 3 4 5
```

A loss function puts its batch into that order once, where it begins (`zigzag_batch`); RoPE asks for the `positions`
of the tokens it sees; ring attention asks which order holds. A loss is a sum over tokens, so nothing is put back.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from spmd.errors import ConfigError, Problem
from spmd.layers.kv_cache import token_positions
from spmd.plan.annotate import attention_config, manual_over
from spmd.plan.context import current, override


def is_zigzag() -> bool:
    """Whether the tokens that are traced now are in zigzag order."""
    return current().zigzag


def zigzag(seq: int, devices: int) -> np.ndarray:
    """The position of each token of a sequence in zigzag order, `[seq]`.

    Example:
        >>> zigzag(8, 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    blocks = np.arange(seq).reshape(2 * devices, -1)
    return np.concatenate([blocks[[i, 2 * devices - 1 - i]].reshape(-1) for i in range(devices)])


def positions(seq: int) -> np.ndarray | jax.Array:
    """The position of each token as it is traced: 0, 1, 2, …, or those of the zigzag order where it holds.

    They are constants `[1, seq]`, the same for each row, except for tokens that come one at a time
    (`spmd.layers.kv_cache`): then each row is somewhere else, and they are `[batch, 1]`.

    A model that takes positions from here, and mixes tokens by `spmd.layers.attention.attend` alone, may say so by
    the attribute `position_aware = True`.

    Example:
        >>> positions(4).tolist()
        [[0, 1, 2, 3]]
    """
    if (decoded := token_positions()) is not None:
        return decoded
    return (zigzag(seq, attention_config().sequence) if is_zigzag() else np.arange(seq))[None]


@contextlib.contextmanager
def zigzag_batch(batch: Any, *, position_aware: bool) -> Iterator[Any]:
    """The batch in the order in which a ring has the least to wait for; it holds inside the `with`.

    Args:
        batch: A dictionary of arrays, each `[batch, seq]`; `tokens` is among them.
        position_aware: Whether the model says that it asks for positions. One that does not gets its batch as it is.

    Yields:
        The batch, each array with two permutes over `sequence`; as it is, where no plan is in scope or no ring in it.

    Raises:
        ConfigError: The sequence does not divide into two blocks for each device.
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
    move = manual_over(ring.mesh, ("sequence",), _exchange(ring.sequence), P(None, "sequence"), P(None, "sequence"))
    with override(zigzag=True):
        yield {name: move(x) if x.shape[1:2] == (seq,) else x for name, x in batch.items()}


def _exchange(devices: int) -> Any:
    """From blocks 2i and 2i + 1 on device i to i and 2n − 1 − i: even blocks in one permute, odd ones in another."""

    def owner(block: int) -> int:
        return block if block < devices else 2 * devices - 1 - block

    def move(x: jax.Array) -> jax.Array:
        arrived = [
            jax.lax.ppermute(part, "sequence", [(i, owner(2 * i + odd)) for i in range(devices)])
            for odd, part in enumerate(jnp.split(x, 2, axis=1))
        ]
        on_even = jax.lax.axis_index("sequence") % 2 == 0
        return jnp.where(on_even, jnp.concatenate(arrived, axis=1), jnp.concatenate(arrived[::-1], axis=1))

    return move
