"""Conversion of partition tables for `re.search`, as in EasyLM, scalax and t5x, to `spmd.Rules`.

```python
table = [
    ("attention/(wq|wk|wv)/kernel", P("fsdp", "mp")),
    ("norm", P(None)),                                # replicates, without a reason
    (".*", P(None)),                                  # matches every other parameter
]
```

Such a pattern matches anywhere in the path, a spec without axes replicates silently, and the last rule hides every typo
above it. The converted table has a rule for each parameter and a reason for each replication.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import Problem, RuleError, did_you_mean
from spmd.sharding.mesh import AXES, as_entry, entry_axes
from spmd.sharding.rules import (
    ANY_PATH,
    DEFAULT_STACKED,
    Replicate,
    Rules,
    compile_pattern,
    is_catch_all,
    replicate,
    rule_name,
)

Table = Sequence[tuple[str, P]]
Value = P | Replicate

_ONE_ELEMENT, _NONE = -1, -2  # in place of a rule's index: the array has one element, no rule matches


@dataclasses.dataclass(frozen=True)
class _Param:
    """A parameter and the rules that match it.

    Attributes:
        name: Its path without layer numbers.
        leading: The axes of its stacked dimensions.
        rule: The index of the first rule that matches, or `_ONE_ELEMENT` or `_NONE`.
        hits: The indices of all rules that match.
    """

    path: str
    shape: tuple[int, ...]
    nbytes: int
    name: str
    leading: tuple[str | None, ...]
    rule: int
    hits: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _StrictRule:
    """A rule of the new table, the index of the rule it comes from, and its parameters."""

    pattern: str
    value: Value
    index: int
    params: tuple[_Param, ...]


def rules_from_search(
    table: Iterable[tuple[str, Any]],
    params: Any,
    *,
    axes: Mapping[str, Any] | None = None,
    stacked: Any = DEFAULT_STACKED,
    activations: Any = (),
    one_layer: bool = False,
    report: Callable[[str], object] = print,
) -> Rules:
    """Convert a table written for `re.search` (EasyLM, scalax) to strict rules with the same specs.

    Args:
        table: `(pattern, PartitionSpec)` pairs. The first whose pattern `re.search` finds in the path wins. Arrays of
            one element are always replicated.
        params: A tree of arrays or `jax.ShapeDtypeStruct`s.
        axes: The table's axis → the mesh's axis, a tuple of them, or None: `{"dp": "data", "mp": "tensor"}`.
        stacked: As in `Rules`. The table's entry for a stacked dimension must be None or that axis.
        activations: As in `Rules`.
        one_layer: Whether the table's specs have no entries for stacked dimensions.
        report: Called with a text: the parameters of each rule, dead and shadowed rules, what catch-alls match, and
            the new table.

    Raises:
        RuleError: Everything in the table that cannot be converted.
    """
    stack, axes = Rules((), (), stacked), axes or {}
    table = [
        (pattern, P() if spec is None else P(*spec) if isinstance(spec, tuple | list) else spec)
        for pattern, spec in table
    ]
    patterns, problems = _compile(table)
    if problems:
        raise RuleError("This search table cannot be read:", problems)
    found = [_look_up(patterns, path, leaf, *stack.layer_path(path)) for path, leaf in tree.flatten(params).items()]
    values: dict[str, Value] = {}
    problems += _audit_rules(sorted({param.rule for param in found if param.rule >= 0}), table, axes)
    for param in found:
        if param.rule == _NONE:
            problems.append(Problem(param.path, "no rule of the search table matches it", fix="add a rule for it"))
        elif param.rule == _ONE_ELEMENT:
            values[param.path] = replicate("one element")
        elif isinstance(value := _value(param, table, axes, one_layer), Problem):
            problems.append(value)
        else:
            values[param.path] = value
    by = {p.path: _rule(p.rule, table) if p.rule >= 0 else "its one element" for p in found}
    for path, other in stack.differing_layers(values):
        what = f"{by[path]} decides, and {by[other]} decides for {other}: layers of one stack have one spec"
        problems.append(Problem(path, what, fix="remove their name from stacked="))
    if problems:
        raise RuleError("This search table cannot be made strict:", problems)
    strict = list(_strict_rules(found, values, table))
    report("\n".join((*_report(found, strict, table), "", *_as_python(strict, stack.stacked))))
    return Rules([(rule.pattern, rule.value) for rule in strict], activations, stacked)


def _compile(table: Table) -> tuple[list[re.Pattern[str]], list[Problem]]:
    patterns, problems = [], []
    for index, (pattern, spec) in enumerate(table):
        where = rule_name(index, pattern)
        try:
            patterns.append(re.compile(pattern))
        except re.error as error:
            problems.append(Problem(where, f"is not a regular expression: {error}"))
        if not isinstance(spec, P):
            problems.append(Problem(where, f"has the value {spec!r}", fix="a PartitionSpec"))
        elif any(entry is P.UNCONSTRAINED for entry in spec):
            problems.append(Problem(where, "leaves a dimension to the compiler", fix="an axis, or None for whole"))
    return patterns, problems


def _look_up(
    patterns: Sequence[re.Pattern[str]], path: str, leaf: Any, name: str, leading: tuple[str | None, ...]
) -> _Param:
    hits = tuple(index for index, pattern in enumerate(patterns) if pattern.search(path))
    size = math.prod(leaf.shape)
    rule = _ONE_ELEMENT if size == 1 else hits[0] if hits else _NONE
    return _Param(path, tuple(leaf.shape), size * leaf.dtype.itemsize, name, leading, rule, hits)


def _audit_rules(indices: Iterable[int], table: Table, axes: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of the specs that apply to a parameter, after their axes are renamed."""
    problems: list[Problem] = []
    unknown: dict[str, list[int]] = {}
    for index in indices:
        spec = table[index][1]
        used = [axis for entry in _rename(spec, axes) for axis in entry_axes(entry)]
        for axis in dict.fromkeys(used):
            if axis not in AXES:
                unknown.setdefault(axis, []).append(index)
            elif used.count(axis) > 1:
                what = f"{_source_text(spec)} uses the axis {axis!r} twice"
                problems.append(Problem(_rule(index, table), what, fix="keep one of them"))
    for axis, users in unknown.items():
        fix = f"rename it, axes={{{_quote(axis)}: …}}: {did_you_mean(axis, AXES)}"
        problems.append(Problem(f"axis {axis!r}", f"is no axis of a mesh, and is used by {_numbers(users)}", fix=fix))
    return problems


