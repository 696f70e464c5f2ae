"""The single decisions of a plan: matches, ZeRO tables, optimizer state, placements and offload.

Each function returns its problems instead of raising, so that a plan reports all at once.
"""

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import (
    ConfigError,
    Problem,
    check_call,
    check_type,
    describe_value,
    did_you_mean,
    reason_of,
)
from spmd.model_interface.grad_transform import GradTransform, StateArray
from spmd.model_interface.model import Model, ModelInfo
from spmd.model_interface.remat import Remat
from spmd.optim.extra_args import check_update
from spmd.optim.layerwise import check_layerwise
from spmd.optim.master_weights import unwrap_for_precision
from spmd.optim.storage import Storage
from spmd.optim.two_phase import treatment_of
from spmd.plan.records import ParamPlacement, PlanEntry, make_entry
from spmd.precision import Precision
from spmd.settings.quantize import RECIPES, QuantizationRecipe, parse_table, table_problems
from spmd.sharding.from_flax import audit_stack_names
from spmd.sharding.layer_paths import Stack, audit_recorded, audit_stacks, dims_of, stacked_text
from spmd.sharding.mesh import AXES, BATCH_AXES, AnyMesh, entry_axes, without_host_memory
from spmd.sharding.optimizer_state import (
    ZERO_KEEPS,
    DerivedSpec,
    drop_axis,
    drop_gathered,
    optimizer_specs,
)
from spmd.sharding.patterns import compile_pattern
from spmd.sharding.rules import Match, Replicate, Rules, audit_spec, replicate, spec_text

Specs = Mapping[str, P]

_SAME_DRAWS = replicate("every device draws the same numbers")
_ATTRIBUTE = replicate("an attribute that no rule matches")
_CONSTANT = Match(-1, "plain array", _ATTRIBUTE, P(), _ATTRIBUTE.reason)
_RANDOM_STATE = Match(-1, "random state", _SAME_DRAWS, P(), _SAME_DRAWS.reason)


def check_arguments(
    mesh: Any, rules: Any, model: Any, optimizer: Any, transforms: Any
) -> list[Problem]:
    """Check the kinds of the arguments of `make_plan`, and the axes of the mesh."""
    problems = check_type("rules", rules, Rules, "spmd.Rules(params=[…])")
    model_fix = "spmd.from_nnx, spmd.from_linen or spmd.Model(init, apply)"
    problems += check_type("model", model, Model, model_fix)
    problems += _check_optimizer(optimizer)
    problems += _check_transform_list(transforms)
    problems += _check_axes(mesh)
    return problems


def _check_optimizer(optimizer: Any) -> list[Problem]:
    has_init = callable(getattr(optimizer, "init", None))
    if has_init and callable(getattr(optimizer, "update", None)):
        return []
    fix = (
        "spmd.make_optimizer(spmd.OptimizerConfig(…), steps), or one of optax, such as "
        "optax.adamw(3e-4)"
    )
    return check_type("optimizer", optimizer, (), fix)


def _check_transform_list(transforms: Any) -> list[Problem]:
    is_list = isinstance(transforms, list | tuple)
    if is_list and all(isinstance(each, GradTransform) for each in transforms):
        return []
    what = f"is {describe_value(transforms)}"
    return [Problem("transforms", what, fix="a list, such as [MyTransform()]")]


def _check_axes(mesh: Any) -> list[Problem]:
    names = getattr(mesh, "axis_names", ())
    types = getattr(mesh, "axis_types", ())
    axes = dict(zip(names, types, strict=True))
    if axes == dict.fromkeys(AXES, AxisType.Auto):
        return []
    if axes:
        listed = ", ".join(f"{name} ({kind.name})" for name, kind in axes.items())
        what = f"has the axes {listed}"
    else:
        what = f"is {describe_value(mesh)}"
    fix = f"spmd.make_mesh(data=2, fsdp=-1): the axes {', '.join(AXES)}, of the type Auto"
    return [Problem("mesh", what, fix=fix)]


