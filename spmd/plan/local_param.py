"""One layer's parameter in a region that is manual over the mesh: its gather, and the sum of its gradient."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from spmd.jaxpr.upgrades import name_in_rule
from spmd.model_api.codecs import GATHERS, Encoded
from spmd.model_api.compress import PLAIN, WITHOUT_CODES, Wire
from spmd.plan.context import current
from spmd.plan.manual import all_gather, manual_over, split_axes
from spmd.plan.records import ParamPlacement
from spmd.plan.wires import SECONDARY, CodedGather, scatter_codes, scatters_codes, sum_codes
from spmd.sharding import hops
from spmd.sharding.dims import Dims, dims_spec, extra_axes, is_prefix, local_shape, spec_dims
from spmd.sharding.mesh import AnyMesh


@dataclasses.dataclass(frozen=True)
class LocalParam:
    """Layout of a parameter and its collectives, with the axes of size above 1 of each dimension.

    Attributes:
        stored: The axes of a shard outside the region.
        used: Those of an operand of a matmul: fewer.
        kept: Those of the gradient after its reduction.
        scope: Name scope of the operations on it (`spmd.plan.scopes`).
        wire: What is sent of it.
    """

    stored: Dims
    used: Dims
    kept: Dims
    scope: str = ""
    wire: Wire = PLAIN

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

    @property
    def hop(self) -> tuple[str, int] | None:
        """The axis that is gathered in two hops, and its slices; None for one hop."""
        return self.wire.hop if self.wire.hop and self.wire.hop[0] in itertools.chain(*self.gathers) else None

    @property
    def secondary_spec(self) -> P:
        """The spec of both arrays that `secondary` returns."""
        return P(None, *dims_spec(self.stored))

    def coded(self, shape: Sequence[int]) -> CodedGather | None:
        """Return the gather of a shard of this shape as codes; None for no codec, or a shape without blocks."""
        codec = GATHERS.get(self.wire.gather)
        return CodedGather(codec, self.gathers, self.hop) if codec and codec.block_dim(shape)[1] else None

    def gather(self, kernel: Array | Encoded, dtype: jnp.dtype) -> Array:
        """Gather a shard, or what `secondary` made of it, as it is used, in a dtype."""
        if isinstance(kernel, Encoded):
            return CodedGather(GATHERS[self.wire.gather], self.gathers, self.hop).within(kernel, dtype)
        if coded := self.coded(kernel.shape):
            return coded.within(coded.across(kernel), dtype)
        return all_gather(kernel.astype(dtype), self.gathers)

    def secondary(self, kernel: Array, mesh: AnyMesh) -> Array | Encoded:
        """Return the secondary partition of a parameter, outside the region; without two hops, the parameter itself.

        It has a checkpoint name, and the remat policy saves it.
        """
        coded = self.coded(local_shape(kernel.shape, self.stored, mesh.shape)) if self.hop else None
        if coded is None:
            return kernel
        run = manual_over(mesh, split_axes(mesh), coded.across, self.specs[0], self.secondary_spec)
        return jax.tree.map(lambda part: name_in_rule(part, SECONDARY), run(kernel))

    def sent(self, shape: Sequence[int], axes: Sequence[str], sizes: Mapping[str, int]) -> dict[str, str]:
        """Return axis → dtype or codec of the terms of a gradient of this shape, empty for its own dtype.

        Args:
            shape: Of each device's terms.
            axes: The axes to sum over.
            sizes: Axis → size.
        """
        left, wire, found = list(shape), dict(self.wire.gradients), dict[str, str]()
        scattered = {axis: dim for dim, names in enumerate(self.scatters) for axis in names}
        for axis in (*scattered, *(axis for axis in axes if axis not in scattered)):
            codec = self.wire.codec(wire.get(axis, ""))
            dims = [scattered[axis]] if axis in scattered else range(len(left))
            has_blocks = codec is None or any(scatters_codes(left, dim, sizes[axis], codec) for dim in dims)
            found[axis] = wire.get(axis, "") if has_blocks else WITHOUT_CODES
            if axis in scattered:
                left[scattered[axis]] //= sizes[axis]
        return found

    def reduce(self, gradient: Array, axes: Sequence[str]) -> Array:
        """Sum a gradient over axes, and scatter it as it is kept.

        Over each axis its terms are sent in the dtype or codec of the wire; it has its own dtype in between.
        """
        dtype, slices, sizes = gradient.dtype, dict(self.wire.slices), {axis: jax.lax.axis_size(axis) for axis in axes}
        sent = {axis: name or dtype.name for axis, name in self.sent(gradient.shape, axes, sizes).items()}
        for dim, names in enumerate(self.scatters):
            for axis in names:
                if codec := self.wire.codec(name := sent.pop(axis)):
                    gradient = scatter_codes(gradient, axis, dim, codec, slices.get(axis, 1)).astype(dtype)
                else:
                    gradient = hops.psum_scatter(gradient.astype(name), current().mesh, axis, dim, dtype)
        for name in dict.fromkeys(sent.values()):
            summed = tuple(axis for axis in sent if sent[axis] == name)
            if codec := self.wire.codec(name):
                for axis in summed:
                    gradient = sum_codes(gradient, axis, codec, slices.get(axis, 1))
            else:
                gradient = jax.lax.psum(gradient.astype(name), summed).astype(dtype)
        return gradient

    @property
    def split(self) -> tuple[str, ...]:
        """The axes of an operand of a matmul."""
        return tuple(itertools.chain(*self.used))


def local_param(placed: ParamPlacement, ndim: int) -> LocalParam:
    """Return the layout of a parameter of `ndim` dimensions, over the axes that are not manual yet."""
    split = split_axes(placed.mesh)
    stored, used, kept = (tuple(spec_dims(spec, ndim, split)) for spec in (placed.stored, placed.used, placed.gradient))
    return LocalParam(stored, used, kept, placed.scope, placed.wire)
