"""Partition rule tables, from a parameter's path to its `PartitionSpec`, and their audit.

```python
rules = Rules(
    params=[
        ("q_proj/kernel", P("fsdp", "tensor")),                       # matches layers/attention/q_proj/kernel
        ("norm/scale", replicate("norm scales are a few KiB")),       # replication is explicit, with a reason
    ],
    activations=[("mlp_hidden", P(("data", "fsdp"), "sequence", "tensor"))],
    stacked={"layers": "pipe"},
)
```

A pattern is a regular expression that must match a run of whole path components up to the end of the path:
`attention/wo/kernel` does not match `cross_attention/wo/kernel`. The first match wins. Catch-all patterns are errors.
A path is compared without the numbers of unrolled layers, and as it is.
"""

import dataclasses
import difflib
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from spmd.errors import Problem, RuleError, did_you_mean
from spmd.sharding.batch import BatchTable, Whole
from spmd.sharding.flax_metadata import LogicalRules, logical_rules
from spmd.sharding.layer_paths import (
    Stack,
    audit_stacks,
    dims_of,
    insert_stacked,
    names_of,
    own_stacks,
    read_stacked,
    strip_layer_numbers,
)
from spmd.sharding.mesh import entry_axes, shards_of
from spmd.sharding.patterns import PatternError, compile_pattern

Tied = Iterable[Sequence[str]]
"""Groups of paths; the paths of a group are names of one array."""

ANY_PATH = "\x00/\x00"
"""A path that no parameter has, so only a catch-all pattern matches it."""


def matches(pattern: str, path: str, stacked: Collection[str]) -> bool:
    """Return whether a pattern matches a path, with or without the numbers of unrolled layers.

    Example:
        >>> [matches(pattern, "layers/0/kernel", ["layers"]) for pattern in ("layers/kernel", "0/kernel", "1/kernel")]
        [True, True, False]
    """
    return any(map(compile_pattern(pattern).fullmatch, names_of(path, stacked)))


def first_path(pattern: str, tied: Tied, stacked: Collection[str]) -> str:
    """Return, as a fix, the first path of the array that a pattern matches by another path; empty if there is none."""
    firsts = (paths[0] for paths in tied if any(matches(pattern, path, stacked) for path in paths[1:]))
    return next((f"the array's first path, {path}" for path in firsts), "")


def is_catch_all(pattern: str) -> bool:
    """Return whether a rule's pattern matches every path."""
    return compile_pattern(pattern).fullmatch(ANY_PATH)


@dataclasses.dataclass(frozen=True)
class Replicate:
    """Value of a rule for parameters that are replicated on every device, with the reason."""

    reason: str

    def __str__(self) -> str:
        return f"replicate({self.reason!r})"


def replicate(reason: str) -> Replicate:
    """Return the value of a rule that replicates its parameters on purpose; the plan prints the reason.

    Example:
        >>> print(replicate("norm scales are a few KiB"))
        replicate('norm scales are a few KiB')
    """
    if not isinstance(reason, str) or not reason.strip():
        problem = Problem("replicate()", "has no reason", fix='replicate("a few KiB")')
        raise RuleError("A rule cannot be made:", [problem])
    return Replicate(reason)


@dataclasses.dataclass(frozen=True)
class Match:
    """The rule that applies to one parameter."""

    index: int
    pattern: str
    requested: P | Replicate
    spec: P  # of the parameter as stored, with the entries of stacked dimensions in front
    reason: str  # for replication, or empty

    @property
    def rule(self) -> str:
        """The rule's name in problems."""
        return rule_name(self.index, self.pattern)


