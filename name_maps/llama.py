"""Name map of Llama, including TinyLlama, Llama 2 and Llama 3."""

from collections.abc import Mapping
from typing import Any

from spmd.hf.family import Family, Ignored, TensorMapping
from spmd.hf.fields import Fields
from spmd.hf.layout import TRANSPOSED
from spmd.models.llama import LlamaConfig
from spmd.models.rope import RopeScaling
from spmd.partition_rules.llama import LLAMA, LLAMA_TIED
from spmd.sharding.rules import Rules

_LAYER = "model.layers.{layer}."
ATTENTION = (
    TensorMapping("layers/attention_norm/scale", _LAYER + "input_layernorm.weight"),
    TensorMapping("layers/attention/q_proj/kernel", _LAYER + "self_attn.q_proj.weight", TRANSPOSED),
    TensorMapping("layers/attention/k_proj/kernel", _LAYER + "self_attn.k_proj.weight", TRANSPOSED),
    TensorMapping("layers/attention/v_proj/kernel", _LAYER + "self_attn.v_proj.weight", TRANSPOSED),
    TensorMapping("layers/attention/o_proj/kernel", _LAYER + "self_attn.o_proj.weight", TRANSPOSED),
    TensorMapping("layers/mlp_norm/scale", _LAYER + "post_attention_layernorm.weight"),
)
_MLP = (
    TensorMapping("layers/mlp/gate_proj/kernel", _LAYER + "mlp.gate_proj.weight", TRANSPOSED),
    TensorMapping("layers/mlp/up_proj/kernel", _LAYER + "mlp.up_proj.weight", TRANSPOSED),
    TensorMapping("layers/mlp/down_proj/kernel", _LAYER + "mlp.down_proj.weight", TRANSPOSED),
)
_ENDS = (
    TensorMapping("embed/embedding", "model.embed_tokens.weight"),
    TensorMapping("norm/scale", "model.norm.weight"),
)
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_context",
}
_HEAD = TensorMapping("lm_head/kernel", "lm_head.weight", TRANSPOSED)


def ends(config: LlamaConfig) -> tuple[TensorMapping, ...]:
    """Return the mappings of parameters outside the layers."""
    if config.tied:
        return _ENDS
    return (*_ENDS, _HEAD)


def names(config: LlamaConfig) -> tuple[TensorMapping, ...]:
    """Return the mappings of a model config."""
    return (*ends(config), *ATTENTION, *_MLP)


def ignored(config: LlamaConfig) -> tuple[Ignored, ...]:
    """Return tensors of a checkpoint without a parameter."""
    rotary = Ignored(_LAYER + "self_attn.rotary_emb.inv_freq", "follows from rope_theta")
    if not config.tied:
        return (rotary,)
    embedding = _ENDS[0].tensor
    return (rotary, Ignored(_HEAD.tensor, "is a copy of the embedding", embedding))


def read_shape(
    fields: Fields,
    *,
    eps: float = 1e-6,
    theta: float = 10_000.0,
    head_dim: int = 0,
    tied: bool = False,
    activation: tuple[str, ...] = ("hidden_act", "silu"),
) -> dict[str, Any]:
    """Parse the fields of all families with Llama's layers.

    Args:
        fields: Fields of config.json.
        eps: Default of `rms_norm_eps`.
        theta: Default of `rope_theta`.
        head_dim: Default of `head_dim`; 0 for the width divided by the heads.
        tied: Default of `tie_word_embeddings`.
        activation: Name of the MLP's activation field, and the supported values.
    """
    width = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", head_dim or max(1, width // heads))
    if head_dim * heads == width:
        head_dim = 0
    fields.only(*activation)
    fields.only("is_causal", True)
    base, scaling = fields.rope(theta, "llama3")
    return {
        "vocab": fields.integer("vocab_size"),
        "d_model": width,
        "layers": fields.integer("num_hidden_layers"),
        "heads": heads,
        "kv_heads": fields.integer("num_key_value_heads", heads),
        "d_ff": fields.integer("intermediate_size"),
        "head_dim": head_dim,
        "rope_theta": base,
        "rope_scaling": _read_scaling(fields, scaling),
        "norm_eps": fields.number("rms_norm_eps", eps, least=0),
        "tied": fields.flag("tie_word_embeddings", tied),
    }


def _read_scaling(fields: Fields, table: Mapping[str, Any]) -> RopeScaling:
    if not table:
        return RopeScaling()
    for name in sorted({*table} ^ {*_SCALING}):
        what = "is missing"
        if name in table:
            what = f"is {table[name]!r:.80}, and is unknown"
        fields.refuse(f"rope_scaling.{name}", what)
    numbers: dict[str, Any] = {}
    for theirs, ours in _SCALING.items():
        if theirs in table and fields.is_number(f"rope_scaling.{theirs}", table[theirs]):
            numbers[ours] = table[theirs]
    return fields.nested(RopeScaling, **numbers) or RopeScaling()


def is_plain(config: LlamaConfig) -> bool:
    """Return whether attention has neither biases nor query and key norms."""
    return not (config.qkv_bias or config.qk_norm)


def read_window(fields: Fields, absent: int) -> int:
    """Parse `sliding_window`; null means 0, full attention, and `absent` is the default."""
    if fields.value("sliding_window") is not None:
        return fields.integer("sliding_window")
    if fields.is_null("sliding_window"):
        return 0
    return absent


def check_layer_types(fields: Fields, layers: int, *pattern: str) -> None:
    """Require `layer_types`, if present, to repeat a pattern of attention kinds over all layers."""
    kinds = fields.value("layer_types")
    if kinds is None:
        return
    if not _repeats(kinds, layers, pattern):
        supported = " and ".join(pattern)
        what = f"is {kinds!r:.80}, and this model has {layers} layers of alternating {supported}"
        fields.refuse("layer_types", what)


def _repeats(kinds: Any, layers: int, pattern: tuple[str, ...]) -> bool:
    if not isinstance(kinds, list) or len(kinds) != layers:
        return False
    return all(kind == pattern[i % len(pattern)] for i, kind in enumerate(kinds))


def divides(config: LlamaConfig) -> bool:
    """Return whether heads divide the width.

    Some config classes of `transformers` require it.
    """
    return config.d_model % config.heads == 0


def write_shape(config: LlamaConfig) -> dict[str, Any]:
    """Return the fields of config.json: the inverse of `read_shape`."""
    return {
        "vocab_size": config.vocab,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.d_ff,
        "hidden_act": "silu",
        **_write_rope(config),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
    }


def _write_rope(config: LlamaConfig) -> dict[str, Any]:
    if config.rope_scaling == RopeScaling():
        return {"rope_theta": config.rope_theta}
    scaling: dict[str, Any] = {"rope_type": "llama3"}
    for theirs, ours in _SCALING.items():
        scaling[theirs] = getattr(config.rope_scaling, ours)
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling}


def _read(values: Mapping[str, Any]) -> LlamaConfig:
    fields = Fields(values)
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    return fields.build(LlamaConfig, **read_shape(fields))


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {
        "model_type": "llama",
        **write_shape(config),
        "attention_bias": False,
        "mlp_bias": False,
    }


def _rules(config: LlamaConfig) -> Rules:
    if config.tied:
        return LLAMA_TIED
    return LLAMA


def _fits(config: Any) -> bool:
    if type(config) is not LlamaConfig or config.window:
        return False
    return is_plain(config) and divides(config)


FAMILY = Family(
    architectures=("LlamaForCausalLM",),
    read_config=_read,
    write_config=_write,
    fits=_fits,
    rules=_rules,
    names=names,
    ignored=ignored,
)
