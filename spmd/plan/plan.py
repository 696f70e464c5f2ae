"""A sharding plan: every decision of a training run about its names, resolved on abstract shapes.

No device and no memory is needed. `print(plan)` shows one line for each parameter;
`plan.diff(other)` explains a change.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.core import FrozenDict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem, RuleError, Together, any_of, first_of
from spmd.model_interface.activation_clips import (
    clips_text,
    form_problems,
    name_problems,
    parse_clips,
)
from spmd.model_interface.attention_config import AttentionConfig, make_attention_config
from spmd.model_interface.grad_transform import Carry, GradTransform
from spmd.model_interface.model import Model, ModelInfo, abstract_key
from spmd.model_interface.remat import Remat, make_remat
from spmd.optim.master_weights import wrap_optimizer_for_precision
from spmd.optim.storage import State, Storage
from spmd.optim.treatment import Treatment
from spmd.optim.two_phase import treatment_of
from spmd.plan import resolve
from spmd.plan.fold import Row, folded_rows, rows
from spmd.plan.records import ParamPlacement, PlanEntry, make_entry
from spmd.plan.render import diff_texts, format_footer, format_html, format_rows
from spmd.plan.scopes import param_scope
from spmd.precision import Precision, cast_floats, check_float64, make_precision
from spmd.settings.compress import NO_COMPRESSION, CompressConfig
from spmd.settings.offload import make_storage
from spmd.settings.quantize import QuantizationRecipe
from spmd.sharding.layer_paths import own_stacks, stored_dims, without_dims
from spmd.sharding.mesh import AnyMesh, axes_text, nontrivial_axes
from spmd.sharding.optimizer_state import ZERO_KEEPS, DerivedSpec
from spmd.sharding.rules import Match, Rules
from spmd.sharding.uneven_stages import with_uneven_stages
from spmd.tree import with_noun

TABLES = ("params", "variables", "transforms", "gradients", "optimizer_state")
"""The tables of entries in a plan."""

EvaluatedParams = Callable[[Any, Any], Any]
"""`(optimizer state, params) -> params` to evaluate: `optax.contrib.schedule_free_eval_params`."""

_CANNOT = "Invalid plan:"
_ONE_SLICE: Mapping[str, int] = FrozenDict()
_NO_UPDATES: Mapping[str, str] = FrozenDict()


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """All decisions, resolved; made by `make_plan`, immutable, compared by value.

    Attributes:
        mesh: The mesh, with devices or abstract.
        zero: The ZeRO stage, 0 to 3.
        placements: Parameter path in the model's modules → its placement, of one layer. A frozen
            variable is listed by its module's path and, unless it is merged with an adapter, by its
            own path.
        params: One entry for each parameter; the other tables have one for each of their arrays.
        gradients: Gradients after the reduction.
        variables: Variables that the model changes by itself; none for most models.
        transforms: Transforms of the gradient, in the order of wrapping; the last is outermost.
        transform_states: Their states, each path after the name of its transform.
        slices: Axis → the number of slices along it, if above 1.
        compress: Compression of communication; `ParamPlacement.comm` has that of each parameter.
        quantize: The table of quantized matmuls; `ParamPlacement.recipe` has the recipe of each
            kernel.
        storage: The place of the training state between steps.
        activation_clips: Activation → the largest norm of a token's gradient.
        evaluation_params: The function for the parameters to evaluate, in place of
            `find_evaluated_params`.
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
    activation_clips: Mapping[str, float] = FrozenDict()

    def with_transforms(self, *transforms: GradTransform) -> "ShardingPlan":
        """Return the plan with more transforms of the gradient, inside of the present ones.

        New transforms are nearest to the gradient function. An outermost transform wraps all
        others, whenever it is added.

        Raises:
            ConfigError: All problems of transforms with the plan, and two transforms of one name.
        """
        if not transforms:
            return self
        ordered = sorted([*transforms, *self.transforms], key=lambda each: each.is_outermost)
        plan = dataclasses.replace(self, transforms=tuple(ordered))
        problems = resolve.check_transforms(plan.transforms, self.abstract_variables)
        if not problems:
            for transform in plan.transforms:
                problems.extend(transform.problems(plan))
        if problems:
            raise ConfigError("Invalid gradient transforms:", problems)
        states = {}
        for transform in plan.transforms:
            states[transform.name] = transform.state(plan)
        entries = resolve.transform_entries(self.mesh, states, self.zero)
        return dataclasses.replace(plan, transform_states=entries)

    @functools.cached_property
    def abstract_transforms(self) -> dict[str, Any]:
        """The transforms' states by name, as `jax.ShapeDtypeStruct`s with shardings.

        Transforms without a state are absent.
        """
        abstract = dict[str, jax.ShapeDtypeStruct]()
        for entry in self.transform_states:
            sharding = NamedSharding(self.mesh, entry.spec)
            dtype = jnp.dtype(entry.dtype)
            abstract[entry.path] = jax.ShapeDtypeStruct(entry.shape, dtype, sharding=sharding)
        return tree.nested(abstract)

    @functools.cached_property
    def _param_shapes(self) -> Any:
        """The parameters' shapes, in the dtypes of the training state."""
        made = jax.eval_shape(self.model.init, abstract_key())
        return _cast(made, self.precision.params_dtype)

    @functools.cached_property
    def abstract_params(self) -> Any:
        """The parameters as `jax.ShapeDtypeStruct`s with shardings."""
        return self._abstract(self._param_shapes, self.params)

    @functools.cached_property
    def abstract_variables(self) -> Any:
        """The model's variables as `jax.ShapeDtypeStruct`s with shardings."""
        return self._abstract(_abstract_variables(self.model), self.variables)

    @property
    def abstract_carry(self) -> Carry:
        """The carry of a gradient function, as `jax.ShapeDtypeStruct`s with shardings."""
        return Carry(self.abstract_variables, self.abstract_transforms)

    @functools.cached_property
    def abstract_optimizer_state(self) -> Any:
        """The optimizer's state as `jax.ShapeDtypeStruct`s with shardings."""
        state = jax.eval_shape(self.optimizer.init, self._param_shapes)
        return self._abstract(state, self.optimizer_state)

    @functools.cached_property
    def gradient_shardings(self) -> Any:
        """The gradients' shardings, a tree like the parameters."""
        gradients = self._abstract(self._param_shapes, self.gradients)
        return jax.tree.map(lambda leaf: leaf.sharding, gradients)

    def _abstract(self, shapes: Any, entries: tuple[PlanEntry, ...]) -> Any:
        """Attach the shardings of entries to a tree of abstract arrays."""
        shardings = {entry.path: self._sharding(entry) for entry in entries}

        def place(path: str, array: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=shardings[path])

        return tree.map_with_path(place, shapes)

    def _sharding(self, entry: PlanEntry) -> NamedSharding:
        if not entry.on_host:
            return NamedSharding(self.mesh, entry.spec)
        return NamedSharding(self.mesh, entry.spec, memory_kind=entry.memory_kind)

    def batch_sharding(self, path: str, ndim: int = 2) -> NamedSharding:
        """Return the sharding of an array of a batch, by its path and number of dimensions."""
        return NamedSharding(self.mesh, self.rules.batch_table.spec(path, ndim))

    def batch_shardings(self, batch: Any) -> Any:
        """Return the sharding of each array of a batch, a tree like the batch."""
        arrays = self.rules.batch_table.arrays(batch)

        def sharding(path: str, x: Any) -> NamedSharding:
            del x
            return NamedSharding(self.mesh, arrays[path].spec)

        return tree.map_with_path(sharding, batch)

    def bytes_per_device(self) -> dict[str, int]:
        """Return table → bytes on each device.

        The tables are `params`, `gradients`, `optimizer_state`, and others if they have entries.
        """
        return self._bytes(on_host=False)

    def bytes_on_host(self) -> dict[str, int]:
        """Return table → bytes in host memory for each device; tables without any are absent."""
        return {name: size for name, size in self._bytes(on_host=True).items() if size}

    def _bytes(self, *, on_host: bool) -> dict[str, int]:
        sizes = dict.fromkeys(("params", "gradients", "optimizer_state"), 0)
        for table in TABLES:
            entries = self.entries(table)
            if entries:
                sizes[table] = _bytes_of(entries, on_host=on_host)
        return sizes

    def entries(self, table: str) -> tuple[PlanEntry, ...]:
        """Return the entries of one of the plan's `TABLES`."""
        if table == "transforms":
            return self.transform_states
        return getattr(self, table)

    def __str__(self) -> str:
        return self._text(folded_rows, "params", "variables", "transforms")

    def __repr__(self) -> str:
        heading = " ".join(self.heading.split())
        footer = " ".join(self._footer.split())
        return f"ShardingPlan({heading}; {footer})"

    def _repr_html_(self) -> str:
        """Return the plan as HTML for a notebook: the heading, the bytes, and a folded table."""
        entries = [*self.params, *self.variables, *self.transform_states]
        return format_html(self.heading, entries, self._footer)

    @property
    def heading(self) -> str:
        """Mesh and decisions about the whole plan."""
        axes = axes_text(self.mesh.shape)
        decisions = f"zero {self.zero}   remat {self.remat}   precision {self.precision.name}"
        if self.quantize:
            decisions += f"   quantize {self.quantize}"
        if self.activation_clips:
            decisions += f"   clip gradients of {clips_text(self.activation_clips)}"
        return f"mesh {axes}   {decisions}{self.compress}   attention {self.attention}"

    @property
    def _footer(self) -> str:
        return format_footer(self.params, self.bytes_per_device(), self.bytes_on_host())

    def text(self, *tables: str) -> str:
        """Return the plan as text: a heading, a line for each entry of some tables, and the bytes.

        In `str(plan)`, lines of layers that differ in their number alone are one.

        Args:
            tables: Names of `TABLES`.
        """
        return self._text(rows, *tables)

    def _text(self, rows_of: Callable[[Sequence[PlanEntry]], list[Row]], *tables: str) -> str:
        cells = {table: rows_of(self.entries(table)) for table in tables}
        return "\n".join([self.heading, *format_rows(cells), self._footer])

    def diff(self, other: "ShardingPlan") -> str:
        """Return the differing lines of two plans' texts with all tables; empty if equal."""
        return diff_texts(self.text(*TABLES), other.text(*TABLES))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values: the mesh, the decisions, and a record for each entry."""
        record = {
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
        }
        for table in TABLES:
            record[table] = [entry.to_json() for entry in self.entries(table)]
        return record


@dataclasses.dataclass(frozen=True, eq=False)
class _Inputs:
    """Arguments of `make_plan` after their own checks, and the abstract arrays of the model.

    Attributes:
        rules: The table, with the stacks recorded by the model.
        compress: The compression, or none if the mesh cannot use it.
        treatment: The optimizer's treatment of each parameter, if it was made from a config.
        optimizer: The optimizer, with the master weights of the precision.
        storage: The requested storage; `_resolve_state` returns the resolved one.
        made: The parameters in the dtypes of the model.
        params: The parameters in the dtypes of the training state.
        weights: Path → parameter, as in `params`.
        variables: Path → variable of the model.
    """

    mesh: AnyMesh
    slices: Mapping[str, int]
    rules: Rules
    zero: int
    remat: Remat
    precision: Precision
    compress: CompressConfig
    quantize: str
    clips: Mapping[str, float]
    attention: AttentionConfig
    storage: Storage
    model: Model
    info: ModelInfo
    treatment: Treatment | None
    optimizer: optax.GradientTransformation
    evaluation_params: EvaluatedParams | None
    made: Any
    params: Any
    weights: Mapping[str, Any]
    variables: Mapping[str, Any]

    @functools.cached_property
    def arrays(self) -> Mapping[str, Any]:
        """Path → parameter or variable."""
        return {**self.weights, **self.variables}


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
    context: str = "auto",
    evaluation_params: EvaluatedParams | None = None,
    transforms: Sequence[GradTransform] = (),
    clip_activations: str = "",
) -> ShardingPlan:
    """Resolve every decision, or list every problem.

    Args:
        mesh: From `make_mesh` or `abstract_mesh`.
        model: From `spmd.from_nnx`, `spmd.from_linen`, or `Model(init, apply)`. Only its shapes are
            used.
        optimizer: Any optax transformation; its state's layout follows the parameters by structure.
        zero: ZeRO stage: which of optimizer state (1), gradients (2), parameters (3) stay split
            over `fsdp` and `sequence`.
        remat: The policy of activations saved for the backward pass: `"none"`, `"full"`, or
            `Remat(save=("attention_out",))`.
        precision: The name of a policy, such as `"bf16"`, or a `Precision`.
        compress: Codecs of communication between devices.
        quantize: The recipe of all linear layers of blocks, such as `"fp8"`, or rows
            `PATTERN=RECIPE,…` (`spmd.settings.quantize`).
        slices: Axis → the number of slices along it, as for `make_mesh`.
        offload: The arrays in host memory: `("optimizer_state", "params")`, one of them, or
            nothing.
        attention: The kernel: `"auto"`, or one of `spmd.model_interface.attention_config.KERNELS`.
        context: The algorithm of attention over a sequence split over `sequence`: `"auto"`, or one
            of `spmd.model_interface.attention_config.CONTEXTS`.
        evaluation_params: `(optimizer state, params)` → the parameters to evaluate, for an
            optimizer that evaluates at other parameters than those of its gradients. An average,
            schedule-free and lookahead need none: their state is read.
        transforms: Transforms of the gradient (`ShardingPlan.with_transforms`), besides those of
            the precision and the recipes.
        clip_activations: Activations whose gradients are clipped, token by token, with the largest
            norm of each: `"residual=1"` (`spmd.plan.clipped_gradients`).

    Raises:
        RuleError: All problems of the table, the recipes, the specs and the optimizer's state, at
            once.
        ConfigError: An unknown precision, remat policy, ZeRO stage or kernel; compression without
            effect; several of these errors together.
    """
    # Problems of codecs, recipes and names of saved activations do not hide other problems.
    with Together(_CANNOT) as errors:
        _check_arguments(mesh, rules, model, optimizer, transforms, zero)
        compress = _usable_compression(compress, mesh, slices, zero, errors)
        made = jax.eval_shape(model.init, abstract_key())
        made_variables = _abstract_variables(model)
        _check_arrays(made, made_variables)
        precision = compress.precision(make_precision(precision), slices)
        remat = make_remat(remat)
        _check_precision(precision, made)
        storage = make_storage(offload)
        resolve.check_storage(mesh, storage, remat)
        attention_config = make_attention_config(mesh, attention, context)
        treatment = treatment_of(optimizer)
        optimizer = wrap_optimizer_for_precision(optimizer, precision)
        params = _cast(made, precision.params_dtype)
        info = model.info()
        weights, variables = tree.flatten(params), tree.flatten(made_variables)
        shapes = {path: x.shape for path, x in {**weights, **variables}.items()}
        recorded = rules.with_recorded(info.stacks)
        inputs = _Inputs(
            mesh=mesh,
            slices=slices,
            rules=with_uneven_stages(recorded, shapes, mesh.shape),
            zero=zero,
            remat=remat,
            precision=precision,
            compress=compress,
            quantize=quantize,
            clips=_parse_clips(clip_activations),
            attention=attention_config,
            storage=storage,
            model=model,
            info=info,
            treatment=treatment,
            optimizer=optimizer,
            evaluation_params=evaluation_params,
            made=made,
            params=params,
            weights=weights,
            variables=variables,
        )
        return _resolve_plan(inputs, transforms, errors)


def _parse_clips(text: str) -> Mapping[str, float]:
    """Return the limits of activations' gradients; raise `ConfigError` for others."""
    problems = list(form_problems(text))
    if problems:
        raise ConfigError("Invalid clipping:", problems)
    return parse_clips(text)


