"""Seed-OSS: a Llama with wide heads, and biases of queries, keys and values.

Source: github.com/ByteDance-Seed/seed-oss and the fields of config.json.

```python
config = dataclasses.replace(PRESETS["seed-oss-36b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, MLPSpec
from spmd.models.published.common_fields import read_sizes, write_biases, write_sizes
from spmd.models.published.family import decoder_family

_LAYER = LayerSpec(AttentionSpec(qkv_bias=True))

PRESETS = {
    "test-seed-oss": DecoderConfig(64, 32, 2, 4, 2, 64, head_dim=16, layer=_LAYER),
    "seed-oss-36b": DecoderConfig(
        *(155_136, 5120, 64, 80, 8, 27_648),
        head_dim=128,
        rope_theta=1e7,
        norm_eps=1e-6,
        layer=_LAYER,
    ),
}
"""Published shapes by name, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, head_dim=128, kv_heads=8)
    mixer = AttentionSpec(
        qkv_bias=fields.flag("attention_bias", default=True),
        out_bias=fields.flag("attention_out_bias", default=False),
    )
    mlp = MLPSpec(bias=fields.flag("mlp_bias", default=False))
    return fields.build(DecoderConfig, **sizes, layer=LayerSpec(mixer, mlp))


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "seed_oss",
        **write_sizes(config),
        **write_biases(config),
        "attention_out_bias": config.pattern.group[0].attention.out_bias,
    }


FAMILY = decoder_family(
    "SeedOssForCausalLM", _read, _write, harmless=("residual_dropout",), secondary=True
)
