"""Collectives between the stages of a pipeline."""

from typing import Any

import jax
import jax.numpy as jnp

from spmd.pipeline.interleave import AXIS
from spmd.plan.context import current
from spmd.plan.scopes import comm_scope, in_scope
from spmd.sharding.mesh import is_cpu


def shift(arrays: Any, stages: int, by: int, *, chunks: int = 1) -> Any:
    """Send to the next stage (1) or the previous one (-1).

    The last stage sends to the first, or back, only if stages have several chunks.
    """
    pairs = list[tuple[int, int]]()
    for source in range(stages):
        target = (source + by) % stages
        is_neighbour = target - source == by
        if is_neighbour or chunks > 1:
            pairs.append((source, target))
    with in_scope(comm_scope("pipeline, from stage to stage")):
        return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), arrays)


def sum_of_stages(arrays: Any, what: str = "sums of all stages") -> Any:
    """Sum over stages.

    XLA:CPU ends the process at a sum of narrow floats in a region that is manual over some axes
    alone; it sums them in float32.

    Args:
        what: What is summed, for the audit of collectives.
    """
    needs_float32 = is_cpu(current().mesh)

    def add(x: jax.Array) -> jax.Array:
        is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        if needs_float32 and is_narrow:
            return jax.lax.psum(x.astype(jnp.float32), AXIS).astype(x.dtype)
        return jax.lax.psum(x, AXIS)

    with in_scope(comm_scope(f"pipeline, {what}")):
        return jax.tree.map(add, arrays)
