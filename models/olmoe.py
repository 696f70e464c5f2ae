"""OLMoE: an OLMo with experts, and norms of all queries and all keys (arXiv:2409.02060).

FlexOlmo (arXiv:2507.07024) is an OLMo 2 with experts that were trained apart from each other.

```python
config = dataclasses.replace(PRESETS["olmoe-1b-7b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import functools
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.layers.router import RouterConfig
from spmd.models.decoder import AttentionSpec, DecoderConfig, ExpertsSpec, LayerSpec
from spmd.models.decoder.layer import Norms
from spmd.models.published.common_fields import read_attention_bias, read_sizes, write_sizes
from spmd.models.published.experts import RouterFields, expert_names, experts_of
from spmd.models.published.family import decoder_family, layer_names

_LAYER = LayerSpec(AttentionSpec(qk_norm="full"), ExpertsSpec())
_FLEX = LayerSpec(AttentionSpec(qk_norm="full"), ExpertsSpec(), norms="after")


def _router(experts: int, top_k: int) -> RouterConfig:
    return RouterConfig(experts=experts, top_k=top_k, normalise=False)


PRESETS = {
    "test-olmoe": DecoderConfig(64, 32, 2, 4, 2, 16, layer=_LAYER, router=_router(8, 2)),
    "test-flex-olmo": DecoderConfig(64, 32, 2, 4, 2, 16, layer=_FLEX, router=_router(8, 2)),
    "olmoe-1b-7b": DecoderConfig(
        *(50_304, 2048, 16, 16, 16, 1024), layer=_LAYER, router=_router(64, 8)
    ),
}
"""Published shape by name, and small ones for tests."""

_NAMES = layer_names() | expert_names()
_FLEX_NAMES = expert_names() | layer_names(
    attention_post_norm="post_attention_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_ROUTER = RouterFields("num_experts", experts=64, top_k=8, normalise=False, balance=0.01)
_FLEX_ROUTER = RouterFields("num_experts", experts=7, top_k=5, normalise=False, balance=0.01)


def _read(
    values: Mapping[str, Any], *, eps: float, theta: float, norms: Norms, router: RouterFields
) -> DecoderConfig:
    fields = Fields(values)
    fields.only("clip_qkv", None)  # after the norms, in OLMoE
    sizes = read_sizes(fields, eps=eps, theta=theta)
    mixer = read_attention_bias(fields, AttentionSpec(qk_norm="full"))
    layer = LayerSpec(mixer, ExpertsSpec(), norms=norms)
    return fields.build(DecoderConfig, **sizes, layer=layer, router=router.read(fields))


def _write(config: DecoderConfig, *, kind: str) -> dict[str, Any]:
    layer, _, router = experts_of(config)
    return {
        "model_type": kind,
        **write_sizes(config),
        **_ROUTER.write(router),
        "attention_bias": layer.attention.qkv_bias,
    }


OLMOE_FAMILY = decoder_family(
    "OlmoeForCausalLM",
    functools.partial(_read, eps=1e-5, theta=1e4, norms="before", router=_ROUTER),
    functools.partial(_write, kind="olmoe"),
    _NAMES,
)
FLEX_FAMILY = decoder_family(
    "FlexOlmoForCausalLM",
    functools.partial(_read, eps=1e-6, theta=5e5, norms="after", router=_FLEX_ROUTER),
    functools.partial(_write, kind="flex_olmo"),
    _FLEX_NAMES,
)
