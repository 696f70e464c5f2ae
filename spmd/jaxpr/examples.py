"""Dependence of a traced program's results on the examples of a batch, read from its operations.

```python
sizes = read_program(jaxpr_of_4), read_program(jaxpr_of_8)
labels = label_examples(sizes, inputs, counts=(4, 8))
labels[0].kind is Kind.SUM and not labels[0].mixes     # the first result is a sum over the examples
```

Loops, conditions and manual regions are read like any code; a loop over the examples may add up what each of them
gives. A function that is declared to treat each example by itself (`per_example`) is not read.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from spmd.jaxpr.example_rules import ACROSS, ADDED, NUMBER, Operations, Setting, results_of, trusted_result
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
    """Return the scope of what adds a value of a whole microbatch, such as a balance loss, to the sums of a loss."""
    return f"{_DECLARED}{name})"


def per_example(function: F) -> F:
    """Declare that a function treats each example of a batch by itself, so that its code is not read.

    Results with a dimension of examples then depend, for each example, on its own part of the arguments; results
    without one are sums over the examples. Needed where the structure does not tell, such as for a primitive of one's
    own, or for experts that sort the tokens of all examples.

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
    """The program of one batch size has other operations than that of another; the text is where."""


@dataclasses.dataclass
class ExampleLabels:
    """Labels of the results of a program.

    Attributes:
        results: The labels, in order.
        declared: Names of the values of a microbatch that are declared as such → the operation that adds each to a sum.
    """

    results: list[Label]
    declared: dict[str, Operation]


