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

An array may also be marked where the batch is made, `{"images": images, "centers": whole(centers)}`.
Rows and marks end in one function, `BatchTable.arrays`.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, overload

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import Problem, RuleError, describe_value
from spmd.sharding.mesh import BATCH_AXES, BATCH_SPEC, TOKEN_AXES, entry_axes, spec_axes
from spmd.sharding.optimizer_state import drop_axis
from spmd.sharding.patterns import PatternError, compile_pattern

TOKENS = (
    ("tokens|targets|weights|segments|valid|pairs|reference|old_log_probs|columns", BATCH_SPEC),
)
"""Rows for the arrays `[batch, sequence]` of a language model."""


@dataclasses.dataclass(frozen=True)
class Whole:
    """Value of a row for an array without examples, with the reason.

    Every device and every microbatch has it whole.
    """

    reason: str

    def __str__(self) -> str:
        return f"whole({self.reason!r})"


@functools.partial(jax.tree_util.register_dataclass, data_fields=("value",), meta_fields=("specs",))
@dataclasses.dataclass(frozen=True)
class WholeArrays:
    """Node of a batch with arrays without examples, made by `whole(x)`.

    Every microbatch has them whole. An array that was placed on a mesh stays split as it is.

    Attributes:
        value: The arrays.
        specs: Spec of each array.
    """

    value: Any
    specs: tuple[P, ...]


@overload
def whole(of: str) -> Whole: ...


@overload
def whole(of: Any) -> Any: ...


def whole(of: Any) -> Any:
    """Declare arrays of a batch to be without examples: of a row by a reason, or the arrays given.

    A row of the batch table has a reason, and its arrays are copied to every device. Arrays in a
    batch are marked instead, and read by `.value`; parameters of another plan keep their sharding.

    Args:
        of: A reason; or an array, or a tree of arrays.

    Returns:
        The value of a row; or a node of a batch with the attribute `value`.

    Raises:
        RuleError: The reason is empty, or the tree has no arrays.

    Example:
        >>> print(whole("one graph for all examples"))
        whole('one graph for all examples')
        >>> batch = {"x": jax.numpy.ones((8, 2)), "centers": whole(jax.numpy.ones((3, 2)))}
        >>> {path: array.examples for path, array in BatchTable().arrays(batch).items()}
        {'centers/value': None, 'x': 0}
    """
    if isinstance(of, str) and of.strip():
        return Whole(of)
    leaves = jax.tree.leaves(of)
    if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
        fix = 'whole("one graph for all examples"), or whole(x) of the arrays of a batch'
        what = f"has no reason, and is not made of arrays: {describe_value(of)}"
        raise RuleError("Nothing is declared whole:", [Problem("whole()", what, fix=fix)])
    specs = [_spec_of(leaf) for leaf in leaves]
    return WholeArrays(of, tuple(specs))


def _spec_of(x: Any) -> P:
    """Return the spec of an array that was placed on a mesh; without a split for others."""
    if isinstance(x, jax.core.Tracer):
        return P()
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    return P()


@dataclasses.dataclass(frozen=True)
class BatchArray:
    """Split of one array of a batch.

    Attributes:
        spec: Its spec as an argument of a step.
        examples: Dimension of the examples; None if it is whole.
        is_declared: Whether a row or a mark declares it.
    """

    spec: P
    examples: int | None
    is_declared: bool

    @property
    def compute_spec(self) -> P:
        """Spec for computations: a whole array is split over axes that split no batch."""
        spec = self.spec
        if self.examples is not None:
            return spec
        for axis in ("pipe", *TOKEN_AXES):
            spec = drop_axis(spec, axis)
        return spec


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

    @property
    def has_whole_rows(self) -> bool:
        """Whether a row declares arrays whole."""
        return any(isinstance(value, Whole) for _, value in self.rows)

    def arrays(self, batch: Any) -> dict[str, BatchArray]:
        """Return path → split of each array of a batch, in the order of the tree."""
        found = dict[str, BatchArray]()
        for path, node in tree.flatten(batch, is_leaf=_is_marked).items():
            if _is_marked(node):
                found.update(_marked_arrays(path, node))
                continue
            spec = self.spec(path, getattr(node, "ndim", 0))
            is_declared = self.value(path) is not None
            found[path] = BatchArray(spec, self.examples(path), is_declared)
        return found

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


def _is_marked(node: Any) -> bool:
    return isinstance(node, WholeArrays)


def _marked_arrays(path: str, node: WholeArrays) -> Iterator[tuple[str, BatchArray]]:
    """Yield path and split of each array of a marked node at a path of a batch."""
    inner = tree.flatten(node)
    for name, spec in zip(inner, node.specs, strict=True):
        full_path = f"{path}/{name}" if path else name
        yield full_path, BatchArray(spec, None, is_declared=True)


def _other_axes(value: P | Whole) -> list[str]:
    """Return the axes of a row's spec other than batch axes."""
    if isinstance(value, Whole):
        return []
    return [axis for axis in spec_axes(value) if axis not in BATCH_AXES]


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
