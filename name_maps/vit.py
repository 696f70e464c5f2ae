"""Name map of ViT; the patch kernel is of a convolution, `[out, channel, row, column]`."""

from collections.abc import Iterator, Mapping
from typing import Any

from spmd.hf.family import Family, Ignored, TensorMapping
from spmd.hf.fields import Fields
from spmd.hf.layout import TRANSPOSED, TensorLayout
from spmd.models.vit import ViTConfig
from spmd.partition_rules.vit import VIT

_PREFIX = "vit."
_LAYER = _PREFIX + "encoder.layer.{layer}."
_DENSE = {
    "layers/attention/q_proj": _LAYER + "attention.attention.query",
    "layers/attention/k_proj": _LAYER + "attention.attention.key",
    "layers/attention/v_proj": _LAYER + "attention.attention.value",
    "layers/attention/o_proj": _LAYER + "attention.output.dense",
    "layers/mlp/up_proj": _LAYER + "intermediate.dense",
    "layers/mlp/down_proj": _LAYER + "output.dense",
    "head": "classifier",
}
_PATCHES = _PREFIX + "embeddings.patch_embeddings.projection"
_REVERSED = TensorLayout((3, 2, 1, 0))
_NORMS = {
    "layers/attention_norm": _LAYER + "layernorm_before",
    "layers/mlp_norm": _LAYER + "layernorm_after",
    "norm": _PREFIX + "layernorm",
}


def _mappings() -> Iterator[TensorMapping]:
    yield TensorMapping("class_token", _PREFIX + "embeddings.cls_token")
    yield TensorMapping("positions", _PREFIX + "embeddings.position_embeddings")
    yield TensorMapping("patch_proj/kernel", _PATCHES + ".weight", _REVERSED)
    yield TensorMapping("patch_proj/bias", _PATCHES + ".bias")
    for ours, theirs in _DENSE.items():
        yield TensorMapping(f"{ours}/kernel", f"{theirs}.weight", TRANSPOSED)
        yield TensorMapping(f"{ours}/bias", f"{theirs}.bias")
    for ours, theirs in _NORMS.items():
        yield TensorMapping(f"{ours}/scale", f"{theirs}.weight")
        yield TensorMapping(f"{ours}/bias", f"{theirs}.bias")


_NAMES = tuple(_mappings())
_IGNORED = (
    Ignored(_PREFIX + "pooler.dense.weight", "belongs to another head"),
    Ignored(_PREFIX + "pooler.dense.bias", "belongs to another head"),
)
_OF_TRAINING = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_OF_OTHER_HEADS = ("encoder_stride", "pooler_act", "pooler_output_size")


def _read(values: Mapping[str, Any]) -> ViTConfig:
    fields = Fields(values)
    for name in (*_OF_TRAINING, *_OF_OTHER_HEADS):
        fields.value(name)
    fields.only("hidden_act", "gelu")
    fields.only("qkv_bias", True)
    labels = fields.value("id2label", {})
    classes = 2
    if isinstance(labels, Mapping) and labels:
        classes = len(labels)
    return fields.build(
        ViTConfig,
        image=fields.integer("image_size", 224),
        patch=fields.integer("patch_size", 16),
        channels=fields.integer("num_channels", 3),
        d_model=fields.integer("hidden_size", 768),
        layers=fields.integer("num_hidden_layers", 12),
        heads=fields.integer("num_attention_heads", 12),
        d_ff=fields.integer("intermediate_size", 3072),
        classes=fields.integer("num_labels", classes),
        norm_eps=fields.number("layer_norm_eps", 1e-12, least=0),
    )


def _write(config: ViTConfig) -> dict[str, Any]:
    return {
        "model_type": "vit",
        "image_size": config.image,
        "patch_size": config.patch,
        "num_channels": config.channels,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.d_ff,
        "num_labels": config.classes,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": "gelu",
    }


FAMILY = Family(
    architectures=("ViTForImageClassification",),
    read_config=_read,
    write_config=_write,
    fits=lambda config: isinstance(config, ViTConfig),
    rules=lambda config: VIT,
    names=lambda config: _NAMES,
    ignored=lambda config: _IGNORED,
    harmless=(*_OF_TRAINING, *_OF_OTHER_HEADS),
)
