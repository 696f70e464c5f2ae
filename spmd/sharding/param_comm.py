"""Collectives of a layer's parameter and of its gradient.

`ParamComm` is the interface and its default: parameters are gathered in the dtype of their use,
gradients reduced in a dtype per axis. Other formats, such as codecs, are subclasses, made where a
user's setting is read (`spmd.settings.compress`). Layers and the plan only call these methods, and
know no subclass.
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

    Every method runs in a region that is manual over the mesh. The layout is an argument, because
    the head and the exchange once a step have layouts of their own.

    Attributes:
        gradients: Axis → dtype of the gradient's terms; its own dtype over other axes.
    """

    gradients: tuple[tuple[str, str], ...] = ()

    @property
    def takes_uncast(self) -> bool:
        """Whether `gather` takes the parameter as stored, not cast to the dtype of its use."""
        return False

    @property
    def param_codec(self) -> str:
        """Name of the codec of gathered parameters; empty for the dtype of their use."""
        return ""

    @property
    def operand_codec(self) -> str:
        """Name of the codec of gathered parameters if a quantized product may skip its decoding.

        Empty otherwise.
        """
        return ""

    @property
    def checkpoint_name(self) -> str:
        """Checkpoint name of the result of `prepare`; empty if it is the shard.

        Every remat policy saves it.
        """
        return ""

    def without_codec(self) -> "ParamComm":
        """Return the comm of the parameter without a codec: gathers in the dtype of its use."""
        return self

    def prepares(self, layout: LocalLayout) -> bool:
        """Return whether `prepare` does anything.

        The forward and the backward pass then gather from its result.
        """
        del layout
        return False

    def prepare(self, shard: Array, layout: LocalLayout) -> Any:
        """Return the argument of `gather`, a tree shared by the forward and the backward pass."""
        del layout
        return shard

    def prepared_specs(self, layout: LocalLayout) -> P:
        """Return the spec of each array of `prepare`'s result, outside of the region."""
        return layout.specs[0]

    def gather(self, prepared: Any, layout: LocalLayout, dtype: jnp.dtype) -> Array:
        """Return the parameter gathered for its use, in a dtype."""
        return collectives.gather_dims(prepared.astype(dtype), layout.mesh, layout.gathers)

    def sent(
        self,
        shape: Sequence[int],
        layout: LocalLayout,
        axes: Sequence[str],
        sizes: Mapping[str, int],
    ) -> dict[str, str]:
        """Return axis → dtype or codec of a gradient's terms, in the order of the sums.

        The name is empty for the gradient's own dtype.

        Args:
            shape: The shape of each device's terms.
            axes: The axes to sum over.
            sizes: Axis → size.
        """
        del shape, sizes
        named = dict(self.gradients)
        return {axis: named.get(axis, "") for axis in (*layout.scattered, *axes)}

    def gradient_block(self, name: str, shape: Sequence[int]) -> int:
        """Return the elements with one scale, in terms of a gradient sent as `name`; 1 of a dtype.

        Args:
            shape: Of a device's part of the reduced gradient.
        """
        del name, shape
        return 1

    def reduce(self, gradient: Array, layout: LocalLayout, axes: Sequence[str]) -> Array:
        """Sum a gradient over axes, and scatter it to the layout's `grad_dims`.

        The gradient has its own dtype between the sums.
        """
        sizes = {axis: jax.lax.axis_size(axis) for axis in axes}
        sent = {}
        for axis, name in self.sent(gradient.shape, layout, axes, sizes).items():
            sent[axis] = name or gradient.dtype.name
        for axis, dim in layout.scattered.items():
            gradient = self.scatter_terms(gradient, layout, axis, dim, sent.pop(axis))
        axes_of: dict[str, list[str]] = {}
        for axis, name in sent.items():
            axes_of.setdefault(name, []).append(axis)
        for name, summed in axes_of.items():
            gradient = self.sum_terms(gradient, layout, tuple(summed), name)
        return gradient

    def scatter_terms(
        self, gradient: Array, layout: LocalLayout, axis: str, dim: int, name: str
    ) -> Array:
        """Sum over an axis and scatter a dimension over it, with terms in the dtype `name`."""
        return collectives.psum_scatter(
            gradient.astype(name), layout.mesh, axis, dim, gradient.dtype
        )

    def sum_terms(
        self, gradient: Array, layout: LocalLayout, axes: tuple[str, ...], name: str
    ) -> Array:
        """Sum over axes, with terms in the dtype `name`."""
        del layout
        return jax.lax.psum(gradient.astype(name), axes).astype(gradient.dtype)


PLAIN = ParamComm()
"""Communication without codecs or other dtypes."""
