"""Qwen 3 Next and 3.5: gated delta nets in three of four layers, gated attention in the others.

Sources: arXiv:2412.06464 for gated delta nets, arXiv:2505.06708 for the gate of attention, and
config.json of huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, Qwen3.5-27B and Qwen3.5-35B-A3B. A
quarter of each head of attention is rotated; norms have a scale of 1 + w. Qwen 3 Next and some of
Qwen 3.5 have experts, with a shared one that has a gate. Of a Qwen 3.5 with images, the text part is
read.

```python
config = dataclasses.replace(PRESETS["qwen3-next-80b-a3b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.hf.family import Family
from spmd.hf.fields import Fields
from spmd.hf.layout import EXPERTS_TRANSPOSED, part
from spmd.layers.router import RouterConfig
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    ExpertsSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RopeScaling,
    Rotary,
)
from spmd.models.decoder.layer import Mixer
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.experts import (
    SPARSE,
    RouterFields,
    expert_names,
    experts_of,
    read_sparse_layers,
    with_dense_mlps,
    write_sparse_layers,
    write_widths,
)
from spmd.models.published.family import ENDS, TensorNames, decoder_family, layer_names
from spmd.models.published.gated_delta_net import (
    fused_delta_net_names,
    read_delta_net,
    write_delta_net,
)
from spmd.models.published.layer_types import (
    FULL,
    LINEAR,
    attention_of,
    every,
    read_layer_types,
    table_of,
)
from spmd.models.published.multi_token import ignored_ahead
from spmd.models.published.rotary import read_rotary
from spmd.models.published.tensor_names import Names, fused_names
from spmd.models.published.text_config import TEXT_PREFIX, ignored_images, text_values

_NET = GatedDeltaNetSpec(heads=32, key_heads=16)
_ROTARY = Rotary(1e4, RopeScaling(), 0.25)
_ATTENTION = AttentionSpec(qk_norm="head", gate="channel", rotary=Rotary(fraction=0.25))
_ROUTER = RouterConfig(experts=512, top_k=10, balance=0.001)


def qwen_next(
    kinds: Sequence[str],
    *,
    mlp_kinds: Sequence[str] = (),
    shared_d_ff: int = 0,
    dense_d_ff: int = 0,
    delta_net: GatedDeltaNetSpec = _NET,
    attention: AttentionSpec = _ATTENTION,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a Qwen 3 Next or 3.5 from fields of `DecoderConfig`.

    Args:
        kinds: The kind of each layer, as in config.json.
        mlp_kinds: `sparse` or `dense` for the MLP of each layer; empty for a model without experts.
        shared_d_ff: Hidden width of the shared expert.
        dense_d_ff: Hidden width of MLPs in a model with experts.
        delta_net: The mixer of layers of kind `linear_attention`.
        attention: The mixer of other layers.
        **fields: Other fields.
    """
    mixers: dict[str, Mixer] = {LINEAR: delta_net, FULL: attention}
    layers = [LayerSpec(mixers[kind]) for kind in kinds]
    if mlp_kinds:
        experts = ExpertsSpec(shared_d_ff=shared_d_ff, shared_gate=True)
        layers = [dataclasses.replace(layer, mlp=experts) for layer in layers]
        layers = with_dense_mlps(layers, MLPSpec(dense_d_ff), mlp_kinds)
        # Dense layers of both kinds may come first.
        layers = [dataclasses.replace(layer, name="") for layer in layers]
    defaults: dict[str, Any] = {
        "norm_eps": 1e-6,
        "norm": NormSpec(offset=1.0),
        "rope_theta": 1e7,
        "layers": len(kinds),
    }
    return DecoderConfig(**defaults | table_of(layers) | fields)


def kinds_of(layers: int, interval: int = 4) -> list[str]:
    """Return the kinds of layers, with attention in the last one of each interval."""
    return every(interval, layers, LINEAR, FULL)


_TINY = GatedDeltaNetSpec(heads=4, key_heads=2, key_dim=8, value_dim=6)

