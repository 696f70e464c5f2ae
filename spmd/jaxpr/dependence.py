"""Dependence of a program's outputs on the values of its inputs, and on the steps of its loops."""

from collections.abc import Sequence
from typing import Any

from spmd.jaxpr.equations import inner_jaxprs, open_jaxpr


def dependent_outputs(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Return a flag for each output of a jaxpr: dependence on the values of the marked inputs.

    An output of a `while` loop counts as dependent if any operand of the loop is.

    Example:
        >>> import jax
        >>> jaxpr = jax.make_jaxpr(lambda x, y: (x + 1, jax.numpy.zeros_like(x), y))(1.0, 2.0)
        >>> dependent_outputs(jaxpr, [True, False])
        [True, False, False]
    """
    jaxpr = open_jaxpr(jaxpr)
    marked = _Marked()
    marked.add(jaxpr.invars, inputs)
    for equation in jaxpr.eqns:
        outputs = _equation_outputs(equation, marked.flags(equation.invars))
        marked.add(equation.outvars, outputs)
    return marked.flags(jaxpr.outvars)


class _Marked:
    """A set of variables and literals of a jaxpr, by identity."""

    def __init__(self) -> None:
        self.ids = set[int]()

    def add(self, variables: Sequence[Any], flags: Sequence[bool]) -> None:
        """Add the variables with a flag."""
        for variable, is_marked in zip(variables, flags, strict=True):
            if is_marked:
                self.ids.add(id(variable))

    def flags(self, variables: Sequence[Any]) -> list[bool]:
        """Return a flag for each variable: whether it is in the set."""
        return [id(variable) in self.ids for variable in variables]


def _equation_outputs(equation: Any, given: list[bool]) -> list[bool]:
    """Return a flag for each output of an equation: dependence on the marked operands."""
    name = equation.primitive.name
    inner = inner_jaxprs(equation)
    if name == "scan":
        return _scan_outputs(equation, given)
    if name == "cond":
        is_chosen, *operands = given
        branches = [dependent_outputs(branch, operands) for branch in inner]
        outputs = list(map(any, zip(*branches, strict=True)))
        if is_chosen:
            return [True] * len(outputs)
        return outputs
    if name != "while" and len(inner) == 1 and _has_arity(inner[0], equation):
        return dependent_outputs(inner[0], given)  # a call
    return [any(given)] * len(equation.outvars)


def _scan_outputs(equation: Any, given: list[bool]) -> list[bool]:
    """Return a flag for each output of a `scan`: dependence on the marked operands."""
    body: Any = open_jaxpr(equation.params["jaxpr"])
    stacks = sum(_are_stacked(equation.invars, body.invars))
    carries = stacked_outputs(equation).count(False)
    consts = len(given) - stacks - carries
    # A carry that one step makes dependent may make others so in the next: repeat to a fixed point.
    while True:
        outputs = dependent_outputs(body, given)
        after = list(given)
        for number in range(carries):
            after[consts + number] = given[consts + number] or outputs[number]
        if after == given:
            return outputs
        given = after


def _has_arity(jaxpr: Any, equation: Any) -> bool:
    """Return whether a jaxpr takes and returns as many values as an equation."""
    takes_as_many = len(jaxpr.invars) == len(equation.invars)
    return takes_as_many and len(jaxpr.outvars) == len(equation.outvars)


def stacked_outputs(equation: Any) -> list[bool]:
    """Return a flag for each output of a `scan`: one value for each step; others are carried."""
    body: Any = open_jaxpr(equation.params["jaxpr"])
    return _are_stacked(equation.outvars, body.outvars)


def _are_stacked(outside: Sequence[Any], inside: Sequence[Any]) -> list[bool]:
    """Return a flag for each value of a `scan`: more dimensions outside of its body than inside."""
    flags = []
    for outer, inner in zip(outside, inside, strict=True):
        flags.append(len(outer.aval.shape) > len(inner.aval.shape))
    return flags


def made_by_scan(jaxpr: Any) -> list[bool]:
    """Return a flag for each output of a jaxpr: stacked by a scan, here or in a call.

    Example:
        >>> import jax
        >>> f = lambda x: jax.lax.scan(lambda c, _: (c, c + 1), x, None, length=3)
        >>> made_by_scan(jax.make_jaxpr(f)(1.0))
        [False, True]
    """
    jaxpr = open_jaxpr(jaxpr)
    stacked = _Marked()
    for equation in jaxpr.eqns:
        inner = inner_jaxprs(equation)
        outputs = [False] * len(equation.outvars)
        if equation.primitive.name == "scan":
            outputs = stacked_outputs(equation)
        elif len(inner) == 1 and _has_arity(inner[0], equation):
            outputs = made_by_scan(inner[0])
        stacked.add(equation.outvars, outputs)
    return stacked.flags(jaxpr.outvars)
