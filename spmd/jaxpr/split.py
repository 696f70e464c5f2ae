"""A program in two parts: what some of its outputs need, and the rest, which may run later.

The second part reads what the first part computed. A loop becomes two loops, and a call is entered;
other equations with inner programs, such as a kernel or a condition, belong to one part.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from spmd.jaxpr.equations import called_jaxpr, name_of, open_jaxpr, stacked_operands, stacked_outputs

_CALLS = (
    *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
)
"""Primitives that do nothing but call a program."""


class SplitProgram:
    """A program in two parts.

    Args:
        program: The whole.
        first: A flag for each output: it is computed by the first part.

    Example:
        >>> import jax
        >>> def both(x, y):
        ...     z = jax.numpy.sin(x)
        ...     return z * y, z + y
        >>> split = SplitProgram(jax.make_jaxpr(both)(1.0, 2.0), [True, False])
        >>> (product, _), kept = split.run_first([1.0, 2.0])
        >>> _, total = split.run_second([1.0, 2.0], kept)
        >>> float(product / 2) == float(total - 2)
        True
    """

    def __init__(self, program: ClosedJaxpr, first: Sequence[bool]) -> None:
        self._consts = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
        self._split = _Split(program.jaxpr, first)

    def run_first(self, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the outputs of the first part, None for the others, and a tree of what is kept."""
        return self._split.run_first(inputs, self._consts)

    def run_second(self, inputs: Sequence[Any], kept: Any) -> list[Any]:
        """Return the outputs of the second part, None for the others.

        Args:
            kept: From `run_first`.
        """
        return self._split.run_second(inputs, kept, self._consts)


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """An equation, and who runs it.

    Attributes:
        inner: The parts of an equation that both run; None if one does.
        is_first: Flag for each output: the first part computes it.
    """

    equation: JaxprEqn
    inner: "_Split | _ScanSplit | None"
    is_first: tuple[bool, ...]

    @property
    def in_first(self) -> bool:
        return any(self.is_first)

    @property
    def in_second(self) -> bool:
        return self.inner is not None or not self.in_first


class _Split:
    """A program without constants of its own, in two parts.

    Attributes:
        first_inputs: Flag for each input: the first part reads it.
        second_inputs: The same of the second part.
        kept: What the second part reads of the first part's values.
    """

    def __init__(self, jaxpr: Jaxpr, first: Sequence[bool]) -> None:
        self.jaxpr = jaxpr
        self.first = tuple(first)
        needed = _variables(_selected(jaxpr.outvars, first))
        steps = list[_Step]()
        for equation in reversed(jaxpr.eqns):
            step = _assign(equation, [v in needed for v in equation.outvars])
            steps.append(step)
            needed |= _read_by_first(step)
        self.steps = steps[::-1]
        self.first_inputs = [v in needed for v in jaxpr.invars]

        in_second = [not is_first for is_first in first]
        later = _variables(_selected(jaxpr.outvars, in_second))
        for step in self.steps:
            later |= _read_by_second(step)
        self.second_inputs = [v in later for v in jaxpr.invars]
        self.kept = list[Var]()
        for step in self.steps:
            for v, is_first in zip(step.equation.outvars, step.is_first, strict=True):
                if is_first and v in later:
                    self.kept.append(v)

    def run_first(
        self, inputs: Sequence[Any], consts: dict[Var, Any] | None = None
    ) -> tuple[list[Any], Any]:
        values = dict(consts or {})
        values.update(zip(self.jaxpr.invars, inputs, strict=True))
        kept_inside = list[Any]()
        for step in self.steps:
            if not step.in_first:
                continue
            operands = _read(values, step.equation.invars)
            if step.inner is None:
                outputs = _evaluate(self.jaxpr, step.equation, operands)
            else:
                with jax.named_scope(_scope_of(step.equation)):
                    outputs, kept = step.inner.run_first(operands)
                kept_inside.append(kept)
            values.update(zip(step.equation.outvars, outputs, strict=True))
        outputs = _of_part(_read(values, self.jaxpr.outvars), self.first)
        return outputs, ([values[v] for v in self.kept], kept_inside)

    def run_second(
        self, inputs: Sequence[Any], kept: Any, consts: dict[Var, Any] | None = None
    ) -> list[Any]:
        own, kept_inside = kept
        remaining = iter(kept_inside)
        values = dict(consts or {})
        values.update(zip(self.jaxpr.invars, inputs, strict=True))
        values.update(zip(self.kept, own, strict=True))
        for step in self.steps:
            if not step.in_second:
                continue
            operands = _read(values, step.equation.invars)
            if step.inner is None:
                outputs = _evaluate(self.jaxpr, step.equation, operands)
            else:
                with jax.named_scope(_scope_of(step.equation)):
                    outputs = step.inner.run_second(operands, next(remaining))
            for v, output, is_first in zip(
                step.equation.outvars, outputs, step.is_first, strict=True
            ):
                if not is_first:
                    values[v] = output
        return _of_part(
            _read(values, self.jaxpr.outvars), [not is_first for is_first in self.first]
        )


