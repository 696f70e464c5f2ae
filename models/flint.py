"""Flint: experts beside a shared one, attention with sinks, and rotary positions in windows only.

Source: config.json of huggingface.co/RecursiveSI/flint. The first two layers have an MLP; they, the
last layer and every fourth one attend to all preceding tokens, without rotary positions.

```python
config = dataclasses.replace(PRESETS["test-flint"], vocab=256)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS
from spmd.layers.router import RouterConfig
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    Rotary,
)
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.experts import (
    RouterFields,
    dense_first,
    expert_names,
    experts_of,
    read_sparse_layers,
    with_dense_mlps,
    write_sparse_layers,
    write_widths,
)
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.layer_types import (
    FULL,
    SLIDING,
    attention_layers,
    read_layer_types,
    read_window_of,
    rotary_where,
    table_of,
    write_layer_types,
)

_MIXER = AttentionSpec(qk_norm="head", sinks=True)
_WINDOW = 513
_ROUTER = RouterFields(
    "num_experts",
    experts=256,
    top_k=6,
    normalise=True,
    balance=0.0005,
    base=RouterConfig(score="sigmoid"),
)


def flint(
    kinds: Sequence[str],
    mlps: Sequence[str],
    *,
    dense_d_ff: int,
    window: int = _WINDOW,
    mixer: AttentionSpec = _MIXER,
    experts: ExpertsSpec,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a Flint, from fields of `DecoderConfig`.

    Args:
        kinds: The kind of each layer's attention, as in `layer_types`.
        mlps: The kind of each layer's MLP, as in `mlp_layer_types`.
        dense_d_ff: Hidden width of an MLP in place of experts.
        window: Sliding window.
        mixer: Attention to all preceding tokens.
        experts: Experts.
        **fields: Other fields.
    """
    rotary = rotary_where([kind == SLIDING for kind in kinds], Rotary())
    layers = attention_layers(LayerSpec(mixer, experts), window, kinds, rotary=rotary)
    table = table_of(with_dense_mlps(layers, MLPSpec(dense_d_ff), mlps))
    return DecoderConfig(**{"layers": len(kinds), "norm_eps": 1e-6} | table | fields)


def _default_kinds(layers: int) -> list[str]:
    """Return the kinds of attention of layers without `layer_types`."""
    kinds = []
    for number in range(layers):
        kind = SLIDING
        if number < 2 or number % 4 == 1 or number == layers - 1:
            kind = FULL
        kinds.append(kind)
    return kinds


PRESETS = {
    "test-flint": flint(
        _default_kinds(9),
        dense_first(2, 9),
        dense_d_ff=48,
        window=5,
        experts=ExpertsSpec(16, shared_d_ff=24),
        vocab=64,
        d_model=32,
        router=dataclasses.replace(_ROUTER.base, experts=4),
    ),
}
"""A small shape for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, head_dim=128, kv_heads=4)
    layers = sizes.pop("layers")
    kinds = read_layer_types(fields, layers, _default_kinds(layers))
    bias = fields.flag("attention_bias", default=False)
    experts = ExpertsSpec(
        fields.integer("moe_intermediate_size", 512),
        shared_d_ff=fields.integer("shared_expert_intermediate_size", 1024),
    )
    return fields.build(
        flint,
        **sizes,
        kinds=kinds,
        mlps=read_sparse_layers(fields, layers, default=(0, 1)),
        dense_d_ff=sizes["d_ff"],
        window=read_window_of(fields, kinds, _WINDOW),
        mixer=dataclasses.replace(_MIXER, qkv_bias=bias, out_bias=bias),
        experts=experts,
        router=_ROUTER.read(fields),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, experts, router = experts_of(config)
    return {
        "model_type": "flint",
        **write_sizes(config),
        **write_widths(config),
        **write_sparse_layers(config),
        **write_layer_types(config),
        **_ROUTER.write(router),
        "shared_expert_intermediate_size": experts.shared_d_ff,
        "attention_bias": layer.attention.qkv_bias,
    }


_NAMES = layer_names() | expert_names(shared="shared_expert")
_NAMES |= {"attention/sinks": ("self_attn.softmax_offset", AS_IS)}
FAMILY = decoder_family("FlintForCausalLM", _read, _write, _NAMES)
