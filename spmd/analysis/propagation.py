"""How every value of a traced program is split, from how its arguments are.

JAX knows how the arguments of a step are split, and where the rule table constrains an activation. What lies between
follows from the operations: a product keeps the axes of its rows and columns, a transpose permutes them, a sum drops
those it sums over. This is what XLA's partitioner does, without running it, so the bytes of every intermediate value
are known as soon as the step is traced.
"""

from collections.abc import Iterable
from typing import Any

from jax.sharding import NamedSharding

from spmd.analysis.jaxpr import Dims, Operation, TracedProgram, TracedValue
from spmd.sharding.mesh import entry_axes

VIEWS = ("transpose", "reshape", "squeeze", "convert_element_type", "copy", "reduce_precision")
"""Operations that change only the form of an array, which keeps its name."""


def place(value: TracedValue, sharding: Any) -> None:
    """Says how a value is split, and whether it lives on the host."""
    if isinstance(sharding, NamedSharding):
        value.dims = dims_of(sharding.spec, len(value.shape))
        value.on_host = sharding.memory_kind == "pinned_host"


def dims_of(spec: Iterable[Any], rank: int) -> Dims:
    """A `PartitionSpec` as the axes of every dimension.

    Example:
        >>> dims_of([None, ("data", "fsdp")], 3)
        ((), ('data', 'fsdp'), ())
    """
    entries = tuple(entry_axes(entry) for entry in spec)
    return entries + ((),) * (rank - len(entries))


def propagate(program: TracedProgram) -> None:
    """Says how every value of a program is split, from what is known of its inputs and of constrained values."""
    for operation in program.operations:
        if operation.primitive == "scan":
            _propagate_scan(operation)
        elif operation.bodies:
            _propagate_bodies(operation)
        else:
            rule = _RULES.get(operation.primitive, _like_operands)
            for output, dims in zip(operation.outputs, rule(operation), strict=True):
                output.dims = output.dims or dims
                if operation.primitive in VIEWS:
                    output.name = output.name or operation.inputs[0].name
            if rule is _like_operands and operation.outputs and operation.outputs[0].dims:
                for value in operation.inputs:  # zeros and masks lie as what they meet
                    if value.dims is None and value.shape == operation.outputs[0].shape:
                        value.dims = operation.outputs[0].dims


def _propagate_scan(operation: Operation) -> None:
    (body,), consts, carry = operation.bodies, operation.params["num_consts"], operation.params["num_carry"]
    outer, state = operation.inputs, slice(consts, consts + carry)
    for value, inner in zip(outer, body.inputs, strict=True):
        if value.dims is not None:
            inner.dims = value.dims if len(value.dims) == len(inner.shape) else value.dims[1:]
    learns = True
    while learns:  # what is carried from one turn to the next
        propagate(body)
        unknown = [
            (before, after.dims)
            for before, after in zip(body.inputs[state], body.outputs[:carry], strict=True)
            if before.dims is None and after.dims is not None
        ]
        for before, dims in unknown:
            before.dims = dims
        learns = bool(unknown)
    for value, inner in zip(outer, body.inputs, strict=True):
        if value.dims is None and inner.dims is not None:
            value.dims = ((),) * (len(value.shape) - len(inner.dims)) + inner.dims
    for output, inner in zip(operation.outputs, body.outputs, strict=True):
        if inner.dims is not None:
            output.dims = ((),) * (len(output.shape) - len(inner.dims)) + inner.dims
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
        end = next((end for end in ends if end.dims is not None), ends[0])  # branches that know nothing end in zeros
        output.dims, output.name, output.on_host = end.dims, end.name, end.on_host
        if specs is not None:
            inside = end.dims or ((),) * len(output.shape)
            outside = dims_of(specs[i], len(output.shape))
            output.dims = _once((*a, *b) for a, b in zip(outside, inside, strict=True))


def _once(dims: Iterable[tuple[str, ...]]) -> Dims:
    """Each axis where it first occurs: it can split an array only once."""
    seen: set[str] = set()
    result = []
    for entry in dims:
        result.append(tuple(axis for axis in entry if axis not in seen))
        seen.update(entry)
    return tuple(result)


