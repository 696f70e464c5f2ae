"""Parallel plans of a transformers config: module name → style, and the specs that styles mean.

PyTorch names dimensions by its linear layers, whose weights are `[out, in]`: `colwise` splits the
outputs, `rowwise` the inputs. Kernels of Flax are `[in, out]`, so a column-parallel kernel is
`P(fsdp, tensor)`. Styles are those that `transformers.distributed.tensor_parallel` and
`expert_parallel` register in version 5.23, and their names in versions 4.50 to 5.22.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from spmd.errors import Problem, RuleError, did_you_mean
from spmd.sharding.mesh import as_entry, entry_axes
from spmd.sharding.rules import Replicate, replicate

TENSOR_PLAN = "base_model_tp_plan"
"""Attribute of a config: module → style of tensor parallelism."""

EXPERT_PLAN = "base_model_ep_plan"
"""Attribute of a config: module → style of expert parallelism."""

_OUTPUTS, _INPUTS = "outputs", "inputs"
_ROWS, _COLUMNS = "vocabulary", "features"  # of an embedding, [vocabulary, features]
_EXPERTS, _WHOLE = "experts", "whole"
_COMMUNICATION = "communication"  # collectives of a module; a compiler of shardings adds its own
_PACKED_INPUTS = "packed inputs"

_STYLES = {
    "colwise": _OUTPUTS,
    "colwise_rep": _OUTPUTS,
    "colwise_gather_output": _OUTPUTS,
    "local_colwise": _OUTPUTS,
    "packed_colwise": _OUTPUTS,
    "rowwise": _INPUTS,
    "rowwise_rep": _INPUTS,
    "rowwise_split_input": _INPUTS,
    "local_rowwise": _INPUTS,
    "packed_rowwise": _PACKED_INPUTS,
    "local_packed_rowwise": _PACKED_INPUTS,
    "embedding_rowwise": _ROWS,
    "embedding_colwise": _COLUMNS,
    "grouped_gemm": _EXPERTS,
    "replicate": _WHOLE,
    "replicated_with_grad_allreduce": _WHOLE,
    "mla_kv_a_proj": _WHOLE,
    "ep_router": _WHOLE,
    "moe_tp_experts": _COMMUNICATION,
    "moe_identity_expert": _COMMUNICATION,
    "ep_dispatch_experts": _COMMUNICATION,
    "all_reduce": _COMMUNICATION,
    "gather": _COMMUNICATION,
    "local": _COMMUNICATION,
    "local_params": _COMMUNICATION,
}

_WITHOUT_EQUIVALENT = {
    "sequence_parallel": "splits activations along the sequence, which no parameter's spec does",
}


@dataclasses.dataclass(frozen=True)
class PlanAxes:
    """Mesh axes of a plan: an axis, a tuple of axes, or None for whole.

    Attributes:
        tensor: The axis of the tensor-parallel plan.
        fsdp: Splits the other dimension of each kernel.
        expert: The axis of the expert-parallel plan; None ignores that plan.
    """

    tensor: Any
    fsdp: Any
    expert: Any

    def audit(self, names: Sequence[str]) -> list[Problem]:
        """Return a problem for each axis that the mesh lacks, or that two arguments have."""
        problems = []
        taken: dict[str, str] = {}
        for argument in ("tensor", "fsdp", "expert"):
            for axis in entry_axes(getattr(self, argument)):
                where = f"{argument}={axis!r}"
                if axis not in names:
                    what = "is no axis of a mesh"
                    problems.append(Problem(where, what, fix=did_you_mean(axis, names)))
                elif axis in taken:
                    what = f"is the axis of {taken[axis]}, too"
                    problems.append(Problem(where, what, fix="name another axis, or None"))
                taken[axis] = argument
        if not entry_axes(self.tensor):
            problems.append(Problem("tensor=", "names no axis", fix='tensor="tensor"'))
        return problems


@dataclasses.dataclass(frozen=True)
class PlanEntry:
    """A module, or a parameter, of a plan with its styles.

    Attributes:
        name: The name in PyTorch, with `*` for numbers: `layers.*.self_attn.q_proj`.
        styles: The styles as in the plans.
        layout: The part of a weight that the tensor axis splits; empty without one.
        splits_experts: Whether the expert axis splits the dimension of experts.
    """

    name: str
    styles: tuple[str, ...]
    layout: str
    splits_experts: bool = False

    @property
    def has_params(self) -> bool:
        """Whether the styles say something of parameters, and not of communication alone."""
        return self.layout != _COMMUNICATION

    @property
    def is_expert(self) -> bool:
        """Whether its arrays may have a leading dimension of experts."""
        return self.splits_experts or _is_of_experts(self.name)

    @property
    def is_packed(self) -> bool:
        """Whether the weight is several of one shape, concatenated along the outputs."""
        return any("packed" in style for style in self.styles)

    @property
    def style(self) -> str:
        """The styles as a text."""
        return " + ".join(self.styles)

    def value(self, path: str, rank: int, axes: PlanAxes) -> P | Replicate | Problem:
        """Return the rule's value for an array of the module, or the problem of its rank.

        Args:
            path: The array's path; a bias is recognised by its name.
            rank: The number of dimensions of one layer.
        """
        is_bias = path.endswith("bias")
        lead: tuple[Any, ...] = ()
        if self.is_expert and rank >= 3 - is_bias:
            lead = (self._expert_entry(axes),)
        elif self.splits_experts and entry_axes(axes.expert):
            what = f"has {rank} dimensions, and {self.name} is {self.style}"
            fix = "stack experts along the first dimension: [experts, in, out]"
            return Problem(path, what, fix=fix)
        rank -= len(lead)
        if not rank and self.layout in (_OUTPUTS, _INPUTS, _ROWS, _COLUMNS):
            what = f"has no dimension to split, and {self.name} is {self.style}"
            return Problem(path, what, fix="map the name to the module of a kernel")
        entries = (*lead, *self._layer_entries(rank, is_bias, axes))
        if any(map(entry_axes, entries)):
            return P(*_without_end(entries))
        return replicate(self._reason(is_bias))

    def _expert_entry(self, axes: PlanAxes) -> Any:
        if self.splits_experts:
            return axes.expert
        return None

    def _layer_entries(self, rank: int, is_bias: bool, axes: PlanAxes) -> tuple[Any, ...]:
        """Return the entries of a spec, without the dimension of experts."""
        is_vector = is_bias or rank == 1
        whole = (None,) * (rank - 2)
        if self.layout == _WHOLE:
            return ()
        if is_vector:
            return self._vector_entries(rank, is_bias, axes)
        if not self.layout:
            return (axes.fsdp,)
        if self.layout in (_INPUTS, _ROWS):
            return (axes.tensor, *whole, axes.fsdp)
        if self.is_packed:  # [in, parts, out], or the parts concatenated
            return (axes.fsdp, *whole, axes.tensor)
        return (axes.fsdp, axes.tensor)  # outputs may be [heads, head_dim]

    def _vector_entries(self, rank: int, is_bias: bool, axes: PlanAxes) -> tuple[Any, ...]:
        """Return the entries for a bias, or for another array of one dimension."""
        if not self.layout or (is_bias and self.layout == _INPUTS):
            return ()
        if self.is_packed:
            return (*(None,) * (rank - 1), axes.tensor)
        return (axes.tensor,)

    def _reason(self, is_bias: bool) -> str:
        """Return the reason of a replication."""
        if is_bias and self.layout == _INPUTS:
            return f"bias of {self.name}, added to the sum over devices ({self.style})"
        return f"{self.name} is {self.style}"


def _is_of_experts(name: str) -> bool:
    """Return whether a name has a module of experts, also of shared ones."""
    return any(part.endswith("experts") for part in name.split("."))


def _without_end(entries: Sequence[Any]) -> tuple[Any, ...]:
    """Return entries without those of whole dimensions at the end."""
    kept = [as_entry(entry_axes(entry)) for entry in entries]
    while kept and kept[-1] is None:
        kept.pop()
    return tuple(kept)


def read_plan(config: Any, axes: PlanAxes) -> tuple[PlanEntry, ...]:
    """Return the entries of a config's plans, in their order, those of communication too.

    Raises:
        RuleError: The config has no plan, or styles without an equivalent, all of them.
    """
    tensor_plan = _plan(config, TENSOR_PLAN)
    expert_plan: Mapping[str, str] = {}
    if entry_axes(axes.expert):
        expert_plan = _plan(config, EXPERT_PLAN)
    if not tensor_plan and not expert_plan:
        raise RuleError("Config without a parallel plan:", [_without_plan(config)])
    plans = {TENSOR_PLAN: tensor_plan, EXPERT_PLAN: expert_plan}
    problems = [*_style_problems(plans), *_packed_problems(tensor_plan), *_conflicts(plans)]
    if problems:
        raise RuleError(f"Parallel plan of {config_name(config)} without a table:", problems)
    entries = []
    for name in dict.fromkeys((*tensor_plan, *expert_plan)):
        entries.append(_entry(name, tensor_plan, expert_plan))
    return tuple(entries)


def config_name(config: Any) -> str:
    """Return the name of a config in messages: its class, or its model type."""
    if isinstance(config, Mapping):
        return str(config.get("model_type", "the config"))
    if isinstance(config, type):
        return config.__name__
    return type(config).__name__


def _plan(config: Any, key: str) -> Mapping[str, str]:
    """Return a plan of a config, an object or a mapping; empty without one."""
    plan = getattr(config, key, None)
    if isinstance(config, Mapping):
        plan = config.get(key)
    plan = plan or {}
    is_plan = isinstance(plan, Mapping) and all(isinstance(name, str) for name in plan)
    if not is_plan:
        fix = "a dictionary from a module's name to its style"
        problem = Problem(key, f"is {plan!r}", fix=fix)
        raise RuleError("Invalid parallel plan:", [problem])
    return plan


def _without_plan(config: Any) -> Problem:
    """Return the problem of a config without plans; a part of it may have one."""
    fields = config
    if not isinstance(config, Mapping):
        fields = getattr(config, "__dict__", {})
    parts = []
    for name, part in fields.items():
        is_part = isinstance(part, Mapping) or hasattr(part, "__dict__")
        if is_part and (_plan(part, TENSOR_PLAN) or _plan(part, EXPERT_PLAN)):
            parts.append(name)
    fix = "write the table by hand, or start from spmd.suggest_rules(model)"
    if parts:
        fix = f"pass a part of it that has a plan: {', '.join(parts)}"
    elif isinstance(config, Mapping) and "model_type" in config:
        fix = "config.json has no plans: pass transformers.AutoConfig.from_pretrained(…)"
    what = f"has neither {TENSOR_PLAN} nor {EXPERT_PLAN}"
    return Problem(config_name(config), what, fix=fix)


def _style_problems(plans: Mapping[str, Mapping[str, str]]) -> Iterator[Problem]:
    """Yield a problem for each style without an equivalent, with its modules."""
    users: dict[Any, list[str]] = {}
    for plan in plans.values():
        for name, style in plan.items():
            if style not in _STYLES:
                users.setdefault(style, []).append(name)
    for style, names in users.items():
        what = _WITHOUT_EQUIVALENT.get(style, "is no known style")
        fix = did_you_mean(str(style), _STYLES)
        if not fix.endswith("?"):
            fix = "pass a config without these entries, and their parameters in rows="
        if style in _WITHOUT_EQUIVALENT:
            fix = 'write "replicate" for the parameters, and rows in activations='
        yield Problem(f"style {style!r}", what, detail=", ".join(dict.fromkeys(names)), fix=fix)


def _packed_problems(plan: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each weight packed along inputs: only those of experts are known."""
    for name, style in plan.items():
        is_packed = _STYLES.get(style) == _PACKED_INPUTS
        if is_packed and not _is_of_experts(name):
            what = "is for weights [experts, in, out], and the module is none of experts"
            yield Problem(f"style {style!r}", what, detail=name, fix="write colwise or rowwise")


