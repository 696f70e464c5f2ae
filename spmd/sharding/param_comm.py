"""How a layer's parameter travels to where it is used, and its gradient back: as they are, unless a technique differs.

`ParamComm` is the contract and its plain form. A technique that sends something else is a subclass, made where a user's
setting is read (`spmd.settings.compress`); layers and the plan call these methods and know none of them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from spmd.sharding import collectives
from spmd.sharding.local_layout import LocalLayout


@dataclasses.dataclass(frozen=True)
class ParamComm:
    """The collectives of one parameter: a frozen value, hashable, compared by value.

    Every method runs in a region that is manual over the mesh. The layout is an argument, because the head and the
    exchange once a step have layouts of their own.

    Attributes:
        gradients: Axis → dtype of the gradient's terms; its own dtype over other axes.
    """

    gradients: tuple[tuple[str, str], ...] = ()

    @property
    def takes_uncast(self) -> bool:
        """Whether `gather` takes the parameter as it is stored, and not cast to the dtype in which it is used."""
        return False

    @property
    def param_codec(self) -> str:
        """Name of the codec in which parameters are gathered; empty for the dtype in which they are used."""
        return ""

    @property
    def operand_codec(self) -> str:
        """The same, where a quantized product may take what is sent without decoding it."""
        return ""

    @property
    def checkpoint_name(self) -> str:
        """Checkpoint name of what `prepare` returns, which every remat policy saves; empty if it returns the shard."""
        return ""

    def without_codec(self) -> "ParamComm":
        """Return what gathers the parameter in the dtype in which it is used."""
        return self

    def prepares(self, layout: LocalLayout) -> bool:
        """Return whether `prepare` does anything: the forward and the backward pass then gather from its result."""
        del layout
        return False

    def prepare(self, shard: Array, layout: LocalLayout) -> Any:
        """Return a tree that `gather` takes: what both passes of a layer have in common."""
        del layout
        return shard

    def prepared_specs(self, layout: LocalLayout) -> P:
        """Return the spec of each array of `prepare`'s result, outside of the region."""
        return layout.specs[0]

    def gather(self, prepared: Any, layout: LocalLayout, dtype: jnp.dtype) -> Array:
        """Return the parameter as it is used, in a dtype."""
        return collectives.gather_dims(prepared.astype(dtype), layout.mesh, layout.gathers)

    def sent(
        self,
        shape: Sequence[int],
        layout: LocalLayout,
        axes: Sequence[str],
        sizes: Mapping[str, int],
    ) -> dict[str, str]:
        """Return axis → dtype or codec of a gradient's terms, empty for its own dtype; in the order of the sums.

        Args:
            shape: Of each device's terms.
            axes: The axes to sum over.
            sizes: Axis → size.
        """
        del shape, sizes
        named = dict(self.gradients)
        return {axis: named.get(axis, "") for axis in (*layout.scattered, *axes)}

    def reduce(self, gradient: Array, layout: LocalLayout, axes: Sequence[str]) -> Array:
        """Sum a gradient over axes, and scatter it as it is kept; it has its own dtype between the sums."""
        sizes = {axis: jax.lax.axis_size(axis) for axis in axes}
        names = self.sent(gradient.shape, layout, axes, sizes)
        sent = {axis: name or gradient.dtype.name for axis, name in names.items()}
        for axis, dim in layout.scattered.items():
            gradient = self.scatter_terms(gradient, layout, axis, dim, sent.pop(axis))
        for name in dict.fromkeys(sent.values()):
            axes = tuple(axis for axis in sent if sent[axis] == name)
            gradient = self.sum_terms(gradient, layout, axes, name)
        return gradient

    def scatter_terms(
        self, gradient: Array, layout: LocalLayout, axis: str, dim: int, name: str
    ) -> Array:
        """Sum over an axis and scatter a dimension over it; terms are sent in the dtype of this name."""
        return collectives.psum_scatter(
            gradient.astype(name), layout.mesh, axis, dim, gradient.dtype
        )

    def sum_terms(
        self, gradient: Array, layout: LocalLayout, axes: tuple[str, ...], name: str
    ) -> Array:
        """Sum over axes; terms are sent in the dtype of this name."""
        del layout
        return jax.lax.psum(gradient.astype(name), axes).astype(gradient.dtype)


PLAIN = ParamComm()
"""Everything as it is."""
