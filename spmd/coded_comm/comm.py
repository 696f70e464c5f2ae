"""The collectives of a parameter that is gathered as codes, or whose gradient's terms are sent as codes."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from spmd.codecs import EXCHANGES, GATHERS, GradientCodec
from spmd.coded_comm.codes import CodedGather, scatter_codes, scatters_codes, sum_codes
from spmd.sharding.local_layout import LocalLayout
from spmd.sharding.param_comm import ParamComm

SECONDARY = "secondary_partition"
"""Checkpoint name of what a device has after the hop across slices, of each parameter with two hops."""

WITHOUT_CODES = "bfloat16"
"""Dtype of the terms of gradients without blocks, where others are sent as codes."""


@dataclasses.dataclass(frozen=True)
class CodedComm(ParamComm):
    """What is sent of one parameter in fewer bits. Values of `gradients` are dtypes or codecs.

    Attributes:
        codec: Codec of the parameter where a layer gathers it; empty for the dtype in which it is used.
        slices: Axis → the slices that it spans, of those above 1.
        hop: The axis that the parameter is gathered over in two hops, across slices and inside of one, and its slices.
        width: The dimension of the model's width, from the end: that of the blocks of its gradient; 0 if not known.
    """

    codec: str = ""
    slices: tuple[tuple[str, int], ...] = ()
    hop: tuple[str, int] | None = None
    width: int = 0

    @property
    def takes_uncast(self) -> bool:
        """Whether there is a codec: codes are of the parameter as it is stored."""
        return bool(self.codec)

    @property
    def param_codec(self) -> str:
        """The codec."""
        return self.codec

    @property
    def operand_codec(self) -> str:
        """The codec, unless the secondary partition has blocks of its own."""
        return "" if self.hop else self.codec

    @property
    def checkpoint_name(self) -> str:
        """That of the secondary partition, if there is one."""
        return SECONDARY if self.hop else ""

    def without_codec(self) -> ParamComm:
        """Return what sends the parameter in its dtype, and its gradient as before."""
        return dataclasses.replace(self, codec="", hop=None)

    def gradient_codec(self, name: str) -> GradientCodec | None:
        """Return the codec of its gradient with this name; None for a dtype."""
        return dataclasses.replace(EXCHANGES[name], width=self.width) if name in EXCHANGES else None

    def prepares(self, layout: LocalLayout) -> bool:
        """Return whether there are two hops: the result of the first is the secondary partition inside of a slice."""
        return self._hop(layout) is not None

    def prepare(self, shard: Array, layout: LocalLayout) -> Any:
        """Send the codes of a shard across slices, if there are two hops."""
        return self._gather(layout).across(shard) if self.prepares(layout) else shard

    def prepared_specs(self, layout: LocalLayout) -> P:
        """Return the spec of codes and scales, which have a dimension of slices; without two hops, of the shard."""
        stored = layout.specs[0]
        return P(None, *stored) if self.prepares(layout) else stored

    def gather(self, prepared: Any, layout: LocalLayout, dtype: jnp.dtype) -> Array:
        """Gather codes and decode them; a shard without blocks is gathered as it is."""
        if self.prepares(layout):
            return self._gather(layout).within(prepared, dtype)
        if not self.codec or not GATHERS[self.codec].block_dim(prepared.shape)[1]:
            return super().gather(prepared, layout, dtype)
        gather = self._gather(layout)
        return gather.within(gather.across(prepared), dtype)

    def sent(
        self, shape: Sequence[int], layout: LocalLayout, axes: Sequence[str], sizes: Mapping[str, int]
    ) -> dict[str, str]:
        """Return axis → dtype or codec; `WITHOUT_CODES` where the part of a device has no blocks."""
        left, found = list(shape), super().sent(shape, layout, axes, sizes)
        for axis, name in found.items():
            codec, scattered = self.gradient_codec(name), layout.scattered.get(axis)
            dims = range(len(left)) if scattered is None else [scattered]
            if codec and not any(scatters_codes(left, dim, sizes[axis], codec) for dim in dims):
                found[axis] = WITHOUT_CODES
            if scattered is not None:
                left[scattered] //= sizes[axis]
        return found

    def scatter_terms(self, gradient: Array, layout: LocalLayout, axis: str, dim: int, name: str) -> Array:
        """Sum over an axis and scatter a dimension over it, in a dtype or in codes."""
        if codec := self.gradient_codec(name):
            return scatter_codes(gradient, axis, dim, codec, self._slices(axis)).astype(gradient.dtype)
        return super().scatter_terms(gradient, layout, axis, dim, name)

    def sum_terms(self, gradient: Array, layout: LocalLayout, axes: tuple[str, ...], name: str) -> Array:
        """Sum over axes, in a dtype or in codes."""
        codec = self.gradient_codec(name)
        if codec is None:
            return super().sum_terms(gradient, layout, axes, name)
        for axis in axes:
            gradient = sum_codes(gradient, layout.mesh, axis, codec, self._slices(axis))
        return gradient

    def _slices(self, axis: str) -> int:
        return dict(self.slices).get(axis, 1)

    def _hop(self, layout: LocalLayout) -> tuple[str, int] | None:
        """Return the axis with two hops, if this layout is gathered over it."""
        return self.hop if self.hop and self.hop[0] in itertools.chain(*layout.gathers) else None

    def _gather(self, layout: LocalLayout) -> CodedGather:
        return CodedGather(GATHERS[self.codec], layout.gathers, self._hop(layout), layout.mesh)
