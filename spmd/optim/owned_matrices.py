"""Muon's orthogonalisation, each matrix whole on its owners.

A stack of kernels is `[layer, …, inputs, outputs]`, and its inputs or outputs are split over devices.
The same devices own its matrices instead: an exchange gathers each matrix where it is owned, in the
compute dtype; it is orthogonalised there, and sent back.

```
[96, m/4, n]  ──▶ all-to-all ──▶ [24, m, n] ──▶ Newton–Schulz ──▶ all-to-all ──▶ [96, m/4, n]
```

Kernels of equal matrices go together, and if they are fewer than the owners, the next kernels begin
where they end: a device without a matrix of a kind does not compute. Stacked dimensions that are
split already, such as experts, stay where they are. Sources: Jordan et al., 2024
(https://kellerjordan.github.io/posts/muon/); Liu et al., arXiv:2502.16982 (owners).
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jax.sharding import get_abstract_mesh
from optax import contrib

from spmd.optim.treatment import Treatment
from spmd.optim.two_phase import treatment_of
from spmd.sharding.dims import Dims, dims_spec, local_shape, spec_dims
from spmd.sharding.layer_paths import dims_of
from spmd.sharding.mesh import AnyMesh, nontrivial_axes, shards_of
from spmd.tree import flatten, map_with_path

_NEWTON_SCHULZ = contrib.scale_by_muon(beta=0.0, nesterov=False)
"""Without momentum, it orthogonalises."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class UpdateLayout:
    """Sharding of an optimizer's arrays, an extra argument of its update (`layout`).

    Attributes:
        specs: Path of a parameter and the spec of its momentum, as pairs; stacked dimensions are
            in front, as `per_layer` keeps them.
        dtype: The dtype of orthogonalisation.
    """

    mesh: AnyMesh
    specs: tuple[tuple[str, P], ...]
    dtype: Any

    @classmethod
    def of(cls, plan: Any) -> "UpdateLayout":
        """Return the layout of a plan.

        The dtype is bfloat16 where that is the compute dtype, otherwise float32: squares of small
        gradients are zero in float16.
        """
        specs = list[tuple[str, P]]()
        for entry in plan.optimizer_state:
            _, is_momentum, path = entry.path.rpartition("/mu/")
            if is_momentum:
                specs.append((path, entry.spec))
        dtype = jnp.dtype(plan.precision.compute)
        if dtype != jnp.bfloat16:
            dtype = jnp.dtype(jnp.float32)
        return cls(plan.mesh, tuple(specs), dtype)


def layout_argument(plan: Any) -> dict[str, UpdateLayout]:
    """Return `layout` for an optimizer with owners, nothing for others.

    A line search passes its arguments on to the loss.
    """
    treatment = treatment_of(plan.optimizer)
    if treatment is None or not treatment.orthogonalizes:
        return {}
    return {"layout": UpdateLayout.of(plan)}


def nesterov_momentum(beta: float) -> optax.GradientTransformation:
    """Return the momentum of Muon, with the state of `optax.contrib.scale_by_muon`."""
    muon = contrib.scale_by_muon(beta=beta)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        count = optax.safe_increment(state.count)
        ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
        now = optax.tree.bias_correction(updates, beta, count)
        mixed = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        return mixed, state._replace(count=count, mu=mu)

    return optax.GradientTransformation(muon.init, update)


