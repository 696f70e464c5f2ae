"""Name maps of Gemma and Gemma 2; in Gemma 2, layers 0, 2, … are local and 1, 3, … global."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from spmd.hf.family import Family, TensorMapping
from spmd.hf.fields import Fields
from spmd.models.gemma import Gemma2Config, GemmaConfig
from spmd.name_maps import llama
from spmd.partition_rules.gemma import GEMMA, GEMMA2

_TANH = "gelu_pytorch_tanh"
_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def _read(values: Mapping[str, Any]) -> GemmaConfig:
    fields = Fields(values)
    # both mean the tanh approximation: the first releases wrote "gelu" for it
    shape = _shape(fields, ("hidden_act", _TANH, "gelu"))
    fields.only("hidden_activation", _TANH)
    return fields.build(GemmaConfig, **shape)


def _shape(fields: Fields, activation: tuple[str, ...]) -> dict[str, Any]:
    fields.only("attention_bias", False)
    fields.only("use_bidirectional_attention", False)
    return llama.read_shape(fields, head_dim=256, tied=True, activation=activation)


def _read2(values: Mapping[str, Any]) -> Gemma2Config:
    fields = Fields(values)
    shape = _shape(fields, ("hidden_activation", _TANH))
    fields.only("hidden_act", _TANH)
    # affects only generation
    fields.value("cache_implementation")
    for name in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
        if fields.is_null(name):
            fields.refuse(name, "is null, and this model requires it")
    fields.only("sliding_window_size", None, fields.value("sliding_window"))
    llama.check_layer_types(fields, shape["layers"], "sliding_attention", "full_attention")
    return fields.build(
        Gemma2Config,
        **shape,
        window=fields.integer("sliding_window", 4096),
        query_scale=fields.integer("query_pre_attn_scalar", 256),
        attention_soft_cap=fields.number("attn_logit_softcapping", 50.0),
        logits_soft_cap=fields.number("final_logit_softcapping", 30.0),
    )


def _write(config: GemmaConfig) -> dict[str, Any]:
    return {"model_type": "gemma", **llama.write_shape(config), "hidden_act": _TANH}


def _write2(config: Gemma2Config) -> dict[str, Any]:
    shape = llama.write_shape(config)
    del shape["hidden_act"]
    return {
        "model_type": "gemma2",
        **shape,
        "hidden_activation": _TANH,
        "sliding_window": config.window,
        "query_pre_attn_scalar": config.query_scale,
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logits_soft_cap,
    }


def _names2(config: Gemma2Config) -> tuple[TensorMapping, ...]:
    layer = [name for name in llama.names(config) if name.path.endswith("kernel")]
    for ours, theirs in _NORMS.items():
        tensor = f"model.layers.{{layer}}.{theirs}.weight"
        layer.append(TensorMapping(f"layers/{ours}/scale", tensor))
    local = _every_second(layer, "local_block", first=0)
    others = _every_second(layer, "global_block", first=1)
    return (*llama.ends(config), *local, *others)


def _every_second(
    layer: Iterable[TensorMapping], block: str, *, first: int
) -> Iterator[TensorMapping]:
    """Yield the mappings of every second layer, from those of any layer."""
    for name in layer:
        path = name.path.replace("layers/", f"layers/{block}/")
        yield dataclasses.replace(name, path=path, first=first, step=2)


def _fits(config: Any) -> bool:
    return type(config) is GemmaConfig and llama.is_plain(config) and not config.window


def _fits2(config: Any) -> bool:
    return isinstance(config, Gemma2Config) and llama.is_plain(config) and llama.divides(config)


GEMMA_FAMILY = Family(
    architectures=("GemmaForCausalLM",),
    read_config=_read,
    write_config=_write,
    fits=_fits,
    rules=lambda config: GEMMA,
    names=llama.names,
    ignored=llama.ignored,
)
GEMMA2_FAMILY = Family(
    architectures=("Gemma2ForCausalLM",),
    read_config=_read2,
    write_config=_write2,
    fits=_fits2,
    rules=lambda config: GEMMA2,
    names=_names2,
    ignored=llama.ignored,
)
