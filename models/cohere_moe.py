"""Cohere 2 with experts for MLPs, except for dense first layers.

Source: the configuration class `Cohere2MoeConfig` of `transformers`. Attention and experts are side
by side, as the MLP of Cohere 2; dense layers may have rotary positions without a window.

```python
config = dataclasses.replace(PRESETS["test-cohere2-moe"], d_model=64)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.hf.fields import Fields
from spmd.layers.router import RouterConfig
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    Rotary,
)
from spmd.models.published.common_fields import read_attention_bias, read_sizes, write_sizes
from spmd.models.published.experts import (
    DENSE,
    RouterFields,
    dense_first,
    expert_names,
    experts_of,
    mlp_kinds,
    read_count,
    read_dense_first,
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
    read_window_of,
    rotary_where,
    table_of,
    write_layer_types,
)

_ROTARY = Rotary(interleaved=True)
_LAYER = LayerSpec(AttentionSpec(rotary=_ROTARY), ExpertsSpec(), norms="parallel_shared")
_EPS = "layer_norm_eps"
_RMS_EPS = "rms_norm_eps"
_DENSE_WIDTH = "prefix_dense_intermediate_size"
_DENSE_PATTERN = "prefix_dense_sliding_window_pattern"


def cohere2_moe(
    kinds: Sequence[str],
    mlps: Sequence[str],
    *,
    window: int,
    layer: LayerSpec = _LAYER,
    dense_d_ff: int = 0,
    rotates_dense: bool = True,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a Cohere 2 with experts, from fields of `DecoderConfig`.

    Args:
        kinds: The kind of each layer's attention, as in config.json.
        mlps: The kind of each layer's MLP, as in config.json.
        window: Sliding window of layers of kind `sliding_attention`.
        layer: A layer with experts, except for window and positions.
        dense_d_ff: Hidden width of MLPs in place of experts; 0 for that of experts.
        rotates_dense: Whether dense layers of full attention have rotary positions.
        **fields: Other fields.
    """
    rotated = []
    for kind, mlp in zip(kinds, mlps, strict=True):
        rotated.append(kind == SLIDING or (mlp == DENSE and rotates_dense))
    specs = attention_layers(layer, window, kinds, rotary=rotary_where(rotated, _ROTARY))
    table = table_of(with_dense_mlps(specs, MLPSpec(dense_d_ff), mlps))
    defaults: dict[str, Any] = {"norm": NormSpec("layer"), "tied": True, "logits_scale": 0.0625}
    return DecoderConfig(**defaults | table | {"layers": len(kinds)} | fields)


PRESETS = {
    "test-cohere2-moe": cohere2_moe(
        [FULL, *every(4, 4)],
        dense_first(1, 5),
        window=5,
        layer=dataclasses.replace(_LAYER, mlp=ExpertsSpec(shared_d_ff=32, shared_scale=0.5)),
        dense_d_ff=48,
        vocab=64,
        d_model=32,
        d_ff=16,
        logits_scale=0.5,
        router=RouterConfig(scale=0.5),
    )
}
"""A small shape for tests."""

_ROUTER = RouterFields("num_experts", experts=8, top_k=2, balance_name="")
_STRATEGY = "shared_expert_combination_strategy"


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    fields.value("cache_implementation")
    sizes = read_sizes(fields, eps=1e-5, eps_field=_EPS, head_dim=128, d_ff=22_528, tied=True)
    if fields.value(_RMS_EPS) is not None:
        sizes |= {"norm": NormSpec(), "norm_eps": fields.number(_RMS_EPS, least=0)}
    layers = sizes["layers"]
    dense = read_dense_first(fields, layers, 0)
    pattern = fields.integer(_DENSE_PATTERN, 1)
    rest = every(fields.integer("sliding_window_pattern", 4), layers - dense)
    kinds = read_layer_types(fields, layers, every(pattern, dense) + rest)
    mixer = read_attention_bias(fields, AttentionSpec(rotary=_ROTARY))
    experts, options = _read_experts(fields, sizes["d_ff"])
    return fields.build(
        cohere2_moe,
        **sizes,
        kinds=kinds,
        mlps=read_mlp_types(fields, layers, dense_first(dense, layers)),
        window=read_window_of(fields, kinds, absent=4096),
        layer=dataclasses.replace(_LAYER, mixer=mixer, mlp=experts),
        dense_d_ff=read_count(fields, _DENSE_WIDTH, 0),
        rotates_dense=pattern == 1,
        logits_scale=fields.number("logit_scale", 0.0625),
        router=_ROUTER.read(fields, **options),
    )


def _read_experts(fields: Fields, width: int) -> tuple[ExpertsSpec, dict[str, Any]]:
    """Parse the shared experts, and the options of the router."""
    fields.only("expert_selection_fn", "softmax", "sigmoid")
    fields.only(_STRATEGY, "average", "sum")
    normalise = fields.flag("norm_topk_prob", default=True)
    options: dict[str, Any] = {}
    if fields.value("expert_selection_fn") == "sigmoid":
        options = {"score": "sigmoid", "normalise": normalise}  # else softmax after the choice
    shared = read_count(fields, "num_shared_experts", 0)
    if not shared:
        return ExpertsSpec(), options
    experts = ExpertsSpec(shared_d_ff=shared * width)
    if fields.value(_STRATEGY, "average") == "average":
        options["scale"] = 0.5
        experts = dataclasses.replace(experts, shared_scale=0.5)
    return experts, options


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, experts, router = experts_of(config)
    widths = write_widths(config)
    strategy = "sum"
    if experts.shared_scale != 1:
        strategy = "average"
    pattern = 2  # any but 1
    if _rotates_dense(config):
        pattern = 1
    eps = {_EPS: config.norm_eps}
    if config.norm.kind == "rms":
        eps[_RMS_EPS] = config.norm_eps
    return {
        "model_type": "cohere2_moe",
        **write_sizes(config, ""),
        **eps,
        **write_layer_types(config),
        **_ROUTER.write(router),
        "intermediate_size": experts.d_ff,
        _DENSE_WIDTH: widths["intermediate_size"],
        _DENSE_PATTERN: pattern,
        "mlp_layer_types": mlp_kinds(config),
        "expert_selection_fn": router.score,
        "norm_topk_prob": router.normalise,
        "num_shared_experts": experts.shared_d_ff // experts.d_ff,
        _STRATEGY: strategy,
        "attention_bias": layer.attention.qkv_bias,
        "logit_scale": config.logits_scale,
    }


def _rotates_dense(config: DecoderConfig) -> bool:
    """Return whether no MLP is in a layer without positions."""
    dense = [spec for spec in config.pattern.distinct if not spec.has_experts]
    return all(spec.attention.rotary is not None for spec in dense)


FAMILY = decoder_family("Cohere2MoeForCausalLM", _read, _write, layer_names() | expert_names())
