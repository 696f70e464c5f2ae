"""Shardings of all values of a traced program, derived from those of its arguments.

JAX knows the shardings of a step's arguments and of constrained activations. The others follow from
the operations, as in XLA's partitioner: a matmul keeps the axes of its rows and columns, a
transpose permutes them, a sum drops those of the summed dimensions.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.jaxpr.traced_program import DimAxes, Operation, TracedProgram, TracedValue
from spmd.sharding.mesh import entry_axes

ELEMENTWISE = {
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh"),
    *("bessel_i0e", "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz"),
    *("complex", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma"),
    *("div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt"),
    *("igamma", "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma"),
    *("log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "nextafter"),
    *("not", "or", "polygamma", "population_count", "pow", "random_gamma_grad", "real"),
    *("reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n"),
    *("shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh"),
    *("sqrt", "square", "stop_gradient", "stored", "sub", "tan", "tanh", "xor", "zeta"),
}
"""Operations on arrays of one shape, element by element."""

VIEWS = (
    *("transpose", "reshape", "squeeze", "convert_element_type", "copy"),
    *("reduce_precision", "stored"),
)
"""Operations that change only the form of an array; its name is kept."""


def place(value: TracedValue, sharding: Any) -> None:
    """Set the sharding and the memory of a value; ignored unless it is a `NamedSharding`."""
    if isinstance(sharding, NamedSharding):
        value.dims = _dims(sharding.spec, _known(value))
        value.on_host = sharding.memory_kind == "pinned_host"


def _dims(spec: Iterable[Any], own: DimAxes) -> DimAxes:
    """Convert a `PartitionSpec` to the axes of every dimension.

    An unconstrained dimension keeps its `own` axes.
    """
    found = list(_whole(len(own)))
    for dim, entry in enumerate(spec):
        if entry is P.UNCONSTRAINED:
            found[dim] = own[dim]
        else:
            found[dim] = entry_axes(entry)
    return tuple(found)


def _whole(rank: int) -> DimAxes:
    """Return empty axes for each dimension."""
    return ((),) * rank


def _known(value: TracedValue) -> DimAxes:
    """Return the axes of a value's dimensions; empty ones if they are unknown."""
    return value.dims or _whole(len(value.shape))


def propagate(program: TracedProgram) -> None:
    """Set the sharding of every value of a program from its inputs and from constrained values."""
    for operation in program.operations:
        if operation.primitive == "scan":
            _propagate_scan(operation)
        elif operation.bodies:
            _propagate_bodies(operation)
        else:
            _propagate_operation(operation)


def _propagate_operation(operation: Operation) -> None:
    """Set the shardings of the results of an operation without bodies."""
    name = operation.primitive
    for output, dims in zip(operation.outputs, _results(operation), strict=True):
        output.dims = output.dims or dims
        if name in VIEWS:
            output.name = output.name or operation.inputs[0].name
    if name not in _UNARY_RULES and name not in _RULES:
        _split_operands_alike(operation)


def _results(operation: Operation) -> list[DimAxes | None]:
    """Return the shardings of an operation's results by the rule of its primitive."""
    unary = _UNARY_RULES.get(operation.primitive)
    if unary is None:
        rule = _RULES.get(operation.primitive, _like_operands)
        return rule(operation)
    dims = operation.inputs[0].dims
    if dims is None:
        return [None] * len(operation.outputs)
    return [unary(operation, dims)] * len(operation.outputs)


def _split_operands_alike(operation: Operation) -> None:
    """Split zeros and masks like the arrays they are combined with."""
    if not operation.outputs:
        return
    output = operation.outputs[0]
    if not output.dims:
        return
    for value in operation.inputs:
        if value.dims is None and value.shape == output.shape:
            value.dims = output.dims


def _propagate_scan(operation: Operation) -> None:
    """Set the shardings inside of a loop and of its results."""
    (body,) = operation.bodies
    for value, inner in zip(operation.inputs, body.inputs, strict=True):
        if value.dims is None:
            continue
        inner.dims = value.dims
        if len(value.dims) != len(inner.shape):  # a slice of a stacked operand
            inner.dims = value.dims[1:]
    propagate(body)
    unknown = _known_at_end(operation)
    while unknown:
        for old, new in unknown:
            old.dims = new.dims
        propagate(body)
        unknown = _known_at_end(operation)
    for value, inner in zip(operation.inputs, body.inputs, strict=True):
        if value.dims is None and inner.dims is not None:
            value.dims = _stacked(inner.dims, len(value.shape))
    for output, inner in zip(operation.outputs, body.outputs, strict=True):
        if inner.dims is not None:
            output.dims = _stacked(inner.dims, len(output.shape))
        output.name = inner.name
        output.on_host = inner.on_host


