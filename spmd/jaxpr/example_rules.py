"""Rules of primitives: the labels of an operation's results from those of its operands."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from spmd.jaxpr.example_labels import (
    SHARED,
    Kind,
    Label,
    all_mixes,
    all_sums,
    constant,
    same_layout,
    strongest,
    varying_dims,
)
from spmd.jaxpr.propagation import ELEMENTWISE
from spmd.jaxpr.traced_program import Operation, TracedValue
from spmd.sharding.mesh import BATCH_AXES

ORDER = "combines parts of different examples"
PLACE = "uses the place of an example in the batch"
ACROSS = "computes one result of several examples"
NONLINEAR = "is no linear function of a sum over examples"
ADDED = "adds to a sum over examples what is no such sum"
NUMBER = "depends on the number of examples"
UNKNOWN = "is not known, so its results may be of several examples"

Operations = tuple[Operation, Operation]
"""One operation at both batch sizes."""
Rule = Callable[[Operations, Sequence[Label], "Setting"], list[Label]]


@dataclasses.dataclass(frozen=True)
class Setting:
    """Batch sizes and manual mesh axes of a program.

    Attributes:
        counts: The numbers of examples.
        around: The mesh axes around the program that split examples and are manual.
    """

    counts: tuple[int, int]
    around: frozenset[str]


# Properties of labels and operations.


def _has_kind(labels: Iterable[Label], kind: Kind) -> bool:
    return any(label.kind is kind for label in labels)


def _is_plain(label: Label) -> bool:
    """Return whether a value is the same for all examples, without a mix before it."""
    return label.kind is Kind.SHARED and not label.mixes


def _have_one_value(labels: Iterable[Label]) -> bool:
    """Return whether several values are constants of one value."""
    values = {label.value for label in labels}
    return len(values) == 1 and None not in values


def _dim_of(label: Label) -> int | None:
    """Return the dimension of the examples; None for a value without one."""
    if not label.has_examples:
        return None
    return label.dim


def _input_pair(operations: Operations, number: int) -> tuple[TracedValue, TracedValue]:
    """Return an operand at both batch sizes."""
    return operations[0].inputs[number], operations[1].inputs[number]


def _output_pair(operations: Operations, number: int) -> tuple[TracedValue, TracedValue]:
    """Return a result at both batch sizes."""
    return operations[0].outputs[number], operations[1].outputs[number]


def _sizes(pair: tuple[TracedValue, TracedValue], dim: int) -> tuple[int, int]:
    """Return the sizes of a dimension at both batch sizes."""
    return pair[0].shape[dim], pair[1].shape[dim]


def _others(rank: int, removed: Container[int]) -> list[int]:
    """Return the dimensions of an array, without some."""
    return [dim for dim in range(rank) if dim not in removed]


# Results of mixing.


def _mixed(operations: Operations, labels: Sequence[Label], what: str) -> Label:
    """Return the label of a value with parts of several examples each."""
    mixed = Label(Kind.MIXED, degree=None, mixes=all_mixes(labels))
    return mixed.with_mix(operations[0], what, labels)


def _together(operations: Operations, labels: Sequence[Label]) -> Label:
    """Return the label of several operands together, element by element, without regard to sums."""
    result = strongest(labels)
    first = operations[0]
    if result.kind is Kind.MIXED:
        return result
    if _has_kind(labels, Kind.PLACES):
        result = result.with_mix(first, PLACE, labels)
    if not same_layout(labels):
        return Label(Kind.MIXED, mixes=result.mixes).with_mix(first, ORDER, labels)
    return result


def _nonlinear(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label any function, element by element."""
    result = _together(operations, labels)
    if _has_kind(labels, Kind.SUM):
        result = _nonlinear_in_sum(operations, result, labels)
    result = result.replace(degree=_degree_of(operations[0], labels))
    if result.degree is None and all(label.degree is not None for label in labels):
        result = result.with_mix(operations[0], NUMBER, labels)
    return [result] * len(operations[0].outputs)


def _nonlinear_in_sum(operations: Operations, result: Label, labels: Sequence[Label]) -> Label:
    """Return the label of a result after a nonlinear function of a sum over examples."""
    if result.kind is Kind.SUM:
        result = result.replace(kind=Kind.SHARED)
    return result.with_mix(operations[0], NONLINEAR, labels)


_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0, "abs": 1.0, "cbrt": 1 / 3}
_SIGNS = ("sign", "lt", "gt", "le", "ge", "eq", "ne", "is_finite")


def _degree_of(operation: Operation, labels: Sequence[Label]) -> float | None:
    """Return the degree of an element-wise function of values."""
    degrees = []
    for label in labels:
        if label.is_zero:
            continue
        if label.degree is None:
            return None
        degrees.append(label.degree)
    if not any(degrees):
        return 0.0
    name = operation.primitive
    if name in ("max", "min", "clamp"):  # a guard, such as max(count, 1), is one for small batches
        return max(degrees)
    if name in _SIGNS:
        return 0.0
    if len(degrees) > 1:
        return None
    (degree,) = degrees
    if name in _POWERS:
        return degree * _POWERS[name]
    if name == "integer_pow":
        return degree * operation.params["y"]
    return None


