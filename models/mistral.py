"""Mistral: a Llama with sliding-window attention (Jiang et al., arXiv:2310.06825).

```python
config = dataclasses.replace(PRESETS["mistral-7b"], layers=4)
model = spmd.from_nnx(config.build)
```

Ministral is a Mistral with a kind of attention for each layer, `layer_types` in config.json.

The first release has a window of 4,096 tokens, later ones have none. The heads of Mistral NeMo are
narrower than d_model / heads.
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import DecoderConfig, LayerSpec
from spmd.models.published.common_fields import read_sizes, read_window, write_sizes
from spmd.models.published.family import decoder_family
from spmd.models.published.layer_types import (
    FULL,
    SLIDING,
    attention_table,
    every,
    read_layer_types,
    read_window_of,
    write_layer_types,
)

PRESETS = {
    "test": DecoderConfig(
        vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64, head_dim=4, window=5
    ),
    "mistral-7b": DecoderConfig(32_000, 4096, 32, 32, 8, 14_336, window=4096),
    "mistral-7b-v0.3": DecoderConfig(32_768, 4096, 32, 32, 8, 14_336, rope_theta=1e6),
    "mistral-nemo-12b": DecoderConfig(
        vocab=131_072,
        d_model=5120,
        layers=40,
        heads=32,
        kv_heads=8,
        d_ff=14_336,
        rope_theta=1e6,
        head_dim=128,
    ),
}
"""Published shapes by name, and a small one for tests."""


def read_mistral(values: Mapping[str, Any]) -> DecoderConfig:
    """Parse config.json of a Mistral."""
    fields = Fields(values)
    sizes = read_sizes(fields, kv_heads=8)
    window = read_window(fields, absent=4096)
    return fields.build(DecoderConfig, **sizes, window=window)


def _write(config: DecoderConfig) -> dict[str, Any]:
    window = config.pattern.group[0].mixer.window or None
    return {"model_type": "mistral", **write_sizes(config), "sliding_window": window}


FAMILY = decoder_family("MistralForCausalLM", read_mistral, _write)


def _read_ministral(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, kv_heads=8)
    kind = SLIDING
    if fields.is_null("sliding_window"):
        kind = FULL
    default = every(1, sizes["layers"], seldom=kind)
    kinds = read_layer_types(fields, sizes["layers"], default)
    window = read_window_of(fields, kinds, absent=4096)
    return fields.build(DecoderConfig, **sizes, **attention_table(LayerSpec(), window, kinds))


def _write_ministral(config: DecoderConfig) -> dict[str, Any]:
    return {"model_type": "ministral", **write_sizes(config), **write_layer_types(config)}


MINISTRAL_FAMILY = decoder_family(
    "MinistralForCausalLM", _read_ministral, _write_ministral, secondary=True
)