def orthogonalize(
    updates: Any, treatment: Treatment, layout: UpdateLayout | None, rms: float
) -> Any:
    """Orthogonalise the matrices of a tree of updates; other arrays stay as they are.

    Args:
        updates: Arrays as parameters are stored.
        layout: None for no exchange: each device computes what XLA makes of it.
        rms: The root mean square of the results.
    """
    arrays = {path: x for path, x in flatten(updates).items() if hasattr(x, "shape")}
    kernels = list(_kernels(arrays, treatment, layout))
    matrices = dict[str, jax.Array]()
    for kernel in kernels:
        x = arrays[kernel.path]
        dtype = x.dtype if layout is None else layout.dtype
        matrices[kernel.path] = kernel.arranged(x.astype(dtype))
    owned = collections.defaultdict[Any, list[_Kernel]](list)
    for kernel in kernels:
        if kernel.owners:
            owned[kernel.kind].append(kernel)
        else:
            matrices[kernel.path] = _over_batch(matrices[kernel.path])
    first = 0  # the first owner of the next kernels
    for group in owned.values():
        assert layout is not None, "without a layout nothing is split"
        matrices |= _exchanged(group, matrices, layout, first)
        first = _next_owner(group, layout, first)
    done = dict(arrays)
    for kernel in kernels:
        x = kernel.restore(matrices[kernel.path]).astype(arrays[kernel.path].dtype)
        # The root mean square of an orthogonal matrix is 1 / √(its longer side).
        done[kernel.path] = x * (rms * math.sqrt(kernel.sides[1]))
    return map_with_path(lambda path, x: done.get(path, x), updates)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A stack of matrices, its longer side last.

    Attributes:
        order: The dimensions as stored, in the order of the matrices: batch, rows, columns.
        shape: Its shape in that order.
        dims: The mesh axes of each dimension in that order.
        batch: Number of dimensions before the matrices.
        rows: Number of dimensions of the shorter side.
    """

    path: str
    order: tuple[int, ...]
    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]
    batch: int
    rows: int

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns."""
        columns = self.batch + self.rows
        return math.prod(self.shape[self.batch : columns]), math.prod(self.shape[columns:])

    @property
    def sides_dims(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The mesh axes of rows and of columns."""
        return self.dims[self.batch], self.dims[self.batch + self.rows]

    @property
    def owners(self) -> tuple[str, ...]:
        """The mesh axes over which matrices are owned; none if they are whole already.

        None, too, where axes split another dimension of a side than its first: a reshape would
        gather it.
        """
        firsts = self.batch, self.batch + self.rows
        for dim, axes in enumerate(self.dims):
            if axes and dim >= self.batch and dim not in firsts:
                return ()
        rows, columns = self.sides_dims
        return rows + columns

    @property
    def spec(self) -> P:
        """The spec of the arranged matrices."""
        return dims_spec([*self.dims[: self.batch], *self.sides_dims])

    @property
    def kind(self) -> Any:
        """What kernels of one exchange have in common."""
        return self.sides, self.sides_dims, self.dims[: self.batch]

    def arranged(self, x: jax.Array) -> jax.Array:
        """Return the matrices `[*batch, rows, columns]`."""
        return x.transpose(self.order).reshape(*self.shape[: self.batch], *self.sides)

    def restore(self, x: jax.Array) -> jax.Array:
        """Return an array as stored; the inverse of `arranged`."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return x.reshape(self.shape).transpose(back)


def _kernels(
    arrays: Mapping[str, Any], treatment: Treatment, layout: UpdateLayout | None
) -> Iterator[_Kernel]:
    """Yield the stacks of matrices among the arrays."""
    specs: Mapping[str, P] = {}
    split: tuple[str, ...] = ()
    if layout is not None:
        specs = dict(layout.specs)
        split = tuple(nontrivial_axes(layout.mesh.shape))
    for path, x in arrays.items():
        stacked = dims_of(path, treatment.stacks)
        own = [dim for dim in range(x.ndim) if dim not in stacked]
        matrix = treatment.matrix(path, len(own))
        if matrix is None:
            continue
        of_state = spec_dims(specs.get(path, P()), x.ndim, split)
        dims: list[tuple[str, ...]] = [()] * x.ndim
        for dim, axes in zip((*stacked, *own), of_state, strict=True):
            dims[dim] = axes
        inputs = [own[dim] for dim in matrix.inputs]
        outputs = [own[dim] for dim in matrix.outputs]
        yield _kernel(path, x.shape, dims, inputs, outputs)


def _kernel(
    path: str, shape: Sequence[int], dims: Dims, inputs: Sequence[int], outputs: Sequence[int]
) -> _Kernel:
    """Return the stack of matrices of an array; inputs and outputs are dimensions as stored."""

    def by_length(side: Sequence[int]) -> tuple[int, bool]:
        is_whole = not dims[side[0]]
        return math.prod(map(shape.__getitem__, side)), is_whole

    # f(X) = f(Xᵀ)ᵀ. Of a square, the split side comes first, so that more kernels are alike.
    rows, columns = sorted((inputs, outputs), key=by_length)
    batch = sorted(set(range(len(shape))) - {*rows, *columns})
    order = (*batch, *rows, *columns)
    ordered_shape = list[int]()
    ordered_dims = list[tuple[str, ...]]()
    for dim in order:
        ordered_shape.append(shape[dim])
        ordered_dims.append(tuple(dims[dim]))
    return _Kernel(
        path, order, tuple(ordered_shape), tuple(ordered_dims), batch=len(batch), rows=len(rows)
    )


def _newton_schulz(matrix: jax.Array) -> jax.Array:
    """Orthogonalise one matrix."""
    state = _NEWTON_SCHULZ.init(matrix)
    result, _ = _NEWTON_SCHULZ.update(matrix, state)
    return result


def _over_batch(x: jax.Array) -> jax.Array:
    """Orthogonalise the matrices of the last two dimensions."""
    function: Callable[[jax.Array], jax.Array] = _newton_schulz
    for _ in range(x.ndim - 2):
        function = jax.vmap(function)
    return function(x)


class _Shares(NamedTuple):
    """The distribution of matrices of one kind.

    Attributes:
        matrices: Matrices in all, of a device's part of the batch.
        each: Matrices of an owner; the last owners may have fewer.
    """

    owners: int
    matrices: int
    each: int


def _shares(group: Sequence[_Kernel], layout: UpdateLayout) -> _Shares:
    owners = shards_of(group[0].owners, layout.mesh.shape)
    count = 0
    for kernel in group:
        dims = kernel.dims[: kernel.batch]
        count += math.prod(local_shape(kernel.shape[: kernel.batch], dims, layout.mesh.shape))
    return _Shares(owners, count, -(-count // owners))


def _next_owner(group: Sequence[_Kernel], layout: UpdateLayout, first: int) -> int:
    """Return the owner after the last of a group."""
    shares = _shares(group, layout)
    busy = -(-shares.matrices // shares.each)
    return (first + busy) % shares.owners


def _exchanged(
    group: Sequence[_Kernel], matrices: Mapping[str, jax.Array], layout: UpdateLayout, first: int
) -> dict[str, jax.Array]:
    """Return the orthogonalised matrices of kernels of one kind.

    Args:
        first: The first owner.
    """
    like = group[0]
    stacks = list[jax.Array]()
    specs = list[P]()
    for kernel in group:
        stacks.append(matrices[kernel.path])
        specs.append(kernel.spec)
    mesh: AnyMesh | None = layout.mesh
    if get_abstract_mesh().manual_axes:  # inside another region, that one's mesh
        mesh = None
    region = jax.shard_map(
        functools.partial(_in_region, like=like, shares=_shares(group, layout), first=first),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=tuple(specs),
        axis_names=set(itertools.chain.from_iterable(like.dims)),
        check_vma=False,
    )
    paths = [kernel.path for kernel in group]
    return dict(zip(paths, region(*stacks), strict=True))


def _in_region(
    *stacks: jax.Array, like: _Kernel, shares: _Shares, first: int
) -> tuple[jax.Array, ...]:
    """Exchange a device's parts of matrices, and orthogonalise its own matrices."""
    parts = [x.reshape(-1, *x.shape[-2:]) for x in stacks]
    missing = shares.each * shares.owners - shares.matrices
    parts.append(jnp.zeros((missing, *parts[0].shape[1:]), parts[0].dtype))
    shift = first * shares.each
    rows = jnp.roll(jnp.concatenate(parts), shift, axis=0)
    exchanges = [(axes, dim) for dim, axes in enumerate(like.sides_dims, start=1) if axes]
    # XLA:CPU takes the parts of a concatenation, in layouts that differ, without the barrier.
    rows = jax.lax.optimization_barrier(rows)
    for axes, dim in exchanges:
        rows = jax.lax.all_to_all(rows, axes, split_axis=0, concat_axis=dim, tiled=True)
    rows = _of_owner(rows, like, shares, first)
    for axes, dim in reversed(exchanges):
        rows = jax.lax.all_to_all(rows, axes, split_axis=dim, concat_axis=0, tiled=True)
    rows = jnp.roll(rows, -shift, axis=0)
    found = []
    for x in stacks:
        taken = math.prod(x.shape[:-2])
        found.append(rows[:taken].reshape(x.shape))
        rows = rows[taken:]
    return tuple(found)


def _of_owner(rows: jax.Array, like: _Kernel, shares: _Shares, first: int) -> jax.Array:
    """Orthogonalise the matrices of a device, without the zeros of a fill-up."""
    if shares.each * shares.owners == shares.matrices:
        return _over_batch(rows)
    owner = (jax.lax.axis_index(like.owners) - first) % shares.owners
    place = owner * shares.each

    def one(numbered: tuple[jax.Array, jax.Array]) -> jax.Array:
        number, matrix = numbered
        is_there = place + number < shares.matrices
        return jax.lax.cond(is_there, _newton_schulz, lambda x: x, matrix)

    return jax.lax.map(one, (jnp.arange(shares.each), rows))