def _rename(spec: Iterable[Any], axes: Mapping[str, Any]) -> list[Any]:
    """Return the entries of a spec with the axes of the mesh.

    Example:
        >>> _rename(P(("dp", "fsdp"), "mp"), {"dp": "data", "mp": None})
        [('data', 'fsdp'), None]
    """
    return [as_entry([new for old in entry_axes(entry) for new in entry_axes(axes.get(old, old))]) for entry in spec]


def _value(param: _Param, table: Table, axes: Mapping[str, Any], one_layer: bool) -> Value | Problem:
    """Return the value of the rule that applies to a parameter, for one layer."""
    pattern, spec = table[param.rule]
    stack = 0 if one_layer else len(param.leading)
    entries = _rename(spec, axes)
    by = f"{_rule(param.rule, table)} gives {_source_text(spec)}"
    rank = len(param.shape) - (len(param.leading) if one_layer else 0)
    if len(entries) > rank:
        what = f"{by} for the shape {param.shape}"
        return Problem(param.path, what, f"{len(entries)} entries for {rank} dimensions")
    for entry, axis in zip(entries[:stack], param.leading, strict=False):
        if entry not in (None, axis):
            what = f"{by}, which splits the stacked dimension over {entry!r}; stacked= says {axis!r}"
            fix = "make stacked= agree, or say one_layer=True if the table's specs are for one layer"
            return Problem(param.path, what, fix=fix)
    if any(map(entry_axes, entries[stack:])):
        return P(*entries[stack:])
    if _is_catch_all(pattern):
        return replicate(f"left to the catch-all {pattern!r}")
    return replicate(f"{_source_text(spec)} in the search table")


def _is_catch_all(pattern: str) -> bool:
    return re.search(pattern, ANY_PATH) is not None


def _strict_rules(params: Sequence[_Param], values: Mapping[str, Value], table: Table) -> Iterator[_StrictRule]:
    """Yield rules, all of them used and in the table's order, whose first match gives each parameter its value."""
    layers: dict[str, list[_Param]] = {}
    for param in params:
        layers.setdefault(param.name, []).append(param)
    groups: dict[tuple[int, Value], list[str]] = {}
    for name, (first, *_) in layers.items():
        groups.setdefault((first.rule, values[first.path]), []).append(name)
    left = dict(layers)
    for (index, value), members in sorted(groups.items(), key=lambda group: group[0][0]):
        others = left.keys() - members
        as_written = [p for p in _as_written(index, table, members) if _separates(p, members, others)]
        for pattern in as_written[:1] or _by_name(members, layers.keys() - members):
            won = [name for name in members if name in left and _matches(pattern)(name)]
            yield _StrictRule(pattern, value, index, tuple(param for name in won for param in left.pop(name)))


def _as_written(index: int, table: Table, names: Iterable[str]) -> Iterator[str]:
    """Yield forms of a rule's pattern: as written, or with the last path component, which `re.search` does not need."""
    if index == _ONE_ELEMENT or _is_catch_all(table[index][0]):
        return
    last = sorted({re.escape(name.rsplit("/", 1)[-1]) for name in names})
    tail = last[0] if len(last) == 1 else f"({'|'.join(last)})"
    yield from (table[index][0], f"{table[index][0]}/{tail}", f"({table[index][0]})/{tail}")