def _resolve_plan(
    inputs: _Inputs, transforms: Sequence[GradTransform], errors: Together
) -> ShardingPlan:
    """Match the rules, derive all specs from them, and make the plan."""
    matches = resolve.matches_without_rules(inputs.info, inputs.rules)
    ruled = {path: tuple(x.shape) for path, x in inputs.arrays.items() if path not in matches}
    recipes = _check_rules(inputs, ruled, errors)
    matches |= _match_rules(inputs.rules, ruled)
    _note_dtypes(matches, inputs)
    param_specs = _specs("params", inputs, matches)
    gradient_specs = _specs("gradients", inputs, matches)
    optimizer_specs = _specs("optimizer", inputs, matches)
    state, storage = _resolve_state(inputs, optimizer_specs)
    updates = _describe_updates(inputs)
    on_host = storage.off_device_params
    gradients = _cast(inputs.params, inputs.precision.gradients_dtype)
    placements = _place_params(inputs, matches, recipes, on_host)
    problems = _compression_problems(inputs, placements)
    errors.add(ConfigError("Invalid compression:", problems))
    params = _entries(inputs, inputs.weights, matches, param_specs, on_host, updates)
    plan = ShardingPlan(
        mesh=inputs.mesh,
        rules=inputs.rules,
        zero=inputs.zero,
        remat=inputs.remat,
        precision=inputs.precision,
        compress=inputs.compress,
        quantize=inputs.quantize,
        attention=inputs.attention,
        placements=placements,
        slices=FrozenDict(nontrivial_axes(inputs.slices)),
        params=params,
        gradients=_entries(inputs, tree.flatten(gradients), matches, gradient_specs),
        variables=_entries(inputs, inputs.variables, matches, param_specs, on_host),
        optimizer_state=resolve.state_entries(
            inputs.mesh, state, inputs.zero, storage.off_device_state
        ),
        storage=storage,
        model=inputs.model,
        optimizer=inputs.optimizer,
        evaluation_params=inputs.evaluation_params,
        activation_clips=inputs.clips,
    )
    errors.add(ConfigError(_CANNOT, _rates_problems(inputs, transforms)))
    of_recipes = _transforms_of(recipes)
    return plan.with_transforms(*transforms, *of_recipes, *inputs.precision.transforms)


