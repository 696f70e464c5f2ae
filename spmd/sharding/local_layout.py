"""Layout of an array in a region that is manual over the mesh, and of its gradient."""

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
        stored: Those of a shard outside the region.
        used: Those of an operand of a matmul: fewer.
        kept: Those of the gradient after its reduction.
        mesh: The mesh, which says how XLA makes collectives; None where it does not matter.
    """

    stored: Dims
    used: Dims
    kept: Dims
    mesh: AnyMesh | None = None

    @property
    def specs(self) -> tuple[P, P, P]:
        """The specs of `stored`, `used` and `kept`."""
        return dims_spec(self.stored), dims_spec(self.used), dims_spec(self.kept)

    @property
    def gathers(self) -> Dims:
        """The axes that each dimension is gathered over."""
        return extra_axes(self.stored, self.used)

    @property
    def scatters(self) -> Dims:
        """The axes that each dimension of the gradient is scattered over."""
        return extra_axes(self.kept, self.used)

    @property
    def scattered(self) -> dict[str, int]:
        """Axis → the dimension of the gradient that is scattered over it, in order."""
        dims = {}
        for dim, axes in enumerate(self.scatters):
            for axis in axes:
                dims[axis] = dim
        return dims

    @property
    def is_gathered(self) -> bool:
        """Whether a gather leads from the stored shards to the used ones."""
        return self.stored != self.used and is_prefix(self.used, self.stored)

    @property
    def split(self) -> tuple[str, ...]:
        """The axes of an operand of a matmul."""
        return tuple(itertools.chain(*self.used))

    def with_whole_gradient(self) -> Self:
        """Return the layout with a gradient that is summed, and not scattered."""
        return dataclasses.replace(self, kept=self.used)
