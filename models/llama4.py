"""Llama 4, its text part: experts beside a shared one, and attention in chunks in three of four layers.

Source: config.json of huggingface.co/meta-llama/Llama-4-Scout-17B-16E (`text_config`). Every fourth
layer has no rotary positions: it attends to all preceding tokens, and its queries grow with their
position. The weight of an expert multiplies its input.

```python
config = dataclasses.replace(PRESETS["llama4-scout"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import EXPERTS, part
from spmd.layers.router import RouterConfig
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    ExpertsSpec,
    LayerSpec,
    Llama3Scaling,
    MLPSpec,
    NormSpec,
    RopeScaling,
    Rotary,
    Temperature,
)
from spmd.models.published.common_fields import read_network_rotary, read_sizes, write_sizes
from spmd.models.published.experts import (
    DENSE,
    SPARSE,
    RouterFields,
    expert_names,
    experts_of,
    mlp_kinds,
    with_dense_mlps,
)
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.layer_types import (
    FULL,
    every,
    read_layer_types,
    read_rotated,
    rotated_layers,
    table_of,
)
from spmd.models.published.tensor_names import module_names
from spmd.models.published.text_config import (
    earlier_names,
    ignored_images,
    text_values,
)

CHUNKED = "chunked_attention"
"""Kind of a layer with attention in chunks, as in `layer_types`."""

_CHUNK = 8192
_ROTARY = Rotary(5e5, RopeScaling())
_TEMPERATURE = Temperature(0.1, interval=8192, offset=1)
_ROUTER = RouterFields(
    "num_local_experts",
    experts=16,
    top_k=1,
    base=RouterConfig(score="sigmoid", normalise=False, weight_on="input"),
)


def attention(
    *, rotated: bool, chunk: int = 0, has_norms: bool = True, temperature: Temperature | None = None
) -> AttentionSpec:
    """Return the mixer of a layer.

    Args:
        rotated: Whether it has rotary positions.
        chunk: Tokens of a chunk; 0 for none.
        has_norms: Normalise queries and keys of a layer with rotary positions (`use_qk_norm`).
        temperature: Factor of queries of a layer without rotary positions.
    """
    if not rotated:
        return AttentionSpec(rotary=None, chunk=chunk, temperature=temperature)
    mixer = AttentionSpec(rotary=Rotary(interleaved=True), chunk=chunk)
    if not has_norms:
        return mixer
    norm = NormSpec(scale=False)
    return dataclasses.replace(mixer, qk_norm="head", qk_norm_kind=norm, qk_norm_after=True)


def llama4(
    mixers: Sequence[AttentionSpec],
    *,
    d_ff: int,
    dense_d_ff: int = 0,
    kinds: Sequence[str] = (),
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a Llama 4, from fields of `DecoderConfig`.

    Args:
        mixers: The mixer of each layer.
        d_ff: Hidden width of an expert and of the shared one.
        dense_d_ff: Hidden width of an MLP in place of experts.
        kinds: The kind of each layer's MLP, as in `mlp_layer_types`; by default all have experts.
        **fields: Other fields.
    """
    kinds = kinds or [SPARSE] * len(mixers)
    experts = ExpertsSpec(shared_d_ff=d_ff)
    layers = [LayerSpec(mixer, experts) for mixer in mixers]
    table = table_of(with_dense_mlps(layers, MLPSpec(dense_d_ff), kinds))
    defaults: dict[str, Any] = {"layers": len(mixers), "rope_theta": _ROTARY.theta}
    return DecoderConfig(d_ff=d_ff, **defaults | table | fields)


def _mixers(layers: int, *, has_norms: bool = True, **sizes: Any) -> list[AttentionSpec]:
    """Return the mixers of layers, with the fourth of each four without positions."""
    chunk = sizes.get("chunk", _CHUNK)
    of_kind = {
        "rotated": attention(rotated=True, chunk=chunk, has_norms=has_norms),
        "not": attention(rotated=False, temperature=sizes.get("temperature", _TEMPERATURE)),
    }
    return [of_kind[kind] for kind in every(4, layers, "rotated", "not")]


def _router(experts: int) -> RouterConfig:
    return dataclasses.replace(_ROUTER.base, experts=experts, top_k=1, balance=0.001)


_SIZES: dict[str, Any] = {
    **{"vocab": 202_048, "d_model": 5120, "heads": 40, "kv_heads": 8, "d_ff": 8192},
    "head_dim": 128,
}