def _rates_problems(inputs: _Inputs, transforms: Sequence[GradTransform]) -> list[Problem]:
    """Return a problem if the model has learning rates, and the optimizer does not know them."""
    treatment = inputs.treatment
    is_elsewhere = any(transform.has_own_optimizer for transform in transforms)
    if not inputs.info.rates or is_elsewhere:
        return []
    if treatment is not None and treatment.has_rates:
        return []
    what = "does not multiply learning rates by those of the model (spmd.with_mup)"
    fix = "spmd.make_optimizer(config, steps, model=model)"
    return [Problem("optimizer", what, fix=fix)]


def _check_arguments(
    mesh: Any, rules: Any, model: Any, optimizer: Any, transforms: Any, zero: Any
) -> None:
    """Raise a `ConfigError` with all arguments of a wrong kind."""
    problems = resolve.check_arguments(mesh, rules, model, optimizer, transforms)
    if zero not in ZERO_KEEPS:
        problems.append(Problem("zero", f"is {zero!r}", fix=any_of(ZERO_KEEPS)))
    if problems:
        raise ConfigError(_CANNOT, problems)


def _usable_compression(
    compress: CompressConfig,
    mesh: AnyMesh,
    slices: Mapping[str, int],
    zero: int,
    errors: Together,
) -> CompressConfig:
    """Return the compression, or none if the mesh cannot use it; the error is raised later."""
    problems = compress.problems_of_mesh(mesh.shape, slices, zero)
    if not problems:
        return compress
    errors.add(ConfigError(_CANNOT, problems))
    return NO_COMPRESSION


