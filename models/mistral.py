"""Mistral: a Llama with sliding-window attention (Jiang et al., arXiv:2310.06825).

```python
config = dataclasses.replace(PRESETS["mistral-7b"], layers=4)
model = spmd.from_nnx(config.build)
```

The first release has a window of 4,096 tokens, later ones have none. The heads of Mistral NeMo are
narrower than d_model / heads.
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import DecoderConfig
from spmd.models.decoder.published import decoder_family, read_sizes, read_window, write_sizes

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


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields)
    window = read_window(fields, absent=4096)
    return fields.build(DecoderConfig, **sizes, window=window)


def _write(config: DecoderConfig) -> dict[str, Any]:
    window = config.pattern.group[0].mixer.window or None
    return {"model_type": "mistral", **write_sizes(config), "sliding_window": window}


FAMILY = decoder_family("MistralForCausalLM", _read, _write)
