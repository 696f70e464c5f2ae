"""OLMo: LayerNorm without parameters and clipped queries, keys and values (arXiv:2402.00838).

OLMo 2 (arXiv:2501.00656) has norms after attention and MLP, and normalises all queries of a token
together, and all keys. OLMo 3 is an OLMo 2 with a sliding window in three of four layers, and a
scaling of positions in the others.

```python
config = dataclasses.replace(PRESETS["olmo2-7b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    LayerSpec,
    NormSpec,
    RopeScaling,
    Rotary,
)
from spmd.models.published.common_fields import (
    read_attention_bias,
    read_clip,
    read_sizes,
    write_sizes,
)
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.layer_types import (
    FULL,
    SLIDING,
    attention_table,
    every,
    read_layer_types,
    read_rotary_by_kind,
    read_window_of,
    write_layer_types,
    write_rotary_by_kind,
)
from spmd.models.published.rotary import read_rotary

_THETA3 = 5e5
_PLAIN3 = Rotary(_THETA3, RopeScaling())
_NORM = NormSpec("layer", scale=False)
LAYER2 = LayerSpec(AttentionSpec(qk_norm="full"), norms="after")
"""A layer of OLMo 2."""


def olmo3(layers: int, *, window: int = 4096, **fields: Any) -> DecoderConfig:
    """Return the config of an OLMo 3 from fields of `DecoderConfig`."""
    table = attention_table(LAYER2, window, every(4, layers))
    return DecoderConfig(**{"layers": layers, "rope_theta": _THETA3} | table | fields)


_SIZES3_7B = {"vocab": 100_278, "d_model": 4096, "heads": 32, "kv_heads": 32, "d_ff": 11_008}

PRESETS = {
    "test-olmo": DecoderConfig(
        *(64, 32, 2, 4, 2, 64), norm=_NORM, layer=LayerSpec(AttentionSpec(clip_qkv=0.5))
    ),
    "test-olmo2": DecoderConfig(64, 32, 2, 4, 2, 64, layer=LAYER2),
    "test-olmo3": olmo3(8, window=5, vocab=64, d_model=32, d_ff=64),
    "olmo-1b": DecoderConfig(50_304, 2048, 16, 16, 16, 8192, norm=_NORM, tied=True),
    "olmo-7b": DecoderConfig(50_304, 4096, 32, 32, 32, 11_008, norm=_NORM),
    "olmo2-7b": DecoderConfig(
        *(100_352, 4096, 32, 32, 32, 11_008), rope_theta=5e5, norm_eps=1e-6, layer=LAYER2
    ),
    "olmo2-13b": DecoderConfig(
        *(100_352, 5120, 40, 40, 40, 13_824), rope_theta=5e5, norm_eps=1e-6, layer=LAYER2
    ),
    "olmo3-7b": olmo3(32, **_SIZES3_7B, norm_eps=1e-6),
}
"""Published shapes by name, and small ones for tests."""

NAMES2 = layer_names(
    attention_post_norm="post_attention_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
"""Tensors of a layer of OLMo 2."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5, eps_field="")
    mixer = read_attention_bias(fields, AttentionSpec(clip_qkv=read_clip(fields)))
    return fields.build(DecoderConfig, **sizes, norm=_NORM, layer=LayerSpec(mixer))


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixer = config.pattern.group[0].attention
    return {
        "model_type": "olmo",
        **write_sizes(config, eps_field=""),
        "attention_bias": mixer.qkv_bias,
        "clip_qkv": mixer.clip_qkv or None,
    }


def read_layer2(fields: Fields) -> LayerSpec:
    """Parse the options of a layer of OLMo 2."""
    mixer = read_attention_bias(fields, LAYER2.attention)
    return dataclasses.replace(LAYER2, mixer=mixer)


def _read2(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5)
    return fields.build(DecoderConfig, **sizes, layer=read_layer2(fields))


def _write2(config: DecoderConfig) -> dict[str, Any]:
    bias = config.pattern.group[0].attention.qkv_bias
    return {"model_type": "olmo2", **write_sizes(config), "attention_bias": bias}


def _read3(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5, theta=0)
    layers = sizes["layers"]
    kinds = read_layer_types(fields, layers, every(4, layers))
    rotary = _read_rotary3(fields)
    window = read_window_of(fields, kinds, absent=4096)
    each = [rotary[kind] for kind in kinds]
    table = attention_table(read_layer2(fields), window, kinds, rotary=each)
    return fields.build(DecoderConfig, **sizes, **table)


def _read_rotary3(fields: Fields) -> dict[str, Rotary]:
    """Parse the rotary positions of both kinds of layers.

    `transformers` 5.0 writes one table for both; later versions do not read it, so that it is
    supported without a scaling, which then has one meaning.
    """
    table = fields.value("rope_parameters")
    if table is None:
        fields.only("rope_theta", _THETA3)  # of layers with a window there is no other in 5.23
    if isinstance(table, Mapping) and table.get("rope_type") == "default":
        rotary = read_rotary(fields, _PLAIN3)
        return {FULL: rotary, SLIDING: rotary}
    return read_rotary_by_kind(fields, _THETA3, _THETA3)


def _write3(config: DecoderConfig) -> dict[str, Any]:
    fields = _write2(config)
    del fields["rope_theta"]
    fields.pop("rope_scaling", None)
    rotary = write_rotary_by_kind(config, _THETA3, _THETA3)
    if all(spec.attention.rotary == _PLAIN3 for spec in config.pattern.distinct):
        rotary = {"rope_theta": _THETA3}  # which all versions read
    return {**fields, "model_type": "olmo3", **rotary, **write_layer_types(config)}


OLMO_FAMILY = decoder_family("OlmoForCausalLM", _read, _write)
OLMO2_FAMILY = decoder_family("Olmo2ForCausalLM", _read2, _write2, NAMES2)
OLMO3_FAMILY = decoder_family("Olmo3ForCausalLM", _read3, _write3, NAMES2, secondary=True)
