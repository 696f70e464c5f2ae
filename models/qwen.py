"""Qwen: a Llama with biases in attention (Qwen 2) or normalised queries and keys (Qwen 3).

Sources: arXiv:2407.10671 for Qwen 2, arXiv:2505.09388 for Qwen 3.

```python
config = dataclasses.replace(PRESETS["qwen3-8b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec
from spmd.models.published.common_fields import (
    check_layer_types,
    read_attention_bias,
    read_sizes,
    write_sizes,
)
from spmd.models.published.family import decoder_family

QWEN2 = LayerSpec(AttentionSpec(qkv_bias=True))
QWEN3 = LayerSpec(AttentionSpec(qk_norm="head"))

_qwen2 = functools.partial(DecoderConfig, rope_theta=1e6, norm_eps=1e-6, layer=QWEN2)
_qwen3 = functools.partial(DecoderConfig, rope_theta=1e6, norm_eps=1e-6, head_dim=128, layer=QWEN3)

PRESETS = {
    "test-qwen2": _qwen2(vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64),
    "test-qwen3": _qwen3(64, 32, 2, 4, 2, 64, head_dim=4, tied=True),
    "qwen2.5-0.5b": _qwen2(151_936, 896, 24, 14, 2, 4864, tied=True),
    "qwen2.5-1.5b": _qwen2(151_936, 1536, 28, 12, 2, 8960, tied=True),
    "qwen2.5-7b": _qwen2(152_064, 3584, 28, 28, 4, 18_944),
    "qwen2.5-72b": _qwen2(152_064, 8192, 80, 64, 8, 29_568, norm_eps=1e-5),
    "qwen3-0.6b": _qwen3(151_936, 1024, 28, 16, 8, 3072, tied=True),
    "qwen3-8b": _qwen3(151_936, 4096, 36, 32, 8, 12_288),
    "qwen3-32b": _qwen3(151_936, 5120, 64, 64, 8, 25_600),
}
"""Published shapes by name, and small ones for tests."""


def _read2(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    fields.only("attention_bias", True, False)  # without effect: there are biases
    return _read(fields, QWEN2, head_dim=0)


def _read3(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    mixer = read_attention_bias(fields, QWEN3.attention)
    return _read(fields, dataclasses.replace(QWEN3, mixer=mixer), head_dim=128)


def _read(fields: Fields, layer: LayerSpec, *, head_dim: int) -> DecoderConfig:
    """Parse the fields of both versions."""
    fields.only("use_sliding_window", False)
    # both are unused without `use_sliding_window`
    fields.value("sliding_window")
    fields.value("max_window_layers")
    sizes = read_sizes(fields, head_dim=head_dim, kv_heads=32)
    check_layer_types(fields, sizes["layers"], "full_attention")
    return fields.build(DecoderConfig, **sizes, layer=layer)


def _write2(config: DecoderConfig) -> dict[str, Any]:
    return {"model_type": "qwen2", **write_sizes(config), "use_sliding_window": False}


def _write3(config: DecoderConfig) -> dict[str, Any]:
    bias = config.pattern.group[0].attention.out_bias
    fields = {**write_sizes(config), "use_sliding_window": False, "attention_bias": bias}
    return {"model_type": "qwen3", **fields}


QWEN2_FAMILY = decoder_family("Qwen2ForCausalLM", _read2, _write2)
QWEN3_FAMILY = decoder_family("Qwen3ForCausalLM", _read3, _write3)
