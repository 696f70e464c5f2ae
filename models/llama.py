"""Llama, including TinyLlama, Llama 2 and Llama 3 (arXiv:2302.13971, arXiv:2407.21783).

```python
config = dataclasses.replace(PRESETS["tinyllama-1b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import DecoderConfig, Llama3Scaling
from spmd.models.published.common_fields import read_layer, read_sizes, write_biases, write_sizes
from spmd.models.published.family import decoder_family

_LLAMA3_8B = DecoderConfig(128_256, 4096, 32, 32, 8, 14_336, rope_theta=500_000.0)
_LLAMA3_1B = DecoderConfig(128_256, 2048, 16, 32, 8, 8192, rope_theta=500_000.0, tied=True)

PRESETS = {
    "test": DecoderConfig(vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64),
    "demo": DecoderConfig(
        vocab=256, d_model=192, layers=4, heads=6, kv_heads=2, d_ff=512, unroll=4
    ),
    "tinyllama-1b": DecoderConfig(32_000, 2048, 22, 32, 4, 5632),
    "llama2-7b": DecoderConfig(32_000, 4096, 32, 32, 32, 11_008),
    "llama2-13b": DecoderConfig(32_000, 5120, 40, 40, 40, 13_824),
    "llama2-70b": DecoderConfig(32_000, 8192, 80, 64, 8, 28_672),
    "llama3-8b": _LLAMA3_8B,
    "llama3-70b": DecoderConfig(128_256, 8192, 80, 64, 8, 28_672, rope_theta=500_000.0),
    "llama3-405b": DecoderConfig(128_256, 16_384, 126, 128, 8, 53_248, rope_theta=500_000.0),
    "llama3.1-8b": dataclasses.replace(_LLAMA3_8B, rope_scaling=Llama3Scaling(factor=8.0)),
    "llama3.2-1b": dataclasses.replace(_LLAMA3_1B, rope_scaling=Llama3Scaling(factor=32.0)),
}
"""Published shapes by name, and small ones for tests and the demo."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, heads_divide=True)
    layer = read_layer(fields)
    return fields.build(DecoderConfig, **sizes, layer=layer)


def _read_iquestcoder(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    fields.only("clip_qkv", None)
    head_dim = 128
    if fields.is_null("head_dim"):
        head_dim = 0
    sizes = read_sizes(fields, eps=1e-5, head_dim=head_dim, kv_heads=8, heads_divide=True)
    return fields.build(DecoderConfig, **sizes, layer=read_layer(fields))


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"model_type": "llama", **write_sizes(config), **write_biases(config)}


def _write_iquestcoder(config: DecoderConfig) -> dict[str, Any]:
    return {**_write(config), "model_type": "iquestcoder"}


FAMILY = decoder_family("LlamaForCausalLM", _read, _write)
IQUESTCODER_FAMILY = decoder_family(
    "IQuestCoderForCausalLM", _read_iquestcoder, _write_iquestcoder, secondary=True
)
"""IQuest Coder, a Llama with other defaults in config.json."""
