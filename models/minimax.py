"""MiniMax-M2: experts chosen with biases, half of each head rotated, all queries normalised together.

Source: huggingface.co/MiniMaxAI/MiniMax-M2.

```python
config = dataclasses.replace(PRESETS["minimax-m2"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.layers.router import RouterConfig
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    ExpertsSpec,
    LayerSpec,
    RopeScaling,
    Rotary,
)
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.experts import RouterFields, expert_names, experts_of
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.rotary import read_rotary, write_rotary

_PLAIN = Rotary(5e6, RopeScaling())
_HALF = AttentionSpec(rotary=Rotary(fraction=0.5), qk_norm="full")
_CHOICE = RouterConfig(score="sigmoid", choice_bias=True, balance=0.001)


def minimax_m2(*shape: Any, **fields: Any) -> DecoderConfig:
    """Return the config of a MiniMax-M2 from fields of `DecoderConfig`."""
    layer = LayerSpec(_HALF, ExpertsSpec())
    defaults: dict[str, Any] = {"layer": layer, "rope_theta": 5e6, "norm_eps": 1e-6}
    return DecoderConfig(*shape, **defaults | fields)


PRESETS = {
    "test-minimax-m2": minimax_m2(
        *(64, 32, 2, 4, 2, 16),
        head_dim=16,
        router=dataclasses.replace(_CHOICE, experts=8, top_k=2),
    ),
    "minimax-m2": minimax_m2(
        *(200_064, 3072, 62, 48, 8, 1536),
        head_dim=128,
        router=dataclasses.replace(_CHOICE, experts=256, top_k=8),
    ),
}
"""Published shape by name, and a small one for tests."""

_NAMES = layer_names() | expert_names(
    "block_sparse_moe.", kernels=("w1", "w3", "w2"), choice_bias="e_score_correction_bias"
)
_ROUTER = RouterFields("num_local_experts", experts=256, top_k=8, base=_CHOICE)
_JITTER = "router_jitter_noise"
_REQUIRED = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "sliding_window": None,
}
"""Fields of published files, each with the value that the model needs."""
_UNUSED = (
    *("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    *("layernorm_linear_attention_beta", "mlp_intermediate_size", "shared_moe_mode"),
)


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    for name, value in _REQUIRED.items():
        fields.only(name, value)
    sizes = read_sizes(fields, theta=0, kv_heads=8, head_dim=128)
    layers = sizes["layers"]
    fields.only("attn_type_list", [1] * layers)  # 1: softmax attention
    mixer = _read_attention(fields, sizes)
    jitter = fields.number(_JITTER, 0.0, least=0)
    sizes["layer"] = LayerSpec(mixer, ExpertsSpec())
    sizes["router"] = _ROUTER.read(fields, jitter=jitter)
    return fields.build(DecoderConfig, **sizes)


def _read_attention(fields: Fields, sizes: Mapping[str, Any]) -> AttentionSpec:
    """Parse the rotary positions, of `rotary_dim` dimensions of a head."""
    width = sizes["d_model"] // sizes["heads"]
    head_dim = sizes["head_dim"] or max(1, width)
    rotated = fields.integer("rotary_dim", head_dim)
    if rotated % 2 and rotated < head_dim:
        fields.refuse("rotary_dim", f"is {rotated}, an odd number of dimensions", "an even number")
        rotated = head_dim
    fraction = min(1.0, rotated / head_dim)
    default = dataclasses.replace(_PLAIN, fraction=fraction)
    rotary = read_rotary(fields, default)
    return dataclasses.replace(_HALF, rotary=rotary)


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, _, router = experts_of(config)
    rotary = layer.attention.rotary or _PLAIN
    fields = write_sizes(config)
    fields |= write_rotary(rotary, complete=True)
    fields |= _ROUTER.write(router)
    fields[_JITTER] = router.jitter
    fields["model_type"] = "minimax_m2"
    return fields


FAMILY = decoder_family("MiniMaxM2ForCausalLM", _read, _write, _NAMES, harmless=_UNUSED)