def check_params(made: Any) -> list[Problem]:
    """Check that the parameters from a model's `init` are floats in nested dictionaries."""
    if not isinstance(made, Mapping) or not jax.tree.leaves(made):
        fix = "a nested dictionary of arrays"
        return [Problem("model.init", "returns no parameters", describe_value(made), fix)]
    problems = []
    for path, x in tree.flatten(made).items():
        if jnp.issubdtype(x.dtype, jnp.floating):
            continue
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            what = f"is {x.dtype}: complex parameters are not supported"
            fix = "its real and imaginary part, joined by jax.lax.complex"
        else:
            what = f"is {x.dtype}, which has no gradient"
            fix = "a variable: nnx.Variable, a collection of Linen, or Model.init_variables"
        problems.append(Problem(path, what, fix=fix))
    return problems


def check_storable(arrays: Any) -> list[Problem]:
    """Check that arrays can be stored in a checkpoint: not empty, each with a path of its own.

    Example:
        >>> empty = jax.ShapeDtypeStruct((2, 0), "float32")
        >>> [problem.what for problem in check_storable({"..": empty})]
        ['has no elements, so it cannot be trained or stored', "has '..' in its path"]
    """
    problems = []
    seen = set[str]()
    for keys, x in jax.tree_util.tree_leaves_with_path(arrays):
        path = tree.path_of(keys)
        if 0 in x.shape:
            what = "has no elements, so it cannot be trained or stored"
            fix = "leave it out, as of an adapter of rank 0"
            problems.append(Problem(path, what, f"shape {tuple(x.shape)}", fix))
        for part in path.split("/"):
            if part in ("", ".", ".."):
                problems.append(Problem(path, f"has {part!r} in its path", fix="another name"))
        if path in seen:
            fix = 'another name, without "/"'
            problems.append(Problem(path, "is the path of two arrays", fix=fix))
        seen.add(path)
    return problems


def matches_without_rules(info: ModelInfo, rules: Rules) -> dict[str, Match]:
    """Match variables without a rule: random state, constants, and those with their own spec."""
    matches = dict.fromkeys(info.random_state, _RANDOM_STATE)
    for path in info.constants:
        if rules.match(path) is None:
            matches[path] = _CONSTANT
    for path, why in info.replicated.items():
        matches[path] = Match(-1, "whole", replicate(why), P(), why)
    for path, spec in info.placed.items():
        matches[path] = Match(-1, "where it is made", spec, spec, "")
    return matches


def audit_rules(
    mesh: AnyMesh, rules: Rules, shapes: Mapping[str, tuple[int, ...]], info: ModelInfo
) -> list[Problem]:
    """Return all problems between the table, the arrays under rules and the mesh.

    Args:
        shapes: Path → shape of each array that needs a rule.
    """
    problems = rules.audit(shapes, mesh.shape, tied=info.tied)
    problems += _audit_names_of_stacks(rules, shapes, info)
    specs = _matched_specs(rules, shapes)
    problems += _audit_expert_axis(mesh, specs)
    for _, spec in rules.activations:
        specs.append(spec)
    for _, value in rules.batch:
        if isinstance(value, P):
            specs.append(value)
    problems += _audit_sequence_axis(mesh, specs)
    problems += _audit_products(mesh, rules, info)
    return problems


def _audit_products(mesh: AnyMesh, rules: Rules, info: ModelInfo) -> Iterator[Problem]:
    """Yield a problem for each rule that leaves a matrix split, in its product, as examples are.

    A device would have some of the inputs or outputs, for some of the examples. Matrices that no
    layer gathers itself are gathered over all axes of tokens (`spmd.plan.partition_safe`).
    """
    known = set[str]()
    for path in sorted(info.matrices.keys() & info.gathered_by_layer):
        matrix = info.matrices[path]
        match = rules.match(path)
        if match is None or match.rule in known or isinstance(match.requested, Replicate):
            continue
        used = drop_gathered(match.requested)
        kept = []
        for dim in matrix.dims:
            entry = used[dim] if dim < len(used) else None
            for axis in entry_axes(entry):
                if axis in BATCH_AXES and mesh.shape[axis] > 1:
                    kept.append(axis)
        if kept:
            known.add(match.rule)
            axes = " and ".join(kept)
            yield Problem(
                match.rule,
                f"leaves {path} split over {axes} in its product, whose examples are split so too",
                f"stored {spec_text(match.requested)}, used {spec_text(used)}",
                'fsdp, over which parameters are gathered; expert beside it: ("fsdp", "expert")',
            )


