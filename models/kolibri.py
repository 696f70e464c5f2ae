"""Kolibri: experts chosen by biases of logits, norms on both sides, and windows in four of five layers.

Layers with a window have rotary positions, the others have none. Source:
huggingface.co/Aleph-Alpha/Kolibri-1.

```python
config = dataclasses.replace(PRESETS["test-kolibri1"], d_model=256)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS
from spmd.layers.router import RouterConfig
from spmd.models.decoder import AttentionSpec, DecoderConfig, ExpertsSpec, LayerSpec
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.experts import (
    RouterFields,
    expert_names,
    experts_of,
    write_widths,
)
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.layer_types import (
    every,
    read_rotated_windows,
    rotated_windows,
    table_of,
    write_rotated_windows,
)

_MIXER = AttentionSpec(qk_norm="head")
_CHOICE = RouterConfig(
    score="sigmoid", choice_bias=True, bias_on="logits", balance=1e-4, balance_over="example"
)


def kolibri1(*shape: Any, window: int, **fields: Any) -> DecoderConfig:
    """Return the config of a Kolibri from fields of `DecoderConfig`.

    Args:
        *shape: Its fields from `vocab` to `d_ff`, the width of an expert and of the shared one.
        window: Sliding window of four of five layers.
        **fields: Other fields.
    """
    experts = ExpertsSpec(shared_d_ff=shape[5])
    layer = LayerSpec(_MIXER, experts, norms="both")
    kinds = every(5, shape[2])
    specs = rotated_windows(layer, window, kinds)
    return DecoderConfig(*shape, **{"norm_eps": 1e-6} | table_of(specs) | fields)


PRESETS = {
    "test-kolibri1": kolibri1(
        *(64, 32, 5, 4, 2, 16),
        window=5,
        router=dataclasses.replace(_CHOICE, experts=8, top_k=2, normalise=False),
    ),
}
"""A small one for tests."""

_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attn_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_ffn_norm",
}
_NAMES = layer_names(**_NORMS) | expert_names()
_NAMES["moe/router/bias"] = ("moe.router.expert_bias", AS_IS)
_ROUTER = RouterFields(
    "num_experts",
    also=("num_local_experts",),
    experts=384,
    top_k=6,
    normalise=False,
    balance_name="",
    base=_CHOICE,
)
_WIDTH = "shared_expert_intermediate_size"


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, kv_heads=4, head_dim=128, d_ff=512)
    layers = sizes["layers"]
    width = fields.integer("moe_intermediate_size", 512)
    shared = fields.integer(_WIDTH, 512)
    experts = ExpertsSpec(width, shared_d_ff=shared)
    layer = LayerSpec(_MIXER, experts, norms="both")
    default = every(5, layers)
    specs = read_rotated_windows(fields, layer, layers, default, absent=513)
    sizes["router"] = _ROUTER.read(fields)
    return fields.build(DecoderConfig, **sizes, **table_of(specs))


def _write(config: DecoderConfig) -> dict[str, Any]:
    _, experts, router = experts_of(config)
    fields = write_sizes(config)
    fields |= write_widths(config)
    fields |= write_rotated_windows(config)
    fields |= _ROUTER.write(router)
    fields[_WIDTH] = experts.shared_d_ff
    fields["model_type"] = "kolibri1"
    return fields


FAMILY = decoder_family("Kolibri1ForCausalLM", _read, _write, _NAMES)
