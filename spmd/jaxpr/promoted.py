"""Products of a narrow parameter and a wider array, in the narrow dtype.

JAX promotes the parameter, and multiplies in the wide dtype. One constant in float32, such as a
table of positions, puts every later product in float32. Here the wide operand is rounded to the
parameter's dtype instead. The result keeps its dtype, so the rest of the program is the same.

Products of two promoted arrays, and those with a precision of their own, are explicit requests for
the wide dtype and stay.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from spmd.jaxpr.equations import equations, has_own_rules, replace_equations
from spmd.jaxpr.traced_program import Operation, TracedProgram, TracedValue, read_program

PRODUCTS = ("dot_general", "conv_general_dilated")
"""Primitives that multiply matrices."""

_FORMS = (
    *("transpose", "reshape", "squeeze", "expand_dims", "copy", "broadcast_in_dim"),
    *("slice", "dynamic_slice", "split", "concatenate", "rev", "name", "sharding_constraint"),
)
"""Operations that only move elements: those of their first operand, or of all operands."""

_LOWEST = jax.lax.Precision.DEFAULT
_NO_PRECISION = (None, _LOWEST, (_LOWEST, _LOWEST))


def multiply_narrow(jaxpr: ClosedJaxpr, params: int, dtype: Any) -> ClosedJaxpr:
    """Rewrite products of a promoted parameter and a wider array to the parameter's dtype.

    Args:
        params: The number of inputs that are parameters, the first ones.
        dtype: The narrow dtype.
    """
    program = read_program(jaxpr)
    promoted = _Promoted(jnp.dtype(dtype), set(program.inputs[params:]))
    narrow = dict[int, Any]()
    stays = set[int]()
    for operation in promoted.products(program):
        equation = operation.equations[0]  # equal calls of a function share it
        if promoted.is_mixed(operation):
            narrow[id(equation)] = equation
        else:
            stays.add(id(equation))
    bodies = {}
    for key, equation in narrow.items():
        if key not in stays:
            bodies[key] = _narrow(equation, promoted.dtype)
    return replace_equations(jaxpr, bodies)


def split_products(
    jaxpr: Any, dtype: Any, *, outside: str = ""
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Return the products of a jaxpr with a narrow operand, and those of wider floats alone.

    An operand is narrow in `dtype` or one of fewer bytes. Products in the rules of derivatives
    count as well, and those of integers do not.

    Args:
        outside: A name scope to skip.
    """
    narrow = list[JaxprEqn]()
    wide = list[JaxprEqn]()
    for equation in equations(jaxpr, outside=outside):
        if equation.primitive.name not in PRODUCTS:
            continue
        dtypes: list[Any] = []
        for atom in equation.invars:
            aval: Any = atom.aval
            dtypes.append(aval.dtype)
        if not all(jnp.issubdtype(kind, jnp.floating) for kind in dtypes):
            continue
        if min(kind.itemsize for kind in dtypes) > jnp.dtype(dtype).itemsize:
            wide.append(equation)
        else:
            narrow.append(equation)
    return narrow, wide


def used_dtype(
    program: TracedProgram, number: int, *, differentiated: bool = True
) -> jnp.dtype | None:
    """Return the narrower dtype of an input in all of its uses; None if they do not all cast it.

    Args:
        differentiated: Whether the program is to be differentiated. The rules of a custom derivative
            may then use an operand in another dtype than the function does.
    """
    value = program.inputs[number]
    if not value.is_float:
        return None
    found = _used_dtypes(program, value, differentiated)
    if len(found) != 1:
        return None
    (dtype,) = found
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return None
    if dtype.itemsize >= value.itemsize:
        return None
    return dtype


def _used_dtypes(
    program: TracedProgram, value: TracedValue, differentiated: bool
) -> set[jnp.dtype | None]:
    """Return the dtypes to which a program casts a value; None is one for any other use."""
    found = set[jnp.dtype | None]()
    if value in program.outputs:
        found.add(None)
    for operation in program.uses.get(value, ()):
        if differentiated and any(map(has_own_rules, operation.equations[1:])):
            found.add(None)
        elif operation.primitive == "convert_element_type":
            found.add(jnp.dtype(operation.params["new_dtype"]))
        elif operation.primitive in _FORMS and operation.inputs == [value]:
            for moved in operation.outputs:
                found |= _used_dtypes(program, moved, differentiated)
        elif operation.primitive in ("scan", "shard_map"):
            found |= _dtypes_in_body(operation, value, differentiated)
        else:
            found.add(None)
    return found


