"""LFM 2 and 3: gated short convolutions in most layers, attention in the others (arXiv:2511.23404).

LFM 2 also has a version with experts, chosen by biases that balance their load. LFM 3 has norms
after mixers and MLPs too, a gate for each head of attention, and a sliding window in half of the
layers with attention (config.json of huggingface.co/LiquidAI/LFM3-1.7B).

```python
config = dataclasses.replace(PRESETS["lfm2-1.2b"], unroll=2)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS, CONVOLUTION
from spmd.layers.router import RouterConfig
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    ExpertsSpec,
    GatedConvolutionSpec,
    LayerSpec,
    MLPSpec,
    ProportionalScaling,
    RopeScaling,
    Rotary,
)
from spmd.models.decoder.declared import MissingPartError
from spmd.models.decoder.layer import Mixer
from spmd.models.published.common_fields import read_attention_bias, read_sizes, write_sizes
from spmd.models.published.experts import (
    DENSE,
    RouterFields,
    dense_first,
    expert_names,
    experts_of,
    mlp_kinds,
    read_count,
    with_dense_mlps,
    write_widths,
)
from spmd.models.published.family import ENDS, TensorNames, decoder_family
from spmd.models.published.layer_types import (
    FULL,
    SLIDING,
    mixer_of,
    read_layer_types,
    read_window_of,
    table_of,
)
from spmd.models.published.rotary import read_rotary_by_layer, write_rotary_by_layer
from spmd.models.published.tensor_names import Names, fused_names, module_names

CONV = "conv"
"""Kind of a layer with a short convolution."""

_ATTENTION = LayerSpec(AttentionSpec(qk_norm="head"))
_CONVOLUTION = GatedConvolutionSpec()
_EPS = "norm_eps"


def lfm(layers: Sequence[LayerSpec], **fields: Any) -> DecoderConfig:
    """Return the config of an LFM from the kinds of its layers and fields of `DecoderConfig`."""
    defaults: dict[str, Any] = {"rope_theta": 1e6, "tied": True, "layers": len(layers)}
    return DecoderConfig(**defaults | table_of(layers) | fields)


def lfm2_layers(
    kinds: Sequence[str], convolution: GatedConvolutionSpec = _CONVOLUTION
) -> list[LayerSpec]:
    """Return the layers of an LFM 2 from their kinds in config.json."""
    specs = {FULL: _ATTENTION, CONV: LayerSpec(convolution)}
    return [specs[kind] for kind in kinds]


def lfm2_moe_layers(
    layers: Sequence[LayerSpec], dense_d_ff: int, dense_layers: int = 2
) -> list[LayerSpec]:
    """Return layers with experts in place of MLPs, but for some first ones."""
    sparse = [dataclasses.replace(layer, mlp=ExpertsSpec()) for layer in layers]
    kinds = dense_first(dense_layers, len(layers))
    mixed = with_dense_mlps(sparse, MLPSpec(dense_d_ff), kinds)
    # Dense layers may be of two kinds.
    return [dataclasses.replace(layer, name="") for layer in mixed]


def lfm3_layers(
    kinds: Sequence[str],
    window: int,
    rotary: Mapping[str, Rotary],
    *,
    layer: LayerSpec,
    convolution: GatedConvolutionSpec,
) -> list[LayerSpec]:
    """Return the layers of an LFM 3.

    Args:
        kinds: Their kinds in config.json.
        window: Sliding window of layers of kind `sliding_attention`.
        rotary: Rotary positions of both kinds of attention.
        layer: A layer with attention, except for window and positions.
        convolution: Mixer of layers of kind `conv`.
    """
    mixer = layer.attention
    mixers: dict[str, Mixer] = {
        CONV: convolution,
        FULL: dataclasses.replace(mixer, window=0, rotary=rotary.get(FULL)),
        SLIDING: dataclasses.replace(mixer, window=window, rotary=rotary.get(SLIDING)),
    }
    return [dataclasses.replace(layer, mixer=mixers[kind]) for kind in kinds]


def kinds_of(layers: int, attention: Sequence[int]) -> list[str]:
    """Return the kinds of layers, with attention in those of these numbers."""
    kinds = [CONV] * layers
    for number in attention:
        kinds[number] = FULL
    return kinds


_MOE_ROUTER = RouterConfig(
    experts=32,
    top_k=4,
    score="sigmoid",
    normalise_eps=1e-6,
    choice_bias=True,
    bias_rate=1e-3,
    balance=0.0,
)
_LAYERS = lfm2_layers(kinds_of(16, [2, 5, 8, 10, 12, 14]))
_LAYERS_8B = lfm2_layers(kinds_of(24, [2, 6, 10, 14, 18, 21]))
_TINY = lfm2_layers(kinds_of(5, [2, 4]))
_SIZES: dict[str, Any] = {"vocab": 65_536, "kv_heads": 8}
_LAYER3 = LayerSpec(AttentionSpec(qk_norm="head", gate="head"), norms="both")
_ROTARY3 = {
    FULL: Rotary(1e6, ProportionalScaling(rotary_fraction=0.5)),
    SLIDING: Rotary(1e4, RopeScaling()),
}
_CONVOLUTION3 = GatedConvolutionSpec(width=7)
_TINY3 = lfm3_layers(
    [CONV, CONV, FULL, CONV, SLIDING],
    *(5, _ROTARY3),
    layer=_LAYER3,
    convolution=_CONVOLUTION3,
)

PRESETS = {
    "test-lfm2": lfm(_TINY, vocab=64, d_model=32, d_ff=48),
    "test-lfm2-moe": lfm(
        lfm2_moe_layers(_TINY, 48, 1),
        vocab=64,
        d_model=32,
        d_ff=16,
        router=dataclasses.replace(_MOE_ROUTER, experts=4, top_k=2),
    ),
    "test-lfm3": lfm(_TINY3, vocab=64, d_model=32, d_ff=48),
    "lfm2-350m": lfm(_LAYERS, d_model=1024, heads=16, d_ff=4608, **_SIZES),
    "lfm2-700m": lfm(_LAYERS, d_model=1536, heads=24, d_ff=6912, **_SIZES),
    "lfm2-1.2b": lfm(_LAYERS, d_model=2048, heads=32, d_ff=8192, **_SIZES),
    "lfm2-8b-a1b": lfm(
        lfm2_moe_layers(_LAYERS_8B, 7168),
        d_model=2048,
        heads=32,
        d_ff=1792,
        router=_MOE_ROUTER,
        **_SIZES,
    ),
}
"""Published shapes by name, and small ones for tests."""

_LAYER: Names = module_names(
    {
        "attention/q_proj": "self_attn.q_proj",
        "attention/k_proj": "self_attn.k_proj",
        "attention/v_proj": "self_attn.v_proj",
        "attention/o_proj": "self_attn.out_proj",
        "short_convolution/out_proj": "conv.out_proj",
        "mlp/gate_proj": "feed_forward.w1",
        "mlp/up_proj": "feed_forward.w3",
        "mlp/down_proj": "feed_forward.w2",
    },
    {
        "attention_norm": "operator_norm",
        "mlp_norm": "ffn_norm",
        "attention/q_norm": "self_attn.q_layernorm",
        "attention/k_norm": "self_attn.k_layernorm",
    },
)
_LAYER |= fused_names(
    [f"short_convolution/{name}_proj" for name in ("in_gate", "out_gate", "value")],
    *("conv.in_proj", 3),
)
_LAYER |= {
    "short_convolution/convolution/weight": ("conv.conv.weight", CONVOLUTION),
    "short_convolution/convolution/bias": ("conv.conv.bias", AS_IS),
}
_LAYER |= expert_names("feed_forward.", kernels=("w1", "w3", "w2"), choice_bias="expert_bias")
_NAMES3 = module_names(
    {"attention/o_proj": "self_attn.o_proj", "attention/g_proj": "self_attn.gate_proj"},
    {
        "attention_post_norm": "post_operator_norm",
        "mlp_post_norm": "post_ffn_norm",
        "attention/q_norm": "self_attn.q_norm",
        "attention/k_norm": "self_attn.k_norm",
    },
)
_ENDS: Names = ENDS | {"norm/scale": ("embedding_norm.weight", AS_IS)}
_HARMLESS = (
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_swiglu",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
    "theta",
    "use_pos_enc",
)
"""Fields of published files that `transformers` ignores."""
_ROUTER = RouterFields(
    "num_experts",
    experts=32,
    top_k=4,
    normalise=True,
    scale=1.0,
    balance_name="",
    base=_MOE_ROUTER,
)


def _read2(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = _read_sizes(fields, d_ff=12_288)
    sizes["d_ff"] = _read_d_ff(fields, sizes["d_ff"])
    layers = _read_layers(fields, sizes.pop("layers"))
    return fields.build(lfm, **sizes, layers=layers)


def _read2_moe(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = _read_sizes(fields, d_ff=7168)
    layers = _read_layers(fields, sizes.pop("layers"))
    dense_layers = read_count(fields, "num_dense_layers", 2)
    if dense_layers >= len(layers):
        fields.refuse("num_dense_layers", "leaves no layer with experts")
        dense_layers = 0
    layers = lfm2_moe_layers(layers, sizes["d_ff"], dense_layers)
    sizes["d_ff"] = fields.integer("moe_intermediate_size", 1792)
    has_bias = fields.flag("use_expert_bias", True)
    bias: dict[str, Any] = {"choice_bias": has_bias}
    if not has_bias:
        bias["bias_rate"] = 0.0
    return fields.build(lfm, **sizes, layers=layers, router=_ROUTER.read(fields, **bias))


def _read_sizes(fields: Fields, d_ff: int) -> dict[str, Any]:
    """Parse the sizes of an LFM 2; `d_ff` is the default of `intermediate_size`."""
    sizes = read_sizes(
        fields, eps=1e-5, eps_field=_EPS, theta=1e6, kv_heads=8, d_ff=d_ff, tied=True
    )
    sizes["tied"] = fields.flag("tie_embedding", sizes["tied"])
    return sizes


def _read_d_ff(fields: Fields, d_ff: int) -> int:
    """Parse the hidden width of the MLP: two thirds of the field, rounded up to a multiple."""
    d_ff = fields.integer("block_ff_dim", d_ff)
    multiple = fields.integer("block_multiple_of", 256)
    factor = fields.number("block_ffn_dim_multiplier", 1.0, least=0)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return d_ff
    scaled = int(2 * d_ff / 3)
    if fields.is_null("block_ffn_dim_multiplier"):
        return scaled
    scaled = int(factor * scaled)
    return -(-scaled // multiple) * multiple


def _read_layers(fields: Fields, layers: int) -> list[LayerSpec]:
    """Parse the layers of an LFM 2: `layer_types`, or `full_attn_idxs` in its place."""
    numbers = range(layers)
    attention = fields.value("full_attn_idxs", [*numbers])
    if not isinstance(attention, list):
        fields.refuse("full_attn_idxs", "is no list of layers")
        attention = []
    default = kinds_of(layers, [number for number in numbers if number in attention])
    kinds = _read_kinds(fields, default, FULL)
    return lfm2_layers(kinds, _read_convolution(fields, 3))


def _read_kinds(fields: Fields, default: Sequence[str], *attention: str) -> list[str]:
    """Parse `layer_types`; at least one layer has a convolution."""
    kinds = read_layer_types(fields, len(default), default, known=(CONV, *attention))
    if CONV not in kinds:
        fields.refuse("layer_types", f"has no layer of kind {CONV}")
    return kinds


def _read_convolution(fields: Fields, width: int) -> GatedConvolutionSpec:
    """Parse the convolution; `width` is its default."""
    return GatedConvolutionSpec(
        width=fields.integer("conv_L_cache", width), bias=fields.flag("conv_bias", False)
    )


def _read3(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(
        fields, eps=1e-5, eps_field=_EPS, theta=0, head_dim=128, kv_heads=4, d_ff=7680, tied=True
    )
    kinds = _read_kinds(fields, _default_kinds3(sizes.pop("layers")), FULL, SLIDING)
    window = read_window_of(fields, kinds, absent=256)
    rotary = read_rotary_by_layer(fields, _ROTARY3, theta_in_table=1e6)
    mixer = read_attention_bias(fields, _LAYER3.attention)
    if not fields.flag("use_attention_gate", True):
        mixer = dataclasses.replace(mixer, gate="none")
    layer = dataclasses.replace(_LAYER3, mixer=mixer)
    if not fields.flag("use_sandwich_norm", True):
        layer = dataclasses.replace(layer, norms="before")
    layers = lfm3_layers(
        *(kinds, window, rotary), layer=layer, convolution=_read_convolution(fields, 7)
    )
    return fields.build(lfm, **sizes, layers=layers)


def _default_kinds3(layers: int) -> list[str]:
    """Return the kinds of layers of an LFM 3 by default."""
    kinds = kinds_of(layers, range(2, layers, 4))
    for number in range(4, layers, 4):
        kinds[number] = SLIDING
    return kinds


def _write2(config: DecoderConfig) -> dict[str, Any]:
    fields = _write(config)
    fields["model_type"] = "lfm2"
    fields["block_auto_adjust_ff_dim"] = False
    return fields


def _write2_moe(config: DecoderConfig) -> dict[str, Any]:
    _, _, router = experts_of(config)
    fields = _write(config)
    fields |= write_widths(config)
    fields |= _ROUTER.write(router)
    fields["model_type"] = "lfm2_moe"
    fields["num_dense_layers"] = mlp_kinds(config).count(DENSE)
    fields["use_expert_bias"] = router.choice_bias
    return fields


def _write3(config: DecoderConfig) -> dict[str, Any]:
    fields = _write(config)
    del fields["rope_theta"]
    fields.pop("rope_scaling", None)
    rotary = dict(_ROTARY3)
    window = 256
    mixer = _LAYER3.attention
    for spec in config.pattern.distinct:
        if not isinstance(spec.mixer, AttentionSpec):
            continue
        mixer = spec.mixer
        if mixer.rotary is None:
            raise MissingPartError("layers with attention have no positions")
        window = mixer.window or window
        rotary[_kind_of(spec)] = mixer.rotary
    layer = config.pattern.group[0]
    fields |= write_rotary_by_layer(rotary)
    fields["model_type"] = "lfm3"
    fields["sliding_window"] = window
    fields["attention_bias"] = mixer.qkv_bias
    fields["use_attention_gate"] = mixer.gate != "none"
    fields["use_sandwich_norm"] = layer.norms == "both"
    return fields


def _write(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of all versions: sizes, convolutions and kinds of layers."""
    convolution = mixer_of(config, GatedConvolutionSpec)
    fields = write_sizes(config, _EPS)
    fields["conv_L_cache"] = convolution.width
    fields["conv_bias"] = convolution.bias
    fields["layer_types"] = [_kind_of(spec) for spec in config.pattern.kinds]
    return fields


def _kind_of(spec: LayerSpec) -> str:
    """Return the kind of a layer in config.json."""
    if isinstance(spec.mixer, GatedConvolutionSpec):
        return CONV
    if spec.attention.window:
        return SLIDING
    return FULL


LFM2_FAMILY = decoder_family(
    "Lfm2ForCausalLM", _read2, _write2, names=TensorNames(_LAYER, _ENDS), harmless=_HARMLESS
)
LFM2_MOE_FAMILY = decoder_family(
    "Lfm2MoeForCausalLM",
    _read2_moe,
    _write2_moe,
    names=TensorNames(_LAYER, _ENDS),
    harmless=_HARMLESS,
)
LFM3_FAMILY = decoder_family(
    "Lfm3ForCausalLM",
    _read3,
    _write3,
    names=TensorNames(_LAYER | _NAMES3, _ENDS),
    secondary=True,
)
