"""Every decision of a training run about its names, resolved on abstract shapes: no device, no memory needed.

`print(plan)` shows one line for each parameter; `plan.diff(other)` explains a change.
"""

import dataclasses
import functools
import math
from collections.abc import Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem, RuleError, did_you_mean
from spmd.model_api.attention_config import AttentionConfig, make_attention_config
from spmd.model_api.model import PRNG, Model
from spmd.model_api.precision import Precision, cast_floats, make_precision, with_loss_scale
from spmd.model_api.remat import Remat, make_remat
from spmd.optim.layerwise import check_layerwise
from spmd.optim.master_weights import wrap_optimizer_for_precision
from spmd.optim.offload_chunks import UpdateChunk, plan_chunks
from spmd.optim.two_phase import phases
from spmd.plan.records import PlanEntry, format_table, make_entry
from spmd.sharding.mesh import AnyMesh, entry_axes
from spmd.sharding.optimizer_state import ZERO_KEEPS, drop_axis, optimizer_specs, shard_bytes
from spmd.sharding.rules import Match, Rules, audit_spec, replicate, spec_text

OFFLOADABLE = ("optimizer_state", "params")
"""What can live in host memory."""

_SAME_DRAWS = replicate("every device draws the same numbers")
_RANDOM_STATE = Match(-1, "random state", _SAME_DRAWS, P(), _SAME_DRAWS.reason)


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """All decisions, resolved; made by `make_plan`, immutable, compared by value.

    Attributes:
        mesh: The mesh, with or without devices behind it.
        rules: The table all the rest follows from.
        zero: The ZeRO stage, 0 to 3.
        remat: What the backward pass keeps.
        precision: Which dtype is where.
        attention: Which kernel computes attention, and how a split sequence attends to itself.
        params: One record for each parameter.
        gradients: One record for each gradient, as it leaves the reduction.
        variables: One record for each variable that the model changes by itself; none for most models.
        optimizer_state: One record for each leaf of the optimizer's state.
        offload: What lives in host memory.
        update_chunks: How the update of offloaded state goes piece by piece; empty where nothing is offloaded.
        model: The model as functions.
        optimizer: The optax transformation.
    """

    mesh: AnyMesh
    rules: Rules
    zero: int
    remat: Remat
    precision: Precision
    attention: AttentionConfig
    params: tuple[PlanEntry, ...]
    gradients: tuple[PlanEntry, ...]
    variables: tuple[PlanEntry, ...]
    optimizer_state: tuple[PlanEntry, ...]
    offload: tuple[str, ...]
    update_chunks: tuple[UpdateChunk, ...]
    model: Model = dataclasses.field(repr=False)
    optimizer: optax.GradientTransformation = dataclasses.field(repr=False)

    @functools.cached_property
    def abstract_params(self) -> Any:
        """The parameters as `jax.ShapeDtypeStruct`s with shardings."""
        return self._abstract(_abstract_params(self.model, self.precision), self.params)

    @functools.cached_property
    def abstract_variables(self) -> Any:
        """The model's variables as `jax.ShapeDtypeStruct`s with shardings."""
        return self._abstract(_abstract_variables(self.model), self.variables)

    @functools.cached_property
    def abstract_optimizer_state(self) -> Any:
        """The optimizer's state as `jax.ShapeDtypeStruct`s with shardings."""
        state = jax.eval_shape(self.optimizer.init, _abstract_params(self.model, self.precision))
        return self._abstract(state, self.optimizer_state)

    @functools.cached_property
    def hosted_params(self) -> frozenset[str]:
        """The paths, in the model's modules, of the parameters that live in host memory, trained or frozen."""
        frozen = dict(self.frozen)
        hosted = (frozen[leaf.path] for leaf in self.variables if leaf.memory_kind != "device")
        return frozenset((*(path for cut in self.update_chunks for path in cut.host_params), *hosted))

    @functools.cached_property
    def frozen(self) -> frozenset[tuple[str, str]]:
        """The path of each variable that never changes, and of the parameter that it is in the model's modules."""
        return frozenset(self.model.info().frozen.items())

    @functools.cached_property
    def gradient_shardings(self) -> Any:
        """The gradients' shardings, a tree like the parameters."""
        tree_of = self._abstract(_abstract_params(self.model, self.precision), self.gradients)
        return jax.tree.map(lambda leaf: leaf.sharding, tree_of)

    def _abstract(self, shapes: Any, leaves: tuple[PlanEntry, ...]) -> Any:
        records = {leaf.path: leaf for leaf in leaves}

        def place(path: str, array: Any) -> jax.ShapeDtypeStruct:
            leaf = records[path]
            kind = None if leaf.memory_kind == "device" else leaf.memory_kind
            sharding = NamedSharding(self.mesh, leaf.spec, memory_kind=kind)
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

        return tree.map_with_path(place, shapes)

    def bytes_per_device(self) -> dict[str, int]:
        """Category → bytes on each device: `params`, `gradients`, `optimizer_state`, and `variables` if any."""
        return self._bytes(on_host=False)

    def bytes_on_host(self) -> dict[str, int]:
        """Category → bytes in host memory for each device, of those categories that have some."""
        return {name: size for name, size in self._bytes(on_host=True).items() if size}

    def _bytes(self, *, on_host: bool) -> dict[str, int]:
        names = ["params", "gradients", "optimizer_state", *(["variables"] if self.variables else [])]
        return {
            name: sum(
                leaf.bytes_per_device for leaf in getattr(self, name) if (leaf.memory_kind != "device") == on_host
            )
            for name in names
        }

    def __str__(self) -> str:
        """The plan as text: a heading, one line for each parameter and variable, and the bytes on each device."""
        return self.text("params", "variables")

    def text(self, *tables: str) -> str:
        """The plan as text, with the leaves of some of its tables.

        Args:
            *tables: Of `params`, `variables`, `gradients` and `optimizer_state`. Lines of the last two begin with it.
        """
        rows = []
        for table in tables:
            head = "" if table in ("params", "variables") else f"{table.removesuffix('_state')}: "
            rows += [(head + path, *cells) for path, *cells in (leaf.row for leaf in getattr(self, table))]
        lines = format_table(rows)
        held, hosted = (
            "   ".join(f"{name} {tree.human_bytes(size)}" for name, size in sizes.items())
            for sizes in (self.bytes_per_device(), self.bytes_on_host())
        )
        count = sum(math.prod(leaf.shape) for leaf in self.params)
        axes = " ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items() if size > 1) or "one device"
        decisions = f"zero {self.zero}   remat {self.remat}   precision {self.precision.name}"
        head = f"mesh {axes}   {decisions}   attention {self.attention}"
        foot = f"{count:,} parameters   on each device: {held}"
        foot += f"   in host memory for each: {hosted}" if hosted else ""
        return "\n".join([head, *lines, foot])

    def diff(self, other: "ShardingPlan") -> str:
        """The lines that differ between this plan's text (`-`) and another's (`+`), with those of gradients and of the
        optimizer's state; empty when none does."""
        mine, theirs = (plan._lines() for plan in (self, other))
        changed = []
        for name in dict.fromkeys([*mine, *theirs]):
            if mine.get(name) != theirs.get(name):
                changed += [f"{sign} {lines[name]}" for sign, lines in (("-", mine), ("+", theirs)) if name in lines]
        return "\n".join(changed)

    def _lines(self) -> dict[str, str]:
        """The lines of the text by what they are about, without the padding of columns."""
        first, *rows, last = self.text("params", "variables", "gradients", "optimizer_state").split("\n")
        by_name = {row.split("  ")[0]: " ".join(row.split()) for row in rows}
        return {"": " ".join(first.split()), **by_name, "\n": " ".join(last.split())}

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values: the mesh, the decisions, and one record for each leaf."""

        def record(leaf: PlanEntry) -> dict[str, Any]:
            return {**dataclasses.asdict(leaf), "spec": spec_text(leaf.spec), "shape": list(leaf.shape)}

        return {
            "mesh": dict(self.mesh.shape),
            "devices": self.mesh.size,
            "zero": self.zero,
            "remat": str(self.remat),
            "precision": dataclasses.asdict(self.precision),
            "attention": str(self.attention),
            "parameters": sum(math.prod(leaf.shape) for leaf in self.params),
            "bytes_per_device": self.bytes_per_device(),
            "bytes_on_host": self.bytes_on_host(),
            "params": [record(leaf) for leaf in self.params],
            "gradients": [record(leaf) for leaf in self.gradients],
            "variables": [record(leaf) for leaf in self.variables],
            "optimizer_state": [record(leaf) for leaf in self.optimizer_state],
        }


def make_plan(
    mesh: AnyMesh,
    rules: Rules,
    model: Model,
    optimizer: optax.GradientTransformation,
    *,
    zero: int = 3,
    remat: str | Remat = "none",
    precision: str | Precision = "float32",
    offload: tuple[str, ...] = (),
    attention: str = "auto",
    context: str = "ring",
) -> ShardingPlan:
    """Resolves every decision, or lists all that is wrong.

    Args:
        mesh: From `make_mesh` or `abstract_mesh`.
        rules: The partition rule table of the model.
        model: From `spmd.from_nnx`, `spmd.from_linen`, or `Model(init, apply)`. Only shapes are looked at here.
        optimizer: Any optax transformation; what its state is laid out like is asked of it.
        zero: ZeRO stage: which of optimizer state (1), gradients (2), parameters (3) keep the `fsdp` axis.
        remat: What the backward pass keeps: `"none"`, `"full"`, or `Remat(save=("attention_out",))`.
        precision: Which dtype is where: the name of a policy, such as `"bf16"`, or a `Precision`.
        offload: What lives in host memory: `("optimizer_state", "params")`, one of them, or nothing.
        attention: The kernel: `"auto"`, or one of `spmd.model_api.attention_config.KERNELS`.
        context: How a sequence that is split over `sequence` attends to itself: `"ring"` or `"all-to-all"`.

    Raises:
        RuleError: All problems of the table, the specs and the optimizer's state, at once.
        ConfigError: An unknown precision, remat policy, ZeRO stage or kernel.
    """
    if zero not in ZERO_KEEPS:
        raise ConfigError("This plan cannot be made:", [Problem("zero", f"is {zero!r}", fix="0, 1, 2 or 3")])
    precision, remat = make_precision(precision), make_remat(remat)
    offload = _check_offload(mesh, offload, remat)
    core = make_attention_config(mesh, attention, context)
    model, optimizer = with_loss_scale(model, precision.loss_scale), wrap_optimizer_for_precision(optimizer, precision)
    params, info = _abstract_params(model, precision), model.info()
    variables = tree.flatten(_abstract_variables(model))
    unruled = {path: _RANDOM_STATE for path in info.random_state}
    unruled |= {path: Match(-1, "whole", replicate(why), P(), why) for path, why in info.replicated.items()}
    unruled |= {path: Match(-1, "where it is made", spec, spec, "") for path, spec in info.placed.items()}
    ruled = {path: leaf for path, leaf in variables.items() if path not in unruled}
    shapes = {path: tuple(leaf.shape) for path, leaf in (tree.flatten(params) | ruled).items()}
    problems = rules.audit(shapes, mesh.shape, tied=info.tied)
    problems += [
        Problem(f"remat {word}:{name}", "is no activation of the rule table", fix=f"one of: {', '.join(known)}")
        for known in [[name for name, _ in rules.activations]]
        for word, names in (("save", remat.save), ("offload", remat.offload))
        for name in names
        if name not in known
    ]
    specs = [match.spec for path in shapes if (match := rules.match(path))]
    if mesh.shape["expert"] > 1 and not any("expert" in entry_axes(entry) for spec in specs for entry in spec):
        what, fix = "splits no parameter: this model has no experts", "expert=1; data and fsdp split the batch, too"
        problems.append(Problem("mesh.expert", what, f"expert={mesh.shape['expert']}", fix))
    leading = {path: min(len(rules.layer_path(path)[1]), p.ndim) for path, p in tree.flatten(params).items()}
    stacked = tuple(name for name, _ in rules.stacked)
    mixed = check_layerwise(optimizer, params, stacked)
    if problems:
        unsplit = dict.fromkeys(leading, P())
        problems += optimizer_specs(optimizer.init, params, unsplit, leading)[1] + mixed
        raise RuleError(f"The rule table does not fit: {_count(problems)}.", problems)

    matches = {path: match for path in shapes if (match := rules.match(path))}
    matches |= unruled
    tables = {
        table: {
            path: match.spec if table in ZERO_KEEPS[zero] else drop_axis(match.spec, "fsdp")
            for path, match in matches.items()
        }
        for table in ("params", "gradients", "optimizer")
    }
    state, problems = optimizer_specs(optimizer.init, params, tables["optimizer"], leading)
    for path, derived in state.items():
        by = f"the parameter's rule ({derived.source})"
        found = audit_spec(f"optimizer state {path}", derived.shape, derived.spec, mesh.shape, by)
        smaller = f"smaller blocks than {derived.block} (OptimizerConfig.moments_block), so each shard has whole ones"
        problems += [dataclasses.replace(p, fix=smaller) for p in found] if derived.block > 1 else found
    problems += mixed
    cuts: tuple[UpdateChunk, ...] = ()
    # Beside frozen parameters, those that are trained are small.
    frozen = {path for path in info.frozen if "params" in offload and _is_stacked_matrix(rules, path, variables[path])}
    updated = tuple(name for name in offload if name != "params" or not info.frozen)
    if updated and not problems:
        rule = phases(optimizer)[1]
        cuts, problems = plan_chunks(rule, params, state, tables["optimizer"], mesh.shape, stacked, updated)
    if problems:
        raise RuleError(f"The optimizer does not fit: {_count(problems)}.", problems)

    hosted = {path for cut in cuts for path in cut.host_params}

    def table(name: str, leaves: Mapping[str, Any], on_host: Container[str] = ()) -> tuple[PlanEntry, ...]:
        return tuple(
            make_entry(path, leaf, matches[path], tables[name][path], zero, mesh.shape, path in on_host)
            for path, leaf in leaves.items()
        )

    optimizer_leaves = tuple(
        PlanEntry(
            path=path,
            shape=d.shape,
            dtype=str(d.dtype),
            rule=d.source,
            requested=spec_text(d.spec),
            spec=d.spec,
            reason="",
            memory_kind="pinned_host" if any(path in cut.host for cut in cuts) else "device",
            bytes_per_device=shard_bytes(d.shape, d.dtype, d.spec, mesh.shape),
        )
        for path, d in state.items()
    )
    return ShardingPlan(
        mesh,
        rules,
        zero,
        remat,
        precision,
        core,
        table("params", tree.flatten(params), hosted),
        table("gradients", tree.flatten(_cast_abstract(params, precision.gradients_dtype))),
        table("params", variables, frozen),
        optimizer_leaves,
        offload,
        cuts,
        model,
        optimizer,
    )


def _is_stacked_matrix(rules: Rules, path: str, leaf: Any) -> bool:
    leading = len(rules.layer_path(path)[1])
    return leading > 0 and len(leaf.shape) - leading >= 2


def _check_offload(mesh: AnyMesh, offload: tuple[str, ...], remat: Remat) -> tuple[str, ...]:
    problems = [
        Problem(f"offload {name!r}", "is nothing that can be in host memory", fix=did_you_mean(name, OFFLOADABLE))
        for name in offload
        if name not in OFFLOADABLE
    ]
    if mesh.shape["pipe"] > 1 and "params" in offload:
        what = "does not go with a pipeline: stages would fetch each layer in every task"
        problems.append(Problem("offload params", what, f"pipe={mesh.shape['pipe']}", "offload the optimizer_state"))
    if "params" in offload and (remat.kind in ("none", "selective") or remat.every > 1):
        what = f"needs every layer to be recomputed, and remat is {remat}"
        why = "a layer that is not would keep its parameters on the device until the backward pass"
        problems.append(Problem("offload params", what, why, "remat full, dots, save:NAME or offload:NAME"))
    devices = () if isinstance(mesh, AbstractMesh) else mesh.devices.flat[:1]
    for where in (*(["offload"] if offload else []), *([f"remat {remat}"] if remat.offload else [])):
        for device in devices:
            kinds = [memory.kind for memory in device.addressable_memories()]
            if "pinned_host" not in kinds:
                what = f"{device.platform} has no memory of the kind pinned_host"
                problems.append(Problem(where, what, f"it has {', '.join(kinds) or 'none'}", "offload nothing"))
    if problems:
        raise ConfigError("This cannot be offloaded:", problems)
    return tuple(dict.fromkeys(offload))


def _abstract_params(model: Model, precision: Precision) -> Any:
    return jax.eval_shape(lambda: cast_floats(model.init(jax.random.key(0, impl=PRNG)), precision.params_dtype))


def _cast_abstract(params: Any, dtype: Any) -> Any:
    return jax.eval_shape(lambda: cast_floats(jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params), dtype))


def _abstract_variables(model: Model) -> Any:
    return jax.eval_shape(lambda: model.init_variables(jax.random.key(0, impl=PRNG)))


def _count(problems: list[Problem]) -> str:
    return f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
