"""One decoder for all families: a config with a table of layers, and the modules of their parts."""

from spmd.models.decoder.attention import AttentionSpec
from spmd.models.decoder.decoder import Decoder, DecoderConfig
from spmd.models.decoder.experts import ExpertsSpec
from spmd.models.decoder.layer import LayerSpec
from spmd.models.decoder.mlp import MLPSpec
from spmd.models.decoder.rotary import RopeScaling, Rotary
from spmd.models.decoder.rules import decoder_rules
from spmd.models.decoder.sizes import NormSpec

__all__ = [
    "AttentionSpec",
    "Decoder",
    "DecoderConfig",
    "ExpertsSpec",
    "LayerSpec",
    "MLPSpec",
    "NormSpec",
    "RopeScaling",
    "Rotary",
    "decoder_rules",
]
