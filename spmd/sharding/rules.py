"""Partition rule tables, from a parameter's path to its `PartitionSpec`, and their audit.

```python
rules = Rules(
    params=[
        # Matches layers/attention/q_proj/kernel.
        ("q_proj/kernel", P("fsdp", "tensor")),
        # Replication is explicit, with a reason.
        ("norm/scale", replicate("norm scales are a few KiB")),
    ],
    activations=[("mlp_hidden", P(("data", "fsdp"), "sequence", "tensor"))],
    stacked={"layers": "pipe"},
)
```

A pattern is a regular expression that must match a run of whole path components up to the end of
the path: `attention/wo/kernel` does not match `cross_attention/wo/kernel`. The first match wins.
Catch-all patterns are errors. A path of an unrolled layer is compared both with and without its
layer number.
"""

import dataclasses
import difflib
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flax.core import FrozenDict
from jax.sharding import PartitionSpec as P

from spmd.errors import Problem, RuleError, did_you_mean
from spmd.sharding.batch import BatchTable, Whole
from spmd.sharding.dims import with_axis
from spmd.sharding.flax_metadata import LogicalRules, logical_rules
from spmd.sharding.layer_paths import (
    Stack,
    audit_stacks,
    dims_of,
    drop_stacks,
    insert_stacked,
    names_of,
    own_stacks,
    read_stacked,
    strip_layer_numbers,
    undivided_stacks,
)
from spmd.sharding.mesh import GATHERED_AXES, AnyMesh, entry_axes, shards_of, spec_axes
from spmd.sharding.patterns import PatternError, compile_pattern
from spmd.sharding.tree_shardings import check_mesh, tree_shardings
from spmd.tree import with_noun

Tied = Iterable[Sequence[str]]
"""Groups of paths; the paths of a group are names of one array."""

ANY_PATH = "\x00/\x00"
"""A path of no parameter, so only a catch-all pattern matches it."""


def matches(pattern: str, path: str, stacked: Collection[str]) -> bool:
    """Return whether a pattern matches a path, with or without the numbers of unrolled layers.

    Example:
        >>> patterns = ("layers/kernel", "0/kernel", "1/kernel")
        >>> [matches(pattern, "layers/0/kernel", ["layers"]) for pattern in patterns]
        [True, True, False]
    """
    compiled = compile_pattern(pattern)
    return any(map(compiled.fullmatch, names_of(path, stacked)))


def first_path(pattern: str, tied: Tied, stacked: Collection[str]) -> str:
    """Return a fix, the first path of a tied array, for a pattern matching another of its paths.

    Empty if the pattern matches no other path of a tied array.
    """
    for paths in tied:
        if any(matches(pattern, path, stacked) for path in paths[1:]):
            return f"the array's first path, {paths[0]}"
    return ""


def is_catch_all(pattern: str) -> bool:
    """Return whether a rule's pattern matches every path."""
    return compile_pattern(pattern).fullmatch(ANY_PATH)


@dataclasses.dataclass(frozen=True)
class Replicate:
    """Value of a rule for parameters replicated on every device, with the reason."""

    reason: str

    def __str__(self) -> str:
        return f"replicate({self.reason!r})"


def replicate(reason: str) -> Replicate:
    """Return the value of a rule for replication on purpose; the plan prints the reason.

    Example:
        >>> print(replicate("norm scales are a few KiB"))
        replicate('norm scales are a few KiB')
    """
    if not isinstance(reason, str) or not reason.strip():
        problem = Problem("replicate()", "has no reason", fix='replicate("a few KiB")')
        raise RuleError("Invalid rule:", [problem])
    return Replicate(reason)


