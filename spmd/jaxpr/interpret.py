"""Evaluation of a jaxpr on other values than arrays: whatever a rule computes of an equation."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax.extend.core import Jaxpr, JaxprEqn, Literal

Value = TypeVar("Value")

Rule = Callable[[JaxprEqn, list[Value]], Sequence[Value]]
"""An equation and the values of its operands → the values of its outputs.

A rule enters the jaxprs inside of an equation itself, by another call of `interpret`.
"""


def interpret(
    jaxpr: Jaxpr, inputs: Sequence[Value], rule: Rule[Value], constant: Value
) -> list[Value]:
    """Return a value for each output of a jaxpr, from one for each input, equation by equation.

    `spmd.jaxpr.traced_program` is no such rule: it makes a new value for each use of a literal, and
    takes constants from closed jaxprs.

    Args:
        constant: The value of literals and constants.

    Example:
        >>> import jax
        >>> jaxpr = jax.make_jaxpr(lambda x, y: (x + 1, x * y, 2.0))(1.0, 2.0).jaxpr
        >>> interpret(jaxpr, ["x", "y"], lambda _, operands: ["".join(operands)], "")
        ['x', 'xy', '']
    """
    values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atoms: Sequence[Any]) -> list[Value]:
        found = []
        for atom in atoms:
            if isinstance(atom, Literal):  # it may have no hash
                found.append(constant)
            else:
                found.append(values.get(atom, constant))
        return found

    for equation in jaxpr.eqns:
        outputs = rule(equation, read(equation.invars))
        values.update(zip(equation.outvars, outputs, strict=True))
    return read(jaxpr.outvars)
