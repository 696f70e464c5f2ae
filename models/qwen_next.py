"""Qwen 3 Next and 3.5: gated delta nets in three of four layers, gated attention in the others.

Sources: arXiv:2412.06464 for gated delta nets, arXiv:2505.06708 for the gate of attention, and
config.json of huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct and huggingface.co/Qwen/Qwen3.5-27B.
A quarter of each head of attention is rotated; norms have a scale of 1 + w.

```python
config = dataclasses.replace(PRESETS["qwen3.5-9b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import TRANSPOSED, part
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    GatedDeltaNetSpec,
    LayerSpec,
    NormSpec,
    RopeScaling,
    Rotary,
)
from spmd.models.decoder.published import (
    ENDS,
    TensorNames,
    decoder_family,
    layer_names,
    read_sizes,
    write_sizes,
)
from spmd.models.decoder.published_delta import (
    LINEAR,
    fused_delta_net_names,
    read_delta_net,
    write_delta_net,
)
from spmd.models.decoder.published_layers import FULL, every, layer_table, read_layer_types
from spmd.models.decoder.published_rotary import read_rotary

_NET = GatedDeltaNetSpec(heads=32, key_heads=16)
_ROTARY = Rotary(10_000.0, RopeScaling(), 0.25)
_ATTENTION = AttentionSpec(qk_norm="head", gate="channel", rotary=Rotary(fraction=0.25))


def qwen_next(
    kinds: Sequence[str],
    *,
    delta_net: GatedDeltaNetSpec = _NET,
    attention: AttentionSpec = _ATTENTION,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a Qwen 3.5 from fields of `DecoderConfig`.

    Args:
        kinds: The kind of each layer, as in config.json.
        delta_net: The mixer of layers of kind `linear_attention`.
        attention: The mixer of other layers.
        **fields: Other fields.
    """
    specs = {LINEAR: LayerSpec(delta_net), FULL: LayerSpec(attention)}
    defaults: dict[str, Any] = {
        "norm_eps": 1e-6,
        "norm": NormSpec(offset=1.0),
        "rope_theta": 1e7,
        "layers": len(kinds),
    }
    return DecoderConfig(**defaults | layer_table(kinds, specs) | fields)


def kinds_of(layers: int, interval: int = 4) -> list[str]:
    """Return the kinds of layers, with attention in the last one of each interval."""
    return every(interval, layers, LINEAR, FULL)


_TINY = GatedDeltaNetSpec(heads=4, key_heads=2, key_dim=8, value_dim=6)

PRESETS = {
    "test-qwen3.5": qwen_next(
        kinds_of(4), delta_net=_TINY, vocab=64, d_model=32, d_ff=48, head_dim=16
    ),
}
"""A small shape for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, theta=0, head_dim=256, kv_heads=4)
    rotary = read_rotary(fields, _ROTARY, also=("mrope_section", "mrope_interleaved"))
    bias = fields.flag("attention_bias", False)
    attention = dataclasses.replace(_ATTENTION, rotary=rotary, qkv_bias=bias, out_bias=bias)
    attention = dataclasses.replace(attention, gate_bias=bias)
    layers = sizes.pop("layers")
    default = kinds_of(min(layers, 1000), fields.integer("full_attention_interval", 4))
    kinds = read_layer_types(fields, layers, default, known=(FULL, LINEAR))
    if LINEAR not in kinds:
        fields.refuse("layer_types", f"has no layer of kind {LINEAR}")
    delta_net = read_delta_net(fields, _NET)
    return fields.build(qwen_next, **sizes, kinds=kinds, delta_net=delta_net, attention=attention)


def _write(config: DecoderConfig) -> dict[str, Any]:
    rotary = _ROTARY
    bias = False
    for spec in config.pattern.distinct:
        if isinstance(spec.mixer, AttentionSpec):
            rotary = spec.mixer.rotary or _ROTARY
            bias = spec.mixer.qkv_bias
    return {
        "model_type": "qwen3_5_text",
        **write_sizes(config, rotary=rotary),
        "partial_rotary_factor": rotary.fraction,
        "attention_bias": bias,
        **write_delta_net(config),
    }


def _names(config: DecoderConfig) -> TensorNames:
    layer = layer_names() | fused_delta_net_names(config, by_head=False)
    for spec in config.pattern.distinct:
        if not isinstance(spec.mixer, AttentionSpec):
            continue
        for index, name in enumerate(("q_proj", "g_proj")):
            half = part(index, 2, groups=spec.mixer.heads)
            kernel = dataclasses.replace(half, axes=TRANSPOSED.axes)
            layer[f"attention/{name}/kernel"] = ("self_attn.q_proj.weight", kernel)
            layer[f"attention/{name}/bias"] = ("self_attn.q_proj.bias", half)
    return TensorNames(layer, ENDS)


QWEN3_5_FAMILY = decoder_family("Qwen3_5ForCausalLM", _read, _write, names=_names)
