"""Phi-1, 1.5 and 2: attention and MLP with the same input, biases, also of logits (arXiv:2309.05463).

```python
config = dataclasses.replace(PRESETS["phi-2"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import DecoderConfig, RopeScaling, Rotary
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.family import ENDS, TensorNames, decoder_family, layer_names
from spmd.models.published.gpt import gpt_decoder, read_activation, write_activation
from spmd.models.published.rotary import read_rotary
from spmd.models.published.tensor_names import module_names

_EPS = "layer_norm_eps"
_HALF = Rotary(10_000.0, RopeScaling(), fraction=0.5)

phi = functools.partial(
    gpt_decoder, rotary=_HALF, norms="parallel_shared", activation="gelu_tanh", logits_bias=True
)
"""Config of a Phi from fields of `gpt_decoder`."""

PRESETS = {
    "test-phi": phi(64, 32, 2, 4, 2, 64),
    "phi-1.5": phi(51_200, 2048, 24, 32, 32, 8192),
    "phi-2": phi(
        *(51_200, 2560, 32, 32, 32, 10_240), rotary=dataclasses.replace(_HALF, fraction=0.4)
    ),
}
"""Published shapes by name, and a small one for tests."""

_LINEAR = {
    "attention/o_proj": "self_attn.dense",
    "mlp/up_proj": "mlp.fc1",
    "mlp/down_proj": "mlp.fc2",
}
_NORMS = {
    "attention/q_norm": "self_attn.q_layernorm",
    "attention/k_norm": "self_attn.k_layernorm",
}
_NAMES = TensorNames(
    layer_names() | module_names(_LINEAR, _NORMS),
    ENDS | module_names({}, {"norm": "final_layernorm"}),
)
_HARMLESS = ("embd_pdrop", "resid_pdrop")


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5, eps_field=_EPS, theta=0, activation=(), has_head_dim=False)
    qk_norm = "none"
    if fields.flag("qk_layernorm", default=False):
        qk_norm = "head"
    return fields.build(
        phi,
        **sizes,
        rotary=read_rotary(fields, _HALF),
        qk_norm=qk_norm,
        activation=read_activation(fields, "hidden_act", "gelu_new"),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixer = config.pattern.group[0].attention
    rotary = mixer.rotary or _HALF
    return {
        "model_type": "phi",
        **write_sizes(config, _EPS, rotary),
        "partial_rotary_factor": rotary.fraction,
        "hidden_act": write_activation(config),
        "qk_layernorm": mixer.qk_norm == "head",
    }


FAMILY = decoder_family("PhiForCausalLM", _read, _write, names=_NAMES, harmless=_HARMLESS)
