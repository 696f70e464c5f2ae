"""Inputs of a program whose slices its loops read one by one, such as stacked parameters of layers."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from spmd.jaxpr.equations import inner_jaxprs, name_of, open_jaxpr, stacked_operands

_FORWARDED = ("sharding_constraint", "convert_element_type", "copy", "linear_call")
"""Operations on a stack after which a slice of it is still an operation on a slice."""


def scanned_inputs(jaxpr: Jaxpr | ClosedJaxpr) -> list[bool]:
    """Return a flag for each input of a jaxpr: every use is the stack of a `scan`.

    It may be cast, or constrained to a sharding, before. Only loops of the jaxpr itself count, not
    those inside of its equations.

    Example:
        >>> import jax
        >>> def run(x, scales, shift):
        ...     return jax.lax.scan(lambda x, scale: (x * scale + shift, None), x, scales)[0]
        >>> jaxpr = jax.make_jaxpr(run)(1.0, jax.numpy.ones(3), 2.0)
        >>> scanned_inputs(jaxpr)
        [False, True, False]
    """
    jaxpr = open_jaxpr(jaxpr)
    origins = _origins(jaxpr)
    scanned = set[Any]()
    others = _origins_of(jaxpr.outvars, origins)
    for equation in jaxpr.eqns:
        if _is_forwarded(equation):
            continue
        stacks = _stacks(equation)
        scanned |= _origins_of(stacks, origins)
        others |= _origins_of(_variables(equation.invars) - stacks, origins)
    return [variable in scanned - others for variable in jaxpr.invars]


def unroll_scans(jaxpr: ClosedJaxpr, inputs: Sequence[bool]) -> ClosedJaxpr:
    """Unroll the loops of a jaxpr over marked inputs.

    The loop reads a slice at a constant place then. If an input is a concatenation of arrays, the
    compiler removes both.
    """
    origins = _origins(jaxpr.jaxpr)
    marked = set(itertools.compress(jaxpr.jaxpr.invars, inputs))
    equations = []
    for equation in jaxpr.jaxpr.eqns:
        if not marked.isdisjoint(_origins_of(_stacks(equation), origins)):
            params = {**equation.params, "unroll": equation.params["length"]}
            equation = equation.replace(params=params)
        equations.append(equation)
    return jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(eqns=equations))


def _origins(jaxpr: Jaxpr) -> dict[Any, Any]:
    """Return variable → the input that it is, cast or constrained."""
    origins = dict(zip(jaxpr.invars, jaxpr.invars, strict=True))
    for equation in jaxpr.eqns:
        if not _is_forwarded(equation):
            continue
        for variable in _variables(equation.invars):
            if variable in origins:
                origins[equation.outvars[0]] = origins[variable]
    return origins


def _is_forwarded(equation: JaxprEqn) -> bool:
    """Return whether the result of an equation is its one operand, cast or constrained."""
    if name_of(equation) not in _FORWARDED or len(equation.invars) != 1:
        return False
    inside = itertools.chain.from_iterable(inner.eqns for inner in inner_jaxprs(equation))
    return all(map(_is_forwarded, inside))


def _origins_of(atoms: Iterable[Any], origins: Mapping[Any, Any]) -> set[Any]:
    found = set[Any]()
    for variable in _variables(atoms):
        if variable in origins:
            found.add(origins[variable])
    return found


def _stacks(equation: JaxprEqn) -> set[Any]:
    """Return the variables whose slices an equation reads in a loop."""
    if name_of(equation) != "scan":
        return set()
    found = set[Any]()
    whole = set[Any]()
    for atom, is_stacked in zip(equation.invars, stacked_operands(equation), strict=True):
        if is_stacked:
            found |= _variables([atom])
        else:
            whole |= _variables([atom])
    return found - whole


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, Literal)}