PRESETS = {
    "test-qwen3.5": qwen_next(
        kinds_of(8), delta_net=_TINY, vocab=64, d_model=32, d_ff=48, head_dim=16
    ),
    "test-qwen3-next": qwen_next(
        kinds_of(8),
        mlp_kinds=[SPARSE] * 8,
        shared_d_ff=24,
        dense_d_ff=48,
        delta_net=_TINY,
        vocab=64,
        d_model=32,
        d_ff=16,
        head_dim=16,
        router=RouterConfig(experts=4, top_k=2, balance=0.001),
    ),
    "qwen3-next-80b-a3b": qwen_next(
        kinds_of(48),
        mlp_kinds=[SPARSE] * 48,
        shared_d_ff=512,
        dense_d_ff=5120,
        vocab=151_936,
        d_model=2048,
        heads=16,
        kv_heads=2,
        d_ff=512,
        head_dim=256,
        router=_ROUTER,
    ),
}
"""Published shape by name, and small ones for tests."""

_OF_IMAGES = (
    "image_token_id",
    "language_model_only",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
)
_IGNORED_AHEAD = ignored_ahead(
    layer_names() | expert_names(shared="shared_expert"),
    *("mlp.experts.down_proj", "mlp.experts.gate_up_proj"),
)
"""Tensors of multi-token prediction, with experts in tensors of their own or in one tensor."""
_REQUIRED = {
    "attn_output_gate": True,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "output_gate_type": "swish",
}
"""Fields of published files of Qwen 3.5, each with the value that the model needs."""
_UNUSED = ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
"""Fields of published files about kernels and multi-token prediction."""
_ALSO = ("mrope_section", "mrope_interleaved")
"""Entries of rotary positions of images, which text does not have."""


def _read_dense(values: Mapping[str, Any]) -> DecoderConfig:
    fields = _fields_of_3_5(values)
    return fields.build(qwen_next, **_read(fields, kv_heads=4, d_ff=12_288))


def _fields_of_3_5(values: Mapping[str, Any]) -> Fields:
    """Return the fields of the decoder of a Qwen 3.5; required values are checked."""
    fields = Fields(text_values(values, _OF_IMAGES))
    for name, value in _REQUIRED.items():
        fields.only(name, value)
    for name in _UNUSED:
        fields.value(name)
    return fields


def _read_experts(
    values: Mapping[str, Any], *, router: RouterFields, chooses_layers: bool
) -> DecoderConfig:
    """Parse a model with experts; `chooses_layers` is whether some layers may have MLPs."""
    fields = Fields(values)
    if not chooses_layers:
        fields = _fields_of_3_5(values)
    read = _read(fields, kv_heads=2, d_ff=5632)
    dense_d_ff = read.pop("d_ff")
    mlp_kinds = [SPARSE] * len(read["kinds"])
    if chooses_layers:
        mlp_kinds = read_sparse_layers(fields, len(mlp_kinds))
    return fields.build(
        qwen_next,
        **read,
        mlp_kinds=mlp_kinds,
        d_ff=fields.integer("moe_intermediate_size", 512),
        dense_d_ff=dense_d_ff,
        shared_d_ff=fields.integer("shared_expert_intermediate_size", 512),
        router=router.read(fields),
    )


def _read(fields: Fields, kv_heads: int, d_ff: int) -> dict[str, Any]:
    """Parse the fields of all versions, as arguments of `qwen_next`.

    `kv_heads` and `d_ff` are values of absent fields.
    """
    sizes = read_sizes(fields, theta=0, head_dim=256, kv_heads=kv_heads, d_ff=d_ff)
    rotary = read_rotary(fields, _ROTARY, also=_ALSO)
    bias = fields.flag("attention_bias", False)
    layers = sizes.pop("layers")
    default = kinds_of(layers, fields.integer("full_attention_interval", 4))
    kinds = read_layer_types(fields, layers, default, known=(FULL, LINEAR))
    if LINEAR not in kinds:
        fields.refuse("layer_types", f"has no layer of kind {LINEAR}")
    attention = dataclasses.replace(
        _ATTENTION, rotary=rotary, qkv_bias=bias, out_bias=bias, gate_bias=bias
    )
    return {
        **sizes,
        "kinds": kinds,
        "delta_net": read_delta_net(fields, _NET),
        "attention": attention,
    }


def _write_dense(config: DecoderConfig) -> dict[str, Any]:
    fields = _write(config)
    fields["model_type"] = "qwen3_5_text"
    return fields


