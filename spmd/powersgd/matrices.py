"""Gradients for PowerSGD, as matrices, and the layout of its state (`spmd.powersgd.transform`).

A plan decides which gradients are compressed, and the state is placed as they are.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from spmd.plan.plan import ShardingPlan
from spmd.sharding.dims import dims_spec, local_shape, spec_dims
from spmd.sharding.layer_paths import dims_of
from spmd.sharding.mesh import AnyMesh, nontrivial_axes

NAME = "compression"
"""Name of the state."""

AXIS = "data"
"""The axis over which gradients are compressed."""

ERROR, Q, STEP = "error", "q", "step"


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The gradients of one parameter as matrices; each device compresses its shards by themselves.

    Attributes:
        shape: The parameter's shape.
        spec: The sharding of its gradient.
        dims: The two dimensions of a matrix; the others count layers and experts.
        local: The shape of a shard.
    """

    shape: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]
    dims: tuple[int, int]
    local: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of a shard: n/f."""
        return self.local[self.dims[0]]

    @property
    def columns(self) -> int:
        """Columns of a shard."""
        return self.local[self.dims[1]]

    @property
    def count(self) -> int:
        """The number of matrices of a device."""
        return math.prod(self.local) // (self.rows * self.columns)

    @property
    def batch(self) -> tuple[int, ...]:
        """The batch dimensions: layers and experts."""
        return tuple(dim for dim in range(len(self.shape)) if dim not in self.dims)

    def sent(self, rank: int) -> tuple[int, int]:
        """Return the bytes of P and of Q, of all matrices of a device."""
        row_bytes = 4 * rank * self.count
        return row_bytes * self.rows, row_bytes * self.columns

    @property
    def error_spec(self) -> P:
        """The spec of the errors, `[device of data, *shape]`."""
        return P(AXIS, *dims_spec(self.spec))

    @property
    def q_spec(self) -> P:
        """The spec of Q, `[shard of rows, *batch, rank, m]`."""
        row_dim, column_dim = self.dims
        batch = self._of_batch(self.spec)
        return dims_spec([self.spec[row_dim], *batch, (), self.spec[column_dim]])

    def q_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of Q on all devices."""
        row_dim, column_dim = self.dims
        shards = self.shape[row_dim] // self.rows
        batch = self._of_batch(self.shape)
        return (shards, *batch, rank, self.shape[column_dim])

    def _of_batch(self, entries: Sequence[Any]) -> list[Any]:
        """Return the entries of the batch dimensions."""
        return [entries[dim] for dim in self.batch]


def find_matrices(
    plan: ShardingPlan, rank: int, rate: float, summed: Sequence[str] = (AXIS,)
) -> tuple[dict[str, Matrix], dict[str, str]]:
    """Return path → matrices to compress, and path → the reason to send a gradient as it is.

    Args:
        rate: A matrix is compressed if (n + m) · rank · rate < n · m.
        summed: The axes of the exchange.
    """
    matrices = dict[str, Matrix]()
    plain = dict[str, str]()
    for entry in plan.gradients:
        stacked = dims_of(entry.path, plan.rules.stacks)
        if len(entry.shape) - len(stacked) < 2:
            plain[entry.path] = "no matrix"
            continue
        matrix = make_matrix(entry.shape, entry.spec, stacked, plan.mesh, summed)
        reason = _not_compressed(matrix, rank, rate)
        if reason:
            plain[entry.path] = reason
        else:
            matrices[entry.path] = matrix
    return matrices, plain


def make_matrix(
    shape: tuple[int, ...],
    spec: P,
    stacked: Sequence[int],
    mesh: AnyMesh,
    summed: Sequence[str] = (AXIS,),
) -> Matrix:
    """Return the matrices of a gradient: its last two unstacked dimensions.

    An exchange scatters what a device has, so in a dimension of several axes the summed ones are
    the last.
    """
    axes = tuple(nontrivial_axes(mesh.shape))
    dims = []
    for split in spec_dims(spec, len(shape), axes):
        dims.append(tuple(sorted(split, key=lambda axis: axis in summed)))
    *_, rows, columns = (dim for dim in range(len(shape)) if dim not in stacked)
    local = local_shape(shape, dims, mesh.shape)
    return Matrix(shape, tuple(dims), (rows, columns), local)


def _not_compressed(matrix: Matrix, rank: int, rate: float) -> str:
    """Return the reason to send a matrix as it is, empty if it is compressed."""
    n = matrix.rows
    m = matrix.columns
    if any(AXIS in axes for axes in matrix.spec):
        return f"split over {AXIS}"
    if rank > min(n, m):
        return f"rank {rank} > min({n}, {m})"
    sent = (n + m) * rank * rate
    if sent >= n * m:
        return f"({n} + {m}) · {rank} · {rate:g} = {sent:g} ≥ {n} · {m} = {n * m}"
    return ""
