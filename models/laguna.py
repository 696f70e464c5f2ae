"""Laguna: gated attention with more heads in some layers, and experts beside a shared one.

Layers of full attention rotate half of each head, those with a window whole heads. Source:
huggingface.co/poolside/Laguna-XS.2.

```python
config = dataclasses.replace(PRESETS["test-laguna"], d_model=256)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.errors import shorten
from spmd.hf.fields import Fields
from spmd.hf.layout import TRANSPOSED
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

_MIXER = AttentionSpec(qk_norm="head", gate="head", gate_activation="softplus")
_PLAIN = RopeScaling()
_ROTARY = {FULL: Rotary(5e5, _PLAIN, fraction=0.5), SLIDING: Rotary(1e4, _PLAIN)}
_CHOICE = RouterConfig(score="sigmoid", choice_bias=True, balance=0.001)


def laguna(
    *shape: Any, window: int, dense_d_ff: int, full_heads: int, **fields: Any
) -> DecoderConfig:
    """Return the config of a Laguna from fields of `DecoderConfig`.

    Args:
        *shape: Its fields from `vocab` to `d_ff`, the width of an expert and of the shared one.
        window: Sliding window of three of four layers.
        dense_d_ff: Hidden width of the MLP of the first layer.
        full_heads: Query heads of layers without a window.
        **fields: Other fields.
    """
    layers = shape[2]
    kinds = every(4, layers)
    of_kind = {FULL: full_heads, SLIDING: shape[3]}
    heads = [of_kind[kind] for kind in kinds]
    experts = ExpertsSpec(shared_d_ff=shape[5])
    layer = LayerSpec(_MIXER, experts)
    specs = _layers(layer, window, kinds, _ROTARY, heads)
    mlps = dense_first(1, layers)
    specs = with_dense_mlps(specs, MLPSpec(dense_d_ff), mlps)
    return DecoderConfig(*shape, **{"norm_eps": 1e-6} | table_of(specs) | fields)


def _layers(
    layer: LayerSpec,
    window: int,
    kinds: Sequence[str],
    rotary: Mapping[str, Rotary],
    heads: Sequence[int],
) -> list[LayerSpec]:
    """Return the specs of all layers, each with its number of query heads."""
    specs = []
    positions = [rotary[kind] for kind in kinds]
    plain = attention_layers(layer, window, kinds, rotary=positions)
    for spec, count in zip(plain, heads, strict=True):
        mixer = dataclasses.replace(spec.attention, heads=count)
        specs.append(dataclasses.replace(spec, mixer=mixer))
    return specs


PRESETS = {
    "test-laguna": laguna(
        *(64, 32, 8, 4, 2, 16),
        window=5,
        dense_d_ff=48,
        full_heads=2,
        head_dim=8,
        router=dataclasses.replace(_CHOICE, experts=8, top_k=2, logit_cap=2.0),
    ),
}
"""A small one for tests."""

_NAMES = (
    layer_names()
    | expert_names(shared="shared_expert", choice_bias="experts.e_score_correction_bias")
    | {"attention/g_proj/kernel": ("self_attn.g_proj.weight", TRANSPOSED)}
)
_ROUTER = RouterFields("num_experts", experts=256, top_k=8, base=_CHOICE)
_WIDTH = "shared_expert_intermediate_size"
_HEADS = "num_attention_heads_per_layer"
_CAP = "moe_router_logit_softcapping"
_GATING = {"none": None, "head": True, "channel": "per-element"}
"""Gate of attention → the value of `gating`."""
_SCALE = "moe_routed_scaling_factor"


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, theta=0, kv_heads=8, head_dim=128)
    fields.only("moe_apply_router_weight_on_input", False)
    layers = sizes["layers"]
    kinds = read_layer_types(fields, layers, every(1, layers))
    window = read_window_of(fields, kinds, absent=512)
    rotary = _read_rotary(fields)
    heads = _read_heads(fields, len(kinds), sizes["heads"])
    layer = LayerSpec(_read_mixer(fields), _read_experts(fields))
    specs = _layers(layer, window, kinds, rotary, heads)
    mlps = read_mlp_types(fields, layers, dense_first(1, layers))
    specs = with_dense_mlps(specs, MLPSpec(), mlps)
    cap = fields.number(_CAP, 0.0, least=0)
    scale = fields.number(_SCALE, 1.0)
    sizes["router"] = _ROUTER.read(fields, logit_cap=cap, scale=scale)
    return fields.build(DecoderConfig, **sizes, **table_of(specs))


def _read_experts(fields: Fields) -> ExpertsSpec:
    """Parse the widths of experts and of the shared one."""
    width = fields.integer("moe_intermediate_size", 512)
    shared = fields.integer(_WIDTH, 512)
    return ExpertsSpec(width, shared_d_ff=shared)


def _read_mixer(fields: Fields) -> AttentionSpec:
    """Parse biases and the gate of attention."""
    mixer = read_attention_bias(fields, _MIXER)
    fields.only("gating", True, "per-head", "per-element")
    if fields.value("gating") == "per-element":
        mixer = dataclasses.replace(mixer, gate="channel")
    return mixer


def _read_rotary(fields: Fields) -> dict[str, Rotary]:
    """Parse the rotary positions of both kinds of layers."""
    if fields.value("rope_parameters") is None:
        return _ROTARY
    return read_rotary_by_kind(fields, _ROTARY[FULL].theta, _ROTARY[SLIDING].theta)


def _read_heads(fields: Fields, layers: int, default: int) -> list[int]:
    """Parse the number of query heads of each layer."""
    found = fields.value(_HEADS)
    if found is None:
        return [default] * layers
    is_list = isinstance(found, list) and all(type(count) is int for count in found)
    if not is_list or len(found) != layers or min(found) < 1:
        what = f"is {shorten(found)}, not a list of {layers} integers of at least 1"
        fields.refuse(_HEADS, what)
        return [default] * layers
    return [*found]


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, experts, router = experts_of(config)
    mixer = layer.attention
    theta, local_theta = (rotary.theta for rotary in _ROTARY.values())
    fields = write_sizes(config)
    for name in ("rope_theta", "rope_scaling"):
        fields.pop(name, None)
    fields |= write_rotary_by_kind(config, theta, local_theta)
    fields |= write_layer_types(config)
    fields |= write_widths(config)
    fields |= _ROUTER.write(router)
    fields["attention_bias"] = mixer.qkv_bias
    fields["gating"] = _GATING[mixer.gate]
    kinds = config.pattern.kinds
    fields[_HEADS] = [spec.attention.heads for spec in kinds]
    fields["mlp_layer_types"] = mlp_kinds(config)
    fields[_WIDTH] = experts.shared_d_ff
    fields[_CAP] = router.logit_cap
    fields[_SCALE] = router.scale
    fields["model_type"] = "laguna"
    return fields


FAMILY = decoder_family("LagunaForCausalLM", _read, _write, _NAMES)
