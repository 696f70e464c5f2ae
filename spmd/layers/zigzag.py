"""Zigzag order of tokens over devices, to balance the work of causal ring attention.

In contiguous order, the device with the last tokens attends to all tokens, and the device with the
first ones only to its own. In zigzag order, device i of n holds blocks i and 2n − 1 − i of 2n: an
early and a late one, so the work is equal.

```
tokens       0 1 2 3 4 5 6 7        n = 2, so 4 blocks of 2 tokens
contiguous   0 1 2 3 | 4 5 6 7
zigzag       0 1 6 7 | 2 3 4 5
```

A loss function reorders its batch once (`zigzag_batch`). A loss is a sum over tokens, so the order
is never undone.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from spmd.errors import ConfigError, Problem
from spmd.layers.kv_cache import token_positions
from spmd.plan.annotate import attention_config
from spmd.plan.context import current, override
from spmd.plan.manual import shard_map_over
from spmd.sharding.batch import WholeArrays


def is_zigzag() -> bool:
    """Return True if the tokens being traced are in zigzag order."""
    return current().zigzag


def zigzag(seq: int, devices: int) -> np.ndarray:
    """Return the position of each token of a sequence in zigzag order, `[seq]`.

    Example:
        >>> zigzag(8, 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    blocks = np.arange(seq).reshape(2 * devices, -1)
    order = []
    for device in range(devices):
        order += [blocks[device], blocks[2 * devices - 1 - device]]
    return np.concatenate(order)


def positions(seq: int) -> np.ndarray | jax.Array:
    """Return the position of each token: constants `[1, seq]`, or `[batch, 1]` in decoding.

    Decoding is that of `spmd.layers.kv_cache`. A model that takes positions from here, and mixes
    tokens only by `spmd.layers.attention.attend`, may set the attribute `position_aware = True`.

    Example:
        >>> positions(4).tolist()
        [[0, 1, 2, 3]]
    """
    decoded = token_positions()
    if decoded is not None:
        return decoded
    if is_zigzag():
        return zigzag(seq, attention_config().sequence)[None]
    return np.arange(seq)[None]


@contextlib.contextmanager
def zigzag_batch(batch: Any, *, position_aware: bool) -> Iterator[Any]:
    """Reorder a batch to zigzag order inside the `with`.

    Each array is sent by two permutes over `sequence`. The batch does not change without a plan,
    without attention from each device's own tokens, or if the model is not `position_aware`.
    """
    config = attention_config()
    if config.mesh is None or not (config.keeps_queries and position_aware):
        yield batch
        return
    seq = batch["tokens"].shape[1]
    _check_sequence(seq, config.sequence)
    exchange = functools.partial(_exchange, devices=config.sequence)
    spec = P(None, "sequence")
    purpose = "zigzag order of tokens"
    in_specs = (spec, P("sequence"))
    move = shard_map_over(config.mesh, ("sequence",), exchange, in_specs, spec, purpose=purpose)
    numbers = jnp.arange(config.sequence)
    with override(zigzag=True):
        reordered = {}
        for name, x in batch.items():
            has_tokens = not isinstance(x, WholeArrays) and x.shape[1:2] == (seq,)
            reordered[name] = move(x, numbers) if has_tokens else x
        yield reordered


def _check_sequence(seq: int, devices: int) -> None:
    """Raise an error if a sequence does not divide into two blocks for each device."""
    blocks = 2 * devices
    if seq % blocks == 0:
        return
    below = seq // blocks * blocks or blocks
    above = (seq // blocks + 1) * blocks
    problem = Problem(
        "sequence",
        "does not divide into two blocks for each device",
        f"{seq} / (2 × sequence={devices}) = {seq / blocks:.4g}",
        f"a sequence of {below} or {above} tokens",
    )
    raise ConfigError("Invalid zigzag order:", [problem])


def _exchange(x: jax.Array, number: Int[Array, "1"], devices: int) -> jax.Array:
    """Move one device's tokens to zigzag order: even blocks in one permute, odd ones in another.

    Args:
        number: Of this device. It is an array, for XLA:TPU refuses `jax.lax.axis_index` in a region
            that is manual over some axes alone ("PartitionId instruction is not supported").
    """
    # Device i has blocks 2i and 2i + 1.
    even, odd = jnp.split(x, 2, axis=1)
    to_even = [(i, _owner(2 * i, devices)) for i in range(devices)]
    to_odd = [(i, _owner(2 * i + 1, devices)) for i in range(devices)]
    even = jax.lax.ppermute(even, "sequence", to_even)
    odd = jax.lax.ppermute(odd, "sequence", to_odd)
    on_even = number[0] % 2 == 0
    even_first = jnp.concatenate([even, odd], axis=1)
    odd_first = jnp.concatenate([odd, even], axis=1)
    return jnp.where(on_even, even_first, odd_first)


def _owner(block: int, devices: int) -> int:
    """Return the device of a block in zigzag order."""
    return min(block, 2 * devices - 1 - block)
