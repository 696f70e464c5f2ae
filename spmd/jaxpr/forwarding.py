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
    jaxpr = open_jaxpr(jaxpr)
    return _through(_sources(jaxpr), range(len(jaxpr.invars)))


def _sources(jaxpr: Any) -> list[_Source]:
    """Return the sources of a jaxpr's outputs among its own inputs."""
    inputs = list[_Source](range(len(jaxpr.invars)))
    return interpret(jaxpr, inputs, _equation_sources, constant=None)


def _equation_sources(equation: Any, operands: list[_Source]) -> list[_Source]:
    """Return the sources of an equation's outputs, given those of its operands."""
    name = name_of(equation)
    computed: list[_Source] = [None] * len(equation.outvars)
    if name in _INVERSE.values() and isinstance(operands[0], int):
        return [(name, operands[0])]
    if name in _INVERSE:
        source = operands[0]
        if isinstance(source, tuple) and source[0] == _INVERSE[name]:
            return [source[1]]
        return computed
    if name == "scan":
        return _scan_sources(equation, operands)
    called = called_jaxpr(equation)
    if called is None or name == "shard_map":  # its values are shards
        return computed
    return _through(_sources(called), operands)


def _scan_sources(scan: Any, operands: list[_Source]) -> list[_Source]:
    """Return the sources of a loop's outputs: carried values that no step changes, and stacks."""
    inner = _sources(open_jaxpr(scan.params["jaxpr"]))
    is_stack = stacked_outputs(scan)
    takes_stack = stacked_operands(scan)
    first = takes_stack.count(False) - is_stack.count(False)
    kept = list[_Source]()
    for number, source in enumerate(inner):
        is_same = source == first + number
        if is_stack[number]:
            is_same = isinstance(source, int) and takes_stack[source]
        if not is_same:
            source = None
        kept.append(source)
    return _through(kept, operands)


def _through(inner: Sequence[_Source], operands: Sequence[Any]) -> list[Any]:
    """Return what the operands of a body are for the sources of its outputs; None for computed ones."""
    found = list[Any]()
    for source in inner:
        outer = None
        if isinstance(source, int):
            outer = operands[source]
        found.append(outer)
    return found
