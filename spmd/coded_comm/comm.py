"""The collectives of a parameter with codes for its gather, or for the terms of its gradient."""

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
"""Checkpoint name of the secondary partition: a parameter after the hop across slices, if it has
two hops."""

WITHOUT_CODES = "bfloat16"
"""Dtype of the terms of gradients without blocks, if other terms are sent as codes."""


@dataclasses.dataclass(frozen=True)
class CodedComm(ParamComm):
    """Communication of one parameter in fewer bits. Values of `gradients` are dtypes or codecs.

    Attributes:
        codec: Codec of the parameter in gathers; empty for the dtype of its use.
        slices: Axis → the number of slices along it, if above 1.
        hop: The axis of a gather in two hops, across slices and within a slice, and its number of
            slices; None without one.
        width: The dimension of the model's width, counted from the end: that of the blocks of the
            gradient; 0 if not known.
    """

    codec: str = ""
    slices: tuple[tuple[str, int], ...] = ()
    hop: tuple[str, int] | None = None
    width: int = 0

    @property
    def takes_uncast(self) -> bool:
        """Whether there is a codec: the parameter is encoded as stored."""
        return bool(self.codec)

    @property
    def param_codec(self) -> str:
        """The codec."""
        return self.codec

    @property
    def operand_codec(self) -> str:
        """The codec, unless the secondary partition has blocks of its own."""
        if self.hop:
            return ""
        return self.codec

    @property
    def checkpoint_name(self) -> str:
        """The name of the secondary partition, if there is one."""
        if self.hop:
            return SECONDARY
        return ""

    def without_codec(self) -> ParamComm:
        """Return the communication of the parameter in its dtype; its gradient is unchanged."""
        return dataclasses.replace(self, codec="", hop=None)

    def gradient_codec(self, name: str) -> GradientCodec | None:
        """Return the codec of the gradient with this name; None for a dtype."""
        if name not in EXCHANGES:
            return None
        return dataclasses.replace(EXCHANGES[name], width=self.width)

    def gradient_block(self, name: str, shape: Sequence[int]) -> int:
        """Return the elements with one scale; 1 without a codec."""
        codec = self.gradient_codec(name)
        if codec is None:
            return 1
        return max(codec.least, codec.block_dim(shape)[1])

    def prepares(self, layout: LocalLayout) -> bool:
        """Return whether there are two hops.

        The result of the first hop is the secondary partition.
        """
        return self._hop(layout) is not None

    def prepare(self, shard: Array, layout: LocalLayout) -> Any:
        """Send the codes of a shard across slices, if there are two hops."""
        if not self.prepares(layout):
            return shard
        return self._gather(layout).across(shard)

    def prepared_specs(self, layout: LocalLayout) -> P:
        """Return the spec of codes and scales, `[slice, …]`; without two hops, of the shard."""
        stored = layout.specs[0]
        if not self.prepares(layout):
            return stored
        return P(None, *stored)

    def gather(self, prepared: Any, layout: LocalLayout, dtype: jnp.dtype) -> Array:
        """Gather codes and decode them; gather a shard without blocks uncoded."""
        if self.prepares(layout):
            return self._gather(layout).within(prepared, dtype)
        if not self._has_blocks(prepared.shape):
            return super().gather(prepared, layout, dtype)
        gather = self._gather(layout)
        return gather.within(gather.across(prepared), dtype)

    def sent(
        self,
        shape: Sequence[int],
        layout: LocalLayout,
        axes: Sequence[str],
        sizes: Mapping[str, int],
    ) -> dict[str, str]:
        """Return axis → dtype or codec; `WITHOUT_CODES` for parts without blocks."""
        remaining = list(shape)
        found = super().sent(shape, layout, axes, sizes)
        for axis, name in found.items():
            scattered = layout.scattered.get(axis)
            codec = self.gradient_codec(name)
            if codec and not _has_blocks(remaining, scattered, sizes[axis], codec):
                found[axis] = WITHOUT_CODES
            if scattered is not None:
                remaining[scattered] //= sizes[axis]
        return found

    def scatter_terms(
        self, gradient: Array, layout: LocalLayout, axis: str, dim: int, name: str
    ) -> Array:
        """Sum over an axis and scatter a dimension over it, in a dtype or in codes."""
        codec = self.gradient_codec(name)
        if codec is None:
            return super().scatter_terms(gradient, layout, axis, dim, name)
        shard = scatter_codes(gradient, axis, dim, codec, self._slices(axis))
        return shard.astype(gradient.dtype)

    def sum_terms(
        self, gradient: Array, layout: LocalLayout, axes: tuple[str, ...], name: str
    ) -> Array:
        """Sum over axes, in a dtype or in codes."""
        codec = self.gradient_codec(name)
        if codec is None:
            return super().sum_terms(gradient, layout, axes, name)
        for axis in axes:
            gradient = sum_codes(gradient, layout.mesh, axis, codec, self._slices(axis))
        return gradient

    def _slices(self, axis: str) -> int:
        return dict(self.slices).get(axis, 1)

    def _has_blocks(self, shape: Sequence[int]) -> bool:
        """Return whether a shard of the parameter is sent as codes."""
        if not self.codec:
            return False
        _, block = GATHERS[self.codec].block_dim(shape)
        return block > 0

    def _hop(self, layout: LocalLayout) -> tuple[str, int] | None:
        """Return the axis with two hops and its slices, if this layout is gathered over it."""
        if not self.hop:
            return None
        axis, _ = self.hop
        if axis not in itertools.chain(*layout.gathers):
            return None
        return self.hop

    def _gather(self, layout: LocalLayout) -> CodedGather:
        codec = GATHERS[self.codec]
        return CodedGather(codec, layout.gathers, self._hop(layout), layout.mesh)


def _has_blocks(
    shape: Sequence[int], scattered: int | None, count: int, codec: GradientCodec
) -> bool:
    """Return whether parts of a gradient for `count` devices have blocks.

    The parts are those of the scattered dimension; if none is scattered, of any dimension.
    """
    if scattered is not None:
        return scatters_codes(shape, scattered, count, codec)
    return any(scatters_codes(shape, dim, count, codec) for dim in range(len(shape)))
