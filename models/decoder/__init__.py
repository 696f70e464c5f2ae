"""One decoder for all families: a config with a table of layers, and the modules of their parts."""

from spmd.models.decoder.attention import AttentionSpec, Temperature
from spmd.models.decoder.decoder import Decoder, DecoderConfig
from spmd.models.decoder.experts import ExpertsSpec
from spmd.models.decoder.gated_delta_net import GatedDeltaNetSpec
from spmd.models.decoder.latent_attention import LatentAttentionSpec
from spmd.models.decoder.layer import LayerSpec
from spmd.models.decoder.mlp import MLPSpec
from spmd.models.decoder.no_mixer import NoMixerSpec
from spmd.models.decoder.parallel_mixer import ParallelMixerSpec
from spmd.models.decoder.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    Rotary,
    YarnScaling,
)
from spmd.models.decoder.rules import decoder_rules, replicated_kv
from spmd.models.decoder.short_convolution import GatedConvolutionSpec
from spmd.models.decoder.sizes import NormSpec
from spmd.models.decoder.state_space import StateSpaceSpec

__all__ = [
    "AttentionSpec",
    "Decoder",
    "DecoderConfig",
    "DynamicScaling",
    "ExpertsSpec",
    "GatedConvolutionSpec",
    "GatedDeltaNetSpec",
    "LatentAttentionSpec",
    "LayerSpec",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MLPSpec",
    "NoMixerSpec",
    "NormSpec",
    "ParallelMixerSpec",
    "ProportionalScaling",
    "RopeScaling",
    "Rotary",
    "StateSpaceSpec",
    "Temperature",
    "YarnScaling",
    "decoder_rules",
    "replicated_kv",
]
