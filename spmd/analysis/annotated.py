"""Element-wise operations behind annotated activations, in a traced step.

XLA's partitioner propagates the sharding of an annotation to the element-wise operations before it,
and then moves their operands: the collective has the line of such an operation, and not that of the
annotation.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from spmd.jaxpr.equations import inner_jaxprs, name_of, nested_jaxprs, producers
from spmd.jaxpr.source import equation_line
from spmd.plan.scopes import read_scope

Annotated = Mapping[tuple[str, str], str]
"""Operation and source line → the annotated activation computed from it."""

_MAX_OPERATIONS = 16
_MIXES = (
    "conv_general_dilated",
    "cum",
    "dot_general",
    "reduce",
    "scatter",
    "sharding_constraint",
    "sort",
)
_BODIES = ("cond", "pallas_call", "scan", "shard_map", "while")


def find_annotated(jaxpr: Any) -> Annotated:
    """Return the element-wise operations before each annotation of a jaxpr, with calls inlined."""
    found: dict[tuple[str, str], str] = {}
    for body in nested_jaxprs(jaxpr):
        made = producers(body)
        for equation in body.eqns:
            scope, name = read_scope(str(equation.source_info.name_stack))
            if scope != "annotate" or name_of(equation) != "sharding_constraint":
                continue
            for operation in _before(made, equation.invars[0]):
                found.setdefault((name_of(operation), equation_line([operation])), name)
    return found


def _before(made: dict[Any, JaxprEqn], value: Any) -> Iterator[JaxprEqn]:
    """Yield the nearest element-wise operations before a value; `made` has value → producer."""
    todo = [(made, value)]
    for _ in range(_MAX_OPERATIONS):
        if not todo:
            return
        made, value = todo.pop(0)
        equation = _producer(made, value)
        if equation is None or _ends_search(equation):
            continue
        bodies = inner_jaxprs(equation)
        if bodies:
            result = bodies[0].outvars[equation.outvars.index(value)]
            todo.append((producers(bodies[0]), result))
        else:
            yield equation
            for operand in equation.invars:
                todo.append((made, operand))


def _producer(made: dict[Any, JaxprEqn], value: Any) -> JaxprEqn | None:
    if isinstance(value, Literal):
        return None
    return made.get(value)


def _ends_search(equation: JaxprEqn) -> bool:
    """Return whether a partitioner does not move a sharding across an operation."""
    name = name_of(equation)
    return name in _BODIES or name.startswith(_MIXES)
