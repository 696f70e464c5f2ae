"""HyperCLOVA X: a Granite with norms before and after attention and MLP.

Source: huggingface.co/naver-hyperclovax/HyperCLOVAX-SEED-Think-14B, whose config.json has
`use_post_norm` and the factors of the maximal update parametrisation (arXiv:2203.03466). Unlike in
Granite, logits are multiplied by `logits_scaling`.

```python
config = dataclasses.replace(PRESETS["test-hyperclovax"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec
from spmd.models.decoder.layer import Norms
from spmd.models.granite import write_factors
from spmd.models.published.common_fields import (
    read_factor,
    read_layer,
    read_sizes,
    write_biases,
    write_sizes,
)
from spmd.models.published.family import decoder_family, layer_names

_LAYER = LayerSpec(AttentionSpec(scale=0.2), norms="both")
PRESETS = {
    "test-hyperclovax": DecoderConfig(
        *(64, 32, 2, 4, 2, 64), layer=_LAYER, embed_scale=3.0, residual_scale=0.5, logits_scale=0.5
    )
}
"""A small shape for tests."""

_BOTH = layer_names(
    attention_norm="input_layernorm",
    attention_post_norm="post_norm1",
    mlp_norm="post_attention_layernorm",
    mlp_post_norm="post_norm2",
)


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields)
    layer = read_layer(fields)
    head_dim = sizes["head_dim"] or sizes["d_model"] // sizes["heads"]
    scale = head_dim**-0.5
    if fields.value("attention_multiplier") is not None:
        scale = read_factor(fields, "attention_multiplier")
    norms: Norms = "before"
    if fields.flag("use_post_norm", default=True):
        norms = "both"
    mixer = dataclasses.replace(layer.attention, scale=scale)
    return fields.build(
        DecoderConfig,
        **sizes,
        layer=dataclasses.replace(layer, mixer=mixer, norms=norms),
        embed_scale=read_factor(fields, "embedding_multiplier"),
        residual_scale=read_factor(fields, "residual_multiplier"),
        logits_scale=read_factor(fields, "logits_scaling"),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "hyperclovax",
        **write_sizes(config),
        **write_biases(config),
        **write_factors(config, config.pattern.group[0].attention),
        "logits_scaling": config.logits_scale,
        "use_post_norm": config.pattern.group[0].norms == "both",
    }


FAMILY = decoder_family("HyperCLOVAXForCausalLM", _read, _write, _BOTH, secondary=True)
