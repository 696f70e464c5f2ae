"""The division of a model's layers among the stages of a pipeline.

Stages with unequal numbers of layers have arrays of equal shape: those of the longest stage. The
rows that a shorter stage lacks hold any layer, and nothing computes with them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import get_abstract_mesh

from spmd import tree
from spmd.pipeline.interleave import AXIS, interleave
from spmd.plan.context import current
from spmd.plan.manual import psum, shard_map_over
from spmd.plan.scopes import comm_scope, in_scope
from spmd.sharding.dims import Dims, dims_spec, extra_axes, spec_dims


@dataclasses.dataclass(frozen=True)
class LayerSplit:
    """The layers of each virtual stage.

    Attributes:
        counts: Layers of each virtual stage, in the order of execution; the difference between any
            two is at most 1.
        stages: Stages. Virtual stage *v* is on stage *v* mod `stages`.
    """

    counts: tuple[int, ...]
    stages: int

    @classmethod
    def of(cls, layers: int, stages: int, chunks: int) -> "LayerSplit":
        """Divide layers as equally as possible.

        The last virtual stages have one layer less: the last stage may compute the head, too.

        Example:
            >>> LayerSplit.of(126, 8, 1).counts
            (16, 16, 16, 16, 16, 16, 15, 15)
        """
        parts = stages * chunks
        least, longer = divmod(layers, parts)
        counts = [least + 1] * longer + [least] * (parts - longer)
        return cls(tuple(counts), stages)

    @property
    def chunks(self) -> int:
        """Virtual stages of each stage."""
        return len(self.counts) // self.stages

    @property
    def layers(self) -> int:
        """All layers."""
        return sum(self.counts)

    @property
    def least(self) -> int:
        """Layers of the shortest virtual stage."""
        return min(self.counts)

    @property
    def most(self) -> int:
        """Layers of the longest virtual stage."""
        return max(self.counts)

    @property
    def is_even(self) -> bool:
        """Whether all virtual stages have as many layers."""
        return self.least == self.most

    @property
    def text(self) -> str:
        """The numbers of layers, or of repeats of a group of layers.

        Example:
            >>> LayerSplit.of(126, 16, 1).text
            '14 × 8 + 2 × 7 = 126'
        """
        longer = self.counts.count(self.most)
        shorter = len(self.counts) - longer
        return f"{longer} × {self.most} + {shorter} × {self.least} = {self.layers}"

    @property
    def firsts(self) -> np.ndarray:
        """The number of the first layer of each virtual stage."""
        return np.cumsum((0, *self.counts[:-1]))

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The layer in each row of the stages' arrays, `[stage, chunk, row]`; -1 for none."""
        rows = np.full((self.stages, self.chunks, self.most), -1)
        for number, (first, count) in enumerate(zip(self.firsts, self.counts, strict=True)):
            chunk, stage = divmod(number, self.stages)
            rows[stage, chunk, :count] = np.arange(first, first + count)
        return rows

    def to_stages(self, arrays: Any) -> Any:
        """Move parameters or variables `[layer, …]` to `[stage · chunk · row, …]`, over `pipe`.

        Each device sends its shard of other stages' layers, once.
        """
        return self._move(arrays, back=False)

    def from_stages(self, arrays: Any) -> Any:
        """Move gradients or statistics back, into their sharding in the plan."""
        return self._move(arrays, back=True)

    def _move(self, arrays: Any, *, back: bool) -> Any:
        """Move arrays between where they are stored and their stages."""
        table, on_device = "param_spec", _to_stages
        if back:
            table, on_device = "grad_spec", _from_stages

        def move(path: str, x: jax.Array) -> jax.Array:
            dims, dim = _stored_dims(path, x.ndim, table)
            ends = [dims, _on_stages(dims, dim)]
            if back:
                ends.reverse()
            return _moved(functools.partial(on_device, dim=dim, split=self), *ends)(x)

        return tree.map_with_path(move, arrays)

    def in_chunks(self, layers: Any) -> Any:
        """Return a stage's part of `[stage · chunk · row, …]` as `[chunk, row, …]`.

        Layers that divide are still where they are stored, and move.
        """
        if self.is_even:
            return interleave(layers, self.stages, self.chunks)
        return jax.tree.map(lambda w: w.reshape(self.chunks, -1, *w.shape[1:]), layers)

    def in_parts(self, layers: Any) -> list[Any]:
        """Return layers `[row, …]` in parts: those of all virtual stages, then one by one.

        The gradient of the parts is their concatenation.
        """
        if self.is_even:
            return [layers]
        sizes = (self.least, *[1] * (self.most - self.least))
        leaves, structure = jax.tree.flatten(layers)
        split_leaves = [jax.lax.split(w, sizes) for w in leaves]
        parts = zip(*split_leaves, strict=True)
        return [jax.tree.unflatten(structure, part) for part in parts]

    def joined(self, chunks: Any) -> Any:
        """Return arrays `[chunk, row, …]` as the stage's part: the inverse of `in_chunks`."""
        if self.is_even:
            return interleave(chunks, self.stages, self.chunks, back=True)
        return jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), chunks)