def _write_experts(
    config: DecoderConfig, *, kind: str, router: RouterFields, chooses_layers: bool
) -> dict[str, Any]:
    _, experts, routing = experts_of(config)
    fields = _write(config)
    fields |= write_widths(config)
    fields |= router.write(routing)
    fields["model_type"] = kind
    fields["shared_expert_intermediate_size"] = experts.shared_d_ff
    if chooses_layers:
        fields |= write_sparse_layers(config)
    return fields


def _write(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of all versions: the inverse of `_read`."""
    attention = attention_of(config, _ATTENTION)
    rotary = attention.rotary or _ROTARY
    fields = write_sizes(config, rotary=rotary)
    fields |= write_delta_net(config)
    fields["partial_rotary_factor"] = rotary.fraction
    fields["attention_bias"] = attention.qkv_bias
    return fields


def _layer_names(config: DecoderConfig, *, by_head: bool) -> Names:
    """Return the tensors of a layer, with those of gated attention and of experts."""
    layer = layer_names() | expert_names(shared="shared_expert")
    layer |= fused_delta_net_names(config, by_head=by_head)
    halves = ("attention/q_proj", "attention/g_proj")
    heads = attention_of(config, _ATTENTION).heads
    return layer | fused_names(halves, "self_attn.q_proj", 2, groups=heads)


def _names(config: DecoderConfig, *, by_head: bool) -> TensorNames:
    return TensorNames(_layer_names(config, by_head=by_head), ENDS)


def _with_images(config: DecoderConfig) -> TensorNames:
    """Return the names in a model of images and text."""
    return TensorNames(_layer_names(config, by_head=False), ENDS, TEXT_PREFIX)


def _fused_experts(config: DecoderConfig, prefix: str) -> TensorNames:
    """Return the names in a file with all experts of a layer in one tensor."""
    into = "mlp.experts.gate_up_proj"
    layer = _layer_names(config, by_head=False)
    layer |= {
        "moe/experts/gate_proj/kernel": (into, part(0, 2, layout=EXPERTS_TRANSPOSED)),
        "moe/experts/up_proj/kernel": (into, part(1, 2, layout=EXPERTS_TRANSPOSED)),
        "moe/experts/down_proj/kernel": ("mlp.experts.down_proj", EXPERTS_TRANSPOSED),
    }
    return TensorNames(layer, ENDS, prefix)


def _modules_of_images() -> list[str]:
    """Return the modules of images, with weights and biases."""
    modules = ["patch_embed.proj"]
    for name in ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2", "norm1", "norm2"):
        modules.append(f"blocks.{{layer}}.{name}")
    for name in ("linear_fc1", "linear_fc2", "norm"):
        modules.append(f"merger.{name}")
    return [f"model.visual.{module}" for module in modules]


def _family_with_experts(
    architecture: str | tuple[str, ...], kind: str, router: RouterFields, *, is_next: bool
) -> Family:
    """Return a family with experts; `is_next` is whether it is Qwen 3 Next, not 3.5."""
    others: dict[str, Any] = {"ignored": _IGNORED_AHEAD}
    if not is_next:
        others = _OF_3_5
    options: dict[str, Any] = {"router": router, "chooses_layers": is_next}
    return decoder_family(
        architecture,
        functools.partial(_read_experts, **options),
        functools.partial(_write_experts, kind=kind, **options),
        names=functools.partial(_names, by_head=is_next),
        secondary=not is_next,
        **others,
    )


_OF_3_5: dict[str, Any] = {
    "ignored": (
        *_IGNORED_AHEAD,
        *ignored_images(_modules_of_images(), ["model.visual.pos_embed.weight"]),
    ),
    "other_names": (
        _with_images,
        functools.partial(_fused_experts, prefix=TEXT_PREFIX),
        functools.partial(_fused_experts, prefix="model."),
    ),
}
QWEN3_5_FAMILY = decoder_family(
    ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    _read_dense,
    _write_dense,
    names=functools.partial(_names, by_head=False),
    **_OF_3_5,
)
QWEN3_5_MOE_FAMILY = _family_with_experts(
    ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    "qwen3_5_moe_text",
    RouterFields("num_experts", experts=256, top_k=8),
    is_next=False,
)
QWEN3_NEXT_FAMILY = _family_with_experts(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    RouterFields("num_experts", experts=512, top_k=10, normalise=True),
    is_next=True,
)
