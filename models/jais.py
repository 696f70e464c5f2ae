"""Jais 2: a Llama with LayerNorm, biases, and squared ReLU in an MLP without a gate.

Source: config.json of huggingface.co/inceptionai/Jais-2-8B-Chat.

```python
config = jais2(150_272, 3328, layers=4, heads=26, kv_heads=26, d_ff=26_624)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, MLPSpec, NormSpec
from spmd.models.published.common_fields import read_sizes, write_biases, write_sizes
from spmd.models.published.family import decoder_family

_EPS = "layer_norm_eps"


def jais2(
    *shape: Any, attention_bias: bool = True, mlp_bias: bool = True, **fields: Any
) -> DecoderConfig:
    """Return the config of a Jais 2, from fields of `DecoderConfig`.

    Args:
        *shape: The first fields, in order.
        attention_bias: Add biases in attention.
        mlp_bias: Add biases in MLPs.
        **fields: Other fields.
    """
    layer = LayerSpec(
        AttentionSpec(qkv_bias=attention_bias, out_bias=attention_bias),
        MLPSpec(activation="relu2", gated=False, bias=mlp_bias),
    )
    defaults: dict[str, Any] = {"norm": NormSpec("layer", bias=True), "layer": layer}
    return DecoderConfig(*shape, **defaults | fields)


PRESETS = {
    "test-jais2": jais2(64, 32, 2, 4, 2, 64),
}
"""A small shape for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    activation = ("hidden_act", "relu2")
    sizes = read_sizes(fields, eps=1e-5, eps_field=_EPS, activation=activation, heads_divide=True)
    return fields.build(
        jais2,
        **sizes,
        attention_bias=fields.flag("attention_bias", default=True),
        mlp_bias=fields.flag("mlp_bias", default=True),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "jais2",
        **write_sizes(config, _EPS),
        **write_biases(config),
        "hidden_act": "relu2",
    }


FAMILY = decoder_family("Jais2ForCausalLM", _read, _write)
