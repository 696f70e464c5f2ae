"""Experts as in config.json: routers, layers without experts, and names of tensors.

```python
_ROUTER = RouterFields("num_experts", experts=128, top_k=8, normalise=False)
kinds = read_sparse_layers(fields, layers)
table = experts_table(layer, MLPSpec(dense_d_ff), kinds)
fields.build(DecoderConfig, **sizes, **table, router=_ROUTER.read(fields))
```
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from spmd.hf.fields import Fields
from spmd.hf.layout import AS_IS, TRANSPOSED
from spmd.layers.router import RouterConfig
from spmd.models.decoder.declared import MissingPartError
from spmd.models.decoder.decoder import DecoderConfig
from spmd.models.decoder.experts import ExpertsSpec
from spmd.models.decoder.layer import LayerSpec
from spmd.models.decoder.mlp import MLPSpec
from spmd.models.published.layer_types import read_layer_types, table_of
from spmd.models.published.tensor_names import Names

SPARSE = "sparse"
"""Kind of a layer with experts, as in `mlp_layer_types`."""
DENSE = "dense"
"""Kind of a layer with one MLP."""

CHOICE_BIASES = RouterConfig(
    score="sigmoid",
    normalise_eps=1e-20,
    choice_bias=True,
    balance=1e-4,
    balance_over="example",
)
"""Router of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2) without groups: biases of the choice."""


@dataclasses.dataclass(frozen=True)
class RouterFields:
    """Fields of a router in config.json, and their values where absent; None: no such field.

    Example:
        >>> router = RouterFields("num_experts", experts=4, top_k=2, normalise=False)
        >>> router.write(router.read(Fields({"num_experts": 8})))["num_experts"]
        8
    """

    name: str
    """Name of the number of experts."""
    also: tuple[str, ...] = ()
    """Other names of that number."""
    experts: int | None = None
    """Number of experts; None if the field is required."""
    top_k: int | None = None
    """Experts per token; None if the field is required."""
    top_k_name: str = "num_experts_per_tok"
    """Name of that number."""
    normalise: bool | None = None
    """`norm_topk_prob`."""
    groups: tuple[int | None, int | None] | None = None
    """`n_group` and `topk_group`; None in place of one that is required."""
    scale: float | None = None
    """`routed_scaling_factor`."""
    balance_name: str = "router_aux_loss_coef"
    """Name of the weight of the load-balance loss; empty for none."""
    balance: float = 0.001
    """That weight."""
    base: RouterConfig = RouterConfig()
    """Options without a field; its `normalise_eps` is of normalised weights only."""

    def read(self, fields: Fields, **options: Any) -> RouterConfig:
        """Parse a router; problems are reported to `fields`.

        Args:
            fields: Fields of config.json.
            **options: Other options of `RouterConfig`, read by the caller.
        """
        found: dict[str, Any] = {
            "experts": self._read_experts(fields),
            "top_k": fields.integer(self.top_k_name, self.top_k),
        }
        if self.normalise is not None:
            found["normalise"] = fields.flag("norm_topk_prob", self.normalise)
            if not found["normalise"]:
                found["normalise_eps"] = 0.0
        if self.groups is not None:
            groups, top_groups = self.groups
            found["groups"] = fields.integer("n_group", groups)
            found["top_groups"] = fields.integer("topk_group", top_groups)
        if self.scale is not None:
            found["scale"] = fields.number("routed_scaling_factor", self.scale)
        if self.balance_name:
            found["balance"] = fields.number(self.balance_name, self.balance, least=0)
        make = functools.partial(dataclasses.replace, self.base)
        router = fields.nested(make, **found | options)
        fields.rename(self._names)
        return router or self.base

    @property
    def _names(self) -> dict[str, str]:
        """Field of a router as in problems → its name in config.json."""
        return {
            "router.experts": self.name,
            "router.top_k": self.top_k_name,
            "router.groups": "n_group",
            "router.top_groups": "topk_group",
            "router.scale": "routed_scaling_factor",
        }

    def _read_experts(self, fields: Fields) -> int:
        """Parse the number of experts, by any of its names."""
        for name in (self.name, *self.also):
            if fields.value(name) is not None:
                experts = fields.integer(name)
                for other in self.also:
                    fields.only(other, experts)
                return experts
        return fields.integer(self.name, self.experts)

    def write(self, router: RouterConfig) -> dict[str, Any]:
        """Return the fields of config.json: the inverse of `read`."""
        fields: dict[str, Any] = {self.name: router.experts, self.top_k_name: router.top_k}
        if self.normalise is not None:
            fields["norm_topk_prob"] = router.normalise
        if self.groups is not None:
            fields |= {"n_group": router.groups, "topk_group": router.top_groups}
        if self.scale is not None:
            fields["routed_scaling_factor"] = router.scale
        if self.balance_name:
            fields[self.balance_name] = router.balance
        return fields


def read_count(fields: Fields, name: str, absent: int) -> int:
    """Parse a count, perhaps 0; `absent` is the value of an absent or null field."""
    if fields.value(name) == 0:
        return 0
    if fields.value(name) is None:
        return absent
    return fields.integer(name)


def read_dense_first(fields: Fields, layers: int, absent: int) -> int:
    """Parse `first_k_dense_replace`, the number of first layers without experts."""
    dense = read_count(fields, "first_k_dense_replace", absent)
    if dense >= layers:
        fields.refuse("first_k_dense_replace", "leaves no layer with experts")
        return layers - 1
    return dense


def read_sparse_layers(fields: Fields, layers: int, default: Sequence[int] = ()) -> list[str]:
    """Parse `decoder_sparse_step` and `mlp_only_layers`; return the kind of each layer's MLP.

    Layers of an interval's end have experts, except for those of the list, which begins at 0.

    Args:
        fields: Fields of config.json.
        layers: Number of layers.
        default: The list if the field is absent or null.
    """
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.value("mlp_only_layers", [*default])
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        fields.refuse("mlp_only_layers", "is not a list of integers")
        dense = []
    kinds = []
    for number in range(layers):
        kind = DENSE
        if (number + 1) % step == 0 and number not in dense:
            kind = SPARSE
        kinds.append(kind)
    if SPARSE not in kinds:
        name = "mlp_only_layers"
        if step > layers:
            name = "decoder_sparse_step"
        fields.refuse(name, "leaves no layer with experts")
        return [SPARSE] * len(kinds)
    return kinds


def read_mlp_types(fields: Fields, layers: int, default: Sequence[str]) -> list[str]:
    """Parse `mlp_layer_types`, the kind of each layer's MLP; `default` is its value if absent."""
    return read_layer_types(fields, layers, default, (DENSE, SPARSE), "mlp_layer_types")


