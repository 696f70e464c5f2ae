"""Conversion of the parallel plans in a config of transformers to `spmd.Rules`.

Configs of transformers carry `base_model_tp_plan`, and those with experts `base_model_ep_plan`: the
style of each split module, under its name in PyTorch. The converted table is for one's own Flax
port of that model. Parameters that the plan leaves out are listed, and replicated with that reason.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import Problem, RuleError, did_you_mean
from spmd.sharding.flax_metadata import flatten_module
from spmd.sharding.layer_paths import Stack, names_of, own_stacks, strip_layer_numbers
from spmd.sharding.mesh import AXES, AnyMesh
from spmd.sharding.parallel_plan import PlanAxes, PlanEntry, config_name, read_plan
from spmd.sharding.patterns import PatternError, compile_search
from spmd.sharding.rules import Replicate, Rules, replicate
from spmd.sharding.strict_rules import (
    SearchRule,
    StrictRule,
    TableParam,
    Value,
    as_python,
    size_columns,
    source_text,
    strict_rules,
    total_bytes,
)

Names = Callable[[str], Any] | Iterable[tuple[str, str | None]]
"""From a plan's names to paths: a function, or pairs of regular expression and replacement."""

_UNPLANNED = ".*"


def rules_from_transformers(
    config: Any,
    params: Any,
    *,
    names: Names = (),
    fsdp: Any = "fsdp",
    tensor: Any = "tensor",
    expert: Any = "expert",
    rows: Any = (),
    mesh: AnyMesh | None = None,
    stacked: Any = None,
    activations: Any = (),
    batch: Any = (),
    report: Callable[[str], object] = print,
) -> Rules:
    """Convert the parallel plans of a transformers config to a table for one's own Flax port.

    Every parameter of the port gets a rule, and every entry of the plan a parameter. Kernels are
    `[in, out]`, or `[experts, in, out]`; outputs may be `[heads, head_dim]`.

    Args:
        config: A config with `base_model_tp_plan` or `base_model_ep_plan`: of transformers, or any
            object or dictionary with these.
        params: The port's parameters, as for `rules_from_search`.
        names: From a plan's name (`layers.*.self_attn.q_proj`, with `*` for numbers) to the path of
            a module or parameter of the port; dots separate components, as slashes do. A function,
            which returns a path, several, or None if the port has no such module; or pairs for
            `re.sub`, applied in order, where the replacement None drops the names that match. By
            default, the plan's names.
        fsdp: The axis of the other dimension of each kernel that the plan splits, or None.
        tensor: The axis of the tensor-parallel plan.
        expert: The axis of experts in the expert-parallel plan, or None to ignore that plan.
        rows: Rows as in `Rules.params`, placed first: for the embedding, the head, and others that
            the plan leaves out or that are to be split differently.
        mesh: A mesh with other axes than a plan's six, for `Rules.shardings`.
        stacked: As in `Rules`; by default `{"layers": "pipe"}`, which serves unrolled layers, too.
        activations: As in `Rules`.
        batch: As in `Rules`.
        report: Called with a text: the parameters of each entry with their spec, those that the
            plan leaves out, and the new table.

    Raises:
        RuleError: A config without a plan, all styles without an equivalent, or all names and
            parameters that do not fit.

    Example:
        >>> import jax
        >>> config = {"base_model_tp_plan": {"layers.*.up": "colwise"}}
        >>> params = {"layers/0/up/kernel": jax.ShapeDtypeStruct((8, 32), "float32")}
        >>> rules_from_transformers(config, params, report=str).params
        (('layers/up/kernel', P('fsdp', 'tensor')),)
    """
    axes = PlanAxes(tensor, fsdp, expert)
    mesh_axes: Mapping[str, int] = dict.fromkeys(AXES, 1)
    if mesh is not None:
        mesh_axes = dict(mesh.shape)
    axis_problems = axes.audit(list(mesh_axes))
    if axis_problems:
        raise RuleError("Invalid axes for a parallel plan:", axis_problems)
    plan = read_plan(config, axes)
    own = Rules(rows, activations, stacked, batch)
    if mesh is not None:
        own = own.on_mesh(mesh)
    # Patterns have no layer numbers, so a module's recorded stacks must not replace these.
    own = dataclasses.replace(own, stacked=own.stacks)
    leaves = flatten_module(params)
    shapes = {}
    for path, leaf in leaves.items():
        shapes[path] = tuple(leaf.shape)
    modules, problems = _map_names(plan, names, own.stacks)
    matches, mismatches = _match(modules, shapes, own)
    problems += mismatches
    values, of_rank = _values(matches, shapes, own, axes)
    problems += of_rank
    if problems:
        raise RuleError("Parallel plan without a table for this model:", problems)
    reason = f"not in {config_name(config)}'s parallel plan"
    found = _table_params(leaves, matches, modules, own)
    for param in found:
        values.setdefault(param.path, replicate(reason))
    strict = list(strict_rules(found, values, own))
    table = dataclasses.replace(own, params=(*own.params, *_rows(strict)))
    problems = table.audit(shapes, mesh_axes)
    if problems:
        raise RuleError("Parallel plan without a table for this model:", problems)
    lines = (
        *_Report(config_name(config), plan, modules, matches, found, values).lines(own),
        "",
        *as_python([*_own_rules(own), *strict], own.stacks),
    )
    report("\n".join(lines))
    return table


