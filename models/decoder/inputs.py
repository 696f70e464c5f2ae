"""Inputs of every layer besides the residual stream."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int

from spmd.layers.ring_attention import Segments
from spmd.layers.router import Valid
from spmd.models.decoder.rotary import Angles


class LayerInputs(NamedTuple):
    """Inputs of every layer besides the residual stream.

    Attributes:
        angles: Rotary angles, for each kind of rotary positions in the network.
        segments: The document of each token of a packed sequence.
        valid: The mask of tokens that are no padding.
        tokens: The tokens themselves, for multi-token prediction.
        positions: The position of each token in its document, if a layer needs it.
    """

    angles: tuple[Angles, ...] = ()
    segments: Segments = None
    valid: Valid = None
    tokens: Int[Array, "batch seq"] | None = None
    positions: Int[np.ndarray | Array, "#batch seq"] | None = None
