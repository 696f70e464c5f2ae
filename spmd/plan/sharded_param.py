"""One layer's parameter in a region manual over the mesh: its gather, and its gradient's sum."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from spmd.jaxpr.upgrades import name_in_rule
from spmd.plan.manual import shard_map_over, split_axes
from spmd.plan.records import ParamPlacement
from spmd.sharding.dims import spec_dims
from spmd.sharding.local_layout import LocalLayout
from spmd.sharding.mesh import AnyMesh
from spmd.sharding.param_comm import PLAIN, ParamComm


@dataclasses.dataclass(frozen=True)
class ShardedParam(LocalLayout):
    """Layout of a parameter, with the collectives of the parameter and of its gradient.

    Attributes:
        scope: Name scope of operations on the parameter (`spmd.plan.scopes`).
        comm: The collectives.
    """

    scope: str = ""
    comm: ParamComm = PLAIN

    @property
    def prepares(self) -> bool:
        """Whether both passes gather from a prepared array, not from the parameter."""
        return self.comm.prepares(self)

    @property
    def prepared_specs(self) -> P:
        """The spec of each array in the source of both passes' gathers."""
        return self.comm.prepared_specs(self)

    def prepare(self, kernel: Array, mesh: AnyMesh) -> Any:
        """Return the source of both passes' gathers, outside the region.

        Unless it is the kernel, it has a checkpoint name, and the remat policy saves that name.
        """
        if not self.prepares:
            return kernel

        def local(shard: Array) -> Any:
            return self.comm.prepare(shard, self)

        run = shard_map_over(mesh, split_axes(mesh), local, self.specs[0], self.prepared_specs)
        name = self.comm.checkpoint_name
        return jax.tree.map(lambda part: name_in_rule(part, name), run(kernel))

    def gather(self, shard: Array, dtype: jnp.dtype) -> Array:
        """Gather a shard of the parameter for its use, in a dtype."""
        return self.gather_prepared(self.comm.prepare(shard, self), dtype)

    def gather_prepared(self, prepared: Any, dtype: jnp.dtype) -> Array:
        """Gather the parameter for its use from the result of `prepare`, in a dtype."""
        return self.comm.gather(prepared, self, dtype)

    def sent(
        self, shape: Sequence[int], axes: Sequence[str], sizes: Mapping[str, int]
    ) -> dict[str, str]:
        """Return axis → dtype or codec of the terms of a gradient (`ParamComm.sent`)."""
        return self.comm.sent(shape, self, axes, sizes)

    def reduce(self, gradient: Array, axes: Sequence[str]) -> Array:
        """Sum a gradient over axes, and scatter it to the layout's `grad_dims`."""
        return self.comm.reduce(gradient, self, axes)


def sharded_param(placed: ParamPlacement, ndim: int) -> ShardedParam:
    """Return the layout of a parameter of `ndim` dimensions, over the axes not manual yet."""
    split = split_axes(placed.mesh)
    stored = tuple(spec_dims(placed.param_spec, ndim, split))
    used = tuple(spec_dims(placed.compute_spec, ndim, split))
    kept = tuple(spec_dims(placed.grad_spec, ndim, split))
    return ShardedParam(stored, used, kept, placed.mesh, placed.scope, placed.comm)