@dataclasses.dataclass(frozen=True)
class _Module:
    """An entry of the plan and the paths in the port, `*` for numbers."""

    index: int
    entry: PlanEntry
    paths: tuple[str, ...]
    pattern: str  # a regular expression for all of its paths, of whole paths of modules

    def covers(self, forms: Iterable[str]) -> bool:
        """Return whether a parameter is the module's, or is the mapped parameter itself.

        Args:
            forms: The parameter's path, with and without the numbers of layers.
        """
        compiled = compile_search(rf"(?:{self.pattern})(/.*)?")
        return any(map(compiled.fullmatch, forms))


def _map_names(
    plan: Sequence[PlanEntry], names: Names, stacks: Mapping[str, Stack]
) -> tuple[list[_Module], list[Problem]]:
    """Return the entries with parameters and their paths, and the problems of the names.

    Entries of communication need no path, nor do those that the caller says the port lacks.
    """
    mapped = [entry for entry in plan if entry.has_params]
    problems: list[Problem] = []
    if callable(names):
        to_paths = names
    else:
        pairs = tuple(map(tuple, names))
        problems += _pair_problems(pairs, [entry.name for entry in mapped])
        to_paths = _Substitutions(pairs)
    if problems:
        return [], problems
    modules = []
    for index, entry in enumerate(mapped):
        target = to_paths(entry.name)
        if target is None:
            continue
        paths = _as_paths(target)
        if not paths:
            what = f"is mapped to {target!r}"
            fix = "a path, several, or None for a module that this model lacks"
            problems.append(Problem(entry.name, what, fix=fix))
            continue
        pattern = "|".join(_pattern(path, stacks) for path in paths)
        modules.append(_Module(index, entry, paths, pattern))
    return modules, problems


def _pair_problems(pairs: Sequence[tuple[Any, ...]], names: Sequence[str]) -> list[Problem]:
    """Return a problem for each pair that is none, or whose expression matches no name."""
    problems = []
    for index, pair in enumerate(pairs):
        where = f"names[{index}]"
        is_pair = len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], str | None)
        if not is_pair:
            fix = "a pair of regular expression and replacement, or a regular expression and None"
            problems.append(Problem(where, f"is {pair!r}", fix=fix))
    if problems:
        return problems
    try:
        steps = _Substitutions(tuple(pairs))
        used = steps.used(names)
    except PatternError as error:
        return [Problem("names", f"has an invalid regular expression: {error}")]
    for index, (pattern, _) in enumerate(pairs):
        if index not in used:
            what = "matches no name of the plan"
            fix = f"{did_you_mean(pattern, names)}; names of earlier pairs are replaced already"
            problems.append(Problem(f"names[{index}] {pattern!r}", what, fix=fix))
    return problems


@dataclasses.dataclass(frozen=True)
class _Substitutions:
    """Pairs of regular expression and replacement, as a function of a plan's name."""

    pairs: tuple[tuple[Any, ...], ...]

    def __call__(self, name: str) -> str | None:
        """Return the path of a name; None if a pair drops it."""
        for pattern, replacement in self.pairs:
            expression = compile_search(pattern).expression
            if expression.search(name) and replacement is None:
                return None
            if replacement is not None:
                name = expression.sub(replacement, name)
        return name

    def used(self, names: Iterable[str]) -> set[int]:
        """Return the indices of the pairs that match a name, after those in front of them."""
        used = set()
        for name in names:
            for index, (pattern, _) in enumerate(self.pairs):
                current = _Substitutions(self.pairs[:index])(name)
                if current is not None and compile_search(pattern).search(current):
                    used.add(index)
        return used


