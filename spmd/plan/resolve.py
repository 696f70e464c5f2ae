"""The single decisions of a plan: matches, ZeRO tables, optimizer state, placements and offload.

Each function returns what is wrong instead of raising, so that a plan reports all problems at once.
"""

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, Problem, check_call, check_type, did_you_mean, reason_of, shown
from spmd.model_api.grad_transform import GradTransform, StateArray
from spmd.model_api.model import Model, ModelInfo
from spmd.model_api.remat import Remat
from spmd.optim.extra_args import check_update
from spmd.optim.layerwise import check_layerwise
from spmd.optim.master_weights import unwrap_for_precision
from spmd.optim.storage import Storage
from spmd.optim.two_phase import treatment_of
from spmd.plan.records import ParamPlacement, PlanEntry, make_entry
from spmd.precision import Precision
from spmd.settings.quantize import RECIPES, MatmulRecipe, parse_table, table_problems
from spmd.sharding.from_flax import audit_stack_names
from spmd.sharding.layer_paths import Stack, audit_recorded, audit_stacks, dims_of, stacked_text
from spmd.sharding.mesh import AXES, BATCH_AXES, AnyMesh, entry_axes, without_host_memory
from spmd.sharding.optimizer_state import ZERO_KEEPS, DerivedSpec, drop_fsdp, optimizer_specs
from spmd.sharding.patterns import compile_pattern
from spmd.sharding.rules import Match, Replicate, Rules, audit_spec, replicate

Specs = Mapping[str, P]

_SAME_DRAWS = replicate("every device draws the same numbers")
_ATTRIBUTE = replicate("an attribute that no rule matches")
_CONSTANT = Match(-1, "plain array", _ATTRIBUTE, P(), _ATTRIBUTE.reason)
_RANDOM_STATE = Match(-1, "random state", _SAME_DRAWS, P(), _SAME_DRAWS.reason)


def check_arguments(mesh: Any, rules: Any, model: Any, optimizer: Any, transforms: Any) -> list[Problem]:
    """Return what is wrong with the kinds of the arguments of `make_plan`, and with the axes of the mesh."""
    problems = check_type("rules", rules, Rules, "spmd.Rules(params=[…])")
    problems += check_type("model", model, Model, "spmd.from_nnx, spmd.from_linen or spmd.Model(init, apply)")
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        fix = "spmd.make_optimizer(spmd.OptimizerConfig(…), steps), or one of optax, such as optax.adamw(3e-4)"
        problems += check_type("optimizer", optimizer, (), fix)
    is_list = isinstance(transforms, list | tuple)
    if not is_list or not all(isinstance(each, GradTransform) for each in transforms):
        problems.append(Problem("transforms", f"is {shown(transforms)}", fix="a list, such as [MyTransform()]"))
    axes = dict(zip(getattr(mesh, "axis_names", ()), getattr(mesh, "axis_types", ()), strict=True))
    if axes != dict.fromkeys(AXES, AxisType.Auto):
        what = f"has the axes {', '.join(f'{name} ({kind.name})' for name, kind in axes.items())}" if axes else ""
        fix = f"spmd.make_mesh(data=2, fsdp=-1): the axes {', '.join(AXES)}, of the type Auto"
        problems.append(Problem("mesh", what or f"is {shown(mesh)}", fix=fix))
    return problems


def check_params(made: Any) -> list[Problem]:
    """Return what is wrong with the parameters that a model's `init` makes: they are floats, in nested dictionaries."""
    if not isinstance(made, Mapping) or not jax.tree.leaves(made):
        return [Problem("model.init", "returns no parameters", shown(made), "a nested dictionary of arrays")]
    problems = []
    for path, x in tree.flatten(made).items():
        why, fix = "has no gradient", "a variable: nnx.Variable, a collection of Linen, or Model.init_variables"
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            why, fix = "would be trained uphill", "its real and imaginary part, joined by jax.lax.complex"
        if not jnp.issubdtype(x.dtype, jnp.floating):
            problems.append(Problem(path, f"is {x.dtype}, which {why}", fix=fix))
    return problems


def check_storable(arrays: Any) -> list[Problem]:
    """Return what no checkpoint could hold: arrays without elements, and names that make no path or the same one.

    Example:
        >>> [problem.what for problem in check_storable({"..": jax.ShapeDtypeStruct((2, 0), "float32")})]
        ['has no elements, so it cannot be trained or stored', "has '..' in its path"]
    """
    problems, seen = [], set[str]()
    for path, x in ((tree.path_of(keys), x) for keys, x in jax.tree_util.tree_leaves_with_path(arrays)):
        if 0 in x.shape:
            what, fix = "has no elements, so it cannot be trained or stored", "leave it out, as of an adapter of rank 0"
            problems.append(Problem(path, what, f"shape {tuple(x.shape)}", fix))
        parts = [part for part in path.split("/") if part in ("", ".", "..")]
        problems += [Problem(path, f"has {part!r} in its path", fix="another name") for part in parts]
        if path in seen:
            problems.append(Problem(path, "is the path of two arrays", fix='another name, without "/"'))
        seen.add(path)
    return problems


