"""Bamba: state-space mixers, and attention with half of each head rotated in a few layers.

Source: config.json of huggingface.co/ibm-ai-platform/Bamba-9B-v1. Each layer has an MLP.

```python
config = dataclasses.replace(PRESETS["bamba-9b"], layers=10, last=())
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Collection, Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    LayerSpec,
    MLPSpec,
    RopeScaling,
    Rotary,
    StateSpaceSpec,
)
from spmd.models.published.common_fields import read_layer, read_sizes, write_sizes
from spmd.models.published.family import ENDS, TensorNames, decoder_family, layer_names
from spmd.models.published.layer_types import FULL, LINEAR, attention_of, layer_table
from spmd.models.published.rotary import read_rotary
from spmd.models.published.state_space import (
    StateSpaceFields,
    mixer_kinds,
    state_space_names,
)
from spmd.models.published.tensor_names import module_names

_ROTARY = Rotary(1e4, RopeScaling(), fraction=0.5)
_ATTENTION = AttentionSpec(rotary=Rotary(fraction=0.5))
_MLP = MLPSpec()


def bamba(
    attention_layers: Collection[int],
    mixer: StateSpaceSpec,
    *,
    layers: int,
    attention: AttentionSpec = _ATTENTION,
    mlp: MLPSpec = _MLP,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a Bamba from fields of `DecoderConfig`.

    Args:
        attention_layers: Numbers of the layers with attention (`attn_layer_indices`).
        mixer: The mixer of all other layers.
        layers: Number of layers.
        attention: The mixer of layers with attention.
        mlp: The MLP of each layer.
        **fields: Other fields.
    """
    kinds = [LINEAR] * layers
    for number in attention_layers:
        kinds[number] = FULL
    specs = {LINEAR: LayerSpec(mixer, mlp), FULL: LayerSpec(attention, mlp)}
    return DecoderConfig(layers=layers, **layer_table(kinds, specs), **fields)


PRESETS = {
    "test-bamba": bamba(
        (1, 4), StateSpaceSpec(heads=8, head_dim=8, state_dim=8), layers=6, vocab=64, d_model=32
    ),
    "bamba-9b": bamba(
        (9, 18, 27),
        StateSpaceSpec(128, 64),
        layers=32,
        vocab=128_256,
        d_model=4096,
        heads=32,
        kv_heads=8,
        d_ff=14_336,
    ),
}
"""Published shape by name, and a small one for tests."""

_MIXER = StateSpaceFields()
_LAYERS = "attn_layer_indices"
_HARMLESS = ("attn_rotary_emb", "mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient")


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    for name in _HARMLESS:
        fields.value(name)
    sizes = read_sizes(fields, eps=1e-5, theta=0, kv_heads=8)
    layer = read_layer(fields)
    rotary = read_rotary(fields, _ROTARY)
    bias = layer.attention.qkv_bias
    return fields.build(
        bamba,
        attention_layers=_read_layers(fields, sizes["layers"]),
        mixer=_MIXER.read(fields, sizes["d_model"]),
        attention=AttentionSpec(rotary=rotary, qkv_bias=bias, out_bias=bias),
        mlp=layer.mlp,
        **sizes,
    )


def _read_layers(fields: Fields, layers: int) -> list[int]:
    """Parse the numbers of layers with attention; numbers without a layer are ignored."""
    found = fields.value(_LAYERS, [])
    if not isinstance(found, list) or not all(type(number) is int for number in found):
        fields.refuse(_LAYERS, "is not a list of integers")
        return []
    return [number for number in found if 0 <= number < layers]


def _write(config: DecoderConfig) -> dict[str, Any]:
    attention = attention_of(config)
    mlp = config.pattern.group[0].mlp
    kinds = enumerate(mixer_kinds(config))
    return {
        "model_type": "bamba",
        **write_sizes(config, rotary=attention.rotary or _ROTARY),
        **_MIXER.write(config),
        "attention_bias": attention.qkv_bias,
        "mlp_bias": isinstance(mlp, MLPSpec) and mlp.bias,
        _LAYERS: [number for number, kind in kinds if kind == FULL],
    }


def bamba_names(config: DecoderConfig) -> TensorNames:
    """Return the names of all tensors."""
    layer = layer_names(attention_norm="input_layernorm", mlp_norm="pre_ff_layernorm")
    projections = ("gate_proj", "up_proj", "down_proj")
    layer |= module_names({f"mlp/{name}": f"feed_forward.{name}" for name in projections})
    layer |= state_space_names(config, "mamba")
    return TensorNames(layer, ENDS | {"norm/scale": ("final_layernorm.weight", AS_IS)})


FAMILY = decoder_family("BambaForCausalLM", _read, _write, names=bamba_names, harmless=_HARMLESS)
