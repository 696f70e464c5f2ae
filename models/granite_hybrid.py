"""Granite 4: state-space mixers in most layers, attention in the others, and the factors of Granite 3.

Source: config.json of huggingface.co/ibm-granite/granite-4.0-h-tiny. Each layer has a shared expert
and perhaps routed ones; without those, the shared one is an MLP. Attention has no positions, unless
`position_embedding_type` is `rope`.

```python
config = dataclasses.replace(PRESETS["granite-4.0-h-tiny"], layers=10)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping, Sequence
from typing import Any

from spmd.hf.fields import Fields
from spmd.layers.router import RouterConfig
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    Rotary,
    StateSpaceSpec,
)
from spmd.models.decoder.declared import MissingPartError
from spmd.models.granite import read_factors, write_factors
from spmd.models.granite_moe import NAMES
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.experts import RouterFields, read_count
from spmd.models.published.family import ENDS, TensorNames, decoder_family
from spmd.models.published.layer_types import (
    FULL,
    LINEAR,
    attention_of,
    layer_table,
    read_layer_types,
)
from spmd.models.published.state_space import (
    EARLIER_KINDS,
    StateSpaceFields,
    mixer_kinds,
    state_space_names,
)
from spmd.models.published.tensor_names import GATE_UP, fused_names, module_names


def granite_hybrid(
    kinds: Sequence[str],
    mixer: StateSpaceSpec,
    *,
    shared_d_ff: int,
    attention: AttentionSpec,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a Granite 4 from fields of `DecoderConfig`.

    Args:
        kinds: The kind of each layer, as in config.json.
        mixer: The mixer of layers of kind `linear_attention`.
        shared_d_ff: Hidden width of the shared expert, or of the MLP without routed ones.
        attention: The mixer of other layers.
        **fields: Other fields; d_ff is the width of an expert.
    """
    mlp: MLPSpec | ExpertsSpec = MLPSpec(shared_d_ff)
    if fields.get("router") is not None:
        mlp = ExpertsSpec(shared_d_ff=shared_d_ff)
    specs = {LINEAR: LayerSpec(mixer, mlp), FULL: LayerSpec(attention, mlp)}
    return DecoderConfig(layers=len(kinds), **layer_table(kinds, specs), **fields)


def _kinds(layers: int, attention: Sequence[int]) -> list[str]:
    kinds = [LINEAR] * layers
    for number in attention:
        kinds[number] = FULL
    return kinds


_FACTORS = {"embed_scale": 12.0, "residual_scale": 0.22}
_KINDS_40 = _kinds(40, (5, 15, 25, 35))
_ATTENTION = AttentionSpec(rotary=None, scale=1 / 128)
_SIZES: dict[str, Any] = {
    **{"vocab": 100_352, "tied": True, "shared_d_ff": 1024, "attention": _ATTENTION},
    **_FACTORS,
}

PRESETS = {
    "test-granite-hybrid": granite_hybrid(
        _kinds(4, (1, 3)),
        StateSpaceSpec(heads=8, head_dim=8, state_dim=8),
        shared_d_ff=24,
        attention=_ATTENTION,
        vocab=64,
        d_model=32,
        d_ff=16,
        tied=True,
        router=RouterConfig(experts=4, top_k=2, balance=0.001),
        **_FACTORS,
    ),
    "granite-4.0-h-tiny": granite_hybrid(
        _KINDS_40,
        StateSpaceSpec(48, 64),
        d_model=1536,
        heads=12,
        kv_heads=4,
        d_ff=512,
        logits_scale=1 / 6,
        router=RouterConfig(experts=64, top_k=6, balance=0.001),
        **_SIZES,
    ),
}
"""Published shape by name, and a small one for tests."""

_MIXER = StateSpaceFields()
_ROUTER = RouterFields("num_local_experts", experts=8, top_k=2)
_SHARED = "shared_intermediate_size"
_POSITIONS = "position_embedding_type"
_HARMLESS = ("layers_block_type", "mamba_chunk_size", "normalization_function", "init_method")


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    for name in _HARMLESS:
        fields.value(name)
    sizes = read_sizes(fields, d_ff=11_008)
    bias = fields.flag("attention_bias", default=False)
    attention_scale, factors = read_factors(fields)
    layers = sizes.pop("layers")
    default = [LINEAR] * layers
    known = (LINEAR, FULL, *EARLIER_KINDS)
    kinds = read_layer_types(fields, layers, default, known)
    kinds = [EARLIER_KINDS.get(kind, kind) for kind in kinds]
    fields.only(_POSITIONS, "nope", "rope")
    rotary = None
    if fields.value(_POSITIONS) == "rope":
        rotary = Rotary()
    router = None
    if read_count(fields, "num_local_experts", 8):
        router = _ROUTER.read(fields)
    else:
        fields.value(_ROUTER.top_k_name)
        fields.value(_ROUTER.balance_name)
    return fields.build(
        granite_hybrid,
        kinds=kinds,
        mixer=_MIXER.read(fields, sizes["d_model"]),
        shared_d_ff=fields.integer(_SHARED, 1024),
        attention=AttentionSpec(rotary=rotary, scale=attention_scale, qkv_bias=bias, out_bias=bias),
        router=router,
        **sizes,
        **factors,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    router = {"num_local_experts": 0}
    if config.router is not None:
        router = _ROUTER.write(config.router)
    attention = attention_of(config)
    positions = None
    if attention.rotary is not None:
        positions = "rope"
    return {
        "model_type": "granitemoehybrid",
        **write_sizes(config),
        **write_factors(config, attention),
        **router,
        **_MIXER.write(config),
        "layer_types": mixer_kinds(config),
        "attention_bias": attention.qkv_bias,
        _POSITIONS: positions,
        _SHARED: _shared_of(config),
    }


def _shared_of(config: DecoderConfig) -> int:
    """Return the width of the shared expert, or of the MLP without routed ones."""
    mlp = config.pattern.group[0].mlp
    if isinstance(mlp, MLPSpec):
        return mlp.d_ff
    if isinstance(mlp, ExpertsSpec) and mlp.shared_d_ff:
        return mlp.shared_d_ff
    raise MissingPartError("the layers have neither an MLP nor a shared expert")


def _names(config: DecoderConfig) -> TensorNames:
    layer = NAMES | fused_names(GATE_UP, "shared_mlp.input_linear", 2)
    layer |= module_names({"mlp/down_proj": "shared_mlp.output_linear"})
    return TensorNames(layer | state_space_names(config, "mamba"), ENDS)


FAMILY = decoder_family(
    "GraniteMoeHybridForCausalLM", _read, _write, names=_names, harmless=_HARMLESS
)
