"""nanochat: norms without parameters, also of embeddings, and squared ReLU in an MLP without a gate.

Source: github.com/karpathy/nanochat and config.json of huggingface.co/karpathy/nanochat-d32. Queries
and keys are normalised after their rotation, which is by negative angles.

```python
config = nanochat(50_304, d_model=768, layers=12, heads=6, kv_heads=6, d_ff=3072)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    LayerSpec,
    MLPSpec,
    NormSpec,
    Rotary,
)
from spmd.models.published.common_fields import read_sizes, read_soft_cap, write_sizes
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.tensor_names import module_names

_CAP = "final_logit_softcapping"
_MIXER = AttentionSpec(qk_norm="head", qk_norm_after=True, rotary=Rotary(negative=True))


def nanochat(*shape: Any, attention_bias: bool = False, **fields: Any) -> DecoderConfig:
    """Return the config of a nanochat, from fields of `DecoderConfig`.

    Args:
        *shape: The first fields, in order.
        attention_bias: Add biases in attention.
        **fields: Other fields.
    """
    mixer = dataclasses.replace(_MIXER, qkv_bias=attention_bias, out_bias=attention_bias)
    layer = LayerSpec(mixer, MLPSpec(activation="relu2", gated=False))
    defaults: dict[str, Any] = {
        **{"norm": NormSpec(scale=False), "norm_eps": 1e-6, "embed_norm": True},
        **{"layer": layer, "logits_soft_cap": 15.0},
    }
    return DecoderConfig(*shape, **defaults | fields)


PRESETS = {"test-nanochat": nanochat(64, 32, 2, 4, 2, 64)}
"""A small shape for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, activation=("hidden_act", "relu2"))
    return fields.build(
        nanochat,
        **sizes,
        attention_bias=fields.flag("attention_bias", default=False),
        logits_soft_cap=read_soft_cap(fields, _CAP, 15.0),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "nanochat",
        **write_sizes(config),
        "hidden_act": "relu2",
        "attention_bias": config.pattern.group[0].attention.qkv_bias,
        _CAP: config.logits_soft_cap or None,
    }


_NAMES = layer_names() | module_names({"mlp/up_proj": "mlp.fc1", "mlp/down_proj": "mlp.fc2"})
FAMILY = decoder_family("NanoChatForCausalLM", _read, _write, _NAMES)
