"""StableLM: LayerNorm and a quarter of each head rotated (arXiv:2402.17834).

StableLM 2 12B has attention and MLP side by side, and each head of queries and keys has a LayerNorm
of its own.

```python
config = dataclasses.replace(PRESETS["stablelm-2-12b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RopeScaling,
    Rotary,
)
from spmd.models.decoder.layer import Norms
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.gpt import read_activation, write_activation
from spmd.models.published.rotary import read_rotary

_EPS = "layer_norm_eps"
_QUARTER = Rotary(10_000.0, RopeScaling(), fraction=0.25)


def stablelm(
    *shape: Any,
    rotary: Rotary = _QUARTER,
    parallel: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    activation: str = "silu",
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a StableLM from fields of `DecoderConfig`.

    Args:
        *shape: The first fields, in order.
        rotary: Rotary positions.
        parallel: Attention and MLP have the same input (`use_parallel_residual`).
        qkv_bias: Add biases to queries, keys and values (`use_qkv_bias`).
        qk_norm: Normalise each head of queries and keys (`qk_layernorm`).
        activation: Activation of MLPs.
        **fields: Other fields.
    """
    mixer = AttentionSpec(rotary=rotary, qkv_bias=qkv_bias)
    if qk_norm:
        mixer = dataclasses.replace(mixer, qk_norm="heads", qk_norm_kind=NormSpec("layer"))
    norms: Norms = "before"
    if parallel:
        norms = "parallel_shared"
    layer = LayerSpec(mixer, MLPSpec(activation=activation), norms)
    defaults: dict[str, Any] = {"norm": NormSpec("layer", bias=True), "layer": layer}
    return DecoderConfig(*shape, **defaults | fields)


PRESETS = {
    "test-stablelm": stablelm(64, 32, 2, 4, 2, 64, parallel=True, qk_norm=True),
    "stablelm-3b": stablelm(50_304, 2560, 32, 32, 32, 6912),
    "stablelm-2-1.6b": stablelm(100_352, 2048, 24, 32, 32, 5632, qkv_bias=True),
    "stablelm-2-12b": stablelm(100_352, 5120, 40, 32, 8, 13_824, parallel=True, qk_norm=True),
}
"""Published shapes by name, and a small one for tests."""

_NAMES = layer_names()
for _norm in ("q_norm", "k_norm"):
    _tensor = f"self_attn.{_norm[0]}_layernorm.norms.{{head}}.weight"
    _NAMES[f"attention/{_norm}/scale"] = (_tensor, AS_IS)
_HARMLESS = ("hidden_dropout",)


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(
        fields,
        eps=1e-5,
        eps_field=_EPS,
        theta=0,
        kv_heads=32,
        activation=(),
        has_head_dim=False,
    )
    return fields.build(
        stablelm,
        **sizes,
        rotary=read_rotary(fields, _QUARTER),
        parallel=fields.flag("use_parallel_residual", default=False),
        qkv_bias=fields.flag("use_qkv_bias", default=False),
        qk_norm=fields.flag("qk_layernorm", default=False),
        activation=read_activation(fields, "hidden_act", "silu", gated=True),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    spec = config.pattern.group[0]
    rotary = spec.attention.rotary or _QUARTER
    return {
        "model_type": "stablelm",
        **write_sizes(config, _EPS, rotary),
        "partial_rotary_factor": rotary.fraction,
        "hidden_act": write_activation(config),
        "use_parallel_residual": spec.norms == "parallel_shared",
        "use_qkv_bias": spec.attention.qkv_bias,
        "qk_layernorm": spec.attention.qk_norm == "heads",
    }


FAMILY = decoder_family("StableLmForCausalLM", _read, _write, _NAMES, harmless=_HARMLESS)
