"""Mamba 2: layers of a state-space mixer alone, without attention and MLPs (arXiv:2405.21060).

```python
config = dataclasses.replace(PRESETS["mamba2-2.7b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS
from spmd.models.decoder import DecoderConfig, LayerSpec, StateSpaceSpec
from spmd.models.published.family import TensorNames, decoder_family
from spmd.models.published.layer_types import limit_layers
from spmd.models.published.state_space import (
    StateSpaceFields,
    state_space_names,
)
from spmd.models.published.tensor_names import Names


def mamba2(mixer: StateSpaceSpec, **fields: Any) -> DecoderConfig:
    """Return the config of a Mamba 2 from its mixer and fields of `DecoderConfig`."""
    return DecoderConfig(
        layer=LayerSpec(mixer, mlp=None),
        heads=mixer.heads,
        kv_heads=mixer.heads,
        head_dim=mixer.head_dim,
        d_ff=mixer.inner,
        **fields,
    )


_SIZES: dict[str, Any] = {"vocab": 50_288, "tied": True}

PRESETS = {
    "test-mamba2": mamba2(
        StateSpaceSpec(heads=8, head_dim=8, groups=2, state_dim=8), vocab=64, d_model=32, layers=2
    ),
    "mamba2-130m": mamba2(StateSpaceSpec(24, 64), d_model=768, layers=24, **_SIZES),
    "mamba2-1.3b": mamba2(StateSpaceSpec(64, 64), d_model=2048, layers=48, **_SIZES),
    "mamba2-2.7b": mamba2(StateSpaceSpec(80, 64), d_model=2560, layers=64, **_SIZES),
    "mamba-codestral-7b": mamba2(
        StateSpaceSpec(128, 64, groups=8), vocab=32_768, d_model=4096, layers=64
    ),
}
"""Published shapes by name, and a small one for tests."""

_MIXER = StateSpaceFields(
    StateSpaceSpec(128, 64, groups=8),
    heads="num_heads",
    head_dim="head_dim",
    groups="n_groups",
    state_dim="state_size",
    conv_width="conv_kernel",
    conv_bias="use_conv_bias",
    bias="use_bias",
    expand="expand",
)
_HARMLESS = (
    "chunk_size",
    "intermediate_size",
    "norm_before_gate",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "rms_norm",
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_max",
    "time_step_min",
    "time_step_rank",
    "time_step_scale",
)
"""Fields of initial values and of kernels, and fields that `transformers` ignores."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    for name in _HARMLESS:
        fields.value(name)
    fields.only("hidden_act", "silu")
    width = fields.integer("hidden_size", 4096)
    return fields.build(
        mamba2,
        mixer=_MIXER.read(fields, width),
        vocab=fields.integer("vocab_size", 32_768),
        d_model=width,
        layers=limit_layers(fields, fields.integer("num_hidden_layers", 64)),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5, least=0),
        tied=fields.flag("tie_word_embeddings", default=False),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "mamba2",
        "vocab_size": config.vocab,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.layers,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tied,
        **_MIXER.write(config),
    }


_ENDS: Names = {
    "embed/embedding": ("embeddings.weight", AS_IS),
    "norm/scale": ("norm_f.weight", AS_IS),
}


def _names(config: DecoderConfig) -> TensorNames:
    layer = state_space_names(config, "mixer")
    layer["attention_norm/scale"] = ("norm.weight", AS_IS)
    return TensorNames(layer, _ENDS, prefix="backbone.")


FAMILY = decoder_family("Mamba2ForCausalLM", _read, _write, names=_names, harmless=_HARMLESS)
