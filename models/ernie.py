"""ERNIE 4.5: neighbouring dimensions as pairs of rotary positions, dense or with experts.

Source: the technical report (yiyan.baidu.com/blog/publication/ERNIE_Technical_Report.pdf). Experts
are chosen with biases (`moe_statics`).

```python
config = dataclasses.replace(PRESETS["ernie-4.5-21b-a3b"], layers=4)
model = spmd.from_nnx(config.build)
```
"""

from collections.abc import Mapping, Sequence
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import TensorLayout
from spmd.layers.router import RouterConfig
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    Rotary,
)
from spmd.models.published.common_fields import read_sizes, write_sizes
from spmd.models.published.experts import (
    DENSE,
    SPARSE,
    RouterFields,
    dense_first,
    expert_names,
    experts_of,
    experts_table,
    mlp_kinds,
    read_count,
    write_widths,
)
from spmd.models.published.family import decoder_family, layer_names
from spmd.models.published.multi_token import AHEAD, ignored_tensors_ahead

_ROTARY = Rotary(interleaved=True)
_LAYER = LayerSpec(AttentionSpec(rotary=_ROTARY))
_THETA = 5e5


def ernie_moe(
    *shape: Any, shared: int, dense_d_ff: int, dense: int = 1, **fields: Any
) -> DecoderConfig:
    """Return the config of an ERNIE with experts, from fields of `DecoderConfig`.

    Args:
        *shape: Its fields from `vocab` to `d_ff`, the width of an expert.
        shared: Experts that every token uses.
        dense_d_ff: Hidden width of an MLP in place of experts.
        dense: First layers with such an MLP.
        **fields: Other fields.
    """
    layers, d_ff = shape[2], shape[5]
    layer = LayerSpec(_LAYER.mixer, ExpertsSpec(shared_d_ff=shared * d_ff))
    table = experts_table(layer, MLPSpec(dense_d_ff), dense_first(dense, layers))
    return DecoderConfig(*shape, **{"rope_theta": _THETA} | table | fields)


def _router(experts: int, top_k: int) -> RouterConfig:
    return RouterConfig(experts=experts, top_k=top_k, choice_bias=True, balance=0.001)


PRESETS = {
    "test-ernie-4.5": DecoderConfig(64, 32, 2, 4, 2, 64, layer=_LAYER),
    "test-ernie-4.5-moe": ernie_moe(
        *(64, 32, 3, 4, 2, 16), shared=2, dense_d_ff=48, router=_router(8, 2)
    ),
    "ernie-4.5-0.3b": DecoderConfig(
        *(103_424, 1024, 18, 16, 2, 3072), head_dim=128, tied=True, rope_theta=_THETA, layer=_LAYER
    ),
    "ernie-4.5-21b-a3b": ernie_moe(
        *(103_424, 2560, 28, 20, 4, 1536),
        shared=2,
        dense_d_ff=12_288,
        tied=True,
        router=_router(64, 6),
    ),
    "ernie-4.5-300b-a47b": ernie_moe(
        *(103_424, 8192, 54, 64, 8, 3584),
        shared=0,
        dense_d_ff=28_672,
        dense=3,
        router=_router(64, 8),
    ),
}
"""Published shapes by name, and small ones for tests."""

_MOE_NAMES = layer_names() | expert_names()
_MOE_NAMES["moe/router/bias"] = (
    "mlp.moe_statics.e_score_correction_bias",
    TensorLayout((None, 0)),  # [1, expert]
)
_ROUTER = RouterFields(
    "moe_num_experts",
    experts=64,
    top_k=6,
    top_k_name="moe_k",
    base=RouterConfig(choice_bias=True),
)
_REQUIRED = {"moe_gate": "topk", "moe_use_aux_free": True, "use_rmsnorm": True}
"""Fields of published files, each with the value that the model needs."""
_UNUSED = ("moe_capacity", AHEAD)
"""Fields about dropped tokens and multi-token prediction."""
_SMALLEST_SUM = 1e-6
"""Largest `moe_norm_min`, a lower bound of the sum of weights, that never acts."""


