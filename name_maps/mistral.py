"""Name map of Mistral: Llama with sliding-window attention."""

from collections.abc import Mapping
from typing import Any

from spmd.hf.family import Family
from spmd.hf.fields import Fields
from spmd.models.llama import LlamaConfig
from spmd.models.mistral import MistralConfig
from spmd.name_maps import llama
from spmd.run.config import ModelConfig

_SHAPES = (LlamaConfig, MistralConfig)


def _read(values: Mapping[str, Any]) -> MistralConfig:
    fields = Fields(values)
    shape = llama.read_shape(fields)
    window = llama.read_window(fields, absent=4096)
    return fields.build(MistralConfig, **shape, window=window)


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {
        "model_type": "mistral",
        **llama.write_shape(config),
        "sliding_window": config.window or None,
    }


def _fits(config: ModelConfig) -> bool:
    return isinstance(config, LlamaConfig) and type(config) in _SHAPES and llama.is_plain(config)


FAMILY = Family(
    architectures=("MistralForCausalLM",),
    read_config=_read,
    write_config=_write,
    fits=_fits,
    rules=llama.FAMILY.rules,
    names=llama.names,
    ignored=llama.ignored,
)
