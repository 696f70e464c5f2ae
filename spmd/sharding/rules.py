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
"""

import dataclasses
import difflib
import functools
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from spmd.errors import Problem, RuleError, did_you_mean
from spmd.sharding.layer_paths import stacks_of, strip_layer_numbers
from spmd.sharding.mesh import entry_axes, shards_of

DEFAULT_STACKED = (("layers", "pipe"),)
Tied = Iterable[Sequence[str]]
"""Groups of paths; the paths of a group are names of one array."""

MATCH_SECONDS = 2
"""Seconds that a pattern may take to match one path."""

_MAY_BACKTRACK = re.compile(r"\)[*+{]|([*+{].*){4}")  # a repeated group, or many repetitions

ANY_PATH = "\x00/\x00"
"""A path that no parameter has, so only a catch-all pattern matches it."""


@functools.cache
def compile_pattern(pattern: str) -> "PathPattern":
    """Compile a rule's pattern into an expression for `fullmatch` on whole paths; raise `re.error` if it is none.

    Example:
        >>> bool(compile_pattern("wo/kernel").fullmatch("attention/wo/kernel"))
        True
        >>> bool(compile_pattern("attention/wo").fullmatch("cross_attention/wo"))
        False
    """
    return PathPattern(pattern, re.compile(rf"(?:.*/)?(?:{pattern})"))


@dataclasses.dataclass(frozen=True)
class PathPattern:
    """A compiled pattern whose matches have a time limit: one such as `(a+)+b` takes exponential time."""

    pattern: str
    expression: re.Pattern[str]

    def fullmatch(self, path: str) -> re.Match[str] | None:
        """Match a whole path; raise `RuleError` after `MATCH_SECONDS`, if this is the main thread.

        Python's matcher handles signals while it backtracks, but only in the main thread.
        """
        if not _MAY_BACKTRACK.search(self.pattern) or threading.current_thread() is not threading.main_thread():
            return self.expression.fullmatch(path)

        def stop(number: int, frame: Any) -> None:
            what = f"takes more than {MATCH_SECONDS} s to match {path}"
            fix = "write it without a repetition inside of a repetition"
            raise RuleError("A pattern backtracks:", [Problem(f"pattern {self.pattern!r}", what, fix=fix)])

        began, handler = time.monotonic(), signal.signal(signal.SIGALRM, stop)
        seconds, interval = signal.setitimer(signal.ITIMER_REAL, MATCH_SECONDS)
        try:
            return self.expression.fullmatch(path)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            if seconds:  # a timer of the program goes on
                left = max(seconds - (time.monotonic() - began), 1e-6)
                signal.setitimer(signal.ITIMER_REAL, left, interval)


def is_catch_all(pattern: str) -> bool:
    """Return whether a rule's pattern matches every path."""
    return compile_pattern(pattern).fullmatch(ANY_PATH) is not None


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
        stacked: Path component → the axis that splits its leading (layer) dimension, or None. It applies to
            `layers/attention/…` and not to unrolled layers (`layers/0/…`). Layer numbers are removed before matching,
            so one table serves both.

    Example:
        >>> rules = Rules(params=[("wo/kernel", P("tensor", "fsdp"))])
        >>> spec_text(rules.match("layers/attention/wo/kernel").spec)
        'P(pipe, tensor, fsdp)'
        >>> spec_text(rules.match("layers/0/attention/wo/kernel").spec)
        'P(tensor, fsdp)'
    """

    params: Sequence[tuple[str, P | Replicate]]
    activations: Sequence[tuple[str, P]] = ()
    stacked: Any = DEFAULT_STACKED

    def __post_init__(self) -> None:
        for field in ("params", "activations", "stacked"):
            table = getattr(self, field)
            pairs = table.items() if isinstance(table, Mapping) else table
            object.__setattr__(self, field, tuple(tuple(pair) for pair in pairs))
        problems = []
        for index, (pattern, value) in enumerate(self.params):
            where = rule_name(index, pattern)
            try:
                if is_catch_all(pattern):
                    what = "matches every path: there is no catch-all rule"
                    problems.append(Problem(where, what, fix="name the parameters that it is for"))
            except re.error as error:
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
        if problems:
            raise RuleError("This rule table cannot be made:", problems)

    def match(self, path: str) -> Match | None:
        """Return the first rule that matches the parameter at `path`."""
        name, leading = self.layer_path(path)
        for index, (pattern, value) in enumerate(self.params):
            if compile_pattern(pattern).fullmatch(name):
                one_layer, reason = (P(), value.reason) if isinstance(value, Replicate) else (value, "")
                return Match(index, pattern, value, P(*leading, *one_layer), reason)
        return None

    def layer_path(self, path: str) -> tuple[str, tuple[str | None, ...]]:
        """Return the path without layer numbers, and the axes of the leading dimensions that stacking added.

        Example:
            >>> Rules(params=[]).layer_path("layers/3/norm/scale"), Rules(params=[]).layer_path("layers/norm/scale")
            (('layers/norm/scale', ()), ('layers/norm/scale', ('pipe',)))
        """
        axes = dict(self.stacked)
        leading = (axes[stack.rsplit("/", 1)[-1]] for stack in stacks_of(path, axes))
        return strip_layer_numbers(path, axes), tuple(leading)

    def differing_layers(self, values: Mapping[str, P | Replicate]) -> Iterator[tuple[str, str]]:
        """Yield each layer of a stack whose value differs from that of the first layer, and the path of the first."""
        first: dict[str, str] = {}
        for path, value in values.items():
            other = first.setdefault(self.layer_path(path)[0], path)
            if value != values[other] and any(isinstance(v, P) for v in (value, values[other])):
                yield path, other

    def audit(self, shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, int], tied: Tied = ()) -> list[Problem]:
        """Return every mismatch between this table, the parameters and the mesh.

        Shapes are as stored, with stacked dimensions. One path of each tied group is in `shapes`; a rule may match any.
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
        tables += [(f"stacked[{name!r}]", P(axis)) for name, axis in self.stacked]
        for where, spec in tables:
            for axis in dict.fromkeys(axis for entry in spec for axis in entry_axes(entry)):
                if axis not in axes:
                    what = f"{spec_text(spec)} names the unknown axis {axis!r}"
                    problems.append(Problem(where, what, fix=did_you_mean(axis, axes)))
                elif axis in repeated_axes(spec):
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
        where, names = rule_name(index, pattern), {path: self.layer_path(path)[0] for path in paths}
        if own := [path for path, name in names.items() if compile_pattern(pattern).fullmatch(name)]:
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