def label_examples(
    programs: tuple[TracedProgram, TracedProgram],
    inputs: Sequence[Label],
    counts: tuple[int, int],
    around: frozenset[str] = frozenset(),
) -> ExampleLabels:
    """Label the results of a program that was traced for two numbers of examples.

    Args:
        inputs: The labels of the program's inputs.
        counts: The numbers of examples.
        around: The mesh axes that split the examples and are manual around the program; a sum over all of them is the
            same on each device.

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
    setting: Setting
    declared: dict[str, Operation]

    def read(self, programs: tuple[TracedProgram, TracedProgram], inputs: Sequence[Label]) -> list[Label]:
        """Return the labels of the results of a program, or of a body."""
        labels = dict(zip(programs[0].inputs, inputs, strict=True))

        def label(pair: tuple[TracedValue, TracedValue]) -> Label:
            known = labels.get(pair[0])
            return _of_constant(pair) if known is None else known

        for operations in _pairs(programs):
            if isinstance(operations, _Trusted):
                given = [label(pair) for pair in operations.inputs]
                labels.update((pair[0], trusted_result(pair, given)) for pair in operations.outputs)
                continue
            given = list(map(label, zip(operations[0].inputs, operations[1].inputs, strict=True)))
            results = self._results(operations, given)
            labels.update(zip(operations[0].outputs, results, strict=True))
        return list(map(label, zip(programs[0].outputs, programs[1].outputs, strict=True)))

    def _results(self, operations: Operations, given: list[Label]) -> list[Label]:
        loops: Mapping[str, Callable[[Operations, list[Label]], list[Label]]] = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "shard_map": self._shard_map,
        }
        name = operations[0].primitive
        results = loops[name](operations, given) if name in loops else results_of(operations, given, self.setting)
        declared = _declared_name(names_of_scopes(operations[0]))
        if not declared:
            return results
        return [self._as_declared(declared, operations[0], result) for result in results]

    def _as_declared(self, name: str, operation: Operation, label: Label) -> Label:
        """Return the label of a value of the microbatch, which its author has declared, times a sum."""
        if label.mixes:
            self.declared.setdefault(name, operation)
        if not label.mixes or (label.kind is Kind.SHARED and not label.sums):
            return label
        return Label(Kind.SUM, degree=1.0, sums=frozenset({operation}))

    def _bodies(self, operations: Operations) -> list[tuple[TracedProgram, TracedProgram]]:
        if len(operations[0].bodies) != len(operations[1].bodies):
            raise UnlikeProgramsError(operations[0].primitive)
        return list(zip(operations[0].bodies, operations[1].bodies, strict=True))

    def _scan(self, operations: Operations, given: list[Label]) -> list[Label]:
        (bodies,) = self._bodies(operations)
        consts, count = operations[0].params["num_consts"], operations[0].params["num_carry"]
        lengths = [operation.params["length"] for operation in operations]
        slices = [_iteration(label) for label in given[consts + count :]]
        carry, results = self._carried(operations, bodies, given[:consts], given[consts : consts + count], slices)
        ys = [_stacked(label, lengths, self.setting) for label in results[count:]]
        return [*carry, *ys]

    def _carried(
        self,
        operations: Operations,
        bodies: tuple[TracedProgram, TracedProgram],
        consts: Sequence[Label],
        carry: Sequence[Label],
        slices: Sequence[Label],
    ) -> tuple[list[Label], list[Label]]:
        """Return the labels of what a loop carries at its end, and of the results of an iteration."""
        loop, first = operations[0], list(carry)
        varies = loop.params.get("length") != operations[1].params.get("length")
        carry = list(carry)
        for _ in range(_ROUNDS):
            results = self.read(bodies, [*consts, *carry, *slices])
            after = []
            for number, (old, new) in enumerate(loop.carried):
                label = self._after(operations, first[number], carry[number], results[number], old, new, varies)
                after.append(label)
            if after == carry:
                break
            carry = after
        return carry, results

    def _after(
        self,
        operations: Operations,
        first: Label,
        before: Label,
        after: Label,
        old: TracedValue,
        new: TracedValue,
        varies: bool,
    ) -> Label:
        """Return the label of a carried value after one more iteration."""
        loop = operations[0]
        if old is new:
            return before
        is_of_iteration = after.has_examples and after.dim is None
        if is_of_iteration or varies:
            if not old.is_float and not after.has_examples:
                return Label(after.kind, after.dim, after.inner, mixes=after.mixes, sums=after.sums)
            adding = adding_operation(loop, old, new)
            if adding is not None and first.kind in (Kind.SHARED, Kind.SUM):
                mixes = frozenset(mix for mix in after.mixes if mix.operation is not adding)
                summed = Label(Kind.SUM, degree=1.0, sums=frozenset({loop}), mixes=before.mixes | mixes)
                return summed if first.is_zero or first.kind is Kind.SUM else summed.with_mix(loop, ADDED)
            what = _ORDERED if is_of_iteration else NUMBER
            mixed = Label(Kind.MIXED, degree=None, mixes=after.mixes)
            return mixed.with_mix(loop, what)
        return _either(loop, before, after)

    def _while(self, operations: Operations, given: list[Label]) -> list[Label]:
        (bodies,) = self._bodies(operations)
        body, condition = (operations[0].params[name] for name in ("body_nconsts", "cond_nconsts"))
        of_condition, consts, start = given[:condition], given[condition : condition + body], given[condition + body :]
        carry, _ = self._carried(operations, bodies, consts, start, [])
        conditions = tuple(read_program(operation.params["cond_jaxpr"]) for operation in operations)
        (goes_on,) = self.read(conditions, [*of_condition, *carry])  # type: ignore[arg-type]
        if goes_on.kind is Kind.SHARED and not goes_on.mixes:
            return carry
        mixed = []
        for old, label, (entered, left) in zip(start, carry, operations[0].carried, strict=True):
            if entered is left:
                mixed.append(old)
                continue
            mixed.append(label.replace(mixes=label.mixes | goes_on.mixes).with_mix(operations[0], ACROSS, [goes_on]))
        return mixed

    def _cond(self, operations: Operations, given: list[Label]) -> list[Label]:
        index, *operands = given
        branches = [self.read(pair, operands) for pair in self._bodies(operations)]
        results = []
        for labels in zip(*branches, strict=True):
            result = labels[0]
            for label in labels[1:]:
                result = _either(operations[0], result, label)
            if index.kind is not Kind.SHARED or index.mixes:
                result = result.replace(mixes=result.mixes | index.mixes, value=None)
                if index.has_examples and result.kind is Kind.SHARED:
                    result = result.replace(kind=Kind.EXAMPLES, dim=None, inner=index.inner)
                elif not index.has_examples:
                    result = result.with_mix(operations[0], "chooses by a sum over examples", [index])
            results.append(result)
        return results

    def _shard_map(self, operations: Operations, given: list[Label]) -> list[Label]:
        (bodies,) = self._bodies(operations)
        parts = 1
        for label, outer, inner in zip(given, operations[0].inputs, bodies[0].inputs, strict=True):
            if label.has_examples and label.dim is not None:
                parts = max(parts, outer.shape[label.dim] // inner.shape[label.dim])
        first, second = self.setting.counts
        inside = _Reader(Setting((first // parts, second // parts), self.setting.around), self.declared)
        labels = inside.read(bodies, given)
        results = []
        for label, pair in zip(labels, zip(operations[0].outputs, operations[1].outputs, strict=True), strict=True):
            is_lost = label.has_examples and label.dim not in varying_dims(pair)
            results.append(label.replace(kind=Kind.MIXED).with_mix(operations[0], ACROSS) if is_lost else label)
        return results


def adding_operation(
    loop: Operation, old: TracedValue, new: TracedValue, adding: Sequence[str] = ADDING
) -> Operation | None:
    """Return the operation by which a loop adds to a value that it carries, if that is all it does with the value.

    Then the order of the iterations makes no difference.
    """
    (body,) = loop.bodies
    users = [operation for operation in body.operations if old in operation.inputs]
    if len(users) != 1 or old in body.outputs:
        return None
    (user,) = users
    if user.primitive == "convert_element_type":
        return adding_operation(loop, user.outputs[0], new, adding)
    return user if user.primitive in adding and new in user.outputs else None


def _either(operation: Operation, one: Label, other: Label) -> Label:
    """Return the label of a value that is one or another."""
    if one == other:
        return one
    labels = [label for label in (one, other) if not label.is_zero]
    if len(labels) == 1:
        return labels[0].replace(value=None)
    result = strongest(labels)
    degrees = {label.degree for label in labels}
    result = result.replace(degree=degrees.pop() if len(degrees) == 1 else None)
    if not same_layout(labels):
        return Label(Kind.MIXED, degree=None, mixes=result.mixes).with_mix(operation, ACROSS)
    if result.kind is Kind.SUM and any(label.kind is not Kind.SUM for label in labels):
        return result.with_mix(operation, ADDED)
    return result


def _iteration(label: Label) -> Label:
    """Return the label of the part of an array that an iteration of a loop has."""
    if not label.has_examples or label.dim is None:
        return label
    return label.replace(dim=label.dim - 1 if label.dim else None, columns=None)


def _stacked(label: Label, lengths: Sequence[int], setting: Setting) -> Label:
    """Return the label of what the iterations of a loop return, stacked."""
    if not label.has_examples:
        return label
    if label.dim is not None:
        return label.replace(dim=label.dim + 1, columns=None)
    return label.replace(dim=0, inner=1 if lengths[0] == setting.counts[0] else label.inner, columns=None)


def _of_constant(pair: tuple[TracedValue, TracedValue]) -> Label:
    """Return the label of a literal, or of an array from outside of the program."""
    values = [value.constant for value in pair]
    if any(value is None for value in values):
        return SHARED
    dims = varying_dims(pair)
    sizes = [np.size(value) for value in values]
    if max(sizes) == 1:
        first, second = (np.asarray(value).reshape(-1)[0].item() for value in values)
        return constant(first, second)
    if not dims:
        return SHARED if max(sizes) > _SMALL or _are_equal(*values) else Label(degree=None)
    if max(sizes) <= _SMALL:
        arrays = [np.asarray(value) for value in values]
        if all((array == array.flat[0]).all() for array in arrays):
            return constant(*(array.flat[0].item() for array in arrays))
    return Label(Kind.PLACES, dims[0], 1)


def _are_equal(one: Any, other: Any) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    return np.array_equal(a, b, equal_nan=bool(np.issubdtype(a.dtype, np.inexact)))


@dataclasses.dataclass(frozen=True)
class _Trusted:
    """A run of operations that are declared to treat each example by itself, as one operation."""

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
            continue
        if isinstance(one, Operation) or isinstance(other, Operation):
            raise UnlikeProgramsError(_where(programs))
        outputs = [_used_after(run, program) for run, program in zip((one, other), programs, strict=True)]
        if len(outputs[0]) != len(outputs[1]):
            raise UnlikeProgramsError(_where(programs))
        inputs = [_from_before(run) for run in (one, other)]
        known = list(zip(*inputs, strict=False))
        yield _Trusted(known, list(zip(*outputs, strict=True)))


def _where(programs: tuple[TracedProgram, TracedProgram]) -> str:
    for one, other in zip(programs[0].operations, programs[1].operations, strict=False):
        if one.primitive != other.primitive:
            return f"{one.primitive} and {other.primitive}"
    return f"{len(programs[0].operations)} and {len(programs[1].operations)} operations"


def _runs(program: TracedProgram) -> list[Operation | list[Operation]]:
    """Return the operations of a program, with runs of those that are not read in lists."""
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
    """Return the values that a run of operations takes, in the order of their first use, without literals."""
    made = {value for operation in run for value in operation.outputs}
    taken = [value for operation in run for value in operation.inputs if value not in made and value.constant is None]
    return list(dict.fromkeys(taken))


def _used_after(run: Sequence[Operation], program: TracedProgram) -> list[TracedValue]:
    """Return the results of a run that are used after it, in the order of their first use."""
    made, inside = {value for operation in run for value in operation.outputs}, set(map(id, run))
    others = [operation for operation in program.operations if id(operation) not in inside]
    used = [value for operation in others for value in operation.inputs] + program.outputs
    return list(dict.fromkeys(value for value in used if value in made))