class _ScanSplit:
    """A loop as two: each carries its own values, and the second reads what the first one stacks."""

    def __init__(self, equation: JaxprEqn, first: Sequence[bool]) -> None:
        self.params = equation.params
        body = equation.params["jaxpr"]
        self._body_consts = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        self._carries = stacked_outputs(equation).count(False)
        self._consts = stacked_operands(equation).count(False) - self._carries
        carried = slice(self._consts, self._consts + self._carries)
        flags = list(first)
        # A value carried by the first loop may need another of the step before: repeat to a fixed point.
        while True:
            self._body = _Split(open_jaxpr(body), flags)
            after = list(flags)
            for number, is_read in enumerate(self._body.first_inputs[carried]):
                after[number] = flags[number] or is_read
            if after == flags:
                break
            flags = after
        self.first = tuple(flags)
        self._first_carries = flags[: self._carries]
        read_later = self._body.second_inputs[carried]
        self._kept_carries = [
            is_first and is_read
            for is_first, is_read in zip(self._first_carries, read_later, strict=True)
        ]
        self.first_inputs = list(self._body.first_inputs)
        self.second_inputs = list(self._body.second_inputs)
        for number, is_first in enumerate(self._first_carries):
            self.first_inputs[self._consts + number] = is_first
            self.second_inputs[self._consts + number] = not is_first

    def run_first(self, operands: Sequence[Any]) -> tuple[list[Any], Any]:
        consts, carries, stacks = self._operands(operands)

        def body(carried: list[Any], stacked: list[Any]) -> tuple[list[Any], Any]:
            outputs, kept = self._body.run_first([*consts, *carried, *stacked], self._body_consts)
            after = outputs[: self._carries]
            kept_carries = _of_part(carried, self._kept_carries)
            return after, (outputs[self._carries :], kept, kept_carries)

        own = _of_part(carries, self._first_carries)
        read = _of_part(stacks, self._body.first_inputs[self._consts + self._carries :])
        after, (stacked, kept, kept_carries) = self._scan(body, own, read)
        return [*after, *stacked], (kept, kept_carries)

    def run_second(self, operands: Sequence[Any], kept: Any) -> list[Any]:
        consts, carries, stacks = self._operands(operands)
        own_carries = [not is_first for is_first in self._first_carries]

        def body(carried: list[Any], stacked: Any) -> tuple[list[Any], Any]:
            own, (kept, kept_carries) = stacked
            before = [
                there if here is None else here
                for here, there in zip(carried, kept_carries, strict=True)
            ]
            outputs = self._body.run_second([*consts, *before, *own], kept, self._body_consts)
            return outputs[: self._carries], outputs[self._carries :]

        own = _of_part(carries, own_carries)
        read = _of_part(stacks, self._body.second_inputs[self._consts + self._carries :])
        after, stacked = self._scan(body, own, (read, kept))
        return [*after, *stacked]

    def _operands(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        end = self._consts + self._carries
        return (
            list(operands[: self._consts]),
            list(operands[self._consts : end]),
            list(operands[end:]),
        )

    def _scan(self, body: Any, carries: list[Any], stacks: Any) -> tuple[Any, Any]:
        names = ("length", "reverse", "unroll")
        return jax.lax.scan(body, carries, stacks, **{name: self.params[name] for name in names})


def _assign(equation: JaxprEqn, is_first: Sequence[bool]) -> _Step:
    """Return who runs an equation, of whose outputs the first part needs some."""
    is_read = [flag for flag, v in zip(is_first, equation.outvars, strict=True) if _is_named(v)]
    if not any(is_read) or all(is_read):
        return _Step(equation, None, tuple([any(is_read)] * len(equation.outvars)))
    if name_of(equation) == "scan":
        scan = _ScanSplit(equation, is_first)
        return _Step(equation, scan, scan.first)
    called = called_jaxpr(equation)
    if called is not None and name_of(equation) in _CALLS:
        return _Step(equation, _Split(called, is_first), tuple(is_first))
    return _Step(equation, None, (True,) * len(equation.outvars))


def _read_by_first(step: _Step) -> set[Any]:
    if step.inner is not None:
        return _variables(_selected(step.equation.invars, step.inner.first_inputs))
    if step.in_first:
        return _variables(step.equation.invars)
    return set()


def _read_by_second(step: _Step) -> set[Any]:
    if step.inner is not None:
        return _variables(_selected(step.equation.invars, step.inner.second_inputs))
    if step.in_first:
        return set()
    return _variables(step.equation.invars)


def _selected(values: Iterable[Any], flags: Iterable[bool]) -> list[Any]:
    return [value for value, flag in zip(values, flags, strict=True) if flag]


def _of_part(values: Iterable[Any], flags: Iterable[bool]) -> list[Any]:
    """Return the marked values, None in the place of others."""
    return [value if flag else None for value, flag in zip(values, flags, strict=True)]


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def _is_named(v: Any) -> bool:
    """Return whether anything can read an output; others are `_` in a printed program."""
    return type(v).__name__ != "DropVar"


def _read(values: dict[Any, Any], atoms: Iterable[Any]) -> list[Any]:
    """Return values; None for what the other part has."""
    found = list[Any]()
    for atom in atoms:
        if isinstance(atom, Literal):
            found.append(atom.val)
        else:
            found.append(values.get(atom))
    return found


def _evaluate(jaxpr: Jaxpr, equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Evaluate an equation in its own name scope."""
    given = dict[Any, Any]()
    for atom, operand in zip(equation.invars, operands, strict=True):
        if not isinstance(atom, Literal):
            given[atom] = operand
    named = [v for v in equation.outvars if _is_named(v)]
    alone = jaxpr.replace(
        constvars=[],
        invars=list(given),
        outvars=named,
        eqns=[equation],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    results = iter(jaxpr_as_fun(ClosedJaxpr(alone, ()))(*given.values()))
    return [next(results) if _is_named(v) else None for v in equation.outvars]


def _scope_of(equation: JaxprEqn) -> str:
    return str(equation.source_info.name_stack) or "split"