def _audit_names_of_stacks(
    rules: Rules, shapes: Mapping[str, tuple[int, ...]], info: ModelInfo
) -> list[Problem]:
    """Compare the stacks of the table with those in metadata, and with those recorded at creation.

    A recorded stack is not reported where another audit reports the same parameter or stack.
    """
    named = audit_stack_names(info.annotations, rules.stacks)
    known = {problem.where for problem in audit_stacks(shapes, rules.stacks)}
    for problem in named:
        stack, _, _ = problem.where.rpartition("/")
        known.add(stack)
    problems = list(named)
    for problem in audit_recorded(shapes, rules.stacks, info.stacks or {}, info.created):
        if problem.where not in known:
            problems.append(problem)
    return problems


def _matched_specs(rules: Rules, paths: Iterable[str]) -> list[P]:
    specs = []
    for path in paths:
        match = rules.match(path)
        if match:
            specs.append(match.spec)
    return specs


def _splits(axis: str, specs: Iterable[P]) -> bool:
    """Return whether an axis splits a dimension in one of some specs."""
    for spec in specs:
        for entry in spec:
            if axis in entry_axes(entry):
                return True
    return False


def _audit_expert_axis(mesh: AnyMesh, specs: Sequence[P]) -> list[Problem]:
    size = mesh.shape["expert"]
    if size == 1 or _splits("expert", specs):
        return []
    what = "splits no parameter: this model has no experts"
    fix = "expert=1; data and fsdp split the batch, too"
    return [Problem("mesh.expert", what, f"expert={size}", fix)]


def _audit_sequence_axis(mesh: AnyMesh, specs: Sequence[P]) -> list[Problem]:
    size = mesh.shape["sequence"]
    if size == 1 or _splits("sequence", specs):
        return []
    what = (
        "splits nothing: no row says which dimension of an activation or of the batch is a sequence"
    )
    fix = (
        f'Rules(batch=[("tokens", P({BATCH_AXES}, "sequence"))]) for tokens [batch, '
        "sequence], or sequence=1"
    )
    return [Problem("mesh.sequence", what, f"sequence={size}", fix)]


def apply_zero(match: Match, table: str, zero: int) -> P:
    """Return the spec of a table under a ZeRO stage: as stored, or as in a parameter's use.

    Args:
        table: `params`, `gradients` or `optimizer`.
    """
    if table in ZERO_KEEPS[zero]:
        return match.spec
    return drop_gathered(match.spec)


def resolve_placement(
    mesh: AnyMesh,
    match: Match,
    stacks: tuple[Stack, ...],
    zero: int,
    *,
    over_stages: int | None,
    on_host: bool,
    scope: str,
) -> ParamPlacement:
    """Return the placement of one layer's parameter in these stacks.

    Args:
        over_stages: As in `Rules`.
    """
    spec = match.requested
    if isinstance(spec, Replicate):
        spec = P()
    if over_stages is not None:
        spec = drop_axis(spec, "pipe")
    used = drop_gathered(spec)
    kept = []
    for table in ("params", "gradients"):
        kept.append(spec if table in ZERO_KEEPS[zero] else used)
    stored, gradient = kept
    return ParamPlacement(
        mesh, stored, used, gradient, stacks, over_stages, on_host=on_host, scope=scope
    )


def resolve_recipes(
    table: str, rules: Rules, mesh: AnyMesh, trained: Iterable[str], info: ModelInfo
) -> tuple[dict[str, QuantizationRecipe], list[Problem]]:
    """Return path → recipe of linear layers' kernels, and the problems of all rows.

    Args:
        table: `TrainConfig.quantize`.
        trained: The paths of trained parameters.
    """
    problems = table_problems(table)
    if problems:
        return {}, problems
    trained = set(trained)
    names = {}
    for path in sorted({*trained, *info.frozen_params}):
        names[path] = rules.layer_path(path)[0]
    recipes = dict[str, QuantizationRecipe | None]()
    for pattern, name in parse_table(table):
        row = f"quantize, row {pattern + '=' + name!r}"
        hits = [path for path in names if compile_pattern(pattern).fullmatch(names[path])]
        new = []
        for path in hits:
            if path in info.linear and path not in recipes:
                new.append(path)
        recipes |= dict.fromkeys(new, RECIPES.get(name))
        if not new:
            problems.append(_unused_row(row, pattern, hits, names, info))
        elif name in RECIPES:
            is_trained = trained.issuperset(new)
            stages = mesh.shape["pipe"]
            problems += RECIPES[name].problems(row, stages=stages, is_trained=is_trained)
    used = {}
    for path, recipe in recipes.items():
        if recipe:
            used[path] = recipe
    return used, problems


