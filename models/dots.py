"""dots.llm1: experts chosen with biases beside shared ones, normalised queries and keys.

Source: arXiv:2506.05767.

```python
config = dataclasses.replace(PRESETS["dots.llm1"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, ExpertsSpec, LayerSpec, MLPSpec
from spmd.models.published.common_fields import read_attention_bias, read_sizes, write_sizes
from spmd.models.published.experts import (
    CHOICE_BIASES,
    DENSE,
    RouterFields,
    dense_first,
    expert_names,
    experts_of,
    experts_table,
    mlp_kinds,
    read_dense_first,
    read_shared_experts,
    with_dense_mlps,
    write_shared_experts,
)
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.layer_types import (
    FULL,
    SLIDING,
    attention_layers,
    read_layer_types,
    read_window_of,
    table_of,
    write_layer_types,
)

_MIXER = AttentionSpec(qk_norm="head")
_MAX_FULL = 62
_UNUSED = ("ep_size", "seq_aux")


def dots1(*shape: Any, dense_d_ff: int, **fields: Any) -> DecoderConfig:
    """Return the config of a dots.llm1, from fields of `DecoderConfig`.

    Args:
        *shape: Its fields from `vocab` to `d_ff`, the width of an expert; two of them are shared.
        dense_d_ff: Hidden width of the MLP of the first layer.
        **fields: Other fields.
    """
    experts = ExpertsSpec(shared_d_ff=2 * shape[5])
    layer = LayerSpec(_MIXER, experts)
    kinds = dense_first(1, shape[2])
    table = experts_table(layer, MLPSpec(dense_d_ff), kinds)
    return DecoderConfig(*shape, **table | fields)


PRESETS = {
    "test-dots1": dots1(
        *(64, 32, 3, 4, 2, 16),
        dense_d_ff=48,
        router=dataclasses.replace(CHOICE_BIASES, experts=8, top_k=2),
    ),
    "dots.llm1": dots1(
        *(152_064, 4096, 62, 32, 32, 1408),
        dense_d_ff=10_944,
        norm_eps=1e-5,
        rope_theta=1e7,
        router=dataclasses.replace(CHOICE_BIASES, experts=128, top_k=6, scale=2.5, bias_rate=1e-3),
    ),
}
"""Published shape by name, and a small one for tests."""

_ROUTER = RouterFields(
    "n_routed_experts",
    normalise=False,
    groups=(1, 1),
    scale=1.0,
    balance_name="",
    base=CHOICE_BIASES,
)


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, kv_heads=32)
    layers = sizes["layers"]
    mixer = read_attention_bias(fields, _MIXER)
    experts = read_shared_experts(fields, 1408, shared=None)
    layer = LayerSpec(mixer, experts)
    default = _default_kinds(fields, layers)
    kinds = read_layer_types(fields, layers, default)
    window = read_window_of(fields, kinds, absent=4096)
    specs = attention_layers(layer, window, kinds)
    dense = read_dense_first(fields, layers, 0)
    specs = with_dense_mlps(specs, MLPSpec(), dense_first(dense, layers))
    fields.only("moe_layer_freq", 1)
    fields.only("topk_method", "noaux_tc")
    fields.only("scoring_func", "sigmoid", "noaux_tc")  # the latter in published files
    sizes["router"] = _ROUTER.read(fields)
    return fields.build(DecoderConfig, **sizes, **table_of(specs))


def _default_kinds(fields: Fields, layers: int) -> list[str]:
    """Return the kinds of layers in a file without `layer_types`: a window after some layers."""
    full = min(layers, fields.integer("max_window_layers", _MAX_FULL))
    if fields.is_null("sliding_window"):
        full = layers
    return [FULL] * full + [SLIDING] * (layers - full)


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, _, router = experts_of(config)
    mixer = layer.attention
    fields = write_sizes(config)
    fields |= write_layer_types(config)
    fields |= write_shared_experts(config)
    fields |= _ROUTER.write(router)
    fields["attention_bias"] = mixer.qkv_bias
    fields["first_k_dense_replace"] = mlp_kinds(config).count(DENSE)
    fields["model_type"] = "dots1"
    return fields


FAMILY = decoder_family(
    "Dots1ForCausalLM",
    _read,
    _write,
    layer_names() | expert_names(),
    harmless=_UNUSED,
    secondary=True,
)