def _check_arrays(made: Any, variables: Any) -> None:
    """Raise a `ConfigError` for parameters without a gradient or arrays unfit for a checkpoint."""
    problems = [
        *resolve.check_params(made),
        *resolve.check_storable(made),
        *resolve.check_storable(variables),
    ]
    if problems:
        raise ConfigError("Invalid parameters:", problems)


def _check_precision(precision: Precision, made: Any) -> None:
    problems = check_float64(precision, tree.flatten(made))
    if problems:
        title = "Precision does not fit the model:"
        raise ConfigError(title, first_of(problems, at_most=5))


def _check_rules(
    inputs: _Inputs, ruled: Mapping[str, tuple[int, ...]], errors: Together
) -> dict[str, QuantizationRecipe]:
    """Check the table, the recipes and the names of saved activations; return the usable recipes.

    Args:
        ruled: Path → shape of each array that needs a rule.
        errors: Takes the problems of recipes and names, if there are no others.

    Raises:
        RuleError: The table or the function of evaluated parameters does not fit. All problems are
            listed, also those of recipes, of names, and of the optimizer without sharding.
    """
    rules, remat = inputs.rules, inputs.remat
    recipes, by_name = resolve.resolve_recipes(
        inputs.quantize, rules, inputs.mesh, inputs.weights, inputs.info
    )
    activations = [name for name, _ in rules.activations]
    by_name = [*by_name, *remat.check_names(activations, "is no activation of the rule table")]
    by_name += name_problems(inputs.clips, activations)
    problems = resolve.audit_rules(inputs.mesh, rules, ruled, inputs.info)
    problems += resolve.check_evaluation_params(
        inputs.evaluation_params, inputs.optimizer, inputs.precision, inputs.params
    )
    if problems:
        problems += by_name
        replicated = dict.fromkeys(inputs.weights, P())
        _, of_optimizer = resolve.resolve_optimizer_state(
            inputs.mesh, rules, inputs.optimizer, inputs.params, replicated
        )
        problems += [problem for problem in of_optimizer if problem not in problems]
        raise RuleError(
            f"The rule table does not fit: {with_noun(len(problems), 'problem')}.", problems
        )
    if by_name:
        errors.add(
            RuleError(
                f"The rule table does not fit: {with_noun(len(by_name), 'problem')}.", by_name
            )
        )
        return {}
    return recipes


