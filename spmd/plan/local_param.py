"""One layer's parameter in a region that is manual over the mesh: its gather, and the sum of its gradient."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from spmd.plan.context import current
from spmd.plan.manual import Dims, all_gather, dims_spec, extra_axes, is_prefix, spec_dims, split_axes
from spmd.plan.records import ParamPlacement
from spmd.sharding import hops


@dataclasses.dataclass(frozen=True)
class LocalParam:
    """Layout of a parameter and its collectives, with the axes of size above 1 of each dimension.

    Attributes:
        stored: The axes of a shard outside the region.
        used: Those of an operand of a matmul: fewer.
        kept: Those of the gradient after its reduction.
        scope: Name scope of the operations on it (`spmd.plan.scopes`).
    """

    stored: Dims
    used: Dims
    kept: Dims
    scope: str = ""

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
    def is_gathered(self) -> bool:
        """Whether a gather leads from the stored shards to the used ones."""
        return self.stored != self.used and is_prefix(self.used, self.stored)

    def gather(self, kernel: Array) -> Array:
        """Gather a shard as it is used."""
        return all_gather(kernel, self.gathers)

    def reduce(self, gradient: Array, axes: Sequence[str]) -> Array:
        """Sum a gradient over axes, and scatter it as it is kept.

        It is sent over each axis in the dtype of the plan's precision policy, and has its own dtype in between.
        """
        context, dtype = current(), gradient.dtype
        sent = dict.fromkeys(axes, dtype) if context.precision is None else context.precision.exchange_dtypes(axes)
        for dim, names in enumerate(self.scatters):
            for axis in names:
                gradient = hops.psum_scatter(gradient.astype(sent.pop(axis)), context.mesh, axis, dim, dtype)
        for wire in dict.fromkeys(sent.values()):
            summed = tuple(axis for axis in sent if sent[axis] == wire)
            gradient = jax.lax.psum(gradient.astype(wire), summed).astype(dtype)
        return gradient

    @property
    def split(self) -> tuple[str, ...]:
        """The axes of an operand of a matmul."""
        return tuple(itertools.chain(*self.used))


def local_param(placed: ParamPlacement, ndim: int) -> LocalParam:
    """Return the layout of a parameter of `ndim` dimensions, over the axes that are not manual yet."""
    split = split_axes(placed.mesh)
    stored, used, kept = (tuple(spec_dims(spec, ndim, split)) for spec in (placed.stored, placed.used, placed.gradient))
    return LocalParam(stored, used, kept, placed.scope)