def _as_paths(target: Any) -> tuple[str, ...]:
    """Return the paths of a mapped name; empty if it is neither a path nor several."""
    if isinstance(target, str):
        target = (target,)
    if not isinstance(target, tuple | list):
        return ()
    paths = []
    for path in target:
        if not isinstance(path, str) or not path.strip("./"):
            return ()
        paths.append(path.replace(".", "/").strip("/"))
    return tuple(paths)


def _pattern(path: str, stacks: Mapping[str, Stack]) -> str:
    """Return a path of a module as a regular expression, without the numbers of layers."""
    words: list[str] = []
    front = ""
    for part in path.split("/"):
        is_layer_number = part == "*" and any(f"/{front}".endswith(f"/{name}") for name in stacks)
        front = f"{front}/{part}".removeprefix("/")
        if not is_layer_number:
            words.append(re.escape(part).replace(r"\*", r"\d+"))
    return "/".join(words)


def _match(
    modules: Iterable[_Module], shapes: Mapping[str, Any], own: Rules
) -> tuple[dict[str, _Module], list[Problem]]:
    """Return the module of each parameter in the plan, and the problems of unmatched entries.

    Parameters with a row of the caller's have none; two entries for a parameter are a problem.
    """
    matches: dict[str, _Module] = {}
    forms = {path: names_of(path, own.stacks) for path in shapes}
    problems = []
    shared: dict[tuple[int, int], Problem] = {}
    for module in modules:
        is_matched = False
        for path in shapes:
            if not module.covers(forms[path]):
                continue
            is_matched = True
            other = matches.setdefault(path, module)
            if other is not module:
                key = (other.index, module.index)
                shared.setdefault(key, _shared(path, other, module))
        if not is_matched:
            problems.append(_unmatched(module, shapes, own.stacks))
    for path in list(matches):
        if own.match(path) is not None:
            del matches[path]
    return matches, [*problems, *shared.values()]


def _shared(path: str, first: _Module, second: _Module) -> Problem:
    """Return the problem of two entries of the plan for one parameter."""
    names = f"{first.entry.name} ({first.entry.style}), {second.entry.name} ({second.entry.style})"
    fix = "map them to two modules; for one fused parameter, map both to None and add it to rows="
    return Problem(path, "two modules of the plan are mapped to it", detail=names, fix=fix)


def _unmatched(module: _Module, shapes: Iterable[str], stacks: Mapping[str, Stack]) -> Problem:
    """Return the problem of a mapped name without a parameter."""
    paths = " and ".join(module.paths)
    parents: dict[str, None] = {}
    for path in shapes:
        parents[strip_layer_numbers(_parent(path), stacks)] = None
    near = did_you_mean(module.pattern, parents)
    if not near.endswith("?"):
        near = "correct names="
    fix = f"{near}; None in names= drops a module that this model lacks"
    where = f"{module.entry.name} ({module.entry.style})"
    return Problem(where, f"is mapped to {paths}, which matches no parameter", fix=fix)


def _parent(path: str) -> str:
    """Return the path of the module of a parameter."""
    return path.rpartition("/")[0] or path


def _values(
    matches: Mapping[str, _Module], shapes: Mapping[str, Any], own: Rules, axes: PlanAxes
) -> tuple[dict[str, Value], list[Problem]]:
    """Return the value of each parameter in the plan, and the problems of their ranks."""
    values: dict[str, Value] = {}
    problems = []
    for path, module in matches.items():
        stacks = own_stacks(path, own.stacks)
        if _lacks_stack(path, module.entry, stacks):
            problems.append(_no_stack(path, module.entry))
            continue
        rest = axes
        if any(stack.axis == axes.expert for stack in stacks):
            rest = dataclasses.replace(axes, expert=None)
        value = module.entry.value(path, len(shapes[path]) - len(stacks), rest)
        if isinstance(value, Problem):
            problems.append(value)
        else:
            values[path] = value
    return values, problems


def _lacks_stack(path: str, entry: PlanEntry, stacks: Sequence[Stack]) -> bool:
    """Return whether a name is one of several, and the array neither has a number nor is stacked."""
    return "*" in entry.name and not stacks and not re.search(r"\d", path)


def _no_stack(path: str, entry: PlanEntry) -> Problem:
    what = f"has no number for the * of {entry.name}, and no component of its path is in stacked="
    return Problem(path, what, fix='name the component of its layers: stacked={"layers": "pipe"}')