@dataclasses.dataclass(frozen=True)
class Match:
    """The rule in use for one parameter."""

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
        params: `(pattern, PartitionSpec or replicate(reason))` pairs. The first match wins. A spec
            is for one layer, without the dimensions that stacking adds.
        activations: `(name, PartitionSpec)` pairs for the names that the model marks with
            `annotate`.
        stacked: Path component → the axis that splits its leading (layer) dimension, or None;
            `Stack(axis, dim=1)` for layers that are stacked along another dimension. It applies to
            `layers/attention/…` and not to unrolled layers (`layers/0/…`). A pattern may leave out
            the numbers of unrolled layers, so one table serves both. By default the stacks
            recorded by the module, split over `pipe`; for a model without a module, `layers`.
        batch: `(pattern, PartitionSpec or whole(reason))` pairs for the arrays of a batch
            (`spmd.sharding.batch`). An array without a row is split by examples, its first
            dimension.
        logical: `(logical name, mesh axis or tuple or None)` pairs for constraints that a Flax
            model writes by names, such as `nn.with_logical_constraint`. As in Flax, the first
            whose axes are free applies.
        over_stages: Path → the dimension of a layer that `pipe` splits too, because it does not
            divide the layers. A plan fills it in (`spmd.sharding.uneven_stages`).

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
    over_stages: Mapping[str, int] = FrozenDict()

    def __repr__(self) -> str:
        parts = []
        for field in ("params", "activations", "batch", "logical"):
            count = len(getattr(self, field))
            if count:
                parts.append(f"{field}: {with_noun(count, 'row')}")
        if self.stacked is not None:
            parts.append(f"stacked={self.stacked!r}")
        return f"Rules({', '.join(parts)})"

    def __post_init__(self) -> None:
        for field in ("params", "activations", "batch", "logical"):
            object.__setattr__(self, field, _as_pairs(getattr(self, field)))
        if self.stacked is not None:
            object.__setattr__(self, "stacked", _as_stacked_pairs(self.stacked))
        problems = [
            *_param_problems(self.params),
            *_activation_problems(self.activations),
            *self.batch_table.problems(),
        ]
        if problems:
            raise RuleError("Invalid rule table:", problems)
        object.__setattr__(self, "logical", self.logical_rows)

    @functools.cached_property
    def logical_rows(self) -> LogicalRules:
        """The logical rows, each with a tuple of axes."""
        return logical_rules(self.logical)

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        """The axes of the gathers of parameters, before their use.

        Example:
            >>> Rules([("up/kernel", P("fsdp", "tensor"))]).gathered_axes
            ('fsdp',)
        """
        split = set[str]()
        for _, value in self.params:
            if isinstance(value, P):
                split.update(spec_axes(value))
        return tuple(axis for axis in GATHERED_AXES if axis in split)

    @functools.cached_property
    def batch_table(self) -> BatchTable:
        """The rows for arrays of a batch."""
        return BatchTable(tuple(self.batch))

    def match(self, path: str) -> Match | None:
        """Return the first rule matching the parameter at `path`; None without one."""
        names = names_of(path, self.stacks)
        for index, (pattern, value) in enumerate(self.params):
            if not any(map(compile_pattern(pattern).fullmatch, names)):
                continue
            reason = ""
            if isinstance(value, Replicate):
                reason = value.reason
            elif path in self.over_stages:
                value = with_axis(value, self.over_stages[path], "pipe")
                reason = "stages have unequal numbers of layers"
            return Match(index, pattern, value, self.stored_spec(path, value), reason)
        return None

    def shardings(self, mesh: AnyMesh, arrays: Any) -> Any:
        """Return the sharding of each array of a tree, for a training loop without a plan.

        Args:
            mesh: A mesh with axes of any names, those of this table among them.
            arrays: Parameters, the state of an NNX module, or a `TrainState` of Flax: arrays or
                abstract ones (`spmd.sharding.tree_shardings`).

        Raises:
            RuleError: All mismatches of the table, the arrays and the mesh.

        Example:
            >>> import jax
            >>> mesh = jax.sharding.AbstractMesh((2, 4), ("dp", "mp"))
            >>> params = {"up": {"kernel": jax.ShapeDtypeStruct((16, 64), "float32")}}
            >>> Rules([("up/kernel", P(None, "mp"))]).shardings(mesh, params)["up"]["kernel"].spec
            P(None, 'mp')
        """
        return tree_shardings(self.on_mesh(mesh), mesh, arrays)

    def on_mesh(self, mesh: AnyMesh) -> "Rules":
        """Return the table for a mesh of a caller's own: without `pipe` stacks are not split."""
        check_mesh(mesh)
        if self.stacked is not None or "pipe" in mesh.shape:
            return self
        return dataclasses.replace(self, stacked=dict.fromkeys(self.stacks))

    @functools.cached_property
    def stacks(self) -> dict[str, Stack]:
        """The stacks by path component."""
        return read_stacked(self.stacked)

    def with_recorded(self, stacks: Mapping[str, Stack] | None) -> "Rules":
        """Return the table with the stacks of a module, unless it has `stacked` itself."""
        if self.stacked is not None or stacks is None:
            return self
        return dataclasses.replace(self, stacked=stacks)

    def stored_spec(self, path: str, value: P | Replicate) -> P:
        """Return the spec of a parameter as stored, with the entries of stacked dimensions."""
        layer = value if isinstance(value, P) else ()
        return P(*insert_stacked(layer, self.layer_path(path)[1], dims_of(path, self.stacks)))

    def layer_path(self, path: str) -> tuple[str, tuple[str | None, ...]]:
        """Return the path without layer numbers, and the axes of its stacked dimensions.

        Example:
            >>> rules = Rules(params=[])
            >>> rules.layer_path("layers/3/norm/scale"), rules.layer_path("layers/norm/scale")
            (('layers/norm/scale', ()), ('layers/norm/scale', ('pipe',)))
        """
        axes = tuple(stack.stored_axis for stack in own_stacks(path, self.stacks))
        return strip_layer_numbers(path, self.stacks), axes

    def _layer_paths(self, paths: Iterable[str]) -> dict[str, str]:
        """Return the path of each parameter without layer numbers."""
        return {path: self.layer_path(path)[0] for path in paths}

    def rule_names(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Return the path for a rule of each parameter, with numbers where layers differ in value.

        Example:
            >>> Rules(params=[]).rule_names({"layers/0/w": 1, "layers/1/w": 2})
            {'layers/0/w': 'layers/0/w', 'layers/1/w': 'layers/1/w'}
        """
        layer_paths = self._layer_paths(values)
        values_by_name: dict[str, set[Any]] = {}
        for path, name in layer_paths.items():
            value = values[path]
            if isinstance(value, Replicate):
                value = None  # two reasons are no two values
            values_by_name.setdefault(name, set()).add(value)
        names = dict(layer_paths)
        for path, name in layer_paths.items():
            if len(values_by_name[name]) > 1:
                names[path] = path
        return names

    def audit(
        self, shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, int], tied: Tied = ()
    ) -> list[Problem]:
        """Return every mismatch between this table, the parameters and the mesh.

        Shapes are as stored, with stacked dimensions. One path of each tied group is in `shapes`; a
        rule may match any.
        """
        tied = tuple(tied)
        problems = self.audit_axes(axes)
        problems += self.audit_tied(tied)
        problems += audit_stacks(shapes, self.stacks)
        undivided = undivided_stacks(shapes, self.stacks, axes)
        problems += undivided.values()
        unusable = {problem.where for problem in problems}
        aliases = _aliases(tied, shapes)
        winners = set()
        for match_of_alias in self._matches_of(aliases).values():
            winners.add(match_of_alias.index)
        names = self.rule_names(shapes)
        for path, shape in shapes.items():
            match = self.match(path)
            if match is None:
                problems.append(self._unmatched(path, names, tied))
                continue
            winners.add(match.index)
            has_known_axes = axes.keys() >= set(spec_axes(match.spec))
            if has_known_axes and match.rule not in unusable:
                spec = P(*drop_stacks(tuple(match.spec), path, self.stacks, undivided))
                match = dataclasses.replace(match, spec=spec)
                problems += _audit_match(path, shape, match, axes)
        for index in range(len(self.params)):
            if index not in winners:
                problems.append(self._useless(index, (*shapes, *aliases)))
        return problems

    def audit_tied(self, tied: Tied) -> list[Problem]:
        """Return a problem for each array with paths of different specs.

        Example:
            >>> rules = Rules([("embed/w", P("fsdp")), ("head/w", P("tensor"))])
            >>> print(*rules.audit_tied([("embed/w", "head/w")]))
            embed/w = head/w: is one array and gets 2 specs
                embed/w: rule 0 ('embed/w') says P(fsdp); head/w: rule 1 ('head/w') says P(tensor)
                fix: give its paths one spec
        """
        problems = []
        for paths in tied:
            matches = self._matches_of(paths)
            placements = set()
            said = []
            for path, match in matches.items():
                placements.add(placement(match.spec))
                said.append(f"{path}: {match.rule} says {spec_text(match.spec)}")
            if len(placements) < 2:
                continue
            problem = Problem(
                " = ".join(paths),
                f"is one array and gets {len(placements)} specs",
                detail="; ".join(said),
                fix="give its paths one spec",
            )
            problems.append(problem)
        return problems

    def _matches_of(self, paths: Iterable[str]) -> dict[str, Match]:
        """Return path → match, for the paths with one."""
        found = {}
        for path in paths:
            match = self.match(path)
            if match is not None:
                found[path] = match
        return found

    def audit_axes(self, axes: Mapping[str, int]) -> list[Problem]:
        """Return the problems of axes in the table itself.

        They are unknown or repeated axes, and a `pipe` above size 1 along another dimension than 0.
        """
        problems = []
        for where, spec in self.named_specs():
            problems += _axis_problems(where, spec, axes)
        for name, stack in self.stacks.items():
            if stack.dim and stack.axis == "pipe" and axes.get("pipe", 1) > 1:
                problem = Problem(
                    f"stacked[{name!r}]",
                    f"is along dimension {stack.dim}, and a pipeline divides dimension 0 of its "
                    "layers",
                    detail=f"pipe={axes['pipe']}",
                    fix='pipe=1, or stack along dimension 0: nn.scan(variable_axes={"params": 0})',
                )
                problems.append(problem)
        return problems

    def named_specs(self) -> Iterator[tuple[str, P]]:
        """Yield the specs of all tables, each with its name in problems."""
        for index, (pattern, value) in enumerate(self.params):
            if isinstance(value, P):
                yield rule_name(index, pattern), value
        for name, spec in self.activations:
            yield f"activation {name!r}", spec
        for index, (pattern, row) in enumerate(self.batch):
            if isinstance(row, P):
                yield f"batch row {index} ({pattern!r})", row
        for name, split in self.logical_rows:
            yield f"logical {name!r}", P(split or None)
        for name, stack in self.stacks.items():
            yield f"stacked[{name!r}]", P(stack.axis)

    def _unmatched(self, path: str, names: Mapping[str, str], tied: Tied) -> Problem:
        """Return the problem of a parameter without a rule; `names` are those of all parameters."""
        for other, match in self._matches_of(_tied_with(path, tied)).items():
            what = f"no rule matches this parameter, and {match.rule} its other path {other}"
            return Problem(path, what, fix=f"write the rule for {path}")
        tail = self._own_pattern(path, names)
        nearest = ""
        if self.params:
            near, _ = max(self.params, key=lambda row: _similarity(row[0], tail))
            nearest = f"the nearest rule is {near!r}; "
        literal = f'"{tail}"'
        if "\\" in tail:
            literal = f"r{literal}"
        fix = f'{nearest}add ({literal}, P(…)) or ({literal}, replicate("why"))'
        return Problem(path, "no rule matches this parameter", fix=fix)

    def _own_pattern(self, path: str, names: Mapping[str, str]) -> str:
        """Return the shortest pattern, of two components or more, for this parameter alone."""
        own = names[path]
        parts = own.split("/")
        is_numbered = own != self.layer_path(path)[0]
        if is_numbered:
            # Numbered modules of other shapes are no layers of one stack: no rule for others may
            # match them.
            taken = list(names.keys() - {path})
            shortest = len(parts)
        else:
            taken = self._forms_of_others(own, names)
            shortest = min(2, len(parts))
        for length in range(shortest, len(parts) + 1):
            if parts[-length].isdigit():
                continue
            end = "/".join(parts[-length:])
            if not any(f"/{other}".endswith(f"/{end}") for other in taken):
                return re.escape(end)
        return f"^{re.escape(own)}"

    def _forms_of_others(self, own: str, names: Mapping[str, str]) -> list[str]:
        """Return the forms of other parameters' paths, with and without layer numbers."""
        forms: list[str] = []
        for other, name in names.items():
            if other == name != own:
                forms += names_of(other, self.stacks)
        return forms

    def _useless(self, index: int, paths: Iterable[str]) -> Problem:
        """Return the problem of a rule without effect: shadowed, or matching no path."""
        pattern = self.params[index][0]
        where = rule_name(index, pattern)
        own = [path for path in paths if matches(pattern, path, self.stacks)]
        if own:
            shadowing = dict.fromkeys(match.rule for match in self._matches_of(own).values())
            return Problem(
                where,
                f"is shadowed by {' and '.join(shadowing)}, which takes all it matches",
                detail=f"e.g. {own[0]}",
                fix="put the narrower rule first",
            )
        layer_paths = self._layer_paths(paths).values()
        fix = "correct it or delete it"
        near = difflib.get_close_matches(pattern, layer_paths, n=1, cutoff=0.3)
        if near:
            fix = f"the nearest parameter is {near[0]}; {fix}"
        return Problem(where, "matches no parameter", fix=fix)


def _similarity(pattern: str, other: str) -> float:
    """Return the similarity of two patterns, from 0 to 1."""
    return difflib.SequenceMatcher(None, pattern, other).ratio()


def _as_pairs(table: Any) -> tuple[tuple[Any, ...], ...]:
    """Return the rows of a table, a mapping or a sequence of pairs, as hashable tuples."""
    if isinstance(table, Mapping):
        table = table.items()
    return tuple(map(tuple, table))


def _as_stacked_pairs(stacked: Any) -> tuple[tuple[str, Any], ...]:
    """Return hashable pairs of stacks: the axis alone for a stack along dimension 0."""
    pairs: list[tuple[str, Any]] = []
    for name, stack in read_stacked(stacked).items():
        if stack.dim or not stack.is_even:
            pairs.append((name, stack))
        else:
            pairs.append((name, stack.axis))
    return tuple(pairs)


def _param_problems(params: Iterable[tuple[str, Any]]) -> list[Problem]:
    """Return the problems of each row for parameters alone."""
    problems = []
    for index, (pattern, value) in enumerate(params):
        where = rule_name(index, pattern)
        try:
            matches_every_path = is_catch_all(pattern)
        except PatternError as error:
            problems.append(Problem(where, f"is not a regular expression: {error}"))
            continue
        if matches_every_path:
            what = "matches every path: there is no catch-all rule"
            problems.append(Problem(where, what, fix="name the parameters that it is for"))
        problems += _value_problems(where, value)
    return problems


def _value_problems(where: str, value: Any) -> list[Problem]:
    """Return the problem of a rule's value, if it has one."""
    if isinstance(value, Replicate):
        return []
    if not isinstance(value, P):
        fix = 'a PartitionSpec, or replicate("why")'
        return [Problem(where, f"has the value {value!r}", fix=fix)]
    if P.UNCONSTRAINED in value:
        fix = "an axis, or None for whole"
        return [Problem(where, "leaves a dimension to the compiler", fix=fix)]
    if not any(map(entry_axes, value)):
        what = f"{spec_text(value)} replicates silently"
        return [Problem(where, what, fix='write replicate("why")')]
    return []


def _activation_problems(activations: Iterable[tuple[str, Any]]) -> list[Problem]:
    """Return the problems of each row for activations alone."""
    problems = []
    seen: list[str] = []
    for name, value in activations:
        where = f"activation {name!r}"
        if not isinstance(value, P):
            problems.append(Problem(where, f"has the value {value!r}", fix="a PartitionSpec"))
        if name in seen:
            problems.append(Problem(where, "is in the table twice", fix="keep one"))
        seen.append(name)
    return problems


def _aliases(tied: Tied, shapes: Collection[str]) -> list[str]:
    """Return the tied paths missing in `shapes`."""
    aliases = []
    for paths in tied:
        for path in paths:
            if path not in shapes:
                aliases.append(path)
    return aliases


def _tied_with(path: str, tied: Tied) -> list[str]:
    """Return all paths of the tied groups of a path, including the path itself."""
    found: list[str] = []
    for paths in tied:
        if path in paths:
            found += paths
    return found


def _axis_problems(where: str, spec: P, axes: Collection[str]) -> list[Problem]:
    """Return a problem for each unknown or repeated axis of a spec."""
    problems = []
    repeated = repeated_axes(spec)
    for axis in dict.fromkeys(spec_axes(spec)):
        if axis not in axes:
            what = f"{spec_text(spec)} names the unknown axis {axis!r}"
            problems.append(Problem(where, what, fix=did_you_mean(axis, axes)))
        elif axis in repeated:
            what = f"{spec_text(spec)} uses the axis {axis!r} twice"
            problems.append(Problem(where, what, fix="keep one of them"))
    return problems


def _audit_match(
    path: str, shape: tuple[int, ...], match: Match, axes: Mapping[str, int]
) -> list[Problem]:
    """Return the problems of splitting a parameter by its rule."""
    by = f"rule {match.pattern!r}"
    twice = repeated_axes(match.spec)
    if not twice:
        return audit_spec(path, shape, match.spec, axes, by)
    spec = spec_text(match.spec)
    what = f"{by} and stacking give {spec}, which uses the axis {twice[0]!r} twice"
    return [Problem(path, what, fix="split the stack or the layer over it")]


def audit_spec(
    path: str, shape: tuple[int, ...], spec: P, axes: Mapping[str, int], by: str
) -> list[Problem]:
    """Return the problems of splitting an array: too many entries, indivisible dimensions.

    `spec` must only name axes of `axes`; `by` is its origin, for the message.

    Example:
        >>> print(*audit_spec("mlp/kernel", (7, 4), P("fsdp"), {"fsdp": 2}, "rule 'kernel'"))
        mlp/kernel: rule 'kernel' cannot split dimension 0 of (7, 4)
            7 / (fsdp=2) = 3.5
            fix: make the dimension a multiple of 2, or leave it whole in the spec
    """
    if len(spec) > len(shape):
        problem = Problem(
            path,
            f"{by} gives {spec_text(spec)} for the shape {shape}",
            detail=f"{len(spec)} entries for {len(shape)} dimensions",
            fix="write one entry for each dimension at most (a stacked dimension adds its own)",
        )
        return [problem]
    problems = []
    for dim, entry in enumerate(spec):
        size = shape[dim]
        shards = shards_of(entry, axes)
        if size % shards == 0:
            continue
        product = " × ".join(f"{axis}={axes[axis]}" for axis in entry_axes(entry) if axes[axis] > 1)
        problem = Problem(
            path,
            f"{by} cannot split dimension {dim} of {shape}",
            detail=f"{size} / ({product}) = {size / shards:.4g}",
            fix=f"make the dimension a multiple of {shards}, or leave it whole in the spec",
        )
        problems.append(problem)
    return problems


def spec_text(spec: P) -> str:
    """Return a spec as short text, with `.` for a whole dimension and `a+b` for two axes.

    Example:
        >>> spec_text(P(None, ("data", "fsdp"), "tensor"))
        'P(., data+fsdp, tensor)'
    """
    words = []
    for entry in spec:
        axes = "+".join(entry_axes(entry))
        words.append(axes or ".")
    return f"P({', '.join(words)})"


def repeated_axes(spec: Iterable[Any]) -> list[str]:
    """Return the mesh axes repeated in a spec."""
    used = spec_axes(spec)
    return [axis for axis in dict.fromkeys(used) if used.count(axis) > 1]


def placement(spec: P) -> tuple[tuple[str, ...], ...]:
    """Return the axes of each dimension in a canonical form, equal for equivalent specs."""
    axes = list(map(entry_axes, spec))
    while axes and not axes[-1]:  # P("fsdp", None) is P("fsdp")
        axes.pop()
    return tuple(axes)


def rule_name(index: int, pattern: str) -> str:
    """Return a rule's name in problems."""
    return f"rule {index} ({pattern!r})"
