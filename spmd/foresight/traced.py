"""A traced program as plain values and operations, each value with the part of it that one device holds.

JAX knows how the arguments of a step are split, and where the rule table constrains an activation. What lies between
follows from the operations: a product keeps the axes of its rows and columns, a transpose permutes them, a sum drops
those it sums over. This is what XLA's partitioner does, without running it, so the bytes of every intermediate value
are known as soon as the step is traced.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from spmd.mesh import entry_axes

Dims = tuple[tuple[str, ...], ...]
"""The mesh axes of each dimension."""

CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters under which an operation holds the one program that it calls with its own operands."""

VIEWS = ("transpose", "reshape", "squeeze", "convert_element_type", "copy", "reduce_precision")
"""Operations that change only the form of an array, which keeps its name."""

BODIES = {"scan": ("jaxpr",), "while": ("body_jaxpr",), "cond": ("branches",), "shard_map": ("jaxpr",)}
"""Operation → the parameter with the program, or the programs, that it contains."""


_NOT_CALLED = ("scan", "shard_map", "pallas_call")
"""Operations whose program has other operands than they have."""


@dataclasses.dataclass(eq=False)
class Value:
    """One array of a program; compared by identity.

    Attributes:
        shape: Its global shape.
        itemsize: The bytes of one element.
        dims: The mesh axes of each dimension; None while nothing says so, which in the end means whole everywhere.
        name: What the model marked it as; may be empty.
        on_host: Whether it lives in host memory.
    """

    shape: tuple[int, ...]
    itemsize: int
    dims: Dims | None = None
    name: str = ""
    on_host: bool = False

    def bytes(self, axes: Mapping[str, int]) -> int:
        """The bytes of one device's part; a part that is not whole is padded."""
        dims = self.dims or ((),) * len(self.shape)
        parts = (math.prod(axes[axis] for axis in entry) for entry in dims)
        return self.itemsize * math.prod(-(-size // part) for size, part in zip(self.shape, parts, strict=True))


@dataclasses.dataclass(eq=False)
class Operation:
    """One operation, with those it contains: the body of a loop, the branches of a condition."""

    primitive: str
    inputs: list[Value]
    outputs: list[Value]
    params: Mapping[str, Any]
    bodies: "list[Program]" = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Program:
    """Operations in order, calls inlined; only loops, conditions and manual regions have programs of their own."""

    inputs: list[Value]
    outputs: list[Value]
    operations: list[Operation]


def read_program(jaxpr: Any, *, eager: bool = False) -> Program:
    """A jaxpr as a `Program`.

    Args:
        jaxpr: Closed or not.
        eager: Whether the compiler runs whatever it can as early as it can, as XLA:CPU does; then all layers of an
            unrolled model are recomputed before the first of them is differentiated.
    """
    return _read(jaxpr, None, {}, eager)


Stacks = dict[int, list[Value]]
"""Stack → its slices, where both are known: the results of loops that are unrolled."""


def _read(jaxpr: Any, inputs: Sequence[Value] | None, stacks: Stacks, eager: bool) -> Program:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    program = Program(list(map(_value, jaxpr.invars) if inputs is None else inputs), [], [])
    env: dict[Any, Value] = dict(zip(jaxpr.invars, program.inputs, strict=True))
    env.update((variable, _value(variable)) for variable in jaxpr.constvars)

    def read(atom: Any) -> Value:
        return _value(atom) if hasattr(atom, "val") else env[atom]

    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        params = _scan_params(equation) if name == "scan" else params
        operands = [read(atom) for atom in equation.invars]
        called = next((params[key] for key in CALLS if key in params), None)
        if called is not None and name not in _NOT_CALLED:
            own = operands[len(operands) - len(getattr(called, "jaxpr", called).invars) :]
            inner = _read(called, own, stacks, eager)
            program.operations += inner.operations
            env.update(zip(equation.outvars, inner.outputs, strict=True))
            continue
        if name == "scan" and 1 < params["length"] <= params["unroll"]:
            inner = _unroll(params, operands, stacks, eager)
            program.operations += inner.operations
            env.update(zip(equation.outvars, inner.outputs, strict=True))
            continue
        bodies = [params[key] for key in BODIES.get(name, ())]
        bodies = list(bodies[0]) if name == "cond" else bodies
        outputs = [_value(variable) for variable in equation.outvars]
        env.update(zip(equation.outvars, outputs, strict=True))
        inside = [_read(body, None, {}, eager) for body in bodies]
        program.operations.append(Operation(name, operands, outputs, params, inside))
    program.outputs = [read(atom) for atom in jaxpr.outvars]
    return program


def _scan_params(equation: Any) -> dict[str, Any]:
    """What a loop says of itself, in one form: versions of JAX count its operands in different ways.

    A stack has one dimension more outside of the body than inside; what has not is a constant or carried.
    """
    body = equation.params["jaxpr"].jaxpr
    stacks = [len(a.aval.shape) > len(b.aval.shape) for a, b in zip(equation.invars, body.invars, strict=True)]
    made = [len(a.aval.shape) > len(b.aval.shape) for a, b in zip(equation.outvars, body.outvars, strict=True)]
    counts = {"num_carry": made.count(False), "num_consts": stacks.count(False) - made.count(False)}
    return {key: equation.params[key] for key in ("jaxpr", "length", "reverse", "unroll")} | counts


def _unroll(params: Mapping[str, Any], operands: list[Value], stacks: Stacks, eager: bool) -> Program:
    """A loop whose turns are all written out, as one straight program."""
    count, consts, length = params["num_carry"], operands[: params["num_consts"]], params["length"]
    carry, xs = operands[len(consts) :][:count], operands[len(consts) + count :]
    program = Program(operands, [], [])
    for stack in xs:
        if id(stack) not in stacks:
            stacks[id(stack)] = [Value(stack.shape[1:], stack.itemsize, name=stack.name) for _ in range(length)]
            drop = {"dimensions": (0,)}
            program.operations += [Operation("squeeze", [stack], [part], drop) for part in stacks[id(stack)]]
    turns: list[list[Value]] = []
    early: list[Operation] = []
    late: list[Operation] = []
    for turn in reversed(range(length)) if params["reverse"] else range(length):
        body = _read(params["jaxpr"], [*consts, *carry, *(stacks[id(stack)][turn] for stack in xs)], stacks, eager)
        waiting = set(map(id, carry))
        for operation in body.operations:
            waits = not eager or any(id(value) in waiting for value in operation.inputs)
            waiting.update(id(value) for value in operation.outputs if waits)
            (late if waits else early).append(operation)
        carry, slices = body.outputs[:count], body.outputs[count:]
        turns.append(slices)
    program.operations += early + late
    for slices in map(list, zip(*(reversed(turns) if params["reverse"] else turns), strict=True)):
        stack = Value((length, *slices[0].shape), slices[0].itemsize, name=slices[0].name)
        stacks[id(stack)] = slices
        program.operations.append(Operation("stack_turns", slices, [stack], {"reverse": params["reverse"]}))
        program.outputs.append(stack)
    program.outputs = [*carry, *program.outputs]
    return program


def _value(atom: Any) -> Value:
    aval = atom.aval
    return Value(tuple(getattr(aval, "shape", ())), getattr(getattr(aval, "dtype", None), "itemsize", 0))


def place(value: Value, sharding: Any) -> None:
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


def propagate(program: Program) -> None:
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
    propagate(body)
    for before, after in zip(body.inputs[state], body.outputs[:carry], strict=True):
        before.dims = before.dims or after.dims
    propagate(body)
    for value, inner in zip(outer, body.inputs, strict=True):
        if value.dims is None and inner.dims is not None:
            value.dims = ((),) * (len(value.shape) - len(inner.dims)) + inner.dims
    for output, inner in zip(operation.outputs, body.outputs, strict=True):
        if inner.dims is not None:
            output.dims = ((),) * (len(output.shape) - len(inner.dims)) + inner.dims
        output.name, output.on_host = inner.name, inner.on_host


def _propagate_bodies(operation: Operation) -> None:
    manual = operation.params.get("manual_axes", frozenset()) if operation.primitive == "shard_map" else frozenset()
    for body in operation.bodies:
        for value, inner in zip(operation.inputs[-len(body.inputs) :], body.inputs, strict=False):
            if value.dims is not None and len(value.shape) == len(inner.shape):
                inner.dims = tuple(tuple(a for a in entry if a not in manual) for entry in value.dims)
            inner.on_host = inner.on_host or value.on_host
        propagate(body)
    specs = operation.params.get("out_specs")
    for i, output in enumerate(operation.outputs):
        inner = operation.bodies[0].outputs[i]
        output.dims = dims_of(specs[i], len(output.shape)) if specs is not None else inner.dims
        output.on_host = inner.on_host


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
