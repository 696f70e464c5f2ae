"""Name maps of Qwen 2 and Qwen 3: Llama with attention biases or query and key norms."""

import functools
from collections.abc import Mapping
from typing import Any

from spmd.hf.family import Family, TensorMapping
from spmd.hf.fields import Fields
from spmd.models.qwen import QwenConfig
from spmd.name_maps import llama
from spmd.partition_rules.qwen import QWEN2, QWEN2_TIED, QWEN3, QWEN3_TIED
from spmd.run.config import ModelConfig
from spmd.sharding.rules import Rules

_ATTENTION = "model.layers.{layer}.self_attn."
_BIASES = (
    TensorMapping("layers/attention/q_proj/bias", _ATTENTION + "q_proj.bias"),
    TensorMapping("layers/attention/k_proj/bias", _ATTENTION + "k_proj.bias"),
    TensorMapping("layers/attention/v_proj/bias", _ATTENTION + "v_proj.bias"),
)
_NORMS = (
    TensorMapping("layers/attention/q_norm/scale", _ATTENTION + "q_norm.weight"),
    TensorMapping("layers/attention/k_norm/scale", _ATTENTION + "k_norm.weight"),
)


def _read(values: Mapping[str, Any], *, head_dim: int, **attention: bool) -> QwenConfig:
    fields = Fields(values)
    fields.only("attention_bias", False)
    fields.only("use_sliding_window", False)
    # both are unused without `use_sliding_window`
    fields.value("sliding_window")
    fields.value("max_window_layers")
    shape = llama.read_shape(fields, head_dim=head_dim)
    llama.check_layer_types(fields, shape["layers"], "full_attention")
    return fields.build(QwenConfig, **shape, **attention)


def _write(config: QwenConfig, kind: str) -> dict[str, Any]:
    return {"model_type": kind, **llama.write_shape(config), "use_sliding_window": False}


def _fits(config: ModelConfig, *, qkv_bias: bool) -> bool:
    if not isinstance(config, QwenConfig) or config.window:
        return False
    return (config.qkv_bias, config.qk_norm) == (qkv_bias, not qkv_bias)


def _rules(config: QwenConfig) -> Rules:
    untied, tied = QWEN3, QWEN3_TIED
    if config.qkv_bias:
        untied, tied = QWEN2, QWEN2_TIED
    if config.tied:
        return tied
    return untied


def _names(config: QwenConfig) -> tuple[TensorMapping, ...]:
    if config.qkv_bias:
        return (*llama.names(config), *_BIASES)
    return (*llama.names(config), *_NORMS)


QWEN2_FAMILY = Family(
    architectures=("Qwen2ForCausalLM",),
    read_config=functools.partial(_read, head_dim=0, qkv_bias=True, qk_norm=False),
    write_config=functools.partial(_write, kind="qwen2"),
    fits=functools.partial(_fits, qkv_bias=True),
    rules=_rules,
    names=_names,
    ignored=llama.ignored,
)
QWEN3_FAMILY = Family(
    architectures=("Qwen3ForCausalLM",),
    read_config=functools.partial(_read, head_dim=128, qkv_bias=False, qk_norm=True),
    write_config=functools.partial(_write, kind="qwen3"),
    fits=functools.partial(_fits, qkv_bias=False),
    rules=_rules,
    names=_names,
    ignored=llama.ignored,
)