PRESETS = {
    "test-llama4": llama4(
        _mixers(4, chunk=5, temperature=Temperature(0.1, interval=6, offset=1)),
        vocab=64,
        d_model=32,
        d_ff=16,
        router=_router(4),
    ),
    "llama4-scout": llama4(
        _mixers(48),
        **_SIZES,
        rope_scaling=Llama3Scaling(16.0, high_frequency_factor=1.0),
        router=_router(16),
    ),
    "llama4-maverick": llama4(
        _mixers(48, has_norms=False),
        **_SIZES,
        dense_d_ff=16_384,
        kinds=every(2, 48, DENSE, SPARSE),
        router=_router(128),
    ),
}
"""Published shapes by name, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(text_values(values, _OF_IMAGES))
    fields.only("for_llm_compressor", False)
    sizes = read_sizes(fields, eps=1e-5, theta=0, head_dim=128, kv_heads=8)
    positions = read_network_rotary(fields, _ROTARY)
    layers = sizes.pop("layers")
    fields.value("router_jitter_noise")  # has no effect
    return fields.build(
        llama4,
        **sizes,
        **positions,
        mixers=_read_mixers(fields, layers),
        kinds=_read_mlp_kinds(fields, layers),
        dense_d_ff=fields.integer("intermediate_size_mlp", 16_384),
        router=_ROUTER.read(fields),
    )


def _read_mixers(fields: Fields, layers: int) -> list[AttentionSpec]:
    """Parse the mixers of all layers."""
    rotated = read_rotated(fields, layers, empty_is_absent=True)
    chunk = 0
    if not fields.is_null("attention_chunk_size"):
        chunk = fields.integer("attention_chunk_size", _CHUNK)
    default = [_kind(is_rotated and chunk > 0) for is_rotated in rotated]
    kinds = read_layer_types(fields, layers, default, known=(FULL, CHUNKED))
    if CHUNKED in kinds and not chunk:
        fields.refuse("attention_chunk_size", f"is null, and layers are of kind {CHUNKED}")
    bias = fields.flag("attention_bias", default=False)
    has_norms = fields.flag("use_qk_norm", default=True)
    temperature = _read_temperature(fields)
    mixers = []
    for kind, is_rotated in zip(kinds, rotated, strict=True):
        mixer = attention(
            rotated=is_rotated,
            chunk=chunk * (kind == CHUNKED),
            has_norms=has_norms,
            temperature=temperature,
        )
        mixers.append(dataclasses.replace(mixer, qkv_bias=bias, out_bias=bias))
    return mixers


def _kind(is_chunked: bool) -> str:
    """Return the kind of a layer, as in `layer_types`."""
    if is_chunked:
        return CHUNKED
    return FULL


def _read_temperature(fields: Fields) -> Temperature | None:
    """Parse the factor of queries of layers without rotary positions."""
    strength = fields.number("attn_scale", _TEMPERATURE.strength)
    interval = fields.integer("floor_scale", _TEMPERATURE.interval)
    if not fields.flag("attn_temperature_tuning", default=True):
        return None
    return fields.nested(Temperature, strength=strength, interval=interval, offset=1)


def _read_mlp_kinds(fields: Fields, layers: int) -> list[str]:
    """Parse `moe_layers`, or the interval of layers with experts; return each MLP's kind."""
    step = fields.integer("interleave_moe_layer_step", 1)
    sparse = fields.value("moe_layers", [*range(step - 1, layers, step)])
    numbers = range(layers)
    if not isinstance(sparse, list) or not sparse or not set(sparse) <= {*numbers}:
        fields.refuse("moe_layers", "is no list of the numbers of some layers")
        sparse = [*numbers]
    kinds = [DENSE] * layers
    for number in sparse:
        kinds[number] = SPARSE
    return kinds


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, _, router = experts_of(config)
    mixers = [spec.attention for spec in config.pattern.distinct]
    kinds = [_kind(spec.attention.chunk > 0) for spec in config.pattern.kinds]
    sparse = [number for number, kind in enumerate(mlp_kinds(config)) if kind == SPARSE]
    dense = [spec.mlp.d_ff for spec in config.pattern.distinct if isinstance(spec.mlp, MLPSpec)]
    temperatures = [mixer.temperature for mixer in mixers if mixer.temperature is not None]
    temperature = [*temperatures, _TEMPERATURE][0]
    return {
        "model_type": "llama4_text",
        **write_sizes(config),
        **_ROUTER.write(router),
        "intermediate_size_mlp": [*dense, config.d_ff][0],
        "moe_layers": sparse,
        "layer_types": kinds,
        "no_rope_layers": [int(is_rotated) for is_rotated in rotated_layers(config)],
        "attention_chunk_size": max(mixer.chunk for mixer in mixers) or _CHUNK,
        "use_qk_norm": any(mixer.qk_norm == "head" for mixer in mixers),
        "attn_temperature_tuning": bool(temperatures),
        "attn_scale": temperature.strength,
        "floor_scale": temperature.interval,
        "attention_bias": layer.attention.qkv_bias,
    }


_BLOCK = "feed_forward."
_NAMES = layer_names() | expert_names(_BLOCK, router="router", shared="shared_expert")
_NAMES |= module_names(
    {f"mlp/{name}": _BLOCK + name for name in ("gate_proj", "up_proj", "down_proj")}
)
_NAMES |= {
    "moe/experts/gate_proj/kernel": (_BLOCK + "experts.gate_up_proj", part(0, 2, layout=EXPERTS)),
    "moe/experts/up_proj/kernel": (_BLOCK + "experts.gate_up_proj", part(1, 2, layout=EXPERTS)),
    "moe/experts/down_proj/kernel": (_BLOCK + "experts.down_proj", EXPERTS),
}
_OF_IMAGES = ("vision_config", "boi_token_index", "eoi_token_index", "image_token_index")
"""Fields of images and text, without effect on text."""


def _modules_of_images() -> list[str]:
    """Return the modules of images with weights, most with biases too."""
    layer = "vision_model.model.layers.{layer}."
    modules = [f"{layer}self_attn.{name}_proj" for name in "qkvo"]
    modules += [f"{layer}mlp.fc1", f"{layer}mlp.fc2"]
    modules += [f"{layer}input_layernorm", f"{layer}post_attention_layernorm"]
    modules += ["vision_model.layernorm_pre", "vision_model.layernorm_post"]
    modules += [f"vision_model.vision_adapter.mlp.fc{number}" for number in (1, 2)]
    return [*modules, "vision_model.patch_embedding.linear", "multi_modal_projector.linear_1"]


_OTHERS_OF_IMAGES = ("vision_model.class_embedding", "vision_model.positional_embedding_vlm")


FAMILY = decoder_family(
    ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    _read,
    _write,
    _NAMES,
    other_names=(earlier_names(_NAMES),),
    ignored=ignored_images(_modules_of_images(), _OTHERS_OF_IMAGES),
)
