"""Strict rules for parameters with given values: patterns of `Rules`, and the table as Python.

A value is the spec of one layer, or a replication with its reason. Parameters of one value get the
widest patterns that match no parameter of another value.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.sharding.layer_paths import Stack, names_of, stacked_text
from spmd.sharding.patterns import PatternError, compile_pattern, compile_search
from spmd.sharding.rules import ANY_PATH, Replicate, Rules, is_catch_all, matches, rule_name

Value = P | Replicate


@dataclasses.dataclass(frozen=True)
class SearchRule:
    """A rule for `re.search`; `entries` are those of its spec with the axes of the mesh."""

    index: int
    pattern: str
    spec: P
    entries: tuple[Any, ...]

    def __str__(self) -> str:
        return rule_name(self.index, self.pattern)

    @property
    def is_catch_all(self) -> bool:
        """Whether its pattern matches any path."""
        return compile_search(self.pattern).search(ANY_PATH)


@dataclasses.dataclass(frozen=True)
class TableParam:
    """A parameter, and the rules matching it."""

    path: str
    shape: tuple[int, ...]
    nbytes: int
    stacks: tuple[Stack, ...]
    rule: SearchRule | None  # the first that matches, or None for one element
    hits: tuple[SearchRule, ...]


def total_bytes(params: Iterable[TableParam]) -> int:
    """Return the bytes of parameters."""
    return sum(param.nbytes for param in params)


def size_columns(params: Sequence[TableParam]) -> str:
    """Return the number and the bytes of parameters, as two columns."""
    return f"{len(params):>6}  {tree.human_bytes(total_bytes(params)):>10}"


@dataclasses.dataclass(frozen=True)
class StrictRule:
    """A rule of the new table."""

    pattern: str
    value: Value
    origin: SearchRule | None  # None for parameters of one element
    params: tuple[TableParam, ...]


def strict_rules(
    params: Sequence[TableParam], values: Mapping[str, Value], stack: Rules, *, shortest: int = 2
) -> Iterator[StrictRule]:
    """Yield strict rules, so that the first match of each parameter gives its value.

    Each rule is the first match of a parameter. The order is that of the search table.

    Args:
        shortest: The least components of a pattern made from a path, unless the path has fewer.
    """
    by_name: dict[str, list[TableParam]] = {}
    forms: dict[str, set[str]] = {}
    names = stack.rule_names(values)
    for param in params:
        name = names[param.path]
        by_name.setdefault(name, []).append(param)
        forms.setdefault(name, set()).update(names_of(param.path, stack.stacks))
    layers = _Layers(by_name, stack.stacks, forms)
    left = dict(by_name)
    for (rule, value), members in _groups(by_name, values):
        others = layers.forms_of(left.keys() - members)
        all_others = layers.forms_of(by_name.keys() - members)
        for pattern in _patterns(rule, members, others, all_others, layers, shortest):
            won: list[TableParam] = []
            for name in members:
                if name in left and layers.covers(pattern, name):
                    won += left.pop(name)
            yield StrictRule(pattern, value, rule, tuple(won))


@dataclasses.dataclass(frozen=True)
class _Layers:
    """The parameters by their path in a rule, the same for layers of equal value.

    Attributes:
        params: Path in a rule → the parameters of all layers with this path.
        stacks: The stacks of the table.
        forms: Path in a rule → the paths of its parameters, with and without the numbers of layers.
    """

    params: Mapping[str, Sequence[TableParam]]
    stacks: Mapping[str, Stack]
    forms: Mapping[str, set[str]]

    def covers(self, pattern: str, name: str) -> bool:
        """Return whether a pattern matches every parameter with a path in a rule."""
        return all(matches(pattern, param.path, self.stacks) for param in self.params[name])

    def forms_of(self, names: Iterable[str]) -> list[str]:
        """Return the forms of several paths."""
        forms: list[str] = []
        for name in names:
            forms += self.forms[name]
        return forms


_Group = tuple[SearchRule | None, Value]


def _groups(
    by_name: Mapping[str, Sequence[TableParam]], values: Mapping[str, Value]
) -> list[tuple[_Group, list[str]]]:
    """Return the paths of each pair of rule and value, in the order of the rules.

    Parameters of one element, which have no rule, come first.
    """
    groups: dict[_Group, list[str]] = {}
    for name, members in by_name.items():
        first = members[0]
        groups.setdefault((first.rule, values[first.path]), []).append(name)
    return sorted(groups.items(), key=_index_of)


def _index_of(item: tuple[_Group, object]) -> int:
    (rule, _), _ = item
    if rule is None:
        return -1
    return rule.index


def _patterns(
    rule: SearchRule | None,
    members: Sequence[str],
    others: Collection[str],
    all_others: Collection[str],
    layers: _Layers,
    shortest: int,
) -> list[str]:
    """Return patterns for the paths of a group: the rule's own if it separates them, else suffixes.

    Args:
        others: Paths of later groups; the rule's pattern may match none of them.
        all_others: Paths of all other groups.
    """
    for pattern in _as_written(rule, members):
        if _separates(pattern, members, others, layers):
            return [pattern]
    return _by_name(members, all_others, layers, shortest)


def _as_written(rule: SearchRule | None, names: Iterable[str]) -> Iterator[str]:
    """Yield forms of a rule's pattern: as written, or followed by the last path components.

    A pattern for `re.search` may match without the last component of a path.
    """
    if rule is None or rule.is_catch_all:
        return
    components = set()
    for name in names:
        last = name.rsplit("/", 1)[-1]
        components.add(re.escape(last))
    tail = "|".join(sorted(components))
    if len(components) > 1:
        tail = f"({tail})"
    yield rule.pattern
    yield f"{rule.pattern}/{tail}"
    yield f"({rule.pattern})/{tail}"


def _separates(pattern: str, names: Iterable[str], others: Iterable[str], layers: _Layers) -> bool:
    """Return whether a pattern of `Rules` covers all of `names` and matches none of `others`."""
    try:
        compiled = compile_pattern(pattern)
    except PatternError:  # a flag such as (?i) is only valid at the start of the expression
        return False
    if not all(layers.covers(pattern, name) for name in names):
        return False
    return not any(map(compiled.fullmatch, others)) and not is_catch_all(pattern)


def _by_name(
    names: Iterable[str], others: Collection[str], layers: _Layers, shortest: int
) -> list[str]:
    """Return the shortest path suffixes to cover all `names` and match no `others`.

    They have `shortest` components or more, unless the path has fewer.
    """
    patterns: list[str] = []
    for name in names:
        if not any(layers.covers(pattern, name) for pattern in patterns):
            patterns.append(_shortest_end(name, others, shortest))
    return patterns


def _shortest_end(name: str, others: Collection[str], shortest: int) -> str:
    """Return the widest pattern for a path without a match among `others`."""
    for pattern in _ends(name, shortest):
        if not any(map(compile_pattern(pattern).fullmatch, others)):
            return pattern
    raise AssertionError("unreachable: the last pattern matches one path")


def _ends(name: str, shortest: int) -> Iterator[str]:
    """Yield patterns for a path, from the widest to the path itself."""
    parts: list[str] = []
    any_number: list[str] = []
    for component in name.split("/"):
        part = re.escape(component)
        parts.append(part)
        any_number.append(re.sub(r"(^|_)\d+$", r"\1\\d+", part))
    for words in (any_number, parts):
        for length in range(min(shortest, len(words)), len(words) + 1):
            yield "/".join(words[-length:])
    yield "^" + "/".join(parts)


def as_python(rules: Iterable[StrictRule], stacks: Mapping[str, Stack]) -> Iterator[str]:
    """Yield the new table as lines of Python."""
    yield "rules = spmd.Rules("
    yield "    params=["
    for rule in rules:
        yield f"        ({quote(rule.pattern)}, {_value_text(rule.value)}),"
    yield "    ],"
    yield f"    {stacked_text(stacks)},"
    yield ")"


def _value_text(value: Value) -> str:
    """Return a rule's value as Python source."""
    if isinstance(value, Replicate):
        return f"spmd.replicate({quote(value.reason)})"
    return source_text(value)


def source_text(spec: P) -> str:
    """Return a spec as Python source."""
    words = []
    for entry in spec:
        if isinstance(entry, tuple):
            words.append(f"({', '.join(map(quote, entry))})")
        else:
            words.append(quote(entry))
    return f"P({', '.join(words)})"


def quote(value: str | None) -> str:
    """Return a Python literal in double quotes, raw if it has backslashes."""
    if not isinstance(value, str) or '"' in value or value.endswith("\\"):
        return repr(value)
    if not value.isprintable():
        return repr(value)
    if "\\" in value:
        return f'r"{value}"'
    return f'"{value}"'
