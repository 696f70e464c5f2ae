"""SmolLM 3: a Llama without rotary positions in every fourth layer (arXiv:2501.18795).

Source: huggingface.co/HuggingFaceTB/SmolLM3-3B.

```python
config = dataclasses.replace(PRESETS["smollm3-3b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, Rotary
from spmd.models.published.common_fields import read_layer, read_sizes, write_biases, write_sizes
from spmd.models.published.family import decoder_family
from spmd.models.published.layer_types import (
    FULL,
    SLIDING,
    attention_table,
    read_layer_types,
    read_rotated,
    read_window_of,
    rotary_where,
    rotated_layers,
    write_layer_types,
)

_ROTATED = LayerSpec()
_GROUP = (_ROTATED, _ROTATED, _ROTATED, LayerSpec(AttentionSpec(rotary=None)))

PRESETS = {
    "test-smollm3": DecoderConfig(64, 32, 8, 4, 2, 64, tied=True, group=_GROUP),
    "smollm3-3b": DecoderConfig(
        *(128_256, 2048, 36, 16, 4, 11_008),
        tied=True,
        rope_theta=5e6,
        norm_eps=1e-6,
        group=_GROUP,
    ),
}
"""Published shapes by name, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    fields.value("max_window_layers")  # has no effect
    sizes = read_sizes(fields, theta=2e6, kv_heads=4, tied=True)
    rotated = read_rotated(fields, sizes["layers"])
    has_windows = fields.flag("use_sliding_window", default=False)
    default = [FULL] * len(rotated)
    if has_windows and fields.value("sliding_window") is not None:
        default = [(SLIDING, FULL)[is_rotated] for is_rotated in rotated]
    kinds = read_layer_types(fields, sizes["layers"], default)
    if SLIDING in kinds and not has_windows:
        fields.refuse("use_sliding_window", f"is false, and layers are of kind {SLIDING}")
    window = read_window_of(fields, kinds, absent=0)
    layer = read_layer(fields)
    positions = rotary_where(rotated, Rotary())
    table = attention_table(layer, window, kinds, rotary=positions)
    return fields.build(DecoderConfig, **sizes, **table)


def _write(config: DecoderConfig) -> dict[str, Any]:
    fields = write_layer_types(config)
    return {
        "model_type": "smollm3",
        **write_sizes(config),
        **write_biases(config),
        **fields,
        "use_sliding_window": SLIDING in fields["layer_types"],
        "no_rope_layers": [int(is_rotated) for is_rotated in rotated_layers(config)],
    }


FAMILY = decoder_family("SmolLM3ForCausalLM", _read, _write, secondary=True)
