"""Cohere's Command: attention and MLP side by side, LayerNorm without biases, a scale of logits.

Command R (huggingface.co/CohereLabs/c4ai-command-r-v01) has rotary positions in all layers, and
Command R+ a norm for each head of queries and keys; Command R7B and A (Cohere 2, arXiv:2504.00698)
have rotary positions in layers with a sliding window, three of four.

```python
config = dataclasses.replace(PRESETS["command-r7b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, NormSpec, Rotary
from spmd.models.published.common_fields import read_attention_bias, read_sizes, write_sizes
from spmd.models.published.family import decoder_family
from spmd.models.published.layer_types import (
    SLIDING,
    attention_table,
    every,
    read_layer_types,
    read_window_of,
    rotary_where,
    write_layer_types,
)

_ROTARY = Rotary(interleaved=True)
_LAYER = LayerSpec(AttentionSpec(rotary=_ROTARY), norms="parallel_shared")
_LAYER_NORMED = LayerSpec(AttentionSpec(rotary=_ROTARY, qk_norm="heads"), norms="parallel_shared")
"""A layer of Command R+."""
_DEFAULTS: dict[str, Any] = {"tied": True, "norm": NormSpec("layer"), "logits_scale": 0.0625}
_EPS = "layer_norm_eps"


def cohere(*shape: Any, **fields: Any) -> DecoderConfig:
    """Return the config of a Command R from fields of `DecoderConfig`."""
    return DecoderConfig(*shape, **_DEFAULTS | {"layer": _LAYER} | fields)


def cohere2(
    kinds: list[str], *, window: int, layer: LayerSpec = _LAYER, **fields: Any
) -> DecoderConfig:
    """Return the config of a Cohere 2 from fields of `DecoderConfig`.

    Args:
        kinds: The kind of each layer, as in config.json.
        window: Sliding window of layers of kind `sliding_attention`.
        layer: A layer, except for window and positions.
        **fields: Other fields.
    """
    rotary = rotary_where([kind == SLIDING for kind in kinds], _ROTARY)
    table = attention_table(layer, window, kinds, rotary=rotary)
    return DecoderConfig(**_DEFAULTS | table | {"layers": len(kinds)} | fields)


_SIZES_R7B: dict[str, Any] = {
    "vocab": 256_000,
    "d_model": 4096,
    "heads": 32,
    "kv_heads": 8,
    "d_ff": 14_336,
}

PRESETS = {
    "test-cohere": cohere(64, 32, 2, 4, 2, 64, logits_scale=0.5),
    "test-cohere2": cohere2(every(4, 8), window=5, vocab=64, d_model=32, d_ff=64, logits_scale=0.5),
    "command-r": cohere(256_000, 8192, 40, 64, 64, 22_528, rope_theta=8e6),
    "command-r-plus": cohere(
        *(256_000, 12_288, 64, 96, 8, 33_792),
        layer=_LAYER_NORMED,
        rope_theta=75e6,
        logits_scale=0.8333333333333334,
    ),
    "command-r7b": cohere2(
        every(4, 32), window=4096, **_SIZES_R7B, rope_theta=5e4, logits_scale=0.25
    ),
}
"""Published shapes by name, and small ones for tests."""

_ONLY = {
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "order_of_interleaved_layers": "local_attn_first",
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
}
"""Fields of published files, and their supported value."""
_HARMLESS = ("cache_implementation", "layer_switch", "_sliding_window_pattern")
"""Fields without effect; `transformers` 5.0 writes the last one besides `layer_types`."""


def _read_common(fields: Fields, theta: float) -> tuple[dict[str, Any], LayerSpec]:
    """Parse the fields of both versions: arguments of `DecoderConfig`, and the layer."""
    for name in _HARMLESS:
        fields.value(name)
    for name, value in _ONLY.items():
        fields.only(name, value)
    sizes = read_sizes(fields, eps=1e-5, eps_field=_EPS, theta=theta, tied=True, has_head_dim=False)
    sizes["logits_scale"] = fields.number("logit_scale", 0.0625)
    mixer = read_attention_bias(fields, _LAYER.attention)
    return sizes, dataclasses.replace(_LAYER, mixer=mixer)


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes, layer = _read_common(fields, theta=5e5)
    if fields.flag("use_qk_norm", default=False):
        mixer = dataclasses.replace(layer.attention, qk_norm="heads")
        layer = dataclasses.replace(layer, mixer=mixer)
    return fields.build(cohere, **sizes, layer=layer)


def _read2(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    fields.only("use_qk_norm", False)
    sizes, layer = _read_common(fields, theta=1e4)
    default = every(fields.integer("sliding_window_pattern", 4), sizes["layers"])
    kinds = read_layer_types(fields, sizes["layers"], default)
    window = read_window_of(fields, kinds, absent=4096)
    return fields.build(cohere2, **sizes, kinds=kinds, window=window, layer=layer)


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixer = config.pattern.group[0].attention
    return {
        "model_type": "cohere",
        **write_sizes(config, _EPS),
        "attention_bias": mixer.qkv_bias,
        "logit_scale": config.logits_scale,
        "use_qk_norm": mixer.qk_norm == "heads",
    }


def _write2(config: DecoderConfig) -> dict[str, Any]:
    return {**_write(config), "model_type": "cohere2", **write_layer_types(config)}


COHERE_FAMILY = decoder_family("CohereForCausalLM", _read, _write)
COHERE2_FAMILY = decoder_family("Cohere2ForCausalLM", _read2, _write2)
