"""Conversion of partition tables for `re.search`, as in EasyLM, scalax and t5x, to `spmd.Rules`.

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
from spmd.sharding.flax_metadata import flatten_module
from spmd.sharding.layer_paths import (
    Stack,
    audit_stacks,
    names_of,
    own_stacks,
    stacked_text,
    stored_dims,
    without_dims,
)
from spmd.sharding.mesh import AXES, as_entry, entry_axes
from spmd.sharding.patterns import PatternError, compile_pattern, compile_search
from spmd.sharding.rules import (
    ANY_PATH,
    Replicate,
    Rules,
    is_catch_all,
    matches,
    replicate,
    rule_name,
)

Value = P | Replicate
_Covers = Callable[[str, str], bool]
"""Whether a pattern matches every parameter that a rule's path stands for."""


@dataclasses.dataclass(frozen=True)
class _SearchRule:
    """A rule for `re.search`; `entries` are those of its spec with the axes of the mesh."""

    index: int
    pattern: str
    spec: P
    entries: tuple[Any, ...]

    def __str__(self) -> str:
        return rule_name(self.index, self.pattern)

    @property
    def is_catch_all(self) -> bool:
        return compile_search(self.pattern).search(ANY_PATH)


@dataclasses.dataclass(frozen=True)
class _Param:
    """A parameter, and the rules that match it."""

    path: str
    shape: tuple[int, ...]
    nbytes: int
    stacks: tuple[Stack, ...]
    rule: _SearchRule | None  # the first that matches, or None for one element
    hits: tuple[_SearchRule, ...]


@dataclasses.dataclass(frozen=True)
class _StrictRule:
    """A rule of the new table."""

    pattern: str
    value: Value
    origin: _SearchRule | None  # None for parameters of one element
    params: tuple[_Param, ...]


def rules_from_search(
    table: Iterable[tuple[str, Any]],
    params: Any,
    *,
    axes: Mapping[str, Any] | None = None,
    stacked: Any = None,
    activations: Any = (),
    batch: Any = (),
    one_layer: bool = False,
    report: Callable[[str], object] = print,
) -> Rules:
    """Convert a table written for `re.search` (EasyLM, scalax) to strict rules with the same specs.

    Args:
        table: `(pattern, PartitionSpec)` pairs. The first whose pattern `re.search` finds in the path wins. Arrays of
            one element are always replicated.
        params: A tree of arrays or `jax.ShapeDtypeStruct`s: a model's parameters, an `nnx.State`, or Linen variables,
            also in boxes. Paths are those of `from_nnx` and `from_linen`.
        axes: The table's axis → the mesh's axis, a tuple of them, or None: `{"dp": "data", "mp": "tensor"}`.
        activations: As in `Rules`.
        batch: As in `Rules`.
        stacked: As in `Rules`. The table's entry for a stacked dimension must be None or that axis.
        one_layer: Whether the table's specs have no entries for stacked dimensions.
        report: Called with a text: the parameters of each rule, dead and shadowed rules, what catch-alls match, and
            the new table.
    """
    stack, rules = Rules((), (), stacked), _read(table, axes or {})
    found: list[_Param] = []
    problems: list[Problem] = []
    leaves = flatten_module(params)
    for path, leaf in leaves.items():
        hits = tuple(rule for rule in rules if compile_search(rule.pattern).search(path))
        size = math.prod(leaf.shape)
        if size == 1 or hits:
            rule = None if size == 1 else hits[0]
            nbytes = size * leaf.dtype.itemsize
            stacks = own_stacks(path, stack.stacks)
            found.append(_Param(path, tuple(leaf.shape), nbytes, stacks, rule, hits))
        else:
            problems.append(Problem(path, "no rule of the search table matches it", fix="add a rule for it"))
    problems += _audit_axes([rule for rule in rules if any(param.rule is rule for param in found)])
    values: dict[str, Value] = {}
    for param in found:
        if isinstance(value := _value(param, one_layer), Problem):
            problems.append(value)
        else:
            values[param.path] = value
    problems += audit_stacks({path: leaf.shape for path, leaf in leaves.items()}, stack.stacks)
    if problems:
        raise RuleError("This search table cannot be made strict:", problems)
    strict = list(_strict_rules(found, values, stack))
    report("\n".join((*_report(found, strict, rules), "", *_as_python(strict, stack.stacks))))
    return Rules([(rule.pattern, rule.value) for rule in strict], activations, stacked, batch)