def _match_rules(rules: Rules, paths: Iterable[str]) -> dict[str, Match]:
    matches = {}
    for path in paths:
        match = rules.match(path)
        if match:
            matches[path] = match
    return matches


def _note_dtypes(matches: dict[str, Match], inputs: _Inputs) -> None:
    """Add the dtype in the model to a parameter's reason, unless it is the default or as stored."""
    for path, x in tree.flatten(inputs.made).items():
        if x.dtype in (jnp.float32, inputs.weights[path].dtype):  # JAX's default, or as stored
            continue
        match = matches[path]
        remark = f"{x.dtype} in the model"
        reason = f"{match.reason}, {remark}" if match.reason else remark
        matches[path] = dataclasses.replace(match, reason=reason)


def _specs(table: str, inputs: _Inputs, matches: Mapping[str, Match]) -> dict[str, P]:
    """Return path → spec in a table of `spmd.sharding.optimizer_state.ZERO_KEEPS`."""
    specs = {}
    for path, match in matches.items():
        specs[path] = resolve.apply_zero(match, table, inputs.zero)
    return specs | dict(inputs.info.placed)


def _resolve_state(
    inputs: _Inputs, specs: Mapping[str, P]
) -> tuple[dict[str, DerivedSpec], Storage]:
    """Return the specs of the optimizer's state, and the storage with its decisions."""
    state, problems = resolve.resolve_optimizer_state(
        inputs.mesh, inputs.rules, inputs.optimizer, inputs.params, specs
    )
    storage = inputs.storage
    if not problems:
        arrays = State(
            inputs.params,
            state,
            specs,
            inputs.variables,
            inputs.mesh.shape,
            inputs.rules,
            inputs.info,
        )
        storage, problems = storage.resolved(inputs.optimizer, arrays)
    if problems:
        raise RuleError(
            f"The optimizer does not fit: {with_noun(len(problems), 'problem')}.", problems
        )
    return state, storage