def _table_params(
    leaves: Mapping[str, Any],
    matches: Mapping[str, _Module],
    modules: Sequence[_Module],
    own: Rules,
) -> list[TableParam]:
    """Return the parameters without a row of the caller's, each with the entry as its rule."""
    rules = {}
    for module in modules:
        rules[module.index] = SearchRule(module.index, module.pattern, P(), ())
    unplanned = SearchRule(max(rules, default=0) + 1, _UNPLANNED, P(), ())
    found = []
    for path, leaf in leaves.items():
        if own.match(path) is not None:
            continue
        rule = unplanned
        if path in matches:
            rule = rules[matches[path].index]
        param = TableParam(
            path,
            shape=tuple(leaf.shape),
            nbytes=math.prod(leaf.shape) * leaf.dtype.itemsize,
            stacks=own_stacks(path, own.stacks),
            rule=rule,
            hits=(rule,),
        )
        found.append(param)
    return found


def _rows(rules: Iterable[StrictRule]) -> list[tuple[str, Value]]:
    rows = []
    for rule in rules:
        rows.append((rule.pattern, rule.value))
    return rows


def _own_rules(own: Rules) -> list[StrictRule]:
    """Return the caller's rows in the form of the others."""
    rules = []
    for pattern, value in own.params:
        rules.append(StrictRule(pattern, value, None, ()))
    return rules


@dataclasses.dataclass(frozen=True)
class _Report:
    """Text about the entries of a plan and the parameters that it leaves out.

    Attributes:
        modules: The entries that the caller's names map.
        matches: Path of a parameter → its entry.
        params: The parameters without a row of the caller's.
        values: Path of a parameter → its value in the table.
    """

    config: str
    plan: Sequence[PlanEntry]
    modules: Sequence[_Module]
    matches: Mapping[str, _Module]
    params: Sequence[TableParam]
    values: Mapping[str, Value]

    def lines(self, table: Rules) -> Iterator[str]:
        """Yield the lines: a row for each entry, then the parameters not in it."""
        total = tree.human_bytes(total_bytes(self.params))
        counts = f"{len(self.plan)} entries, {len(self.params)} arrays, {total}"
        yield f"Parallel plan of {self.config}: {counts}"
        yield "arrays       bytes"
        width = max(len(entry.name) for entry in self.plan)
        style_width = max(len(entry.style) for entry in self.plan)
        for entry in self.plan:
            won = self._won_by(entry)
            row = f"{size_columns(won)}  {entry.name:<{width}}  {entry.style:<{style_width}}"
            yield f"{row}  {self._outcome(entry, won)}"
        yield from self._unplanned(table)

    def _unplanned(self, table: Rules) -> Iterator[str]:
        """Yield a line for each path without an entry of the plan, the largest first."""
        by_path: dict[str, list[TableParam]] = {}
        for param in self.params:
            if param.path not in self.matches:
                by_path.setdefault(table.layer_path(param.path)[0], []).append(param)
        if by_path:
            yield "Not in the plan, whole on every device:"
        for path, params in sorted(by_path.items(), key=lambda item: -total_bytes(item[1])):
            yield f"{size_columns(params)}  {path} {params[0].shape}"

    def _won_by(self, entry: PlanEntry) -> list[TableParam]:
        """Return the parameters of an entry, the largest first."""
        won = []
        for param in self.params:
            module = self.matches.get(param.path)
            if module is not None and module.entry is entry:
                won.append(param)
        return sorted(won, key=lambda param: -param.nbytes)

    def _outcome(self, entry: PlanEntry, won: Sequence[TableParam]) -> str:
        """Return the result of an entry as a text: its specs, or the cause of none."""
        if not entry.has_params:
            return "no row: communication, which the compiler adds"
        if not won and all(module.entry is not entry for module in self.modules):
            return "no row: dropped by names="
        if not won:
            return "no row: its arrays are in rows="
        specs: dict[str, None] = {}
        for param in won:
            specs[_value_text(self.values[param.path])] = None
        text = ", ".join(specs)
        if entry.is_packed and _is_fused(self.matches[won[0].path], won):
            text += "; packed: two kernels, or [in, 2, out], avoid moving its halves"
        return text


def _is_fused(module: _Module, won: Sequence[TableParam]) -> bool:
    """Return whether the parts of a packed weight are one kernel, concatenated along outputs."""
    rank = max(len(param.shape) - len(param.stacks) for param in won)
    kernel_rank = 2 + module.entry.is_expert
    return len(module.paths) == 1 and rank == kernel_rank


def _value_text(value: Value) -> str:
    if isinstance(value, Replicate):
        return "whole"
    return source_text(value)
