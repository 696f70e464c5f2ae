"""Exchange of outer gradients between replicas, in float32 or in codes."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from spmd.codecs import EXCHANGES, GradientCodec
from spmd.coded_comm.codes import sum_gathered_codes
from spmd.diloco.replicas import AXIS
from spmd.plan.manual import shard_map_over, split_axes
from spmd.plan.scopes import comm_scope, in_scope
from spmd.sharding.mesh import AnyMesh

PLAIN = "float32"
"""Outer gradients without a codec."""

_SCOPE = comm_scope("outer gradients, between replicas")


@dataclasses.dataclass(frozen=True)
class OuterExchange:
    """The mean over replicas of their distance from the outer parameters.

    Attributes:
        mesh: The mesh of all replicas.
        codec: How a replica sends its term: `float32` or a codec.
    """

    mesh: AnyMesh
    codec: str = PLAIN

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.mesh.shape[AXIS]

    def mean(self, param: Array, own: Array, spec: P) -> Array:
        """Return the mean of θ − w.

        Args:
            param: θ, or a part of it.
            own: w of each replica, `[replica, …]`.
            spec: The spec of θ.
        """

        def local(param: Array, own: Array) -> Array:
            difference = param.astype(jnp.float32) - own[0].astype(jnp.float32)
            return self._sum(difference) / self.replicas

        axes = split_axes(self.mesh)
        region = shard_map_over(self.mesh, axes, local, (spec, P(AXIS, *spec)), spec)
        with in_scope(_SCOPE):
            return region(param, own).astype(param.dtype)

    def _sum(self, difference: Array) -> Array:
        """Sum a shard over replicas in float32; all get bitwise the same."""
        codec, _ = self._codec_of(difference.shape)
        if codec is None:
            return jax.lax.psum(difference, AXIS)
        return sum_gathered_codes(difference, AXIS, codec)

    def bytes_of_term(self, shape: Sequence[int]) -> int:
        """Return the bytes in place of a gradient's shard of this shape (`Transfer.arrays`).

        A sum is counted as two of its terms. A gather of codes has one term of each replica.
        """
        codec, block = self._codec_of(shape)
        bits = 32.0
        if codec is not None:
            bits = codec.bits(block) * self.replicas / 2
        return math.ceil(math.prod(shape) * bits / 8)

    def _codec_of(self, shape: Sequence[int]) -> tuple[GradientCodec | None, int]:
        """Return the codec for a shard and its block; None for a shard without blocks."""
        codec = EXCHANGES.get(self.codec)
        if codec is None or not shape:
            return None, 0
        _, block = codec.block_dim(shape)
        if not block:
            return None, 0
        return codec, block
