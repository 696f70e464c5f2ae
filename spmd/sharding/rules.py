"""Tables from a parameter's path to how it is split, and the audit that leaves nothing silent.

```python
rules = Rules(
    params=[
        ("q_proj/kernel", P("fsdp", "tensor")),                       # matches layers/attention/q_proj/kernel
        ("norm/scale", replicate("norm scales are a few KiB")),       # replication is written, with a reason
    ],
    activations=[("mlp_hidden", P(("data", "fsdp"), "sequence", "tensor"))],
    stacked={"layers": "pipe"},
)
```

A pattern is a regular expression that must match a whole run of path components up to the end of the path, so
`attention/wo/kernel` never hits `cross_attention/wo/kernel`. The first match wins. There is no catch-all rule.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import Problem, RuleError, did_you_mean
from spmd.sharding.from_flax import Annotation, resolve_annotations
from spmd.sharding.from_search import as_python, compile_pattern, is_catch_all, read_search_table
from spmd.sharding.mesh import entry_axes, shards_of

_STACKED = (("layers", "pipe"),)
Tied = Iterable[Sequence[str]]  # groups of paths; all paths of a group lead to one array


@dataclasses.dataclass(frozen=True)
class Replicate:
    """The value of a rule whose parameters are whole on every device, and why that is right."""

    reason: str

    def __str__(self) -> str:
        return f"replicate({self.reason!r})"


def replicate(reason: str) -> Replicate:
    """Says that a parameter is replicated on purpose.

    Args:
        reason: Why, in a few words; it is printed in the plan.

    Raises:
        RuleError: The reason is empty.

    Example:
        >>> print(replicate("norm scales are a few KiB"))
        replicate('norm scales are a few KiB')
    """
    if not isinstance(reason, str) or not reason.strip():
        raise RuleError(
            "A rule cannot be made:", [Problem("replicate()", "has no reason", fix='replicate("a few KiB")')]
        )
    return Replicate(reason)


@dataclasses.dataclass(frozen=True)
class Match:
    """What the table says of one parameter.

    Attributes:
        index: The rule's position in the table.
        pattern: The rule's pattern.
        requested: The rule's value, as it is written.
        spec: The spec of the parameter as it is stored, with the entries of stacked dimensions in front.
        reason: Why it is replicated, or empty.
    """

    index: int
    pattern: str
    requested: P | Replicate
    spec: P
    reason: str


@dataclasses.dataclass(frozen=True)
class Rules:
    """A partition rule table for one family of models.

    Args:
        params: `(pattern, PartitionSpec or replicate(reason))` pairs. The first match wins. A spec is written for
            one layer: dimensions that stacking adds are not in it.
        activations: `(name, PartitionSpec)` pairs for the names that the model marks with `annotate`.
        stacked: Path component → the axis that its leading (layer) dimension is split over, or None. It applies to
            `layers/attention/…` and not to unrolled layers, whose path goes on with a number (`layers/0/…`); their
            number is left out before matching, so one table serves both.

    Raises:
        RuleError: A pattern is not a regular expression or matches everything, a value is not a spec.

    Example:
        >>> rules = Rules(params=[("wo/kernel", P("tensor", "fsdp"))])
        >>> spec_text(rules.match("layers/attention/wo/kernel").spec)
        'P(pipe, tensor, fsdp)'
        >>> spec_text(rules.match("layers/0/attention/wo/kernel").spec)
        'P(tensor, fsdp)'
    """

    params: Sequence[tuple[str, P | Replicate]]
    activations: Sequence[tuple[str, P]] = ()
    stacked: Any = _STACKED

    def __post_init__(self) -> None:
        for field in ("params", "activations", "stacked"):
            table = getattr(self, field)
            pairs = table.items() if isinstance(table, Mapping) else table
            object.__setattr__(self, field, tuple(tuple(pair) for pair in pairs))
        problems = []
        for index, (pattern, value) in enumerate(self.params):
            where = f"rule {index} ({pattern!r})"
            try:
                catch_all = is_catch_all(pattern)
            except re.error as error:
                problems.append(Problem(where, f"is not a regular expression: {error}"))
                continue
            if catch_all:
                what = "matches every path: there is no catch-all rule"
                problems.append(Problem(where, what, fix="name what it is for"))
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
        if problems:
            raise RuleError("This rule table cannot be made:", problems)

    @classmethod
    def from_search(
        cls,
        table: Iterable[tuple[str, Any]],
        params: Any,
        *,
        axes: Mapping[str, Any] | None = None,
        stacked: Any = _STACKED,
        activations: Any = (),
        one_layer: bool = False,
        report: Callable[[str], object] = print,
    ) -> "Rules":
        """A strict table that says what a table written for `re.search` (EasyLM, scalax) says of these parameters.

        Args:
            table: `(pattern, PartitionSpec)` pairs. The first that `re.search` finds in the path wins; arrays of one
                element are replicated whatever the table says.
            params: A tree of arrays or `jax.ShapeDtypeStruct`s.
            axes: The table's axis → the mesh's: `{"dp": "data", "mp": "tensor"}`; a tuple of axes, or None, as well.
            stacked: As in a table. Specs are for arrays as stored: a stacked dimension's entry is None or that axis.
            activations: As in a table.
            one_layer: Specs are for one layer: a stacked dimension has no entry in them.
            report: Is told what each rule wins, what is dead, shadowed, or swallowed by a catch-all, and the result.

        Raises:
            RuleError: Everything in the table that has no strict form, at once.
        """
        stack = cls((), (), stacked)
        layer_paths = {path: stack.layer_path(path) for path in tree.flatten(params)}
        strict, lines = read_search_table(table, params, layer_paths, axes or {}, one_layer)
        report("\n".join((*lines, "", *as_python(strict, stack.stacked))))
        return cls([(rule.pattern, _stated(rule.value)) for rule in strict], activations, stacked)

    @classmethod
    def from_annotations(
        cls,
        annotations: Mapping[str, Annotation],
        *,
        logical: Any = (),
        stacked: Any = None,
        activations: Any = (),
        table: "Rules | None" = None,
    ) -> "Rules":
        """A table from the sharding metadata of a Flax model, one rule for each annotated parameter.

        Args:
            annotations: Parameter path → annotation, as `spmd.sharding.from_flax` reads them.
            logical: `(logical name, mesh axis or tuple or None)` pairs. The first whose axes are free in the array
                applies; names without one are mesh axes.
            stacked: As in a table; by default as in `table`.
            activations: As in a table; they follow those of `table`.
            table: Speaks for parameters without annotations. Where both speak, they must agree.

        Raises:
            RuleError: Every name without a meaning and every disagreement, at once.
        """
        stack = cls((), (), stacked if stacked is not None else table.stacked if table else _STACKED)
        layer_paths = {path: stack.layer_path(path) for path in annotations}
        values, problems = resolve_annotations(annotations, logical, layer_paths)
        own = {}
        if table and table.stacked != stack.stacked:
            problems.append(Problem("stacked", f"is {stack.stacked}, and in the table {table.stacked}", fix="keep one"))
        for path, value in values.items():
            name, leading = layer_paths[path]
            spec = P(*leading, *(value if isinstance(value, P) else ()))
            said = table.match(path) if table else None
            if said is None:
                own[f"^{re.escape(name)}"] = _stated(value)
            elif _entries(said.spec) != _entries(spec):
                what = f"its annotation {annotations[path].names} means {spec_text(spec)}, and {_says(said)}"
                problems.append(Problem(path, what, fix="correct one of them"))
        if problems:
            raise RuleError("These annotations do not make a rule table:", problems)
        base, added = table or cls(()), cls((), activations)
        return cls((*base.params, *own.items()), (*base.activations, *added.activations), stack.stacked)

    def match(self, path: str) -> Match | None:
        """The first rule that matches the parameter at `path`, or None."""
        name, leading = self.layer_path(path)
        for index, (pattern, value) in enumerate(self.params):
            if compile_pattern(pattern).fullmatch(name):
                one_layer, reason = (P(), value.reason) if isinstance(value, Replicate) else (value, "")
                return Match(index, pattern, value, P(*leading, *one_layer), reason)
        return None

    def layer_path(self, path: str) -> tuple[str, tuple[str | None, ...]]:
        """The path without layer numbers, and the axes of the dimensions that stacking put in front.

        Example:
            >>> Rules(params=[]).layer_path("layers/3/norm/scale"), Rules(params=[]).layer_path("layers/norm/scale")
            (('layers/norm/scale', ()), ('layers/norm/scale', ('pipe',)))
        """
        stacked = dict(self.stacked)
        parts, leading, kept = path.split("/"), [], []
        for i, part in enumerate(parts):
            if i and parts[i - 1] in stacked and part.isdigit():
                continue
            kept.append(part)
            if part in stacked and i + 1 < len(parts) and not parts[i + 1].isdigit():
                leading.append(stacked[part])
        return "/".join(kept), tuple(leading)

    def audit(self, shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, int], tied: Tied = ()) -> list[Problem]:
        """Everything that is wrong between this table, the parameters and the mesh.

        Args:
            shapes: Parameter path → shape as stored (with stacked dimensions).
            axes: Mesh axis → size.
            tied: Groups of paths that lead to one array each; one of each is in `shapes`, and a rule may be for any.

        Returns:
            Every problem: unmatched parameters, rules that match nothing or are shadowed, rank mismatches, unknown
            axes, axes used twice, dimensions that do not divide, tied arrays with two specs. Empty when there is none.
        """
        tied = tuple(tied)
        problems = [*self._audit_axes(axes), *self.audit_tied(tied)]
        unusable = {problem.where for problem in problems}
        aliases = [path for paths in tied for path in paths if path not in shapes]
        winners = {match.index for match in map(self.match, aliases) if match}
        for path, shape in shapes.items():
            if not (match := self.match(path)):
                problems.append(self._unmatched(path))
                continue
            winners.add(match.index)
            if _rule(match.index, match.pattern) in unusable or not axes.keys() >= set(self.layer_path(path)[1]) - {
                None
            }:
                continue
            by = f"rule {match.pattern!r}"
            if twice := _twice(match.spec):
                what = f"{by} and stacking give {spec_text(match.spec)}, which uses the axis {twice[0]!r} twice"
                problems.append(Problem(path, what, fix="split the stack or the layer over it"))
            else:
                problems += audit_spec(path, shape, match.spec, axes, by)
        return problems + [self._useless(i, (*shapes, *aliases)) for i in range(len(self.params)) if i not in winners]

    def audit_tied(self, tied: Tied) -> list[Problem]:
        """Arrays that have several paths, to which this table gives several specs.

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
            count = len({_entries(match.spec) for match in matches.values()})
            if count > 1:
                said = (f"{path}: {_says(match)}" for path, match in matches.items())
                what = f"is one array and gets {count} specs"
                problems.append(Problem(" = ".join(paths), what, "; ".join(said), "give its paths one spec"))
        return problems

    def _audit_axes(self, axes: Mapping[str, int]) -> list[Problem]:
        problems = []
        tables = [(_rule(i, pattern), v) for i, (pattern, v) in enumerate(self.params) if isinstance(v, P)]
        tables += [(f"activation {name!r}", spec) for name, spec in self.activations]
        tables += [(f"stacked[{name!r}]", P(axis)) for name, axis in self.stacked]
        for where, spec in tables:
            for axis in dict.fromkeys(axis for entry in spec for axis in entry_axes(entry)):
                if axis not in axes:
                    what = f"{spec_text(spec)} names the unknown axis {axis!r}"
                    problems.append(Problem(where, what, fix=did_you_mean(axis, axes)))
                elif axis in _twice(spec):
                    what = f"{spec_text(spec)} uses the axis {axis!r} twice"
                    problems.append(Problem(where, what, fix="keep one of them"))
        return problems

    def _unmatched(self, path: str) -> Problem:
        tail = "/".join(self.layer_path(path)[0].split("/")[-2:])
        patterns = [pattern for pattern, _ in self.params]
        near = max(patterns, key=lambda p: difflib.SequenceMatcher(None, p, tail).ratio(), default=None)
        nearest = f"the nearest rule is {near!r}; " if near is not None else ""
        fix = f'{nearest}add ("{tail}", P(…)) or ("{tail}", replicate("why"))'
        return Problem(path, "no rule matches this parameter", fix=fix)

    def _useless(self, index: int, paths: Iterable[str]) -> Problem:
        pattern = self.params[index][0]
        own = [path for path in paths if compile_pattern(pattern).fullmatch(self.layer_path(path)[0])]
        if own:
            first = [match for path in own if (match := self.match(path))]
            shadowers = " and ".join(dict.fromkeys(_rule(m.index, m.pattern) for m in first))
            what = f"is shadowed by {shadowers}, which takes all it matches"
            return Problem(_rule(index, pattern), what, f"e.g. {own[0]}", "put the narrower rule first")
        names = [self.layer_path(path)[0] for path in paths]
        near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
        fix = f"the nearest parameter is {near[0]}; " if near else ""
        return Problem(_rule(index, pattern), "matches no parameter", fix=f"{fix}correct it or delete it")


