"""Dependence of a traced program's results on the examples of a batch, from its operations.

```python
sizes = read_program(jaxpr_of_4), read_program(jaxpr_of_8)
labels = label_examples(sizes, inputs, counts=(4, 8))
labels[0].kind is Kind.SUM and not labels[0].mixes     # the first result is a sum over the examples
```

Loops, conditions and manual regions are read like any code; a loop over the examples may add up one
value per example. A function that is declared to treat each example by itself (`per_example`) is
not read.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend import source_info_util

from spmd.jaxpr.example_labels import (
    SHARED,
    Kind,
    Label,
    constant,
    same_layout,
    strongest,
    varying_dims,
)
from spmd.jaxpr.example_rules import (
    ACROSS,
    ADDED,
    NUMBER,
    Operations,
    Setting,
    results_of,
    trusted_result,
)
from spmd.jaxpr.traced_program import Operation, TracedProgram, TracedValue, read_program

# The operations of a declared function belong to its own lines, and to the line that calls it.
source_info_util.register_exclusion(__file__)

_PER_EXAMPLE = "per_example(declared)"
F = TypeVar("F", bound=Callable)

_DECLARED = "of_microbatch("
ADDING = ("add", "add_any")
_ROUNDS = 20
_ORDERED = "goes through the examples in order"
_SMALL = 1 << 16


def declared_scope(name: str) -> str:
    """Return the scope for adding a value of a whole microbatch to the sums of a loss.

    A balance loss is such a value.
    """
    return f"{_DECLARED}{name})"


def per_example(function: F) -> F:
    """Declare a function to treat each example of a batch by itself; its code is not read.

    Results with a dimension of examples then depend, for each example, on its own part of the
    arguments; results without one are sums over the examples. Needed where the operations do not
    show this, such as for a custom primitive, or for experts that sort the tokens of all examples.

    Example:
        >>> squares = per_example(lambda x: (x**2).sum())
        >>> float(squares(np.ones(3)))
        3.0
    """

    @functools.wraps(function)
    def declared(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(_PER_EXAMPLE):
            return function(*args, **kwargs)

    return declared  # type: ignore[return-value]


class UnlikeProgramsError(ValueError):
    """Different operations in the programs of two batch sizes; the message says where."""


@dataclasses.dataclass
class ExampleLabels:
    """Labels of the results of a program.

    Attributes:
        results: The labels, in order.
        declared: Names of the values of a microbatch that are declared as such → the operation that
            adds each to a sum.
    """

    results: list[Label]
    declared: dict[str, Operation]


def label_examples(
    programs: tuple[TracedProgram, TracedProgram],
    inputs: Sequence[Label],
    counts: tuple[int, int],
    around: frozenset[str] = frozenset(),
) -> ExampleLabels:
    """Label the results of a program traced for two numbers of examples.

    Args:
        inputs: The labels of the program's inputs.
        counts: The numbers of examples.
        around: The mesh axes that split the examples and are manual around the program; a sum over
            all of them is the same on each device.

    Raises:
        UnlikeProgramsError: The two programs have different operations.
    """
    reader = _Reader(Setting(counts, around), {})
    return ExampleLabels(reader.read(programs, inputs), reader.declared)


def input_label(dim: int | None) -> Label:
    """Return the label of an input with its examples in a dimension; None if it has none."""
    if dim is None:
        return SHARED
    return Label(Kind.EXAMPLES, dim, 1)


def names_of_scopes(operation: Operation) -> str:
    """Return the scopes of an operation, the outermost first."""
    stacks = [str(equation.source_info.name_stack) for equation in operation.equations]
    return "/".join(reversed(stacks))


def _declared_name(scopes: str) -> str:
    """Return the name in the innermost `declared_scope`; empty if there is none."""
    _, found, rest = scopes.rpartition(_DECLARED)
    if not found:
        return ""
    return rest.partition(")")[0]


@dataclasses.dataclass
class _Reader:
    """Reader of a program and of the bodies in it."""

    setting: Setting
    declared: dict[str, Operation]

    def read(
        self, programs: tuple[TracedProgram, TracedProgram], inputs: Sequence[Label]
    ) -> list[Label]:
        """Return the labels of the results of a program, or of a body."""
        labels = dict(zip(programs[0].inputs, inputs, strict=True))
        for operations in _pairs(programs):
            if isinstance(operations, _Trusted):
                given = _labels_of(operations.inputs, labels)
                for pair in operations.outputs:
                    labels[pair[0]] = trusted_result(pair, given)
                continue
            operands = zip(operations[0].inputs, operations[1].inputs, strict=True)
            given = _labels_of(operands, labels)
            results = self._results(operations, given)
            labels.update(zip(operations[0].outputs, results, strict=True))
        outputs = zip(programs[0].outputs, programs[1].outputs, strict=True)
        return _labels_of(outputs, labels)

    def _results(self, operations: Operations, given: list[Label]) -> list[Label]:
        """Return the labels of an operation's results, in a declared scope or not."""
        results = self._undeclared_results(operations, given)
        declared = _declared_name(names_of_scopes(operations[0]))
        if not declared:
            return results
        return [self._as_declared(declared, operations[0], result) for result in results]

    def _undeclared_results(self, operations: Operations, given: list[Label]) -> list[Label]:
        """Return the labels of an operation's results, by its primitive."""
        name = operations[0].primitive
        if name == "scan":
            return self._scan(operations, given)
        if name == "while":
            return self._while(operations, given)
        if name == "cond":
            return self._cond(operations, given)
        if name == "shard_map":
            return self._shard_map(operations, given)
        return results_of(operations, given, self.setting)

    def _as_declared(self, name: str, operation: Operation, label: Label) -> Label:
        """Return the label of a declared value of the microbatch, times a sum."""
        if label.mixes:
            self.declared.setdefault(name, operation)
        if not label.mixes or (label.kind is Kind.SHARED and not label.sums):
            return label
        return Label(Kind.SUM, degree=1.0, sums=frozenset({operation}))

    def _bodies(self, operations: Operations) -> list[tuple[TracedProgram, TracedProgram]]:
        """Return the bodies of an operation at both batch sizes."""
        if len(operations[0].bodies) != len(operations[1].bodies):
            raise UnlikeProgramsError(operations[0].primitive)
        return list(zip(operations[0].bodies, operations[1].bodies, strict=True))

    def _scan(self, operations: Operations, given: list[Label]) -> list[Label]:
        """Return the labels of the results of a `scan`."""
        (bodies,) = self._bodies(operations)
        first = operations[0].params["num_consts"]
        count = operations[0].params["num_carry"]
        consts = given[:first]
        start = given[first : first + count]
        slices = list(map(_iteration, given[first + count :]))
        carry, results = self._carried(operations, bodies, consts, start, slices)
        is_over_examples = operations[0].params["length"] == self.setting.counts[0]
        ys = [_stacked(label, is_over_examples) for label in results[count:]]
        return [*carry, *ys]

    def _carried(
        self,
        operations: Operations,
        bodies: tuple[TracedProgram, TracedProgram],
        consts: Sequence[Label],
        carry: Sequence[Label],
        slices: Sequence[Label],
    ) -> tuple[list[Label], list[Label]]:
        """Return the labels of carried values after a loop, and of an iteration's results."""
        loop = operations[0]
        varies = loop.params.get("length") != operations[1].params.get("length")
        first = list(carry)
        carry = list(carry)
        # Labels may change in each iteration: repeat to a fixed point.
        for _ in range(_ROUNDS):
            results = self.read(bodies, [*consts, *carry, *slices])
            after = []
            for number, (old, new) in enumerate(loop.carried):
                if old is new:
                    after.append(carry[number])
                    continue
                step = _Step(loop, old, new, first[number], carry[number], results[number])
                after.append(step.label(varies))
            if after == carry:
                break
            carry = after
        return carry, results

    def _while(self, operations: Operations, given: list[Label]) -> list[Label]:
        """Return the labels of the results of a `while` loop."""
        (bodies,) = self._bodies(operations)
        of_condition = operations[0].params["cond_nconsts"]
        of_body = operations[0].params["body_nconsts"]
        consts = given[of_condition : of_condition + of_body]
        start = given[of_condition + of_body :]
        carry, _ = self._carried(operations, bodies, consts, start, [])
        first, second = operations
        conditions = (
            read_program(first.params["cond_jaxpr"]),
            read_program(second.params["cond_jaxpr"]),
        )
        (goes_on,) = self.read(conditions, [*given[:of_condition], *carry])
        if goes_on.kind is Kind.SHARED and not goes_on.mixes:
            return carry
        results = []
        for old, label, (entered, left) in zip(start, carry, first.carried, strict=True):
            if entered is left:
                results.append(old)
                continue
            mixed = label.replace(mixes=label.mixes | goes_on.mixes)
            results.append(mixed.with_mix(first, ACROSS, [goes_on]))
        return results

    def _cond(self, operations: Operations, given: list[Label]) -> list[Label]:
        """Return the labels of the results of a condition."""
        index, *operands = given
        branches = [self.read(pair, operands) for pair in self._bodies(operations)]
        results = []
        for labels in zip(*branches, strict=True):
            result = labels[0]
            for label in labels[1:]:
                result = _either(operations[0], result, label)
            results.append(_chosen(operations[0], index, result))
        return results

    def _shard_map(self, operations: Operations, given: list[Label]) -> list[Label]:
        """Return the labels of the results of a manual region: examples are split over devices."""
        (bodies,) = self._bodies(operations)
        parts = 1
        for label, outer, inner in zip(given, operations[0].inputs, bodies[0].inputs, strict=True):
            if label.has_examples and label.dim is not None:
                parts = max(parts, outer.shape[label.dim] // inner.shape[label.dim])
        first, second = self.setting.counts
        setting = Setting((first // parts, second // parts), self.setting.around)
        labels = _Reader(setting, self.declared).read(bodies, given)
        results = []
        outputs = zip(operations[0].outputs, operations[1].outputs, strict=True)
        for label, pair in zip(labels, outputs, strict=True):
            if label.has_examples and label.dim not in varying_dims(pair):
                label = label.replace(kind=Kind.MIXED).with_mix(operations[0], ACROSS)
            results.append(label)
        return results


def _labels_of(
    pairs: Iterable[tuple[TracedValue, TracedValue]], labels: Mapping[TracedValue, Label]
) -> list[Label]:
    """Return the labels of values; those without one are constants."""
    found = []
    for pair in pairs:
        label = labels.get(pair[0])
        if label is None:
            label = _of_constant(pair)
        found.append(label)
    return found


@dataclasses.dataclass(frozen=True)
class _Step:
    """One more iteration of a loop, for one carried value.

    Attributes:
        old: The value at the start of an iteration.
        new: The value at its end.
        first: The label before the loop.
        before: The label at the start of this iteration.
        after: The label of the body's result.
    """

    loop: Operation
    old: TracedValue
    new: TracedValue
    first: Label
    before: Label
    after: Label

    def label(self, varies: bool) -> Label:
        """Return the label of the value after the iteration.

        Args:
            varies: Whether the number of iterations depends on that of examples.
        """
        after = self.after
        is_of_iteration = after.has_examples and after.dim is None
        if not is_of_iteration and not varies:
            return _either(self.loop, self.before, after)
        if not self.old.is_float and not after.has_examples:
            return Label(after.kind, after.dim, after.inner, mixes=after.mixes, sums=after.sums)
        adding = adding_operation(self.loop, self.old, self.new)
        if adding is not None and self.first.kind in (Kind.SHARED, Kind.SUM):
            return self._summed(adding)
        mixed = Label(Kind.MIXED, degree=None, mixes=after.mixes)
        if is_of_iteration:
            return mixed.with_mix(self.loop, _ORDERED)
        return mixed.with_mix(self.loop, NUMBER)

    def _summed(self, adding: Operation) -> Label:
        """Return the label of a running sum; the operation `adding` is no mix."""
        mixes = set(self.before.mixes)
        for mix in self.after.mixes:
            if mix.operation is not adding:
                mixes.add(mix)
        sums = frozenset({self.loop})
        summed = Label(Kind.SUM, degree=1.0, sums=sums, mixes=frozenset(mixes))
        if self.first.is_zero or self.first.kind is Kind.SUM:
            return summed
        return summed.with_mix(self.loop, ADDED)


def _chosen(operation: Operation, index: Label, result: Label) -> Label:
    """Return the label of a condition's result, from its index and the label of its branches."""
    if index.kind is Kind.SHARED and not index.mixes:
        return result
    result = result.replace(mixes=result.mixes | index.mixes, value=None)
    if not index.has_examples:
        return result.with_mix(operation, "chooses by a sum over examples", [index])
    if result.kind is Kind.SHARED:
        return result.replace(kind=Kind.EXAMPLES, dim=None, inner=index.inner)
    return result


def adding_operation(
    loop: Operation, old: TracedValue, new: TracedValue, adding: Sequence[str] = ADDING
) -> Operation | None:
    """Return a loop's addition to a carried value; None unless it is the value's only use.

    If there is one, the order of the iterations makes no difference.
    """
    (body,) = loop.bodies
    users = [operation for operation in body.operations if old in operation.inputs]
    if len(users) != 1 or old in body.outputs:
        return None
    (user,) = users
    if user.primitive == "convert_element_type":
        return adding_operation(loop, user.outputs[0], new, adding)
    if user.primitive in adding and new in user.outputs:
        return user
    return None


def _either(operation: Operation, one: Label, other: Label) -> Label:
    """Return the label of a choice between two values."""
    if one == other:
        return one
    labels = [label for label in (one, other) if not label.is_zero]
    if len(labels) == 1:
        return labels[0].replace(value=None)
    result = strongest(labels)
    degrees = {label.degree for label in labels}
    degree = None
    if len(degrees) == 1:
        (degree,) = degrees
    result = result.replace(degree=degree)
    if not same_layout(labels):
        return Label(Kind.MIXED, degree=None, mixes=result.mixes).with_mix(operation, ACROSS)
    if result.kind is Kind.SUM and any(label.kind is not Kind.SUM for label in labels):
        return result.with_mix(operation, ADDED)
    return result


def _iteration(label: Label) -> Label:
    """Return the label of one iteration's part of an array."""
    if not label.has_examples or label.dim is None:
        return label
    if label.dim == 0:  # a loop over examples
        return label.replace(dim=None, columns=None)
    return label.replace(dim=label.dim - 1, columns=None)


def _stacked(label: Label, is_over_examples: bool) -> Label:
    """Return the label of the stacked results of a loop's iterations."""
    if not label.has_examples:
        return label
    if label.dim is not None:
        return label.replace(dim=label.dim + 1, columns=None)
    if is_over_examples:
        return label.replace(dim=0, inner=1, columns=None)
    return label.replace(dim=0, columns=None)


def _of_constant(pair: tuple[TracedValue, TracedValue]) -> Label:
    """Return the label of a literal, or of an array from outside of the program."""
    one, other = (pair[0].constant, pair[1].constant)
    if one is None or other is None:
        return SHARED
    dims = varying_dims(pair)
    size = max(np.size(one), np.size(other))
    if size == 1:
        return constant(_first_element(one), _first_element(other))
    if not dims:
        if size > _SMALL or _are_equal(one, other):
            return SHARED
        return Label(degree=None)
    if size <= _SMALL and _is_uniform(one) and _is_uniform(other):
        return constant(_first_element(one), _first_element(other))
    return Label(Kind.PLACES, dims[0], 1)


def _first_element(value: Any) -> Any:
    """Return the first element of an array as a Python number."""
    return np.asarray(value).flat[0].item()


def _is_uniform(value: Any) -> bool:
    """Return whether all elements of an array are equal."""
    array = np.asarray(value)
    return bool((array == array.flat[0]).all())


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two arrays are equal; NaN is equal to itself."""
    first = np.asarray(one)
    is_inexact = bool(np.issubdtype(first.dtype, np.inexact))
    return np.array_equal(first, np.asarray(other), equal_nan=is_inexact)


@dataclasses.dataclass(frozen=True)
class _Trusted:
    """A run of operations declared `per_example`, as one operation."""

    inputs: list[tuple[TracedValue, TracedValue]]
    outputs: list[tuple[TracedValue, TracedValue]]


def _pairs(programs: tuple[TracedProgram, TracedProgram]) -> Iterator[Operations | _Trusted]:
    """Yield the operations of two programs in pairs."""
    runs = [_runs(program) for program in programs]
    if len(runs[0]) != len(runs[1]):
        raise UnlikeProgramsError(_where(programs))
    for one, other in zip(*runs, strict=True):
        if isinstance(one, Operation) and isinstance(other, Operation):
            if one.primitive != other.primitive or len(one.inputs) != len(other.inputs):
                raise UnlikeProgramsError(f"{one.primitive} and {other.primitive}")
            yield one, other
        elif isinstance(one, Operation) or isinstance(other, Operation):
            raise UnlikeProgramsError(_where(programs))
        else:
            yield _trusted(programs, one, other)


def _trusted(
    programs: tuple[TracedProgram, TracedProgram],
    one: Sequence[Operation],
    other: Sequence[Operation],
) -> _Trusted:
    """Return a run of declared operations of two programs as one operation."""
    first_outputs = _used_after(one, programs[0])
    second_outputs = _used_after(other, programs[1])
    if len(first_outputs) != len(second_outputs):
        raise UnlikeProgramsError(_where(programs))
    inputs = list(zip(_from_before(one), _from_before(other), strict=False))
    outputs = list(zip(first_outputs, second_outputs, strict=True))
    return _Trusted(inputs, outputs)


def _where(programs: tuple[TracedProgram, TracedProgram]) -> str:
    """Return the first difference of two programs as a text."""
    for one, other in zip(programs[0].operations, programs[1].operations, strict=False):
        if one.primitive != other.primitive:
            return f"{one.primitive} and {other.primitive}"
    return f"{len(programs[0].operations)} and {len(programs[1].operations)} operations"


def _runs(program: TracedProgram) -> list[Operation | list[Operation]]:
    """Return the operations of a program, with each run of `per_example` ones in a list."""
    runs: list[Operation | list[Operation]] = []
    for operation in program.operations:
        if _PER_EXAMPLE not in names_of_scopes(operation):
            runs.append(operation)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(operation)
        else:
            runs.append([operation])
    return runs


def _from_before(run: Sequence[Operation]) -> list[TracedValue]:
    """Return the operands of a run of operations, in the order of their first use.

    Literals are not among them.
    """
    made = _made_in(run)
    taken: dict[TracedValue, None] = {}
    for operation in run:
        for value in operation.inputs:
            if value not in made and value.constant is None:
                taken[value] = None
    return list(taken)


def _used_after(run: Sequence[Operation], program: TracedProgram) -> list[TracedValue]:
    """Return the results of a run with uses outside of it, in the order of their first use."""
    inside = set(map(id, run))
    used: list[TracedValue] = []
    for operation in program.operations:
        if id(operation) not in inside:
            used += operation.inputs
    used += program.outputs
    made = _made_in(run)
    return list(dict.fromkeys(value for value in used if value in made))


def _made_in(run: Iterable[Operation]) -> set[TracedValue]:
    """Return the results of all operations of a run."""
    made = set[TracedValue]()
    for operation in run:
        made.update(operation.outputs)
    return made