def _conflicts(plans: Mapping[str, Mapping[str, str]]) -> Iterator[Problem]:
    """Yield a problem for each module that the plans split differently over the tensor axis."""
    expert_plan = plans[EXPERT_PLAN]
    for name, style in plans[TENSOR_PLAN].items():
        other = expert_plan.get(name, style)
        layouts = (_STYLES.get(style), _STYLES.get(other))
        if layouts[0] == layouts[1] or _EXPERTS in layouts or _COMMUNICATION in layouts:
            continue
        what = f"is {style} in {TENSOR_PLAN}, and {other} in {EXPERT_PLAN}"
        yield Problem(name, what, fix="keep one of them")


def _entry(name: str, tensor_plan: Mapping[str, str], expert_plan: Mapping[str, str]) -> PlanEntry:
    """Return the entry of a module in either plan, or both."""
    styles = []
    layouts = []
    for plan in (tensor_plan, expert_plan):
        if name in plan:
            styles.append(plan[name])
            layouts.append(_layout(name, plan))
    splits_experts = _EXPERTS in layouts
    layout = _COMMUNICATION
    if splits_experts:
        layout = ""
    for each in layouts:
        if each not in (_EXPERTS, _COMMUNICATION):
            layout = each  # equal in both plans
    return PlanEntry(name, tuple(dict.fromkeys(styles)), layout, splits_experts)


def _layout(name: str, plan: Mapping[str, str]) -> str:
    """Return the part of a weight that a module's style splits.

    A packed weight is packed along its outputs. Where its style splits the last dimension,
    `packed_rowwise`, the experts of the module are stored [experts, in, out], and `colwise` splits
    the inputs of the others.
    """
    layout = _STYLES[plan[name]]
    if layout == _PACKED_INPUTS:
        return _OUTPUTS
    is_transposed = any(_STYLES[style] == _PACKED_INPUTS for style in _siblings(name, plan))
    if is_transposed and layout == _OUTPUTS:
        return _INPUTS
    if is_transposed and layout == _INPUTS:
        return _OUTPUTS
    return layout


def _siblings(name: str, plan: Mapping[str, str]) -> Iterable[str]:
    """Return the styles of the entries with the same parent."""
    parent = name.rpartition(".")[0]
    styles = []
    for other, style in plan.items():
        if other.rpartition(".")[0] == parent:
            styles.append(style)
    return styles