def audit_spec(path: str, shape: tuple[int, ...], spec: P, axes: Mapping[str, int], by: str) -> list[Problem]:
    """Whether `spec` can split an array of `shape`: its rank, then whether each dimension divides.

    Args:
        path: What the array is called in a problem.
        shape: The array's global shape.
        spec: A spec that names only axes of `axes`.
        axes: Mesh axis → size.
        by: Who asked for the spec, for the message.

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
    """A spec as one short word: `P(fsdp, tensor)`, with `.` for a whole dimension and `a+b` for two axes.

    Example:
        >>> spec_text(P(None, ("data", "fsdp"), "tensor"))
        'P(., data+fsdp, tensor)'
    """
    words = ["." if e is None else e if isinstance(e, str) else "+".join(e) for e in spec]
    return f"P({', '.join(words)})"


def _twice(spec: P) -> list[str]:
    used = [axis for entry in spec for axis in entry_axes(entry)]
    return [axis for axis in dict.fromkeys(used) if used.count(axis) > 1]


def _entries(spec: P) -> tuple[tuple[str, ...], ...]:
    """What two specs for the same placement have in common."""
    entries = [entry_axes(entry) for entry in spec]
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)


def _stated(value: P | str) -> P | Replicate:
    return value if isinstance(value, P) else replicate(value)


def _says(match: Match) -> str:
    return f"{_rule(match.index, match.pattern)} says {spec_text(match.spec)}"


def _rule(index: int, pattern: str) -> str:
    return f"rule {index} ({pattern!r})"
