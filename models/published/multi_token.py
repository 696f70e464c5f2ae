"""Multi-token prediction as in checkpoints: modules after the last layer (DeepSeek-V3)."""

import dataclasses
from collections.abc import Collection, Iterable

from spmd.hf.family import Ignored
from spmd.hf.layout import AS_IS, TRANSPOSED
from spmd.models.decoder.decoder import DecoderConfig
from spmd.models.published.tensor_names import Names

AHEAD = "num_nextn_predict_layers"
"""Field of config.json: the number of modules."""

AHEAD_NAMES: Names = {
    "embed_norm/scale": ("enorm.weight", AS_IS),
    "hidden_norm/scale": ("hnorm.weight", AS_IS),
    "proj/kernel": ("eh_proj.weight", TRANSPOSED),
    "norm/scale": ("shared_head.norm.weight", AS_IS),
}
"""Tensors of a module, besides those of its layer (`TensorNames.ahead`)."""


def with_stored_ahead(config: DecoderConfig, tensors: Collection[str]) -> DecoderConfig:
    """Return the config without multi-token prediction if a checkpoint lacks its tensors.

    `transformers` drops them, and keeps the field of config.json.
    """
    prefix = f"model.layers.{config.layers}."
    if any(tensor.startswith(prefix) for tensor in tensors):
        return config
    return dataclasses.replace(config, predict_ahead=0)


def ignored_ahead(layer: Names, *others: str) -> tuple[Ignored, ...]:
    """Return the tensors of a module outside of the layers, `mtp.…`, which is not read.

    Args:
        layer: Tensors of its layer.
        *others: More of them.
    """
    ends = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    tensors = [*(tensor for tensor, _ in layer.values()), *others]
    names = [f"mtp.layers.{{layer}}.{tensor}" for tensor in tensors]
    names += [f"mtp.{end}.weight" for end in ends]
    return ignored_tensors_ahead(names)


def ignored_tensors_ahead(names: Iterable[str]) -> tuple[Ignored, ...]:
    """Return unused tensors of multi-token prediction."""
    return tuple(Ignored(name, "predicts the second next token") for name in names)
