"""Name map of Mixtral: each expert has tensors w1 (gate), w3 (up) and w2 (down)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.hf.family import Family, TensorMapping
from spmd.hf.fields import Fields
from spmd.hf.layout import TRANSPOSED
from spmd.layers.router import RouterConfig
from spmd.models.mixtral import MixtralConfig
from spmd.name_maps import llama
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.run.config import ModelConfig

_MOE = "model.layers.{layer}.block_sparse_moe."
_EXPERT = _MOE + "experts.{expert}."
_EXPERTS = (
    TensorMapping("layers/moe/router/kernel", _MOE + "gate.weight", TRANSPOSED),
    TensorMapping("layers/moe/experts/gate_proj/kernel", _EXPERT + "w1.weight", TRANSPOSED),
    TensorMapping("layers/moe/experts/up_proj/kernel", _EXPERT + "w3.weight", TRANSPOSED),
    TensorMapping("layers/moe/experts/down_proj/kernel", _EXPERT + "w2.weight", TRANSPOSED),
)


def _names(config: MixtralConfig) -> tuple[TensorMapping, ...]:
    return (*llama.ends(config), *llama.ATTENTION, *_EXPERTS)


def _read(values: Mapping[str, Any]) -> MixtralConfig:
    fields = Fields(values)
    fields.only("tie_word_embeddings", False)
    router = fields.nested(
        RouterConfig,
        experts=fields.integer("num_local_experts", 8),
        top_k=fields.integer("num_experts_per_tok", 2),
        jitter=fields.number("router_jitter_noise", 0.0, least=0),
        balance=fields.number("router_aux_loss_coef", 0.001, least=0),
    )
    shape = llama.read_shape(fields, eps=1e-5, theta=1e6)
    window = llama.read_window(fields, absent=0)
    return fields.build(MixtralConfig, **shape, window=window, router=router or RouterConfig())


def _write(config: MixtralConfig) -> dict[str, Any]:
    return {
        "model_type": "mixtral",
        **llama.write_shape(config),
        "sliding_window": config.window or None,
        "num_local_experts": config.router.experts,
        "num_experts_per_tok": config.router.top_k,
        "router_jitter_noise": config.router.jitter,
        "router_aux_loss_coef": config.router.balance,
    }


def _fits(config: ModelConfig) -> bool:
    if type(config) is not MixtralConfig or not llama.is_plain(config):
        return False
    if config.tied or config.shared_d_ff or config.dense_layers:
        return False
    if config.router.top_k == 1:  # `transformers` divides by the sum of the chosen weights
        return False
    plain = RouterConfig(experts=config.router.experts, top_k=config.router.top_k)
    # These affect only training.
    changes_nothing = ("jitter", "balance", "balance_form", "balance_over", "z_loss")
    as_trained = {name: getattr(config.router, name) for name in changes_nothing}
    return config.gated and config.router == dataclasses.replace(plain, **as_trained)


FAMILY = Family(
    architectures=("MixtralForCausalLM",),
    read_config=_read,
    write_config=_write,
    fits=_fits,
    rules=lambda config: MIXTRAL,
    names=_names,
    ignored=llama.ignored,
)