def _read(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5, theta=_THETA, head_dim=128, kv_heads=2, tied=True)
    bias = fields.flag("use_bias", default=False)
    mixer = AttentionSpec(rotary=_ROTARY, qkv_bias=bias, out_bias=bias)
    return fields.build(DecoderConfig, **sizes, layer=LayerSpec(mixer, MLPSpec(bias=bias)))


def _write(config: DecoderConfig) -> dict[str, Any]:
    bias = config.pattern.group[0].attention.qkv_bias
    return {"model_type": "ernie4_5", **write_sizes(config), "use_bias": bias}


def _read_moe(values: Mapping[str, Any]) -> DecoderConfig:
    fields = Fields(values)
    sizes = read_sizes(fields, eps=1e-5, theta=_THETA, kv_heads=4, d_ff=12_288, tied=True)
    fields.only("use_bias", False)
    for name, value in _REQUIRED.items():
        fields.only(name, value)
    smallest = fields.number("moe_norm_min", 1e-12, least=0)
    if smallest > _SMALLEST_SUM:
        fields.refuse("moe_norm_min", f"is {smallest}", f"at most {_SMALLEST_SUM}")
    width = fields.integer("moe_intermediate_size", 1536)
    shared = read_count(fields, "moe_num_shared_experts", 2)
    layer = LayerSpec(_LAYER.mixer, ExpertsSpec(width, shared_d_ff=shared * width))
    table = experts_table(layer, MLPSpec(), _read_kinds(fields, sizes["layers"]))
    return fields.build(DecoderConfig, **sizes, **table, router=_ROUTER.read(fields))


def _read_kinds(fields: Fields, layers: int) -> Sequence[str]:
    """Parse the first and the last layer with experts, and their interval."""
    first = read_count(fields, "moe_layer_start_index", 1)
    last = fields.value("moe_layer_end_index", -1)  # null means -1 too
    if last == -1:
        last = layers - 1
    elif not isinstance(last, int) or last < first:
        fields.refuse("moe_layer_end_index", f"is {last!r:.80}, not an integer from {first}, or -1")
        last = layers - 1
    interval = fields.integer("moe_layer_interval", 1)
    kinds = [DENSE] * layers
    for number in range(first, min(last + 1, layers)):
        if (number + 1) % interval == 0:
            kinds[number] = SPARSE
    if SPARSE not in kinds:
        fields.refuse("moe_layer_start_index", "leaves no layer with experts")
        return [SPARSE] * layers
    return kinds


def _write_moe(config: DecoderConfig) -> dict[str, Any]:
    _, experts, router = experts_of(config)
    kinds = mlp_kinds(config)
    sparse = [number for number, kind in enumerate(kinds) if kind == SPARSE]
    interval = 1
    if len(sparse) > 1:
        interval = sparse[1] - sparse[0]
    return {
        "model_type": "ernie4_5_moe",
        **write_sizes(config),
        **write_widths(config),
        **_ROUTER.write(router),
        "use_bias": False,
        "moe_num_shared_experts": experts.shared_d_ff // experts.d_ff,
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": interval,
    }


def _tensors_ahead() -> list[str]:
    """Return the tensors of modules of multi-token prediction."""
    modules = ("mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj")
    names = [f"model.{module}.{{layer}}.weight" for module in modules]
    names += [f"model.mtp_block.{{layer}}.{tensor}" for tensor, _ in layer_names().values()]
    return names


FAMILY = decoder_family("Ernie4_5ForCausalLM", _read, _write)
MOE_FAMILY = decoder_family(
    "Ernie4_5_MoeForCausalLM",
    _read_moe,
    _write_moe,
    _MOE_NAMES,
    ignored=ignored_tensors_ahead(_tensors_ahead()),
    harmless=_UNUSED,
)
