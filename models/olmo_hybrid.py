"""OLMo Hybrid: gated delta nets in three of four layers, and layers of OLMo 2 without positions.

The norms of gated delta nets come before mixer and MLP, those of layers with attention after them.
The strength β of a correction is up to 2. Source: config.json and tensors of
huggingface.co/allenai/Olmo-Hybrid-7B; some of its versions have rotary positions.

```python
config = dataclasses.replace(PRESETS["test-olmo-hybrid"], d_model=64)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS, CONVOLUTION
from spmd.models.decoder import AttentionSpec, DecoderConfig, GatedDeltaNetSpec, LayerSpec, Rotary
from spmd.models.olmo import LAYER2, read_layer2
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.family import ENDS, TensorNames, decoder_family, layer_names
from spmd.models.published.gated_delta_net import (
    delta_net_names,
    read_delta_net,
    write_delta_net,
)
from spmd.models.published.layer_types import (
    FULL,
    LINEAR,
    every,
    layer_table,
    mixer_of,
    read_layer_types,
)
from spmd.models.published.rotary import read_rotary, write_rotary

_NET = GatedDeltaNetSpec(negative_eigenvalues=True, norm_eps=1e-5)


def olmo_hybrid(
    kinds: Sequence[str],
    *,
    delta_net: GatedDeltaNetSpec = _NET,
    layer: LayerSpec = LAYER2,
    rotary: Rotary | None = None,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of an OLMo Hybrid from fields of `DecoderConfig`.

    Args:
        kinds: The kind of each layer, as in config.json.
        delta_net: The mixer of layers of kind `linear_attention`.
        layer: A layer with attention, except for positions.
        rotary: Rotary positions; None for none.
        **fields: Other fields.
    """
    mixer = dataclasses.replace(layer.attention, rotary=rotary)
    specs = {LINEAR: LayerSpec(delta_net), FULL: dataclasses.replace(layer, mixer=mixer)}
    defaults: dict[str, Any] = {"layers": len(kinds), "norm_eps": 1e-6}
    return DecoderConfig(**defaults | layer_table(kinds, specs) | fields)


PRESETS = {
    "test-olmo-hybrid": olmo_hybrid(
        every(4, 8, LINEAR, FULL),
        delta_net=dataclasses.replace(_NET, key_dim=6, value_dim=12),
        vocab=64,
        d_model=32,
        d_ff=48,
    ),
}
"""A small shape for tests."""

_LAYER = layer_names(
    attention_norm="attention_layer_norm",
    mlp_norm="feedforward_layer_norm",
    attention_post_norm="post_attention_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_LAYER |= delta_net_names(
    {name: f"{name}_proj" for name in ("q", "k", "v", "a", "b")} | {"gate": "g_proj"},
    norm="o_norm",
    out="o_proj",
)
for _name in ("q", "k", "v"):
    _LAYER[f"gated_delta_net/{_name}_conv/weight"] = (
        f"linear_attn.{_name}_conv1d.weight",
        CONVOLUTION,
    )
_HARMLESS = (
    "linear_a_log_max",
    "linear_a_log_min",
    "linear_dt_init_floor",
    "linear_dt_max",
    "linear_dt_min",
)
"""Fields of initial values."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    for name in _HARMLESS:
        fields.value(name)
    sizes = read_sizes(fields, theta=0)
    layers = sizes.pop("layers")
    kinds = read_layer_types(fields, layers, _default_kinds(layers), known=(FULL, LINEAR))
    if len(set(kinds)) == 1:
        fields.refuse("layer_types", f"is not of both {LINEAR} and {FULL}")
    return fields.build(
        olmo_hybrid,
        **sizes,
        kinds=kinds,
        delta_net=_read_delta_net(fields, sizes["d_model"], sizes["heads"]),
        layer=read_layer2(fields),
        rotary=_read_positions(fields),
    )


def _default_kinds(layers: int) -> list[str]:
    """Return the kinds of layers by default; at least the last one has attention."""
    kinds = every(4, layers, LINEAR, FULL)
    if FULL not in kinds:
        kinds[-1] = FULL
    return kinds


def _read_delta_net(fields: Fields, width: int, heads: int) -> GatedDeltaNetSpec:
    """Parse the mixer; its sizes follow from the network's by default."""
    key_heads = fields.integer("linear_num_key_heads", heads)
    key_dim = fields.integer("linear_key_head_dim", max(1, int(0.75 * width / key_heads)))
    defaults = GatedDeltaNetSpec(heads, key_heads, key_dim, 2 * key_dim)
    return read_delta_net(
        fields,
        defaults,
        negative_eigenvalues=fields.flag("linear_allow_neg_eigval", True),
        norm_eps=_NET.norm_eps,
    )


def _read_positions(fields: Fields) -> Rotary | None:
    """Parse rotary positions; a base of null means none."""
    table = fields.value("rope_parameters", {})
    if isinstance(table, Mapping) and "rope_theta" in table and table["rope_theta"] is None:
        return None
    return read_rotary(fields)


def _write(config: DecoderConfig) -> dict[str, Any]:
    fields = write_sizes(config)
    for name in ("head_dim", "rope_theta", "rope_scaling"):
        fields.pop(name, None)
    mixer = LAYER2.attention
    for spec in config.pattern.distinct:
        if isinstance(spec.mixer, AttentionSpec):
            mixer = spec.mixer
    positions: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    if mixer.rotary is not None:
        positions = write_rotary(mixer.rotary)
    delta_net = mixer_of(config, GatedDeltaNetSpec)
    fields |= positions
    fields |= write_delta_net(config)
    fields["model_type"] = "olmo_hybrid"
    fields["attention_bias"] = mixer.qkv_bias
    fields["linear_allow_neg_eigval"] = delta_net.negative_eigenvalues
    return fields


def _written_by_transformers(config: DecoderConfig) -> TensorNames:
    """Return the names of `transformers` 5, with one name of a norm in all layers."""
    del config
    norm = ("feedforward_layer_norm.weight", AS_IS)
    return TensorNames(_LAYER | {"attention_post_norm/scale": norm}, ENDS)


FAMILY = decoder_family(
    "OlmoHybridForCausalLM",
    _read,
    _write,
    names=TensorNames(_LAYER, ENDS),
    other_names=(_written_by_transformers,),
    harmless=_HARMLESS,
)