def _like_operands(operation: Operation) -> list[Dims | None]:
    """Each dimension of a result is split as the first operand of that rank and size that is split there."""
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
    """A copy to another memory lies as before; its target names the memory, or a sharding."""
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
    rows = left.dims or ((),) * len(left.shape)
    columns = right.dims or ((),) * len(right.shape)
    batch = [rows[i] or columns[j] for i, j in zip(left_batch, right_batch, strict=True)]
    free = [rows[i] for i in range(len(rows)) if i not in (*left_sum, *left_batch)]
    free += [columns[i] for i in range(len(columns)) if i not in (*right_sum, *right_batch)]
    return [_once([*batch, *free])]


def _transpose(operation: Operation) -> list[Dims | None]:
    dims = operation.inputs[0].dims
    return [None if dims is None else tuple(dims[i] for i in operation.params["permutation"])]


def _broadcast(operation: Operation) -> list[Dims | None]:
    value, output = operation.inputs[0], operation.outputs[0]
    if value.dims is None:
        return [None]
    dims: list[tuple[str, ...]] = [()] * len(output.shape)
    for i, j in enumerate(operation.params["broadcast_dimensions"]):
        dims[j] = value.dims[i] if value.shape[i] == output.shape[j] else ()
    return [tuple(dims)]


def _reduce(operation: Operation) -> list[Dims | None]:
    axes, dims = operation.params["axes"], operation.inputs[0].dims
    kept = None if dims is None else tuple(entry for i, entry in enumerate(dims) if i not in axes)
    return [kept for _ in operation.outputs]


def _reshape(operation: Operation) -> list[Dims | None]:
    """Dimensions that are merged or cut: the outermost of each group is split."""
    value, output = operation.inputs[0], operation.outputs[0]
    if value.dims is None:
        return [None]
    dims: list[tuple[str, ...]] = [()] * len(output.shape)
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
        split = [entry for entry in value.dims[first : i + 1] if entry]
        target = next((k for k in range(last, j + 1) if output.shape[k] > 1), last)
        dims[target] = split[0] if split else ()
        i, j = i + 1, j + 1
    return [tuple(dims)]


def _gather(operation: Operation) -> list[Dims | None]:
    """Rows that are looked up: split as the indices, and as the table along the dimensions taken whole."""
    table, indices = operation.inputs[:2]
    numbers, output = operation.params["dimension_numbers"], operation.outputs[0]
    kept = [i for i in range(len(table.shape)) if i not in numbers.collapsed_slice_dims]
    dims: list[tuple[str, ...]] = [()] * len(output.shape)
    for i, j in zip(numbers.offset_dims, kept, strict=False):
        dims[i] = table.dims[j] if table.dims and operation.params["slice_sizes"][j] == table.shape[j] else ()
    rest = [i for i in range(len(dims)) if i not in numbers.offset_dims]
    for i, entry in zip(rest, indices.dims or (), strict=False):
        dims[i] = entry
    return [_once(dims)]


def _scatter(operation: Operation) -> list[Dims | None]:
    """A table with rows added to it: as it was, or else as the rows are along the dimensions kept whole."""
    table, _, rows = operation.inputs
    if table.dims is not None:
        return [table.dims]
    numbers = operation.params["dimension_numbers"]
    kept = [i for i in range(len(table.shape)) if i not in numbers.inserted_window_dims]
    dims: list[tuple[str, ...]] = [()] * len(table.shape)
    for i, j in zip(kept, numbers.update_window_dims, strict=False):
        dims[i] = rows.dims[j] if rows.dims else ()
    return [tuple(dims)]


def _squeeze(operation: Operation) -> list[Dims | None]:
    dims, gone = operation.inputs[0].dims, operation.params["dimensions"]
    return [None if dims is None else tuple(entry for i, entry in enumerate(dims) if i not in gone)]


def _stack(operation: Operation) -> list[Dims | None]:
    dims = operation.inputs[0].dims
    return [None if dims is None else ((), *dims)]


_RULES = {
    "stack_turns": _stack,
    "sharding_constraint": _constraint,
    "device_put": _device_put,
    "name": _name,
    "dot_general": _dot,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "gather": _gather,
    "scatter-add": _scatter,
    "scatter": _scatter,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"), _reduce),
}