def write_sparse_layers(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of config.json: the inverse of `read_sparse_layers`."""
    kinds = enumerate(mlp_kinds(config))
    dense = [number for number, kind in kinds if kind == DENSE]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def mlp_kinds(config: DecoderConfig) -> list[str]:
    """Return the kind of each layer's MLP, as in `mlp_layer_types`."""
    kinds = []
    for spec in config.pattern.kinds:
        kind = DENSE
        if spec.has_experts:
            kind = SPARSE
        kinds.append(kind)
    return kinds


def dense_first(dense: int, layers: int) -> list[str]:
    """Return the kind of each layer's MLP, for a number of first layers without experts."""
    dense = min(layers, dense)
    return [DENSE] * dense + [SPARSE] * (layers - dense)


def experts_table(layer: LayerSpec, dense: MLPSpec, kinds: Sequence[str]) -> dict[str, Any]:
    """Return the layer table, arguments of `DecoderConfig`, of layers with and without experts.

    Args:
        layer: A layer with experts.
        dense: The MLP of a layer without them.
        kinds: The kind of each layer's MLP.
    """
    return table_of(with_dense_mlps([layer] * len(kinds), dense, kinds))


def with_dense_mlps(
    layers: Sequence[LayerSpec], dense: MLPSpec, kinds: Sequence[str]
) -> list[LayerSpec]:
    """Return layers with an MLP in place of experts where their kind is `DENSE`.

    Those before all experts have the name `dense_layers` if they are equal and no other layer has
    one MLP.
    """
    specs = []
    for layer, kind in zip(layers, kinds, strict=True):
        if kind == DENSE:
            layer = dataclasses.replace(layer, mlp=dense)
        specs.append(layer)
    first = [*kinds, SPARSE].index(SPARSE)
    if len(set(specs[:first])) == 1 and DENSE not in kinds[first:]:
        named = dataclasses.replace(specs[0], name="dense_layers")
        specs[:first] = [named] * first
    return specs


def experts_of(config: DecoderConfig) -> tuple[LayerSpec, ExpertsSpec, RouterConfig]:
    """Return the first layer with experts, its experts, and the router.

    Raises:
        MissingPartError: No layer has experts.
    """
    for layer in config.pattern.distinct:
        if isinstance(layer.mlp, ExpertsSpec) and config.router is not None:
            return layer, layer.mlp, config.router
    raise MissingPartError("the layers have no experts")


def read_shared_experts(
    fields: Fields, d_ff: int, shared: int | None = 1, name: str = "n_shared_experts"
) -> ExpertsSpec:
    """Parse the widths of experts and of the shared expert, a number of them side by side.

    Args:
        fields: Fields of config.json.
        d_ff: Default of `moe_intermediate_size`.
        shared: Default of the number of shared experts; None if it is required.
        name: Name of that number.
    """
    width = fields.integer("moe_intermediate_size", d_ff)
    return ExpertsSpec(width, shared_d_ff=width * fields.integer(name, shared))


def write_shared_experts(config: DecoderConfig, name: str = "n_shared_experts") -> dict[str, int]:
    """Return the fields of config.json: the inverse of `read_shared_experts`, and of `write_widths`."""
    _, experts, _ = experts_of(config)
    return {**write_widths(config), name: experts.shared_d_ff // experts.d_ff}


def write_widths(config: DecoderConfig) -> dict[str, int]:
    """Return `intermediate_size`, of MLPs, and `moe_intermediate_size`, of experts.

    Without a layer with an MLP, both are of experts.
    """
    _, experts, _ = experts_of(config)
    width = experts.d_ff
    for layer in config.pattern.distinct:
        if isinstance(layer.mlp, MLPSpec):
            width = layer.mlp.d_ff
    return {"intermediate_size": width, "moe_intermediate_size": experts.d_ff}


def expert_names(
    block: str = "mlp.",
    *,
    router: str = "gate",
    expert: str = "experts.{expert}.",
    kernels: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_experts",
    choice_bias: str = "gate.e_score_correction_bias",
) -> Names:
    """Return the tensors of a router, of experts in tensors of their own, and of shared experts.

    Args:
        block: Prefix of all of them.
        router: Module of the router.
        expert: Prefix of an expert, with its number.
        kernels: Its gate, up and down projections.
        shared: Module of the shared expert, with kernels of the usual names.
        choice_bias: Tensor of the biases of the choice.
    """
    modules = {"moe/router": router}
    modules["moe/shared_gate"] = "shared_expert_gate"
    for ours, theirs in zip(("gate", "up", "down"), kernels, strict=True):
        modules[f"moe/experts/{ours}_proj"] = expert + theirs
        modules[f"moe/shared/{ours}_proj"] = f"{shared}.{ours}_proj"
    names: Names = {"moe/router/bias": (block + choice_bias, AS_IS)}
    for ours, theirs in modules.items():
        names[f"{ours}/kernel"] = (f"{block}{theirs}.weight", TRANSPOSED)
    return names
