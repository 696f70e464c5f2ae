"""Iteration over the equations of a jaxpr and of the jaxprs inside them."""

from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


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
