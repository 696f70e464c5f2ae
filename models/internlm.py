"""InternLM 3: a Llama with wide heads; `qkv_bias` and `bias` are its names for biases.

Source: huggingface.co/internlm/internlm3-8b-instruct. `transformers` runs it as a Llama.

```python
config = dataclasses.replace(PRESETS["internlm3-8b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, MLPSpec
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.family import decoder_family

PRESETS = {
    "test-internlm3": DecoderConfig(64, 32, 2, 4, 2, 64, head_dim=16),
    "internlm3-8b": DecoderConfig(
        *(128_512, 4096, 48, 32, 2, 10_240), head_dim=128, rope_theta=5e7
    ),
}
"""Published shapes by name, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    head_dim = 128
    if fields.is_null("head_dim"):
        head_dim = 0
    sizes = read_sizes(fields, eps=1e-5, head_dim=head_dim, kv_heads=2, heads_divide=True)
    bias = _bias(fields, "bias", "mlp_bias")
    qkv_bias = _bias(fields, "qkv_bias", "attention_bias")
    layer = LayerSpec(AttentionSpec(qkv_bias=qkv_bias, out_bias=bias), MLPSpec(bias=bias))
    return fields.build(DecoderConfig, **sizes, layer=layer)


def _bias(fields: Fields, name: str, llama: str) -> bool:
    """Parse a flag by the name of InternLM, or that of Llama."""
    other = fields.flag(llama, default=False)
    found = fields.flag(name, default=other)
    if fields.value(llama) is not None:
        fields.only(name, other)
    return found


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixer = config.pattern.group[0].attention
    return {
        "model_type": "internlm3",
        **write_sizes(config),
        "qkv_bias": mixer.qkv_bias,
        "bias": mixer.out_bias,
    }


FAMILY = decoder_family("InternLM3ForCausalLM", _read, _write, secondary=True)