def _unused_row(
    row: str, pattern: str, hits: Sequence[str], names: Mapping[str, str], info: ModelInfo
) -> Problem:
    """Return the problem of a row without a matmul of its own.

    Args:
        row: Its name in the error.
        hits: The paths that its pattern matches.
        names: Path → the path of one layer, for patterns.
    """
    linear = sorted({name for path, name in names.items() if path in info.linear})
    others = sorted({names[path] for path in hits}.difference(linear))
    if not info.linear.isdisjoint(hits):
        what = "is never used: rows before it match the same matmuls"
    elif others:
        what = f"matches no matmul: {', '.join(others)} is never quantized"
    else:
        what = "matches no matmul"
    fix = "none: only layers of spmd.models have recipes"
    if linear:
        fix = did_you_mean(pattern, linear)
    return Problem(row, what, fix=fix)


def resolve_optimizer_state(
    mesh: AnyMesh, rules: Rules, optimizer: optax.GradientTransformation, params: Any, specs: Specs
) -> tuple[dict[str, DerivedSpec], list[Problem]]:
    """Derive the optimizer state's specs from the parameters' by structure, and check them."""
    stacked = _stacked_dims(params, rules)
    try:
        state, problems = optimizer_specs(optimizer.init, params, specs, stacked)
    except ConfigError as error:
        return {}, [*error.problems]
    for path, derived in state.items():
        problems += _audit_state(path, derived, mesh)
    for path, derived in state.items():
        if 0 in derived.shape:
            what = "has no elements and cannot be stored"
            problems.append(Problem(f"optimizer state {path}", what))
    problems += check_update(optimizer, params)
    if not problems:
        problems = check_layerwise(optimizer, params, rules.stacked)
    if problems and _is_of_other_stacks(optimizer, stacked):
        problem = Problem(
            "optimizer",
            "was made for other stacks of layers than these",
            stacked_text(rules.stacks),
            "spmd.make_optimizer(config, steps, model=model)",
        )
        return state, [problem, *problems]
    return state, problems


def _stacked_dims(params: Any, rules: Rules) -> dict[str, list[int]]:
    """Return path of a parameter → its dimensions of stacked layers."""
    stacked = {}
    for path, param in tree.flatten(params).items():
        dims = dims_of(path, rules.stacks)
        stacked[path] = [dim for dim in dims if dim < len(param.shape)]
    return stacked


def _audit_state(path: str, derived: DerivedSpec, mesh: AnyMesh) -> list[Problem]:
    """Return the problems of the spec of one array of the optimizer's state."""
    by = f"the parameter's rule ({derived.source})"
    where = f"optimizer state {path}"
    problems = audit_spec(where, derived.shape, derived.spec, mesh.shape, by)
    if derived.block <= 1:
        return problems
    fix = (
        f"smaller blocks than {derived.block} (OptimizerConfig.moments_block), so each "
        "shard has whole ones"
    )
    return [dataclasses.replace(problem, fix=fix) for problem in problems]


def _is_of_other_stacks(
    optimizer: optax.GradientTransformation, stacked: Mapping[str, Sequence[int]]
) -> bool:
    """Return whether an optimizer from a config was made for other stacks of layers than these."""
    treatment = treatment_of(optimizer)
    if treatment is None:
        return False
    return any(dims_of(path, treatment.stacks) != tuple(dims) for path, dims in stacked.items())


