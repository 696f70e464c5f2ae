"""Dependence of a program's outputs on the values of its inputs, and on the steps of its loops."""

from collections.abc import Sequence
from typing import Any

from jax.interpreters.partial_eval import dce_jaxpr

from spmd.jaxpr.equations import (
    called_jaxpr,
    inner_jaxprs,
    open_jaxpr,
    stacked_operands,
    stacked_outputs,
)
from spmd.jaxpr.interpret import interpret


def dependent_outputs(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Return a flag for each output of a jaxpr: dependence on the values of the marked inputs.

    An output of a `while` loop counts as dependent if any operand of the loop is.

    Example:
        >>> import jax
        >>> jaxpr = jax.make_jaxpr(lambda x, y: (x + 1, jax.numpy.zeros_like(x), y))(1.0, 2.0)
        >>> dependent_outputs(jaxpr, [True, False])
        [True, False, False]
    """
    return interpret(open_jaxpr(jaxpr), inputs, _equation_outputs, constant=False)


def needed_inputs(jaxpr: Any, outputs: Sequence[bool] | None = None) -> list[bool]:
    """Return a flag for each input of a jaxpr: the marked outputs, or all, are computed from it.

    Example:
        >>> import jax
        >>> jaxpr = jax.make_jaxpr(lambda x, y: (x + 1, x * y))(1.0, 2.0)
        >>> needed_inputs(jaxpr), needed_inputs(jaxpr, [True, False])
        ([True, True], [True, False])
    """
    jaxpr = open_jaxpr(jaxpr)
    if outputs is None:
        outputs = [True] * len(jaxpr.outvars)
    _, is_needed = dce_jaxpr(jaxpr, list(outputs))
    return is_needed


def _equation_outputs(equation: Any, given: list[bool]) -> list[bool]:
    """Return a flag for each output of an equation: dependence on the marked operands."""
    name = equation.primitive.name
    if name == "scan":
        return _scan_outputs(equation, given)
    if name == "cond":
        is_chosen, *operands = given
        branches = [dependent_outputs(branch, operands) for branch in inner_jaxprs(equation)]
        outputs = list(map(any, zip(*branches, strict=True)))
        if is_chosen:
            return [True] * len(outputs)
        return outputs
    called = called_jaxpr(equation)
    if called is not None:
        return dependent_outputs(called, given)
    return [any(given)] * len(equation.outvars)


def _scan_outputs(equation: Any, given: list[bool]) -> list[bool]:
    """Return a flag for each output of a `scan`: dependence on the marked operands."""
    body: Any = open_jaxpr(equation.params["jaxpr"])
    carries = stacked_outputs(equation).count(False)
    consts = stacked_operands(equation).count(False) - carries
    # A carry that one step makes dependent may make others so in the next: repeat to a fixed point.
    while True:
        outputs = dependent_outputs(body, given)
        after = list(given)
        for number in range(carries):
            after[consts + number] = given[consts + number] or outputs[number]
        if after == given:
            return outputs
        given = after


def made_by_scan(jaxpr: Any) -> list[bool]:
    """Return a flag for each output of a jaxpr: stacked by a scan, here or in a call.

    Example:
        >>> import jax
        >>> f = lambda x: jax.lax.scan(lambda c, _: (c, c + 1), x, None, length=3)
        >>> made_by_scan(jax.make_jaxpr(f)(1.0))
        [False, True]
    """
    jaxpr = open_jaxpr(jaxpr)
    return interpret(jaxpr, [False] * len(jaxpr.invars), _stacked_here, constant=False)


def _stacked_here(equation: Any, _: list[bool]) -> list[bool]:
    """Return a flag for each output of an equation: stacked by it, a scan, or by a scan it calls."""
    if equation.primitive.name == "scan":
        return stacked_outputs(equation)
    called = called_jaxpr(equation)
    if called is not None:
        return made_by_scan(called)
    return [False] * len(equation.outvars)
