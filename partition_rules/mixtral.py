"""Tables of Mixtral and all decoders with the same parts."""

from spmd.layers.router import RouterConfig
from spmd.models.decoder import DecoderConfig, ExpertsSpec, LayerSpec, MLPSpec, decoder_rules

_EXPERTS = LayerSpec(mlp=ExpertsSpec())
_SHARED = LayerSpec(mlp=ExpertsSpec(shared_d_ff=64))
_DENSE = LayerSpec(mlp=MLPSpec(), name="dense_layers")

MIXTRAL = decoder_rules(DecoderConfig(layer=_EXPERTS, router=RouterConfig()))
"""For models without shared experts and dense layers."""
MIXTRAL_SHARED = decoder_rules(DecoderConfig(layer=_SHARED, first=(_DENSE,), router=RouterConfig()))
"""For models with a shared expert and dense first layers."""