def _known_at_end(loop: Operation) -> list[tuple[TracedValue, TracedValue]]:
    """Return the carried values of known sharding only at the end of an iteration."""
    found = []
    for old, new in loop.carried:
        if old.dims is None and new.dims is not None:
            found.append((old, new))
    return found


def _stacked(dims: DimAxes, rank: int) -> DimAxes:
    """Return the axes of a value outside of a loop; the dimension of the steps is whole."""
    return _whole(rank - len(dims)) + dims


def _propagate_bodies(operation: Operation) -> None:
    """Set the shardings inside of a condition, a `while` loop or a manual region, and after it."""
    for body in operation.bodies:
        _enter(operation, body)
        propagate(body)
    specs = operation.params.get("out_specs")
    for i, output in enumerate(operation.outputs):
        end = _first_known([body.outputs[i] for body in operation.bodies])
        output.dims = end.dims
        output.name = end.name
        output.on_host = end.on_host
        if specs is not None:
            outside = _dims(specs[i], _whole(len(output.shape)))
            output.dims = _joined(outside, _known(output))


def _enter(operation: Operation, body: TracedProgram) -> None:
    """Set the shardings of a body's inputs; manual axes do not split values inside."""
    manual = operation.params.get("newly_manual_axes", frozenset())
    operands = operation.inputs[-len(body.inputs) :]
    for value, inner in zip(operands, body.inputs, strict=False):
        if value.dims is not None and len(value.shape) == len(inner.shape):
            inner.dims = _without_axes(value.dims, manual)
        inner.on_host = inner.on_host or value.on_host


def _without_axes(dims: DimAxes, removed: Container[str]) -> DimAxes:
    """Return the axes of each dimension without some of them."""
    kept = []
    for entry in dims:
        kept.append(tuple(axis for axis in entry if axis not in removed))
    return tuple(kept)


def _first_known(ends: Sequence[TracedValue]) -> TracedValue:
    """Return a branch's result of known sharding: a branch of unknown sharding returns zeros."""
    for end in ends:
        if end.dims is not None:
            return end
    return ends[0]


def _joined(outside: DimAxes, inside: DimAxes) -> DimAxes:
    """Return the axes of each dimension: those of a region's specs, then those inside of it."""
    joined = []
    for manual, rest in zip(outside, inside, strict=True):
        joined.append((*manual, *rest))
    return _once(joined)


def _once(dims: Iterable[tuple[str, ...]]) -> DimAxes:
    """Keep the first occurrence of each axis: it can split an array only once."""
    result: list[tuple[str, ...]] = []
    used = set[str]()
    for entry in dims:
        result.append(tuple(axis for axis in entry if axis not in used))
        used.update(entry)
    return tuple(result)


def _like_operands(operation: Operation) -> list[DimAxes | None]:
    """Split each dimension like the first operand of equal rank and size split along it."""
    results: list[DimAxes | None] = []
    for output in operation.outputs:
        rank = len(output.shape)
        near = []
        for value in operation.inputs:
            if value.dims is not None and len(value.shape) == rank:
                near.append(value)
        if not near:
            results.append(None)
            continue
        dims = [_first_split(near, dim, size) for dim, size in enumerate(output.shape)]
        results.append(_once(dims))
    return results


def _first_split(values: Iterable[TracedValue], dim: int, size: int) -> tuple[str, ...]:
    """Return the axes of a dimension in the first value of this size split along it."""
    for value in values:
        if value.dims and value.dims[dim] and value.shape[dim] == size:
            return value.dims[dim]
    return ()


def _constraint(operation: Operation) -> list[DimAxes | None]:
    (value,), (output,) = operation.inputs, operation.outputs
    output.dims = output.dims or value.dims
    place(output, operation.params["sharding"])
    output.name = output.name or value.name
    return [output.dims or value.dims]


def _device_put(operation: Operation) -> list[DimAxes | None]:
    """Keep the sharding; the target names the memory, or is a sharding with a memory kind."""
    results = []
    targets = operation.params["devices"]
    for value, output, target in zip(operation.inputs, operation.outputs, targets, strict=True):
        space = str(getattr(target, "memory_kind", target)).lower()
        output.on_host = "host" in space
        output.name = value.name
        results.append(value.dims)
    return results


def _name(operation: Operation) -> list[DimAxes | None]:
    operation.outputs[0].name = operation.params["name"]
    operation.outputs[0].on_host = operation.inputs[0].on_host
    return [operation.inputs[0].dims]