def _read(table: Iterable[tuple[str, Any]], axes: Mapping[str, Any]) -> list[_SearchRule]:
    rules, problems = [], []
    for index, (pattern, spec) in enumerate(table):
        spec, where = P(*spec or ()) if isinstance(spec, tuple | list | None) else spec, rule_name(index, pattern)
        try:
            compile_search(pattern)
        except PatternError as error:
            problems.append(Problem(where, f"is not a regular expression: {error}"))
        if not isinstance(spec, P):
            problems.append(Problem(where, f"has the value {spec!r}", fix="a PartitionSpec"))
        elif any(entry is P.UNCONSTRAINED for entry in spec):
            problems.append(Problem(where, "leaves a dimension to the compiler", fix="an axis, or None for whole"))
        else:
            renamed = ([new for old in entry_axes(entry) for new in entry_axes(axes.get(old, old))] for entry in spec)
            rules.append(_SearchRule(index, pattern, spec, tuple(map(as_entry, renamed))))
    if problems:
        raise RuleError("This search table cannot be read:", problems)
    return rules


def _audit_axes(rules: Iterable[_SearchRule]) -> Iterator[Problem]:
    """Yield the problems of the axes of rules that apply to a parameter."""
    unknown: dict[str, list[int]] = {}
    for rule in rules:
        used = [axis for entry in rule.entries for axis in entry_axes(entry)]
        for axis in dict.fromkeys(used):
            if axis not in AXES:
                unknown.setdefault(axis, []).append(rule.index)
            elif used.count(axis) > 1:
                what = f"{_source_text(rule.spec)} uses the axis {axis!r} twice"
                yield Problem(str(rule), what, fix="keep one of them")
    for axis, users in unknown.items():
        fix = f"rename it, axes={{{_quote(axis)}: …}}: {did_you_mean(axis, AXES)}"
        yield Problem(f"axis {axis!r}", f"is no axis of a mesh, and is used by {_numbers(users)}", fix=fix)


def _value(param: _Param, one_layer: bool) -> Value | Problem:
    """Return the value of the rule that applies to a parameter, for one layer."""
    if (rule := param.rule) is None:
        return replicate("one element")
    text, dims = _source_text(rule.spec), () if one_layer else stored_dims(param.stacks)
    by, rank = f"{rule} gives {text}", len(param.shape) - len(param.stacks) + len(dims)
    if len(rule.entries) > rank:
        detail = f"{len(rule.entries)} entries for {rank} dimensions"
        return Problem(param.path, f"{by} for the shape {param.shape}", detail)
    for dim, stack in zip(dims, param.stacks, strict=False):
        if (entry := dict(enumerate(rule.entries)).get(dim)) not in (None, stack.axis):
            what = f"{by}, which splits the stacked dimension over {entry!r}; stacked= says {stack.axis!r}"
            fix = "make stacked= agree, or say one_layer=True if the table's specs are for one layer"
            return Problem(param.path, what, fix=fix)
    if any(map(entry_axes, layer := without_dims(rule.entries, dims))):
        return P(*layer)
    return replicate(f"left to the catch-all {rule.pattern!r}" if rule.is_catch_all else f"{text} in the search table")


def _strict_rules(params: Sequence[_Param], values: Mapping[str, Value], stack: Rules) -> Iterator[_StrictRule]:
    """Yield rules, all of them used and in the table's order, whose first match gives each parameter its value."""
    layers: dict[str, list[_Param]] = {}
    names = stack.rule_names(values)
    for param in params:
        layers.setdefault(names[param.path], []).append(param)
    forms = {
        name: {form for param in members for form in names_of(param.path, stack.stacks)}
        for name, members in layers.items()
    }

    def covers(pattern: str, name: str) -> bool:
        return all(matches(pattern, param.path, stack.stacks) for param in layers[name])

    groups: dict[tuple[_SearchRule | None, Value], list[str]] = {}
    for name, (first, *_) in layers.items():
        groups.setdefault((first.rule, values[first.path]), []).append(name)
    left = dict(layers)
    for (rule, value), members in sorted(groups.items(), key=lambda group: group[0][0].index if group[0][0] else -1):
        others = [form for name in left.keys() - members for form in forms[name]]
        as_written = [p for p in _as_written(rule, members) if _separates(p, members, others, covers)]
        all_others = [form for name in layers.keys() - members for form in forms[name]]
        for pattern in as_written[:1] or _by_name(members, all_others, covers):
            won = [name for name in members if name in left and covers(pattern, name)]
            yield _StrictRule(pattern, value, rule, tuple(param for name in won for param in left.pop(name)))


