"""Falcon: attention and MLP side by side, with one key/value head or a few (arXiv:2311.16867).

A checkpoint has queries, keys and values in one tensor: those of each key/value head in turn in the
*new decoder architecture* of Falcon 40B and 11B, which has a norm for attention and one for the MLP.

```python
config = dataclasses.replace(PRESETS["falcon-7b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import functools
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields, renamed
from spmd.hf.layout import AS_IS
from spmd.models.decoder import DecoderConfig, Rotary
from spmd.models.decoder.layer import Norms
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.family import TensorNames, decoder_family
from spmd.models.published.gpt import gpt_decoder, read_activation, write_activation
from spmd.models.published.tensor_names import QKV, Names, fused_names, module_names

_EPS = "layer_norm_epsilon"
_FIELDS = {
    "hidden_act": "activation",
    "intermediate_size": "ffn_hidden_size",
    "num_key_value_heads": "num_kv_heads",
}


falcon = functools.partial(
    gpt_decoder,
    rotary=Rotary(),
    norms="parallel_shared",
    attention_bias=False,
    mlp_bias=False,
    tied=True,
)
"""Config of a Falcon from fields of `gpt_decoder`; `norms` are parallel in the 40B model."""

PRESETS = {
    "test-falcon": falcon(64, 32, 2, 4, 1, 128),
    "test-falcon-grouped": falcon(64, 32, 2, 4, 2, 128, norms="parallel"),
    "falcon-7b": falcon(65_024, 4544, 32, 71, 1, 18_176),
    "falcon-11b": falcon(65_024, 4096, 60, 32, 8, 16_384, rope_theta=500_042.0, tied=False),
    "falcon-40b": falcon(65_024, 8192, 60, 128, 8, 32_768, norms="parallel"),
}
"""Published shapes by name, and small ones for tests."""

_PREFIX = "transformer."
_LINEAR = {
    "attention/o_proj": "self_attention.dense",
    "mlp/up_proj": "mlp.dense_h_to_4h",
    "mlp/down_proj": "mlp.dense_4h_to_h",
}
_BEFORE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_PARALLEL = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}
_ENDS: Names = {
    "embed/embedding": ("word_embeddings.weight", AS_IS),
    **module_names({}, {"norm": "ln_f"}),
}
_HARMLESS = ("hidden_dropout",)


def _names(config: DecoderConfig) -> TensorNames:
    spec = config.pattern.group[0]
    heads = spec.attention.heads
    kv_heads = spec.attention.kv_heads
    norms = _BEFORE
    if spec.norms == "parallel":
        norms = _PARALLEL
    layer = module_names(_LINEAR, norms)
    parts = (heads // kv_heads, 1, 1)
    layer |= fused_names(QKV, "self_attention.query_key_value", parts, groups=kv_heads)
    return TensorNames(layer, _ENDS, _PREFIX, "h.{layer}.")


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values, _FIELDS)
    fields.only("alibi", False)
    fields.only("apply_residual_connection_post_layernorm", False)
    sizes = read_sizes(
        fields, eps=1e-5, eps_field=_EPS, tied=True, activation=(), has_head_dim=False, d_ff_ratio=4
    )
    is_new = fields.flag("new_decoder_architecture", default=False)
    is_multi_query = fields.flag("multi_query", default=True)
    if not is_new and is_multi_query:
        sizes["kv_heads"] = 1  # num_kv_heads has no effect
    if not is_new and not is_multi_query:
        fields.only("num_key_value_heads", sizes["heads"])
    bias = fields.flag("bias", default=False)
    return fields.build(
        falcon,
        **sizes,
        norms=_read_norms(fields, is_new=is_new),
        attention_bias=bias,
        mlp_bias=bias,
        activation=read_activation(fields, "hidden_act", "gelu"),
    )


def _read_norms(fields: Fields, *, is_new: bool) -> Norms:
    """Parse the places of norms: `parallel_attn` and `num_ln_in_parallel_attn`."""
    if not is_new:
        fields.only("num_ln_in_parallel_attn", 1)
        if fields.flag("parallel_attn", default=True):
            return "parallel_shared"
        return "before"
    fields.only("parallel_attn", True)
    fields.only("num_ln_in_parallel_attn", 2, 1)
    if fields.value("num_ln_in_parallel_attn", 2) == 1:
        return "parallel_shared"
    return "parallel"


def _write(config: DecoderConfig) -> dict[str, Any]:
    spec = config.pattern.group[0]
    kv_heads = spec.attention.kv_heads
    is_new = spec.norms == "parallel" or 1 < kv_heads < config.heads
    sizes = {**write_sizes(config, _EPS), "hidden_act": write_activation(config)}
    fields = renamed(sizes, _FIELDS)
    del fields["head_dim"]  # a property in transformers
    if is_new:
        fields["num_ln_in_parallel_attn"] = 1 + (spec.norms == "parallel")
    return {
        "model_type": "falcon",
        **fields,
        "bias": spec.attention.qkv_bias,
        "new_decoder_architecture": is_new,
        "multi_query": kv_heads == 1,
        "parallel_attn": spec.norms != "before",
        "alibi": False,
    }


FAMILY = decoder_family("FalconForCausalLM", _read, _write, names=_names, harmless=_HARMLESS)
