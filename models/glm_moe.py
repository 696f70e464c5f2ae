"""GLM-4.5: many small experts beside a shared one, chosen with biases (arXiv:2508.06471).

GLM-4.7-Flash (`glm4_moe_lite`) has latent attention.

```python
config = dataclasses.replace(PRESETS["glm-4.5-air"], layers=4, predict_ahead=1)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.layers.router import RouterConfig
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    ExpertsSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    Rotary,
)
from spmd.models.decoder.layer import Mixer
from spmd.models.decoder.rotary import RopeScaling
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.experts import (
    CHOICE_BIASES,
    DENSE,
    RouterFields,
    dense_first,
    expert_names,
    experts_of,
    experts_table,
    mlp_kinds,
    read_count,
    read_dense_first,
    read_mlp_types,
    read_shared_experts,
    write_shared_experts,
)
from spmd.models.published.family import ENDS, TensorNames, decoder_family, layer_names
from spmd.models.published.latent_attention import (
    latent_names,
    latent_sizes,
    read_latent_attention,
    write_latent_sizes,
)
from spmd.models.published.multi_token import AHEAD, AHEAD_NAMES, with_stored_ahead
from spmd.models.published.rotary import read_rotary, write_rotary

_HALF = Rotary(10_000.0, RopeScaling(), fraction=0.5)
_LATENT = LatentAttentionSpec(q_rank=768, nope_dim=192, value_dim=256)
_TINY = LatentAttentionSpec(q_rank=16, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=6)


def glm_moe(
    *shape: Any, mixer: Mixer, dense_d_ff: int, dense: int = 1, **fields: Any
) -> DecoderConfig:
    """Return the config of a GLM with experts, from fields of `DecoderConfig`.

    Args:
        *shape: Its fields from `vocab` to `d_ff`, the width of an expert and of the shared one.
        mixer: Attention.
        dense_d_ff: Hidden width of an MLP in place of experts.
        dense: First layers with such an MLP.
        **fields: Other fields.
    """
    layers, d_ff = shape[2], shape[5]
    experts = ExpertsSpec(shared_d_ff=d_ff)
    layer = LayerSpec(mixer, experts)
    kinds = dense_first(dense, layers)
    table = experts_table(layer, MLPSpec(dense_d_ff), kinds)
    return DecoderConfig(*shape, **{"norm_eps": 1e-5} | table | fields)


def _router(experts: int, top_k: int = 8, scale: float = 1.0) -> RouterConfig:
    changes: dict[str, Any] = {
        "experts": experts,
        "top_k": top_k,
        "scale": scale,
        "bias_rate": 1e-3,
    }
    return dataclasses.replace(CHOICE_BIASES, **changes)


def _attention(*, normed: bool = False) -> AttentionSpec:
    mixer = AttentionSpec(rotary=Rotary(fraction=0.5), qkv_bias=True)
    if normed:
        return dataclasses.replace(mixer, qk_norm="head")
    return mixer


PRESETS = {
    "test-glm4-moe": glm_moe(
        *(64, 32, 3, 4, 2, 16), mixer=_attention(), dense_d_ff=48, router=_router(8, top_k=2)
    ),
    "test-glm4-moe-lite": glm_moe(
        *(64, 32, 3, 4, 4, 16), mixer=_TINY, dense_d_ff=48, router=_router(8, top_k=2)
    ),
    "glm-4.5-air": glm_moe(
        *(151_552, 4096, 46, 96, 8, 1408),
        mixer=_attention(),
        dense_d_ff=10_944,
        head_dim=128,
        rope_theta=1e6,
        router=_router(128),
    ),
    "glm-4.5": glm_moe(
        *(151_552, 5120, 92, 96, 8, 1536),
        mixer=_attention(normed=True),
        dense_d_ff=12_288,
        dense=3,
        head_dim=128,
        rope_theta=1e6,
        router=_router(160, scale=2.5),
    ),
    "glm-4.7-flash": glm_moe(
        *(154_880, 2048, 47, 20, 20, 1536),
        head_dim=256,
        mixer=_LATENT,
        dense_d_ff=10_240,
        rope_theta=1e6,
        router=_router(64, top_k=4, scale=1.8),
    ),
}
"""Published shapes by name, without multi-token prediction, and small ones for tests."""

_LAYER = layer_names() | expert_names()
_NAMES = TensorNames(_LAYER, ENDS, ahead=AHEAD_NAMES)
_LITE_NAMES = TensorNames(_LAYER | latent_names(), ENDS, ahead=AHEAD_NAMES)
_ROUTER = RouterFields(
    "n_routed_experts",
    also=("num_local_experts",),
    experts=128,
    top_k=8,
    normalise=True,
    groups=(1, 1),
    scale=1.0,
    balance_name="",
    base=CHOICE_BIASES,
)
_LITE_ROUTER = dataclasses.replace(_ROUTER, experts=64, top_k=4, scale=1.8)


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5, theta=0, kv_heads=8)
    layers = sizes["layers"]
    experts = read_shared_experts(fields, d_ff=1408)
    layer = LayerSpec(_read_attention(fields), experts)
    dense = read_dense_first(fields, layers, 1)
    table = experts_table(layer, MLPSpec(), dense_first(dense, layers))
    sizes["predict_ahead"] = read_count(fields, AHEAD, 0)
    sizes["router"] = _ROUTER.read(fields)
    return fields.build(DecoderConfig, **sizes, **table)


def _read_attention(fields: Fields) -> AttentionSpec:
    """Parse the options of softmax attention."""
    rotary = read_rotary(fields, _HALF)
    bias = fields.flag("attention_bias", default=False)
    mixer = AttentionSpec(rotary=rotary, qkv_bias=bias)
    if fields.flag("use_qk_norm", default=False):
        return dataclasses.replace(mixer, qk_norm="head")
    return mixer


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, _, router = experts_of(config)
    mixer = layer.attention
    fields = write_sizes(config)
    fields |= write_rotary(mixer.rotary or _HALF, complete=True)
    fields |= write_shared_experts(config)
    fields |= _ROUTER.write(router)
    fields["attention_bias"] = mixer.qkv_bias
    fields["use_qk_norm"] = mixer.qk_norm == "head"
    fields["first_k_dense_replace"] = mlp_kinds(config).count(DENSE)
    fields[AHEAD] = config.predict_ahead
    fields["model_type"] = "glm4_moe"
    return fields


def _read_lite(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5)
    layers = sizes["layers"]
    mixer = read_latent_attention(fields, sizes, _LATENT, may_interleave=True)
    experts = read_shared_experts(fields, d_ff=1536)
    layer = LayerSpec(mixer, experts)
    kinds = read_mlp_types(fields, layers, dense_first(1, layers))
    fields.only("first_k_dense_replace", kinds.count(DENSE))
    table = experts_table(layer, MLPSpec(), kinds)
    sizes = latent_sizes(sizes, mixer)
    sizes["predict_ahead"] = read_count(fields, AHEAD, 0)
    sizes["router"] = _LITE_ROUTER.read(fields)
    return fields.build(DecoderConfig, **sizes, **table)


def _write_lite(config: DecoderConfig) -> dict[str, Any]:
    _, _, router = experts_of(config)
    fields = write_latent_sizes(config, may_interleave=True)
    fields |= write_shared_experts(config)
    fields |= _LITE_ROUTER.write(router)
    fields["mlp_layer_types"] = mlp_kinds(config)
    fields[AHEAD] = config.predict_ahead
    fields["model_type"] = "glm4_moe_lite"
    return fields


FAMILY = decoder_family(
    "Glm4MoeForCausalLM", _read, _write, names=_NAMES, for_tensors=with_stored_ahead
)
LITE_FAMILY = decoder_family(
    "Glm4MoeLiteForCausalLM",
    _read_lite,
    _write_lite,
    names=_LITE_NAMES,
    for_tensors=with_stored_ahead,
    secondary=True,
)