def _linear(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a linear function of one operand, element by element."""
    return [labels[0]] * len(operations[0].outputs)


def _same(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label results equal to the operands."""
    return list(labels)


def _convert(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a conversion of dtypes; one from floats to integers rounds."""
    (label,) = labels
    rounds = operations[0].inputs[0].is_float and not operations[0].outputs[0].is_float
    if rounds and label.kind is Kind.SUM:
        return _nonlinear(operations, labels, setting)
    if label.value is not None and not rounds:
        first, second = label.value
        return [constant(first * 1, second * 1)]  # a flag becomes a number
    return [label]


def _divided(a: Any, b: Any) -> Any:
    if not b:
        return math.nan
    return a / b


def _integer_power(a: Any, y: int) -> Any:
    if not a and y <= 0:
        return math.nan
    return a**y


def _square_root(a: Any) -> Any:
    if a >= 0:
        return math.sqrt(a)
    return math.nan


def _inverse_square_root(a: Any) -> Any:
    if a > 0:
        return 1 / math.sqrt(a)
    return math.nan


_FOLDED: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "max": max,
    "min": min,
    "div": _divided,
    "integer_pow": _integer_power,
    "sqrt": _square_root,
    "rsqrt": _inverse_square_root,
    "lt": operator.lt,
    "gt": operator.gt,
    "le": operator.le,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
"""Functions of constants."""


def _fold(operations: Operations, labels: Sequence[Label]) -> Label | None:
    """Return the label of a function of constants; None for any other operation."""
    name = operations[0].primitive
    if name not in _FOLDED:
        return None
    firsts = []
    seconds = []
    for label in labels:
        if label.value is None:
            return None
        first, second = label.value
        firsts.append(first)
        seconds.append(second)
    function = _FOLDED[name]
    if name == "integer_pow":
        function = functools.partial(function, y=operations[0].params["y"])
    return constant(function(*firsts), function(*seconds))


def _add(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label sums and differences, and choices by a condition independent of the examples."""
    return [_added(operations, labels)] * len(operations[0].outputs)


def _as_sum(label: Label) -> Label:
    """Return the label of a constant number of examples as a sum of ones."""
    if label.kind is Kind.SHARED and label.value is not None and label.degree == 1:
        return label.replace(kind=Kind.SUM, value=None)
    return label


def _added(operations: Operations, labels: Sequence[Label]) -> Label:
    """Return the label of a sum of several operands, element by element."""
    counted = [label for label in labels if not label.is_zero]
    if _has_kind(counted, Kind.SUM):
        counted = list(map(_as_sum, counted))
    if not counted:
        return constant(0, 0)
    if len(counted) == 1 and operations[0].primitive != "sub":
        return counted[0].replace(value=None)
    result = _together(operations, counted)
    kinds = {label.kind for label in counted}
    if Kind.SUM in kinds and len(kinds) > 1:
        result = result.with_mix(operations[0], ADDED, counted)
    degrees = set[float]()
    for label in counted:
        if label.degree is None:
            return result.replace(degree=None)
        degrees.add(label.degree)
    if len(degrees) > 1 and result.kind is Kind.EXAMPLES:
        return result.replace(degree=None).with_mix(operations[0], NUMBER, counted)
    return result.replace(degree=max(degrees))


def _mul(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a product, element by element."""
    left, right = labels
    if left.is_zero or right.is_zero:
        return [constant(0, 0)]
    return [_product(operations, left, right, 1)]


def _div(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a quotient, element by element."""
    left, right = labels
    if left.is_zero:
        return [left]
    return [_product(operations, left, right, -1)]


def _product(operations: Operations, left: Label, right: Label, power: int) -> Label:
    """Return the label of a product (`power` 1) or of a quotient (−1), element by element."""
    if power == 1 and left.kind is right.kind is Kind.SHARED:
        if left.degree:
            left = _as_sum(left)
        else:
            right = _as_sum(right)
    labels = (left, right)
    result = _together(operations, labels)
    is_divisor = power == -1 and right.kind is Kind.SUM
    if _has_kind(labels, Kind.SUM) and (is_divisor or not _has_kind(labels, Kind.SHARED)):
        result = _nonlinear_in_sum(operations, result, labels)
    return result.replace(degree=_degree_of_product(left, right, power))


def _degree_of_product(left: Label, right: Label, power: int = 1) -> float | None:
    """Return the degree of a product (`power` 1) or of a quotient (−1)."""
    if left.degree is None or right.degree is None:
        return None
    return left.degree + power * right.degree


def _select(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a choice between cases, element by element."""
    which, *cases = labels
    if which.value is not None and which.value[0] == which.value[1]:
        return [cases[int(which.value[0])]]
    if _have_one_value(cases) and which.kind is Kind.SHARED:
        return [cases[0]]
    if _is_plain(which):
        return _add(operations, cases, setting)
    if _has_kind(labels, Kind.SUM):
        return _nonlinear(operations, labels, setting)
    added = _added(operations, [case.replace(value=None) for case in cases])
    result = _together(operations, [which, *cases])
    return [result.replace(degree=added.degree, mixes=result.mixes | added.mixes)]


# Shapes and layouts.


def _moved(label: Label, dim: int | None) -> Label:
    """Return the label with the examples in another dimension."""
    return label.replace(dim=dim, columns=None)


def _broadcast(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a broadcast: the dimension of the examples is moved."""
    label = labels[0]
    dim = _dim_of(label)
    if dim is None:
        return [label]
    return [_moved(label, operations[0].params["broadcast_dimensions"][dim])]


def _transpose(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a transpose: the dimension of the examples is moved."""
    (label,) = labels
    dim = _dim_of(label)
    if dim is None:
        return [label]
    return [_moved(label, operations[0].params["permutation"].index(dim))]


def _dropped(label: Label, axes: Sequence[int]) -> Label:
    """Return the label of a value without some dimensions other than the examples' dimension."""
    dim = _dim_of(label)
    if dim is None:
        return label
    return _moved(label, dim - _count_below(dim, axes))


def _count_below(dim: int, dims: Iterable[int]) -> int:
    """Return the number of dimensions before one."""
    return sum(other < dim for other in dims)


def _squeeze(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label an array without some dimensions of size 1."""
    return [_dropped(labels[0], operations[0].params["dimensions"])]


def _reshape(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a reshape by the stride of an example: the elements from one example to the next."""
    (label, *_) = labels
    if _dim_of(label) is None:
        return [label]
    dims = varying_dims(_output_pair(operations, 0))
    if len(dims) == 1:
        (dim,) = dims
        first = _inner_after(operations[0], label, dim, setting.counts[0])
        second = _inner_after(operations[1], label, dim, setting.counts[1])
        if first == second and first != 0:
            return [_reshaped(operations, label, dim, first)]
    return [_mixed(operations, labels, "splits the dimension of examples into groups")]


def _inner_after(operation: Operation, label: Label, dim: int, count: int) -> int | None:
    """Return `inner` after a reshape, with the examples in a dimension.

    It is None if unknown, and 0 if the dimension is no whole number of repetitions of all examples.
    """
    if label.inner is None or label.dim is None:
        return None
    old = operation.inputs[0].shape
    new = operation.outputs[0].shape
    stride = label.inner * math.prod(old[label.dim + 1 :])
    inner, rest = divmod(stride, math.prod(new[dim + 1 :]))
    if rest or new[dim] % (count * inner):
        return 0
    return inner


def _reshaped(operations: Operations, label: Label, dim: int, inner: int | None) -> Label:
    """Return the label after a reshape, with the examples in a dimension.

    Places are kept where each example is one position; elsewhere they are values of examples.
    """
    moved = label.replace(dim=dim, inner=inner, columns=None)
    if label.kind is Kind.EXAMPLES or inner == label.inner == 1:
        return moved
    return moved.replace(kind=Kind.EXAMPLES).with_mix(operations[0], PLACE)


def _along(name: str) -> Rule:
    """Return the rule of an operation along one dimension; `name` is the parameter with it."""

    def rule(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
        axes = operations[0].params[name]
        if not isinstance(axes, tuple):
            axes = (axes,)
        result = labels[0]
        is_linear = operations[0].primitive in ("cumsum", "rev")
        if not is_linear:
            result = _nonlinear(operations, labels, setting)[0]
        if result.kind is Kind.EXAMPLES and result.dim in axes:
            result = _mixed(operations, [result], "goes along the dimension of examples")
        return [result] * len(operations[0].outputs)

    return rule


def _last(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label operations along the last dimension or the last two: top-k, FFT, linear algebra."""
    (result, *_) = _nonlinear(operations, labels, setting)
    rank = len(operations[0].inputs[0].shape)
    along = 2
    if operations[0].primitive.endswith(("top_k", "fft")):
        along = 1
    if result.kind is Kind.EXAMPLES and result.dim is not None and result.dim >= rank - along:
        result = _mixed(operations, [result], "goes along the dimension of examples")
    return [result] * len(operations[0].outputs)


def _is_block(label: Label, start: Sequence[int], size: Sequence[int], setting: Setting) -> bool:
    """Return whether a part of the examples' dimension is whole repetitions of all examples.

    It must be at both batch sizes.
    """
    if label.inner is None:
        return False
    for first, length, count in zip(start, size, setting.counts, strict=True):
        period = count * label.inner
        if first % period or length % period or length <= 0:
            return False
    return True


def _slice(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a slice: it must be whole repetitions of all examples."""
    (label,) = labels
    dim = _dim_of(label)
    if dim is not None and not _slices_blocks(operations, label, dim, setting):
        return [_mixed(operations, labels, "takes some of the examples")]
    return [label.replace(columns=None)]


def _slices_blocks(operations: Operations, label: Label, dim: int, setting: Setting) -> bool:
    """Return whether a slice takes the whole dimension of examples, or whole repetitions of all."""
    size = _sizes(_output_pair(operations, 0), dim)
    if size == _sizes(_input_pair(operations, 0), dim):
        return True
    strides = operations[0].params["strides"]
    if strides is not None and strides[dim] != 1:
        return False
    first, second = operations
    start = (first.params["start_indices"][dim], second.params["start_indices"][dim])
    return _is_block(label, start, size, setting)


def _split(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label the parts of an array: each must be whole repetitions of all examples."""
    (label,) = labels
    axis = operations[0].params["axis"]
    is_along_examples = label.has_examples and label.dim == axis
    results = []
    start = (0, 0)
    for number in range(len(operations[0].outputs)):
        size = _sizes(_output_pair(operations, number), axis)
        if is_along_examples and not _is_block(label, start, size, setting):
            results.append(_mixed(operations, labels, "takes some of the examples"))
        else:
            results.append(label.replace(columns=None))
        start = (start[0] + size[0], start[1] + size[1])
    return results


def _concatenate(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a concatenation: along the examples' dimension, parts must be whole repetitions."""
    dim = operations[0].params["dimension"]
    if _have_one_value(labels):
        return [labels[0]]
    along = [label for label in labels if _dim_of(label) == dim]
    for number in range(len(labels)):
        size = _sizes(_input_pair(operations, number), dim)
        if along and not _is_block(along[0], (0, 0), size, setting):
            return [_mixed(operations, labels, "joins examples with what is none")]
    if _are_columns(operations[0], dim) and same_layout(labels):
        for label in labels:
            if label.kind is Kind.PLACES:
                return [label.replace(columns=tuple(labels), mixes=all_mixes(labels))]
    return [_joined(operations, labels)]


def _are_columns(operation: Operation, dim: int) -> bool:
    """Return whether a concatenation is of columns: of size 1, along the last dimension."""
    if dim != len(operation.outputs[0].shape) - 1:
        return False
    return all(value.shape[dim] == 1 for value in operation.inputs)


def _joined(operations: Operations, labels: Sequence[Label]) -> Label:
    """Return the label of an array joined from several ones."""
    parts = [label.replace(columns=None) for label in labels]
    return _added(operations, parts).replace(value=None)


def _stack(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a stack along a new dimension."""
    axis = operations[0].params["axis"]
    result = _joined(operations, labels)
    dim = _dim_of(result)
    if dim is None:
        return [result]
    if axis <= dim:
        dim += 1
    return [_moved(result, dim)]


def _pad(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a padded array: the dimension of examples must have no padding."""
    label, filler = labels
    dim = _dim_of(label)
    if dim is not None and any(operations[0].params["padding_config"][dim]):
        return [_mixed(operations, labels, "joins examples with what is none")]
    if label.value is not None and label.value == filler.value:
        return [label]
    return [_added(operations, labels).replace(value=None)]


def _dynamic_slice(
    operations: Operations, labels: Sequence[Label], setting: Setting
) -> list[Label]:
    """Label a slice at computed positions."""
    label, *starts = labels
    dim = _dim_of(label)
    if dim is not None:
        size = operations[0].params["slice_sizes"][dim]
        if size != operations[0].inputs[0].shape[dim]:
            return [_mixed(operations, labels, "takes some of the examples")]
    if all(map(_is_plain, starts)):
        return [label.replace(columns=None)]
    return _nonlinear(operations, labels, setting)


def _dynamic_update_slice(
    operations: Operations, labels: Sequence[Label], setting: Setting
) -> list[Label]:
    """Label an array with a part replaced at computed positions."""
    label, update, *starts = labels
    whole, part = operations[0].inputs[:2]
    for one in (label, update):
        dim = _dim_of(one)
        if dim is not None and whole.shape[dim] != part.shape[dim]:
            return [_mixed(operations, labels, "replaces some of the examples")]
    if not all(map(_is_plain, starts)):
        return _nonlinear(operations, labels, setting)
    return [_added(operations, (label, update)).replace(value=None)]


def _iota(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label the places along a dimension."""
    dim = operations[0].params["dimension"]
    output = _output_pair(operations, 0)
    if dim not in varying_dims(output):
        return [SHARED]
    if _sizes(output, dim) == setting.counts:
        return [Label(Kind.PLACES, dim, 1)]
    return [_mixed(operations, (), PLACE)]


# Sums and products over dimensions.


def _reduce_sum(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a sum over dimensions."""
    (label,) = labels
    axes = operations[0].params["axes"]
    pair = _input_pair(operations, 0)
    if label.value is not None:
        first, second = label.value
        return [constant(first * _size_of(pair[0], axes), second * _size_of(pair[1], axes))]
    times = len(set(axes).intersection(varying_dims(pair)))
    dim = _dim_of(label)
    if dim is not None and dim not in axes:
        return [_grown(_dropped(label, axes), times)]
    return [_summed(operations, _dropped(label, axes), times)]


def _size_of(value: TracedValue, dims: Iterable[int]) -> int:
    """Return the number of elements along some dimensions."""
    return math.prod(value.shape[dim] for dim in dims)


def _raised(degree: float | None, times: int) -> float | None:
    """Return a degree after sums over some number of dimensions of examples."""
    if degree is None:
        return None
    return degree + times


def _grown(label: Label, times: int) -> Label:
    """Return a label with its degree raised by sums over dimensions of examples."""
    return label.replace(degree=_raised(label.degree, times))


def _summed(operations: Operations, label: Label, times: int) -> Label:
    """Return the label of a sum over some number of dimensions of examples."""
    if not times:
        return label
    result = _grown(label, times).replace(dim=None, inner=None, columns=None, value=None)
    if label.kind is Kind.MIXED:
        return result
    if label.kind is Kind.SUM or times > 1:
        what = "sums a sum for each example"
        return result.replace(kind=Kind.SHARED).with_mix(operations[0], what, [label])
    sums = frozenset({operations[0]})
    if label.kind is Kind.PLACES:
        return result.replace(kind=Kind.SHARED, sums=sums).with_mix(operations[0], PLACE)
    return result.replace(kind=Kind.SUM, sums=sums)


def _reduce(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label reductions other than sums."""
    label = labels[0]
    count = len(operations[0].outputs)
    axes = operations[0].params["axes"]
    is_homogeneous = operations[0].primitive in ("reduce_max", "reduce_min")
    if label.value is not None and is_homogeneous:
        return [label]
    (result, *_) = _nonlinear(operations, [label.replace(degree=0.0)], setting)
    degree = None
    if is_homogeneous or label.degree == 0:
        degree = label.degree
    if label.has_examples and label.dim in axes:
        shared = Label(degree=degree, mixes=label.mixes)
        return [shared.with_mix(operations[0], ACROSS, labels)] * count
    return [_dropped(result, axes).replace(degree=degree)] * count


def _dot(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a product of matrices."""
    left, right = labels
    if left.is_zero or right.is_zero:
        return [constant(0, 0)]
    contracted, batched = operations[0].params["dimension_numbers"]
    varying = varying_dims(_input_pair(operations, 0))
    times = len(set(contracted[0]).intersection(varying))
    degree = _degree_of_product(left, right)
    if Kind.MIXED in (left.kind, right.kind):
        degree = _raised(degree, times)
        return [Label(Kind.MIXED, degree=degree, mixes=all_mixes(labels))]
    if _has_kind(labels, Kind.SUM) and not _has_kind(labels, Kind.SHARED):
        return [_mixed(operations, labels, NONLINEAR)]
    roles = (
        _role(left, contracted[0], batched[0]),
        _role(right, contracted[1], batched[1]),
    )
    if not _are_aligned(left, right, roles):
        return [_mixed(operations, labels, ORDER).replace(degree=_raised(degree, times))]
    result = strongest(labels)
    if _has_kind(labels, Kind.PLACES):
        result = result.with_mix(operations[0], PLACE)
    result = result.replace(degree=degree)
    return [_dot_of_parts(operations, labels, roles, result, times)]


_Role = tuple[str, int]
"""Use of the examples' dimension in a product, and its number among the dimensions of this use."""


def _role(label: Label, contracted: Sequence[int], batched: Sequence[int]) -> _Role:
    """Return the role of an operand's dimension of examples in a product, and its number there."""
    if not label.has_examples:
        return "", 0
    if label.dim is None:
        return "loop", 0
    if label.dim in contracted:
        return "contracted", tuple(contracted).index(label.dim)
    if label.dim in batched:
        return "batched", tuple(batched).index(label.dim)
    return "free", label.dim - _count_below(label.dim, {*contracted, *batched})


def _are_aligned(left: Label, right: Label, roles: tuple[_Role, _Role]) -> bool:
    """Return whether a product combines each example with itself."""
    if not left.has_examples or not right.has_examples:
        return True
    if roles[0] != roles[1] or roles[0][0] == "free":
        return False
    return left.inner == right.inner or None in (left.inner, right.inner)


def _dot_of_parts(
    operations: Operations,
    labels: Sequence[Label],
    roles: tuple[_Role, _Role],
    result: Label,
    times: int,
) -> Label:
    """Return the label of a product of matrices, with the dimension of its examples.

    Args:
        result: The label of both operands together.
        times: The number of dimensions of examples that the product sums over.
    """
    side = 0 if labels[0].has_examples else 1
    role, number = roles[side]
    if role == "loop":
        return result
    if role in ("batched", "free"):
        dim = number
        if role == "free":
            dim += _first_free(operations[0], side)
        return _grown(result.replace(dim=dim, inner=labels[side].inner), times)
    return _summed(operations, result, times)


def _first_free(operation: Operation, side: int) -> int:
    """Return the position of an operand's first free dimension in a product.

    The product has the batch dimensions first, then the free ones of the left operand.
    """
    contracted, batched = operation.params["dimension_numbers"]
    of_batch = len(batched[0])
    if side == 0:
        return of_batch
    of_left = len(operation.inputs[0].shape) - len(contracted[0]) - of_batch
    return of_batch + of_left


def _conv(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a convolution; its kernel must be the same for all examples."""
    x, kernel = labels
    params = operations[0].params
    numbers = params["dimension_numbers"]
    is_batch = x.dim in (None, numbers.lhs_spec[0]) and params["batch_group_count"] == 1
    if kernel.kind is not Kind.SHARED or not is_batch:
        return [_mixed(operations, labels, ORDER)]
    result = x.replace(mixes=all_mixes(labels), value=None, columns=None)
    if _dim_of(x) is None:
        return [result]
    return [_moved(result, numbers.out_spec[0])]


def _window(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a reduction of windows: each must be of one example."""
    label = labels[0]
    params = operations[0].params
    dim = _dim_of(label)
    if dim is not None:
        size = params["window_dimensions"][dim]
        stride = params["window_strides"][dim]
        if size != 1 or stride != 1:
            return [_mixed(operations, labels, ORDER)]
    if operations[0].primitive == "reduce_window_sum":
        return [label.replace(value=None)]
    return _nonlinear(operations, labels, setting)


# Lookups.


def _columns(label: Label, count: int) -> Sequence[Label]:
    """Return the labels of the entries of an index's last dimension."""
    return label.columns or (label,) * count


def _gather(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label lookups in a table at computed positions."""
    table, index = labels[:2]
    if Kind.MIXED in (table.kind, index.kind):
        return [Label(Kind.MIXED, degree=None, mixes=all_mixes(labels))]
    dim = _dim_of(table)
    if dim is None:
        return [_gathered_from_one(operations, labels)]
    gathered = _gathered_from_examples(operations, labels, dim)
    if gathered is None:
        return [_mixed(operations, labels, "takes parts of other examples")]
    return [gathered]


def _gathered_from_one(operations: Operations, labels: Sequence[Label]) -> Label:
    """Return the label of lookups in a table without a dimension of examples."""
    table, index = labels[:2]
    result = table.replace(mixes=all_mixes(labels), value=None, columns=None)
    if _is_plain(index):
        return result
    if index.kind is Kind.PLACES:
        return _mixed(operations, labels, PLACE)
    if Kind.SUM in (table.kind, index.kind):
        return _mixed(operations, labels, NONLINEAR)
    if index.kind is Kind.SHARED:
        return result
    if table.has_examples and index.dim is not None:
        return _mixed(operations, labels, "takes parts of other examples")
    dim = None
    if index.dim is not None:
        dim = _index_dims(operations[0])[index.dim]
    return result.replace(kind=Kind.EXAMPLES, dim=dim, inner=index.inner, sums=frozenset())


def _index_dims(operation: Operation) -> list[int]:
    """Return the dimensions of the index in a gather's result, in order."""
    numbers = operation.params["dimension_numbers"]
    return _others(len(operation.outputs[0].shape), numbers.offset_dims)


def _gathered_from_examples(
    operations: Operations, labels: Sequence[Label], dim: int
) -> Label | None:
    """Return the label of lookups in a table of examples; None if they may read other examples.

    `dim` is the table's dimension of examples.
    """
    table, index = labels[:2]
    operand, indices = operations[0].inputs[:2]
    numbers = operations[0].params["dimension_numbers"]
    result = table.replace(mixes=all_mixes(labels), value=None, columns=None)
    if dim in numbers.operand_batching_dims:
        number = numbers.operand_batching_dims.index(dim)
        paired = numbers.start_indices_batching_dims[number]
        is_of_example = index.kind is Kind.EXAMPLES and index.dim == paired
        if index.kind is not Kind.SHARED and not is_of_example:
            return None
        return _moved(result, _index_dims(operations[0])[paired])
    if dim in numbers.collapsed_slice_dims:
        if dim not in numbers.start_index_map or index.kind is not Kind.PLACES:
            return None
        columns = _columns(index, indices.shape[-1])
        places = columns[numbers.start_index_map.index(dim)]
        if places.kind is not Kind.PLACES or places.dim is None or table.inner != 1:
            return None
        result = result.replace(mixes=all_mixes([table, *columns]))
        return _moved(result, _index_dims(operations[0])[places.dim])
    is_whole = operations[0].params["slice_sizes"][dim] == operand.shape[dim]
    if not is_whole or index.kind is not Kind.SHARED:
        return None
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = _others(len(operand.shape), dropped)
    return _moved(result, numbers.offset_dims[kept.index(dim)])


def _scatter(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a table after a write or an addition of rows at computed positions."""
    table, index, rows = labels
    kinds = (table.kind, index.kind, rows.kind)
    if Kind.MIXED in kinds:
        return [Label(Kind.MIXED, degree=None, mixes=all_mixes(labels))]
    varying = varying_dims(_input_pair(operations, 0))
    if not varying and _is_inside_loop(labels):
        return _nonlinear(operations, labels, setting)
    if not varying and not table.has_examples:
        return [_scattered_to_one(operations, labels)]
    if len(varying) == 1 and Kind.SUM not in kinds:
        (dim,) = varying
        if _scatters_to_own(operations[0], index, dim):
            return [_scattered_to_examples(operations, labels, dim)]
    what = ORDER
    if operations[0].primitive == "scatter-add":
        what = "adds to parts of other examples"
    return [_mixed(operations, labels, what)]


def _is_inside_loop(labels: Sequence[Label]) -> bool:
    """Return whether all values of examples, and at least one, are of an iteration's example."""
    parted = [label for label in labels if label.has_examples]
    return bool(parted) and all(label.dim is None for label in parted)


def _scattered_to_one(operations: Operations, labels: Sequence[Label]) -> Label:
    """Return the label of a table without examples after rows were written or added."""
    table, index, rows = labels
    if index.kind is Kind.SHARED and rows.kind in (Kind.SHARED, Kind.SUM):
        added = _added(operations, (table, rows))
        return added.replace(value=None, mixes=all_mixes(labels))
    is_added = operations[0].primitive == "scatter-add"
    of_examples = (Kind.SHARED, Kind.EXAMPLES)
    if is_added and index.kind in of_examples and rows.kind in of_examples:
        part = rows.replace(mixes=all_mixes((index, rows)), kind=Kind.EXAMPLES)
        total = _summed(operations, part, 1)
        return _added(operations, (table, total)).replace(value=None)
    return _mixed(operations, labels, ORDER)


def _scatters_to_own(operation: Operation, index: Label, dim: int) -> bool:
    """Return whether the rows of an example go to its own part of a table.

    Args:
        index: The label of the places.
        dim: The table's dimension of examples.
    """
    operand, indices, updates = operation.inputs
    numbers = operation.params["dimension_numbers"]
    if dim in numbers.operand_batching_dims:
        return True
    if dim in numbers.inserted_window_dims:
        if dim not in numbers.scatter_dims_to_operand_dims or index.kind is not Kind.PLACES:
            return False
        columns = _columns(index, indices.shape[-1])
        places = columns[numbers.scatter_dims_to_operand_dims.index(dim)]
        return places.kind is Kind.PLACES
    if index.kind is not Kind.SHARED:
        return False
    dropped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = _others(len(operand.shape), dropped)
    position = numbers.update_window_dims[windows.index(dim)]
    return updates.shape[position] == operand.shape[dim]


def _scattered_to_examples(operations: Operations, labels: Sequence[Label], dim: int) -> Label:
    """Return the label of a table of examples after each got its own rows."""
    table, index, rows = labels
    result = strongest([table, rows.replace(dim=dim), index.replace(dim=dim)])
    added = _added(operations, (table, rows.replace(dim=table.dim)))
    inner = table.inner or rows.inner or index.inner or 1
    return result.replace(kind=Kind.EXAMPLES, dim=dim, inner=inner, degree=added.degree)


# Random numbers and collectives.


def _drawn(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label random numbers: each example has its own, wherever they come from."""
    results = []
    for pair in zip(operations[0].outputs, operations[1].outputs, strict=True):
        dims = varying_dims(pair)
        if not dims:
            results.append(strongest(labels).replace(degree=0.0))
            continue
        inner = None
        if pair[0].shape[dims[0]] == setting.counts[0]:
            inner = 1
        results.append(Label(Kind.EXAMPLES, dims[0], inner, mixes=all_mixes(labels)))
    return results


def _axes(operation: Operation) -> frozenset[str]:
    """Return the mesh axes of a collective."""
    names = operation.params.get("axes", operation.params.get("axis_name", ()))
    if not isinstance(names, tuple | list):
        names = (names,)
    return frozenset(names)


def _psum(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label sums and maxima over devices."""
    results = []
    for label in labels:
        other = label
        if not operations[0].primitive.startswith("psum"):
            other = _nonlinear(operations, [label], setting)[0]
        results.append(_over_devices(operations, label, other, setting))
    return results


def _over_devices(operations: Operations, label: Label, other: Label, setting: Setting) -> Label:
    """Return the label of a sum or a maximum over devices; `other` labels one device's part."""
    axes = _axes(operations[0])
    if axes.isdisjoint(BATCH_AXES):
        return other
    if _dim_of(label) is not None:
        return _mixed(operations, [label], "joins examples of several devices")
    if setting.around and axes >= setting.around:
        kind = label.kind
        if kind is Kind.SUM:
            kind = Kind.SHARED  # of all devices, and the same on each
        return other.replace(kind=kind, value=None)
    if axes & setting.around:
        return other.with_mix(operations[0], "sums over some of the devices", [label])
    return other.replace(value=None)


def _exchanged(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label gathers, scatters, permutes and exchanges over devices."""
    return [_exchanged_part(operations, labels)] * len(operations[0].outputs)


_EXCHANGED_DIMS = ("all_gather_dimension", "scatter_dimension", "split_axis", "concat_axis")
"""Parameters of collectives with a dimension that they split or join."""


def _exchanged_part(operations: Operations, labels: Sequence[Label]) -> Label:
    """Return the label of the result of a gather, scatter, permute or exchange over devices."""
    label = labels[0]
    params = operations[0].params
    if label.kind is Kind.SHARED:
        return label
    if not _axes(operations[0]).isdisjoint(BATCH_AXES):
        return _mixed(operations, labels, "moves examples between devices")
    is_whole = params.get("tiled", True)
    for name in _EXCHANGED_DIMS:
        dim = params.get(name)
        if dim is not None and dim == label.dim:
            is_whole = False
    if label.has_examples and not is_whole:
        return _mixed(operations, labels, ORDER)
    return label.replace(columns=None, value=None)


def _axis_index(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label the place of a device along a mesh axis."""
    if _axes(operations[0]).isdisjoint(BATCH_AXES):
        return [SHARED]
    return [SHARED.with_mix(operations[0], PLACE)]


_LINEAR = (
    *("neg", "copy", "copy_p", "name", "reduce_precision", "real", "imag", "conj"),
    *("stored", "pvary", "pbroadcast"),
)

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _nonlinear),
    **dict.fromkeys(("random_fold_in", "random_wrap", "random_unwrap", "threefry2x32"), _nonlinear),
    **dict.fromkeys(
        ("eq_to", "le_to", "lt_to", "log2", "one_minus_square", "polynomial"), _nonlinear
    ),
    **dict.fromkeys(_LINEAR, _linear),
    **dict.fromkeys(
        ("sharding_constraint", "reshard", "layout_constraint", "stop_gradient"), _linear
    ),
    **dict.fromkeys(("device_put", "optimization_barrier"), _same),
    **dict.fromkeys(("add", "add_any", "sub"), _add),
    **dict.fromkeys(
        (
            "random_bits",
            "random_split",
            "random_gamma",
            "rng_bit_generator",
            "random_seed",
            "rng_uniform",
        ),
        _drawn,
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    **dict.fromkeys(
        ("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor"),
        _reduce,
    ),
    **dict.fromkeys(("argmax", "argmin"), _reduce),
    **dict.fromkeys(
        (
            "top_k",
            "approx_top_k",
            "fft",
            "cholesky",
            "lu",
            "qr",
            "eigh",
            "svd",
            "householder_product",
        ),
        _last,
    ),
    **dict.fromkeys(
        (
            "triangular_solve",
            "eig",
            "schur",
            "tridiagonal_solve",
            "geqrf",
            "hessenberg",
            "tridiagonal",
        ),
        _last,
    ),
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add"),
        _window,
    ),
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin"), _psum),
    **dict.fromkeys(
        ("all_gather", "all_gather_invariant", "reduce_scatter", "psum_scatter"), _exchanged
    ),
    **dict.fromkeys(("ppermute", "all_to_all"), _exchanged),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-mul", "scatter-max", "scatter-min"), _scatter
    ),
    "axis_index": _axis_index,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "conv_general_dilated": _conv,
    "convert_element_type": _convert,
    "div": _div,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "iota": _iota,
    "mul": _mul,
    "pad": _pad,
    "reduce_sum": _reduce_sum,
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "select_n": _select,
    "slice": _slice,
    "sort": _along("dimension"),
    "split": _split,
    "stack": _stack,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
"""Primitive → the rule for its results."""


def results_of(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Return the labels of the results of an operation without bodies."""
    name = operations[0].primitive
    count = len(operations[0].outputs)
    folded = _fold(operations, labels)
    if folded is not None:
        return [folded]
    if name == "lt" and labels[0].kind is Kind.PLACES and labels[1].is_zero:
        return [constant(False, False)]  # how JAX wraps a negative index
    rule = RULES.get(name)
    if rule is not None:
        return rule(operations, labels, setting)
    outputs = zip(operations[0].outputs, operations[1].outputs, strict=True)
    varies = any(map(varying_dims, outputs))
    if varies or not _are_shared(labels):
        return [_mixed(operations, labels, UNKNOWN)] * count
    degree = _degree_of(operations[0], labels)
    result = Label(degree=degree, mixes=all_mixes(labels), sums=all_sums(labels))
    return [result] * count


def _are_shared(labels: Sequence[Label]) -> bool:
    return all(label.kind is Kind.SHARED for label in labels)


def trusted_result(output: tuple[Any, Any], labels: Sequence[Label]) -> Label:
    """Return the label of a result of a function declared `spmd.jaxpr.examples.per_example`."""
    dims = varying_dims(output)
    mixes = all_mixes(labels)
    if dims:
        return Label(Kind.EXAMPLES, dims[0], None, mixes=mixes)
    if _are_shared(labels):
        return Label(mixes=mixes, sums=all_sums(labels))
    return Label(Kind.SUM, degree=1.0, mixes=mixes)
