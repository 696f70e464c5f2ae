"""gpt-oss: experts in all layers, attention with sinks, and windows in every second layer.

Sources: arXiv:2508.10925 and config.json of huggingface.co/openai/gpt-oss-20b, whose experts are
published in MXFP4 (`spmd.hf.quantization`). All linear layers have biases, the router too.

```python
config = dataclasses.replace(PRESETS["gpt-oss-20b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS, EXPERTS, TRANSPOSED, part
from spmd.layers.router import RouterConfig
from spmd.models.decoder import AttentionSpec, DecoderConfig, ExpertsSpec, LayerSpec, YarnScaling
from spmd.models.decoder.activations import SWIGLU_ALPHA, SWIGLU_LIMIT
from spmd.models.decoder.rotary import Rotary
from spmd.models.published.common_fields import read_network_rotary, read_sizes, write_sizes
from spmd.models.published.experts import RouterFields, experts_of
from spmd.models.published.family import ENDS, TensorNames, decoder_family, layer_names
from spmd.models.published.layer_types import (
    attention_table,
    every,
    read_layer_types,
    read_window_of,
    write_layer_types,
)

_SCALING = YarnScaling(factor=32.0, original_context=4096, truncate=False)
_ROTARY = Rotary(150_000.0, _SCALING)
_ROUTER = RouterFields(
    "num_local_experts", experts=128, top_k=4, base=RouterConfig(logit_bias=True)
)
_LAYER = LayerSpec(
    AttentionSpec(qkv_bias=True, out_bias=True, sinks=True),
    ExpertsSpec(activation="clamped_swiglu", bias=True),
)


def gpt_oss(layers: int, *, window: int = 128, **fields: Any) -> DecoderConfig:
    """Return the config of a gpt-oss from fields of `DecoderConfig`."""
    table = attention_table(_LAYER, window, every(2, layers))
    defaults: dict[str, Any] = {"rope_theta": _ROTARY.theta, "rope_scaling": _SCALING}
    return DecoderConfig(**{"layers": layers} | defaults | table | fields)


_SIZES: dict[str, Any] = {
    **{"vocab": 201_088, "d_model": 2880, "heads": 64, "kv_heads": 8, "d_ff": 2880},
    "head_dim": 64,
}


def _router(experts: int, top_k: int = 4) -> RouterConfig:
    return dataclasses.replace(_ROUTER.base, experts=experts, top_k=top_k)


PRESETS = {
    "test-gpt-oss": gpt_oss(2, window=5, vocab=64, d_model=32, d_ff=16, router=_router(4, 2)),
    "gpt-oss-20b": gpt_oss(24, **_SIZES, router=_router(32)),
    "gpt-oss-120b": gpt_oss(36, **_SIZES, router=_router(128)),
}
"""Published shapes by name, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5, theta=0, head_dim=64, kv_heads=8)
    positions = read_network_rotary(fields, _ROTARY)
    fields.only("swiglu_limit", SWIGLU_LIMIT)
    fields.only("swiglu_alpha", SWIGLU_ALPHA)
    router = _ROUTER.read(fields)
    fields.only("experts_per_token", router.top_k)
    fields.value("initial_context_length")  # that of the scaling of positions
    bias = fields.flag("attention_bias", True)
    mixer = dataclasses.replace(_LAYER.attention, qkv_bias=bias, out_bias=bias)
    layer = dataclasses.replace(_LAYER, mixer=mixer)
    kinds = read_layer_types(fields, sizes["layers"], every(2, sizes["layers"]))
    window = read_window_of(fields, kinds, absent=128)
    table = attention_table(layer, window, kinds)
    return fields.build(DecoderConfig, **sizes, **positions, **table, router=router)


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, _, router = experts_of(config)
    fields = {
        "model_type": "gpt_oss",
        **write_sizes(config),
        **write_layer_types(config),
        **_ROUTER.write(router),
        "attention_bias": layer.attention.qkv_bias,
        "swiglu_limit": SWIGLU_LIMIT,
    }
    # without a table, positions would be scaled
    fields.setdefault("rope_scaling", {"rope_type": "default"})
    return fields


def _names(config: DecoderConfig) -> TensorNames:
    _, experts, _ = experts_of(config)
    block = "mlp.experts."
    names = layer_names() | {
        "attention/sinks": ("self_attn.sinks", AS_IS),
        "moe/router/kernel": ("mlp.router.weight", TRANSPOSED),
        "moe/router/logit_bias": ("mlp.router.bias", AS_IS),
        "moe/experts/down_proj/kernel": (block + "down_proj", EXPERTS),
        "moe/experts/down_proj/bias": (block + "down_proj_bias", AS_IS),
    }
    for index, ours in enumerate(("gate_proj", "up_proj")):
        alternating = part(index, 2, groups=experts.d_ff, layout=EXPERTS)
        names[f"moe/experts/{ours}/kernel"] = (block + "gate_up_proj", alternating)
        names[f"moe/experts/{ours}/bias"] = (block + "gate_up_proj_bias", alternating)
    return TensorNames(names, ENDS)


FAMILY = decoder_family("GptOssForCausalLM", _read, _write, names=_names)
