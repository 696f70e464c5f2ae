"""Falcon-H1: attention and a state-space mixer side by side in each layer (arXiv:2507.22448).

Many products have factors, the fields `…_multiplier` of config.json (after the maximal update
parametrisation, arXiv:2203.03466).

```python
model = spmd.from_nnx(PRESETS["test-falcon-h1"].build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.bamba import bamba_names
from spmd.models.decoder import (
    DecoderConfig,
    LayerSpec,
    MLPSpec,
    ParallelMixerSpec,
    StateSpaceSpec,
)
from spmd.models.decoder.declared import MissingPartError
from spmd.models.published.common_fields import read_factor, read_layer, read_sizes, write_sizes
from spmd.models.published.family import TensorNames, decoder_family
from spmd.models.published.state_space import StateSpaceFields

_MLP = MLPSpec()


def falcon_h1(mixer: ParallelMixerSpec, *, mlp: MLPSpec = _MLP, **fields: Any) -> DecoderConfig:
    """Return the config of a Falcon-H1 from its mixer, its MLP and fields of `DecoderConfig`."""
    return DecoderConfig(layer=LayerSpec(mixer, mlp), **fields)


PRESETS = {
    "test-falcon-h1": falcon_h1(
        ParallelMixerSpec(
            state_space=StateSpaceSpec(
                *(8, 8, 2, 8), norm=False, multipliers=(0.5, 0.7, 1.0, 2.0, 0.8)
            ),
            key_scale=0.5,
            attention_scale=0.7,
            state_space_scale=1.5,
        ),
        mlp=MLPSpec(gate_scale=0.5, out_scale=1.5),
        vocab=64,
        d_model=32,
        layers=2,
        d_ff=48,
        embed_scale=3.0,
        logits_scale=0.5,
    ),
}
"""A small shape for tests."""

_MIXER = StateSpaceFields(expand="")
_HARMLESS = (
    "attn_layer_indices",
    "mamba_chunk_size",
    "mamba_expand",
    "mamba_use_mlp",
    "mlp_expansion_factor",
    "num_logits_to_keep",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "time_step_rank",
)
"""Fields of initial values and of kernels, and fields that `transformers` ignores."""
_OUTPUTS = 5


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    for name in _HARMLESS:
        fields.value(name)
    sizes = read_sizes(fields, eps=1e-5, kv_heads=8)
    layer = read_layer(fields)
    gate_scale, out_scale = _read_factors(fields, "mlp_multipliers", 2)
    mlp = MLPSpec(bias=fields.flag("mlp_bias", False), gate_scale=gate_scale, out_scale=out_scale)
    attention_in = read_factor(fields, "attention_in_multiplier")
    if layer.attention.qkv_bias and attention_in != 1:
        what = "is not 1, and attention has biases (attention_bias)"
        fields.refuse("attention_in_multiplier", what, "1")
    mixer = ParallelMixerSpec(
        layer.attention,
        _read_state_space(fields, sizes["d_model"]),
        # The input's factor is one of queries, of keys and of values.
        key_scale=read_factor(fields, "key_multiplier") * attention_in**2,
        attention_scale=read_factor(fields, "attention_out_multiplier") * attention_in,
        state_space_scale=read_factor(fields, "ssm_out_multiplier"),
    )
    return fields.build(
        falcon_h1,
        mixer=mixer,
        mlp=mlp,
        embed_scale=read_factor(fields, "embedding_multiplier"),
        logits_scale=read_factor(fields, "lm_head_multiplier"),
        **sizes,
    )


def _read_state_space(fields: Fields, width: int) -> StateSpaceSpec:
    """Parse the state-space mixer, of the width of the field `mamba_d_ssm`."""
    inner = fields.integer("mamba_d_ssm", 1024)
    if fields.is_null("mamba_d_ssm"):
        inner = width * fields.integer("mamba_expand", 2)
    heads = fields.integer("mamba_n_heads", 128)
    defaults = dataclasses.replace(_MIXER.defaults, head_dim=max(1, inner // heads))
    spec = dataclasses.replace(_MIXER, defaults=defaults).read(fields, width)
    if spec.inner != inner:
        fields.refuse("mamba_d_ssm", f"is {inner}, not {heads} heads of {spec.head_dim}")
    fields.only("projectors_bias", spec.bias)
    norm_first = fields.flag("mamba_norm_before_gate", True)
    norm = fields.flag("mamba_rms_norm", False)
    own = read_factor(fields, "ssm_in_multiplier")
    if spec.bias and own != 1:
        what = "is not 1, and projections have biases (mamba_proj_bias)"
        fields.refuse("ssm_in_multiplier", what, "1")
    factors = _read_factors(fields, "ssm_multipliers", _OUTPUTS)
    multipliers = tuple(factor * own for factor in factors)
    gate_first = not (norm and norm_first)
    return dataclasses.replace(spec, norm=norm, gate_first=gate_first, multipliers=multipliers)


def _read_factors(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    """Parse a list of factors; absent or null means 1 for each."""
    found = fields.value(name, [1.0] * count)
    if not isinstance(found, list) or len(found) != count:
        fields.refuse(name, f"is not a list of {count} numbers")
        return (1.0,) * count
    for number, factor in enumerate(found):
        if not fields.is_number(f"{name}[{number}]", factor):
            return (1.0,) * count
    return tuple(map(float, found))


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer = config.pattern.group[0]
    mixer, mlp = layer.mixer, layer.mlp
    if not isinstance(mixer, ParallelMixerSpec) or not isinstance(mlp, MLPSpec):
        raise MissingPartError("the layers have no two mixers, or no MLP")
    state_space = mixer.state_space
    return {
        "model_type": "falcon_h1",
        **write_sizes(config),
        **_MIXER.write(config),
        "mamba_d_ssm": state_space.inner,
        "mamba_rms_norm": state_space.norm,
        "mamba_norm_before_gate": not state_space.gate_first,
        "projectors_bias": state_space.bias,
        "ssm_multipliers": list(state_space.multipliers),
        "ssm_out_multiplier": mixer.state_space_scale,
        "attention_bias": mixer.attention.qkv_bias,
        "attention_out_multiplier": mixer.attention_scale,
        "key_multiplier": mixer.key_scale,
        "mlp_bias": mlp.bias,
        "mlp_multipliers": [mlp.gate_scale, mlp.out_scale],
        "embedding_multiplier": config.embed_scale or config.d_model**0.5,
        "lm_head_multiplier": config.logits_scale,
    }


def _names(config: DecoderConfig) -> TensorNames:
    names = bamba_names(config)
    layer = {}
    for name, tensor in names.layer.items():
        if name.startswith(("attention/", f"{StateSpaceSpec.name}/")):
            name = f"{ParallelMixerSpec.name}/{name}"
        layer[name] = tensor
    return dataclasses.replace(names, layer=layer)


FAMILY = decoder_family("FalconH1ForCausalLM", _read, _write, names=_names, harmless=_HARMLESS)
