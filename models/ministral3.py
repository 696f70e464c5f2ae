"""Ministral 3: a Mistral whose queries grow with their position.

Source: `llama_4_scaling_beta` in `rope_parameters` of config.json; the factor's steps are as long
as the context before the scaling of positions.

```python
layer = LayerSpec(AttentionSpec(temperature=Temperature(0.1, interval=16_384)))
config = DecoderConfig(layers=4, layer=layer, rope_scaling=YarnScaling(16.0, 16_384))
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, Temperature, YarnScaling
from spmd.models.decoder.rotary import RopeScaling, Rotary
from spmd.models.published.common_fields import (
    read_network_rotary,
    read_sizes,
    read_window,
    write_sizes,
)
from spmd.models.published.family import decoder_family
from spmd.models.published.rotary import TABLES

_BETA = "llama_4_scaling_beta"
_SCALING = YarnScaling(16.0, 16_384, mscale=1.0, mscale_all_dim=1.0)
_ROTARY = Rotary(1e6, _SCALING)

PRESETS = {
    "test-ministral3": DecoderConfig(
        *(64, 32, 2, 4, 2, 64),
        rope_theta=1e6,
        rope_scaling=YarnScaling(4.0, 8, mscale=1.0, mscale_all_dim=1.0),
        layer=LayerSpec(AttentionSpec(temperature=Temperature(0.1, interval=8))),
    ),
}
"""A small shape for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5, theta=0, head_dim=128, kv_heads=8)
    if fields.value(TABLES[0]) is None and fields.value(TABLES[1]) is None:
        fields.only("rope_theta", _ROTARY.theta)  # has no effect without a table
    also = (_BETA, "max_position_embeddings")
    positions = read_network_rotary(
        fields, _ROTARY, kinds=("yarn",), also=also, theta_in_table=10_000.0
    )
    temperature = _read_temperature(fields, positions["rope_scaling"])
    return fields.build(
        DecoderConfig,
        **sizes,
        **positions,
        window=read_window(fields, absent=0),
        layer=LayerSpec(AttentionSpec(temperature=temperature)),
    )


def _read_temperature(fields: Fields, scaling: RopeScaling) -> Temperature | None:
    """Parse the factor of queries, from the table of positions; 0 is none."""
    beta: Any = 0.1
    for name in reversed(TABLES):
        table = fields.value(name)
        if isinstance(table, Mapping):
            beta = table.get(_BETA)
    is_number = fields.is_number(f"{TABLES[0]}.{_BETA}", beta, least=0)
    if not is_number or beta == 0 or not isinstance(scaling, YarnScaling):
        return None
    return Temperature(float(beta), scaling.original_context)


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixer = config.pattern.group[0].attention
    fields = {
        "model_type": "ministral3",
        **write_sizes(config),
        "sliding_window": mixer.window or None,
    }
    beta = 0.0
    if mixer.temperature is not None:
        beta = mixer.temperature.strength
    fields["rope_scaling"] = {**fields.get("rope_scaling", {}), _BETA: beta}
    return fields


FAMILY = decoder_family("Ministral3ForCausalLM", _read, _write, secondary=True)