def _dtypes_in_body(
    around: Operation, value: TracedValue, differentiated: bool
) -> set[jnp.dtype | None]:
    """Return the dtypes to which the body of a loop or a manual region casts an operand.

    Of a stack, they are those of its slices.
    """
    (body,) = around.bodies
    carried = {start for start, _ in around.carried}
    found = set[jnp.dtype | None]()
    for operand, inner in zip(around.inputs, body.inputs, strict=True):
        if operand is value:
            found |= {None} if inner in carried else _used_dtypes(body, inner, differentiated)
    return found


def _narrow(equation: Any, dtype: jnp.dtype) -> ClosedJaxpr:
    """Return a product computed in a dtype, with operands and result in the equation's dtypes."""
    params = {**equation.params, "preferred_element_type": dtype}

    def product(*operands: jax.Array) -> jax.Array:
        narrow = [operand.astype(dtype) for operand in operands]
        result = equation.primitive.bind(*narrow, **params)
        return result.astype(equation.outvars[0].aval.dtype)

    operands = []
    for atom in equation.invars:
        operands.append(jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype))
    return jax.make_jaxpr(product)(*operands)


@dataclasses.dataclass
class _Promoted:
    """Arrays of a program cast from a narrow dtype to a wider one, and their origin.

    Attributes:
        dynamic: Values that depend on anything but parameters.
        values: Promoted values.
    """

    dtype: jnp.dtype
    dynamic: set[TracedValue]
    values: set[TracedValue] = dataclasses.field(default_factory=set)

    def products(self, program: TracedProgram) -> Iterator[Operation]:
        """Yield the products of a program in order, after classifying the values before each."""
        for operation in program.operations:
            if not self.dynamic.isdisjoint(operation.inputs):
                self.dynamic.update(operation.outputs)
            if operation.primitive in PRODUCTS:
                yield operation
            elif self._is_promoted(operation):
                self.values.update(operation.outputs)
            for body in operation.bodies:
                self._enter(operation, body)
                yield from self.products(body)
                for outer, inner in zip(operation.outputs, body.outputs, strict=False):
                    if inner in self.dynamic:
                        self.dynamic.add(outer)

    def is_mixed(self, operation: Operation) -> bool:
        """Return whether one operand is a promoted parameter and the other is wide by itself."""
        equation, *around = operation.equations
        if equation.params["precision"] not in _NO_PRECISION:
            return False
        if any(has_own_rules(outer) for outer in around):
            return False
        if not all(value.is_float for value in operation.inputs):
            return False
        promoted = [value for value in operation.inputs if value in self.values]
        return len(promoted) == 1 and promoted[0] not in self.dynamic

    def _is_promoted(self, operation: Operation) -> bool:
        """Return whether the results of an operation are promoted."""
        if operation.primitive == "convert_element_type":
            after = jnp.dtype(operation.params["new_dtype"])
            is_wider = jnp.issubdtype(after, jnp.floating) and after.itemsize > self.dtype.itemsize
            return is_wider and operation.equations[0].invars[0].aval.dtype == self.dtype
        if operation.primitive == "concatenate":
            return self.values.issuperset(operation.inputs)
        return operation.primitive in _FORMS and operation.inputs[0] in self.values

    def _enter(self, operation: Operation, body: TracedProgram) -> None:
        """Copy the properties of operands to the inputs of a body.

        Values that a loop changes in its carry count as dynamic.
        """
        carried = set[TracedValue]()
        for old, new in operation.carried:
            if new is not old:
                carried.add(old)
        operands = operation.inputs[len(operation.inputs) - len(body.inputs) :]
        for value, inner in zip(operands, body.inputs, strict=True):
            if value in self.dynamic or inner in carried:
                self.dynamic.add(inner)
            if value in self.values and inner not in carried:
                self.values.add(inner)
