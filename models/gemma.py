"""Gemma: GeGLU, wide heads and a scaled, tied embedding (arXiv:2403.08295), and Gemma 2.

Gemma 2 (arXiv:2408.00118) has alternating local and global attention, soft caps, and norms after
attention and MLP: `layers/local_block/…` with a window and `layers/global_block/…` without.

```python
config = dataclasses.replace(PRESETS["gemma2-2b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, MLPSpec, NormSpec
from spmd.models.published.common_fields import (
    TANH,
    check_layer_types,
    read_sizes,
    write_query_scale,
    write_sizes,
)
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.layer_types import write_layer_types

DEFAULTS: dict[str, Any] = {
    "norm_eps": 1e-6,
    "tied": True,
    "norm": NormSpec(offset=1.0),
    "embed_scale": 0.0,  # √d_model
}
"""Fields of all versions."""
MLP = MLPSpec(activation="gelu_tanh")
"""MLP of all versions."""
NAMES2 = layer_names(
    attention_norm="input_layernorm",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
"""Tensors of a layer with norms before and after attention and MLP."""


def gemma(*shape: Any, **fields: Any) -> DecoderConfig:
    """Return the config of a Gemma from fields of `DecoderConfig`."""
    fields = DEFAULTS | {"layer": LayerSpec(mlp=MLP)} | fields
    return DecoderConfig(*shape, **fields)


def gemma2(
    *shape: Any, window: int = 4096, query_scale: float = 256, soft_cap: float = 50.0, **fields: Any
) -> DecoderConfig:
    """Return the config of a Gemma 2 from fields of `DecoderConfig`.

    Args:
        *shape: The first fields, in order.
        window: Sliding window of layers 0, 2, …
        query_scale: Products of queries and keys are divided by the square root of this
            (`query_pre_attn_scalar`).
        soft_cap: Soft cap of attention scores.
        **fields: Other fields.
    """
    pair = []
    for name, size in (("local_block", window), ("global_block", 0)):
        mixer = AttentionSpec(window=size, scale=query_scale**-0.5, soft_cap=soft_cap)
        pair.append(LayerSpec(mixer, MLP, norms="both", name=name))
    fields = DEFAULTS | {"logits_soft_cap": 30.0, "group": tuple(pair)} | fields
    return DecoderConfig(*shape, **fields)


PRESETS = {
    "test-gemma": gemma(64, 32, 2, 4, 2, 64, head_dim=16),
    "test-gemma2": gemma2(
        *(64, 32, 4, 4, 2, 64),
        head_dim=16,
        window=5,
        query_scale=9,
        soft_cap=2.0,
        logits_soft_cap=3.0,
    ),
    "gemma-2b": gemma(256_000, 2048, 18, 8, 1, 16_384, head_dim=256),
    "gemma-7b": gemma(256_000, 3072, 28, 16, 16, 24_576, head_dim=256),
    "gemma2-2b": gemma2(256_000, 2304, 26, 8, 4, 9216, head_dim=256),
    "gemma2-9b": gemma2(256_000, 3584, 42, 16, 8, 14_336, head_dim=256),
    "gemma2-27b": gemma2(256_000, 4608, 46, 32, 16, 36_864, head_dim=128, query_scale=144),
}
"""Published shapes by name, and small ones for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    # both mean the tanh approximation: the first releases wrote "gelu" for it
    sizes = _read_sizes(fields, ("hidden_act", TANH, "gelu"), kv_heads=16)
    fields.only("hidden_activation", TANH)
    return fields.build(gemma, **sizes)


def _read_sizes(fields: Fields, activation: tuple[str, ...], **family: Any) -> dict[str, Any]:
    fields.only("attention_bias", False)
    fields.only("use_bidirectional_attention", False)
    return read_sizes(fields, head_dim=256, tied=True, activation=activation, **family)


def read_gemma(fields: Fields, **family: Any) -> dict[str, Any]:
    """Parse the fields of Gemma 2 and later, as arguments of `DecoderConfig`.

    Args:
        fields: Fields of config.json.
        **family: Other arguments of `read_sizes`.
    """
    fields.only("hidden_act", TANH)
    fields.value("cache_implementation")  # affects only generation
    activation = ("hidden_activation", TANH)
    return _read_sizes(fields, activation, kv_heads=4, heads_divide=True, **family)


def write_gemma_layers(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of config.json of Gemma 2 and later, with `layer_types`."""
    fields = write_sizes(config)
    del fields["hidden_act"]
    return {
        **fields,
        "hidden_activation": TANH,
        **write_layer_types(config),
        "query_pre_attn_scalar": write_query_scale(config),
        "attn_logit_softcapping": config.pattern.distinct[0].attention.soft_cap or None,
        "final_logit_softcapping": config.logits_soft_cap or None,
    }


def _read2(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_gemma(fields)
    for name in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
        if fields.is_null(name):
            fields.refuse(name, "is null, and this model requires it")
    fields.only("sliding_window_size", None, fields.value("sliding_window"))
    check_layer_types(fields, sizes["layers"], "sliding_attention", "full_attention")
    return fields.build(
        gemma2,
        **sizes,
        window=fields.integer("sliding_window", 4096),
        query_scale=fields.integer("query_pre_attn_scalar", 256),
        soft_cap=fields.number("attn_logit_softcapping", 50.0, least=0),
        logits_soft_cap=fields.number("final_logit_softcapping", 30.0, least=0),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"model_type": "gemma", **write_sizes(config), "hidden_act": TANH}


def _write2(config: DecoderConfig) -> dict[str, Any]:
    sizes = write_sizes(config)
    del sizes["hidden_act"]
    mixer = config.pattern.group[0].attention
    return {
        "model_type": "gemma2",
        **sizes,
        "hidden_activation": TANH,
        "sliding_window": mixer.window,
        "query_pre_attn_scalar": write_query_scale(config),
        "attn_logit_softcapping": mixer.soft_cap,
        "final_logit_softcapping": config.logits_soft_cap,
    }


GEMMA_FAMILY = decoder_family("GemmaForCausalLM", _read, _write)
GEMMA2_FAMILY = decoder_family("Gemma2ForCausalLM", _read2, _write2, NAMES2)
