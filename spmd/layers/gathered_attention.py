"""Splash attention of each device's queries to all keys, gathered over `sequence`.

Queries stay where they are, so heads need not divide over the devices, as they must for an
all-to-all. With grouped queries keys and values are small: a gather sends as many bytes as a ring.
Their gradients are summed and scattered back. In zigzag order each device has the same work.

The backward pass gathers keys and values again, and keeps the kernel's output and log-sum-exp.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Shaped

from spmd.chips import SplashBlocks
from spmd.layers.attention_options import AttentionOptions
from spmd.layers.ring_attention import Segments, Sinks, check_division
from spmd.layers.splash_attention import Queries, splash_attention
from spmd.plan.manual import is_in_stage, shard_map_over, split_axes
from spmd.sharding.mesh import BATCH_AXES, AnyMesh

_BLOCKS = SplashBlocks()
_PURPOSE = "context-parallel attention"
_RESIDUALS = "gathered_attention"
"""Checkpoint name of what the backward pass of the kernel reads, if a policy has none for it."""


def gathered_attention(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    segments: Segments,
    sinks: Sinks,
    *,
    mesh: AnyMesh,
    queries: Queries,
    options: AttentionOptions,
    blocks: SplashBlocks = _BLOCKS,
    residuals: str | None = None,
    interpret: bool = False,
) -> Float[Array, "batch seq heads value_dim"]:
    """Attend from the queries of each device to all keys.

    Args:
        blocks: Of the kernel, on the mesh's chip.
        residuals: Checkpoint name by which a policy saves what the backward pass of the kernel
            reads; it is kept without one, too.
        interpret: Run the kernel without a TPU, for tests.
    """
    split = split_axes(mesh)
    batch = tuple(axis for axis in BATCH_AXES if axis in split)
    heads: tuple[str, ...] = ()
    if "tensor" in split:
        heads = ("tensor",)
        check_division(query, key, {"tensor": mesh.shape["tensor"]})
    tokens = P(batch or None, "sequence", heads or None)
    in_specs = (tokens, tokens, tokens, P(batch or None, "sequence"), P(heads or None))
    saved = residuals or _RESIDUALS
    attend = functools.partial(
        _attend_on_device,
        queries=queries,
        options=options,
        blocks=blocks,
        residuals=saved,
        interpret=interpret,
    )
    # Without it, gathered keys and values would be kept for the backward pass.
    local = jax.checkpoint(
        attend,
        policy=jax.checkpoint_policies.save_only_these_names(saved),
        prevent_cse=False,
    )
    axes = (*batch, "sequence", *heads)
    run = shard_map_over(mesh, axes, local, in_specs, tokens, purpose=_PURPOSE)
    return run(query, key, value, segments, sinks)


def _attend_on_device(
    query: Float[Array, "batch local heads dim"],
    key: Float[Array, "batch local kv_heads dim"],
    value: Float[Array, "batch local kv_heads value_dim"],
    segments: Segments,
    sinks: Sinks,
    *,
    queries: Queries,
    options: AttentionOptions,
    blocks: SplashBlocks,
    residuals: str,
    interpret: bool,
) -> Float[Array, "batch local heads value_dim"]:
    key_segments = None
    if segments is not None:
        key_segments = _gather(segments, queries)
    return splash_attention(
        query,
        _gather(key, queries),
        _gather(value, queries),
        segments,
        sinks,
        options,
        key_segments=key_segments,
        queries=queries,
        device=jax.lax.axis_index("sequence"),
        blocks=blocks,
        residuals=residuals,
        interpret=interpret,
    )


def _gather(
    x: Shaped[Array, "batch local ..."], queries: Queries
) -> Shaped[Array, "batch seq ..."]:
    """Gather the tokens of all devices, in the order of the sequence."""
    blocks = x[:, None]
    if queries.is_zigzag:
        early, late = jnp.split(x, 2, axis=1)
        if is_in_stage():  # a permute might wait for idle stages
            return _gather_zigzag(early, late)
        # The last device has the first late block. Mirrored, late blocks come in their own order.
        devices = range(queries.devices)
        mirror = list(zip(devices, reversed(devices), strict=True))
        late = jax.lax.ppermute(late, "sequence", mirror)
        blocks = jnp.stack([early, late], axis=1)
    gathered = jax.lax.all_gather(blocks, "sequence")  # [device, batch, early or late, block, …]
    in_order = jnp.moveaxis(gathered, 0, 2)
    return in_order.reshape(x.shape[0], -1, *x.shape[2:])


def _gather_zigzag(
    early: Shaped[Array, "batch block ..."], late: Shaped[Array, "batch block ..."]
) -> Shaped[Array, "batch seq ..."]:
    """Gather blocks in zigzag order without a permute: late blocks are reversed on each device."""
    early = jax.lax.all_gather(early, "sequence", axis=1)
    late = jnp.flip(jax.lax.all_gather(late, "sequence", axis=1), axis=1)
    blocks = jnp.concatenate([early, late], axis=1)  # [batch, block, token, …]
    return blocks.reshape(blocks.shape[0], -1, *blocks.shape[3:])
