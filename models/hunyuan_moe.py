"""Hunyuan with experts: A13B, and Hy3 with dense first layers and biases of the choice of experts.

Sources: huggingface.co/tencent/Hunyuan-A13B-Instruct, a Hunyuan with as many experts in each layer,
beside a shared one; huggingface.co/tencent/Hy3-preview.

```python
config = dataclasses.replace(PRESETS["hunyuan-a13b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.layers.router import RouterConfig
from spmd.models.decoder import AttentionSpec, DecoderConfig, ExpertsSpec, LayerSpec, MLPSpec
from spmd.models.hunyuan import HARMLESS, NAMES, read_sizes_with_alpha
from spmd.models.published.common_fields import read_attention_bias, read_sizes, write_sizes
from spmd.models.published.experts import (
    CHOICE_BIASES,
    RouterFields,
    dense_first,
    expert_names,
    experts_of,
    experts_table,
    mlp_kinds,
    read_mlp_types,
    read_shared_experts,
    write_shared_experts,
)
from spmd.models.published.family import decoder_family, layer_names

_V1_MIXER = AttentionSpec(qk_norm="head", qk_norm_after=True)
_V3_MIXER = AttentionSpec(qk_norm="head")
_THETA3 = 11_158_840.0


def hunyuan_moe(*shape: Any, **fields: Any) -> DecoderConfig:
    """Return the config of a Hunyuan with a shared expert as wide as the others."""
    layer = LayerSpec(_V1_MIXER, ExpertsSpec(shared_d_ff=shape[5]))
    return DecoderConfig(*shape, **{"layer": layer} | fields)


def hy3(*shape: Any, dense_d_ff: int, dense: int = 1, **fields: Any) -> DecoderConfig:
    """Return the config of a Hy3, from fields of `DecoderConfig`.

    Args:
        *shape: Its fields from `vocab` to `d_ff`, the width of an expert and of the shared one.
        dense_d_ff: Hidden width of an MLP in place of experts.
        dense: First layers with such an MLP.
        **fields: Other fields.
    """
    layer = LayerSpec(_V3_MIXER, ExpertsSpec(shared_d_ff=shape[5]))
    table = experts_table(layer, MLPSpec(dense_d_ff), dense_first(dense, shape[2]))
    return DecoderConfig(*shape, **{"rope_theta": _THETA3} | table | fields)


def _router3(experts: int, top_k: int, scale: float) -> RouterConfig:
    return dataclasses.replace(CHOICE_BIASES, experts=experts, top_k=top_k, scale=scale)


PRESETS = {
    "test-hunyuan-moe": hunyuan_moe(64, 32, 2, 4, 2, 16, router=RouterConfig()),
    "test-hy3": hy3(64, 32, 3, 4, 2, 16, dense_d_ff=48, router=_router3(8, 2, 1.5)),
    "hunyuan-a13b": hunyuan_moe(
        *(128_167, 4096, 32, 32, 8, 3072),
        head_dim=128,
        tied=True,
        rope_theta=1e4 * 1000 ** (128 / 126),
        router=RouterConfig(experts=64, top_k=8),
    ),
    "hy3-preview": hy3(
        *(120_832, 4096, 80, 64, 8, 1536),
        head_dim=128,
        dense_d_ff=13_312,
        router=_router3(192, 8, 2.826),
    ),
}
"""Published shapes by name, and small ones for tests."""

_V1_NAMES = NAMES | expert_names(router="gate.wg", shared="shared_mlp")
_V3_NAMES = layer_names() | expert_names(
    router="router.gate", shared="shared_mlp", choice_bias="expert_bias"
)
_V1_ROUTER = RouterFields("num_experts", experts=1, top_k=1, top_k_name="moe_topk", balance_name="")
_V3_ROUTER = RouterFields("num_experts", experts=192, top_k=8, balance_name="", base=CHOICE_BIASES)
_SCALE3 = "router_scaling_factor"
_SHARED3 = "num_shared_experts"
_V3_HARMLESS = ("enable_moe_fp32_combine",)
_V1_HARMLESS = (
    *HARMLESS,
    *(
        "capacity_factor",
        "moe_drop_tokens",
        "moe_random_routing_dropped_token",
        "use_mixed_mlp_moe",
    ),
)
"""Fields of Hunyuan, and of training with a capacity of experts."""
_PER_LAYER = ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size")


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    values = {**values}
    for name in _PER_LAYER:
        values[name] = _one_of_all_layers(values.get(name))
    fields, sizes = read_sizes_with_alpha(values)
    for name in _V1_HARMLESS:
        fields.value(name)
    fields.only("num_shared_expert", 1)
    fields.only("moe_intermediate_size", sizes["d_ff"])
    fields.only("moe_layer_num_skipped", 0)
    fields.only("norm_topk_prob", True)
    fields.only("routed_scaling_factor", 1.0)
    mixer = read_attention_bias(fields, _V1_MIXER)
    layer = LayerSpec(mixer, ExpertsSpec(shared_d_ff=sizes["d_ff"]))
    return fields.build(DecoderConfig, **sizes, layer=layer, router=_V1_ROUTER.read(fields))


def _one_of_all_layers(value: Any) -> Any:
    """Return the value of all layers, if a list has the same one for each."""
    if isinstance(value, list) and value and all(other == value[0] for other in value):
        return value[0]
    return value


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, _, router = experts_of(config)
    return {
        "model_type": "hunyuan_v1_moe",
        **write_sizes(config),
        **_V1_ROUTER.write(router),
        "attention_bias": layer.attention.qkv_bias,
    }


def _read3(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    for name in _V3_HARMLESS:
        fields.value(name)
    sizes = read_sizes(fields, eps=1e-5, theta=_THETA3, head_dim=128, kv_heads=8, d_ff=13_312)
    fields.only("mlp_bias", False)
    mixer = read_attention_bias(fields, _V3_MIXER)
    layer = LayerSpec(mixer, read_shared_experts(fields, d_ff=1536, name=_SHARED3))
    layers = sizes["layers"]
    kinds = read_mlp_types(fields, layers, dense_first(1, layers))
    router = _V3_ROUTER.read(fields, scale=fields.number(_SCALE3, 2.826))
    return fields.build(
        DecoderConfig, **sizes, **experts_table(layer, MLPSpec(), kinds), router=router
    )


def _write3(config: DecoderConfig) -> dict[str, Any]:
    layer, _, router = experts_of(config)
    return {
        "model_type": "hy_v3",
        **write_sizes(config),
        **write_shared_experts(config, _SHARED3),
        **_V3_ROUTER.write(router),
        _SCALE3: router.scale,
        "mlp_layer_types": mlp_kinds(config),
        "attention_bias": layer.attention.out_bias,
    }


V1_FAMILY = decoder_family(
    "HunYuanMoEV1ForCausalLM", _read, _write, _V1_NAMES, harmless=_V1_HARMLESS
)
V3_FAMILY = decoder_family("HYV3ForCausalLM", _read3, _write3, _V3_NAMES, harmless=_V3_HARMLESS)
