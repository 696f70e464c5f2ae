"""GLM-4: half of each head rotated, in neighbouring dimensions (arXiv:2406.12793).

The models of April 2025 (`glm4`) also have norms after attention and MLP.

```python
config = dataclasses.replace(PRESETS["glm4-9b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, Rotary
from spmd.models.decoder.layer import Norms
from spmd.models.decoder.rotary import RopeScaling
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.rotary import read_rotary, write_rotary
from spmd.models.published.tensor_names import GATE_UP, fused_names

_EPS = 1.5625e-7
_HALF = Rotary(10_000.0, RopeScaling(), fraction=0.5)


def glm(
    *shape: Any,
    bias: bool = True,
    norms: Norms = "before",
    rotary: Rotary = _HALF,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a GLM from fields of `DecoderConfig`.

    Args:
        *shape: The first fields, in order.
        bias: Add biases to queries, keys and values.
        norms: Places of norms, as in `LayerSpec`.
        rotary: Rotary positions, without the order of pairs.
        **fields: Other fields.
    """
    pairs = dataclasses.replace(rotary, interleaved=True)
    layer = LayerSpec(AttentionSpec(rotary=pairs, qkv_bias=bias), norms=norms)
    defaults: dict[str, Any] = {"norm_eps": _EPS, "layer": layer}
    return DecoderConfig(*shape, **defaults | fields)


_9B = (151_552, 4096, 40, 32, 2, 13_696)

PRESETS = {
    "test-glm": glm(64, 32, 2, 4, 2, 64, head_dim=16),
    "test-glm4": glm(64, 32, 2, 4, 2, 64, head_dim=16, norms="both"),
    "glm-4-9b-chat": glm(*_9B),
    "glm4-9b": glm(*_9B, norms="both", norm_eps=1e-5),
    "glm4-32b": glm(
        *(151_552, 6144, 61, 48, 2, 23_040), bias=False, norms="both", norm_eps=1e-5, head_dim=128
    ),
}
"""Published shapes by name, and small ones for tests."""

_FUSED = fused_names(GATE_UP, "mlp.gate_up_proj", 2)
_NAMES = layer_names() | _FUSED
_NORMS4 = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
_NAMES4 = layer_names(**_NORMS4) | _FUSED


def _read(values: Mapping[str, Any], norms: Norms) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=_EPS, theta=0, head_dim=128, kv_heads=2)
    rotary = read_rotary(fields, _HALF)
    bias = fields.flag("attention_bias", default=True)
    return fields.build(glm, **sizes, bias=bias, norms=norms, rotary=rotary)


def _write(config: DecoderConfig, kind: str) -> dict[str, Any]:
    mixer = config.pattern.group[0].attention
    fields = write_sizes(config)
    fields |= write_rotary(mixer.rotary or _HALF, complete=True)
    fields["attention_bias"] = mixer.qkv_bias
    fields["model_type"] = kind
    return fields


GLM_FAMILY = decoder_family(
    "GlmForCausalLM",
    functools.partial(_read, norms="before"),
    functools.partial(_write, kind="glm"),
    _NAMES,
    secondary=True,
)
GLM4_FAMILY = decoder_family(
    "Glm4ForCausalLM",
    functools.partial(_read, norms="both"),
    functools.partial(_write, kind="glm4"),
    _NAMES4,
)
