"""Partition tables written for `re.search`, as EasyLM, scalax and t5x write them, read into strict rules.

```python
table = [
    ("attention/(wq|wk|wv)/kernel", P("fsdp", "mp")),
    ("norm", P(None)),                                # replicates, and does not say that it is meant
    (".*", P(None)),                                  # takes whatever no other rule knew
]
```

Such a table finds its pattern anywhere in the path, replicates without a word, and its last rule hides every typo above
it. `spmd.Rules.from_search` is the way in; this module is what it does: who wins what, and how that is said strictly.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import Problem, RuleError, did_you_mean
from spmd.sharding.mesh import AXES, entry_axes

Value = P | str
"""A spec for one layer, or why the parameter is replicated."""

_ONE_ELEMENT, _NONE = -1, -2  # stand for a rule's index where a size decided, and where no rule did
_ANY_PATH = "\x00/\x00"  # a path that no parameter has: only a catch-all finds itself in it


@functools.cache
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression that matches whole paths ending in a run of components that `pattern` matches.

    It is how a pattern of `spmd.Rules` matches, as opposed to `re.search`.

    Example:
        >>> bool(compile_pattern("wo/kernel").fullmatch("attention/wo/kernel"))
        True
        >>> bool(compile_pattern("attention/wo").fullmatch("cross_attention/wo"))
        False
    """
    return re.compile(rf"(?:.*/)?(?:{pattern})")


def is_catch_all(pattern: str) -> bool:
    """Whether a pattern of `spmd.Rules` matches every path."""
    return compile_pattern(pattern).fullmatch(_ANY_PATH) is not None


@dataclasses.dataclass(frozen=True)
class Source:
    """One parameter as a table for `re.search` sees it.

    Attributes:
        path: Its path.
        shape: Its shape as stored.
        nbytes: Its bytes.
        name: Its path without layer numbers.
        leading: The axes that `stacked` gives to its stacked dimensions.
        rule: The index of the rule that wins it, -1 where it has one element and no rule is asked, -2 where no rule
            finds it.
        hits: The indices of all rules that would.
    """

    path: str
    shape: tuple[int, ...]
    nbytes: int
    name: str
    leading: tuple[str | None, ...]
    rule: int
    hits: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StrictRule:
    """One rule of the table as it comes out.

    Attributes:
        pattern: A pattern of `spmd.Rules`.
        value: A spec for one layer, or why it is replicated.
        source: The index of the rule it comes from, or -1 for parameters of one element.
        wins: What it wins.
    """

    pattern: str
    value: Value
    source: int
    wins: tuple[Source, ...]


def read_search_table(
    table: Iterable[tuple[str, Any]],
    params: Any,
    layer_paths: Mapping[str, tuple[str, tuple[str | None, ...]]],
    axes: Mapping[str, Any],
    one_layer: bool,
) -> tuple[list[StrictRule], list[str]]:
    """What the table says of each parameter, as strict rules, and the lines of a report.

    Args:
        table: `(pattern, PartitionSpec)` pairs.
        params: A tree of arrays or `jax.ShapeDtypeStruct`s.
        layer_paths: Path → path without layer numbers, and the axes of stacked dimensions.
        axes: The table's axis → the mesh's axis, a tuple of them, or None.
        one_layer: Whether the table's specs lack the stacked dimensions.

    Raises:
        RuleError: Everything in the table that cannot be used, at once.
    """
    table = [
        (pattern, P() if spec is None else P(*spec) if isinstance(spec, tuple | list) else spec)
        for pattern, spec in table
    ]
    found, problems = _compile(table)
    if problems:
        raise RuleError("This search table cannot be read:", problems)
    sources = [_look_up(found, path, leaf, *layer_paths[path]) for path, leaf in tree.flatten(params).items()]
    values: dict[str, Value] = {}
    problems += _audit_rules(sorted({source.rule for source in sources if source.rule >= 0}), table, axes)
    for source in sources:
        if source.rule == _NONE:
            problems.append(Problem(source.path, "no rule of the search table finds it", fix="add a rule for it"))
        elif source.rule == _ONE_ELEMENT:
            values[source.path] = "one element"
        elif isinstance(value := _value(source, table, axes, one_layer), Problem):
            problems.append(value)
        else:
            values[source.path] = value
    problems += _told_apart(sources, values, table)
    if problems:
        raise RuleError("This search table cannot be made strict:", problems)
    rules = list(_strict_rules(sources, values, table))
    return rules, list(_report(sources, rules, table))


def _compile(table: Sequence[tuple[str, P]]) -> tuple[list[re.Pattern[str]], list[Problem]]:
    found, problems = [], []
    for index, (pattern, spec) in enumerate(table):
        try:
            found.append(re.compile(pattern))
        except re.error as error:
            problems.append(Problem(_rule(index, table), f"is not a regular expression: {error}"))
        if not isinstance(spec, P):
            problems.append(Problem(_rule(index, table), f"has the value {spec!r}", fix="a PartitionSpec"))
        elif any(entry is P.UNCONSTRAINED for entry in spec):
            what = "leaves a dimension to the compiler"
            problems.append(Problem(_rule(index, table), what, fix="an axis, or None for whole"))
    return found, problems