@dataclasses.dataclass(frozen=True)
class Rules:
    """A partition rule table for one family of models.

    Args:
        params: `(pattern, PartitionSpec or replicate(reason))` pairs. The first match wins. A spec is for one layer,
            without the dimensions that stacking adds.
        activations: `(name, PartitionSpec)` pairs for the names that the model marks with `annotate`.
        stacked: Path component → the axis that splits its leading (layer) dimension, or None; `Stack(axis, dim=1)` for
            layers that are stacked along another dimension. It applies to `layers/attention/…` and not to unrolled
            layers (`layers/0/…`). A pattern may leave out their numbers, so one table serves both. By default the
            stacks that the module recorded, split over `pipe`; for a model without a module, `layers`.
        batch: `(pattern, PartitionSpec or whole(reason))` pairs for the arrays of a batch (`spmd.sharding.batch`). One
            without a row is split by examples, its first dimension.
        logical: `(logical name, mesh axis or tuple or None)` pairs for constraints that a Flax model writes by names,
            such as `nn.with_logical_constraint`. As in Flax, the first whose axes are free applies.

    Example:
        >>> rules = Rules(params=[("wo/kernel", P("tensor", "fsdp"))])
        >>> spec_text(rules.match("layers/attention/wo/kernel").spec)
        'P(pipe, tensor, fsdp)'
        >>> spec_text(rules.match("layers/0/attention/wo/kernel").spec)
        'P(tensor, fsdp)'
    """

    params: Sequence[tuple[str, P | Replicate]]
    activations: Sequence[tuple[str, P]] = ()
    stacked: Any = None
    batch: Sequence[tuple[str, P | Whole]] = ()
    logical: Sequence[tuple[str, Any]] = ()

    def __post_init__(self) -> None:
        for field in ("params", "activations", "batch", "logical"):
            table = getattr(self, field)
            pairs = table.items() if isinstance(table, Mapping) else table
            object.__setattr__(self, field, tuple(tuple(pair) for pair in pairs))
        if self.stacked is not None:
            stacked = ((name, stack if stack.dim else stack.axis) for name, stack in read_stacked(self.stacked).items())
            object.__setattr__(self, "stacked", tuple(stacked))
        problems = []
        for index, (pattern, value) in enumerate(self.params):
            where = rule_name(index, pattern)
            try:
                if is_catch_all(pattern):
                    what = "matches every path: there is no catch-all rule"
                    problems.append(Problem(where, what, fix="name the parameters that it is for"))
            except PatternError as error:
                problems.append(Problem(where, f"is not a regular expression: {error}"))
                continue
            if not isinstance(value, P | Replicate):
                problems.append(Problem(where, f"has the value {value!r}", fix='a PartitionSpec, or replicate("why")'))
            elif isinstance(value, P) and any(entry is P.UNCONSTRAINED for entry in value):
                problems.append(Problem(where, "leaves a dimension to the compiler", fix="an axis, or None for whole"))
            elif isinstance(value, P) and not any(entry_axes(entry) for entry in value):
                problems.append(Problem(where, f"{spec_text(value)} replicates silently", fix='write replicate("why")'))
        names = [name for name, _ in self.activations]
        for index, (name, value) in enumerate(self.activations):
            if not isinstance(value, P):
                problems.append(Problem(f"activation {name!r}", f"has the value {value!r}", fix="a PartitionSpec"))
            if name in names[:index]:
                problems.append(Problem(f"activation {name!r}", "is in the table twice", fix="keep one"))
        problems += self.batch_table.problems()
        if problems:
            raise RuleError("This rule table cannot be made:", problems)
        object.__setattr__(self, "logical", self.logical_rows)

    @functools.cached_property
    def logical_rows(self) -> LogicalRules:
        """The logical rows, each with a tuple of axes."""
        return logical_rules(self.logical)

    @functools.cached_property
    def batch_table(self) -> BatchTable:
        """The rows for arrays of a batch."""
        return BatchTable(tuple(self.batch))

    def match(self, path: str) -> Match | None:
        """Return the first rule that matches the parameter at `path`."""
        names = names_of(path, self.stacks)
        for index, (pattern, value) in enumerate(self.params):
            if any(map(compile_pattern(pattern).fullmatch, names)):
                reason = value.reason if isinstance(value, Replicate) else ""
                return Match(index, pattern, value, self.stored_spec(path, value), reason)
        return None

    @functools.cached_property
    def stacks(self) -> dict[str, Stack]:
        """The stacks by path component."""
        return read_stacked(self.stacked)

    def with_recorded(self, stacks: Mapping[str, Stack] | None) -> "Rules":
        """Return the table with the stacks that a module recorded; as it is, if it names its own."""
        if self.stacked is not None or stacks is None:
            return self
        return dataclasses.replace(self, stacked=stacks)

    def stored_spec(self, path: str, value: P | Replicate) -> P:
        """Return the spec of a parameter as stored, from a rule's value: with the entries of stacked dimensions."""
        layer = value if isinstance(value, P) else ()
        return P(*insert_stacked(layer, self.layer_path(path)[1], dims_of(path, self.stacks)))

    def layer_path(self, path: str) -> tuple[str, tuple[str | None, ...]]:
        """Return the path without layer numbers, and the axes of the dimensions that stacking added.

        Example:
            >>> Rules(params=[]).layer_path("layers/3/norm/scale"), Rules(params=[]).layer_path("layers/norm/scale")
            (('layers/norm/scale', ()), ('layers/norm/scale', ('pipe',)))
        """
        axes = tuple(stack.axis for stack in own_stacks(path, self.stacks))
        return strip_layer_numbers(path, self.stacks), axes

    def rule_names(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Return the path that a rule for a parameter may name: with numbers where layers have different values.

        Example:
            >>> Rules(params=[]).rule_names({"layers/0/w": 1, "layers/1/w": 2})
            {'layers/0/w': 'layers/0/w', 'layers/1/w': 'layers/1/w'}
        """
        names = {path: self.layer_path(path)[0] for path in values}
        seen: dict[str, set[Any]] = {}
        for path, name in names.items():
            seen.setdefault(name, set()).add(None if isinstance(values[path], Replicate) else values[path])
        return {path: name if len(seen[name]) == 1 else path for path, name in names.items()}

    def audit(self, shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, int], tied: Tied = ()) -> list[Problem]:
        """Return every mismatch between this table, the parameters and the mesh.

        Shapes are as stored, with stacked dimensions. One path of each tied group is in `shapes`; a rule may match any.
        """
        tied = tuple(tied)
        problems = [*self._audit_axes(axes), *self.audit_tied(tied), *audit_stacks(shapes, self.stacks)]
        unusable = {problem.where for problem in problems}
        aliases = [path for paths in tied for path in paths if path not in shapes]
        winners = {match.index for match in map(self.match, aliases) if match}
        names = self.rule_names(shapes)
        for path, shape in shapes.items():
            if not (match := self.match(path)):
                problems.append(self._unmatched(path, names, tied))
                continue
            winners.add(match.index)
            used = {axis for entry in match.spec for axis in entry_axes(entry)}
            if match.rule in unusable or not used <= axes.keys():
                continue
            by = f"rule {match.pattern!r}"
            if twice := repeated_axes(match.spec):
                what = f"{by} and stacking give {spec_text(match.spec)}, which uses the axis {twice[0]!r} twice"
                problems.append(Problem(path, what, fix="split the stack or the layer over it"))
            else:
                problems += audit_spec(path, shape, match.spec, axes, by)
        return problems + [self._useless(i, (*shapes, *aliases)) for i in range(len(self.params)) if i not in winners]

    def audit_tied(self, tied: Tied) -> list[Problem]:
        """Return a problem for each array whose paths get different specs.

        Example:
            >>> rules = Rules([("embed/w", P("fsdp")), ("head/w", P("tensor"))])
            >>> print(*rules.audit_tied([("embed/w", "head/w")]))
            embed/w = head/w: is one array and gets 2 specs
                embed/w: rule 0 ('embed/w') says P(fsdp); head/w: rule 1 ('head/w') says P(tensor)
                fix: give its paths one spec
        """
        problems = []
        for paths in tied:
            matches = {path: match for path in paths if (match := self.match(path))}
            if (count := len({placement(match.spec) for match in matches.values()})) > 1:
                said = (f"{path}: {match.rule} says {spec_text(match.spec)}" for path, match in matches.items())
                what = f"is one array and gets {count} specs"
                problems.append(Problem(" = ".join(paths), what, "; ".join(said), "give its paths one spec"))
        return problems

    def _audit_axes(self, axes: Mapping[str, int]) -> list[Problem]:
        problems = []
        tables = [(rule_name(i, pattern), v) for i, (pattern, v) in enumerate(self.params) if isinstance(v, P)]
        tables += [(f"activation {name!r}", spec) for name, spec in self.activations]
        tables += [(f"batch row {i} ({pattern!r})", v) for i, (pattern, v) in enumerate(self.batch) if isinstance(v, P)]
        tables += [(f"logical {name!r}", P(split or None)) for name, split in self.logical_rows]
        tables += [(f"stacked[{name!r}]", P(stack.axis)) for name, stack in self.stacks.items()]
        for where, spec in tables:
            for axis in dict.fromkeys(axis for entry in spec for axis in entry_axes(entry)):
                if axis not in axes:
                    what = f"{spec_text(spec)} names the unknown axis {axis!r}"
                    problems.append(Problem(where, what, fix=did_you_mean(axis, axes)))
                elif axis in repeated_axes(spec):
                    what = f"{spec_text(spec)} uses the axis {axis!r} twice"
                    problems.append(Problem(where, what, fix="keep one of them"))
        for name, stack in self.stacks.items():
            if stack.dim and stack.axis == "pipe" and axes.get("pipe", 1) > 1:
                what = f"is along dimension {stack.dim}, and a pipeline divides dimension 0 of its layers"
                fix = 'pipe=1, or stack along dimension 0: nn.scan(variable_axes={"params": 0})'
                problems.append(Problem(f"stacked[{name!r}]", what, f"pipe={axes['pipe']}", fix))
        return problems

    def _unmatched(self, path: str, names: Mapping[str, str], tied: Tied) -> Problem:
        """Return the problem of a parameter without a rule; `names` are those of all parameters."""
        for other in (other for paths in tied if path in paths for other in paths):
            if match := self.match(other):
                what = f"no rule matches this parameter, and {match.rule} its other path {other}"
                return Problem(path, what, fix=f"write the rule for {path}")
        own, parts = names[path], names[path].split("/")
        # Numbered modules of other shapes are no layers of one stack: no rule for others may match them.
        if is_numbered := own != self.layer_path(path)[0]:
            taken = [other for other in names if other != path]
        else:
            taken = [f for other, name in names.items() if other == name != own for f in names_of(other, self.stacks)]
        lengths = range(len(parts) if is_numbered else min(2, len(parts)), len(parts) + 1)
        ends = ["/".join(parts[-n:]) for n in lengths if not parts[-n].isdigit()]
        free = (end for end in ends if not any(f"/{form}".endswith(f"/{end}") for form in taken))
        tail = next((re.escape(end) for end in free), f"^{re.escape(own)}")
        patterns = [pattern for pattern, _ in self.params]
        near = max(patterns, key=lambda p: difflib.SequenceMatcher(None, p, tail).ratio(), default=None)
        nearest = f"the nearest rule is {near!r}; " if near is not None else ""
        row = f'r"{tail}"' if "\\" in tail else f'"{tail}"'
        fix = f'{nearest}add ({row}, P(…)) or ({row}, replicate("why"))'
        return Problem(path, "no rule matches this parameter", fix=fix)

    def _useless(self, index: int, paths: Iterable[str]) -> Problem:
        pattern = self.params[index][0]
        where, names = rule_name(index, pattern), {path: self.layer_path(path)[0] for path in paths}
        if own := [path for path in names if matches(pattern, path, self.stacks)]:
            shadowers = " and ".join(dict.fromkeys(match.rule for path in own if (match := self.match(path))))
            what = f"is shadowed by {shadowers}, which takes all it matches"
            return Problem(where, what, f"e.g. {own[0]}", "put the narrower rule first")
        near = difflib.get_close_matches(pattern, names.values(), n=1, cutoff=0.3)
        fix = f"the nearest parameter is {near[0]}; " if near else ""
        return Problem(where, "matches no parameter", fix=f"{fix}correct it or delete it")


def audit_spec(path: str, shape: tuple[int, ...], spec: P, axes: Mapping[str, int], by: str) -> list[Problem]:
    """Return the problems of splitting an array: a spec that is too long, dimensions that do not divide.

    `spec` must only name axes of `axes`; `by` is its origin, for the message.

    Example:
        >>> print(*audit_spec("mlp/kernel", (7, 4), P("fsdp"), {"fsdp": 2}, "rule 'kernel'"))
        mlp/kernel: rule 'kernel' cannot split dimension 0 of (7, 4)
            7 / (fsdp=2) = 3.5
            fix: make the dimension a multiple of 2, or leave it whole in the spec
    """
    if len(spec) > len(shape):
        what = f"{by} gives {spec_text(spec)} for the shape {shape}"
        fix = "write one entry for each dimension at most (a stacked dimension adds its own)"
        return [Problem(path, what, f"{len(spec)} entries for {len(shape)} dimensions", fix)]
    problems = []
    for dim, entry in enumerate(spec):
        shards = shards_of(entry, axes)
        if shape[dim] % shards:
            product = " × ".join(f"{axis}={axes[axis]}" for axis in entry_axes(entry))
            arithmetic = f"{shape[dim]} / ({product}) = {shape[dim] / shards:.4g}"
            fix = f"make the dimension a multiple of {shards}, or leave it whole in the spec"
            problems.append(Problem(path, f"{by} cannot split dimension {dim} of {shape}", arithmetic, fix))
    return problems


def spec_text(spec: P) -> str:
    """Return a spec as short text: `P(fsdp, tensor)`, with `.` for a whole dimension and `a+b` for two axes.

    Example:
        >>> spec_text(P(None, ("data", "fsdp"), "tensor"))
        'P(., data+fsdp, tensor)'
    """
    return f"P({', '.join('+'.join(entry_axes(entry)) or '.' for entry in spec)})"


def repeated_axes(spec: Iterable[Any]) -> list[str]:
    """Return the mesh axes that a spec names more than once."""
    used = [axis for entry in spec for axis in entry_axes(entry)]
    return [axis for axis in dict.fromkeys(used) if used.count(axis) > 1]


def placement(spec: P) -> tuple[tuple[str, ...], ...]:
    """Return the axes of each dimension in a form that is equal for equivalent specs."""
    last = max((i for i, entry in enumerate(spec) if entry_axes(entry)), default=-1)
    return tuple(map(entry_axes, spec[: last + 1]))


def rule_name(index: int, pattern: str) -> str:
    """Return a rule's name in problems."""
    return f"rule {index} ({pattern!r})"
