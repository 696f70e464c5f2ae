"""Fields of config.json common to most decoders: reading and writing.

```python
sizes = read_sizes(fields, eps=1e-5, kv_heads=8)
fields.build(DecoderConfig, **sizes, window=read_window(fields, absent=4096))
```
"""

import dataclasses
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder.attention import AttentionSpec
from spmd.models.decoder.decoder import DecoderConfig
from spmd.models.decoder.layer import LayerSpec
from spmd.models.decoder.mlp import MLPSpec
from spmd.models.decoder.rotary import RopeScaling, Rotary
from spmd.models.published.layer_types import limit_layers
from spmd.models.published.rotary import read_rotary, write_rotary

TANH = "gelu_pytorch_tanh"
"""Activation of config.json: gelu by the tanh approximation."""
_MIXER = AttentionSpec()


def read_sizes(
    fields: Fields,
    *,
    eps: float = 1e-6,
    eps_field: str = "rms_norm_eps",
    theta: float = 10_000.0,
    head_dim: int = 0,
    kv_heads: int = 0,
    d_ff: int | None = None,
    tied: bool = False,
    activation: tuple[str, ...] = ("hidden_act", "silu"),
    heads_divide: bool = False,
    has_head_dim: bool = True,
    d_ff_ratio: int = 0,
) -> dict[str, Any]:
    """Parse the common fields, as arguments of `DecoderConfig`.

    Args:
        fields: Fields of config.json.
        eps: Default of the norms' field; the value without such a field.
        eps_field: Name of that field; empty for none.
        theta: Default of `rope_theta`; 0 for a family that reads its rotary embeddings itself.
        head_dim: Default of `head_dim`; 0 for the width divided by the heads.
        kv_heads: `num_key_value_heads` if it is absent; null always means as many as heads, as does
            0 here.
        d_ff: Default of `intermediate_size`; None if it is required.
        tied: Default of `tie_word_embeddings`.
        activation: Name of the MLP's activation field, and the supported values; empty for a family
            that reads it itself.
        heads_divide: Whether the heads must divide the width.
        has_head_dim: Whether a head may have another width than the model's divided by the heads.
        d_ff_ratio: Default of `intermediate_size`, in widths; 0 if it is required.
    """
    width = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    must_divide = heads_divide or not has_head_dim
    if must_divide and width % heads:
        what = f"is {heads}, which does not divide hidden_size {width}, as this family needs"
        fields.refuse("num_attention_heads", what)
    if fields.is_null("head_dim"):
        head_dim = 0
    head_dim = fields.integer("head_dim", head_dim or max(1, width // heads))
    if head_dim * heads == width:
        head_dim = 0
    if head_dim and not has_head_dim and fields.value("head_dim") is not None:
        fields.refuse("head_dim", f"is {head_dim}, not hidden_size / num_attention_heads")
    if activation:
        fields.only(*activation)
    fields.only("is_causal", True)
    if fields.is_null("num_key_value_heads") or not kv_heads:
        kv_heads = heads
    if eps_field:
        eps = fields.number(eps_field, eps, least=0)
    if d_ff_ratio:
        d_ff = d_ff_ratio * width
    rotary = {}
    if theta:
        rotary = read_network_rotary(fields, Rotary(theta, RopeScaling()))
    return {
        "vocab": fields.integer("vocab_size"),
        "d_model": width,
        "layers": limit_layers(fields, fields.integer("num_hidden_layers")),
        "heads": heads,
        "kv_heads": fields.integer("num_key_value_heads", kv_heads),
        "d_ff": fields.integer("intermediate_size", d_ff),
        "head_dim": head_dim,
        **rotary,
        "norm_eps": eps,
        "tied": fields.flag("tie_word_embeddings", tied),
    }


def write_sizes(
    config: DecoderConfig, eps_field: str = "rms_norm_eps", rotary: Rotary | None = None
) -> dict[str, Any]:
    """Return the fields of config.json: the inverse of `read_sizes`.

    Args:
        config: The config of a model.
        eps_field: Name of the norms' field; empty for none.
        rotary: Rotary positions; by default those of the network.
    """
    if rotary is None:
        rotary = Rotary(config.rope_theta, config.rope_scaling)
    eps = {}
    if eps_field:
        eps[eps_field] = config.norm_eps
    return {
        "vocab_size": config.vocab,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.d_ff,
        "hidden_act": "silu",
        **write_rotary(rotary),
        **eps,
        "tie_word_embeddings": config.tied,
    }


def read_network_rotary(fields: Fields, default: Rotary, **options: Any) -> dict[str, Any]:
    """Parse the rotary embeddings of whole heads, equal in all layers, as arguments of `DecoderConfig`.

    Args:
        fields: Fields of config.json.
        default: The embeddings of a file without them.
        **options: As for `read_rotary`.
    """
    rotary = read_rotary(fields, default, **options)
    if rotary.fraction != 1:
        what = f"is {rotary.fraction:g}, and this model rotates whole heads"
        fields.refuse("partial_rotary_factor", what)
    return {"rope_theta": rotary.theta, "rope_scaling": rotary.scaling}


def read_layer(fields: Fields) -> LayerSpec:
    """Parse `attention_bias` and `mlp_bias`, of all kernels of attention and MLP."""
    mlp = MLPSpec(bias=fields.flag("mlp_bias", False))
    return LayerSpec(read_attention_bias(fields), mlp)


def read_attention_bias(fields: Fields, mixer: AttentionSpec = _MIXER) -> AttentionSpec:
    """Parse `attention_bias`, of all kernels of attention; return `mixer` with these biases."""
    bias = fields.flag("attention_bias", default=False)
    return dataclasses.replace(mixer, qkv_bias=bias, out_bias=bias)


def write_biases(config: DecoderConfig) -> dict[str, bool]:
    """Return `attention_bias` and `mlp_bias`: the inverse of `read_layer`."""
    spec = config.pattern.group[0]
    mlp_bias = isinstance(spec.mlp, MLPSpec) and spec.mlp.bias
    return {"attention_bias": spec.attention.qkv_bias, "mlp_bias": mlp_bias}


def read_window(fields: Fields, absent: int) -> int:
    """Parse `sliding_window`; null means 0, full attention, and `absent` is the default."""
    if fields.value("sliding_window") is not None:
        return fields.integer("sliding_window")
    if fields.is_null("sliding_window"):
        return 0
    return absent


def read_factor(fields: Fields, name: str, absent: float = 1.0) -> float:
    """Parse a factor, a number above 0; `absent` is the default, which null does not mean."""
    if fields.is_null(name):
        fields.refuse(name, "is null", "a number above 0")
    factor = fields.number(name, absent, least=0)
    if factor == 0:
        fields.refuse(name, "is 0", "a number above 0")
        return 1.0
    return factor


def read_clip(fields: Fields) -> float:
    """Parse `clip_qkv`, the largest absolute value of queries, keys and values; 0 for no limit."""
    if fields.value("clip_qkv") is None:
        return 0.0
    limit = fields.number("clip_qkv")
    if limit <= 0:
        fields.refuse("clip_qkv", f"is {limit}", "a number above 0, or null for no limit")
        return 0.0
    return limit


def read_soft_cap(fields: Fields, name: str, absent: float) -> float:
    """Parse a soft cap; null means 0, no cap, and `absent` is the default."""
    if fields.is_null(name):
        return 0.0
    cap = fields.number(name, absent, least=0)
    if cap == 0 and fields.value(name) is not None:
        fields.refuse(name, "is 0", "a number above 0, or null for no cap")
    return cap


def write_query_scale(config: DecoderConfig) -> int:
    """Return `query_pre_attn_scalar`: scores are divided by its square root."""
    mixer = config.pattern.distinct[0].attention
    if not mixer.scale:
        return mixer.head_dim
    return round(mixer.scale**-2)


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
