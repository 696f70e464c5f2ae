"""Exaone 4: norms after attention and MLP, normalised queries and keys (arXiv:2507.11407).

K-EXAONE (arXiv:2601.01739) has norms before them, and experts chosen with biases beside a shared one.

Three layers with a sliding window and rotary positions alternate with one that attends to all
preceding tokens and has no positions; the small model attends to all tokens, with positions.

```python
config = dataclasses.replace(PRESETS["exaone4-32b"], layers=4)
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
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
)
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.experts import (
    CHOICE_BIASES,
    RouterFields,
    dense_first,
    expert_names,
    experts_of,
    mlp_kinds,
    read_dense_first,
    read_mlp_types,
    read_shared_experts,
    with_dense_mlps,
    write_shared_experts,
)
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.layer_types import (
    every,
    read_rotated_windows,
    rotated_windows,
    table_of,
    write_rotated_windows,
)
from spmd.models.published.multi_token import AHEAD, ignored_ahead

_LAYER = LayerSpec(AttentionSpec(qk_norm="head"), norms="after")


def exaone4(layers: int, *, window: int = 4096, **fields: Any) -> DecoderConfig:
    """Return the config of an Exaone 4 with sliding windows, from fields of `DecoderConfig`."""
    table = table_of(rotated_windows(_LAYER, window, every(4, layers)))
    return DecoderConfig(**{"layers": layers} | table | fields)


def exaone_moe(*shape: Any, window: int, dense_d_ff: int, **fields: Any) -> DecoderConfig:
    """Return the config of an Exaone with experts, from fields of `DecoderConfig`.

    Args:
        *shape: Its fields from `vocab` to `d_ff`, the width of an expert and of the shared one.
        window: Sliding window of three of four layers.
        dense_d_ff: Hidden width of the MLP of the first layer.
        **fields: Other fields.
    """
    layers = shape[2]
    experts = ExpertsSpec(shared_d_ff=shape[5])
    layer = LayerSpec(_LAYER.mixer, experts)
    specs = rotated_windows(layer, window, every(4, layers))
    kinds = dense_first(1, layers)
    specs = with_dense_mlps(specs, MLPSpec(dense_d_ff), kinds)
    return DecoderConfig(*shape, **table_of(specs) | fields)


_SIZES_32B = {"vocab": 102_400, "d_model": 5120, "heads": 40, "kv_heads": 8, "d_ff": 27_392}

PRESETS = {
    "test-exaone4": exaone4(8, window=5, vocab=64, d_model=32, d_ff=64),
    "test-exaone-moe": exaone_moe(
        *(64, 32, 6, 4, 2, 16),
        window=5,
        dense_d_ff=48,
        router=dataclasses.replace(CHOICE_BIASES, experts=8, top_k=2),
    ),
    "exaone4-1.2b": DecoderConfig(
        *(102_400, 2048, 30, 32, 8, 4096), rope_theta=1e6, tied=True, layer=_LAYER
    ),
    "exaone4-32b": exaone4(64, **_SIZES_32B, rope_theta=1e6),
    "k-exaone-236b": exaone_moe(
        *(153_600, 6144, 48, 64, 8, 2048),
        window=128,
        dense_d_ff=18_432,
        head_dim=128,
        rope_theta=1e6,
        router=dataclasses.replace(CHOICE_BIASES, experts=128, top_k=8, scale=2.5, bias_rate=1e-3),
    ),
}
"""Published shapes by name, and small ones for tests."""

_NAMES = layer_names(
    attention_post_norm="post_attention_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


_ROUTER = RouterFields(
    "num_experts",
    experts=64,
    top_k=8,
    normalise=True,
    groups=(1, 1),
    scale=2.5,
    balance_name="",
    base=CHOICE_BIASES,
)
_MOE_NAMES = layer_names() | expert_names(choice_bias="e_score_correction_bias")
_SHARED = "num_shared_experts"


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5, kv_heads=32)
    layers = sizes["layers"]
    default = _default_kinds(fields, layers)
    specs = read_rotated_windows(fields, _LAYER, layers, default, absent=4096, nullable=True)
    return fields.build(DecoderConfig, **sizes, **table_of(specs))


def _read_moe(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5, kv_heads=32)
    layers = sizes["layers"]
    experts = read_shared_experts(fields, 1024, name=_SHARED)
    layer = LayerSpec(_LAYER.mixer, experts)
    default = _default_kinds(fields, layers)
    specs = read_rotated_windows(fields, layer, layers, default, absent=4096)
    dense = read_dense_first(fields, layers, 1)
    kinds = read_mlp_types(fields, layers, dense_first(dense, layers))
    specs = with_dense_mlps(specs, MLPSpec(), kinds)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    sizes["router"] = _ROUTER.read(fields)
    return fields.build(DecoderConfig, **sizes, **table_of(specs))


def _default_kinds(fields: Fields, layers: int) -> list[str]:
    """Return the kinds of layers in a file without `layer_types`."""
    fields.value("sliding_window_pattern")  # may be "LLLG" in a file with them
    if fields.is_null("sliding_window"):
        return every(1, layers)
    if fields.value("layer_types") is not None:
        return every(4, layers)
    return every(fields.integer("sliding_window_pattern", 4), layers)


def _write(config: DecoderConfig) -> dict[str, Any]:
    fields = write_sizes(config)
    fields |= write_rotated_windows(config)
    fields["model_type"] = "exaone4"
    return fields


def _write_moe(config: DecoderConfig) -> dict[str, Any]:
    _, _, router = experts_of(config)
    fields = write_sizes(config)
    fields |= write_rotated_windows(config)
    fields |= write_shared_experts(config, _SHARED)
    fields |= _ROUTER.write(router)
    fields["mlp_layer_types"] = mlp_kinds(config)
    fields["model_type"] = "exaone_moe"
    return fields


FAMILY = decoder_family("Exaone4ForCausalLM", _read, _write, _NAMES)
MOE_FAMILY = decoder_family(
    "ExaoneMoeForCausalLM",
    _read_moe,
    _write_moe,
    _MOE_NAMES,
    ignored=ignored_ahead(_MOE_NAMES),
    harmless=(AHEAD,),
    secondary=True,
)
