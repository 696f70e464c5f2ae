"""OPT and BioGPT: learned positions after two unused ones (arXiv:2205.01068, arXiv:2210.10341).

Norms before attention and MLP, biases, and the embedding as the head. OPT 350M, with norms after
attention and MLP and a narrow embedding, is not supported. BioGPT scales its embeddings.

```python
config = dataclasses.replace(PRESETS["opt-1.3b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import functools
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS
from spmd.models.decoder import DecoderConfig, NormSpec
from spmd.models.published.family import TensorNames, decoder_family, layer_names
from spmd.models.published.gpt import gpt_decoder, mlp_of, read_gpt, write_gpt
from spmd.models.published.tensor_names import Names, module_names

opt = functools.partial(
    gpt_decoder, activation="relu", tied=True, positions=2048, unused_positions=2
)
"""Config of an OPT from fields of `gpt_decoder`."""

PRESETS = {
    "test-opt": opt(64, 32, 2, 4, 4, 64, positions=48),
    "opt-125m": opt(50_272, 768, 12, 12, 12, 3072),
    "opt-1.3b": opt(50_272, 2048, 24, 32, 32, 8192),
    "opt-2.7b": opt(50_272, 2560, 32, 32, 32, 10_240),
    "opt-6.7b": opt(50_272, 4096, 32, 32, 32, 16_384),
    "opt-13b": opt(50_272, 5120, 40, 40, 40, 20_480),
    "opt-30b": opt(50_272, 7168, 48, 56, 56, 28_672),
    "biogpt": opt(
        *(42_384, 1024, 24, 16, 16, 4096),
        activation="gelu",
        positions=1024,
        embed_scale=0.0,
    ),
}
"""Published shapes by name, and a small one for tests."""

_LAYER = layer_names(attention_norm="self_attn_layer_norm", mlp_norm="final_layer_norm")
_LAYER |= module_names(
    {"attention/o_proj": "self_attn.out_proj", "mlp/up_proj": "fc1", "mlp/down_proj": "fc2"}
)
_POSITIONS: Names = {
    "embed/embedding": ("embed_tokens.weight", AS_IS),
    "positions": ("embed_positions.weight", AS_IS),
}
_NAMES = TensorNames(
    _LAYER, _POSITIONS | module_names({}, {"norm": "final_layer_norm"}), "model.decoder."
)
_BIOGPT_NAMES = TensorNames(
    *(_LAYER, _POSITIONS | module_names({}, {"norm": "layer_norm"})),
    prefix="biogpt.",
    head="output_projection",
)
_FIELDS = {"hidden_act": "activation_function", "intermediate_size": "ffn_dim"}
_HARMLESS = ("dropout", "layerdrop", "init_std", "activation_dropout", "prefix")
_BIOGPT_HARMLESS = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("layerdrop", "activation_dropout", "layer_norm_eps"),
)
"""Fields of training, and an addend that BioGPT's norms ignore: theirs is 1e-5."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values, _FIELDS)
    sizes = read_gpt(fields, "", activation="relu", d_ff_ratio=0)
    fields.only("do_layer_norm_before", True)
    fields.only("_remove_final_layer_norm", False)
    fields.only("word_embed_proj_dim", sizes["d_model"])
    bias = fields.flag("enable_bias", default=True)
    affine = fields.flag("layer_norm_elementwise_affine", default=True)
    return fields.build(
        opt,
        **sizes,
        attention_bias=bias,
        mlp_bias=bias,
        norm=NormSpec("layer", scale=affine, bias=affine),
    )


def _read_biogpt(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_gpt(fields, "", activation="gelu", d_ff_ratio=0)
    if fields.flag("scale_embedding", default=True):
        sizes["embed_scale"] = 0.0
    return fields.build(opt, **sizes)


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "opt",
        **write_gpt(config, "", _FIELDS),
        "enable_bias": mlp_of(config).bias,
        "layer_norm_elementwise_affine": config.norm.scale,
        "word_embed_proj_dim": config.d_model,
    }


def _write_biogpt(config: DecoderConfig) -> dict[str, Any]:
    scales = config.embed_scale in (0.0, config.d_model**0.5)
    return {"model_type": "biogpt", **write_gpt(config, "", {}), "scale_embedding": scales}


OPT_FAMILY = decoder_family(
    "OPTForCausalLM", _read, _write, names=_NAMES, harmless=_HARMLESS, optional_prefix="model."
)
BIOGPT_FAMILY = decoder_family(
    "BioGptForCausalLM",
    _read_biogpt,
    _write_biogpt,
    names=_BIOGPT_NAMES,
    harmless=_BIOGPT_HARMLESS,
    secondary=True,
)
