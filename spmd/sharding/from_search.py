"""Conversion of partition tables for `re.search`, as in EasyLM, scalax and t5x, to `spmd.Rules`.

Such a pattern matches anywhere in the path, a spec without axes replicates silently, and a
catch-all as the last rule hides every typo above it. The converted table has a rule for each
parameter and a reason for each replication.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import Problem, RuleError, did_you_mean
from spmd.sharding.flax_metadata import flatten_module
from spmd.sharding.layer_paths import (
    audit_stacks,
    own_stacks,
    stored_dims,
    without_dims,
)
from spmd.sharding.mesh import AXES, AnyMesh, as_entry, entry_axes, spec_axes
from spmd.sharding.patterns import PatternError, compile_search
from spmd.sharding.rules import (
    Rules,
    repeated_axes,
    replicate,
    rule_name,
)
from spmd.sharding.strict_rules import (
    SearchRule,
    StrictRule,
    TableParam,
    Value,
    as_python,
    quote,
    size_columns,
    source_text,
    strict_rules,
    total_bytes,
)


def rules_from_search(
    table: Iterable[tuple[str, Any]],
    params: Any,
    *,
    axes: Mapping[str, Any] | None = None,
    mesh: AnyMesh | None = None,
    stacked: Any = None,
    activations: Any = (),
    batch: Any = (),
    one_layer: bool = False,
    report: Callable[[str], object] = print,
) -> Rules:
    """Convert a table written for `re.search` (EasyLM, scalax) to strict rules with the same specs.

    Args:
        table: `(pattern, PartitionSpec)` pairs. The first whose pattern `re.search` finds in the
            path wins. Arrays of one element are always replicated.
        params: A tree of arrays or `jax.ShapeDtypeStruct`s: a model's parameters, an `nnx.State`,
            or Linen variables, also in boxes. Paths are those of `from_nnx` and `from_linen`.
        axes: The table's axis → the mesh's axis, a tuple of them, or None: `{"dp": "data", "mp":
            "tensor"}`.
        mesh: A mesh with other axes than a plan's six, for `Rules.shardings`.
        activations: As in `Rules`.
        batch: As in `Rules`.
        stacked: As in `Rules`. The table's entry for a stacked dimension must be None or that
            axis.
        one_layer: Whether the table's specs have no entries for stacked dimensions.
        report: Called with a text: the parameters of each rule, dead and shadowed rules, what
            catch-alls match, and the new table.
    """
    stack = Rules((), (), stacked)
    rules = _read(table, axes or {})
    leaves = flatten_module(params)
    found, problems = _match_params(leaves, rules, stack)
    names = AXES if mesh is None else mesh.axis_names
    problems += _audit_axes(_rules_in_use(rules, found), names)
    values: dict[str, Value] = {}
    for param in found:
        value = _value(param, one_layer)
        if isinstance(value, Problem):
            problems.append(value)
        else:
            values[param.path] = value
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    problems += audit_stacks(shapes, stack.stacks)
    if problems:
        raise RuleError("Search table without a strict form:", problems)
    strict = list(strict_rules(found, values, stack))
    lines = (*_report(found, strict, rules), "", *as_python(strict, stack.stacks))
    report("\n".join(lines))
    rows = []
    for rule in strict:
        rows.append((rule.pattern, rule.value))
    return Rules(rows, activations, stacked, batch)


def _read(table: Iterable[tuple[str, Any]], axes: Mapping[str, Any]) -> list[SearchRule]:
    """Return the rules of a search table, with the axes of the mesh."""
    rules, problems = [], []
    for index, (pattern, spec) in enumerate(table):
        where = rule_name(index, pattern)
        if spec is None or isinstance(spec, tuple | list):
            spec = P(*(spec or ()))
        try:
            compile_search(pattern)
        except PatternError as error:
            problems.append(Problem(where, f"is not a regular expression: {error}"))
        if not isinstance(spec, P):
            problems.append(Problem(where, f"has the value {spec!r}", fix="a PartitionSpec"))
        elif P.UNCONSTRAINED in spec:
            fix = "an axis, or None for whole"
            problems.append(Problem(where, "leaves a dimension to the compiler", fix=fix))
        else:
            entries = tuple(_renamed(entry, axes) for entry in spec)
            rules.append(SearchRule(index, pattern, spec, entries))
    if problems:
        raise RuleError("Invalid search table:", problems)
    return rules


def _renamed(entry: Any, axes: Mapping[str, Any]) -> Any:
    """Return an entry of a spec with the axes of the mesh."""
    renamed: list[str] = []
    for axis in entry_axes(entry):
        renamed += entry_axes(axes.get(axis, axis))
    return as_entry(renamed)


def _match_params(
    leaves: Mapping[str, Any], rules: Sequence[SearchRule], stack: Rules
) -> tuple[list[TableParam], list[Problem]]:
    """Return the parameters with their matching rules, and the problems of those without any."""
    found: list[TableParam] = []
    problems: list[Problem] = []
    for path, leaf in leaves.items():
        hits = _hits(path, rules)
        size = math.prod(leaf.shape)
        if size != 1 and not hits:
            fix = "add a rule for it"
            problems.append(Problem(path, "no rule of the search table matches it", fix=fix))
            continue
        param = TableParam(
            path,
            shape=tuple(leaf.shape),
            nbytes=size * leaf.dtype.itemsize,
            stacks=own_stacks(path, stack.stacks),
            rule=None if size == 1 else hits[0],
            hits=hits,
        )
        found.append(param)
    return found, problems


def _hits(path: str, rules: Iterable[SearchRule]) -> tuple[SearchRule, ...]:
    """Return the rules matching a path, in the order of the table."""
    hits = []
    for rule in rules:
        if compile_search(rule.pattern).search(path):
            hits.append(rule)
    return tuple(hits)


def _rules_in_use(rules: Iterable[SearchRule], params: Sequence[TableParam]) -> list[SearchRule]:
    """Return the rules in use, each the first match of a parameter, in the order of the table."""
    used = []
    for rule in rules:
        if any(param.rule is rule for param in params):
            used.append(rule)
    return used


def _audit_axes(rules: Iterable[SearchRule], names: Sequence[str]) -> Iterator[Problem]:
    """Yield the problems of the axes of rules in use; `names` are those of the mesh."""
    unknown: dict[str, list[int]] = {}
    for rule in rules:
        repeated = repeated_axes(rule.entries)
        for axis in dict.fromkeys(spec_axes(rule.entries)):
            if axis not in names:
                unknown.setdefault(axis, []).append(rule.index)
            elif axis in repeated:
                what = f"{source_text(rule.spec)} uses the axis {axis!r} twice"
                yield Problem(str(rule), what, fix="keep one of them")
    for axis, users in unknown.items():
        what = f"is no axis of a mesh, and is used by {_numbers(users)}"
        fix = f"rename it, axes={{{quote(axis)}: …}}: {did_you_mean(axis, names)}"
        yield Problem(f"axis {axis!r}", what, fix=fix)


def _value(param: TableParam, one_layer: bool) -> Value | Problem:
    """Return the value of a parameter in the new table, for one layer."""
    rule = param.rule
    if rule is None:
        return replicate("one element")
    text = source_text(rule.spec)
    by = f"{rule} gives {text}"
    dims: tuple[int, ...] = ()
    if not one_layer:
        dims = stored_dims(param.stacks)
    rank = len(param.shape) - len(param.stacks) + len(dims)
    if len(rule.entries) > rank:
        detail = f"{len(rule.entries)} entries for {rank} dimensions"
        return Problem(param.path, f"{by} for the shape {param.shape}", detail)
    entries = dict(enumerate(rule.entries))
    for dim, stack in zip(dims, param.stacks, strict=False):
        entry = entries.get(dim)
        if entry not in (None, stack.axis):
            return Problem(
                param.path,
                f"{by}, which splits the stacked dimension over {entry!r}; "
                f"stacked= says {stack.axis!r}",
                fix="make stacked= agree, "
                "or say one_layer=True if the table's specs are for one layer",
            )
    layer = without_dims(rule.entries, dims)
    if any(map(entry_axes, layer)):
        return P(*layer)
    if rule.is_catch_all:
        return replicate(f"left to the catch-all {rule.pattern!r}")
    return replicate(f"{text} in the search table")


def _report(
    params: Sequence[TableParam], strict: Sequence[StrictRule], rules: Sequence[SearchRule]
) -> Iterator[str]:
    """Yield lines about the rules of a search table.

    They list the bytes of each rule's parameters, dead and shadowed rules, and the matches of
    catch-alls.
    """
    total = tree.human_bytes(total_bytes(params))
    yield f"{len(rules)} rules for re.search over {len(params)} parameters, {total}"
    yield "  rule  leaves       bytes"
    width = max((len(repr(rule.pattern)) for rule in rules), default=0)
    by_rule: dict[int | None, list[TableParam]] = {}
    for param in params:
        index = None if param.rule is None else param.rule.index
        by_rule.setdefault(index, []).append(param)
    for rule in rules:
        won = by_rule.get(rule.index, [])
        spec = source_text(rule.spec)
        yield f"{rule.index:>6}  {size_columns(won)}  {rule.pattern!r:<{width}}  {spec}"
        if rule.is_catch_all:
            yield from _caught(rule, strict)
        else:
            yield from _losses(rule, params, len(won))
    small = by_rule.get(None, [])
    if small:
        yield f"        {size_columns(small)}  one element, always replicated"


def _caught(rule: SearchRule, strict: Iterable[StrictRule]) -> Iterator[str]:
    """Yield a line for each new rule made from a catch-all, the largest first."""
    caught = [new for new in strict if new.origin is rule]
    caught.sort(key=lambda new: -total_bytes(new.params))
    for new in caught:
        yield f"        {size_columns(new.params)}  catch-all: {new.pattern}"


def _losses(rule: SearchRule, params: Iterable[TableParam], won: int) -> Iterator[str]:
    """Yield a line about a shadowed or dead rule; nothing for other rules."""
    is_matched = False
    lost = 0
    takers = set()
    for param in params:
        if rule not in param.hits:
            continue
        is_matched = True
        if param.rule is not None and param.rule is not rule:
            lost += 1
            takers.add(param.rule.index)
    if takers:
        part = "dead: all"
        if won:
            part = f"{lost} of the {lost + won}"
        shadowers = _numbers(sorted(takers))
        yield f"{'':28}{part} leaves that it matches are shadowed by {shadowers}"
    elif not won:
        of_which = ""
        if is_matched:
            of_which = " of more than one element"
        yield f"{'':28}dead: it matches no parameter{of_which}"


def _numbers(indices: Sequence[int]) -> str:
    """Return the numbers of rules as a text, such as `rules 0, 1 and 4`."""
    *most, last = map(str, indices)
    if not most:
        return f"rule {last}"
    return f"rules {', '.join(most)} and {last}"
