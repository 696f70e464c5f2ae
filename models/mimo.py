"""MiMo-V2-Flash: narrow values, and in windows sinks and twice as many key/value heads.

Source: config.json of huggingface.co/XiaomiMiMo/MiMo-V2-Flash. A third of each head is rotated, with a
base of its own in windows; the first layer has an MLP, the others experts.

```python
config = dataclasses.replace(PRESETS["mimo-v2-flash"], vocab=32_000)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS
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
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.experts import (
    SPARSE,
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
    every,
    layer_types,
    read_layer_types,
    read_window_of,
    table_of,
    write_layer_types,
)
from spmd.models.published.multi_token import ignored_tensors_ahead
from spmd.models.published.rotary import read_rotary_by_layer, write_rotary_by_layer

_ROTARY = {
    FULL: Rotary(5e6, RopeScaling(), 0.334),
    SLIDING: Rotary(1e4, RopeScaling(), 0.334),
}
_ROUTER = RouterFields(
    "n_routed_experts",
    also=("num_local_experts",),
    experts=256,
    top_k=8,
    normalise=True,
    groups=(1, 1),
    scale=1.0,
    balance_name="",
    base=RouterConfig(score="sigmoid", normalise_eps=1e-20, choice_bias=True),
)


def mimo(
    kinds: Sequence[str],
    mlps: Sequence[str],
    *,
    mixers: Mapping[str, AttentionSpec],
    d_ff: int,
    dense_d_ff: int,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a MiMo-V2-Flash, from fields of `DecoderConfig`.

    Args:
        kinds: The kind of each layer's attention, as in `layer_types`.
        mlps: The kind of each layer's MLP, as in `mlp_layer_types`.
        mixers: The attention of each kind.
        d_ff: Hidden width of an expert.
        dense_d_ff: Hidden width of an MLP in place of experts.
        **fields: Other fields.
    """
    layers = [LayerSpec(mixers[kind], ExpertsSpec()) for kind in kinds]
    table = table_of(with_dense_mlps(layers, MLPSpec(dense_d_ff), mlps))
    return DecoderConfig(d_ff=d_ff, **{"layers": len(kinds)} | table | fields)


def attention_of_kinds(
    kv_heads: int,
    mixer: AttentionSpec,
    *,
    window: int = 129,
    rotary: Mapping[str, Rotary] = _ROTARY,
) -> dict[str, AttentionSpec]:
    """Return the attention of each kind.

    Args:
        kv_heads: Key/value heads of layers without a window.
        mixer: Options of both kinds.
        window: Sliding window.
        rotary: Rotary positions of each kind.
    """
    full = dataclasses.replace(mixer, kv_heads=kv_heads, window=0, rotary=rotary[FULL])
    sliding = dataclasses.replace(
        mixer, kv_heads=2 * kv_heads, window=window, rotary=rotary[SLIDING], sinks=True
    )
    return {FULL: full, SLIDING: sliding}


def _default_kinds(layers: int) -> list[str]:
    """Return the kinds of attention of layers without `layer_types`."""
    return [FULL, *every(6, layers)[1:]][:layers]


_TINY = AttentionSpec(value_dim=4, value_scale=0.707)
_TINY_ROTARY = {kind: dataclasses.replace(rotary, fraction=0.5) for kind, rotary in _ROTARY.items()}