def _describe_updates(inputs: _Inputs) -> Mapping[str, str]:
    """Return the optimizer's treatment of parameters by path, if it is not the same for all."""
    if inputs.treatment is None:
        return _NO_UPDATES
    shapes = {path: x.shape for path, x in inputs.weights.items()}
    return inputs.treatment.describe(shapes)


def _place_params(
    inputs: _Inputs,
    matches: Mapping[str, Match],
    recipes: Mapping[str, QuantizationRecipe],
    on_host: Container[str],
) -> Mapping[str, ParamPlacement]:
    """Return the placements, of frozen variables by the paths of their modules first."""
    info = inputs.info

    def place(path: str) -> ParamPlacement:
        return _placement(path, inputs, matches[path], recipes, on_host=path in on_host)

    placements = {}
    for path, module in info.frozen.items():
        placements[module] = place(path)
    for module, path in info.stored_as.items():
        placement = dataclasses.replace(place(path), recipe=recipes.get(module))
        if info.is_gathered_as_codes(module):
            # A backward pass decodes again: decoded, they would take the memory that codes spare.
            placement = dataclasses.replace(placement, save_gathered=False)
        placements[module] = placement
    for path in (*info.frozen, *inputs.weights):
        if path not in info.merged:
            placements[path] = place(path)
    return FrozenDict(placements)


