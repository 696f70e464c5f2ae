"""Solar Open: experts chosen with biases beside a shared one, in all layers.

Source: huggingface.co/upstage/Solar-Open-100B.

```python
config = dataclasses.replace(PRESETS["solar-open-100b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, ExpertsSpec, LayerSpec
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.experts import (
    CHOICE_BIASES,
    RouterFields,
    expert_names,
    experts_of,
    read_shared_experts,
    write_shared_experts,
)
from spmd.models.published.family import decoder_family, layer_names


def solar_open(*shape: Any, **fields: Any) -> DecoderConfig:
    """Return the config of a Solar Open from fields of `DecoderConfig`.

    Args:
        *shape: Its fields from `vocab` to `d_ff`, the width of an expert and of the shared one.
        **fields: Other fields.
    """
    experts = ExpertsSpec(shared_d_ff=shape[5])
    layer = LayerSpec(AttentionSpec(), experts)
    defaults: dict[str, Any] = {"layer": layer, "rope_theta": 1e6}
    return DecoderConfig(*shape, **defaults | fields)


PRESETS = {
    "test-solar-open": solar_open(
        *(64, 32, 2, 4, 2, 16),
        head_dim=16,
        router=dataclasses.replace(CHOICE_BIASES, experts=8, top_k=2),
    ),
    "solar-open-100b": solar_open(
        *(196_608, 4096, 48, 64, 8, 1280),
        head_dim=128,
        router=dataclasses.replace(CHOICE_BIASES, experts=128, top_k=8, bias_rate=1e-3),
    ),
}
"""Published shape by name, and a small one for tests."""

_ROUTER = RouterFields(
    "n_routed_experts",
    experts=128,
    top_k=8,
    normalise=True,
    groups=(1, 1),
    scale=1.0,
    balance_name="",
    base=CHOICE_BIASES,
)


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5, theta=1e6, kv_heads=8, head_dim=128, d_ff=1280)
    bias = fields.flag("attention_bias", default=False)
    mixer = AttentionSpec(qkv_bias=bias)
    experts = read_shared_experts(fields, d_ff=1280)
    fields.only("first_k_dense_replace", 0)
    sizes["layer"] = LayerSpec(mixer, experts)
    sizes["router"] = _ROUTER.read(fields)
    return fields.build(DecoderConfig, **sizes)


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, _, router = experts_of(config)
    mixer = layer.attention
    fields = write_sizes(config)
    fields |= write_shared_experts(config)
    fields |= _ROUTER.write(router)
    fields["attention_bias"] = mixer.qkv_bias
    fields["model_type"] = "solar_open"
    return fields


FAMILY = decoder_family(
    "SolarOpenForCausalLM", _read, _write, layer_names() | expert_names(), secondary=True
)
