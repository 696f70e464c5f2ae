"""Qwen with experts: many small ones, beside a shared expert with a gate in Qwen 2 MoE.

Sources: qwenlm.github.io/blog/qwen-moe for Qwen 1.5 MoE, arXiv:2407.10671 for Qwen 2,
arXiv:2505.09388 for Qwen 3.

```python
config = dataclasses.replace(PRESETS["qwen3-30b-a3b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.layers.router import RouterConfig
from spmd.models.decoder import AttentionSpec, DecoderConfig, ExpertsSpec, LayerSpec, MLPSpec
from spmd.models.published.common_fields import read_attention_bias, read_sizes, write_sizes
from spmd.models.published.experts import (
    RouterFields,
    expert_names,
    experts_of,
    experts_table,
    read_sparse_layers,
    with_dense_mlps,
    write_sparse_layers,
    write_widths,
)
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.layer_types import (
    FULL,
    SLIDING,
    attention_layers,
    layer_types,
    read_layer_types,
    read_window_of,
    table_of,
)

_THETA: dict[str, Any] = {"rope_theta": 1e6, "norm_eps": 1e-6}
_QWEN3 = LayerSpec(AttentionSpec(qk_norm="head"), ExpertsSpec())


def _qwen3(*shape: Any, **fields: Any) -> DecoderConfig:
    return DecoderConfig(*shape, **_THETA | {"layer": _QWEN3} | fields)


def qwen2_moe(*shape: Any, shared_d_ff: int, **fields: Any) -> DecoderConfig:
    """Return the config of a Qwen 2 MoE, from fields of `DecoderConfig`.

    Args:
        *shape: Its first fields; d_ff is the width of an expert.
        shared_d_ff: Hidden width of the shared expert.
        **fields: Other fields.
    """
    experts = ExpertsSpec(shared_d_ff=shared_d_ff, shared_gate=True)
    layer = LayerSpec(AttentionSpec(qkv_bias=True), experts)
    return DecoderConfig(*shape, **_THETA | {"layer": layer} | fields)


def _router(experts: int, top_k: int, *, normalise: bool = True) -> RouterConfig:
    return RouterConfig(experts=experts, top_k=top_k, normalise=normalise, balance=0.001)


PRESETS = {
    "test-qwen2-moe": qwen2_moe(
        *(64, 32, 2, 4, 2, 16), shared_d_ff=24, router=_router(8, 2, normalise=False)
    ),
    "test-qwen3-moe": _qwen3(64, 32, 2, 4, 2, 16, router=_router(8, 2)),
    "qwen1.5-moe": qwen2_moe(
        *(151_936, 2048, 24, 16, 16, 1408),
        shared_d_ff=5632,
        router=_router(60, 4, normalise=False),
    ),
    "qwen3-30b-a3b": _qwen3(*(151_936, 2048, 48, 32, 4, 768), head_dim=128, router=_router(128, 8)),
    "qwen3-235b-a22b": _qwen3(
        *(151_936, 4096, 94, 64, 4, 1536), head_dim=128, router=_router(128, 8)
    ),
}
"""Published shapes by name, and small ones for tests."""

_NAMES = layer_names() | expert_names(shared="shared_expert")
_ROUTER2 = RouterFields("num_experts", experts=60, top_k=4, normalise=False)
_ROUTER3 = RouterFields(
    "num_experts", also=("num_local_experts",), experts=128, top_k=8, normalise=False
)
_REQUIRED3 = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
"""Fields of published files, each with the value that the model needs."""
_UNUSED_WINDOW = 4096


def _read3(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    for name, value in _REQUIRED3.items():
        fields.only(name, value)
    sizes = read_sizes(fields, kv_heads=4, d_ff=6144)
    if fields.flag("use_sliding_window", default=False):
        sizes["window"] = read_window_of(fields, [SLIDING], _UNUSED_WINDOW)
    for name in ("sliding_window", "max_window_layers"):
        fields.value(name)  # unused without `use_sliding_window`, the second always
    mixer = read_attention_bias(fields, _QWEN3.attention)
    layer = LayerSpec(mixer, ExpertsSpec(fields.integer("moe_intermediate_size", 768)))
    table = experts_table(layer, MLPSpec(), read_sparse_layers(fields, sizes["layers"]))
    return fields.build(DecoderConfig, **sizes, **table, router=_ROUTER3.read(fields))


def _write3(config: DecoderConfig) -> dict[str, Any]:
    layer, _, router = experts_of(config)
    window = layer.attention.window or 0
    return {
        "model_type": "qwen3_moe",
        **write_sizes(config),
        **write_widths(config),
        **write_sparse_layers(config),
        **_ROUTER3.write(router),
        "attention_bias": layer.attention.out_bias,
        "use_sliding_window": window > 0,
        "sliding_window": window or _UNUSED_WINDOW,
    }


def _read2(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, kv_heads=16, d_ff=5632)
    layers = sizes["layers"]
    windowed = 0
    if fields.flag("use_sliding_window", default=False):
        windowed = fields.integer("max_window_layers", 28)
    kinds = read_layer_types(fields, layers, _kinds_with_windows(layers, windowed))
    window = read_window_of(fields, kinds, _UNUSED_WINDOW)
    if window and not windowed:
        fields.refuse("layer_types", f"has {SLIDING} without use_sliding_window")
    for name in ("sliding_window", "max_window_layers"):
        fields.value(name)  # unused without `use_sliding_window`
    width = fields.integer("shared_expert_intermediate_size", 5632)
    experts = ExpertsSpec(
        fields.integer("moe_intermediate_size", 1408), shared_d_ff=width, shared_gate=True
    )
    mixer = AttentionSpec(qkv_bias=fields.flag("qkv_bias", default=True))
    specs = attention_layers(LayerSpec(mixer, experts), window, kinds)
    specs = with_dense_mlps(specs, MLPSpec(), read_sparse_layers(fields, layers))
    return fields.build(DecoderConfig, **sizes, **table_of(specs), router=_ROUTER2.read(fields))


def _kinds_with_windows(layers: int, windowed: int) -> list[str]:
    """Return the kinds of layers: of the first ones, every second has a window, from the first on."""
    kinds = [FULL] * layers
    for number in range(0, min(layers, windowed), 2):
        kinds[number] = SLIDING
    return kinds


def _write2(config: DecoderConfig) -> dict[str, Any]:
    layer, experts, router = experts_of(config)
    window = max(spec.attention.window or 0 for spec in config.pattern.distinct)
    return {
        "model_type": "qwen2_moe",
        **write_sizes(config),
        **write_widths(config),
        **write_sparse_layers(config),
        **_ROUTER2.write(router),
        "shared_expert_intermediate_size": experts.shared_d_ff,
        "qkv_bias": layer.attention.qkv_bias,
        "use_sliding_window": window > 0,
        "layer_types": layer_types(config),
        "sliding_window": window or _UNUSED_WINDOW,
    }


QWEN2_MOE_FAMILY = decoder_family("Qwen2MoeForCausalLM", _read2, _write2, _NAMES)
QWEN3_MOE_FAMILY = decoder_family("Qwen3MoeForCausalLM", _read3, _write3, _NAMES)