def _look_up(
    found: Sequence[re.Pattern[str]], path: str, leaf: Any, name: str, leading: tuple[str | None, ...]
) -> Source:
    hits = tuple(index for index, pattern in enumerate(found) if pattern.search(path))
    size = math.prod(leaf.shape)
    rule = _ONE_ELEMENT if size == 1 else hits[0] if hits else _NONE
    return Source(path, tuple(leaf.shape), size * leaf.dtype.itemsize, name, leading, rule, hits)


def _audit_rules(indices: Iterable[int], table: Sequence[tuple[str, P]], axes: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with the specs of rules that win something, once their axes have their new names."""
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
        problems.append(Problem(f"axis {axis!r}", f"is no axis of a mesh, and stands in {_numbers(users)}", fix=fix))
    return problems


def _rename(spec: Iterable[Any], axes: Mapping[str, Any]) -> list[Any]:
    """The entries of a spec with the mesh's own axes.

    Example:
        >>> _rename(P(("dp", "fsdp"), "mp"), {"dp": "data", "mp": None})
        [('data', 'fsdp'), None]
    """
    entries: list[Any] = []
    for entry in spec:
        new = tuple(axis for old in entry_axes(entry) for axis in entry_axes(axes.get(old, old)))
        entries.append(new if len(new) > 1 else new[0] if new else None)
    return entries


def _value(source: Source, table: Sequence[tuple[str, P]], axes: Mapping[str, Any], one_layer: bool) -> Value | Problem:
    """What the rule that wins a parameter says of one layer of it."""
    pattern, spec = table[source.rule]
    stack = 0 if one_layer else len(source.leading)
    entries = _rename(spec, axes)
    by = f"{_rule(source.rule, table)} gives {_source_text(spec)}"
    rank = len(source.shape) - (len(source.leading) if one_layer else 0)
    if len(entries) > rank:
        arithmetic = f"{len(entries)} entries for {rank} dimensions"
        return Problem(source.path, f"{by} for the shape {source.shape}", arithmetic)
    for entry, axis in zip(entries[:stack], source.leading, strict=False):
        if entry not in (None, axis):
            what = f"{by}, which splits the stacked dimension over {entry!r}; stacked= says {axis!r}"
            fix = "make stacked= agree, or say one_layer=True if the table's specs are for one layer"
            return Problem(source.path, what, fix=fix)
    if any(map(entry_axes, entries[stack:])):
        return P(*entries[stack:])
    if _is_catch_all(pattern):
        return f"left to the catch-all {pattern!r}"
    return f"{_source_text(spec)} in the search table"


def _is_catch_all(pattern: str) -> bool:
    return re.search(pattern, _ANY_PATH) is not None


def _told_apart(
    sources: Iterable[Source], values: Mapping[str, Value], table: Sequence[tuple[str, P]]
) -> Iterator[Problem]:
    """Layers of one stack that the table treats differently, which no rule for a path without numbers can say."""
    first: dict[str, Source] = {}
    for source in sources:
        other = first.setdefault(source.name, source)
        specs = {
            value if isinstance(value, P) else P() for path in (source.path, other.path) if (value := values.get(path))
        }
        if len(specs) > 1:
            by = [_rule(s.rule, table) if s.rule != _ONE_ELEMENT else "its one element" for s in (other, source)]
            yield Problem(
                source.path,
                f"{by[1]} decides, and {by[0]} decides for {other.path}: layers of one stack are split alike",
                fix="take their name out of stacked=",
            )


def _strict_rules(
    sources: Sequence[Source], values: Mapping[str, Value], table: Sequence[tuple[str, P]]
) -> Iterator[StrictRule]:
    """Rules whose first match gives every source its value, in the table's order; none of them is dead."""
    layers: dict[str, list[Source]] = {}
    for source in sources:
        layers.setdefault(source.name, []).append(source)
    groups: dict[tuple[int, Value], list[str]] = {}
    for name, (first, *_) in layers.items():
        groups.setdefault((first.rule, values[first.path]), []).append(name)
    left = dict(layers)
    for (index, value), members in sorted(groups.items(), key=lambda group: group[0][0]):
        others = left.keys() - members
        as_written = [p for p in _as_written(index, table, members) if _separates(p, members, others)]
        for pattern in as_written[:1] or _by_name(members, layers.keys() - members):
            won = [name for name in members if name in left and _matches(pattern)(name)]
            yield StrictRule(pattern, value, index, tuple(source for name in won for source in left.pop(name)))


def _as_written(index: int, table: Sequence[tuple[str, P]], names: Iterable[str]) -> Iterator[str]:
    """Ways to keep a rule's pattern: as it is, or with the last component that `re.search` did not ask for."""
    if index == _ONE_ELEMENT or _is_catch_all(table[index][0]):
        return
    last = sorted({re.escape(name.rsplit("/", 1)[-1]) for name in names})
    tail = last[0] if len(last) == 1 else f"({'|'.join(last)})"
    yield from (table[index][0], f"{table[index][0]}/{tail}", f"({table[index][0]})/{tail}")


def _separates(pattern: str, names: Iterable[str], others: Iterable[str]) -> bool:
    """Whether a pattern of `spmd.Rules` matches all of `names` and none of `others`."""
    try:
        matches = _matches(pattern)
    except re.error:  # a flag such as (?i) stands at the front of an expression, and the pattern will not
        return False
    return all(map(matches, names)) and not any(map(matches, others)) and not is_catch_all(pattern)


def _matches(pattern: str) -> Callable[[str], object]:
    return compile_pattern(pattern).fullmatch


def _by_name(names: Iterable[str], others: Collection[str]) -> list[str]:
    """The shortest ends of paths, of two components or more, that match all `names` and none of `others`.

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
    """Patterns for a path, from the widest to the one that nothing else matches."""
    parts = [re.escape(part) for part in name.split("/")]
    any_number = [re.sub(r"(^|_)\d+$", r"\1\\d+", part) for part in parts]
    for words in (any_number, parts):
        yield from ("/".join(words[-n:]) for n in range(min(2, len(words)), len(words) + 1))
    yield "^" + "/".join(parts)


def _report(sources: Sequence[Source], rules: Sequence[StrictRule], table: Sequence[tuple[str, P]]) -> Iterator[str]:
    """Who wins what in bytes, what is dead and why, and what a catch-all swallowed."""
    yield f"{len(table)} rules for re.search over {len(sources)} parameters, {_bytes(sources)}"
    yield "  rule  leaves       bytes"
    width = max((len(repr(pattern)) for pattern, _ in table), default=0)
    for index, (pattern, spec) in enumerate(table):
        won = [source for source in sources if source.rule == index]
        lost = [source for source in sources if index in source.hits and source.rule not in (index, _ONE_ELEMENT)]
        takers = {source.rule for source in lost}
        yield f"{index:>6}  {_row(won)}  {pattern!r:<{width}}  {_source_text(spec)}"
        if _is_catch_all(pattern):
            swallowed = sorted((rule for rule in rules if rule.source == index), key=lambda rule: -_nbytes(rule.wins))
            yield from (f"        {_row(rule.wins)}  swallowed: {rule.pattern}" for rule in swallowed)
        elif takers:
            part = f"{len(lost)} of the {len(lost) + len(won)}" if won else "dead: all"
            yield f"{'':28}{part} leaves that it finds are shadowed by {_numbers(sorted(takers))}"
        elif not won:
            is_found = any(index in source.hits for source in sources)
            yield f"{'':28}dead: it finds no parameter" + (" of more than one element" if is_found else "")
    if small := [source for source in sources if source.rule == _ONE_ELEMENT]:
        yield f"        {_row(small)}  one element, so whole whatever the table says"


def as_python(rules: Iterable[StrictRule], stacked: Iterable[tuple[str, str | None]]) -> Iterator[str]:
    """The strict table as lines of Python.

    Example:
        >>> print(*as_python([StrictRule("wo/kernel", P("tensor", "fsdp"), 0, ())], [("layers", "pipe")]), sep="\\n")
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
        value = _source_text(rule.value) if isinstance(rule.value, P) else f"spmd.replicate({_quote(rule.value)})"
        yield f"        ({_quote(rule.pattern)}, {value}),"
    yield "    ],"
    yield f"    stacked={{{', '.join(f'{_quote(name)}: {_quote(axis)}' for name, axis in stacked)}}},"
    yield ")"


def _source_text(spec: P) -> str:
    words = [f"({', '.join(map(_quote, entry))})" if isinstance(entry, tuple) else _quote(entry) for entry in spec]
    return f"P({', '.join(words)})"


def _quote(value: str | None) -> str:
    """A Python literal in double quotes, raw where backslashes make it easier to read."""
    if not isinstance(value, str) or '"' in value or value.endswith("\\") or not value.isprintable():
        return repr(value)
    return f'r"{value}"' if "\\" in value else f'"{value}"'


def _nbytes(sources: Iterable[Source]) -> int:
    return sum(source.nbytes for source in sources)


def _bytes(sources: Iterable[Source]) -> str:
    return tree.human_bytes(_nbytes(sources))


def _row(sources: Sequence[Source]) -> str:
    return f"{len(sources):>6}  {_bytes(sources):>10}"


def _numbers(indices: Sequence[int]) -> str:
    *most, last = map(str, indices)
    return f"rules {', '.join(most)} and {last}" if most else f"rule {last}"


def _rule(index: int, table: Sequence[tuple[str, Any]]) -> str:
    return f"rule {index} ({table[index][0]!r})"
