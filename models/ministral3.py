"""Ministral 3: a Mistral whose queries grow with their position.

Source: `llama_4_scaling_beta` in `rope_parameters` of config.json; the factor's steps are as long
as the context before the scaling of positions.

```python
layer = LayerSpec(AttentionSpec(temperature=Temperature(0.1, interval=16_384)))
config = DecoderConfig(layers=4, layer=layer, rope_scaling=YarnScaling(16.0, 16_384))
```
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from spmd.errors import shorten
from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, Temperature, YarnScaling
from spmd.models.decoder.rotary import RopeScaling, Rotary
from spmd.models.mistral import read_mistral
from spmd.models.published.common_fields import (
    read_network_rotary,
    read_sizes,
    read_window,
    write_sizes,
)
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.rotary import TABLES
from spmd.models.published.text_config import (
    EARLIER_HEAD,
    earlier_names,
    ignored_images,
    text_values,
)

_BETA = "llama_4_scaling_beta"
_SCALING = YarnScaling(16.0, 16_384, mscale=1.0, mscale_all_dim=1.0)
_ROTARY = Rotary(1e6, _SCALING)

PRESETS = {
    "test-ministral3": DecoderConfig(
        *(64, 32, 2, 4, 2, 64),
        rope_theta=1e6,
        rope_scaling=YarnScaling(4.0, 8, mscale=1.0, mscale_all_dim=1.0),
        layer=LayerSpec(AttentionSpec(temperature=Temperature(0.1, interval=8))),
    ),
}
"""A small shape for tests."""


_OF_IMAGES = (
    "image_token_index",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "vision_config",
    "vision_feature_layer",
)


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    text = values.get("text_config")
    values = text_values(values, _OF_IMAGES)
    kind = "ministral3"
    if isinstance(text, Mapping):
        kind = text.get("model_type", "mistral")
        values = {"tie_word_embeddings": True, **values}
    if kind == "mistral":  # Mistral Small 3.1 and others, which are exported as Mistral
        return read_mistral(values)
    fields = Fields(values)
    if kind != "ministral3":
        what = f"is {shorten(kind)}, and this family has only mistral and ministral3"
        fields.refuse("text_config.model_type", what)
    sizes = read_sizes(fields, eps=1e-5, theta=0, head_dim=128, kv_heads=8)
    if fields.value(TABLES[0]) is None and fields.value(TABLES[1]) is None:
        fields.only("rope_theta", _ROTARY.theta)  # has no effect without a table
    also = (_BETA, "max_position_embeddings")
    positions = read_network_rotary(
        fields, _ROTARY, kinds=("yarn",), also=also, theta_in_table=10_000.0
    )
    temperature = _read_temperature(fields, positions["rope_scaling"])
    return fields.build(
        DecoderConfig,
        **sizes,
        **positions,
        window=read_window(fields, absent=0),
        layer=LayerSpec(AttentionSpec(temperature=temperature)),
    )


def _read_temperature(fields: Fields, scaling: RopeScaling) -> Temperature | None:
    """Parse the factor of queries, from the table of positions; 0 is none."""
    beta: Any = 0.1
    for name in TABLES:
        table = fields.value(name)
        if isinstance(table, Mapping):
            beta = table.get(_BETA)  # the later table has priority
    is_number = fields.is_number(f"{TABLES[0]}.{_BETA}", beta, least=0)
    if not is_number or beta == 0 or not isinstance(scaling, YarnScaling):
        return None
    return Temperature(float(beta), scaling.original_context)


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixer = config.pattern.group[0].attention
    fields = {
        "model_type": "ministral3",
        **write_sizes(config),
        "sliding_window": mixer.window or None,
    }
    beta = 0.0
    if mixer.temperature is not None:
        beta = mixer.temperature.strength
    fields["rope_scaling"] = {**fields.get("rope_scaling", {}), _BETA: beta}
    return fields


def _tied_as_stored(config: DecoderConfig, tensors: Collection[str]) -> DecoderConfig:
    """Return the config without a tied head if a model of images and text has a head of its own.

    Many such files lack `tie_word_embeddings`.
    """
    if f"{EARLIER_HEAD}.weight" not in tensors:
        return config
    return dataclasses.replace(config, tied=False)


def _modules_of_images() -> list[str]:
    """Return the modules of images with weights, some with biases."""
    layer = "vision_tower.transformer.layers.{layer}."
    modules = ["vision_tower.ln_pre", "vision_tower.patch_conv"]
    modules += [f"{layer}attention.{name}_proj" for name in "qkvo"]
    modules += [f"{layer}feed_forward.{name}_proj" for name in ("gate", "up", "down")]
    modules += [f"{layer}attention_norm", f"{layer}ffn_norm"]
    projector = ("linear_1", "linear_2", "norm", "patch_merger.merging_layer")
    return modules + [f"multi_modal_projector.{name}" for name in projector]


FAMILY = decoder_family(
    ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
    _read,
    _write,
    other_names=(earlier_names(layer_names()),),
    ignored=ignored_images(_modules_of_images()),
    for_tensors=_tied_as_stored,
    secondary=True,
)