def _as_written(rule: _SearchRule | None, names: Iterable[str]) -> Iterator[str]:
    """Yield forms of a rule's pattern: as written, or with the last path component, which `re.search` does not need."""
    if rule is None or rule.is_catch_all:
        return
    last = sorted({re.escape(name.rsplit("/", 1)[-1]) for name in names})
    tail = last[0] if len(last) == 1 else f"({'|'.join(last)})"
    yield from (rule.pattern, f"{rule.pattern}/{tail}", f"({rule.pattern})/{tail}")


def _separates(pattern: str, names: Iterable[str], others: Iterable[str], covers: _Covers) -> bool:
    """Return whether a pattern of `Rules` covers all of `names` and matches none of `others`."""
    try:
        hits = map(_matches(pattern), others)
    except PatternError:  # a flag such as (?i) is only valid at the start of the compiled expression
        return False
    return all(covers(pattern, name) for name in names) and not any(hits) and not is_catch_all(pattern)


def _matches(pattern: str) -> Callable[[str], object]:
    return compile_pattern(pattern).fullmatch


def _by_name(names: Iterable[str], others: Collection[str], covers: _Covers) -> list[str]:
    """Return the shortest path suffixes, of two components or more, that cover all `names` and match no `others`."""
    patterns: list[str] = []
    for name in names:
        if not any(covers(pattern, name) for pattern in patterns):
            patterns.append(next(p for p in _ends(name) if not any(map(_matches(p), others))))
    return patterns


def _ends(name: str) -> Iterator[str]:
    """Yield patterns for a path, from the widest to one that matches nothing else."""
    parts = [re.escape(part) for part in name.split("/")]
    any_number = [re.sub(r"(^|_)\d+$", r"\1\\d+", part) for part in parts]
    for words in (any_number, parts):
        yield from ("/".join(words[-n:]) for n in range(min(2, len(words)), len(words) + 1))
    yield "^" + "/".join(parts)


def _report(params: Sequence[_Param], strict: Sequence[_StrictRule], rules: Sequence[_SearchRule]) -> Iterator[str]:
    """Yield lines with the bytes of each rule's parameters, dead and shadowed rules, and the matches of catch-alls."""
    yield f"{len(rules)} rules for re.search over {len(params)} parameters, {tree.human_bytes(_nbytes(params))}"
    yield "  rule  leaves       bytes"
    width = max((len(repr(rule.pattern)) for rule in rules), default=0)
    for rule in rules:
        won = [param for param in params if param.rule is rule]
        lost = [param for param in params if param.rule not in (rule, None) and rule in param.hits]
        takers = {param.rule.index for param in lost if param.rule}
        yield f"{rule.index:>6}  {_row(won)}  {rule.pattern!r:<{width}}  {_source_text(rule.spec)}"
        if rule.is_catch_all:
            caught = sorted((new for new in strict if new.origin is rule), key=lambda new: -_nbytes(new.params))
            yield from (f"        {_row(new.params)}  catch-all: {new.pattern}" for new in caught)
        elif takers:
            part = f"{len(lost)} of the {len(lost) + len(won)}" if won else "dead: all"
            yield f"{'':28}{part} leaves that it matches are shadowed by {_numbers(sorted(takers))}"
        elif not won:
            is_found = any(rule in param.hits for param in params)
            yield f"{'':28}dead: it matches no parameter" + (" of more than one element" if is_found else "")
    if small := [param for param in params if param.rule is None]:
        yield f"        {_row(small)}  one element, always replicated"


def _as_python(rules: Iterable[_StrictRule], stacks: Mapping[str, Stack]) -> Iterator[str]:
    """Yield the new table as lines of Python."""
    yield "rules = spmd.Rules("
    yield "    params=["
    for rule in rules:
        value = rule.value
        text = f"spmd.replicate({_quote(value.reason)})" if isinstance(value, Replicate) else _source_text(value)
        yield f"        ({_quote(rule.pattern)}, {text}),"
    yield "    ],"
    yield f"    {stacked_text(stacks)},"
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
