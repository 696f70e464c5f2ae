"""Trip counts of the loops of a compiled program."""

import re

from spmd.analysis.hlo import Computation, HloModule, HloValue, Instruction


def trip_count(program: HloModule, computation: str, loop: Instruction) -> int | None:
    """Return the number of iterations of a `while` in a computation; None if unknown.

    The number is the compiler's annotation, or follows from the loop's start, step and condition.
    """
    known = loop.attribute(r"known_trip_count\D*(\d+)")
    if known:
        return int(known)
    callees = dict(loop.callees())
    condition = program.computations[callees["condition"]]
    test = program.settled(HloValue(condition.name, condition.root))
    compare = program.at(test)
    if compare.opcode != "compare":
        return None
    left, right = compare.operands
    counter = program.settled(HloValue(test.computation, left))
    limit = program.settled(HloValue(test.computation, right))
    if counter.element is None or program.at(counter).opcode != "parameter":
        return None
    step = _step(program, program.computations[callees["body"]], counter.element)
    start = integer(program, HloValue(computation, loop.operands[0], counter.element))
    stop = integer(program, limit)
    if step is None or start is None or stop is None:
        return None
    return _count(start, stop, step, compare.attribute(r"direction=(\w+)"))


def _step(program: HloModule, body: Computation, element: int) -> int | None:
    """Return the constant increment of a carried counter per iteration; None without one."""
    advance = program.settled(HloValue(body.name, body.root, element))
    before = HloValue(body.name, body.parameters[0], element)
    instruction = program.at(advance)
    if instruction.opcode != "add":
        return None
    steps = []
    is_advanced = False
    for operand in instruction.operands:
        term = program.settled(HloValue(advance.computation, operand))
        is_advanced |= term == before
        step = integer(program, term)
        if step is not None:
            steps.append(step)
    if not is_advanced or len(steps) != 1:
        return None
    return steps[0]


def _count(start: int, stop: int, step: int, direction: str) -> int | None:
    """Return the iterations of a counter from start to stop; for `LE` stop counts too."""
    if step <= 0:
        return None
    if direction == "LT":
        ahead = stop - start
    elif direction == "LE":
        ahead = stop - start + 1
    else:
        return None
    return max(0, -(-ahead // step))  # rounded up


def integer(program: HloModule, value: HloValue) -> int | None:
    """Return the value of a constant integer scalar; None for any other value."""
    instruction = program.at(program.settled(value))
    if instruction.opcode != "constant":
        return None
    number = re.fullmatch(r"-?\d+", instruction.literal.strip())
    if number is None:
        return None
    return int(number[0])
