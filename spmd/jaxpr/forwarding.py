"""Outputs of a program that are inputs of it, passed through calls and loops."""

from collections.abc import Sequence
from typing import Any

from spmd.jaxpr.equations import (
    called_jaxpr,
    name_of,
    open_jaxpr,
    stacked_operands,
    stacked_outputs,
)
from spmd.jaxpr.interpret import interpret

_Source = int | tuple[str, int] | None
"""The input that a value is; `(name, input)` after an operation that `_INVERSE` has."""

_INVERSE = {"random_unwrap": "random_wrap"}
"""Operations that give back the operand of another one: the data of a random key."""


def forwarded_inputs(jaxpr: Any) -> list[int | None]:
    """Return the number of the input that each output of a jaxpr is; None for computed ones.

    Example:
        >>> import jax
        >>> forwarded_inputs(jax.make_jaxpr(jax.jit(lambda x, y: (y, x + 1, x)))(1.0, 2.0))
        [1, None, 0]
    """
    numbers = []
    for source in _forwarded(open_jaxpr(jaxpr)):
        numbers.append(source if isinstance(source, int) else None)
    return numbers


def _forwarded(jaxpr: Any) -> list[_Source]:
    inputs = list[_Source](range(len(jaxpr.invars)))
    return interpret(jaxpr, inputs, _equation_sources, constant=None)


def _equation_sources(equation: Any, operands: list[_Source]) -> list[_Source]:
    """Return the sources of an equation's outputs, given those of its operands."""
    name = name_of(equation)
    if name in _INVERSE.values() and isinstance(operands[0], int):
        return [(name, operands[0])]
    if name in _INVERSE and isinstance(operands[0], tuple):
        inverse, number = operands[0]
        return [number if inverse == _INVERSE[name] else None]
    if name == "scan":
        return _scan_sources(equation, operands)
    called = called_jaxpr(equation)
    if called is None or name == "shard_map":  # its values are shards
        return [None] * len(equation.outvars)
    return _outer_sources(_forwarded(called), operands)


def _scan_sources(scan: Any, operands: list[_Source]) -> list[_Source]:
    """Return the sources of a loop's outputs: carried values that no step changes, and stacks."""
    inner = _forwarded(open_jaxpr(scan.params["jaxpr"]))
    is_stack = stacked_outputs(scan)
    takes_stack = stacked_operands(scan)
    first = takes_stack.count(False) - is_stack.count(False)
    kept = list[_Source]()
    for number, source in enumerate(inner):
        is_same = source == first + number
        if is_stack[number]:
            is_same = isinstance(source, int) and takes_stack[source]
        kept.append(source if is_same else None)
    return _outer_sources(kept, operands)


def _outer_sources(inner: Sequence[_Source], operands: list[_Source]) -> list[_Source]:
    """Return the sources of a body's outputs outside of it."""
    sources = list[_Source]()
    for source in inner:
        sources.append(operands[source] if isinstance(source, int) else None)
    return sources