def _separates(pattern: str, names: Iterable[str], others: Iterable[str]) -> bool:
    """Return whether a pattern of `Rules` matches all of `names` and none of `others`."""
    try:
        matches = _matches(pattern)
    except re.error:  # a flag such as (?i) is only valid at the start of the compiled expression
        return False
    return all(map(matches, names)) and not any(map(matches, others)) and not is_catch_all(pattern)


def _matches(pattern: str) -> Callable[[str], object]:
    return compile_pattern(pattern).fullmatch


def _by_name(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Return the shortest path suffixes, of two components or more, that match all `names` and none of `others`.

    Example:
        >>> _by_name(["h/0/norm/scale", "h/1/norm/scale", "ln/scale"], ["h/0/mlp/kernel"])
        ['norm/scale', 'ln/scale']
    """
    patterns: list[str] = []
    for name in names:
        if not any(_matches(pattern)(name) for pattern in patterns):
            patterns.append(next(p for p in _ends(name) if not any(map(_matches(p), others))))
    return patterns


def _ends(name: str) -> Iterator[str]:
    """Yield patterns for a path, from the widest to one that matches nothing else."""
    parts = [re.escape(part) for part in name.split("/")]
    any_number = [re.sub(r"(^|_)\d+$", r"\1\\d+", part) for part in parts]
    for words in (any_number, parts):
        yield from ("/".join(words[-n:]) for n in range(min(2, len(words)), len(words) + 1))
    yield "^" + "/".join(parts)


def _report(params: Sequence[_Param], rules: Sequence[_StrictRule], table: Table) -> Iterator[str]:
    """Yield lines with the bytes of each rule's parameters, dead and shadowed rules, and the matches of catch-alls."""
    yield f"{len(table)} rules for re.search over {len(params)} parameters, {tree.human_bytes(_nbytes(params))}"
    yield "  rule  leaves       bytes"
    width = max((len(repr(pattern)) for pattern, _ in table), default=0)
    for index, (pattern, spec) in enumerate(table):
        won = [param for param in params if param.rule == index]
        lost = [param for param in params if index in param.hits and param.rule not in (index, _ONE_ELEMENT)]
        takers = {param.rule for param in lost}
        yield f"{index:>6}  {_row(won)}  {pattern!r:<{width}}  {_source_text(spec)}"
        if _is_catch_all(pattern):
            caught = sorted((rule for rule in rules if rule.index == index), key=lambda rule: -_nbytes(rule.params))
            yield from (f"        {_row(rule.params)}  catch-all: {rule.pattern}" for rule in caught)
        elif takers:
            part = f"{len(lost)} of the {len(lost) + len(won)}" if won else "dead: all"
            yield f"{'':28}{part} leaves that it matches are shadowed by {_numbers(sorted(takers))}"
        elif not won:
            is_found = any(index in param.hits for param in params)
            yield f"{'':28}dead: it matches no parameter" + (" of more than one element" if is_found else "")
    if small := [param for param in params if param.rule == _ONE_ELEMENT]:
        yield f"        {_row(small)}  one element, always replicated"


def _as_python(rules: Iterable[_StrictRule], stacked: Iterable[tuple[str, str | None]]) -> Iterator[str]:
    """Yield the new table as lines of Python.

    Example:
        >>> print(*_as_python([_StrictRule("wo/kernel", P("tensor", "fsdp"), 0, ())], [("layers", "pipe")]), sep="\\n")
        rules = spmd.Rules(
            params=[
                ("wo/kernel", P("tensor", "fsdp")),
            ],
            stacked={"layers": "pipe"},
        )
    """
    yield "rules = spmd.Rules("
    yield "    params=["
    for rule in rules:
        value = rule.value
        text = f"spmd.replicate({_quote(value.reason)})" if isinstance(value, Replicate) else _source_text(value)
        yield f"        ({_quote(rule.pattern)}, {text}),"
    yield "    ],"
    yield f"    stacked={{{', '.join(f'{_quote(name)}: {_quote(axis)}' for name, axis in stacked)}}},"
    yield ")"


def _source_text(spec: P) -> str:
    words = [f"({', '.join(map(_quote, entry))})" if isinstance(entry, tuple) else _quote(entry) for entry in spec]
    return f"P({', '.join(words)})"


def _quote(value: str | None) -> str:
    """Return a Python literal in double quotes, raw if it has backslashes."""
    if not isinstance(value, str) or '"' in value or value.endswith("\\") or not value.isprintable():
        return repr(value)
    return f'r"{value}"' if "\\" in value else f'"{value}"'


def _nbytes(params: Iterable[_Param]) -> int:
    return sum(param.nbytes for param in params)


def _row(params: Sequence[_Param]) -> str:
    return f"{len(params):>6}  {tree.human_bytes(_nbytes(params)):>10}"


def _numbers(indices: Sequence[int]) -> str:
    *most, last = map(str, indices)
    return f"rules {', '.join(most)} and {last}" if most else f"rule {last}"


def _rule(index: int, table: Table) -> str:
    return rule_name(index, table[index][0])
