"""Helium: a Llama with neighbouring dimensions as pairs of rotary positions.

Source: huggingface.co/kyutai/helium-1-2b.

```python
config = dataclasses.replace(PRESETS["helium-1-preview-2b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, MLPSpec, Rotary
from spmd.models.published.common_fields import read_sizes, write_biases, write_sizes
from spmd.models.published.family import decoder_family

_ROTARY = Rotary(interleaved=True)
_LAYER = LayerSpec(AttentionSpec(rotary=_ROTARY))

PRESETS = {
    "test-helium": DecoderConfig(64, 32, 2, 4, 2, 64, layer=_LAYER),
    "helium-1-preview-2b": DecoderConfig(
        *(48_000, 2560, 24, 20, 20, 7040), rope_theta=1e5, norm_eps=1e-8, layer=_LAYER
    ),
}
"""Published shape by name, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-8, theta=1e5, head_dim=128, kv_heads=20)
    if sizes["head_dim"]:
        what = f"is {sizes['head_dim']}, and heads of this model are as wide as hidden_size"
        fields.refuse("head_dim", what, "hidden_size / num_attention_heads")
    mixer = AttentionSpec(rotary=_ROTARY, qkv_bias=fields.flag("attention_bias", default=False))
    mlp = MLPSpec(bias=fields.flag("mlp_bias", default=False))
    return fields.build(DecoderConfig, **sizes, layer=LayerSpec(mixer, mlp))


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"model_type": "helium", **write_sizes(config), **write_biases(config)}


FAMILY = decoder_family("HeliumForCausalLM", _read, _write, secondary=True)
