"""Shardings of all values of a traced program, derived from those of its arguments.

JAX knows the shardings of a step's arguments and of constrained activations. The others follow from the operations, as
in XLA's partitioner: a matmul keeps the axes of its rows and columns, a transpose permutes them, a sum drops those that
it sums over.
"""

from collections.abc import Callable, Container, Iterable
from typing import Any

from jax.sharding import NamedSharding

from spmd.jaxpr.traced_program import Dims, Operation, TracedProgram, TracedValue
from spmd.sharding.mesh import entry_axes

ELEMENTWISE = {
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh"),
    *("bessel_i0e", "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj"),
    *("convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc"),
    *("exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "imag", "integer_pow"),
    *("is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg"),
    *("nextafter", "not", "or", "polygamma", "population_count", "pow", "random_gamma_grad", "real"),
    *("reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left"),
    *("shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient"),
    *("stored", "sub", "tan", "tanh", "xor", "zeta"),
}
"""Operations on arrays of one shape, element by element."""

VIEWS = ("transpose", "reshape", "squeeze", "convert_element_type", "copy", "reduce_precision", "stored")
"""Operations that change only the form of an array; its name is kept."""


def place(value: TracedValue, sharding: Any) -> None:
    """Set the sharding and the memory of a value; ignored unless it is a `NamedSharding`."""
    if isinstance(sharding, NamedSharding):
        value.dims = _dims(sharding.spec, len(value.shape))
        value.on_host = sharding.memory_kind == "pinned_host"


def _dims(spec: Iterable[Any], rank: int) -> Dims:
    """Convert a `PartitionSpec` to the axes of every dimension."""
    entries = tuple(entry_axes(entry) for entry in spec)
    return entries + _whole(rank - len(entries))


def _whole(rank: int) -> Dims:
    return ((),) * rank


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
    name, outputs = operation.primitive, operation.outputs
    if name in _UNARY_RULES:
        dims = operation.inputs[0].dims
        results = [None if dims is None else _UNARY_RULES[name](operation, dims)] * len(outputs)
    else:
        results = _RULES.get(name, _like_operands)(operation)
    for output, dims in zip(outputs, results, strict=True):
        output.dims = output.dims or dims
        if name in VIEWS:
            output.name = output.name or operation.inputs[0].name
    if name not in (*_UNARY_RULES, *_RULES) and outputs and outputs[0].dims:
        for value in operation.inputs:  # zeros and masks are split like the arrays they are combined with
            if value.dims is None and value.shape == outputs[0].shape:
                value.dims = outputs[0].dims


def _propagate_scan(operation: Operation) -> None:
    (body,), consts, carry = operation.bodies, operation.params["num_consts"], operation.params["num_carry"]
    for value, inner in zip(operation.inputs, body.inputs, strict=True):
        if value.dims is not None:
            inner.dims = value.dims if len(value.dims) == len(inner.shape) else value.dims[1:]
    propagate(body)
    carried = list(zip(body.inputs[consts : consts + carry], body.outputs[:carry], strict=True))
    while unknown := [(old, new) for old, new in carried if old.dims is None and new.dims is not None]:
        for old, new in unknown:
            old.dims = new.dims
        propagate(body)
    for value, inner in zip(operation.inputs, body.inputs, strict=True):
        if value.dims is None and inner.dims is not None:
            value.dims = _whole(len(value.shape) - len(inner.dims)) + inner.dims
    for output, inner in zip(operation.outputs, body.outputs, strict=True):
        if inner.dims is not None:
            output.dims = _whole(len(output.shape) - len(inner.dims)) + inner.dims
        output.name, output.on_host = inner.name, inner.on_host


def _propagate_bodies(operation: Operation) -> None:
    manual = operation.params.get("newly_manual_axes", frozenset())
    for body in operation.bodies:
        for value, inner in zip(operation.inputs[-len(body.inputs) :], body.inputs, strict=False):
            if value.dims is not None and len(value.shape) == len(inner.shape):
                inner.dims = tuple(tuple(a for a in entry if a not in manual) for entry in value.dims)
            inner.on_host = inner.on_host or value.on_host
        propagate(body)
    specs = operation.params.get("out_specs")
    for i, output in enumerate(operation.outputs):
        ends = [body.outputs[i] for body in operation.bodies]
        end = next((end for end in ends if end.dims is not None), ends[0])  # a branch of unknown sharding returns zeros
        output.dims, output.name, output.on_host = end.dims, end.name, end.on_host
        if specs is not None:
            inside, outside = end.dims or _whole(len(output.shape)), _dims(specs[i], len(output.shape))
            output.dims = _once((*a, *b) for a, b in zip(outside, inside, strict=True))


def _once(dims: Iterable[tuple[str, ...]]) -> Dims:
    """Keep the first occurrence of each axis: it can split an array only once."""
    result: list[tuple[str, ...]] = []
    for entry in dims:
        result.append(tuple(axis for axis in entry if all(axis not in earlier for earlier in result)))
    return tuple(result)


def _like_operands(operation: Operation) -> list[Dims | None]:
    """Split each dimension like the first operand of that rank and size that is split there."""
    results: list[Dims | None] = []
    for output in operation.outputs:
        near = [v for v in operation.inputs if v.dims is not None and len(v.shape) == len(output.shape)]
        dims = [
            next((v.dims[i] for v in near if v.dims and v.dims[i] and v.shape[i] == size), ())
            for i, size in enumerate(output.shape)
        ]
        results.append(_once(dims) if near else None)
    return results


def _constraint(operation: Operation) -> list[Dims | None]:
    (value,), (output,) = operation.inputs, operation.outputs
    place(output, operation.params["sharding"])
    output.name = output.name or value.name
    return [output.dims or value.dims]


def _device_put(operation: Operation) -> list[Dims | None]:
    """Keep the sharding; the target names the memory, or is a sharding with a memory kind."""
    for value, output, target in zip(operation.inputs, operation.outputs, operation.params["devices"], strict=True):
        space = str(getattr(target, "memory_kind", target)).lower()
        output.on_host, output.name = "host" in space, value.name
    return [value.dims for value in operation.inputs]


def _name(operation: Operation) -> list[Dims | None]:
    operation.outputs[0].name = operation.params["name"]
    operation.outputs[0].on_host = operation.inputs[0].on_host
    return [operation.inputs[0].dims]


def _dot(operation: Operation) -> list[Dims | None]:
    left, right = operation.inputs
    (left_sum, right_sum), (left_batch, right_batch) = operation.params["dimension_numbers"]
    rows, columns = left.dims or _whole(len(left.shape)), right.dims or _whole(len(right.shape))
    batch = [rows[i] or columns[j] for i, j in zip(left_batch, right_batch, strict=True)]
    free = [rows[i] for i in range(len(rows)) if i not in (*left_sum, *left_batch)]
    free += [columns[i] for i in range(len(columns)) if i not in (*right_sum, *right_batch)]
    return [_once([*batch, *free])]


def _broadcast(operation: Operation, dims: Dims) -> Dims:
    value, output = operation.inputs[0], operation.outputs[0]
    result = list(_whole(len(output.shape)))
    for i, j in enumerate(operation.params["broadcast_dimensions"]):
        result[j] = dims[i] if value.shape[i] == output.shape[j] else ()
    return tuple(result)


def _without(dims: Dims, removed: Container[int]) -> Dims:
    return tuple(entry for i, entry in enumerate(dims) if i not in removed)


def _reshape(operation: Operation, dims: Dims) -> Dims:
    """Split the outermost of each group of merged or divided dimensions."""
    value, output = operation.inputs[0], operation.outputs[0]
    result = list(_whole(len(output.shape)))
    i = j = 0
    while i < len(value.shape) and j < len(output.shape):
        first, last, old, new = i, j, value.shape[i], output.shape[j]
        while old != new:
            if old < new:
                i += 1
                old *= value.shape[i]
            else:
                j += 1
                new *= output.shape[j]
        split = [entry for entry in dims[first : i + 1] if entry]
        target = next((k for k in range(last, j + 1) if output.shape[k] > 1), last)
        result[target] = split[0] if split else ()
        i, j = i + 1, j + 1
    return tuple(result)


def _gather(operation: Operation) -> list[Dims | None]:
    """Split looked-up rows like the indices, and like the table along dimensions that are taken whole."""
    table, indices = operation.inputs[:2]
    numbers, sizes = operation.params["dimension_numbers"], operation.params["slice_sizes"]
    kept = [i for i in range(len(table.shape)) if i not in numbers.collapsed_slice_dims]
    dims = list(_whole(len(operation.outputs[0].shape)))
    rest = [i for i in range(len(dims)) if i not in numbers.offset_dims]
    for i, j in zip(numbers.offset_dims, kept, strict=False):
        dims[i] = table.dims[j] if table.dims and sizes[j] == table.shape[j] else ()
    for i, entry in zip(rest, indices.dims or (), strict=False):
        dims[i] = entry
    return [_once(dims)]


def _scatter(operation: Operation) -> list[Dims | None]:
    """Keep the table's sharding; if unknown, split it like the rows along dimensions that are taken whole."""
    table, _, rows = operation.inputs
    if table.dims is not None:
        return [table.dims]
    numbers = operation.params["dimension_numbers"]
    kept = [i for i in range(len(table.shape)) if i not in numbers.inserted_window_dims]
    dims = list(_whole(len(table.shape)))
    for i, j in zip(kept, numbers.update_window_dims, strict=False):
        dims[i] = rows.dims[j] if rows.dims else ()
    return [tuple(dims)]


REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin")

_UNARY_RULES: dict[str, Callable[[Operation, Dims], Dims]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": lambda operation, dims: _without(dims, operation.params["dimensions"]),
    "stack_iterations": lambda _, dims: ((), *dims),
    "transpose": lambda operation, dims: tuple(dims[i] for i in operation.params["permutation"]),
    **dict.fromkeys(REDUCTIONS, lambda operation, dims: _without(dims, operation.params["axes"])),
}
"""Rules for the results of an operation whose first operand has a known sharding."""

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
