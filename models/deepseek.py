"""DeepSeek-V2 and V3: latent attention, and many small experts beside shared ones.

Sources: arXiv:2405.04434 for V2, arXiv:2412.19437 for V3; Kimi K2 (arXiv:2507.20534) is a V3 of
other sizes. V3 chooses experts by biases, which balance their load in place of a loss, and may
predict more tokens than the next one (`DecoderConfig.predict_ahead`).

```python
config = dataclasses.replace(PRESETS["deepseek-v3"], layers=6, predict_ahead=1)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS, TRANSPOSED
from spmd.layers.router import RouterConfig
from spmd.models.decoder import (
    DecoderConfig,
    ExpertsSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    Rotary,
    YarnScaling,
)
from spmd.models.decoder.published import (
    ENDS,
    TensorNames,
    decoder_family,
    layer_names,
    read_sizes,
    write_sizes,
)
from spmd.models.decoder.published_names import Names

V2_ROUTER = RouterConfig(
    experts=160,
    top_k=6,
    normalise=False,
    groups=8,
    top_groups=3,
    group_score="max",
    scale=16.0,
    balance=0.003,
    balance_over="example",
)
"""DeepSeek-V2, section 2.2: experts of the three groups with the best expert, a loss for each
sequence."""
V3_ROUTER = RouterConfig(
    experts=256,
    top_k=8,
    score="sigmoid",
    normalise_eps=1e-20,
    groups=8,
    top_groups=4,
    scale=2.5,
    choice_bias=True,
    bias_rate=1e-3,
    balance=1e-4,
    balance_over="example",
)
"""DeepSeek-V3, sections 2.1.2 and 4.2: balanced by biases, with a small loss for each sequence."""

_MIXER = LatentAttentionSpec(q_rank=1536)


def deepseek(
    *,
    heads: int,
    d_ff: int,
    dense_d_ff: int,
    dense_layers: int = 1,
    shared: int = 1,
    mixer: LatentAttentionSpec = _MIXER,
    norm_eps: float = 1e-6,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a decoder, from fields of `DecoderConfig`.

    Args:
        heads: Heads of attention.
        d_ff: Hidden width of an expert.
        dense_d_ff: Hidden width of an MLP in place of experts.
        dense_layers: First layers with such an MLP.
        shared: Experts that every token uses.
        mixer: Latent attention.
        norm_eps: As in `DecoderConfig`.
        **fields: Its other fields.
    """
    dense = LayerSpec(mixer, MLPSpec(dense_d_ff), name="dense_layers")
    return DecoderConfig(
        heads=heads,
        kv_heads=heads,
        head_dim=mixer.key_dim,
        d_ff=d_ff,
        norm_eps=norm_eps,
        layer=LayerSpec(mixer, ExpertsSpec(shared_d_ff=shared * d_ff)),
        first=(dense,) * dense_layers,
        **fields,
    )


_TINY = LatentAttentionSpec(q_rank=16, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=6)
_V2_SCALING = YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
_V3_SCALING = YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
_K2_SCALING = YarnScaling(32.0, 4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0)

PRESETS = {
    "test-deepseek": deepseek(
        vocab=64,
        d_model=32,
        layers=3,
        heads=4,
        d_ff=16,
        dense_d_ff=48,
        mixer=_TINY,
        router=dataclasses.replace(V3_ROUTER, experts=8, top_k=2, groups=4, top_groups=2),
    ),
    "deepseek-v2-lite": deepseek(
        vocab=102_400,
        d_model=2048,
        layers=27,
        heads=16,
        d_ff=1408,
        dense_d_ff=10_944,
        shared=2,
        mixer=LatentAttentionSpec(),
        rope_scaling=_V2_SCALING,
        router=RouterConfig(
            experts=64, top_k=6, normalise=False, balance=0.001, balance_over="example"
        ),
    ),
    "deepseek-v2": deepseek(
        vocab=102_400,
        d_model=5120,
        layers=60,
        heads=128,
        d_ff=1536,
        dense_d_ff=12_288,
        shared=2,
        rope_scaling=_V2_SCALING,
        router=V2_ROUTER,
    ),
    "deepseek-v3": deepseek(
        vocab=129_280,
        d_model=7168,
        layers=61,
        heads=128,
        d_ff=2048,
        dense_d_ff=18_432,
        dense_layers=3,
        rope_scaling=_V3_SCALING,
        router=V3_ROUTER,
    ),
    "kimi-k2": deepseek(
        vocab=163_840,
        d_model=7168,
        layers=61,
        heads=64,
        d_ff=2048,
        dense_d_ff=18_432,
        rope_theta=5e4,
        rope_scaling=_K2_SCALING,
        router=dataclasses.replace(V3_ROUTER, experts=384, groups=1, top_groups=1, scale=2.827),
    ),
}
"""Published shapes by name, without multi-token prediction, and a small one for tests."""