PRESETS = {
    "test-mimo-v2-flash": mimo(
        _default_kinds(8),
        dense_first(1, 8),
        mixers=attention_of_kinds(2, _TINY, window=5, rotary=_TINY_ROTARY),
        d_ff=16,
        dense_d_ff=48,
        vocab=64,
        d_model=32,
        kv_heads=2,
        router=dataclasses.replace(_ROUTER.base, experts=4),
    ),
    "mimo-v2-flash": mimo(
        _default_kinds(48),
        dense_first(1, 48),
        mixers=attention_of_kinds(4, AttentionSpec(value_dim=128, value_scale=0.707)),
        d_ff=2048,
        dense_d_ff=16_384,
        vocab=152_576,
        d_model=4096,
        heads=64,
        kv_heads=4,
        head_dim=192,
        router=dataclasses.replace(_ROUTER.base, experts=256, top_k=8),
    ),
}
"""Published shape by name, without multi-token prediction, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5, theta=0, head_dim=192, kv_heads=4)
    layers = sizes.pop("layers")
    kinds = read_layer_types(fields, layers, _default_kinds(layers))
    window = _read_window(fields, kinds)
    rotary = read_rotary_by_layer(fields, _ROTARY)
    if fields.value("rope_parameters") is None:  # then these are without effect in transformers
        fields.only("rope_theta", _ROTARY[FULL].theta)
        fields.only("partial_rotary_factor", _ROTARY[FULL].fraction)
        fields.only("rope_scaling", None)
    mixer = AttentionSpec(
        qkv_bias=fields.flag("attention_bias", default=False),
        value_dim=fields.integer("v_head_dim", 128),
        value_scale=_read_value_scale(fields),
    )
    mlps = read_mlp_types(fields, layers, dense_first(1, layers))
    _check_copies(fields, kinds, mlps, sizes, mixer)
    sizes["dense_d_ff"] = sizes.pop("d_ff")
    return fields.build(
        mimo,
        **sizes,
        kinds=kinds,
        mlps=mlps,
        mixers=attention_of_kinds(sizes["kv_heads"], mixer, window=window, rotary=rotary),
        d_ff=fields.integer("moe_intermediate_size", 2048),
        router=_ROUTER.read(fields),
    )


def _check_copies(
    fields: Fields,
    kinds: Sequence[str],
    mlps: Sequence[str],
    sizes: Mapping[str, Any],
    mixer: AttentionSpec,
) -> None:
    """Require that fields of the published file without effect in `transformers` repeat others."""
    fields.only("hybrid_layer_pattern", [int(kind == SLIDING) for kind in kinds])
    fields.only("moe_layer_freq", [int(kind == SPARSE) for kind in mlps])
    fields.only("swa_num_attention_heads", sizes["heads"])
    fields.only("swa_num_key_value_heads", 2 * sizes["kv_heads"])
    fields.only("swa_v_head_dim", mixer.value_dim)
    fields.only("swa_head_dim", fields.value("head_dim", 192))
    fields.only("swa_rope_theta", _ROTARY[SLIDING].theta)
    fields.only("layernorm_epsilon", sizes["norm_eps"])
    fields.only("add_swa_attention_sink_bias", True)
    fields.only("add_full_attention_sink_bias", False)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")


def _read_window(fields: Fields, kinds: Sequence[str]) -> int:
    """Parse the window; `sliding_window_size` has priority and is without the token itself."""
    window = read_window_of(fields, kinds, absent=129)
    fields.only("attention_chunk_size", window - 1, window)  # without effect
    if fields.value("sliding_window_size") is not None:
        return fields.integer("sliding_window_size") + 1
    return window


def _read_value_scale(fields: Fields) -> float:
    """Parse the factor of values; null is 1."""
    if fields.is_null("attention_value_scale"):
        return 1.0
    return fields.number("attention_value_scale", 0.707)


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, _, router = experts_of(config)
    rotary = dict(_ROTARY)
    for kind, spec in zip(layer_types(config), config.pattern.kinds, strict=True):
        rotary[kind] = spec.attention.rotary or rotary[kind]
    mixer = layer.attention
    fields = write_sizes(config)
    for name in ("rope_theta", "rope_scaling"):
        fields.pop(name, None)
    return {
        "model_type": "mimo_v2_flash",
        **fields,
        **write_widths(config),
        **write_layer_types(config),
        **write_rotary_by_layer(rotary),
        **_ROUTER.write(router),
        "mlp_layer_types": mlp_kinds(config),
        "attention_bias": mixer.qkv_bias,
        "v_head_dim": mixer.value_dim,
        "attention_value_scale": mixer.value_scale,
    }


_NAMES = (
    layer_names() | expert_names() | {"attention/sinks": ("self_attn.attention_sink_bias", AS_IS)}
)


def _tensors_ahead() -> list[str]:
    """Return the tensors of modules of multi-token prediction, each with a layer of windows."""
    modules = ["enorm", "hnorm", "eh_proj", "pre_mlp_layernorm", "final_layernorm"]
    modules.append("self_attn.qkv_proj")
    tensors = [f"{module}.weight" for module in modules]
    tensors += [tensor for tensor, _ in _NAMES.values()]
    return [f"model.mtp.layers.{{layer}}.{tensor}" for tensor in tensors]


FAMILY = decoder_family(
    "MiMoV2FlashForCausalLM",
    _read,
    _write,
    _NAMES,
    ignored=ignored_tensors_ahead(_tensors_ahead()),
)
