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
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from spmd.errors import Problem, RuleError, did_you_mean
from spmd.mesh import entry_axes, shards_of

_NO_PARAMETER = "\x00/\x00"  # a path that no parameter has: only a catch-all pattern matches it


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
        stacked: Path component → the axis that its leading (layer) dimension is split over. It applies to
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
    stacked: Any = (("layers", "pipe"),)

    def __post_init__(self) -> None:
        for field in ("params", "activations", "stacked"):
            table = getattr(self, field)
            pairs = table.items() if isinstance(table, Mapping) else table
            object.__setattr__(self, field, tuple(tuple(pair) for pair in pairs))
        problems = []
        for index, (pattern, value) in enumerate(self.params):
            where = f"rule {index} ({pattern!r})"
            try:
                catch_all = compile_pattern(pattern).fullmatch(_NO_PARAMETER)
            except re.error as error:
                problems.append(Problem(where, f"is not a regular expression: {error}"))
                continue
            if catch_all:
                problems.append(
                    Problem(where, "matches every path: there is no catch-all rule", fix="name what it is for")
                )
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

    def match(self, path: str) -> Match | None:
        """The first rule that matches the parameter at `path`, or None."""
        name, leading = self.layer_path(path)
        for index, (pattern, value) in enumerate(self.params):
            if compile_pattern(pattern).fullmatch(name):
                one_layer, reason = (P(), value.reason) if isinstance(value, Replicate) else (value, "")
                return Match(index, pattern, value, P(*leading, *one_layer), reason)
        return None

    def layer_path(self, path: str) -> tuple[str, tuple[str, ...]]:
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

    def audit(self, shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, int]) -> list[Problem]:
        """Everything that is wrong between this table, the parameters and the mesh.

        Args:
            shapes: Parameter path → shape as stored (with stacked dimensions).
            axes: Mesh axis → size.

        Returns:
            Every problem: unmatched parameters, rules that match nothing or are shadowed, rank mismatches, unknown
            axes, axes used twice, dimensions that do not divide. Empty when there is none.
        """
        problems = self._audit_axes(axes)
        unusable = {problem.where for problem in problems}
        won: dict[int, list[str]] = {index: [] for index in range(len(self.params))}
        for path, shape in shapes.items():
            match = self.match(path)
            if match is None:
                problems.append(self._unmatched(path))
                continue
            won[match.index].append(path)
            if _rule(match.index, match.pattern) in unusable or not axes.keys() >= set(self.layer_path(path)[1]):
                continue
            twice = self._audit_stacking(path, match)
            problems += twice or audit_spec(path, shape, match.spec, axes, f"rule {match.pattern!r}")
        for index, paths in won.items():
            if not paths:
                problems.append(self._useless(index, shapes))
        return problems

    def _audit_stacking(self, path: str, match: Match) -> list[Problem]:
        used = [axis for entry in match.spec for axis in entry_axes(entry)]
        by = f"rule {match.pattern!r} and stacking give {spec_text(match.spec)}"
        return [
            Problem(path, f"{by}, which uses the axis {axis!r} twice", fix="split the stack or the layer over it")
            for axis in dict.fromkeys(used)
            if used.count(axis) > 1
        ]

    def _audit_axes(self, axes: Mapping[str, int]) -> list[Problem]:
        problems = []
        tables: list[tuple[str, P]] = [
            (_rule(i, pattern), value) for i, (pattern, value) in enumerate(self.params) if isinstance(value, P)
        ]
        tables += [(f"activation {name!r}", spec) for name, spec in self.activations]
        tables += [(f"stacked[{name!r}]", P(axis)) for name, axis in self.stacked]
        for where, spec in tables:
            used = [axis for entry in spec for axis in entry_axes(entry)]
            for axis in dict.fromkeys(used):
                if axis not in axes:
                    what = f"{spec_text(spec)} names the unknown axis {axis!r}"
                    problems.append(Problem(where, what, fix=did_you_mean(axis, axes)))
                elif used.count(axis) > 1:
                    what = f"{spec_text(spec)} uses the axis {axis!r} twice"
                    problems.append(Problem(where, what, fix="keep one of them"))
        return problems

    def _unmatched(self, path: str) -> Problem:
        tail = "/".join(self.layer_path(path)[0].split("/")[-2:])
        near = max(
            (pattern for pattern, _ in self.params),
            key=lambda pattern: difflib.SequenceMatcher(None, pattern, tail).ratio(),
            default=None,
        )
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
        return Problem(
            _rule(index, pattern),
            "matches no parameter",
            fix=(f"the nearest parameter is {near[0]}; " if near else "") + "correct it or delete it",
        )


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
        return [
            Problem(
                path,
                f"{by} gives {spec_text(spec)} for the shape {shape}",
                f"{len(spec)} entries for {len(shape)} dimensions",
                "write one entry for each dimension at most (a stacked dimension adds its own)",
            )
        ]
    problems = []
    for dim, entry in enumerate(spec):
        shards = shards_of(entry, axes)
        if shape[dim] % shards:
            product = " × ".join(f"{axis}={axes[axis]}" for axis in entry_axes(entry))
            problems.append(
                Problem(
                    path,
                    f"{by} cannot split dimension {dim} of {shape}",
                    f"{shape[dim]} / ({product}) = {shape[dim] / shards:.4g}",
                    f"make the dimension a multiple of {shards}, or leave it whole in the spec",
                )
            )
    return problems


def spec_text(spec: P) -> str:
    """A spec as one short word: `P(fsdp, tensor)`, with `.` for a whole dimension and `a+b` for two axes.

    Example:
        >>> spec_text(P(None, ("data", "fsdp"), "tensor"))
        'P(., data+fsdp, tensor)'
    """
    words = ["." if e is None else e if isinstance(e, str) else "+".join(e) for e in spec]
    return f"P({', '.join(words)})"


def _rule(index: int, pattern: str) -> str:
    return f"rule {index} ({pattern!r})"


@functools.cache
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression that matches whole paths ending in a run of components that `pattern` matches.

    Example:
        >>> bool(compile_pattern("wo/kernel").fullmatch("attention/wo/kernel"))
        True
        >>> bool(compile_pattern("attention/wo").fullmatch("cross_attention/wo"))
        False
    """
    return re.compile(rf"(?:.*/)?(?:{pattern})")
