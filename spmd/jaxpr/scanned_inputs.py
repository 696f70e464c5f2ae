"""Inputs of a program whose slices its loops read one by one, such as stacked parameters of layers."""

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from spmd.jaxpr.equations import name_of, open_jaxpr, stacked_operands


def scanned_inputs(jaxpr: Jaxpr | ClosedJaxpr) -> list[bool]:
    """Return a flag for each input of a jaxpr: every use is the stack of a `scan`.

    Only loops of the jaxpr itself count, not those inside of its equations.

    Example:
        >>> import jax
        >>> def run(x, scales, shift):
        ...     return jax.lax.scan(lambda x, scale: (x * scale + shift, None), x, scales)[0]
        >>> jaxpr = jax.make_jaxpr(run)(1.0, jax.numpy.ones(3), 2.0)
        >>> scanned_inputs(jaxpr)
        [False, True, False]
    """
    jaxpr = open_jaxpr(jaxpr)
    scanned = set[Any]()
    others = _variables(jaxpr.outvars)
    for equation in jaxpr.eqns:
        stacks = _stacks(equation)
        scanned |= stacks
        others |= _variables(equation.invars) - stacks
    return [variable in scanned - others for variable in jaxpr.invars]


def unroll_scans(jaxpr: ClosedJaxpr, inputs: Sequence[bool]) -> ClosedJaxpr:
    """Unroll the loops of a jaxpr over marked inputs.

    The loop reads a slice at a constant place then. If an input is a concatenation of arrays, the
    compiler removes both.
    """
    variables = jaxpr.jaxpr.invars
    marked = {each for each, is_marked in zip(variables, inputs, strict=True) if is_marked}
    equations = []
    for equation in jaxpr.jaxpr.eqns:
        if not marked.isdisjoint(_stacks(equation)):
            params = {**equation.params, "unroll": equation.params["length"]}
            equation = equation.replace(params=params)
        equations.append(equation)
    return jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(eqns=equations))


def _stacks(equation: JaxprEqn) -> set[Any]:
    """Return the variables whose slices an equation reads in a loop."""
    if name_of(equation) != "scan":
        return set()
    found = set[Any]()
    whole = set[Any]()
    for atom, is_stacked in zip(equation.invars, stacked_operands(equation), strict=True):
        (found if is_stacked else whole).update(_variables([atom]))
    return found - whole


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, Literal)}
