"""The equations of a jaxpr and of the jaxprs inside them: iteration and replacement."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, primitives


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Return the jaxpr itself, without the constants of a closed one."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def inner_jaxprs(equation: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs among an equation's parameters, such as a loop's body or the branches of a condition.

    Example:
        >>> import jax
        >>> call = jax.make_jaxpr(jax.jit(jax.numpy.sin))(1.0).eqns[0]
        >>> [[equation.primitive.name for equation in inner.eqns] for inner in inner_jaxprs(call)]
        [['sin']]
    """
    return list(_jaxprs(equation.params))


def equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """Yield every equation of a jaxpr, each followed by those of the jaxprs inside it."""
    for equation in open_jaxpr(jaxpr).eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner)


def _jaxprs(value: Any) -> Iterator[Jaxpr]:
    if isinstance(value, Jaxpr | ClosedJaxpr):
        yield open_jaxpr(value)
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _jaxprs(part)


def replace_equations(jaxpr: ClosedJaxpr, replacements: Mapping[int, ClosedJaxpr]) -> ClosedJaxpr:
    """Return a jaxpr in which some equations, here or in the jaxprs inside, are calls of other jaxprs.

    Args:
        replacements: `id` of an equation → the jaxpr to call with its operands, without constants.
    """
    if not replacements:
        return jaxpr
    return jaxpr.replace(jaxpr=_replaced(jaxpr.jaxpr, replacements))


def _replaced(jaxpr: Jaxpr, replacements: Mapping[int, ClosedJaxpr]) -> Jaxpr:
    replaced = []
    for equation in jaxpr.eqns:
        if id(equation) in replacements:
            params = {"call_jaxpr": replacements[id(equation)]}
            replaced.append(equation.replace(primitive=primitives.closed_call_p, params=params))
        elif _has_inside(equation, replacements):
            params = {name: _replaced_inside(value, replacements) for name, value in equation.params.items()}
            replaced.append(equation.replace(params=params))
        else:
            replaced.append(equation)
    return jaxpr.replace(eqns=replaced)


def _has_inside(equation: JaxprEqn, replacements: Mapping[int, ClosedJaxpr]) -> bool:
    """Return whether an equation to replace is in the jaxprs inside an equation."""
    inside = itertools.chain.from_iterable(map(equations, inner_jaxprs(equation)))
    return any(id(inner) in replacements for inner in inside)


def _replaced_inside(value: Any, replacements: Mapping[int, ClosedJaxpr]) -> Any:
    """Return a parameter of an equation with the jaxprs in it replaced."""
    if isinstance(value, ClosedJaxpr):
        return replace_equations(value, replacements)
    if isinstance(value, Jaxpr):
        return _replaced(value, replacements)
    if isinstance(value, list | tuple):
        return type(value)(_replaced_inside(part, replacements) for part in value)
    return value
