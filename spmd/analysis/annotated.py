"""Operations that compute annotated activations, in a traced step.

XLA's partitioner propagates the sharding of an annotation to the element-wise operations before it, and then moves
their operands: the collective has the line of such an operation, and not that of the annotation.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from spmd.jaxpr.equations import equations, inner_jaxprs, name_of, open_jaxpr
from spmd.jaxpr.source import equation_line
from spmd.plan.scopes import read_scope

Annotated = Mapping[tuple[str, str], str]
"""Operation and source line → the activation that it computes."""

_MAX_OPERATIONS = 16
_MIXES = ("conv_general_dilated", "cum", "dot_general", "reduce", "scatter", "sharding_constraint", "sort")
_BODIES = ("cond", "pallas_call", "scan", "shard_map", "while")


def find_annotated(jaxpr: Any) -> Annotated:
    """Return the element-wise operations right before each annotation of a jaxpr, with calls inlined."""
    outer = open_jaxpr(jaxpr)
    found: dict[tuple[str, str], str] = {}
    for inner in (outer, *(body for equation in equations(outer) for body in inner_jaxprs(equation))):
        made = _producers(inner)
        for equation in inner.eqns:
            scope, name = read_scope(str(equation.source_info.name_stack))
            if scope == "annotate" and name_of(equation) == "sharding_constraint":
                for operation in _before(made, equation.invars[0]):
                    found.setdefault((name_of(operation), equation_line([operation])), name)
    return found


def _before(made: dict[Any, JaxprEqn], value: Any) -> Iterator[JaxprEqn]:
    """Yield the nearest element-wise operations that a value is computed by."""
    todo = [(made, value)]
    for _ in range(_MAX_OPERATIONS):
        if not todo:
            return
        made, value = todo.pop(0)
        equation = None if isinstance(value, Literal) else made.get(value)
        if equation is None or name_of(equation) in _BODIES or name_of(equation).startswith(_MIXES):
            continue
        if bodies := inner_jaxprs(equation):
            todo.append((_producers(bodies[0]), bodies[0].outvars[equation.outvars.index(value)]))
        else:
            yield equation
            todo += [(made, operand) for operand in equation.invars]


def _producers(jaxpr: Jaxpr) -> dict[Any, JaxprEqn]:
    return {value: equation for equation in jaxpr.eqns for value in equation.outvars}
