"""CWM (Code World Model): a Llama with a sliding window in three of four layers (arXiv:2510.02387).

```python
config = dataclasses.replace(PRESETS["cwm-32b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import DecoderConfig, LayerSpec, Llama3Scaling, MLPSpec
from spmd.models.published.common_fields import read_layer, read_sizes, write_sizes
from spmd.models.published.family import decoder_family
from spmd.models.published.layer_types import (
    FULL,
    attention_table,
    every,
    read_layer_types,
    read_window_of,
    write_layer_types,
)

_SCALING = Llama3Scaling(factor=16.0)
_THETA = 1e6


def cwm(layers: int, *, window: int = 8192, **fields: Any) -> DecoderConfig:
    """Return the config of a CWM from fields of `DecoderConfig`."""
    table = attention_table(LayerSpec(), window, _default_kinds(layers))
    defaults: dict[str, Any] = {"rope_theta": _THETA, "rope_scaling": _SCALING}
    return DecoderConfig(**{"layers": layers} | defaults | table | fields)


def _default_kinds(layers: int) -> list[str]:
    """Return the kinds of layers: the first of four attends to all preceding tokens."""
    return [FULL, *every(4, layers)][:layers]


_SIZES_32B = {"vocab": 128_256, "d_model": 6144, "heads": 48, "kv_heads": 8, "d_ff": 21_504}

PRESETS = {
    "test-cwm": cwm(8, window=5, vocab=64, d_model=32, d_ff=64),
    "cwm-32b": cwm(64, **_SIZES_32B, head_dim=128),
}
"""Published shape by name, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    fields.only("attention_bias", False)
    sizes = read_sizes(fields, eps=1e-5, theta=_THETA, head_dim=128, kv_heads=8)
    if fields.value("rope_parameters") is None and fields.value("rope_scaling") is None:
        fields.only("rope_theta", _THETA)  # has no effect without a table
        sizes["rope_scaling"] = _SCALING
    kinds = read_layer_types(fields, sizes["layers"], _default_kinds(sizes["layers"]))
    window = read_window_of(fields, kinds, absent=8192)
    layer = read_layer(fields)
    return fields.build(DecoderConfig, **sizes, **attention_table(layer, window, kinds))


def _write(config: DecoderConfig) -> dict[str, Any]:
    mlp = config.pattern.distinct[0].mlp
    fields = {
        "model_type": "cwm",
        **write_sizes(config),
        "mlp_bias": isinstance(mlp, MLPSpec) and mlp.bias,
        **write_layer_types(config),
    }
    # without a table, positions would be scaled
    fields.setdefault("rope_scaling", {"rope_type": "default"})
    return fields


FAMILY = decoder_family("CwmForCausalLM", _read, _write, secondary=True)
