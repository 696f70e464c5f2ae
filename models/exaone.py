"""Exaone 4: norms after attention and MLP, normalised queries and keys (arXiv:2507.11407).

Three layers with a sliding window and rotary positions alternate with one that attends to all
preceding tokens and has no positions; the small model attends to all tokens, with positions.

```python
config = dataclasses.replace(PRESETS["exaone4-32b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, Rotary
from spmd.models.decoder.published import decoder_family, layer_names, read_sizes, write_sizes
from spmd.models.decoder.published_layers import (
    FULL,
    SLIDING,
    attention_table,
    every,
    read_layer_types,
    read_window_of,
    rotary_where,
    rotated_layers,
    write_layer_types,
)

_LAYER = LayerSpec(AttentionSpec(qk_norm="head"), norms="after")


def exaone4(layers: int, *, window: int = 4096, **fields: Any) -> DecoderConfig:
    """Return the config of an Exaone 4 with sliding windows, from fields of `DecoderConfig`."""
    kinds = every(4, layers)
    rotated = [kind == SLIDING for kind in kinds]
    positions = rotary_where(rotated, Rotary())
    table = attention_table(_LAYER, window, kinds, rotary=positions)
    return DecoderConfig(**{"layers": layers} | table | fields)


_SIZES_32B = {"vocab": 102_400, "d_model": 5120, "heads": 40, "kv_heads": 8, "d_ff": 27_392}

PRESETS = {
    "test-exaone4": exaone4(8, window=5, vocab=64, d_model=32, d_ff=64),
    "exaone4-1.2b": DecoderConfig(
        *(102_400, 2048, 30, 32, 8, 4096), rope_theta=1e6, tied=True, layer=_LAYER
    ),
    "exaone4-32b": exaone4(64, **_SIZES_32B, rope_theta=1e6),
}
"""Published shapes by name, and a small one for tests."""

_NAMES = layer_names(
    attention_post_norm="post_attention_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5, kv_heads=32)
    layers = sizes["layers"]
    has_windows = not fields.is_null("sliding_window")
    kinds = read_layer_types(fields, layers, _default_kinds(fields, layers))
    window = read_window_of(fields, kinds, absent=4096)
    rotated = [kind == SLIDING or not has_windows for kind in kinds]
    positions = rotary_where(rotated, Rotary())
    table = attention_table(_LAYER, window, kinds, rotary=positions)
    return fields.build(DecoderConfig, **sizes, **table)


def _default_kinds(fields: Fields, layers: int) -> list[str]:
    """Return the kinds of layers in a file without `layer_types`."""
    fields.value("sliding_window_pattern")  # may be "LLLG" in a file with them
    if fields.is_null("sliding_window"):
        return every(1, layers)
    if fields.value("layer_types") is not None:
        return every(4, layers)
    return every(fields.integer("sliding_window_pattern", 4), layers)


def _write(config: DecoderConfig) -> dict[str, Any]:
    fields = write_layer_types(config)
    if FULL in fields["layer_types"] and all(rotated_layers(config)):
        fields["sliding_window"] = None  # with one, layers without it have no positions
    return {"model_type": "exaone4", **write_sizes(config), **fields}


FAMILY = decoder_family("Exaone4ForCausalLM", _read, _write, _NAMES)
