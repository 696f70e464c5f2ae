"""Granite: a Llama with factors of embeddings, scores, residual branches and logits.

Source: the fields `…_multiplier` and `logits_scaling` of config.json (IBM, arXiv:2505.08699; after
the maximal update parametrisation, arXiv:2203.03466). Granite SWA has sinks too, windows in three of
four layers, and a base of rotary positions for each layer, 0 for none (`layer_rope_theta`).

```python
config = dataclasses.replace(PRESETS["granite-3.1-2b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.errors import shorten
from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, RopeScaling, Rotary
from spmd.models.published.common_fields import (
    read_factor,
    read_layer,
    read_sizes,
    write_biases,
    write_sizes,
)
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.layer_types import (
    FULL,
    attention_table,
    every,
    read_layer_types,
    read_window_of,
    write_layer_types,
)
from spmd.models.published.rotary import write_rotary


def granite(*shape: Any, attention_scale: float = 1.0, **fields: Any) -> DecoderConfig:
    """Return the config of a Granite from fields of `DecoderConfig`.

    Args:
        *shape: The first fields, in order.
        attention_scale: Factor of the scores (`attention_multiplier`).
        **fields: Other fields.
    """
    layer = LayerSpec(AttentionSpec(scale=attention_scale))
    return DecoderConfig(*shape, **{"layer": layer} | fields)


_SWA = attention_table(
    LayerSpec(AttentionSpec(scale=0.2, sinks=True)),
    window=5,
    kinds=[FULL, *every(4, 7)],
    rotary=[None, *[Rotary(1e4, RopeScaling())] * 3] * 2,
)

PRESETS = {
    "test-granite": granite(
        *(64, 32, 2, 4, 2, 64),
        tied=True,
        attention_scale=0.2,
        embed_scale=3.0,
        residual_scale=0.5,
        logits_scale=0.25,
    ),
    "test-granite-swa": DecoderConfig(64, 32, 8, 4, 2, 64, tied=True, **_SWA),
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
    attention_scale, factors = read_factors(fields)
    layer = _read_layer(fields, scale=attention_scale)
    return fields.build(DecoderConfig, **sizes, **factors, layer=layer)


def _read_layer(fields: Fields, **options: Any) -> LayerSpec:
    """Parse a layer with options of attention besides those of config.json."""
    layer = read_layer(fields)
    mixer = dataclasses.replace(layer.attention, **options)
    return dataclasses.replace(layer, mixer=mixer)


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


def _read_swa(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5, kv_heads=4, tied=True)
    layers = sizes["layers"]
    rotary = Rotary(sizes.pop("rope_theta"), sizes.pop("rope_scaling"))
    kinds = read_layer_types(fields, layers, [FULL, *every(4, layers)][:layers])
    window = read_window_of(fields, kinds, absent=128)
    each = _read_rotary_by_layer(fields, rotary, len(kinds))
    attention_scale, factors = read_factors(fields)
    layer = _read_layer(fields, scale=attention_scale, sinks=True)
    table = attention_table(layer, window, kinds, rotary=each)
    return fields.build(DecoderConfig, **sizes, **factors, **table)


def _read_rotary_by_layer(fields: Fields, rotary: Rotary, layers: int) -> list[Rotary | None]:
    """Parse `layer_rope_theta`, the base of each layer; 0 for none."""
    name = "layer_rope_theta"
    thetas = fields.value(name, [rotary.theta] * layers)
    if not isinstance(thetas, list) or len(thetas) != layers:
        fields.refuse(name, f"is {shorten(thetas)}, not a list of numbers, one for each layer")
        return [rotary] * layers
    each: list[Rotary | None] = []
    for theta in thetas:
        positions = None
        if theta != 0 and fields.is_number(name, theta, least=1):
            positions = dataclasses.replace(rotary, theta=float(theta))
        each.append(positions)
    return each


def _write_swa(config: DecoderConfig) -> dict[str, Any]:
    thetas = []
    rotary = Rotary(config.rope_theta, config.rope_scaling)
    for spec in config.pattern.kinds:
        positions = spec.attention.rotary
        theta = 0.0
        if positions is not None:
            theta = positions.theta
            rotary = positions
        thetas.append(theta)
    return {
        **_write(config),
        **write_rotary(rotary),
        "model_type": "granite_swa",
        **write_layer_types(config),
        "layer_rope_theta": thetas,
    }


SWA_FAMILY = decoder_family(
    "GraniteSWAForCausalLM",
    _read_swa,
    _write_swa,
    layer_names() | {"attention/sinks": ("self_attn.sinks", AS_IS)},
)