def _dot(operation: Operation) -> list[DimAxes | None]:
    """Keep the axes of batch dimensions, of rows and of columns, in this order."""
    left, right = operation.inputs
    (left_sum, right_sum), (left_batch, right_batch) = operation.params["dimension_numbers"]
    rows = _known(left)
    columns = _known(right)
    batch = []
    for i, j in zip(left_batch, right_batch, strict=True):
        batch.append(rows[i] or columns[j])
    free_rows = _without(rows, (*left_sum, *left_batch))
    free_columns = _without(columns, (*right_sum, *right_batch))
    return [_once([*batch, *free_rows, *free_columns])]


def _broadcast(operation: Operation, dims: DimAxes) -> DimAxes:
    """Keep the axes of all dimensions but repeated ones."""
    value = operation.inputs[0]
    output = operation.outputs[0]
    result = list(_whole(len(output.shape)))
    for i, j in enumerate(operation.params["broadcast_dimensions"]):
        if value.shape[i] == output.shape[j]:
            result[j] = dims[i]
    return tuple(result)


def _without(dims: DimAxes, removed: Container[int]) -> DimAxes:
    """Return the axes of each dimension, without some dimensions."""
    return tuple(entry for dim, entry in enumerate(dims) if dim not in removed)


def _reshape(operation: Operation, dims: DimAxes) -> DimAxes:
    """Split the outermost of each group of merged or divided dimensions."""
    before = operation.inputs[0].shape
    after = operation.outputs[0].shape
    result = list(_whole(len(after)))
    i = j = 0
    while i < len(before) and j < len(after):
        first_old = i
        first_new = j
        old = before[i]
        new = after[j]
        while old != new:  # the group ends where both have as many elements
            if old < new:
                i += 1
                old *= before[i]
            else:
                j += 1
                new *= after[j]
        target = _first_above_one(after, first_new, j)
        result[target] = _first_of(dims[first_old : i + 1])
        i += 1
        j += 1
    return tuple(result)


def _first_above_one(shape: Sequence[int], first: int, last: int) -> int:
    """Return the first of some dimensions with a size above 1; the very first if there is none."""
    for dim in range(first, last + 1):
        if shape[dim] > 1:
            return dim
    return first


def _first_of(entries: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the first entry with axes; an empty one if there is none."""
    for entry in entries:
        if entry:
            return entry
    return ()


def _others(rank: int, removed: Container[int]) -> list[int]:
    """Return the dimensions of an array, without some."""
    return [dim for dim in range(rank) if dim not in removed]


def _gather(operation: Operation) -> list[DimAxes | None]:
    """Split looked-up rows like the indices, and like the table along whole dimensions."""
    table, indices = operation.inputs[:2]
    numbers = operation.params["dimension_numbers"]
    sizes = operation.params["slice_sizes"]
    rank = len(operation.outputs[0].shape)
    dims = list(_whole(rank))
    kept = _others(len(table.shape), numbers.collapsed_slice_dims)
    for i, j in zip(numbers.offset_dims, kept, strict=False):
        if table.dims and sizes[j] == table.shape[j]:
            dims[i] = table.dims[j]
    rest = _others(rank, numbers.offset_dims)
    for i, entry in zip(rest, indices.dims or (), strict=False):
        dims[i] = entry
    return [_once(dims)]


def _scatter(operation: Operation) -> list[DimAxes | None]:
    """Keep the table's sharding; if unknown, split it like the rows along whole dimensions."""
    table, _, rows = operation.inputs
    if table.dims is not None:
        return [table.dims]
    numbers = operation.params["dimension_numbers"]
    dims = list(_whole(len(table.shape)))
    kept = _others(len(table.shape), numbers.inserted_window_dims)
    for i, j in zip(kept, numbers.update_window_dims, strict=False):
        if rows.dims:
            dims[i] = rows.dims[j]
    return [tuple(dims)]


def _squeeze(operation: Operation, dims: DimAxes) -> DimAxes:
    return _without(dims, operation.params["dimensions"])


def _reduced(operation: Operation, dims: DimAxes) -> DimAxes:
    return _without(dims, operation.params["axes"])


def _transpose(operation: Operation, dims: DimAxes) -> DimAxes:
    return tuple(dims[dim] for dim in operation.params["permutation"])


def _stack_iterations(operation: Operation, dims: DimAxes) -> DimAxes:
    del operation
    return ((), *dims)


REDUCTIONS = (
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"),
    *("argmax", "argmin"),
)

_UNARY_RULES: dict[str, Callable[[Operation, DimAxes], DimAxes]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "stack_iterations": _stack_iterations,
    "transpose": _transpose,
    **dict.fromkeys(REDUCTIONS, _reduced),
}
"""Rules for the results of an operation, from the known sharding of its first operand."""

_RULES = {
    "sharding_constraint": _constraint,
    "device_put": _device_put,
    "name": _name,
    "dot_general": _dot,
    "gather": _gather,
    "scatter-add": _scatter,
    "scatter": _scatter,
}
"""Rules for the shardings of all results."""
