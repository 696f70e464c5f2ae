"""Layout of an array and of its gradient in a region manual over the mesh."""

import dataclasses
import itertools
from typing import Self

from jax.sharding import PartitionSpec as P

from spmd.sharding.dims import Dims, dims_spec, extra_axes, is_prefix
from spmd.sharding.mesh import AnyMesh


@dataclasses.dataclass(frozen=True)
class LocalLayout:
    """The axes of size above 1 of each dimension.

    Attributes:
        param_dims: Those of a shard outside the region.
        compute_dims: Those of an operand of a matmul: fewer.
        grad_dims: Those of the gradient after its reduction.
        mesh: The mesh, for collectives that depend on the hardware; None where they do not matter.
    """

    param_dims: Dims
    compute_dims: Dims
    grad_dims: Dims
    mesh: AnyMesh | None = None

    @property
    def specs(self) -> tuple[P, P, P]:
        """The specs of `param_dims`, `compute_dims` and `grad_dims`."""
        return dims_spec(self.param_dims), dims_spec(self.compute_dims), dims_spec(self.grad_dims)

    @property
    def gathers(self) -> Dims:
        """The axes of the gather of each dimension."""
        return extra_axes(self.param_dims, self.compute_dims)

    @property
    def scatters(self) -> Dims:
        """The axes of the scatter of each dimension of the gradient."""
        return extra_axes(self.grad_dims, self.compute_dims)

    @property
    def scattered(self) -> dict[str, int]:
        """Axis → the dimension of the gradient scattered over it, in order."""
        dims = {}
        for dim, axes in enumerate(self.scatters):
            for axis in axes:
                dims[axis] = dim
        return dims

    @property
    def is_gathered(self) -> bool:
        """Whether a gather leads from the stored shards to the used ones."""
        return self.param_dims != self.compute_dims and is_prefix(
            self.compute_dims, self.param_dims
        )

    @property
    def split(self) -> tuple[str, ...]:
        """The axes of an operand of a matmul."""
        return tuple(itertools.chain(*self.compute_dims))

    def with_whole_gradient(self) -> Self:
        """Return the layout with a gradient summed but not scattered."""
        return dataclasses.replace(self, grad_dims=self.compute_dims)
