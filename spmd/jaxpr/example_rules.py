"""Rules of primitives: the labels of an operation's results from those of its operands."""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
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
from spmd.jaxpr.traced_program import Operation
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
    """The numbers of examples of a program, and the mesh axes around it that split them and are manual."""

    counts: tuple[int, int]
    around: frozenset[str]


# Results of mixing.


def _mixed(operations: Operations, labels: Sequence[Label], what: str) -> Label:
    """Return the label of a value whose parts depend on several examples."""
    return Label(Kind.MIXED, degree=None, mixes=all_mixes(labels)).with_mix(operations[0], what, labels)


def _together(operations: Operations, labels: Sequence[Label]) -> Label:
    """Return the label of several operands together, element by element, without regard to sums."""
    result, first = strongest(labels), operations[0]
    if result.kind is Kind.MIXED:
        return result
    if any(label.kind is Kind.PLACES for label in labels):
        result = result.with_mix(first, PLACE, labels)
    if not same_layout(labels):
        return Label(Kind.MIXED, mixes=result.mixes).with_mix(first, ORDER, labels)
    return result


def _nonlinear(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label any function, element by element."""
    result = _together(operations, labels)
    if any(label.kind is Kind.SUM for label in labels):
        kind = Kind.SHARED if result.kind is Kind.SUM else result.kind
        result = result.replace(kind=kind).with_mix(operations[0], NONLINEAR, labels)
    result = result.replace(degree=_degree_of(operations[0], labels))
    if result.degree is None and all(label.degree is not None for label in labels):
        result = result.with_mix(operations[0], NUMBER, labels)
    return [result] * len(operations[0].outputs)


_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0, "abs": 1.0, "cbrt": 1 / 3}
_SIGNS = ("sign", "lt", "gt", "le", "ge", "eq", "ne", "is_finite")


def _degree_of(operation: Operation, labels: Sequence[Label]) -> float | None:
    """Return the degree of an element-wise function of values."""
    degrees = [label.degree for label in labels if not label.is_zero]
    if any(degree is None for degree in degrees):
        return None
    known = [degree for degree in degrees if degree is not None]
    if not any(known):
        return 0.0
    name = operation.primitive
    if name in ("max", "min", "clamp"):  # a guard, such as max(count, 1), is one for small batches
        return max(known)
    if name in _SIGNS:
        return 0.0
    if len(known) == 1 and name in _POWERS:
        return known[0] * _POWERS[name]
    if len(known) == 1 and name == "integer_pow":
        return known[0] * operation.params["y"]
    return None


def _linear(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label a linear function of one operand, element by element."""
    return [labels[0]] * len(operations[0].outputs)


def _convert(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    (label,) = labels
    rounds = operations[0].inputs[0].is_float and not operations[0].outputs[0].is_float
    if rounds and label.kind is Kind.SUM:
        return _nonlinear(operations, labels, setting)
    if label.value is not None and not rounds:
        return [constant(*(value * 1 for value in label.value))]
    return [label]


_FOLDED: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "max": max,
    "min": min,
    "div": lambda a, b: a / b if b else math.nan,
    "integer_pow": lambda a, y: a**y if a or y > 0 else math.nan,
    "sqrt": lambda a: math.sqrt(a) if a >= 0 else math.nan,
    "rsqrt": lambda a: 1 / math.sqrt(a) if a > 0 else math.nan,
    "lt": operator.lt,
    "gt": operator.gt,
    "le": operator.le,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
"""Functions of constants."""


def _fold(operations: Operations, labels: Sequence[Label]) -> Label | None:
    """Return the label of a function of constants; None if it is another."""
    name, params = operations[0].primitive, operations[0].params
    if name not in _FOLDED or any(label.value is None for label in labels):
        return None
    more = {"y": params["y"]} if name == "integer_pow" else {}
    values = [[label.value[size] for label in labels if label.value] for size in (0, 1)]
    first, second = (_FOLDED[name](*arguments, **more) for arguments in values)
    return constant(first, second)


def _add(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label sums, differences, and choices that depend on no example."""
    return [_added(operations, labels)] * len(operations[0].outputs)


def _as_sum(label: Label) -> Label:
    """Return the label of a number of examples as that of a sum of ones."""
    if label.kind is Kind.SHARED and label.value is not None and label.degree == 1:
        return label.replace(kind=Kind.SUM, value=None)
    return label


def _added(operations: Operations, labels: Sequence[Label]) -> Label:
    counted = [label for label in labels if not label.is_zero]
    if any(label.kind is Kind.SUM for label in counted):
        counted = list(map(_as_sum, counted))
    if not counted:
        return constant(0, 0)
    if len(counted) == 1 and operations[0].primitive != "sub":
        return counted[0].replace(value=None)
    result = _together(operations, counted)
    kinds = {label.kind for label in counted}
    if Kind.SUM in kinds and len(kinds) > 1:
        result = result.with_mix(operations[0], ADDED, counted)
    degrees = {label.degree for label in counted}
    if None in degrees:
        return result.replace(degree=None)
    known = [degree for degree in degrees if degree is not None]
    if len(known) > 1 and result.kind is Kind.EXAMPLES:
        return result.replace(degree=None).with_mix(operations[0], NUMBER, counted)
    return result.replace(degree=max(known))


def _mul(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    left, right = labels
    if left.is_zero or right.is_zero:
        return [constant(0, 0)]
    return [_product(operations, left, right, 1)]


def _div(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    left, right = labels
    return [left if left.is_zero else _product(operations, left, right, -1)]


def _product(operations: Operations, left: Label, right: Label, power: int) -> Label:
    """Return the label of a product (`power` 1) or of a quotient (−1), element by element."""
    if power == 1 and left.kind is right.kind is Kind.SHARED:
        left, right = (_as_sum(left), right) if left.degree else (left, _as_sum(right))
    labels = (left, right)
    result = _together(operations, labels)
    others = [label for label in labels if label.kind is not Kind.SHARED]
    is_divisor = power == -1 and right.kind is Kind.SUM
    if any(label.kind is Kind.SUM for label in labels) and (is_divisor or len(others) > 1):
        kind = Kind.SHARED if result.kind is Kind.SUM else result.kind
        result = result.replace(kind=kind).with_mix(operations[0], NONLINEAR, labels)
    known = left.degree is not None and right.degree is not None
    return result.replace(degree=left.degree + power * right.degree if known else None)  # type: ignore[operator]


def _select(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    which, *cases = labels
    if which.value is not None and which.value[0] == which.value[1]:
        return [cases[int(which.value[0])]]
    values = {case.value for case in cases}
    if len(values) == 1 and None not in values and which.kind is Kind.SHARED:
        return [cases[0]]
    if which.kind is Kind.SHARED and not which.mixes:
        return _add(operations, cases, setting)
    if any(case.kind is Kind.SUM for case in cases) or which.kind is Kind.SUM:
        return _nonlinear(operations, labels, setting)
    added = _added(operations, [case.replace(value=None) for case in cases])
    result = _together(operations, [which, *cases])
    return [result.replace(degree=added.degree, mixes=result.mixes | added.mixes)]


# Forms.


def _moved(label: Label, dim: int | None) -> Label:
    return label.replace(dim=dim, columns=None)


def _broadcast(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    label = labels[0]
    if label.has_examples and label.dim is not None:
        return [_moved(label, operations[0].params["broadcast_dimensions"][label.dim])]
    return [label]


def _transpose(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    (label,) = labels
    if label.has_examples and label.dim is not None:
        return [_moved(label, operations[0].params["permutation"].index(label.dim))]
    return [label]


def _dropped(label: Label, axes: Sequence[int]) -> Label:
    """Return the label of a value without some dimensions, none of which has the examples."""
    if not label.has_examples or label.dim is None:
        return label
    return _moved(label, label.dim - sum(axis < label.dim for axis in axes))


def _squeeze(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    return [_dropped(labels[0], operations[0].params["dimensions"])]


def _reshape(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Follow the stride of an example: the number of elements from one to the next."""
    (label, *_) = labels
    if not label.has_examples or label.dim is None:
        return [label]
    output = operations[0].outputs[0], operations[1].outputs[0]
    dims = varying_dims(output)
    if len(dims) == 1:
        (dim,) = dims
        found = set[int | None]()
        for operation, count in zip(operations, setting.counts, strict=True):
            old, new = operation.inputs[0].shape, operation.outputs[0].shape
            after = math.prod(new[dim + 1 :])
            if label.inner is None:
                found.add(None)
                continue
            stride = label.inner * math.prod(old[label.dim + 1 :])
            is_whole = stride % after == 0 and new[dim] % (count * (stride // after)) == 0
            found.add(stride // after if is_whole else 0)
        (inner, *others) = found
        if inner != 0 and not others:
            kind = label.kind if inner == label.inner == 1 else Kind.EXAMPLES
            moved = label.replace(dim=dim, inner=inner, kind=kind, columns=None)
            return [moved if kind is label.kind else moved.with_mix(operations[0], PLACE)]
    return [_mixed(operations, labels, "splits the dimension of examples into groups")]


def _along(name: str) -> Rule:
    """Return the rule of an operation that goes along one dimension, whose number is in a parameter."""

    def rule(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
        axis = operations[0].params[name]
        axes = axis if isinstance(axis, tuple) else (axis,)
        is_linear = operations[0].primitive in ("cumsum", "rev")
        result = labels[0] if is_linear else _nonlinear(operations, labels, setting)[0]
        if result.kind is Kind.EXAMPLES and result.dim in axes:
            result = _mixed(operations, [result], "goes along the dimension of examples")
        return [result] * len(operations[0].outputs)

    return rule


def _last(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label operations along the last dimension or the last two: top-k, FFT, linear algebra."""
    (result, *_) = _nonlinear(operations, labels, setting)
    rank = len(operations[0].inputs[0].shape)
    along = 1 if operations[0].primitive.endswith(("top_k", "fft")) else 2
    if result.kind is Kind.EXAMPLES and result.dim is not None and result.dim >= rank - along:
        result = _mixed(operations, [result], "goes along the dimension of examples")
    return [result] * len(operations[0].outputs)


def _is_block(label: Label, start: Sequence[int], size: Sequence[int], setting: Setting) -> bool:
    """Return whether a part of the dimension of examples has each example again, at both sizes."""
    if label.inner is None:
        return False
    sizes = zip(start, size, setting.counts, strict=True)
    return all(a % (count * label.inner) == 0 == n % (count * label.inner) and n > 0 for a, n, count in sizes)


def _slice(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    (label,) = labels
    if label.has_examples and label.dim is not None:
        dim = label.dim
        start = [operation.params["start_indices"][dim] for operation in operations]
        size = [operation.outputs[0].shape[dim] for operation in operations]
        whole = all(operation.inputs[0].shape[dim] == n for operation, n in zip(operations, size, strict=True))
        strides = operations[0].params["strides"]
        is_dense = strides is None or strides[dim] == 1
        if not whole and not (is_dense and _is_block(label, start, size, setting)):
            return [_mixed(operations, labels, "takes some of the examples")]
    return [label.replace(columns=None)]


def _split(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    (label,) = labels
    axis, results = operations[0].params["axis"], []
    start = [0, 0]
    for number, _ in enumerate(operations[0].outputs):
        size = [operation.outputs[number].shape[axis] for operation in operations]
        is_part = label.has_examples and label.dim == axis
        if is_part and not _is_block(label, start, size, setting):
            results.append(_mixed(operations, labels, "takes some of the examples"))
        else:
            results.append(label.replace(columns=None))
        start = [a + n for a, n in zip(start, size, strict=True)]
    return results


def _concatenate(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    dim = operations[0].params["dimension"]
    values = {label.value for label in labels}
    if len(values) == 1 and None not in values:
        return [labels[0]]
    along = [label for label in labels if label.has_examples and label.dim == dim]
    if along:
        sizes = [[operation.inputs[i].shape[dim] for operation in operations] for i in range(len(labels))]
        if not all(_is_block(along[0], (0, 0), size, setting) for size in sizes):
            return [_mixed(operations, labels, "joins examples with what is none")]
    if any(label.kind is Kind.PLACES for label in labels) and same_layout(labels):
        places = next(label for label in labels if label.kind is Kind.PLACES)
        is_last = dim == len(operations[0].outputs[0].shape) - 1
        if is_last and all(value.shape[dim] == 1 for value in operations[0].inputs):
            return [places.replace(columns=tuple(labels), mixes=all_mixes(labels))]
    return [_added(operations, [label.replace(columns=None) for label in labels]).replace(value=None)]


def _stack(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    axis = operations[0].params["axis"]
    result = _added(operations, [label.replace(columns=None) for label in labels]).replace(value=None)
    if result.has_examples and result.dim is not None:
        return [_moved(result, result.dim + (axis <= result.dim))]
    return [result]


def _pad(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    label, _ = labels
    if label.has_examples and label.dim is not None and any(operations[0].params["padding_config"][label.dim]):
        return [_mixed(operations, labels, "joins examples with what is none")]
    if labels[0].value is not None and labels[0].value == labels[1].value:
        return [label]
    return [_added(operations, labels).replace(value=None)]


def _dynamic_slice(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    label, *starts = labels
    if label.has_examples and label.dim is not None:
        dim = label.dim
        if operations[0].params["slice_sizes"][dim] != operations[0].inputs[0].shape[dim]:
            return [_mixed(operations, labels, "takes some of the examples")]
    if all(start.kind is Kind.SHARED and not start.mixes for start in starts):
        return [label.replace(columns=None)]
    return _nonlinear(operations, labels, setting)


def _dynamic_update_slice(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    label, update, *starts = labels
    whole, part = (value.shape for value in operations[0].inputs[:2])
    dims = {one.dim for one in (label, update) if one.has_examples and one.dim is not None}
    if any(whole[dim] != part[dim] for dim in dims):
        return [_mixed(operations, labels, "replaces some of the examples")]
    if any(start.kind is not Kind.SHARED or start.mixes for start in starts):
        return _nonlinear(operations, labels, setting)
    return [_added(operations, (label, update)).replace(value=None)]


def _iota(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    dims, dim = varying_dims((operations[0].outputs[0], operations[1].outputs[0])), operations[0].params["dimension"]
    if dim not in dims:
        return [SHARED]
    sizes = tuple(operation.outputs[0].shape[dim] for operation in operations)
    if sizes == setting.counts:
        return [Label(Kind.PLACES, dim, 1)]
    return [_mixed(operations, (), PLACE)]


# Sums and products over dimensions.


def _reduce_sum(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    (label,) = labels
    axes = operations[0].params["axes"]
    over = [dim for dim in varying_dims((operations[0].inputs[0], operations[1].inputs[0])) if dim in axes]
    if label.value is not None:
        sizes = [math.prod(operation.inputs[0].shape[axis] for axis in axes) for operation in operations]
        return [constant(*(value * size for value, size in zip(label.value, sizes, strict=True)))]
    if label.has_examples and label.dim is not None and label.dim not in axes:
        return [_grown(_dropped(label, axes), len(over))]
    return [_summed(operations, _dropped(label, axes), len(over))]


def _grown(label: Label, times: int) -> Label:
    """Return the label of parts of examples, each times the number of examples."""
    return label if label.degree is None else label.replace(degree=label.degree + times)


def _summed(operations: Operations, label: Label, times: int) -> Label:
    """Return the label of a sum over some number of dimensions of examples."""
    if not times:
        return label
    degree = None if label.degree is None else label.degree + times
    result = label.replace(degree=degree, dim=None, inner=None, columns=None, value=None)
    sums = frozenset({operations[0]})
    if label.kind is Kind.MIXED:
        return result
    if label.kind is Kind.SUM or times > 1:
        return result.replace(kind=Kind.SHARED).with_mix(operations[0], "sums a sum for each example", [label])
    if label.kind is Kind.PLACES:
        return result.replace(kind=Kind.SHARED, sums=sums).with_mix(operations[0], PLACE)
    return result.replace(kind=Kind.SUM, sums=sums)


def _reduce(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label reductions that are no sums."""
    label = labels[0]
    axes = operations[0].params["axes"]
    if label.value is not None and operations[0].primitive in ("reduce_max", "reduce_min"):
        return [label]
    (result, *_) = _nonlinear(operations, [label.replace(degree=0.0)], setting)
    is_homogeneous = operations[0].primitive in ("reduce_max", "reduce_min")
    degree = label.degree if is_homogeneous or label.degree == 0 else None
    if label.has_examples and label.dim in axes:
        shared = Label(degree=degree, mixes=label.mixes).with_mix(operations[0], ACROSS, labels)
        return [shared] * len(operations[0].outputs)
    return [_dropped(result, axes).replace(degree=degree)] * len(operations[0].outputs)


def _dot(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    left, right = labels
    if left.is_zero or right.is_zero:
        return [constant(0, 0)]
    contracted, batched = operations[0].params["dimension_numbers"]
    varying = varying_dims((operations[0].inputs[0], operations[1].inputs[0]))
    times = len([dim for dim in contracted[0] if dim in varying])
    known = left.degree is not None and right.degree is not None
    degree = left.degree + right.degree if known else None  # type: ignore[operator]
    if Kind.MIXED in (left.kind, right.kind):
        grown = None if degree is None else degree + times
        return [Label(Kind.MIXED, degree=grown, mixes=all_mixes(labels))]
    where = [_role(label, side, contracted, batched) for side, label in enumerate(labels)]
    parted = [label for label in labels if label.has_examples]
    layouts = {label.inner for label in parted} - {None}
    is_aligned = len(parted) < 2 or (where[0] == where[1] and where[0][0] != "free" and len(layouts) <= 1)
    others = [label for label in labels if label.kind is not Kind.SHARED]
    if any(label.kind is Kind.SUM for label in labels) and len(others) > 1:
        return [_mixed(operations, labels, NONLINEAR)]
    if not is_aligned:
        grown = None if degree is None else degree + times
        return [_mixed(operations, labels, ORDER).replace(degree=grown)]
    result = strongest(labels)
    if any(label.kind is Kind.PLACES for label in parted):
        result = result.with_mix(operations[0], PLACE)
    result = result.replace(degree=degree)
    if parted:
        label = parted[0]
        side = 0 if left.has_examples else 1
        role, number = where[side]
        if role == "loop":
            return [result]
        if role != "contracted":
            ranks = [len(value.shape) for value in operations[0].inputs]
            dim = _position(side, role, number, contracted, batched, ranks)
            return [_grown(result.replace(dim=dim, inner=label.inner), times)]
    return [_summed(operations, result, times)]


def _role(label: Label, side: int, contracted: Any, batched: Any) -> tuple[str, int]:
    """Return what a product does with the dimension of the examples, and its number among those of that role."""
    if not label.has_examples:
        return "", 0
    if label.dim is None:
        return "loop", 0
    for role, dims in (("contracted", contracted[side]), ("batched", batched[side])):
        if label.dim in dims:
            return role, tuple(dims).index(label.dim)
    others = {*contracted[side], *batched[side]}
    return "free", label.dim - sum(dim < label.dim for dim in others)


def _position(side: int, role: str, number: int, contracted: Any, batched: Any, ranks: Sequence[int]) -> int:
    """Return the dimension of a product that is a batch dimension or a free one of an operand."""
    if role == "batched":
        return number
    free = ranks[0] - len(contracted[0]) - len(batched[0])
    return len(batched[0]) + (free if side else 0) + number


def _conv(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    x, kernel = labels
    params = operations[0].params
    numbers = params["dimension_numbers"]
    is_batch = x.dim in (None, numbers.lhs_spec[0]) and params["batch_group_count"] == 1
    if kernel.kind is not Kind.SHARED or not is_batch:
        return [_mixed(operations, labels, ORDER)]
    result = x.replace(mixes=all_mixes(labels), value=None, columns=None)
    return [_moved(result, numbers.out_spec[0]) if x.has_examples and x.dim is not None else result]


def _window(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    label, params = labels[0], operations[0].params
    if label.has_examples and label.dim is not None:
        sizes, strides = params["window_dimensions"], params["window_strides"]
        if sizes[label.dim] != 1 or strides[label.dim] != 1:
            return [_mixed(operations, labels, ORDER)]
    if operations[0].primitive == "reduce_window_sum":
        return [label.replace(value=None)]
    return _nonlinear(operations, labels, setting)


# Lookups.


def _columns(label: Label, count: int) -> Sequence[Label]:
    return label.columns or (label,) * count


def _gather(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    table, index = labels[:2]
    operand, indices = operations[0].inputs[:2]
    numbers, sizes = operations[0].params["dimension_numbers"], operations[0].params["slice_sizes"]
    if Kind.MIXED in (table.kind, index.kind):
        return [Label(Kind.MIXED, degree=None, mixes=all_mixes(labels))]
    taken = [dim for dim in range(len(operations[0].outputs[0].shape)) if dim not in numbers.offset_dims]
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [dim for dim in range(len(operand.shape)) if dim not in dropped]
    result = table.replace(mixes=all_mixes(labels), value=None, columns=None)
    if not table.has_examples or table.dim is None:
        if index.kind is Kind.SHARED and not index.mixes:
            return [result]
        if index.kind is Kind.PLACES or table.kind is Kind.SUM or index.kind is Kind.SUM:
            return [_mixed(operations, labels, PLACE if index.kind is Kind.PLACES else NONLINEAR)]
        if index.kind is Kind.SHARED:
            return [result]
        if table.has_examples and index.dim is not None:
            return [_mixed(operations, labels, "takes parts of other examples")]
        dim = None if index.dim is None else taken[index.dim]
        return [result.replace(kind=Kind.EXAMPLES, dim=dim, inner=index.inner, sums=frozenset())]
    own = table.dim
    if own in numbers.operand_batching_dims:
        paired = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(own)]
        if index.kind is Kind.SHARED or (index.kind is Kind.EXAMPLES and index.dim == paired):
            return [_moved(result, taken[paired])]
    elif own in kept and sizes[own] == operand.shape[own] and index.kind is Kind.SHARED:
        return [_moved(result, numbers.offset_dims[kept.index(own)])]
    elif own in numbers.collapsed_slice_dims and own in numbers.start_index_map and index.kind is Kind.PLACES:
        columns = _columns(index, indices.shape[-1])
        places = columns[numbers.start_index_map.index(own)]
        if places.kind is Kind.PLACES and places.dim is not None and table.inner == 1:
            return [_moved(result.replace(mixes=all_mixes([table, *columns])), taken[places.dim])]
    return [_mixed(operations, labels, "takes parts of other examples")]


def _scatter(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    table, index, rows = labels
    operand, indices, updates = operations[0].inputs
    numbers = operations[0].params["dimension_numbers"]
    if Kind.MIXED in (table.kind, index.kind, rows.kind):
        return [Label(Kind.MIXED, degree=None, mixes=all_mixes(labels))]
    varying = varying_dims((operand, operations[1].inputs[0]))
    is_added = operations[0].primitive == "scatter-add"
    parted = [label for label in labels if label.has_examples]
    if not varying and parted and all(label.dim is None for label in parted):
        return _nonlinear(operations, labels, setting)
    if not varying and not table.has_examples:
        if index.kind is Kind.SHARED and rows.kind in (Kind.SHARED, Kind.SUM):
            return [_added(operations, (table, rows)).replace(value=None, mixes=all_mixes(labels))]
        if is_added and index.kind in (Kind.SHARED, Kind.EXAMPLES) and rows.kind in (Kind.SHARED, Kind.EXAMPLES):
            part = rows.replace(mixes=all_mixes((index, rows)), kind=Kind.EXAMPLES)
            return [_added(operations, (table, _summed(operations, part, 1))).replace(value=None)]
        return [_mixed(operations, labels, ORDER)]
    if len(varying) == 1 and Kind.SUM not in (table.kind, index.kind, rows.kind):
        (dim,) = varying
        result = strongest([table, rows.replace(dim=dim), index.replace(dim=dim)])
        result = result.replace(kind=Kind.EXAMPLES, dim=dim, inner=table.inner or rows.inner or index.inner or 1)
        windows = [d for d in range(len(operand.shape)) if d not in numbers.inserted_window_dims]
        windows = [d for d in windows if d not in numbers.operand_batching_dims]
        result = result.replace(degree=_added(operations, (table, rows.replace(dim=table.dim))).degree)
        if dim in numbers.operand_batching_dims:
            return [result]
        if dim in windows and index.kind is Kind.SHARED:
            position = numbers.update_window_dims[windows.index(dim)]
            if updates.shape[position] == operand.shape[dim]:
                return [result]
        if dim in numbers.inserted_window_dims and dim in numbers.scatter_dims_to_operand_dims:
            columns = _columns(index, indices.shape[-1])
            places = columns[numbers.scatter_dims_to_operand_dims.index(dim)]
            if index.kind is Kind.PLACES and places.kind is Kind.PLACES:
                return [result]
    return [_mixed(operations, labels, "adds to parts of other examples" if is_added else ORDER)]


# Random numbers and collectives.


def _drawn(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label random numbers: those of an example are its own, wherever they come from."""
    results = []
    for pair in zip(operations[0].outputs, operations[1].outputs, strict=True):
        dims = varying_dims(pair)
        if dims:
            size = pair[0].shape[dims[0]]
            inner = 1 if size == setting.counts[0] else None
            results.append(Label(Kind.EXAMPLES, dims[0], inner, mixes=all_mixes(labels)))
        else:
            results.append(strongest(labels).replace(degree=0.0))
    return results


def _axes(operation: Operation) -> frozenset[str]:
    names = operation.params.get("axes", operation.params.get("axis_name", ()))
    return frozenset(names if isinstance(names, tuple | list) else (names,))


def _psum(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    axes, is_sum = _axes(operations[0]), operations[0].primitive.startswith("psum")
    results = []
    for label in labels:
        (other,) = [label] if is_sum else _nonlinear((operations[0], operations[1]), [label], setting)[:1]
        if not axes & set(BATCH_AXES):
            results.append(other)
        elif label.has_examples and label.dim is not None:
            results.append(_mixed(operations, [label], "joins examples of several devices"))
        elif setting.around and axes >= setting.around:
            kind = Kind.SHARED if label.kind is Kind.SUM else label.kind  # of all devices, and the same on each
            results.append((label if is_sum else other).replace(kind=kind, value=None))
        elif axes & setting.around:
            results.append(other.with_mix(operations[0], "sums over some of the devices", [label]))
        else:
            results.append(other.replace(value=None))
    return results


def _exchanged(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    """Label what moves parts of arrays between devices."""
    label, params = labels[0], operations[0].params
    if label.kind is Kind.SHARED:
        return [label] * len(operations[0].outputs)
    if _axes(operations[0]) & set(BATCH_AXES):
        return [_mixed(operations, labels, "moves examples between devices")] * len(operations[0].outputs)
    along = {params.get(name) for name in ("all_gather_dimension", "scatter_dimension", "split_axis", "concat_axis")}
    is_whole = params.get("tiled", True) and label.dim not in along - {None}
    if label.has_examples and not is_whole:
        return [_mixed(operations, labels, ORDER)] * len(operations[0].outputs)
    return [label.replace(columns=None, value=None)] * len(operations[0].outputs)


def _axis_index(operations: Operations, labels: Sequence[Label], setting: Setting) -> list[Label]:
    if _axes(operations[0]) & set(BATCH_AXES):
        return [SHARED.with_mix(operations[0], PLACE)]
    return [SHARED]


_LINEAR = ("neg", "copy", "copy_p", "name", "reduce_precision", "real", "imag", "conj", "stored", "pvary", "pbroadcast")

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _nonlinear),
    **dict.fromkeys(("random_fold_in", "random_wrap", "random_unwrap", "threefry2x32"), _nonlinear),
    **dict.fromkeys(("eq_to", "le_to", "lt_to", "log2", "one_minus_square", "polynomial"), _nonlinear),
    **dict.fromkeys(_LINEAR, _linear),
    **dict.fromkeys(("sharding_constraint", "reshard", "layout_constraint", "stop_gradient"), _linear),
    **dict.fromkeys(("device_put", "optimization_barrier"), lambda operations, labels, setting: list(labels)),
    **dict.fromkeys(("add", "add_any", "sub"), _add),
    **dict.fromkeys(
        ("random_bits", "random_split", "random_gamma", "rng_bit_generator", "random_seed", "rng_uniform"), _drawn
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    **dict.fromkeys(("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor"), _reduce),
    **dict.fromkeys(("argmax", "argmin"), _reduce),
    **dict.fromkeys(
        ("top_k", "approx_top_k", "fft", "cholesky", "lu", "qr", "eigh", "svd", "householder_product"), _last
    ),
    **dict.fromkeys(
        ("triangular_solve", "eig", "schur", "tridiagonal_solve", "geqrf", "hessenberg", "tridiagonal"), _last
    ),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add"), _window),
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin"), _psum),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "reduce_scatter", "psum_scatter"), _exchanged),
    **dict.fromkeys(("ppermute", "all_to_all"), _exchanged),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-max", "scatter-min"), _scatter),
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
    name, count = operations[0].primitive, len(operations[0].outputs)
    folded = _fold(operations, labels)
    if folded is not None:
        return [folded]
    if name == "lt" and labels[0].kind is Kind.PLACES and labels[1].is_zero:
        return [constant(False, False)]  # how JAX wraps a negative index
    rule = RULES.get(name)
    if rule is not None:
        return rule(operations, labels, setting)
    varies = any(varying_dims(pair) for pair in zip(operations[0].outputs, operations[1].outputs, strict=True))
    if not varies and all(label.kind is Kind.SHARED for label in labels):
        result = Label(degree=_degree_of(operations[0], labels), mixes=all_mixes(labels), sums=all_sums(labels))
        return [result] * count
    return [_mixed(operations, labels, UNKNOWN)] * count


def trusted_result(output: tuple[Any, Any], labels: Sequence[Label]) -> Label:
    """Return the label of a result of a function that is declared to treat each example by itself."""
    dims, mixes = varying_dims(output), all_mixes(labels)
    if dims:
        return Label(Kind.EXAMPLES, dims[0], None, mixes=mixes)
    if all(label.kind is Kind.SHARED for label in labels):
        return Label(mixes=mixes, sums=all_sums(labels))
    return Label(Kind.SUM, degree=1.0, mixes=mixes)
