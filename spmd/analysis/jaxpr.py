"""A traced program as plain values and operations, each value with the part of it that one device holds.

Which part that is follows from the operations, and is found by `spmd.analysis.propagation`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

Dims = tuple[tuple[str, ...], ...]
"""The mesh axes of each dimension."""

CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters under which an operation holds the one program that it calls with its own operands."""

BODIES = {"scan": ("jaxpr",), "while": ("body_jaxpr",), "cond": ("branches",), "shard_map": ("jaxpr",)}
"""Operation → the parameter with the program, or the programs, that it contains."""


_NOT_CALLED = ("scan", "shard_map", "pallas_call")
"""Operations whose program has other operands than they have."""


@dataclasses.dataclass(eq=False)
class TracedValue:
    """One array of a program; compared by identity.

    Attributes:
        shape: Its global shape.
        itemsize: The bytes of one element.
        dims: The mesh axes of each dimension; None while nothing says so, which in the end means whole everywhere.
        name: What the model marked it as; may be empty.
        on_host: Whether it lives in host memory.
        kept: The bytes of one element in memory, where they are fewer than it has.
    """

    shape: tuple[int, ...]
    itemsize: int
    dims: Dims | None = None
    name: str = ""
    on_host: bool = False
    kept: int = 0

    def bytes(self, axes: Mapping[str, int]) -> int:
        """The bytes of one device's part; a part that is not whole is padded."""
        dims = self.dims or ((),) * len(self.shape)
        parts = (math.prod(axes[axis] for axis in entry) for entry in dims)
        count = math.prod(-(-size // part) for size, part in zip(self.shape, parts, strict=True))
        return count * (self.kept or self.itemsize)


@dataclasses.dataclass(eq=False)
class Operation:
    """One operation, with those it contains: the body of a loop, the branches of a condition."""

    primitive: str
    inputs: list[TracedValue]
    outputs: list[TracedValue]
    params: Mapping[str, Any]
    bodies: "list[TracedProgram]" = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class TracedProgram:
    """Operations in order, calls inlined; only loops, conditions and manual regions have programs of their own."""

    inputs: list[TracedValue]
    outputs: list[TracedValue]
    operations: list[Operation]


def read_program(jaxpr: Any, *, eager: bool = False) -> TracedProgram:
    """A jaxpr as a `TickTable`.

    Args:
        jaxpr: Closed or not.
        eager: Whether the compiler runs whatever it can as early as it can, as XLA:CPU does; then all layers of an
            unrolled model are recomputed before the first of them is differentiated.
    """
    return _read(jaxpr, None, {}, eager)


Stacks = dict[int, list[TracedValue]]
"""Stack → its slices, where both are known: the results of loops that are unrolled."""


def _read(jaxpr: Any, inputs: Sequence[TracedValue] | None, stacks: Stacks, eager: bool) -> TracedProgram:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    program = TracedProgram(list(map(_value, jaxpr.invars) if inputs is None else inputs), [], [])
    env: dict[Any, TracedValue] = dict(zip(jaxpr.invars, program.inputs, strict=True))
    env.update((variable, _value(variable)) for variable in jaxpr.constvars)

    def read(atom: Any) -> TracedValue:
        return _value(atom) if hasattr(atom, "val") else env[atom]

    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        params = _scan_params(equation) if name == "scan" else params
        operands = [read(atom) for atom in equation.invars]
        if name == "optimization_barrier":  # says when its operands are there, and is nothing of its own
            env.update(zip(equation.outvars, operands, strict=True))
            continue
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


def _unroll(params: Mapping[str, Any], operands: list[TracedValue], stacks: Stacks, eager: bool) -> TracedProgram:
    """A loop whose turns are all written out, as one straight program."""
    count, consts, length = params["num_carry"], operands[: params["num_consts"]], params["length"]
    carry, xs = operands[len(consts) :][:count], operands[len(consts) + count :]
    program = TracedProgram(operands, [], [])
    for stack in xs:
        if id(stack) not in stacks:
            stacks[id(stack)] = [TracedValue(stack.shape[1:], stack.itemsize, name=stack.name) for _ in range(length)]
            drop = {"dimensions": (0,)}
            program.operations += [Operation("squeeze", [stack], [part], drop) for part in stacks[id(stack)]]
    turns: list[list[TracedValue]] = []
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
        stack = TracedValue((length, *slices[0].shape), slices[0].itemsize, name=slices[0].name)
        stacks[id(stack)] = slices
        program.operations.append(Operation("stack_turns", slices, [stack], {"reverse": params["reverse"]}))
        program.outputs.append(stack)
    program.outputs = [*carry, *program.outputs]
    return program


def _value(atom: Any) -> TracedValue:
    aval = atom.aval
    return TracedValue(tuple(getattr(aval, "shape", ())), getattr(getattr(aval, "dtype", None), "itemsize", 0))