def matches_without_rules(info: ModelInfo, rules: Rules) -> dict[str, Match]:
    """Return the matches of the variables that need no rule: random state, constants, and those with their own spec."""
    matches = {path: _RANDOM_STATE for path in info.random_state}
    matches |= {path: _CONSTANT for path in info.constants if rules.match(path) is None}
    matches |= {path: Match(-1, "whole", replicate(why), P(), why) for path, why in info.replicated.items()}
    return matches | {path: Match(-1, "where it is made", spec, spec, "") for path, spec in info.placed.items()}


def audit_rules(mesh: AnyMesh, rules: Rules, shapes: Mapping[str, tuple[int, ...]], info: ModelInfo) -> list[Problem]:
    """Return everything wrong between the table, the arrays that need a rule and the mesh."""
    problems = rules.audit(shapes, mesh.shape, tied=info.tied)
    named = audit_stack_names(info.annotations, rules.stacks)
    known = {problem.where for problem in audit_stacks(shapes, rules.stacks)}
    known |= {problem.where.rpartition("/")[0] for problem in named}
    recorded = audit_recorded(shapes, rules.stacks, info.stacks or {}, info.created)
    problems += named + [problem for problem in recorded if problem.where not in known]
    specs = [match.spec for path in shapes if (match := rules.match(path))]
    if mesh.shape["expert"] > 1 and not any("expert" in entry_axes(entry) for spec in specs for entry in spec):
        what, fix = "splits no parameter: this model has no experts", "expert=1; data and fsdp split the batch, too"
        problems.append(Problem("mesh.expert", what, f"expert={mesh.shape['expert']}", fix))
    specs += [spec for _, spec in rules.activations]
    specs += [value for _, value in rules.batch if isinstance(value, P)]
    if mesh.shape["sequence"] > 1 and not any("sequence" in entry_axes(entry) for spec in specs for entry in spec):
        what = "splits nothing: no row says which dimension of an activation or of the batch is a sequence"
        fix = f'Rules(batch=[("tokens", P({BATCH_AXES}, "sequence"))]) for tokens [batch, sequence], or sequence=1'
        problems.append(Problem("mesh.sequence", what, f"sequence={mesh.shape['sequence']}", fix))
    return problems


def apply_zero(match: Match, table: str, zero: int) -> P:
    """Return the spec of `params`, `gradients` or `optimizer` under a ZeRO stage: with or without the `fsdp` axis."""
    return match.spec if table in ZERO_KEEPS[zero] else drop_fsdp(match.spec)


def resolve_placement(
    mesh: AnyMesh, match: Match, stacks: tuple[Stack, ...], zero: int, *, on_host: bool, scope: str
) -> ParamPlacement:
    """Return the placement of one layer's parameter in these stacks."""
    spec = P() if isinstance(match.requested, Replicate) else match.requested
    used = drop_fsdp(spec)
    stored, gradient = (spec if table in ZERO_KEEPS[zero] else used for table in ("params", "gradients"))
    return ParamPlacement(mesh, stored, used, gradient, stacks, on_host, scope=scope)


def resolve_recipes(
    table: str, rules: Rules, mesh: AnyMesh, trained: Iterable[str], info: ModelInfo
) -> tuple[dict[str, MatmulRecipe], list[Problem]]:
    """Return the path of each linear layer's kernel → its recipe, and the rows that no matmul can follow.

    Args:
        table: `TrainConfig.quantize`.
        trained: The paths of trained parameters.
    """
    if problems := table_problems(table):
        return {}, problems
    recipes, trained = dict[str, MatmulRecipe | None](), set(trained)
    names = {path: rules.layer_path(path)[0] for path in sorted({*trained, *info.frozen.values()})}
    known = sorted({name for path, name in names.items() if path in info.linear})
    for pattern, name in parse_table(table):
        row = f"quantize, row {pattern + '=' + name!r}"
        hits = [path for path in names if compile_pattern(pattern).fullmatch(names[path])]
        new = [path for path in hits if path in info.linear and path not in recipes]
        recipes |= dict.fromkeys(new, RECIPES.get(name))
        if not new:
            others = ", ".join(sorted({names[path] for path in hits} - {*known}))
            what = f"matches no matmul: {others} is never quantized" if others else "matches no matmul"
            if any(path in info.linear for path in hits):
                what = "is never used: rows before it match the same matmuls"
            fix = did_you_mean(pattern, known) if known else "none: only layers of spmd.models have recipes"
            problems.append(Problem(row, what, fix=fix))
        elif name in RECIPES:
            problems += RECIPES[name].problems(row, stages=mesh.shape["pipe"], is_trained=trained.issuperset(new))
    return {path: recipe for path, recipe in recipes.items() if recipe}, problems


