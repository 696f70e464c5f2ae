"""A sharding plan: every decision of a training run about its names, resolved on abstract shapes.

No device and no memory is needed. `print(plan)` shows one line for each parameter; `plan.diff(other)` explains a
change.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.core import FrozenDict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem, RuleError, Together, first_of
from spmd.model_api.attention_config import AttentionConfig, make_attention_config
from spmd.model_api.grad_transform import Carry, GradTransform
from spmd.model_api.model import Model, abstract_key
from spmd.model_api.remat import Remat, make_remat
from spmd.optim.master_weights import wrap_optimizer_for_precision
from spmd.optim.storage import State, Storage
from spmd.optim.two_phase import treatment_of
from spmd.plan import resolve
from spmd.plan.records import ParamPlacement, PlanEntry, make_entry
from spmd.plan.render import diff_texts, format_entries, format_footer, format_html
from spmd.plan.scopes import param_scope
from spmd.precision import Precision, cast_floats, check_float64, make_precision
from spmd.settings.compress import NO_COMPRESSION, CompressConfig
from spmd.settings.offload import make_storage
from spmd.sharding.layer_paths import own_stacks, stored_dims, without_dims
from spmd.sharding.mesh import AnyMesh
from spmd.sharding.optimizer_state import ZERO_KEEPS
from spmd.sharding.rules import Rules

TABLES = ("params", "variables", "transforms", "gradients", "optimizer_state")
"""The tables of entries that a plan has."""

EvaluatedParams = Callable[[Any, Any], Any]
"""`(optimizer state, params) -> params` to evaluate, as `optax.contrib.schedule_free_eval_params`."""

_CANNOT = "This plan cannot be made:"
_ONE_SLICE: Mapping[str, int] = FrozenDict()
_NO_UPDATES: Mapping[str, str] = FrozenDict()


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """All decisions, resolved; made by `make_plan`, immutable, compared by value.

    Attributes:
        mesh: The mesh, with devices or abstract.
        zero: The ZeRO stage, 0 to 3.
        placements: Parameter path in the model's modules → its placement, of one layer. A frozen variable is in it by
            its module's path and, unless it is merged with an adapter, by its own.
        params: One entry for each parameter; the other tables have one for each of their arrays.
        gradients: Gradients as they leave the reduction.
        variables: Variables that the model changes by itself; none for most models.
        transforms: What keeps a state around the gradient, in the order of wrapping; the last is outside.
        transform_states: Their states, each path after the name of its transform.
        slices: Axis → the slices that it spans, of those above 1.
        compress: What is sent in fewer bits; of each parameter, `ParamPlacement.comm` sends it.
        quantize: The table of matmuls in fewer bits; of each kernel, `ParamPlacement.recipe` says so.
        storage: Where the training state is between steps.
        evaluation_params: What finds the parameters to evaluate, in place of `find_evaluated_params`.
    """

    mesh: AnyMesh
    slices: Mapping[str, int]
    rules: Rules
    zero: int
    remat: Remat
    precision: Precision
    compress: CompressConfig
    quantize: str
    attention: AttentionConfig
    placements: Mapping[str, ParamPlacement] = dataclasses.field(repr=False)
    params: tuple[PlanEntry, ...]
    gradients: tuple[PlanEntry, ...]
    variables: tuple[PlanEntry, ...]
    optimizer_state: tuple[PlanEntry, ...]
    storage: Storage
    model: Model = dataclasses.field(repr=False)
    optimizer: optax.GradientTransformation = dataclasses.field(repr=False)
    evaluation_params: EvaluatedParams | None = dataclasses.field(repr=False)
    transforms: tuple[GradTransform, ...] = ()
    transform_states: tuple[PlanEntry, ...] = ()

    def with_transforms(self, *transforms: GradTransform) -> "ShardingPlan":
        """Return the plan with transforms of the gradient, next to the gradient function and inside of those it has.

        One that is outermost wraps all others, whenever it is added.

        Raises:
            ConfigError: Everything that keeps a transform from being used with the plan, and two of one name.
        """
        if not transforms:
            return self
        ordered = sorted([*transforms, *self.transforms], key=lambda each: each.is_outermost)
        plan = dataclasses.replace(self, transforms=tuple(ordered))
        problems = resolve.check_transforms(plan.transforms, self.abstract_variables)
        problems = problems or [problem for each in plan.transforms for problem in each.problems(plan)]
        if problems:
            raise ConfigError("These transforms of the gradient cannot be used:", problems)
        states = {each.name: each.state(plan) for each in plan.transforms}
        return dataclasses.replace(plan, transform_states=resolve.transform_entries(self.mesh, states, self.zero))

    @functools.cached_property
    def abstract_transforms(self) -> dict[str, Any]:
        """Name of a transform → its state as `jax.ShapeDtypeStruct`s with shardings; of those that keep one."""
        abstract = dict[str, jax.ShapeDtypeStruct]()
        for entry in self.transform_states:
            sharding = NamedSharding(self.mesh, entry.spec)
            abstract[entry.path] = jax.ShapeDtypeStruct(entry.shape, jnp.dtype(entry.dtype), sharding=sharding)
        return tree.nested(abstract)

    @functools.cached_property
    def abstract_params(self) -> Any:
        """The parameters as `jax.ShapeDtypeStruct`s with shardings."""
        return self._abstract(_abstract_params(self.model, self.precision), self.params)

    @functools.cached_property
    def abstract_variables(self) -> Any:
        """The model's variables as `jax.ShapeDtypeStruct`s with shardings."""
        return self._abstract(_abstract_variables(self.model), self.variables)

    @property
    def abstract_carry(self) -> Carry:
        """What a gradient function carries, as `jax.ShapeDtypeStruct`s with shardings."""
        return Carry(self.abstract_variables, self.abstract_transforms)

    @functools.cached_property
    def abstract_optimizer_state(self) -> Any:
        """The optimizer's state as `jax.ShapeDtypeStruct`s with shardings."""
        state = jax.eval_shape(self.optimizer.init, _abstract_params(self.model, self.precision))
        return self._abstract(state, self.optimizer_state)

    @functools.cached_property
    def gradient_shardings(self) -> Any:
        """The gradients' shardings, a tree like the parameters."""
        gradients = self._abstract(_abstract_params(self.model, self.precision), self.gradients)
        return jax.tree.map(lambda leaf: leaf.sharding, gradients)

    def _abstract(self, shapes: Any, entries: tuple[PlanEntry, ...]) -> Any:
        by_path = {entry.path: entry for entry in entries}

        def place(path: str, array: Any) -> jax.ShapeDtypeStruct:
            kind = by_path[path].memory_kind if by_path[path].on_host else None
            sharding = NamedSharding(self.mesh, by_path[path].spec, memory_kind=kind)
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

        return tree.map_with_path(place, shapes)

    def batch_sharding(self, path: str, ndim: int = 2) -> NamedSharding:
        """Return the sharding of an array of a batch, by its path and number of dimensions."""
        return NamedSharding(self.mesh, self.rules.batch_table.spec(path, ndim))

    def batch_shardings(self, batch: Any) -> Any:
        """Return the sharding of each array of a batch, a tree like the batch."""
        return tree.map_with_path(lambda path, x: self.batch_sharding(path, x.ndim), batch)

    def bytes_per_device(self) -> dict[str, int]:
        """Return table → bytes on each device: `params`, `gradients`, `optimizer_state`, and others if any."""
        return self._bytes(on_host=False)

    def bytes_on_host(self) -> dict[str, int]:
        """Return table → bytes in host memory for each device, of the tables that have some."""
        return {name: size for name, size in self._bytes(on_host=True).items() if size}

    def _bytes(self, *, on_host: bool) -> dict[str, int]:
        sizes = dict.fromkeys(("params", "gradients", "optimizer_state"), 0)
        for table in TABLES:
            if entries := self.entries(table):
                sizes[table] = sum(entry.bytes_per_device for entry in entries if entry.on_host == on_host)
        return sizes

    def entries(self, table: str) -> tuple[PlanEntry, ...]:
        """Return the entries of one of the plan's `TABLES`."""
        return self.transform_states if table == "transforms" else getattr(self, table)

    def __str__(self) -> str:
        return self.text("params", "variables", "transforms")

    def _repr_html_(self) -> str:
        """Return the plan as a notebook shows it: the heading, the bytes, and a folded table."""
        return format_html(self.heading, [*self.params, *self.variables, *self.transform_states], self._footer)

    @property
    def heading(self) -> str:
        """Mesh and decisions that are not about one array."""
        axes = " ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items() if size > 1) or "one device"
        quantize = f"   quantize {self.quantize}" if self.quantize else ""
        decisions = f"zero {self.zero}   remat {self.remat}   precision {self.precision.name}{quantize}{self.compress}"
        return f"mesh {axes}   {decisions}   attention {self.attention}"

    @property
    def _footer(self) -> str:
        return format_footer(self.params, self.bytes_per_device(), self.bytes_on_host())

    def text(self, *tables: str) -> str:
        """Return the plan as text: a heading, one line for each entry of some of its `TABLES`, and the bytes."""
        entries = format_entries({table: self.entries(table) for table in tables})
        return "\n".join([self.heading, *entries, self._footer])

    def diff(self, other: "ShardingPlan") -> str:
        """Return the lines of the text with all tables that differ from another plan's; empty when none does."""
        return diff_texts(self.text(*TABLES), other.text(*TABLES))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values: the mesh, the decisions, and one record for each entry."""
        return {
            "mesh": dict(self.mesh.shape),
            "devices": self.mesh.size,
            "zero": self.zero,
            "remat": str(self.remat),
            "precision": dataclasses.asdict(self.precision),
            "quantize": self.quantize,
            "compress": dataclasses.asdict(self.compress),
            "attention": str(self.attention),
            "parameters": sum(math.prod(entry.shape) for entry in self.params),
            "bytes_per_device": self.bytes_per_device(),
            "bytes_on_host": self.bytes_on_host(),
            **{table: [entry.to_json() for entry in self.entries(table)] for table in TABLES},
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
    compress: CompressConfig = NO_COMPRESSION,
    quantize: str = "",
    slices: Mapping[str, int] = _ONE_SLICE,
    offload: tuple[str, ...] = (),
    attention: str = "auto",
    context: str = "ring",
    evaluation_params: EvaluatedParams | None = None,
    transforms: Sequence[GradTransform] = (),
) -> ShardingPlan:
    """Resolve every decision, or list everything that is wrong.

    Args:
        mesh: From `make_mesh` or `abstract_mesh`.
        model: From `spmd.from_nnx`, `spmd.from_linen`, or `Model(init, apply)`. Only its shapes are used.
        optimizer: Any optax transformation; its state's layout follows the parameters by structure.
        zero: ZeRO stage: which of optimizer state (1), gradients (2), parameters (3) keep the `fsdp` axis.
        remat: What the backward pass keeps: `"none"`, `"full"`, or `Remat(save=("attention_out",))`.
        precision: The name of a policy, such as `"bf16"`, or a `Precision`.
        compress: Codecs of what devices send to each other.
        quantize: The recipe of all linear layers of blocks, such as `"fp8"`, or rows `PATTERN=RECIPE,…`
            (`spmd.settings.quantize`).
        slices: Axis → the slices that it spans, as for `make_mesh`.
        offload: What lives in host memory: `("optimizer_state", "params")`, one of them, or nothing.
        attention: The kernel: `"auto"`, or one of `spmd.model_api.attention_config.KERNELS`.
        context: The algorithm of attention over a sequence split over `sequence`: `"ring"` or `"all-to-all"`.
        evaluation_params: `(optimizer state, params)` → the parameters to evaluate, for an optimizer that is evaluated
            at others than its gradients. An average, schedule-free and lookahead need none: their state is read.
        transforms: What keeps a state around the gradient (`ShardingPlan.with_transforms`), besides what the precision
            and the recipes bring.

    Raises:
        RuleError: All problems of the table, the recipes, the specs and the optimizer's state, at once.
        ConfigError: An unknown precision, remat policy, ZeRO stage or kernel; compression of what is not sent; several
            of these errors together.
    """
    # Wrong codecs, recipes and names of saved activations do not hide what is wrong elsewhere.
    with Together(_CANNOT) as errors:
        problems = resolve.check_arguments(mesh, rules, model, optimizer, transforms)
        if zero not in ZERO_KEEPS:
            problems.append(Problem("zero", f"is {zero!r}", fix="0, 1, 2 or 3"))
        if problems:
            raise ConfigError(_CANNOT, problems)
        if problems := compress.problems_of_mesh(mesh.shape, slices, zero):
            errors.add(ConfigError(_CANNOT, problems))
            compress = NO_COMPRESSION
        made = jax.eval_shape(model.init, abstract_key())
        made_variables = _abstract_variables(model)
        problems = [*resolve.check_params(made), *resolve.check_storable(made), *resolve.check_storable(made_variables)]
        if problems:
            raise ConfigError("These parameters cannot be trained:", problems)
        precision, remat = compress.precision(make_precision(precision), slices), make_remat(remat)
        if problems := check_float64(precision, tree.flatten(made)):
            raise ConfigError("This precision does not fit the model:", first_of(problems, at_most=5))
        storage = make_storage(offload)
        resolve.check_storage(mesh, storage, remat)
        attention_config = make_attention_config(mesh, attention, context)
        treatment = treatment_of(optimizer)
        optimizer = wrap_optimizer_for_precision(optimizer, precision)
        params = jax.eval_shape(functools.partial(cast_floats, dtype=precision.params_dtype), made)
        variables, info = tree.flatten(_abstract_variables(model)), model.info()
        weights, rules = tree.flatten(params), rules.with_recorded(info.stacks)

        matches = resolve.matches_without_rules(info, rules)
        ruled = {path: tuple(x.shape) for path, x in {**weights, **variables}.items() if path not in matches}
        recipes, problems = resolve.resolve_recipes(quantize, rules, mesh, weights, info)
        names = [name for name, _ in rules.activations]
        by_name = [*problems, *remat.check_names(names, "is no activation of the rule table")]
        problems = resolve.audit_rules(mesh, rules, ruled, info)
        problems += resolve.check_evaluation_params(evaluation_params, optimizer, precision, params)
        if problems:
            problems += by_name
            others = resolve.resolve_optimizer_state(mesh, rules, optimizer, params, dict.fromkeys(weights, P()))[1]
            problems += [problem for problem in others if problem not in problems]
            raise RuleError(f"The rule table does not fit: {_count(problems)}.", problems)
        if by_name:
            errors.add(RuleError(f"The rule table does not fit: {_count(by_name)}.", by_name))
            recipes = {}
        matches |= {path: match for path in ruled if (match := rules.match(path))}
        for path, x in tree.flatten(made).items():
            if x.dtype not in (jnp.float32, weights[path].dtype):  # JAX's default, or as stored
                reason = ", ".join(filter(None, (matches[path].reason, f"{x.dtype} in the model")))
                matches[path] = dataclasses.replace(matches[path], reason=reason)
        specs = {
            table: {path: resolve.apply_zero(match, table, zero) for path, match in matches.items()} | dict(info.placed)
            for table in ("params", "gradients", "optimizer")
        }
        state, problems = resolve.resolve_optimizer_state(mesh, rules, optimizer, params, specs["optimizer"])
        if not problems:
            arrays = State(params, state, specs["optimizer"], variables, mesh.shape, rules, info)
            storage, problems = storage.resolved(optimizer, arrays)
        if problems:
            raise RuleError(f"The optimizer does not fit: {_count(problems)}.", problems)

        updates = treatment.describe({path: x.shape for path, x in weights.items()}) if treatment else _NO_UPDATES
        on_host = storage.off_device_params

        def entries(
            table: str, arrays: Mapping[str, Any], hosted: Container[str] = (), updates: Mapping[str, str] = _NO_UPDATES
        ) -> tuple[PlanEntry, ...]:
            return tuple(
                make_entry(
                    *(path, x, matches[path], specs[table][path]),
                    zero=zero,
                    axes=mesh.shape,
                    on_host=path in hosted,
                    update=updates.get(path, ""),
                )
                for path, x in arrays.items()
            )

        def placement(path: str) -> ParamPlacement:
            stacks = own_stacks(path, rules.stacks)
            scope = param_scope(rules.layer_path(path)[0])  # equal layers have equal placements
            placed = resolve.resolve_placement(mesh, matches[path], stacks, zero, on_host=path in on_host, scope=scope)
            shape = without_dims({**weights, **variables}[path].shape, stored_dims(stacks))
            exactly = info.frozen.get(path, path) in info.sent_exactly
            specs = placed.stored, placed.used
            comm = compress.param_comm(shape, specs, mesh.shape, slices, precision, exactly=exactly)
            return dataclasses.replace(placed, comm=comm, recipe=recipes.get(info.frozen.get(path, path)))

        gradients = jax.eval_shape(functools.partial(cast_floats, dtype=precision.gradients_dtype), params)
        by_module = {module: placement(path) for path, module in info.frozen.items()}
        by_path = {path: placement(path) for path in (*info.frozen, *weights) if path not in info.merged}
        placements = FrozenDict({**by_module, **by_path})
        reduced = {path for path in weights if path in info.gathered_by_layer and path not in info.sent_exactly}
        problems = compress.problems_of_model([placed.comm for placed in placements.values()], reduced)
        errors.add(ConfigError("This compression cannot be used:", problems))

        plan = ShardingPlan(
            mesh=mesh,
            rules=rules,
            zero=zero,
            remat=remat,
            precision=precision,
            compress=compress,
            quantize=quantize,
            attention=attention_config,
            placements=placements,
            slices=FrozenDict({axis: count for axis, count in slices.items() if count > 1}),
            params=entries("params", weights, on_host, updates),
            gradients=entries("gradients", tree.flatten(gradients)),
            variables=entries("params", variables, on_host),
            optimizer_state=resolve.state_entries(mesh, state, zero, storage.off_device_state),
            storage=storage,
            model=model,
            optimizer=optimizer,
            evaluation_params=evaluation_params,
        )
        used = [transform for recipe in recipes.values() for transform in recipe.transforms]
        return plan.with_transforms(*transforms, *dict.fromkeys(used), *precision.transforms)


def _abstract_params(model: Model, precision: Precision) -> Any:
    return jax.eval_shape(lambda key: cast_floats(model.init(key), precision.params_dtype), abstract_key())


def _abstract_variables(model: Model) -> Any:
    return jax.eval_shape(model.init_variables, abstract_key())


def _count(problems: list[Problem]) -> str:
    return f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
