"""Gemma 3: five layers with a sliding window to one without, and two rotary bases (arXiv:2503.19786).

Queries and keys are normalised, in place of Gemma 2's soft caps. These are the models for text
alone, and the decoder of the others without their image encoder.

```python
config = dataclasses.replace(PRESETS["gemma3-1b"], layers=6)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping, Sequence
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, MLPSpec, NormSpec, Rotary
from spmd.models.decoder.published import (
    TANH,
    decoder_family,
    layer_names,
    read_sizes,
    read_soft_cap,
    write_query_scale,
    write_sizes,
)
from spmd.models.decoder.published_layers import (
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

_THETA = 1e6
_LOCAL_THETA = 1e4
_ROTARY = {FULL: Rotary(_THETA), SLIDING: Rotary(_LOCAL_THETA)}
_DEFAULTS: dict[str, Any] = {
    "norm_eps": 1e-6,
    "tied": True,
    "norm": NormSpec(offset=1.0),
    "embed_scale": 0.0,  # √d_model
}


def gemma3(
    kinds: Sequence[str],
    *,
    window: int,
    rotary: Mapping[str, Rotary] = _ROTARY,
    query_scale: float = 256,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a Gemma 3 from fields of `DecoderConfig`.

    Args:
        kinds: The kind of each layer, as in config.json.
        window: Sliding window of layers of kind `sliding_attention`.
        rotary: Rotary positions of each kind.
        query_scale: Products of queries and keys are divided by the square root of this
            (`query_pre_attn_scalar`).
        **fields: Other fields.
    """
    mixer = AttentionSpec(qk_norm="head", scale=query_scale**-0.5)
    layer = LayerSpec(mixer, MLPSpec(activation="gelu_tanh"), norms="both")
    table = attention_table(layer, window, kinds, rotary=[rotary[kind] for kind in kinds])
    return DecoderConfig(**_DEFAULTS | table | {"layers": len(kinds)} | fields)


_SIZES_270M: dict[str, Any] = {
    "d_model": 640,
    "heads": 4,
    "kv_heads": 1,
    "d_ff": 2048,
    "head_dim": 256,
}
_SIZES_1B: dict[str, Any] = {
    "d_model": 1152,
    "heads": 4,
    "kv_heads": 1,
    "d_ff": 6912,
    "head_dim": 256,
}

PRESETS = {
    "test-gemma3": gemma3(every(6, 12), window=5, query_scale=9, vocab=64, d_model=32, d_ff=64),
    "gemma3-270m": gemma3(every(6, 18), window=512, vocab=262_144, **_SIZES_270M),
    "gemma3-1b": gemma3(every(6, 26), window=512, vocab=262_144, **_SIZES_1B),
}
"""Published shapes by name, and a small one for tests."""

_HARMLESS = ("cache_implementation", "_sliding_window_pattern")


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    for name in _HARMLESS:
        fields.value(name)
    fields.only("attention_bias", False)
    fields.only("use_bidirectional_attention", False)
    fields.only("attn_logit_softcapping", None)
    activation = ("hidden_activation", TANH)
    sizes = read_sizes(
        fields,
        theta=0,
        head_dim=256,
        kv_heads=4,
        tied=True,
        activation=activation,
        heads_divide=True,
    )
    layers = sizes["layers"]
    default = every(fields.integer("sliding_window_pattern", 6), layers)
    kinds = read_layer_types(fields, layers, default)
    return fields.build(
        gemma3,
        **sizes,
        kinds=kinds,
        rotary=read_rotary_by_kind(fields, _THETA, _LOCAL_THETA),
        window=read_window_of(fields, kinds, absent=4096),
        query_scale=fields.integer("query_pre_attn_scalar", 256),
        logits_soft_cap=read_soft_cap(fields, "final_logit_softcapping", absent=0.0),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    sizes = write_sizes(config)
    del sizes["hidden_act"], sizes["rope_theta"]
    sizes.pop("rope_scaling", None)
    return {
        "model_type": "gemma3_text",
        **sizes,
        **write_rotary_by_kind(config, _THETA, _LOCAL_THETA),
        "hidden_activation": TANH,
        **write_layer_types(config),
        "query_pre_attn_scalar": write_query_scale(config),
        "final_logit_softcapping": config.logits_soft_cap or None,
    }


FAMILY = decoder_family(
    "Gemma3ForCausalLM",
    _read,
    _write,
    layer_names(
        attention_norm="input_layernorm",
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    ),
)
