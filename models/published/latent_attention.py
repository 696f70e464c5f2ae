"""Latent attention as in config.json, and the names of its tensors (DeepSeek-V2 and its kin).

```python
mixer = read_latent_attention(fields, sizes, LatentAttentionSpec(q_rank=1536))
fields.build(DecoderConfig, **latent_sizes(sizes, mixer), layer=LayerSpec(mixer))
```
"""

import dataclasses
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS, TRANSPOSED
from spmd.models.decoder.decoder import DecoderConfig
from spmd.models.decoder.latent_attention import LatentAttentionSpec
from spmd.models.published.common_fields import write_sizes
from spmd.models.published.layer_types import mixer_of
from spmd.models.published.tensor_names import Names

_KERNELS = {
    "attention/q_a_proj": "self_attn.q_a_proj",
    "attention/q_b_proj": "self_attn.q_b_proj",
    "attention/kv_a_proj": "self_attn.kv_a_proj_with_mqa",
    "attention/kv_b_proj": "self_attn.kv_b_proj",
}
_NORMS = {
    "attention/q_a_norm": "self_attn.q_a_layernorm",
    "attention/kv_a_norm": "self_attn.kv_a_layernorm",
}


def latent_names() -> Names:
    """Return the tensors of latent attention besides those that other attention has too."""
    names: Names = {}
    for ours, theirs in _KERNELS.items():
        names[f"{ours}/kernel"] = (f"{theirs}.weight", TRANSPOSED)
        names[f"{ours}/bias"] = (f"{theirs}.bias", AS_IS)
    for ours, theirs in _NORMS.items():
        names[f"{ours}/scale"] = (f"{theirs}.weight", AS_IS)
    return names


def read_latent_attention(
    fields: Fields,
    sizes: dict[str, Any],
    default: LatentAttentionSpec,
    *,
    may_interleave: bool = False,
) -> LatentAttentionSpec:
    """Parse the fields of latent attention; a null `q_lora_rank` is none.

    Args:
        fields: Fields of config.json.
        sizes: Those of `read_sizes`.
        default: Values of absent fields, and the rotary positions.
        may_interleave: Whether there is a field `rope_interleave`.
    """
    rotary = default.rotary
    if may_interleave:
        interleaved = fields.flag("rope_interleave", default=True)
        rotary = dataclasses.replace(rotary, interleaved=interleaved)
    q_rank = 0
    if not fields.is_null("q_lora_rank"):
        q_rank = fields.integer("q_lora_rank", default.q_rank)
    mixer = dataclasses.replace(
        default,
        q_rank=q_rank,
        kv_rank=fields.integer("kv_lora_rank", default.kv_rank),
        nope_dim=fields.integer("qk_nope_head_dim", default.nope_dim),
        rope_dim=fields.integer("qk_rope_head_dim", default.rope_dim),
        value_dim=fields.integer("v_head_dim", default.value_dim),
        rotary=rotary,
        bias=fields.flag("attention_bias", default=False),
    )
    fields.only("head_dim", mixer.rope_dim)
    fields.only("qk_head_dim", mixer.key_dim)
    fields.only("num_key_value_heads", sizes["heads"])
    return mixer


def latent_sizes(sizes: dict[str, Any], mixer: LatentAttentionSpec) -> dict[str, Any]:
    """Return the arguments of `DecoderConfig` from `read_sizes` for latent attention."""
    return sizes | {"kv_heads": sizes["heads"], "head_dim": mixer.key_dim}


def write_latent_sizes(config: DecoderConfig, *, may_interleave: bool = False) -> dict[str, Any]:
    """Return the fields of `write_sizes` and of latent attention.

    `may_interleave` is that of `read_latent_attention`.
    """
    mixer = mixer_of(config, LatentAttentionSpec)
    fields = {
        **write_sizes(config),
        "num_key_value_heads": mixer.heads,
        "head_dim": mixer.rope_dim,
        "q_lora_rank": mixer.q_rank or None,
        "kv_lora_rank": mixer.kv_rank,
        "qk_nope_head_dim": mixer.nope_dim,
        "qk_rope_head_dim": mixer.rope_dim,
        "v_head_dim": mixer.value_dim,
        "attention_bias": mixer.bias,
    }
    if may_interleave:
        fields["rope_interleave"] = mixer.rotary.interleaved
    return fields
