"""Gemma 3: five layers with a sliding window to one without, and two rotary bases (arXiv:2503.19786).

Queries and keys are normalised, in place of Gemma 2's soft cap of scores. Of models of images and
text, the text part is read.

```python
config = dataclasses.replace(PRESETS["gemma3-1b"], layers=6)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping, Sequence
from typing import Any

from spmd.hf.family import Ignored
from spmd.hf.fields import Fields
from spmd.models.decoder import AttentionSpec, DecoderConfig, LayerSpec, Rotary
from spmd.models.gemma import DEFAULTS, MLP, NAMES2, read_gemma, write_gemma_layers
from spmd.models.published.common_fields import read_soft_cap
from spmd.models.published.family import decoder_family
from spmd.models.published.layer_types import (
    FULL,
    SLIDING,
    attention_table,
    every,
    read_layer_types,
    read_rotary_by_kind,
    read_window_of,
    write_rotary_by_kind,
)
from spmd.models.published.text_config import (
    earlier_names,
    ignored_images,
    text_values,
)

_THETAS = {"theta": 1e6, "local_theta": 1e4}
_ROTARY = {FULL: Rotary(1e6), SLIDING: Rotary(1e4)}


def gemma3(
    kinds: Sequence[str],
    *,
    window: int = 512,
    rotary: Mapping[str, Rotary] = _ROTARY,
    query_scale: float = 256,
    **fields: Any,
) -> DecoderConfig:
    """Return the config of a Gemma 3 from fields of `DecoderConfig`.

    Args:
        kinds: The kind of each layer, as in config.json.
        window: Sliding window of layers of kind `sliding_attention`.
        rotary: Rotary positions of each kind.
        query_scale: As in `spmd.models.gemma.gemma2`.
        **fields: Other fields.
    """
    layer = LayerSpec(AttentionSpec(qk_norm="head", scale=query_scale**-0.5), MLP, norms="both")
    table = attention_table(layer, window, kinds, rotary=[rotary[kind] for kind in kinds])
    return DecoderConfig(**DEFAULTS | table | {"layers": len(kinds)} | fields)


_270M: dict[str, Any] = {"d_model": 640, "heads": 4, "kv_heads": 1, "d_ff": 2048, "head_dim": 256}
_1B: dict[str, Any] = {"d_model": 1152, "heads": 4, "kv_heads": 1, "d_ff": 6912, "head_dim": 256}

PRESETS = {
    "test-gemma3": gemma3(every(6, 12), window=5, query_scale=9, vocab=64, d_model=32, d_ff=64),
    "gemma3-270m": gemma3(every(6, 18), vocab=262_144, **_270M),
    "gemma3-1b": gemma3(every(6, 26), vocab=262_144, **_1B),
}
"""Published shapes by name, and a small one for tests."""

_OF_IMAGES = (
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "mm_tokens_per_image",
    "vision_config",
)
_DEFAULTS = {"vocab_size": 262_208, "num_attention_heads": 8}
"""Sizes that files of images and text lack."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    if "text_config" in values:
        values = _DEFAULTS | text_values(values, _OF_IMAGES)
    fields = Fields(values)
    fields.value("_sliding_window_pattern")  # has no effect
    fields.only("attn_logit_softcapping", None)
    sizes = read_gemma(fields, theta=0)
    default = every(fields.integer("sliding_window_pattern", 6), sizes["layers"])
    kinds = read_layer_types(fields, sizes["layers"], default)
    return fields.build(
        gemma3,
        **sizes,
        kinds=kinds,
        rotary=read_rotary_by_kind(fields, **_THETAS),
        window=read_window_of(fields, kinds, absent=4096),
        query_scale=fields.integer("query_pre_attn_scalar", 256),
        logits_soft_cap=read_soft_cap(fields, "final_logit_softcapping", absent=0.0),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    fields = write_gemma_layers(config)
    for name in ("rope_theta", "rope_scaling", "attn_logit_softcapping"):
        fields.pop(name, None)
    return {"model_type": "gemma3_text", **fields, **write_rotary_by_kind(config, **_THETAS)}


def _modules_of_images() -> list[str]:
    """Return the modules of images, with weights and biases."""
    layer = "encoder.layers.{layer}."
    modules = ["embeddings.patch_embedding", "post_layernorm"]
    modules += [f"{layer}self_attn.{name}_proj" for name in ("q", "k", "v", "out")]
    modules += [f"{layer}{name}" for name in ("layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2")]
    modules += [
        f"head.{name}" for name in ("attention.out_proj", "layernorm", "mlp.fc1", "mlp.fc2")
    ]
    return modules


def _tensors_of_images() -> tuple[Ignored, ...]:
    """Return the tensors of images, with the prefixes of both forms of files."""
    alone = ["head.attention.in_proj_bias", "head.attention.in_proj_weight", "head.probe"]
    alone.append("embeddings.position_embedding.weight")
    found: list[Ignored] = []
    for prefix in ("vision_tower.", "vision_tower.vision_model."):
        modules = [prefix + name for name in _modules_of_images()]
        found += ignored_images(modules, [prefix + name for name in alone])
    projector = "multi_modal_projector.mm_"
    others = [f"{projector}input_projection_weight", f"{projector}soft_emb_norm.weight"]
    return (*found, *ignored_images([], others))


FAMILY = decoder_family(
    ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    _read,
    _write,
    NAMES2,
    other_names=(earlier_names(NAMES2),),
    ignored=_tensors_of_images(),
)