def _to_stages(x: jax.Array, dim: int | None, split: LayerSplit) -> jax.Array:
    """Return the rows of this stage, from all layers split over stages along a dimension."""
    rows = np.maximum(split.rows, 0).reshape(split.stages, -1)
    if dim is None:
        return x[jnp.asarray(rows)[jax.lax.axis_index(AXIS)]]
    return jax.lax.all_to_all(x[rows.reshape(-1)], AXIS, 0, dim, tiled=True)


def _from_stages(x: jax.Array, dim: int | None, split: LayerSplit) -> jax.Array:
    """Return the gradient or the statistics of all layers, from the rows of this stage."""
    rows = split.rows.reshape(split.stages, -1)
    if dim is None:
        own = jnp.asarray(rows)[jax.lax.axis_index(AXIS)]
        has_layer = (own >= 0).reshape(-1, *[1] * (x.ndim - 1))
        number = jnp.promote_types(x.dtype, jnp.uint8)  # a flag is summed as a number
        rows_of_layers = jnp.where(has_layer, x.astype(number), 0)
        whole = jnp.zeros((split.layers, *x.shape[1:]), number)
        whole = whole.at[jnp.maximum(own, 0)].add(rows_of_layers)
        return psum(whole, (AXIS,)).astype(x.dtype)
    parts = jax.lax.all_to_all(x, AXIS, dim, 0, tiled=True)
    places = np.argsort(rows.reshape(-1))[-split.layers :]
    return parts[places]


def _stored_dims(path: str, ndim: int, table: str) -> tuple[list[tuple[str, ...]], int | None]:
    """Return the axes of each dimension of a stack as stored, and the dimension split over stages.

    Args:
        table: `param_spec` or `grad_spec`.
    """
    context = current()
    if path in context.placements:
        spec = getattr(context.placements[path].of_stack(), table)
    else:
        spec = context.variables.get(path, P())
    assert context.mesh is not None, "a step is traced within its plan"
    dims = spec_dims(spec, ndim, context.mesh.axis_names)
    for dim, axes in enumerate(dims):
        if AXIS in axes:
            return dims, dim
    return dims, None


def _on_stages(dims: Sequence[tuple[str, ...]], dim: int | None) -> list[tuple[str, ...]]:
    """Return the axes of each dimension of a stack on its stages."""
    staged = list(dims)
    if dim is not None:
        staged[dim] = tuple(axis for axis in dims[dim] if axis != AXIS)
    staged[0] = (AXIS,)
    return staged


def _moved(local: Callable[..., jax.Array], before: Dims, after: Dims) -> Callable[..., jax.Array]:
    """Run a move in a region that is manual over the whole mesh.

    Where some axes are manual already, arrays are shards over them.
    """
    mesh = current().mesh
    assert mesh is not None, "a step is traced within its plan"
    manual = get_abstract_mesh().manual_axes
    specs = []
    for dims in (before, after):
        left = extra_axes(dims, [manual] * len(dims))
        specs.append(dims_spec(left))
    region = shard_map_over(mesh, mesh.axis_names, local, *specs)

    def run(x: jax.Array) -> jax.Array:
        with in_scope(comm_scope("pipeline, layers to their stages")):
            return region(x)

    return run