def check_evaluation_params(
    function: Any, optimizer: optax.GradientTransformation, precision: Precision, params: Any
) -> list[Problem]:
    """Check a function from an optimizer's state and parameters to the parameters to evaluate."""
    where = "evaluation_params"
    fix = "a function such as optax.contrib.schedule_free_eval_params"
    if function is None:
        return []
    problems = check_call(where, function, "optimizer_state, params", fix)
    if problems:
        return problems

    def evaluated(params: Any) -> Any:
        return function(*unwrap_for_precision(optimizer.init(params), params, precision))

    try:
        with jax.numpy_dtype_promotion("standard"):
            found = jax.eval_shape(evaluated, params)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        what = f"cannot be computed from the optimizer's state: {reason_of(error)}"
        return [Problem(where, what, fix=fix)]
    examples = _differing_shapes(params, found)
    if not examples:
        return []
    what = "does not return the model's parameters"
    return [Problem(where, what, "; ".join(examples[:3]), fix)]


def _differing_shapes(params: Any, found: Any) -> list[str]:
    """Return a clause for each path with another shape in two trees of arrays."""
    wanted = _shapes(params)
    shapes = _shapes(found)
    clauses = []
    for path in {**wanted, **shapes}:
        if wanted.get(path) != shapes.get(path):
            shape = shapes.get(path, "missing")
            expected = wanted.get(path, "there")
            clauses.append(f"{path}: {shape}, not {expected}")
    return clauses


def _shapes(arrays: Any) -> dict[str, tuple[int, ...]]:
    return {path: x.shape for path, x in tree.flatten(arrays).items()}


def state_entries(
    mesh: AnyMesh, state: Mapping[str, DerivedSpec], zero: int, hosted: Container[str]
) -> tuple[PlanEntry, ...]:
    """Return one entry for each array of the optimizer's state.

    Args:
        hosted: The paths of arrays in host memory.
    """
    entries = []
    for path, derived in state.items():
        match = Match(-1, derived.source, derived.spec, derived.spec, "")
        entry = make_entry(
            path,
            derived,
            match,
            derived.spec,
            zero=zero,
            axes=mesh.shape,
            on_host=path in hosted,
        )
        entries.append(entry)
    return tuple(entries)


def check_transforms(transforms: Sequence[GradTransform], variables: Any) -> list[Problem]:
    """Return the problems of transforms: repeated names, and several outermost ones.

    A name may not be that of another transform or of a variable.

    Args:
        variables: The model's variables, a dictionary.
    """
    problems = []
    known = dict.fromkeys(variables, "a variable of the model")
    for transform in transforms:
        if transform.name in known:
            where = f"transform {transform.name}"
            what = f"has the name of {known[transform.name]}"
            problems.append(Problem(where, what, fix="each once, or another name"))
        known[transform.name] = "another transform"
    outermost = [transform.name for transform in transforms if transform.is_outermost]
    if len(outermost) > 1:
        where = f"transforms {', '.join(outermost)}"
        what = "each undo what all others did in a step"
        problems.append(Problem(where, what, fix="one of them"))
    return problems


def transform_entries(
    mesh: AnyMesh, states: Mapping[str, Mapping[str, StateArray]], zero: int
) -> tuple[PlanEntry, ...]:
    """Return one entry for each array of the transforms' states."""
    entries = []
    for name, state in states.items():
        for path, x in state.items():
            entry = make_entry(
                f"{name}/{path}",
                x,
                _match_of_state(x),
                x.spec,
                zero=zero,
                axes=mesh.shape,
                on_host=False,
            )
            entries.append(dataclasses.replace(entry, dtype=str(jnp.dtype(x.dtype))))
    return tuple(entries)


def _match_of_state(x: StateArray) -> Match:
    if x.reason:
        return Match(-1, "whole", replicate(x.reason), x.spec, x.reason)
    return Match(-1, x.rule or "where it is made", x.spec, x.spec, x.reason)


def check_storage(mesh: AnyMesh, storage: Storage, remat: Remat) -> None:
    """Raise a `ConfigError` with all obstacles to arrays or saved activations in host memory."""
    problems = storage.problems(mesh, remat)
    if remat.offload:
        problems += without_host_memory(mesh, f"remat {remat}")
    if problems:
        raise ConfigError("Invalid offload:", problems)
