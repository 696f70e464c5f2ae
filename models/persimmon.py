"""Persimmon: norms of queries and keys, half of each head rotated, squared ReLU without a gate.

Source: adept.ai/blog/persimmon-8b and config.json of huggingface.co/adept/persimmon-8b-base.

```python
config = dataclasses.replace(PRESETS["persimmon-8b"], layers=4)
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
    RopeScaling,
    Rotary,
)
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.family import ENDS, TensorNames, decoder_family
from spmd.models.published.rotary import read_rotary
from spmd.models.published.tensor_names import QKV, fused_names, module_names

_ROTARY = Rotary(10_000.0, RopeScaling(), 0.5)
_EPS = "layer_norm_eps"


def persimmon(
    *shape: Any, qk_norm: bool = True, rotary: Rotary = _ROTARY, **fields: Any
) -> DecoderConfig:
    """Return the config of a Persimmon, from fields of `DecoderConfig`.

    Args:
        *shape: The first fields, in order.
        qk_norm: Normalise each head of queries and keys.
        rotary: Rotary positions of every layer.
        **fields: Other fields.
    """
    mixer = AttentionSpec(qkv_bias=True, out_bias=True, rotary=rotary)
    if qk_norm:
        mixer = dataclasses.replace(mixer, qk_norm="head")
    layer = LayerSpec(mixer, MLPSpec(activation="relu2", gated=False, bias=True))
    defaults: dict[str, Any] = {"norm": NormSpec("layer", bias=True), "layer": layer}
    return DecoderConfig(*shape, **defaults | fields)


PRESETS = {
    "test-persimmon": persimmon(64, 32, 2, 4, 4, 64),
    "persimmon-8b": persimmon(
        *(262_144, 4096, 36, 64, 64, 16_384), rotary=dataclasses.replace(_ROTARY, theta=25_000.0)
    ),
}
"""Published shape by name, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(
        fields,
        eps=1e-5,
        eps_field=_EPS,
        theta=0,
        activation=("hidden_act", "relu2"),
        heads_divide=True,
    )
    fields.only("num_key_value_heads", sizes["heads"])
    if sizes["head_dim"]:
        fields.refuse("head_dim", f"is {sizes['head_dim']}, not hidden_size / num_attention_heads")
    fields.value("hidden_dropout")
    qk_norm = fields.flag("qk_layernorm", default=True)
    return fields.build(persimmon, **sizes, qk_norm=qk_norm, rotary=read_rotary(fields, _ROTARY))


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixer = config.pattern.group[0].attention
    rotary = mixer.rotary or _ROTARY
    return {
        "model_type": "persimmon",
        **write_sizes(config, _EPS, rotary),
        "partial_rotary_factor": rotary.fraction,
        "qk_layernorm": mixer.qk_norm == "head",
        "hidden_act": "relu2",
    }


def _names(config: DecoderConfig) -> TensorNames:
    linear = {
        "attention/o_proj": "self_attn.dense",
        "mlp/up_proj": "mlp.dense_h_to_4h",
        "mlp/down_proj": "mlp.dense_4h_to_h",
    }
    norms = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention/q_norm": "self_attn.q_layernorm",
        "attention/k_norm": "self_attn.k_layernorm",
    }
    names = module_names(linear, norms)
    names |= fused_names(QKV, "self_attn.query_key_value", 3, groups=config.heads)
    return TensorNames(names, ENDS | module_names({}, {"norm": "final_layernorm"}))


FAMILY = decoder_family(
    "PersimmonForCausalLM", _read, _write, names=_names, harmless=("hidden_dropout",)
)