_KERNELS = {
    "attention/q_a_proj": "self_attn.q_a_proj",
    "attention/q_b_proj": "self_attn.q_b_proj",
    "attention/kv_a_proj": "self_attn.kv_a_proj_with_mqa",
    "attention/kv_b_proj": "self_attn.kv_b_proj",
    "moe/router": "mlp.gate",
    "moe/experts/gate_proj": "mlp.experts.{expert}.gate_proj",
    "moe/experts/up_proj": "mlp.experts.{expert}.up_proj",
    "moe/experts/down_proj": "mlp.experts.{expert}.down_proj",
    "moe/shared/gate_proj": "mlp.shared_experts.gate_proj",
    "moe/shared/up_proj": "mlp.shared_experts.up_proj",
    "moe/shared/down_proj": "mlp.shared_experts.down_proj",
}
_VECTORS = {
    "attention/q_a_proj/bias": "self_attn.q_a_proj.bias",
    "attention/kv_a_proj/bias": "self_attn.kv_a_proj_with_mqa.bias",
    "attention/q_a_norm/scale": "self_attn.q_a_layernorm.weight",
    "attention/kv_a_norm/scale": "self_attn.kv_a_layernorm.weight",
    "moe/router/bias": "mlp.gate.e_score_correction_bias",
}
_LAYER = layer_names()
_LAYER |= {f"{ours}/kernel": (f"{theirs}.weight", TRANSPOSED) for ours, theirs in _KERNELS.items()}
_LAYER |= {ours: (theirs, AS_IS) for ours, theirs in _VECTORS.items()}
_AHEAD: Names = {
    "embed_norm/scale": ("enorm.weight", AS_IS),
    "hidden_norm/scale": ("hnorm.weight", AS_IS),
    "proj/kernel": ("eh_proj.weight", TRANSPOSED),
    "norm/scale": ("shared_head.norm.weight", AS_IS),
}
_NAMES = TensorNames(_LAYER, ENDS, ahead=_AHEAD)
_HARMLESS = ("ep_size", "seq_aux")


@dataclasses.dataclass(frozen=True)
class _Defaults:
    """Fields that a config.json may lack: defaults of the classes in `transformers`."""

    experts: int
    d_ff: int
    shared: int
    scale: float
    dense: int


_V2 = _Defaults(experts=64, d_ff=1407, shared=2, scale=1.0, dense=0)
_V3 = _Defaults(experts=256, d_ff=2048, shared=1, scale=2.5, dense=3)


