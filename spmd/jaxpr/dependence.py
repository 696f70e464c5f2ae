"""Dependence of a program's outputs on the values of its inputs, and on the steps of its loops."""

from collections.abc import Sequence
from typing import Any

from spmd.jaxpr.equations import inner_jaxprs, open_jaxpr


def dependent_outputs(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Return for each output of a jaxpr whether it depends on the values of the marked inputs.

    An output of a `while` loop counts as dependent if any operand of the loop is.

    Example:
        >>> import jax
        >>> jaxpr = jax.make_jaxpr(lambda x, y: (x + 1, jax.numpy.zeros_like(x), y))(1.0, 2.0)
        >>> dependent_outputs(jaxpr, [True, False])
        [True, False, False]
    """
    jaxpr = open_jaxpr(jaxpr)
    marked = {id(x) for x, is_marked in zip(jaxpr.invars, inputs, strict=True) if is_marked}
    for equation in jaxpr.eqns:
        outputs = _equation_outputs(equation, [id(x) in marked for x in equation.invars])
        marked |= {id(x) for x, is_marked in zip(equation.outvars, outputs, strict=True) if is_marked}
    return [id(x) in marked for x in jaxpr.outvars]


def _equation_outputs(equation: Any, given: list[bool]) -> list[bool]:
    """Return which outputs of an equation depend on the marked operands."""
    name, inner = equation.primitive.name, inner_jaxprs(equation)
    if name == "scan":
        return _scan_outputs(equation, given)
    if name == "cond":
        branches = [dependent_outputs(branch, given[1:]) for branch in inner]
        return [given[0] or any(outputs) for outputs in zip(*branches, strict=True)]
    if name != "while" and len(inner) == 1 and _has_arity(inner[0], equation):
        return dependent_outputs(inner[0], given)  # a call
    return [any(given)] * len(equation.outvars)


def _scan_outputs(equation: Any, given: list[bool]) -> list[bool]:
    body: Any = open_jaxpr(equation.params["jaxpr"])
    is_carry = [not is_stacked for is_stacked in stacked_outputs(equation)]
    stacks = sum(len(a.aval.shape) > len(b.aval.shape) for a, b in zip(equation.invars, body.invars, strict=True))
    carries = sum(is_carry)
    consts = len(given) - stacks - carries
    while True:
        outputs = dependent_outputs(body, given)
        carried = [a or b for a, b in zip(given[consts : consts + carries], outputs[:carries], strict=True)]
        after = [*given[:consts], *carried, *given[consts + carries :]]
        if after == given:
            return outputs
        given = after


def _has_arity(jaxpr: Any, equation: Any) -> bool:
    return len(jaxpr.invars) == len(equation.invars) and len(jaxpr.outvars) == len(equation.outvars)


def stacked_outputs(equation: Any) -> list[bool]:
    """Return which outputs of a `scan` have a value for each of its steps; the others are carried."""
    body: Any = open_jaxpr(equation.params["jaxpr"])
    return [len(a.aval.shape) > len(b.aval.shape) for a, b in zip(equation.outvars, body.outvars, strict=True)]


def made_by_scan(jaxpr: Any) -> list[bool]:
    """Return for each output of a jaxpr whether a scan, here or in a call, has stacked it.

    Example:
        >>> import jax
        >>> f = lambda x: jax.lax.scan(lambda c, _: (c, c + 1), x, None, length=3)
        >>> made_by_scan(jax.make_jaxpr(f)(1.0))
        [False, True]
    """
    jaxpr = open_jaxpr(jaxpr)
    stacked = set[int]()
    for equation in jaxpr.eqns:
        inner, outputs = inner_jaxprs(equation), [False] * len(equation.outvars)
        if equation.primitive.name == "scan":
            outputs = stacked_outputs(equation)
        elif len(inner) == 1 and _has_arity(inner[0], equation):
            outputs = made_by_scan(inner[0])
        stacked |= {id(x) for x, is_stacked in zip(equation.outvars, outputs, strict=True) if is_stacked}
    return [id(x) in stacked for x in jaxpr.outvars]
