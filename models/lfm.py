"""LFM 2: gated short convolutions in most layers, attention in the others (arXiv:2511.23404).

```python
config = dataclasses.replace(PRESETS["lfm2-1.2b"], unroll=2)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS, CONVOLUTION, TRANSPOSED, part
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    GatedConvolutionSpec,
    LayerSpec,
)
from spmd.models.decoder.published import (
    ENDS,
    Names,
    TensorNames,
    decoder_family,
    read_sizes,
    write_sizes,
)
from spmd.models.decoder.published_layers import FULL, layer_table, read_layer_types

CONV = "conv"
"""Kind of a layer with a short convolution."""

_ATTENTION = LayerSpec(AttentionSpec(qk_norm="head"))


def lfm2(kinds: list[str], *, convolution: GatedConvolutionSpec, **fields: Any) -> DecoderConfig:
    """Return the config of an LFM 2 from fields of `DecoderConfig`.

    Args:
        kinds: The kind of each layer, as in config.json.
        convolution: The mixer of layers of kind `conv`.
        **fields: Other fields.
    """
    specs = {FULL: _ATTENTION, CONV: LayerSpec(convolution)}
    defaults: dict[str, Any] = {"rope_theta": 1e6, "tied": True}
    return DecoderConfig(**defaults | {"layers": len(kinds)} | layer_table(kinds, specs) | fields)


def _kinds_of(layers: int, attention: list[int]) -> list[str]:
    """Return the kinds of layers, with attention in those of these numbers."""
    kinds = [CONV] * layers
    for number in attention:
        kinds[number] = FULL
    return kinds


_KINDS = _kinds_of(16, [2, 5, 8, 10, 12, 14])
_SIZES: dict[str, Any] = {"vocab": 65_536, "kv_heads": 8, "convolution": GatedConvolutionSpec()}

PRESETS = {
    "test-lfm2": lfm2(
        _kinds_of(5, [2, 4]), vocab=64, d_model=32, d_ff=48, convolution=GatedConvolutionSpec()
    ),
    "lfm2-350m": lfm2(_KINDS, d_model=1024, heads=16, d_ff=4608, **_SIZES),
    "lfm2-700m": lfm2(_KINDS, d_model=1536, heads=24, d_ff=6912, **_SIZES),
    "lfm2-1.2b": lfm2(_KINDS, d_model=2048, heads=32, d_ff=8192, **_SIZES),
}
"""Published shapes by name, and a small one for tests."""

_PROJECTIONS = {
    "attention/q_proj": "self_attn.q_proj",
    "attention/k_proj": "self_attn.k_proj",
    "attention/v_proj": "self_attn.v_proj",
    "attention/o_proj": "self_attn.out_proj",
    "short_convolution/out_proj": "conv.out_proj",
    "mlp/gate_proj": "feed_forward.w1",
    "mlp/up_proj": "feed_forward.w3",
    "mlp/down_proj": "feed_forward.w2",
}
_LAYER: Names = {
    "attention_norm/scale": ("operator_norm.weight", AS_IS),
    "mlp_norm/scale": ("ffn_norm.weight", AS_IS),
    "attention/q_norm/scale": ("self_attn.q_layernorm.weight", AS_IS),
    "attention/k_norm/scale": ("self_attn.k_layernorm.weight", AS_IS),
    "short_convolution/convolution/weight": ("conv.conv.weight", CONVOLUTION),
    "short_convolution/convolution/bias": ("conv.conv.bias", AS_IS),
    "short_convolution/out_proj/bias": ("conv.out_proj.bias", AS_IS),
}
_LAYER |= {f"{ours}/kernel": (f"{name}.weight", TRANSPOSED) for ours, name in _PROJECTIONS.items()}
for _index, _name in enumerate(("in_gate_proj", "out_gate_proj", "value_proj")):
    _LAYER[f"short_convolution/{_name}/kernel"] = (
        "conv.in_proj.weight",
        part(_index, 3, layout=TRANSPOSED),
    )
    _LAYER[f"short_convolution/{_name}/bias"] = ("conv.in_proj.bias", part(_index, 3))
_NAMES = TensorNames(_LAYER, ENDS | {"norm/scale": ("embedding_norm.weight", AS_IS)})
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


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    for name in _HARMLESS:
        fields.value(name)
    sizes = read_sizes(fields, eps=1e-5, eps_field="norm_eps", theta=1e6, kv_heads=8, tied=True)
    sizes["tied"] = fields.flag("tie_embedding", sizes["tied"])
    sizes["d_ff"] = _read_d_ff(fields, sizes["d_ff"])
    convolution = GatedConvolutionSpec(
        width=fields.integer("conv_L_cache", 3), bias=fields.flag("conv_bias", False)
    )
    kinds = _read_kinds(fields, sizes.pop("layers"))
    if CONV not in kinds:
        fields.refuse("layer_types", "has no layer of kind conv")
    return fields.build(lfm2, kinds=kinds, convolution=convolution, **sizes)


def _read_d_ff(fields: Fields, d_ff: int) -> int:
    """Parse the hidden width of the MLP: two thirds of the field, rounded up to a multiple."""
    d_ff = fields.integer("block_ff_dim", d_ff)
    multiple = fields.integer("block_multiple_of", 256)
    factor = 1.0
    if not fields.is_null("block_ffn_dim_multiplier"):
        factor = fields.number("block_ffn_dim_multiplier", 1.0, least=0)
    elif fields.flag("block_auto_adjust_ff_dim", True):
        multiple = 1
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return d_ff
    scaled = int(factor * int(2 * d_ff / 3))
    return -(-scaled // multiple) * multiple


def _read_kinds(fields: Fields, layers: int) -> list[str]:
    """Parse `layer_types`, or `full_attn_idxs` in its place."""
    attention = fields.value("full_attn_idxs", [*range(min(layers, 1000))])
    default = [CONV] * min(layers, 1000)
    if not isinstance(attention, list):
        fields.refuse("full_attn_idxs", "is no list of layers")
        attention = []
    for number in range(len(default)):
        if number in attention:
            default[number] = FULL
    return read_layer_types(fields, layers, default, known=(FULL, CONV))


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixers = [spec.mixer for spec in config.pattern.kinds]
    kinds = []
    for mixer in mixers:
        kind = FULL
        if isinstance(mixer, GatedConvolutionSpec):
            kind = CONV
            convolution = mixer
        kinds.append(kind)
    if CONV not in kinds:
        raise AttributeError("no layer has a short convolution")
    return {
        "model_type": "lfm2",
        **write_sizes(config, "norm_eps"),
        "conv_L_cache": convolution.width,
        "conv_bias": convolution.bias,
        "block_auto_adjust_ff_dim": False,
        "layer_types": kinds,
    }


FAMILY = decoder_family("Lfm2ForCausalLM", _read, _write, names=_NAMES, harmless=_HARMLESS)
