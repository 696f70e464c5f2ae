"""Parameters of all stages, such as the embedding and the head, where the table splits them over `pipe`.

Only the training state is split. They are gathered once before the ticks, and the sum of the stages' gradients is
scattered once after them: as many bytes as the all-reduce of what every stage stores whole.
"""

from typing import Any

import jax
from jax.sharding import get_abstract_mesh

from spmd import tree
from spmd.pipeline.interleave import AXIS
from spmd.plan.context import constrain, current
from spmd.plan.manual import manual_over, psum, psum_scatter
from spmd.plan.scopes import in_scope
from spmd.sharding.dims import dims_spec, extra_axes, spec_dims
from spmd.sharding.optimizer_state import drop_axis


def gather_over_stages(arrays: Any) -> Any:
    """Return parameters or frozen variables whole over `pipe`, and split over all other axes as they are stored."""

    def gather(path: str, x: jax.Array) -> jax.Array:
        if (placed := current().placements.get(path)) is None:
            return x
        with in_scope(placed.scope):
            return constrain(x, placed.mesh, drop_axis(placed.of_stack().stored, AXIS), "a parameter of all stages")

    return tree.map_with_path(gather, arrays)


def sum_over_stages(gradients: Any) -> Any:
    """Return the sums of gradients `[stage, …]`, split as the plan keeps them.

    In a region around the pipeline that is manual over `pipe`, each stage's gradient is returned: the region adds them.
    """
    if AXIS in get_abstract_mesh().manual_axes:
        return jax.tree.map(lambda d: d[0], gradients)

    def add(path: str, d: jax.Array) -> jax.Array:
        placed = current().placements[path].of_stack()
        dims = spec_dims(placed.gradient, d.ndim - 1, placed.mesh.axis_names)
        over = [(AXIS,) if AXIS in axes else () for axes in dims]
        rest = extra_axes(dims, over)
        split = dims_spec([axes + own for axes, own in zip(rest, over, strict=True)])  # the order of scattered parts

        def local(d: jax.Array) -> jax.Array:
            return psum_scatter(d[0], over) if any(over) else psum(d[0], (AXIS,))

        with in_scope(placed.scope):
            return manual_over(placed.mesh, placed.mesh.axis_names, local, dims_spec([(AXIS,), *rest]), split)(d)

    return tree.map_with_path(add, gradients)