def resolve_optimizer_state(
    mesh: AnyMesh, rules: Rules, optimizer: optax.GradientTransformation, params: Any, specs: Specs
) -> tuple[dict[str, DerivedSpec], list[Problem]]:
    """Return the optimizer state's specs, which follow the parameters' by structure, and what is wrong with them."""
    stacked = {
        path: [dim for dim in dims_of(path, rules.stacks) if dim < len(param.shape)]
        for path, param in tree.flatten(params).items()
    }
    try:
        state, problems = optimizer_specs(optimizer.init, params, specs, stacked)
    except ConfigError as error:
        return {}, [*error.problems]
    for path, derived in state.items():
        by = f"the parameter's rule ({derived.source})"
        found = audit_spec(f"optimizer state {path}", derived.shape, derived.spec, mesh.shape, by)
        smaller = f"smaller blocks than {derived.block} (OptimizerConfig.moments_block), so each shard has whole ones"
        problems += [dataclasses.replace(p, fix=smaller) for p in found] if derived.block > 1 else found
    empty = [path for path, derived in state.items() if 0 in derived.shape]
    problems += [Problem(f"optimizer state {path}", "has no elements and cannot be stored") for path in empty]
    problems += check_update(optimizer, params)
    problems = problems or check_layerwise(optimizer, params, rules.stacked)
    treatment = treatment_of(optimizer)
    if problems and treatment and any(dims_of(path, treatment.stacks) != tuple(dims) for path, dims in stacked.items()):
        what, fix = "was made for other stacks of layers than these", "spmd.make_optimizer(config, steps, model=model)"
        return state, [Problem("optimizer", what, stacked_text(rules.stacks), fix), *problems]
    return state, problems


def check_evaluation_params(
    function: Any, optimizer: optax.GradientTransformation, precision: Precision, params: Any
) -> list[Problem]:
    """Return what is wrong with a function from an optimizer's state and parameters to the parameters to evaluate."""
    where, fix = "evaluation_params", "a function such as optax.contrib.schedule_free_eval_params"
    if function is None:
        return []
    if problems := check_call(where, function, "optimizer_state, params", fix):
        return problems

    def evaluated(params: Any) -> Any:
        return function(*unwrap_for_precision(optimizer.init(params), params, precision))

    try:
        with jax.numpy_dtype_promotion("standard"):
            found = jax.eval_shape(evaluated, params)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        return [Problem(where, f"cannot be computed from the optimizer's state: {reason_of(error)}", fix=fix)]
    wanted, shapes = ({path: x.shape for path, x in tree.flatten(each).items()} for each in (params, found))
    differing = [path for path in {**wanted, **shapes} if wanted.get(path) != shapes.get(path)]
    if not differing:
        return []
    examples = [f"{path}: {shapes.get(path, 'missing')}, not {wanted.get(path, 'there')}" for path in differing[:3]]
    return [Problem(where, "does not return the model's parameters", "; ".join(examples), fix)]


def state_entries(
    mesh: AnyMesh, state: Mapping[str, DerivedSpec], zero: int, hosted: Container[str]
) -> tuple[PlanEntry, ...]:
    """Return one entry for each array of the optimizer's state, of which some are in host memory."""
    matches = {path: Match(-1, derived.source, derived.spec, derived.spec, "") for path, derived in state.items()}
    return tuple(
        make_entry(path, x, matches[path], x.spec, zero=zero, axes=mesh.shape, on_host=path in hosted)
        for path, x in state.items()
    )


def check_transforms(transforms: Sequence[GradTransform], variables: Any) -> list[Problem]:
    """Return a problem for each name that two transforms have, or a transform and a variable, and for two outermost."""
    problems, known = [], dict.fromkeys(variables, "a variable of the model")
    for transform in transforms:
        if transform.name in known:
            what = f"has the name of {known[transform.name]}"
            problems.append(Problem(f"transform {transform.name}", what, fix="each once, or another name"))
        known[transform.name] = "another transform"
    outermost = [transform.name for transform in transforms if transform.is_outermost]
    if len(outermost) > 1:
        what = "each undo what all others did in a step"
        problems.append(Problem(f"transforms {', '.join(outermost)}", what, fix="one of them"))
    return problems


def transform_entries(
    mesh: AnyMesh, states: Mapping[str, Mapping[str, StateArray]], zero: int
) -> tuple[PlanEntry, ...]:
    """Return one entry for each array of the transforms' states."""
    entries = []
    for name, state in states.items():
        for path, x in state.items():
            requested = replicate(x.reason) if x.reason else x.spec
            match = Match(-1, "whole" if x.reason else "where it is made", requested, x.spec, x.reason)
            entry = make_entry(f"{name}/{path}", x, match, x.spec, zero=zero, axes=mesh.shape, on_host=False)
            entries.append(dataclasses.replace(entry, dtype=str(jnp.dtype(x.dtype))))
    return tuple(entries)


def check_storage(mesh: AnyMesh, storage: Storage, remat: Remat) -> None:
    """Raise a `ConfigError` with everything that keeps arrays or saved activations from being in host memory."""
    problems = storage.problems(mesh, remat)
    if remat.offload:
        problems += without_host_memory(mesh, f"remat {remat}")
    if problems:
        raise ConfigError("This cannot be offloaded:", problems)