def _placement(
    path: str,
    inputs: _Inputs,
    match: Match,
    recipes: Mapping[str, QuantizationRecipe],
    *,
    on_host: bool,
) -> ParamPlacement:
    """Return the placement of one layer's parameter, with its communication and its recipe."""
    rules, info = inputs.rules, inputs.info
    stacks = own_stacks(path, rules.stacks)
    scope = param_scope(rules.layer_path(path)[0])  # equal layers have equal placements
    placed = resolve.resolve_placement(
        inputs.mesh,
        match,
        stacks,
        inputs.zero,
        over_stages=rules.over_stages.get(path),
        on_host=on_host,
        scope=scope,
    )
    in_module = info.frozen.get(path, path)
    comm = inputs.compress.param_comm(
        without_dims(inputs.arrays[path].shape, stored_dims(stacks)),
        (placed.param_spec, placed.compute_spec),
        inputs.mesh.shape,
        inputs.slices,
        inputs.precision,
        exactly=in_module in info.sent_exactly or info.is_stored_part(path),
    )
    return dataclasses.replace(placed, comm=comm, recipe=recipes.get(in_module))


def _compression_problems(
    inputs: _Inputs, placements: Mapping[str, ParamPlacement]
) -> list[Problem]:
    """Return the problems of the compression with the model's parameters."""
    reduced = inputs.weights.keys() & inputs.info.gathered_by_layer - inputs.info.sent_exactly
    comms = [placed.comm for placed in placements.values()]
    return inputs.compress.problems_of_model(comms, reduced)


def _entries(
    inputs: _Inputs,
    arrays: Mapping[str, Any],
    matches: Mapping[str, Match],
    specs: Mapping[str, P],
    hosted: Container[str] = (),
    updates: Mapping[str, str] = _NO_UPDATES,
) -> tuple[PlanEntry, ...]:
    """Return one entry for each array of a table."""
    entries = []
    for path, x in arrays.items():
        entry = make_entry(
            path,
            x,
            matches[path],
            specs[path],
            zero=inputs.zero,
            axes=inputs.mesh.shape,
            on_host=path in hosted,
            update=updates.get(path, ""),
        )
        entries.append(entry)
    return tuple(entries)


def _transforms_of(recipes: Mapping[str, QuantizationRecipe]) -> list[GradTransform]:
    """Return the transforms of recipes, each once, in the order of the recipes."""
    used = dict[GradTransform, None]()
    for recipe in recipes.values():
        used |= dict.fromkeys(recipe.transforms)
    return list(used)


def _bytes_of(entries: Iterable[PlanEntry], *, on_host: bool) -> int:
    return sum(entry.bytes_per_device for entry in entries if entry.on_host == on_host)


def _cast(arrays: Any, dtype: jnp.dtype) -> Any:
    """Return abstract arrays with floats in a dtype."""
    return jax.eval_shape(functools.partial(cast_floats, dtype=dtype), arrays)


def _abstract_variables(model: Model) -> Any:
    return jax.eval_shape(model.init_variables, abstract_key())
