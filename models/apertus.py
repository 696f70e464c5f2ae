"""Apertus: xIELU in an MLP without a gate, and norms of queries and keys (arXiv:2509.14233).

```python
config = dataclasses.replace(PRESETS["apertus-8b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, Llama3Scaling, MLPSpec
from spmd.models.decoder.activations import XIELU_BETA, XIELU_EPS
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.family import ENDS, TensorNames, decoder_family, layer_names
from spmd.models.published.rotary import TABLES

_THETA = 12_000_000.0
_SCALING = Llama3Scaling(factor=8.0)
_LAYER = LayerSpec(AttentionSpec(qk_norm="head"), MLPSpec(activation="xielu", gated=False))


def apertus(*shape: Any, attention_bias: bool = False, **fields: Any) -> DecoderConfig:
    """Return the config of an Apertus, from fields of `DecoderConfig`.

    Args:
        *shape: The first fields, in order.
        attention_bias: Add biases in attention.
        **fields: Other fields.
    """
    mixer = dataclasses.replace(_LAYER.attention, qkv_bias=attention_bias, out_bias=attention_bias)
    layer = dataclasses.replace(_LAYER, mixer=mixer)
    defaults: dict[str, Any] = {"rope_theta": _THETA, "rope_scaling": _SCALING, "layer": layer}
    return DecoderConfig(*shape, **defaults | fields)


PRESETS = {
    "test-apertus": apertus(64, 32, 2, 4, 2, 64),
    "apertus-8b": apertus(131_072, 4096, 32, 32, 8, 21_504),
    "apertus-70b": apertus(131_072, 8192, 80, 64, 8, 43_008),
}
"""Published shapes by name, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    activation = ("hidden_act", "xielu")
    sizes = read_sizes(fields, eps=1e-5, theta=_THETA, activation=activation)
    if all(fields.value(name) is None for name in TABLES):
        fields.only("rope_theta", _THETA)  # has no effect without a table
        sizes["rope_scaling"] = _SCALING
    bias = fields.flag("attention_bias", default=False)
    return fields.build(apertus, **sizes, attention_bias=bias)


def _write(config: DecoderConfig) -> dict[str, Any]:
    fields = {
        "model_type": "apertus",
        **write_sizes(config),
        "hidden_act": "xielu",
        "attention_bias": config.pattern.group[0].attention.qkv_bias,
    }
    # without a table, positions would be scaled
    fields.setdefault("rope_scaling", {"rope_type": "default"})
    return fields


_NAMES = layer_names(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm")
_NAMES |= {f"mlp/{name}": (f"mlp.act_fn.{name}", AS_IS) for name in ("alpha_p", "alpha_n")}
_CONSTANTS = {"mlp.act_fn.beta": XIELU_BETA, "mlp.act_fn.eps": XIELU_EPS}
FAMILY = decoder_family(
    "ApertusForCausalLM", _read, _write, names=TensorNames(_NAMES, ENDS, constants=_CONSTANTS)
)
