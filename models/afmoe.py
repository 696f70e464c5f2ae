"""Arcee's Trinity (AFMoE): gated attention with windows, and experts beside shared ones.

Three of four layers have a sliding window and rotary positions, the fourth has neither. Source:
huggingface.co/arcee-ai/Trinity-Mini.

```python
config = dataclasses.replace(PRESETS["trinity-mini"], layers=8)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import TRANSPOSED
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
)
from spmd.models.published.common_fields import read_attention_bias, read_sizes, write_sizes
from spmd.models.published.experts import (
    CHOICE_BIASES,
    DENSE,
    RouterFields,
    dense_first,
    expert_names,
    experts_of,
    mlp_kinds,
    read_count,
    read_shared_experts,
    with_dense_mlps,
    write_shared_experts,
)
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.layer_types import (
    every,
    read_layer_types,
    read_window_of,
    rotated_windows,
    table_of,
    write_layer_types,
)

_MIXER = AttentionSpec(qk_norm="head", gate="channel")


def afmoe(
    *shape: Any, window: int, dense_d_ff: int, dense: int = 2, **fields: Any
) -> DecoderConfig:
    """Return the config of a Trinity from fields of `DecoderConfig`.

    Args:
        *shape: Its fields from `vocab` to `d_ff`, the width of an expert and of the shared one.
        window: Sliding window of three of four layers.
        dense_d_ff: Hidden width of an MLP in place of experts.
        dense: First layers with such an MLP.
        **fields: Other fields.
    """
    layers = shape[2]
    experts = ExpertsSpec(shared_d_ff=shape[5])
    layer = LayerSpec(_MIXER, experts, norms="both")
    kinds = every(4, layers)
    specs = _layers(layer, window, kinds, dense, MLPSpec(dense_d_ff))
    return DecoderConfig(*shape, **{"embed_scale": 0.0} | table_of(specs) | fields)


def _layers(
    layer: LayerSpec, window: int, kinds: Sequence[str], dense: int, mlp: MLPSpec
) -> list[LayerSpec]:
    """Return the specs of all layers; only those with a window have positions."""
    specs = rotated_windows(layer, window, kinds)
    return with_dense_mlps(specs, mlp, dense_first(dense, len(kinds)))


PRESETS = {
    "test-afmoe": afmoe(
        *(64, 32, 6, 4, 2, 16),
        window=5,
        dense_d_ff=48,
        router=dataclasses.replace(CHOICE_BIASES, experts=8, top_k=2),
    ),
    "trinity-mini": afmoe(
        *(200_192, 2048, 32, 32, 4, 1024),
        window=2048,
        dense_d_ff=6144,
        head_dim=128,
        router=dataclasses.replace(
            CHOICE_BIASES, experts=128, top_k=8, scale=2.826, bias_rate=1e-3
        ),
    ),
}
"""Published shape by name, and a small one for tests."""

_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
_NAMES = (
    layer_names(**_NORMS)
    | expert_names(router="router.gate", choice_bias="expert_bias")
    | {"attention/g_proj/kernel": ("self_attn.gate_proj.weight", TRANSPOSED)}
)
_ROUTER = RouterFields("num_experts", experts=64, top_k=6, balance_name="", base=CHOICE_BIASES)
_SHARED = "num_shared_experts"
_REQUIRED = {
    **{"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    **{"num_expert_groups": 1, "num_limited_groups": 1},
}
"""Fields of published files, each with the value that the model needs."""
_UNUSED = ("load_balance_coeff", "use_grouped_mm")


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    for name, value in _REQUIRED.items():
        fields.only(name, value)
    sizes = read_sizes(fields, eps=1e-5, head_dim=128)
    table = table_of(_read_layers(fields, sizes["layers"]))
    if fields.flag("mup_enabled", default=False):
        sizes["embed_scale"] = 0.0
    scale = fields.number("route_scale", 1.0)
    router = _ROUTER.read(fields, scale=scale)
    return fields.build(DecoderConfig, **sizes, **table, router=router)


def _read_layers(fields: Fields, layers: int) -> list[LayerSpec]:
    """Parse the specs of all layers."""
    mixer = read_attention_bias(fields, _MIXER)
    experts = read_shared_experts(fields, 1408, shared=2, name=_SHARED)
    layer = LayerSpec(mixer, experts, norms="both")
    interval = fields.integer("global_attn_every_n_layers", 4)
    default = every(interval, layers)
    kinds = read_layer_types(fields, layers, default)
    window = read_window_of(fields, kinds, absent=1024)
    dense = read_count(fields, "num_dense_layers", 1)
    return _layers(layer, window, kinds, dense, MLPSpec())


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, _, router = experts_of(config)
    mixer = layer.attention
    fields = write_sizes(config)
    fields |= write_layer_types(config)
    fields |= write_shared_experts(config, _SHARED)
    fields |= _ROUTER.write(router)
    fields["route_scale"] = router.scale
    fields["attention_bias"] = mixer.qkv_bias
    fields["mup_enabled"] = config.embed_scale != 1
    fields["num_dense_layers"] = mlp_kinds(config).count(DENSE)
    fields["model_type"] = "afmoe"
    return fields


FAMILY = decoder_family("AfmoeForCausalLM", _read, _write, _NAMES, harmless=_UNUSED)
