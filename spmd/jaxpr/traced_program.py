"""Traced programs as plain values and operations; `spmd.jaxpr.propagation` adds the shardings."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from spmd.jaxpr.equations import name_of, params_of

Dims = tuple[tuple[str, ...], ...]
"""The mesh axes of each dimension."""

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters that hold a jaxpr which the operation calls with its own operands."""

_NO_CALLS = ("pallas_call", "reduce", "reduce_window")
"""Operations with a jaxpr that they do not call with their own operands."""

_BODIES = {"scan": "jaxpr", "while": "body_jaxpr", "cond": "branches", "shard_map": "jaxpr"}
"""Operation → parameter with the jaxpr, or the jaxprs, of its bodies."""


@dataclasses.dataclass(eq=False)
class TracedValue:
    """One array of a program with its global shape; compared by identity.

    Attributes:
        dims: Mesh axes of each dimension; None if unknown, which counts as replicated.
        name: `checkpoint_name` given by the model; may be empty.
        kept: Bytes of one element in memory, if fewer than `itemsize`.
        is_float: Whether its elements are real or complex numbers, and no integers or flags.
        constant: The value of a literal, or the array of a constant; None if it is no constant.
    """

    shape: tuple[int, ...]
    itemsize: int
    dims: Dims | None = None
    name: str = ""
    on_host: bool = False
    kept: int = 0
    is_float: bool = False
    constant: Any = None

    def bytes(self, axes: Mapping[str, int]) -> int:
        """Return the bytes of one device's shard; uneven shards are padded."""
        dims = self.dims or ((),) * len(self.shape)
        parts = (math.prod(axes[axis] for axis in entry) for entry in dims)
        count = math.prod(-(-size // part) for size, part in zip(self.shape, parts, strict=True))
        return count * (self.kept or self.itemsize)


@dataclasses.dataclass(eq=False)
class Operation:
    """One operation, with its bodies: the body of a loop, the branches of a condition.

    Attributes:
        equations: Its equation and those around it, innermost first; empty for slices and stacks of unrolled loops.
    """

    primitive: str
    inputs: list[TracedValue]
    outputs: list[TracedValue]
    params: Mapping[str, Any]
    bodies: "list[TracedProgram]" = dataclasses.field(default_factory=list)
    equations: tuple[Any, ...] = ()

    @property
    def carried(self) -> "list[tuple[TracedValue, TracedValue]]":
        """The values that a loop carries: those that enter an iteration, with those that leave it."""
        if self.primitive not in ("scan", "while"):
            return []
        (body,) = self.bodies
        first, count = len(body.inputs) - len(body.outputs), len(body.outputs)
        if self.primitive == "scan":
            first, count = self.params["num_consts"], self.params["num_carry"]
        return list(zip(body.inputs[first : first + count], body.outputs[:count], strict=True))


@dataclasses.dataclass(eq=False)
class TracedProgram:
    """Operations in order, calls inlined; only loops, conditions and manual regions have bodies."""

    inputs: list[TracedValue]
    outputs: list[TracedValue]
    operations: list[Operation]

    def walk(self) -> Iterator[Operation]:
        """Yield every operation, each followed by those of its bodies."""
        for operation in self.operations:
            yield operation
            for body in operation.bodies:
                yield from body.walk()


def read_program(jaxpr: Any, *, eager: bool = False) -> TracedProgram:
    """Convert a jaxpr, closed or not.

    With `eager`, operations run as early as possible, as in XLA:CPU: all layers of an unrolled model are then
    recomputed before the first is differentiated.
    """
    return _read(jaxpr, None, {}, eager, ())


def matmul_flops(program: TracedProgram) -> int:
    """Count the FLOPs of all matmuls on all devices together, two for each multiply-add.

    `scan` bodies count once per iteration, `while` bodies once; a condition counts as its most expensive branch. Pallas
    kernels are not counted.

    Example:
        >>> import jax
        >>> x, ws = jax.ShapeDtypeStruct((2, 3), "float32"), jax.ShapeDtypeStruct((5, 3, 3), "float32")
        >>> loop = jax.make_jaxpr(lambda x, ws: jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0])
        >>> matmul_flops(read_program(loop(x, ws))) == 5 * 2 * 2 * 3 * 3
        True
    """
    total = 0
    for operation in program.operations:
        if operation.primitive == "dot_general":
            (contracted, _), _ = operation.params["dimension_numbers"]
            depth = math.prod(operation.inputs[0].shape[i] for i in contracted)
            total += 2 * depth * math.prod(operation.outputs[0].shape)
        elif operation.bodies:
            times = operation.params["length"] if operation.primitive == "scan" else 1
            if operation.primitive == "shard_map":  # shapes inside are of one device along the manual axes
                mesh, manual = operation.params["mesh"], operation.params["newly_manual_axes"]
                times = math.prod(mesh.shape[axis] for axis in manual)
            total += times * max(matmul_flops(body) for body in operation.bodies)
    return total


_Stacks = dict[TracedValue, list[TracedValue]]
"""Stacked array → its slices, where both are known: the results of unrolled loops."""


def _read(
    jaxpr: Any, inputs: Sequence[TracedValue] | None, stacks: _Stacks, eager: bool, around: tuple[Any, ...]
) -> TracedProgram:
    consts = getattr(jaxpr, "consts", ())
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    program = TracedProgram(list(map(_value, jaxpr.invars) if inputs is None else inputs), [], [])
    env: dict[Any, TracedValue] = dict(zip(jaxpr.invars, program.inputs, strict=True))
    for variable, array in itertools.zip_longest(jaxpr.constvars, consts):
        env[variable] = dataclasses.replace(_value(variable), constant=array)

    def read(atom: Any) -> TracedValue:
        return _value(atom) if hasattr(atom, "val") else env[atom]

    for equation in jaxpr.eqns:
        name, inside = name_of(equation), (equation, *around)
        params = _scan_params(equation) if name == "scan" else params_of(equation)
        operands = [read(atom) for atom in equation.invars]
        called, inlined = next((params[key] for key in _CALLS if key in params), None), None
        if name == "optimization_barrier":  # an ordering constraint: its results are its operands
            inlined = TracedProgram(operands, operands, [])
        elif called is not None and name not in (*_BODIES, *_NO_CALLS):
            own = operands[len(operands) - len(getattr(called, "jaxpr", called).invars) :]
            inlined = _read(called, own, stacks, eager, inside)
        elif name == "scan" and 1 < params["length"] <= params["unroll"]:
            inlined = _unroll(params, operands, stacks, eager, inside)
        if inlined is not None:
            program.operations += inlined.operations
            env.update(zip(equation.outvars, inlined.outputs, strict=True))
            continue
        found = params[_BODIES[name]] if name in _BODIES else ()
        bodies = [_read(body, None, {}, eager, inside) for body in (found if isinstance(found, tuple) else (found,))]
        outputs = list(map(_value, equation.outvars))
        env.update(zip(equation.outvars, outputs, strict=True))
        program.operations.append(Operation(name, operands, outputs, params, bodies, inside))
    program.outputs = [read(atom) for atom in jaxpr.outvars]
    return program


def _scan_params(equation: Any) -> dict[str, Any]:
    """Return the parameters of a `scan` in one form: JAX versions count its operands differently.

    A stacked operand has one dimension more outside of the body than inside; all others are constants or carried.
    """
    body = equation.params["jaxpr"].jaxpr
    stacks = [len(a.aval.shape) > len(b.aval.shape) for a, b in zip(equation.invars, body.invars, strict=True)]
    made = [len(a.aval.shape) > len(b.aval.shape) for a, b in zip(equation.outvars, body.outvars, strict=True)]
    counts = {"num_carry": made.count(False), "num_consts": stacks.count(False) - made.count(False)}
    return {key: equation.params[key] for key in ("jaxpr", "length", "reverse", "unroll")} | counts


def _unroll(
    params: Mapping[str, Any], operands: list[TracedValue], stacks: _Stacks, eager: bool, inside: tuple[Any, ...]
) -> TracedProgram:
    """Convert a fully unrolled loop into a straight program."""
    count, consts, length = params["num_carry"], operands[: params["num_consts"]], params["length"]
    carry, xs = operands[len(consts) :][:count], operands[len(consts) + count :]
    program = TracedProgram(operands, [], [])
    for stack in xs:
        if stack not in stacks:
            stacks[stack] = [TracedValue(stack.shape[1:], stack.itemsize, name=stack.name) for _ in range(length)]
            drop = {"dimensions": (0,)}
            program.operations += [Operation("squeeze", [stack], [part], drop) for part in stacks[stack]]
    iterations: list[list[TracedValue]] = []
    late: list[Operation] = []
    for i in reversed(range(length)) if params["reverse"] else range(length):
        body = _read(params["jaxpr"], [*consts, *carry, *(stacks[stack][i] for stack in xs)], stacks, eager, inside)
        waiting = set(carry)
        for operation in body.operations:
            waits = not eager or not waiting.isdisjoint(operation.inputs)
            waiting.update(operation.outputs if waits else ())
            (late if waits else program.operations).append(operation)
        carry, slices = body.outputs[:count], body.outputs[count:]
        iterations.append(slices)
    program.operations += late
    for slices in map(list, zip(*(reversed(iterations) if params["reverse"] else iterations), strict=True)):
        stack = TracedValue((length, *slices[0].shape), slices[0].itemsize, name=slices[0].name)
        stacks[stack] = slices
        program.operations.append(Operation("stack_iterations", slices, [stack], {"reverse": params["reverse"]}))
        program.outputs.append(stack)
    program.outputs = [*carry, *program.outputs]
    return program


def _value(atom: Any) -> TracedValue:
    aval = atom.aval
    dtype = getattr(aval, "dtype", None)
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
    shape, itemsize = tuple(getattr(aval, "shape", ())), getattr(dtype, "itemsize", 0)
    return TracedValue(shape, itemsize, is_float=is_float, constant=getattr(atom, "val", None))
