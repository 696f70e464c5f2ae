"""DBRX: clipped queries, keys and values, LayerNorm, and experts below each other in one tensor.

Source: huggingface.co/databricks/dbrx-base.

```python
config = dataclasses.replace(PRESETS["dbrx"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS, TensorLayout
from spmd.layers.router import RouterConfig
from spmd.models.decoder import AttentionSpec, DecoderConfig, ExpertsSpec, LayerSpec, NormSpec
from spmd.models.decoder.rotary import RopeScaling, Rotary
from spmd.models.published.common_fields import read_clip
from spmd.models.published.experts import RouterFields, experts_of
from spmd.models.published.family import TensorNames, decoder_family
from spmd.models.published.layer_types import limit_layers
from spmd.models.published.rotary import read_rotary, write_rotary
from spmd.models.published.tensor_names import QKV, Names, fused_names, module_names

_NORM = NormSpec("layer")
_LAYER = LayerSpec(AttentionSpec(clip_qkv=8.0), ExpertsSpec())

PRESETS = {
    "test-dbrx": DecoderConfig(
        *(64, 32, 2, 4, 2, 16),
        norm=_NORM,
        layer=LayerSpec(AttentionSpec(clip_qkv=0.5), ExpertsSpec()),
        router=RouterConfig(),
    ),
    "dbrx": DecoderConfig(
        *(100_352, 6144, 40, 48, 8, 10_752),
        rope_theta=5e5,
        norm=_NORM,
        layer=_LAYER,
        router=RouterConfig(experts=16, top_k=4, balance=0.05),
    ),
}
"""Published shape by name, and a small one for tests."""

_BLOCK = "norm_attn_norm."
_EXPERTS = "ffn.experts.mlp."
_INTO = TensorLayout(((0, 2), 1))  # [expert · d_ff, d]
_LAYER_NAMES: Names = {
    **module_names(
        {"attention/o_proj": f"{_BLOCK}attn.out_proj", "moe/router": "ffn.router.layer"},
        {"attention_norm": f"{_BLOCK}norm_1", "mlp_norm": f"{_BLOCK}norm_2"},
    ),
    "moe/experts/gate_proj/kernel": (f"{_EXPERTS}w1", _INTO),
    "moe/experts/up_proj/kernel": (f"{_EXPERTS}v1", _INTO),
    "moe/experts/down_proj/kernel": (f"{_EXPERTS}w2", TensorLayout(((0, 1), 2))),
}
_ENDS: Names = {"embed/embedding": ("wte.weight", AS_IS), "norm/scale": ("norm_f.weight", AS_IS)}


def _names(config: DecoderConfig) -> TensorNames:
    parts = (config.heads, config.kv_heads, config.kv_heads)
    layer = _LAYER_NAMES | fused_names(QKV, f"{_BLOCK}attn.Wqkv", parts)
    return TensorNames(layer, _ENDS, "transformer.", "blocks.{layer}.")


_ROUTER = RouterFields(
    "moe_num_experts",
    experts=4,
    top_k=1,
    top_k_name="moe_top_k",
    balance_name="moe_loss_weight",
    balance=0.01,
)
_NORMALISE = "moe_normalize_expert_weights"
_JITTER = "moe_jitter_eps"
_HARMLESS = ("attn_pdrop", "emb_pdrop", "resid_pdrop", "num_key_value_heads")
_TABLES = ("attn_config", "ffn_config")


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    values, theta = _without_tables(values)
    fields = Fields(values)
    for name in (*_HARMLESS, "max_seq_len"):
        fields.value(name)
    fields.only("tie_word_embeddings", False)
    fields.only("ffn_act_fn", {"name": "silu"})
    width = fields.integer("d_model", 2048)
    fields.only("hidden_size", width)
    rotary = read_rotary(fields, Rotary(theta or 1e4, RopeScaling()))
    if theta and rotary.theta != theta:
        fields.refuse("rope_theta", f"is {rotary.theta:g}, and in attn_config {theta:g}")
    return fields.build(
        DecoderConfig,
        vocab=fields.integer("vocab_size", 32_000),
        d_model=width,
        layers=limit_layers(fields, fields.integer("n_layers", 24), "n_layers"),
        heads=fields.integer("n_heads", 16),
        kv_heads=fields.integer("kv_n_heads", 1),
        d_ff=fields.integer("ffn_hidden_size", 3584),
        rope_theta=rotary.theta,
        rope_scaling=rotary.scaling,
        norm=_NORM,
        layer=LayerSpec(AttentionSpec(clip_qkv=read_clip(fields)), ExpertsSpec()),
        router=_read_router(fields),
    )


def _without_tables(values: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the fields with those of both tables, and the base of rotary positions there.

    `transformers` 5.24 has that base twice: in the table, which is not used, and outside.
    """
    fields = dict(values)
    theta = None
    for name in _TABLES:
        table = fields.pop(name, None)
        if isinstance(table, Mapping):
            table = dict(table)
            theta = table.pop("rope_theta", theta)
            fields |= table
        elif table is not None:
            fields[name] = table  # refused as unknown
    return fields, theta


def _read_router(fields: Fields) -> RouterConfig:
    """Parse the router; without a power, weights are not normalised."""
    fields.only(_NORMALISE, 1.0)
    jitter = 0.0
    if fields.value(_JITTER) is not None:
        jitter = fields.number(_JITTER, least=0)
    return _ROUTER.read(fields, jitter=jitter, normalise=not fields.is_null(_NORMALISE))


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, experts, router = experts_of(config)
    normalise = None
    if router.normalise:
        normalise = 1.0
    return {
        "model_type": "dbrx",
        "vocab_size": config.vocab,
        "d_model": config.d_model,
        "n_layers": config.layers,
        "n_heads": config.heads,
        **write_rotary(Rotary(config.rope_theta, config.rope_scaling)),
        "attn_config": {
            "clip_qkv": layer.attention.clip_qkv or None,
            "kv_n_heads": config.kv_heads,
            "rope_theta": config.rope_theta,
        },
        "ffn_config": {
            **_ROUTER.write(router),
            "ffn_hidden_size": experts.d_ff,
            _JITTER: router.jitter or None,
            _NORMALISE: normalise,
        },
        "tie_word_embeddings": False,
    }


FAMILY = decoder_family("DbrxForCausalLM", _read, _write, names=_names, harmless=_HARMLESS)
