"""Inputs of every layer besides the residual stream."""

from typing import NamedTuple

from spmd.layers.ring_attention import Segments
from spmd.layers.router import Valid
from spmd.models.decoder.rotary import Angles


class LayerInputs(NamedTuple):
    """Inputs of every layer besides the residual stream.

    Attributes:
        angles: Rotary angles, for each kind of rotary positions in the network.
        segments: The document of each token of a packed sequence.
        valid: The mask of tokens that are no padding.
    """

    angles: tuple[Angles, ...] = ()
    segments: Segments = None
    valid: Valid = None
