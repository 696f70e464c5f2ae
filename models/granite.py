"""Granite 3: a Llama with factors of embeddings, scores, residual branches and logits.

Source: the fields `…_multiplier` and `logits_scaling` of config.json (IBM, arXiv:2505.08699; after
the maximal update parametrisation, arXiv:2203.03466).

```python
config = dataclasses.replace(PRESETS["granite-3.1-2b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec
from spmd.models.decoder.published import (
    decoder_family,
    read_factor,
    read_layer,
    read_sizes,
    write_biases,
    write_sizes,
)


def granite(*shape: Any, attention_scale: float = 1.0, **fields: Any) -> DecoderConfig:
    """Return the config of a Granite from fields of `DecoderConfig`.

    Args:
        *shape: The first fields, in order.
        attention_scale: Factor of the scores (`attention_multiplier`).
        **fields: Other fields.
    """
    layer = LayerSpec(AttentionSpec(scale=attention_scale))
    return DecoderConfig(*shape, **{"layer": layer} | fields)


PRESETS = {
    "test-granite": granite(
        *(64, 32, 2, 4, 2, 64),
        tied=True,
        attention_scale=0.2,
        embed_scale=3.0,
        residual_scale=0.5,
        logits_scale=0.25,
    ),
    "granite-3.1-2b": granite(
        *(49_155, 2048, 40, 32, 8, 8192),
        tied=True,
        rope_theta=5e6,
        attention_scale=0.015625,
        embed_scale=12.0,
        residual_scale=0.22,
        logits_scale=1 / 8,
    ),
}
"""Published shapes by name, and a small one for tests."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields)
    layer = read_layer(fields)
    attention_scale, factors = read_factors(fields)
    mixer = dataclasses.replace(layer.attention, scale=attention_scale)
    layer = dataclasses.replace(layer, mixer=mixer)
    return fields.build(DecoderConfig, **sizes, **factors, layer=layer)


def read_factors(fields: Fields) -> tuple[float, dict[str, float]]:
    """Parse the factor of the scores, and the others as arguments of `DecoderConfig`."""
    factors = {
        "embed_scale": read_factor(fields, "embedding_multiplier"),
        "residual_scale": read_factor(fields, "residual_multiplier"),
        "logits_scale": 1 / read_factor(fields, "logits_scaling"),
    }
    return read_factor(fields, "attention_multiplier"), factors


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "granite",
        **write_sizes(config),
        **write_biases(config),
        **write_factors(config, config.pattern.group[0].attention),
    }


def write_factors(config: DecoderConfig, attention: AttentionSpec) -> dict[str, float]:
    """Return the fields of config.json: the inverse of `read_factors`."""
    return {
        "attention_multiplier": attention.scale or attention.head_dim**-0.5,
        "embedding_multiplier": config.embed_scale or config.d_model**0.5,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": 1 / config.logits_scale,
    }


FAMILY = decoder_family("GraniteForCausalLM", _read, _write)
