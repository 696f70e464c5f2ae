"""Granite with experts: the factors of Granite 3, and all experts of a layer in one tensor.

Source: huggingface.co/ibm-granite/granite-3.0-1b-a400m-base, and PowerMoE (arXiv:2408.13359).
`granitemoeshared` has a shared expert too.

```python
config = dataclasses.replace(PRESETS["granite-3.0-1b-a400m"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import EXPERTS_TRANSPOSED, TRANSPOSED, part
from spmd.layers.router import RouterConfig
from spmd.models.decoder import AttentionSpec, DecoderConfig, ExpertsSpec, LayerSpec
from spmd.models.granite import read_factors, write_factors
from spmd.models.published.common_fields import read_attention_bias, read_sizes, write_sizes
from spmd.models.published.experts import RouterFields, experts_of, read_count
from spmd.models.published.family import decoder_family, layer_names


def granite_moe(
    *shape: Any, attention_scale: float = 1.0, shared_d_ff: int = 0, **fields: Any
) -> DecoderConfig:
    """Return the config of a Granite with experts, from fields of `DecoderConfig`.

    Args:
        *shape: The first fields, in order; d_ff is the width of an expert.
        attention_scale: Factor of the scores (`attention_multiplier`).
        shared_d_ff: Hidden width of the shared expert; 0 for none.
        **fields: Other fields.
    """
    layer = LayerSpec(AttentionSpec(scale=attention_scale), ExpertsSpec(shared_d_ff=shared_d_ff))
    return DecoderConfig(*shape, **{"layer": layer} | fields)


_TEST: dict[str, Any] = {
    **{"attention_scale": 0.2, "embed_scale": 3.0, "residual_scale": 0.5, "logits_scale": 0.25},
    "router": RouterConfig(balance=0.001),
}

PRESETS = {
    "test-granite-moe": granite_moe(64, 32, 2, 4, 2, 16, **_TEST),
    "test-granite-moe-shared": granite_moe(64, 32, 2, 4, 2, 16, shared_d_ff=24, **_TEST),
    "granite-3.0-1b-a400m": granite_moe(
        *(49_155, 1024, 24, 16, 8, 512),
        tied=True,
        norm_eps=1e-6,
        attention_scale=0.015625,
        embed_scale=12.0,
        residual_scale=0.22,
        logits_scale=1 / 6,
        router=RouterConfig(experts=32, top_k=8, balance=0.001),
    ),
}
"""Published shape by name, and small ones for tests."""

_INTO = "block_sparse_moe.input_linear.weight"
_SHARED_INTO = "shared_mlp.input_linear.weight"
NAMES = layer_names() | {
    "moe/router/kernel": ("block_sparse_moe.router.layer.weight", TRANSPOSED),
    "moe/experts/gate_proj/kernel": (_INTO, part(0, 2, layout=EXPERTS_TRANSPOSED)),
    "moe/experts/up_proj/kernel": (_INTO, part(1, 2, layout=EXPERTS_TRANSPOSED)),
    "moe/experts/down_proj/kernel": ("block_sparse_moe.output_linear.weight", EXPERTS_TRANSPOSED),
    "moe/shared/gate_proj/kernel": (_SHARED_INTO, part(0, 2, layout=TRANSPOSED)),
    "moe/shared/up_proj/kernel": (_SHARED_INTO, part(1, 2, layout=TRANSPOSED)),
    "moe/shared/down_proj/kernel": ("shared_mlp.output_linear.weight", TRANSPOSED),
}
"""Tensors of a layer."""

_ROUTER = RouterFields("num_local_experts", experts=8, top_k=2)
_SHARED = "shared_intermediate_size"


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    return _build(Fields(values), shared_d_ff=0)


def _read_shared(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    fields.only("position_embedding_type", "rope")
    return _build(fields, read_count(fields, _SHARED, 0))


def _build(fields: Fields, shared_d_ff: int) -> DecoderConfig:
    """Parse the other fields of both architectures."""
    sizes = read_sizes(fields)
    attention_scale, factors = read_factors(fields)
    mixer = read_attention_bias(fields, AttentionSpec(scale=attention_scale))
    layer = LayerSpec(mixer, ExpertsSpec(shared_d_ff=shared_d_ff))
    router = _ROUTER.read(fields)
    return fields.build(DecoderConfig, **sizes, **factors, layer=layer, router=router)


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, _, router = experts_of(config)
    return {
        "model_type": "granitemoe",
        **write_sizes(config),
        **write_factors(config, layer.attention),
        **_ROUTER.write(router),
        "attention_bias": layer.attention.qkv_bias,
    }


def _write_shared(config: DecoderConfig) -> dict[str, Any]:
    _, experts, _ = experts_of(config)
    shared = {_SHARED: experts.shared_d_ff}
    return {**_write(config), "model_type": "granitemoeshared", **shared}


FAMILY = decoder_family("GraniteMoeForCausalLM", _read, _write, NAMES)
SHARED_FAMILY = decoder_family(
    "GraniteMoeSharedForCausalLM", _read_shared, _write_shared, NAMES, secondary=True
)
