"""Traced programs as plain values and operations; `spmd.jaxpr.propagation` adds the shardings."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from spmd.jaxpr.equations import (
    name_of,
    open_jaxpr,
    params_of,
    stacked_operands,
    stacked_outputs,
)

DimAxes = tuple[tuple[str, ...], ...]
"""The mesh axes of each dimension."""

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters with a jaxpr that the operation calls with its own operands."""

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
        is_float: Whether its elements are real or complex, not integers or booleans.
        constant: The value of a literal, or the array of a constant; None if it is no constant.
    """

    shape: tuple[int, ...]
    itemsize: int
    dims: DimAxes | None = None
    name: str = ""
    on_host: bool = False
    kept: int = 0
    is_float: bool = False
    constant: Any = None

    def bytes(self, axes: Mapping[str, int]) -> int:
        """Return the bytes of one device's shard; uneven shards are padded."""
        dims = self.dims or ((),) * len(self.shape)
        count = 1
        for size, entry in zip(self.shape, dims, strict=True):
            shards = math.prod(axes[axis] for axis in entry)
            count *= -(-size // shards)  # rounded up
        return count * (self.kept or self.itemsize)


@dataclasses.dataclass(eq=False)
class Operation:
    """One operation, with its bodies: the body of a loop, the branches of a condition.

    Attributes:
        equations: Its equation and those around it, innermost first; empty for slices and stacks of
            unrolled loops.
    """

    primitive: str
    inputs: list[TracedValue]
    outputs: list[TracedValue]
    params: Mapping[str, Any]
    bodies: "list[TracedProgram]" = dataclasses.field(default_factory=list)
    equations: tuple[Any, ...] = ()

    @property
    def carried(self) -> "list[tuple[TracedValue, TracedValue]]":
        """Carried values of a loop, at the start and at the end of an iteration."""
        if self.primitive not in ("scan", "while"):
            return []
        (body,) = self.bodies
        if self.primitive == "scan":
            first = self.params["num_consts"]
            count = self.params["num_carry"]
        else:
            count = len(body.outputs)
            first = len(body.inputs) - count
        return list(zip(body.inputs[first : first + count], body.outputs[:count], strict=True))


@dataclasses.dataclass(eq=False)
class TracedProgram:
    """Operations in order, calls inlined; only loops, conditions and manual regions have bodies."""

    inputs: list[TracedValue]
    outputs: list[TracedValue]
    operations: list[Operation]

    @functools.cached_property
    def uses(self) -> "Mapping[TracedValue, list[Operation]]":
        """Value → the operations with it as an operand; for a program that is whole."""
        found: dict[TracedValue, list[Operation]] = {}
        for operation in self.operations:
            for value in dict.fromkeys(operation.inputs):
                found.setdefault(value, []).append(operation)
        return found

    def walk(self) -> Iterator[Operation]:
        """Yield every operation, each followed by those of its bodies."""
        for operation in self.operations:
            yield operation
            for body in operation.bodies:
                yield from body.walk()


def read_program(jaxpr: Any, *, eager: bool = False) -> TracedProgram:
    """Convert a jaxpr, closed or not.

    With `eager`, operations run as early as possible, as in XLA:CPU: all layers of an unrolled
    model are then recomputed before the backward pass of the first one.
    """
    return _read(jaxpr, None, {}, eager, ())


def matmul_flops(program: TracedProgram) -> int:
    """Count the FLOPs of all matmuls on all devices together, two for each multiply-add.

    `scan` bodies count once per iteration, `while` bodies once; a condition counts as its most
    expensive branch. Pallas kernels are not counted.

    Example:
        >>> import jax
        >>> x, ws = jnp.ones((2, 3)), jnp.ones((5, 3, 3))
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
            total += _times(operation) * max(map(matmul_flops, operation.bodies))
    return total


def _times(operation: Operation) -> int:
    """Return the number of runs of an operation's body, in iterations or devices."""
    if operation.primitive == "scan":
        return operation.params["length"]
    if operation.primitive == "shard_map":  # shapes inside are of one device along the manual axes
        mesh = operation.params["mesh"]
        manual = operation.params["newly_manual_axes"]
        return math.prod(mesh.shape[axis] for axis in manual)
    return 1


_Stacks = dict[TracedValue, list[TracedValue]]
"""Stacked array → its slices, where both are known: the results of unrolled loops."""


def _read(
    jaxpr: Any,
    inputs: Sequence[TracedValue] | None,
    stacks: _Stacks,
    eager: bool,
    around: tuple[Any, ...],
) -> TracedProgram:
    """Convert a jaxpr with these inputs, or with new ones; `around` are the equations around it."""
    consts = getattr(jaxpr, "consts", ())
    jaxpr = open_jaxpr(jaxpr)
    if inputs is None:
        inputs = list(map(_value, jaxpr.invars))
    program = TracedProgram(list(inputs), [], [])
    env: dict[Any, TracedValue] = dict(zip(jaxpr.invars, program.inputs, strict=True))
    for variable, array in itertools.zip_longest(jaxpr.constvars, consts):
        env[variable] = dataclasses.replace(_value(variable), constant=array)
    for equation in jaxpr.eqns:
        operands = [_look_up(atom, env) for atom in equation.invars]
        inside = (equation, *around)
        operation = Operation(name_of(equation), operands, [], _params(equation), [], inside)
        inlined = _inlined(operation, stacks, eager)
        if inlined is not None:
            program.operations += inlined.operations
            env.update(zip(equation.outvars, inlined.outputs, strict=True))
            continue
        for body in _bodies(operation):
            operation.bodies.append(_read(body, None, {}, eager, inside))
        operation.outputs += map(_value, equation.outvars)
        env.update(zip(equation.outvars, operation.outputs, strict=True))
        program.operations.append(operation)
    program.outputs = [_look_up(atom, env) for atom in jaxpr.outvars]
    return program


def _look_up(atom: Any, env: Mapping[Any, TracedValue]) -> TracedValue:
    """Return the value of a variable, or a new one of a literal."""
    if hasattr(atom, "val"):
        return _value(atom)
    return env[atom]


def _params(equation: Any) -> Mapping[str, Any]:
    """Return the parameters of an equation in one form for all versions of JAX."""
    if name_of(equation) == "scan":
        return _scan_params(equation)
    return params_of(equation)


def _inlined(operation: Operation, stacks: _Stacks, eager: bool) -> TracedProgram | None:
    """Return the operations of a call or an unrolled loop; None for any other operation."""
    name = operation.primitive
    params = operation.params
    operands = operation.inputs
    if name == "optimization_barrier":  # an ordering constraint: its results are its operands
        return TracedProgram(operands, operands, [])
    called = _called(params)
    if called is not None and name not in _BODIES and name not in _NO_CALLS:
        taken = len(open_jaxpr(called).invars)
        own = operands[len(operands) - taken :]
        return _read(called, own, stacks, eager, operation.equations)
    if name == "scan" and 1 < params["length"] <= params["unroll"]:
        return _unroll(operation, stacks, eager)
    return None


def _called(params: Mapping[str, Any]) -> Any:
    """Return the jaxpr called by an operation with its own operands; None without one."""
    for key in _CALLS:
        if key in params:
            return params[key]
    return None


def _bodies(operation: Operation) -> tuple[Any, ...]:
    """Return the jaxprs of an operation's bodies."""
    if operation.primitive not in _BODIES:
        return ()
    found = operation.params[_BODIES[operation.primitive]]
    if isinstance(found, tuple):
        return found
    return (found,)


def _scan_params(equation: Any) -> dict[str, Any]:
    """Return the parameters of a `scan` in one form: JAX versions count its operands differently.

    Operands that are not stacked are constants or carried.
    """
    carry = stacked_outputs(equation).count(False)
    consts = stacked_operands(equation).count(False) - carry
    params = {key: equation.params[key] for key in ("jaxpr", "length", "reverse", "unroll")}
    return {**params, "num_carry": carry, "num_consts": consts}


def _unroll(loop: Operation, stacks: _Stacks, eager: bool) -> TracedProgram:
    """Convert a fully unrolled loop into a straight program."""
    params = loop.params
    first = params["num_consts"]
    count = params["num_carry"]
    consts = loop.inputs[:first]
    carry = loop.inputs[first : first + count]
    xs = loop.inputs[first + count :]
    program = TracedProgram(loop.inputs, [], [])
    for stack in xs:
        if stack not in stacks:
            stacks[stack] = _new_slices(stack, params["length"])
            program.operations += _slicing(stack, stacks[stack])
    steps = list(range(params["length"]))
    if params["reverse"]:
        steps.reverse()
    results: list[list[TracedValue]] = [[] for _ in steps]
    late: list[Operation] = []
    for step in steps:
        slices = [stacks[stack][step] for stack in xs]
        inputs = [*consts, *carry, *slices]
        body = _read(params["jaxpr"], inputs, stacks, eager, loop.equations)
        early, waiting = _split_waiting(body.operations, carry, eager)
        program.operations += early
        late += waiting
        carry = body.outputs[:count]
        results[step] = body.outputs[count:]
    program.operations += late
    ys = []
    for parts in map(list, zip(*results, strict=True)):
        shape = (params["length"], *parts[0].shape)
        stack = TracedValue(shape, parts[0].itemsize, name=parts[0].name)
        stacks[stack] = parts
        reverse = {"reverse": params["reverse"]}
        program.operations.append(Operation("stack_iterations", parts, [stack], reverse))
        ys.append(stack)
    program.outputs = [*carry, *ys]
    return program


def _new_slices(stack: TracedValue, length: int) -> list[TracedValue]:
    """Return values for the slices of a stacked operand."""
    slices = []
    for _ in range(length):
        slices.append(TracedValue(stack.shape[1:], stack.itemsize, name=stack.name))
    return slices


def _slicing(stack: TracedValue, slices: Sequence[TracedValue]) -> list[Operation]:
    """Return the slicing operations of a stacked operand."""
    operations = []
    for part in slices:
        operations.append(Operation("squeeze", [stack], [part], {"dimensions": (0,)}))
    return operations


def _split_waiting(
    operations: Sequence[Operation], carry: Sequence[TracedValue], eager: bool
) -> tuple[list[Operation], list[Operation]]:
    """Split the operations of an iteration by their dependence on its carry.

    Return the independent ones first: with `eager` they run at once. Without `eager`, return all as
    dependent.
    """
    early: list[Operation] = []
    late: list[Operation] = []
    waiting = set(carry)
    for operation in operations:
        if eager and waiting.isdisjoint(operation.inputs):
            early.append(operation)
        else:
            waiting.update(operation.outputs)
            late.append(operation)
    return early, late


def _value(atom: Any) -> TracedValue:
    """Return a new value for a variable or a literal of a jaxpr."""
    aval = atom.aval
    dtype = getattr(aval, "dtype", None)
    return TracedValue(
        shape=tuple(getattr(aval, "shape", ())),
        itemsize=getattr(dtype, "itemsize", 0),
        is_float=dtype is not None and jnp.issubdtype(dtype, jnp.inexact),
        constant=getattr(atom, "val", None),
    )
