"""Arcee (AFM): a Llama with squared ReLU in an MLP without a gate (arXiv:2109.08668).

```python
config = dataclasses.replace(PRESETS["afm-4.5b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import DecoderConfig, LayerSpec, MLPSpec
from spmd.models.published.common_fields import read_layer, read_sizes, write_biases, write_sizes
from spmd.models.published.family import decoder_family

_MLP = MLPSpec(activation="relu2", gated=False)

PRESETS = {
    "test-arcee": DecoderConfig(64, 32, 2, 4, 2, 64, layer=LayerSpec(mlp=_MLP)),
    "afm-4.5b": DecoderConfig(
        *(128_004, 2560, 36, 20, 4, 18_432),
        head_dim=128,
        rope_theta=10_000.0,
        layer=LayerSpec(mlp=_MLP),
    ),
}
"""Published shapes by name, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5, activation=("hidden_act", "relu2"), heads_divide=True)
    layer = read_layer(fields)
    assert isinstance(layer.mlp, MLPSpec)
    mlp = dataclasses.replace(_MLP, bias=layer.mlp.bias)
    return fields.build(DecoderConfig, **sizes, layer=dataclasses.replace(layer, mlp=mlp))


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "arcee",
        **write_sizes(config),
        **write_biases(config),
        "hidden_act": "relu2",
    }


FAMILY = decoder_family("ArceeForCausalLM", _read, _write)
