"""Parameters of all stages, such as the embedding and the head, split over `pipe` by the table.

Only the training state is split. The parameters are gathered once before the ticks, and the sum of
the stages' gradients is scattered once after them: as many bytes as one all-reduce of the gradients
of replicated parameters.
"""

from typing import Any

import jax
from jax.sharding import get_abstract_mesh

from spmd import tree
from spmd.pipeline.interleave import AXIS
from spmd.plan.context import constrain, current
from spmd.plan.manual import psum, psum_scatter, shard_map_over
from spmd.plan.scopes import in_scope
from spmd.sharding.dims import dims_spec, extra_axes, spec_dims
from spmd.sharding.optimizer_state import drop_axis


def gather_over_stages(arrays: Any) -> Any:
    """Gather parameters or frozen variables over `pipe`; over other axes they stay as stored."""

    def gather(path: str, x: jax.Array) -> jax.Array:
        placed = current().placements.get(path)
        if placed is None:
            return x
        spec = drop_axis(placed.of_stack().param_spec, AXIS)
        with in_scope(placed.scope):
            return constrain(x, placed.mesh, spec, "a parameter of all stages")

    return tree.map_with_path(gather, arrays)


def sum_over_stages(gradients: Any) -> Any:
    """Return the sums of gradients `[stage, …]`, split as the plan keeps them.

    In a region around the pipeline that is manual over `pipe`, the stage's own gradients are
    returned: they are summed outside of that region.
    """
    if AXIS in get_abstract_mesh().manual_axes:
        return jax.tree.map(lambda d: d[0], gradients)
    return tree.map_with_path(_sum_gradient, gradients)


def _sum_gradient(path: str, d: jax.Array) -> jax.Array:
    """Return the sum of a gradient `[stage, …]`, split as the plan keeps it."""
    placed = current().placements[path].of_stack()
    dims = spec_dims(placed.grad_spec, d.ndim - 1, placed.mesh.axis_names)
    rest = extra_axes(dims, [(AXIS,)] * len(dims))
    scattered = extra_axes(dims, rest)  # `pipe` where it splits a dimension
    # Within a dimension, `pipe` comes last: the order of scattered parts.
    split = [axes + own for axes, own in zip(rest, scattered, strict=True)]

    def local(d: jax.Array) -> jax.Array:
        if any(scattered):
            return psum_scatter(d[0], scattered)
        return psum(d[0], (AXIS,))

    before = dims_spec([(AXIS,), *rest])
    run = shard_map_over(placed.mesh, placed.mesh.axis_names, local, before, dims_spec(split))
    with in_scope(placed.scope):
        return run(d)
