"""Mellum 2: experts of JetBrains, with windows, and positions of their own in layers with a window.

Source: huggingface.co/JetBrains/Mellum2-12B-A2.5B-Base.

```python
config = dataclasses.replace(PRESETS["test-mellum"], d_model=256)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.layers.router import RouterConfig
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    RopeScaling,
    Rotary,
)
from spmd.models.published.common_fields import read_attention_bias, read_sizes, write_sizes
from spmd.models.published.experts import (
    RouterFields,
    dense_first,
    expert_names,
    experts_of,
    mlp_kinds,
    read_mlp_types,
    with_dense_mlps,
    write_widths,
)
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.layer_types import (
    FULL,
    SLIDING,
    attention_layers,
    every,
    read_layer_types,
    read_rotary_by_kind,
    read_window_of,
    table_of,
    write_layer_types,
    write_rotary_by_kind,
)
from spmd.models.published.multi_token import AHEAD, ignored_ahead

_MIXER = AttentionSpec(qk_norm="head")
_THETA = 5e5
_LOCAL_THETA = 1e4


def mellum(*shape: Any, window: int, **fields: Any) -> DecoderConfig:
    """Return the config of a Mellum 2 from fields of `DecoderConfig`.

    Args:
        *shape: Its fields from `vocab` to `d_ff`, the width of an expert.
        window: Sliding window of three of four layers.
        **fields: Other fields.
    """
    plain = RopeScaling()
    rotary = {FULL: Rotary(_THETA, plain), SLIDING: Rotary(_LOCAL_THETA, plain)}
    kinds = every(4, shape[2])
    layer = LayerSpec(_MIXER, ExpertsSpec())
    specs = attention_layers(layer, window, kinds, rotary=[rotary[kind] for kind in kinds])
    return DecoderConfig(*shape, **{"norm_eps": 1e-6} | table_of(specs) | fields)


PRESETS = {
    "test-mellum": mellum(
        *(64, 32, 8, 4, 2, 16), window=5, router=RouterConfig(experts=8, top_k=2)
    ),
}
"""A small one for tests."""

_ROUTER = RouterFields(
    "num_experts", also=("num_local_experts",), experts=64, top_k=8, normalise=True
)
_UNUSED = (AHEAD, "mtp_layer_types", "mtp_mlp_layer_types")
"""Of multi-token prediction."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, theta=0, kv_heads=4, head_dim=128, d_ff=7168)
    layers = sizes["layers"]
    kinds = read_layer_types(fields, layers, every(1, layers))
    window = read_window_of(fields, kinds, absent=1024)
    rotary = read_rotary_by_kind(fields, _THETA, _LOCAL_THETA)
    positions = [rotary[kind] for kind in kinds]
    mixer = read_attention_bias(fields, _MIXER)
    width = fields.integer("moe_intermediate_size", 896)
    layer = LayerSpec(mixer, ExpertsSpec(width))
    specs = attention_layers(layer, window, kinds, rotary=positions)
    mlps = read_mlp_types(fields, layers, dense_first(0, layers))
    specs = with_dense_mlps(specs, MLPSpec(), mlps)
    sizes["router"] = _ROUTER.read(fields)
    return fields.build(DecoderConfig, **sizes, **table_of(specs))


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, _, router = experts_of(config)
    mixer = layer.attention
    fields = write_sizes(config)
    for name in ("rope_theta", "rope_scaling"):
        fields.pop(name, None)
    fields |= write_rotary_by_kind(config, _THETA, _LOCAL_THETA)
    fields |= write_layer_types(config)
    fields |= write_widths(config)
    fields |= _ROUTER.write(router)
    fields["attention_bias"] = mixer.qkv_bias
    fields["mlp_layer_types"] = mlp_kinds(config)
    fields["model_type"] = "mellum"
    return fields


_NAMES = layer_names() | expert_names()
FAMILY = decoder_family(
    "MellumForCausalLM",
    _read,
    _write,
    _NAMES,
    ignored=ignored_ahead(_NAMES),
    harmless=_UNUSED,
    secondary=True,
)