def _read_v2(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    fields.only("norm_topk_prob", False)
    fields.only("scoring_func", "softmax")
    fields.only("topk_method", "greedy", "group_limited_greedy")
    router: dict[str, Any] = {"normalise": False}
    router["top_k"] = fields.integer("num_experts_per_tok")
    if fields.value("topk_method") == "group_limited_greedy":
        router |= _read_groups(fields, None, None)
        if router["groups"] != router["top_groups"]:
            router["group_score"] = "max"
    for name in ("n_group", "topk_group"):
        fields.value(name)  # unused by "greedy"
    router["balance"] = fields.number("aux_loss_alpha", 0.001, least=0)
    return _read(fields, _V2, router, Rotary(interleaved=True))


def _read_v3(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    router = {"score": "sigmoid", "choice_bias": True, **_read_groups(fields, 8, 4)}
    router["top_k"] = fields.integer("num_experts_per_tok", 8)
    router["normalise"] = fields.flag("norm_topk_prob", True)
    if router["normalise"]:
        router["normalise_eps"] = 1e-20
    router["balance"] = fields.number("aux_loss_alpha", 1e-4, least=0)
    rotary = Rotary(interleaved=fields.flag("rope_interleave", True))
    return _read(fields, _V3, router, rotary)


def _read_groups(fields: Fields, groups: int | None, top_groups: int | None) -> dict[str, Any]:
    """Parse the groups of experts."""
    return {
        "groups": fields.integer("n_group", groups),
        "top_groups": fields.integer("topk_group", top_groups),
    }


def _read(
    fields: Fields, defaults: _Defaults, router: Mapping[str, Any], rotary: Rotary
) -> DecoderConfig:
    """Parse the fields of both versions."""
    sizes = read_sizes(fields)
    mixer = _read_mixer(fields, rotary)
    fields.only("head_dim", mixer.rope_dim)
    fields.only("qk_head_dim", mixer.key_dim)
    fields.only("num_key_value_heads", sizes["heads"])
    fields.only("moe_layer_freq", 1)
    for name in _HARMLESS:
        fields.value(name)
    if fields.is_null("n_routed_experts"):
        fields.refuse("n_routed_experts", "is null, and this model has experts")
    dense_layers = _count(fields, "first_k_dense_replace", defaults.dense)
    if dense_layers >= sizes["layers"]:
        fields.refuse("first_k_dense_replace", "leaves no layer with experts")
        dense_layers = sizes["layers"] - 1
    made = fields.nested(
        RouterConfig,
        experts=fields.integer("n_routed_experts", defaults.experts),
        scale=fields.number("routed_scaling_factor", defaults.scale),
        balance_over="example",
        **router,
    )
    for name in ("kv_heads", "head_dim"):
        del sizes[name]
    return fields.build(
        deepseek,
        **sizes
        | {
            "d_ff": fields.integer("moe_intermediate_size", defaults.d_ff),
            "dense_d_ff": sizes["d_ff"],
            "dense_layers": dense_layers,
            "shared": fields.integer("n_shared_experts", defaults.shared),
            "mixer": mixer,
            "router": made or RouterConfig(),
            "predict_ahead": _count(fields, "num_nextn_predict_layers", 0),
        },
    )


def _read_mixer(fields: Fields, rotary: Rotary) -> LatentAttentionSpec:
    """Parse the fields of latent attention; a null `q_lora_rank` is none."""
    q_rank = 0
    if not fields.is_null("q_lora_rank"):
        q_rank = fields.integer("q_lora_rank", 1536)
    return LatentAttentionSpec(
        q_rank=q_rank,
        kv_rank=fields.integer("kv_lora_rank", 512),
        nope_dim=fields.integer("qk_nope_head_dim", 128),
        rope_dim=fields.integer("qk_rope_head_dim", 64),
        value_dim=fields.integer("v_head_dim", 128),
        rotary=rotary,
        bias=fields.flag("attention_bias", False),
    )


def _count(fields: Fields, name: str, absent: int) -> int:
    """Parse a number that may be 0."""
    if fields.value(name) == 0:
        return 0
    if fields.value(name) is None:
        return absent
    return fields.integer(name)


def _write_v2(config: DecoderConfig) -> dict[str, Any]:
    _, _, router = _parts(config)
    method = "greedy"
    if router.groups > 1:
        method = "group_limited_greedy"
    return {
        "model_type": "deepseek_v2",
        **_write(config),
        "topk_method": method,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    }


def _write_v3(config: DecoderConfig) -> dict[str, Any]:
    mixer, _, router = _parts(config)
    return {
        "model_type": "deepseek_v3",
        **_write(config),
        "topk_method": "noaux_tc",
        "norm_topk_prob": router.normalise,
        "scoring_func": "sigmoid",
        "rope_interleave": mixer.rotary.interleaved,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of both versions: the inverse of `_read`."""
    mixer, experts, router = _parts(config)
    dense_d_ff = experts.d_ff
    for layer in config.pattern.first:
        if layer.mlp is not None:
            dense_d_ff = layer.mlp.d_ff
    return {
        **write_sizes(config),
        "num_key_value_heads": mixer.heads,
        "head_dim": mixer.rope_dim,
        "intermediate_size": dense_d_ff,
        "moe_intermediate_size": experts.d_ff,
        "first_k_dense_replace": len(config.first),
        "q_lora_rank": mixer.q_rank or None,
        "kv_lora_rank": mixer.kv_rank,
        "qk_nope_head_dim": mixer.nope_dim,
        "qk_rope_head_dim": mixer.rope_dim,
        "v_head_dim": mixer.value_dim,
        "attention_bias": mixer.bias,
        "n_routed_experts": router.experts,
        "n_shared_experts": experts.shared_d_ff // experts.d_ff,
        "num_experts_per_tok": router.top_k,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "routed_scaling_factor": router.scale,
        "aux_loss_alpha": router.balance,
        "num_nextn_predict_layers": config.predict_ahead,
    }


def _parts(config: DecoderConfig) -> tuple[LatentAttentionSpec, ExpertsSpec, RouterConfig]:
    """Return attention, experts and router of the repeated layers.

    Raises:
        AttributeError: They are of other kinds.
    """
    layer = config.pattern.group[-1]
    router = config.router
    if not isinstance(layer.mixer, LatentAttentionSpec):
        raise AttributeError("the layers have no latent attention")
    if not isinstance(layer.mlp, ExpertsSpec) or router is None:
        raise AttributeError("the layers have no experts")
    return layer.mixer, layer.mlp, router


def _with_stored_modules(config: DecoderConfig, tensors: Collection[str]) -> DecoderConfig:
    """Return the config without multi-token prediction if a checkpoint lacks its tensors.

    `transformers` drops them, and keeps the field of config.json.
    """
    prefix = f"model.layers.{config.layers}."
    if any(tensor.startswith(prefix) for tensor in tensors):
        return config
    return dataclasses.replace(config, predict_ahead=0)


_family = functools.partial(
    decoder_family, names=_NAMES, harmless=_HARMLESS, for_tensors=_with_stored_modules
)
V2_FAMILY = _family("DeepseekV2ForCausalLM", _read_v2, _write_v2)
V3_FAMILY = _family("DeepseekV3ForCausalLM", _read_v3, _write_v3)
