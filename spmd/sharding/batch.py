"""Split of the arrays of a batch: a dimension of each holds examples, and one may hold tokens.

Examples are the first dimension of an array, unless the batch table of the rules says otherwise:

```python
rules = Rules(
    params=[…],
    batch=[
        ("tokens|targets|weights", P(("data", "fsdp", "expert"), "sequence")),  # [batch, sequence]
        ("observations", P(None, ("data", "fsdp", "expert"))),  # [time, batch, feature]
        ("adjacency", whole("one graph for all examples")),
    ],
)
```
"""

import dataclasses
from collections.abc import Mapping

from jax.sharding import PartitionSpec as P

from spmd.errors import Problem, RuleError
from spmd.sharding.mesh import BATCH_AXES, BATCH_SPEC, entry_axes
from spmd.sharding.patterns import PatternError, compile_pattern

TOKENS = (("tokens|targets|weights|segments|valid", BATCH_SPEC),)
"""Rows for the arrays `[batch, sequence]` of a language model."""


@dataclasses.dataclass(frozen=True)
class Whole:
    """Value of a row for an array without examples, with the reason.

    Every device and every microbatch has it whole.
    """

    reason: str

    def __str__(self) -> str:
        return f"whole({self.reason!r})"


def whole(reason: str) -> Whole:
    """Return the value of a row for an array without examples.

    Example:
        >>> print(whole("one graph for all examples"))
        whole('one graph for all examples')
    """
    if not isinstance(reason, str) or not reason.strip():
        problem = Problem("whole()", "has no reason", fix='whole("one graph for all examples")')
        raise RuleError("Invalid row of the batch table:", [problem])
    return Whole(reason)


@dataclasses.dataclass(frozen=True)
class BatchTable:
    """Rows from a pattern of paths in a batch to a `PartitionSpec` or `whole(reason)`.

    The first match wins.

    Example:
        >>> rows = (("observations", P(None, BATCH_AXES)), ("graph", whole("one for all")))
        >>> table = BatchTable(rows)
        >>> [table.examples(path) for path in ("observations", "graph", "labels")]
        [1, None, 0]
    """

    rows: tuple[tuple[str, P | Whole], ...] = ()

    def value(self, path: str) -> P | Whole | None:
        """Return the value of the first row matching a path; None without one."""
        row = self._row(path)
        if row is None:
            return None
        return row[1]

    def spec(self, path: str, ndim: int) -> P:
        """Return the spec of an array; a scalar is whole, unless a row gives it a spec."""
        value = self.value(path)
        if isinstance(value, Whole):
            return P()
        if value is not None:
            return value
        if ndim == 0:
            return P()
        return P(BATCH_AXES)

    def examples(self, path: str) -> int | None:
        """Return the examples' dimension of an array; None if it is whole."""
        value = self.value(path)
        if isinstance(value, Whole):
            return None
        if value is None:
            return 0
        return _dims_of_examples(value)[0]

    def problems(self) -> list[Problem]:
        """Return the problems of the rows alone."""
        problems = []
        fix = (
            f"P({BATCH_AXES}, …) with these axes in the dimension of the examples, or whole('why')"
        )
        for index, (pattern, value) in enumerate(self.rows):
            where = f"batch row {index} ({pattern!r})"
            try:
                compile_pattern(pattern)
            except PatternError as error:
                problems.append(Problem(where, f"is not a regular expression: {error}"))
            if not isinstance(value, P | Whole):
                problems.append(Problem(where, f"has the value {value!r}", fix=fix))
            elif isinstance(value, P) and not _has_examples_once(value):
                what = f"does not split one dimension over {BATCH_AXES}"
                problems.append(Problem(where, what, fix=fix))
        return problems

    def unused(self, paths: list[str], axes: Mapping[str, int]) -> list[Problem]:
        """Return a problem for each row without a match but with a split of tokens on this mesh."""
        used = set(map(self._row, paths))
        problems = []
        for index, row in enumerate(self.rows):
            pattern, value = row
            splits_tokens = any(axes[axis] > 1 for axis in _other_axes(value))
            if splits_tokens and row not in used:
                problem = Problem(
                    f"batch row {index} ({pattern!r})",
                    "matches no array of the batch",
                    detail=f"it has {', '.join(paths)}",
                    fix="correct the pattern",
                )
                problems.append(problem)
        return problems

    def _row(self, path: str) -> tuple[str, P | Whole] | None:
        """Return the first row matching a path; None without one."""
        for row in self.rows:
            if compile_pattern(row[0]).fullmatch(path):
                return row
        return None


def _other_axes(value: P | Whole) -> list[str]:
    """Return the axes of a row's spec other than batch axes."""
    if isinstance(value, Whole):
        return []
    axes: list[str] = []
    for entry in value:
        axes += entry_axes(entry)
    return [axis for axis in axes if axis not in BATCH_AXES]


def _has_examples_once(spec: P) -> bool:
    """Return whether just one dimension is split over batch axes: over all, in their order.

    The examples of all arrays must be split alike.
    """
    dims = _dims_of_examples(spec)
    if len(dims) != 1:
        return False
    axes = entry_axes(spec[dims[0]])
    return tuple(axis for axis in axes if axis in BATCH_AXES) == BATCH_AXES


def _dims_of_examples(spec: P) -> list[int]:
    """Return the dimensions split over a batch axis."""
    dims = []
    for dim, entry in enumerate(spec):
        if not set(BATCH_AXES).isdisjoint(entry_axes(entry)):
            dims.append(dim)
    return dims
