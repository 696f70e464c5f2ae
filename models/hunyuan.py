"""Hunyuan dense: a Llama with norms of queries and keys after their rotation.

Source: huggingface.co/tencent/Hunyuan-7B-Instruct. Its positions have a larger base for longer
texts, by a fixed `alpha` (NTK-aware scaling, arXiv:2309.00071, section 3.1).

```python
config = dataclasses.replace(PRESETS["hunyuan-7b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec
from spmd.models.published.common_fields import read_attention_bias, read_sizes, write_sizes
from spmd.models.published.family import decoder_family, layer_names

_LAYER = LayerSpec(AttentionSpec(qk_norm="head", qk_norm_after=True))

PRESETS = {
    "test-hunyuan": DecoderConfig(64, 32, 2, 4, 2, 64, layer=_LAYER),
    "hunyuan-7b": DecoderConfig(
        *(128_167, 4096, 32, 32, 8, 14_336),
        tied=True,
        rope_theta=1e4 * 1000 ** (128 / 126),
        layer=_LAYER,
    ),
}
"""Published shape by name, and a small one for tests."""

NAMES = layer_names() | {
    "attention/q_norm/scale": ("self_attn.query_layernorm.weight", AS_IS),
    "attention/k_norm/scale": ("self_attn.key_layernorm.weight", AS_IS),
}
_TABLES = ("rope_parameters", "rope_scaling")
_OF_ALPHA = (
    *("alpha", "rope_type", "type"),
    *("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),  # unused
)
HARMLESS = (
    *("eod_token_id", "pad_id", "sep_id", "text_start_id", "text_end_id", "mask_init_id"),
    *("im_start_id", "im_end_id", "im_newline_id", "org_vocab_size"),
    *("add_classification_head", "class_num", "pool_type", "dense_list", "cla_share_factor"),
)
"""Token numbers, and fields of other heads and of layers that share keys (`use_cla`)."""


def read_sizes_with_alpha(values: Mapping[str, Any]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of config.json, and the common ones as arguments of `DecoderConfig`."""
    values, alpha = _take_alpha(values)
    fields = Fields(values)
    for name in HARMLESS:
        fields.value(name)
    fields.only("use_qk_norm", True)
    fields.only("use_rotary_pos_emb", True)
    fields.only("use_cla", False)
    fields.only("norm_type", "rms", "hf_rms")
    sizes = read_sizes(fields, eps=1e-5)
    head_dim = sizes["head_dim"] or sizes["d_model"] // sizes["heads"]
    fields.only("attention_head_dim", head_dim)
    if head_dim > 2 and fields.is_number("rope_scaling.alpha", alpha, least=1):
        sizes["rope_theta"] *= alpha ** (head_dim / (head_dim - 2))
    return fields, sizes


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields, sizes = read_sizes_with_alpha(values)
    mixer = read_attention_bias(fields, _LAYER.attention)
    return fields.build(DecoderConfig, **sizes, layer=dataclasses.replace(_LAYER, mixer=mixer))


def _take_alpha(values: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the fields without the scaling of positions by `alpha`, and alpha; 1 without it."""
    plain = dict(values)
    alpha = 1
    for name in _TABLES:
        table = values.get(name)
        if not isinstance(table, Mapping) or not table.get("alpha"):
            continue
        kind = table.get("rope_type", table.get("type"))
        if kind == "dynamic":
            alpha = table["alpha"]
            kept = {key: value for key, value in table.items() if key not in _OF_ALPHA}
            plain[name] = kept
    return plain, alpha


def _write(config: DecoderConfig) -> dict[str, Any]:
    bias = config.pattern.group[0].attention.qkv_bias
    return {"model_type": "hunyuan_v1_dense", **write_sizes(config), "attention_bias": bias}


FAMILY = decoder_family("HunYuanDenseV1ForCausalLM", _read, _write, NAMES, harmless=HARMLESS)
