"""Labels of values by their dependence on the examples of a batch.

A program is read at two batch sizes, side by side (`spmd.jaxpr.examples`). A dimension of different
sizes is one of examples, and a constant of different values is a count of them.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence
from typing import Any

from spmd.jaxpr.traced_program import Operation, TracedValue

Pair = tuple[Any, Any]
"""One property of a value or an operation, at both batch sizes."""


class Kind(enum.IntEnum):
    """Dependence of a value on the examples."""

    SHARED = 0
    """The same for all examples: parameters, constants, and statistics of a batch."""
    SUM = 1
    """A sum over the examples of values that depend on one example each."""
    EXAMPLES = 2
    """A part for each example, dependent on that example only."""
    PLACES = 3
    """The place of each example in the batch."""
    MIXED = 4
    """Parts that depend on several examples."""


@dataclasses.dataclass(frozen=True)
class Mix:
    """Violation of the per-example structure by one operation, such as a square of a sum.

    A value after it is no sum over the examples.

    Attributes:
        what: Effect of the operation, as the end of a sentence with it as the subject.
        sums: The sums over examples among its operands, by the operations that sum.
    """

    operation: Operation
    what: str
    sums: frozenset[Operation] = frozenset()


@dataclasses.dataclass(frozen=True)
class Label:
    """Dependence of one value on the examples.

    Attributes:
        dim: The dimension of the examples; None in a loop over examples, where a value is of the
            iteration's example.
        inner: Number of consecutive positions of one example in that dimension; None if unknown.
        degree: The power of the number of examples with which the value grows when a batch is
            repeated: 1 for a sum, 0 for a mean; None if unknown.
        value: The value of all elements of a constant, at both sizes.
        sums: The operations that summed over examples; the value is an element-wise function of
            their results.
        mixes: The violations of the per-example structure before the value.
        columns: The labels of the last dimension's entries, if they are of different kinds.
    """

    kind: Kind = Kind.SHARED
    dim: int | None = None
    inner: int | None = None
    degree: float | None = 0.0
    value: Pair | None = None
    sums: frozenset[Operation] = frozenset()
    mixes: frozenset[Mix] = frozenset()
    columns: "tuple[Label, ...] | None" = None

    @property
    def is_zero(self) -> bool:
        """Whether the value is zero at both sizes."""
        return self.value is not None and self.value == (0, 0)

    @property
    def has_examples(self) -> bool:
        """Whether the value has parts of examples."""
        return self.kind in (Kind.EXAMPLES, Kind.PLACES)

    def replace(self, **changes: Any) -> "Label":
        """Return a label with other attributes."""
        return dataclasses.replace(self, **changes)

    def with_mix(self, operation: Operation, what: str, used: Iterable["Label"] = ()) -> "Label":
        """Return the label with one more mix, of an operation and the sums among its operands."""
        mix = Mix(operation, what, all_sums(used))
        return self.replace(mixes=self.mixes | {mix})


SHARED = Label()


def constant(first: Any, second: Any) -> Label:
    """Return the label of a constant with one value for all of its elements, at both sizes."""
    if first == second or (first != first and second != second):  # NaN is not equal to itself
        return Label(value=(first, second))
    degree = None
    if first and second and second / first > 0:
        degree = math.log2(second / first)
    return Label(value=(first, second), degree=degree)


def varying_dims(values: tuple[TracedValue, TracedValue]) -> list[int]:
    """Return the dimensions of examples: those with another size at another batch size."""
    dims = []
    sizes = zip(values[0].shape, values[1].shape, strict=True)
    for dim, (first, second) in enumerate(sizes):
        if first != second:
            dims.append(dim)
    return dims


def all_mixes(labels: Iterable[Label]) -> frozenset[Mix]:
    """Return the mixes before several values."""
    return frozenset[Mix]().union(*(label.mixes for label in labels))


def all_sums(labels: Iterable[Label]) -> frozenset[Operation]:
    """Return the sums over examples in several values."""
    return frozenset[Operation]().union(*(label.sums for label in labels))


def same_layout(labels: Sequence[Label]) -> bool:
    """Return whether the examples of several values are in the same places."""
    dims = set()
    inner = set()
    for label in labels:
        if label.has_examples:
            dims.add(label.dim)
            inner.add(label.inner)
    inner.discard(None)  # unknown, so it contradicts no other
    return len(dims) <= 1 and len(inner) <= 1


def strongest(labels: Sequence[Label]) -> Label:
    """Return the label of several values together, of degree 0.

    It has the highest of their kinds (`EXAMPLES` for `PLACES`), their mixes, and their layout or
    sums.
    """
    kind = max((label.kind for label in labels), default=Kind.SHARED)
    mixes = all_mixes(labels)
    if kind in (Kind.EXAMPLES, Kind.PLACES):
        layout = _layout(labels)
        return Label(Kind.EXAMPLES, layout.dim, layout.inner, mixes=mixes)
    if kind is Kind.MIXED:
        return Label(kind, mixes=mixes)
    return Label(kind, sums=all_sums(labels), mixes=mixes)


def _layout(labels: Iterable[Label]) -> Label:
    """Return the first label with the largest known `inner`, of those with examples."""
    parted = [label for label in labels if label.has_examples]
    return max(parted, key=lambda label: label.inner or 0)
