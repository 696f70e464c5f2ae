"""Trip counts of the loops of a compiled program."""

import re

from spmd.analysis.hlo import HloModule, HloValue, Instruction


def trip_count(program: HloModule, computation: str, loop: Instruction) -> int | None:
    """Return the number of iterations of a `while` in a computation; None if unknown.

    It is what the compiler says, or follows from the loop's start, step and condition.
    """
    if known := loop.attribute(r"known_trip_count\D*(\d+)"):
        return int(known)
    called = dict(loop.callees())
    test = program.settled(HloValue(called["condition"], program.computations[called["condition"]].root))
    compare = program.at(test)
    if compare.opcode != "compare":
        return None
    counter, limit = (program.settled(HloValue(test.computation, operand)) for operand in compare.operands)
    if counter.element is None or program.at(counter).opcode != "parameter":
        return None
    body = program.computations[called["body"]]
    advance = program.settled(HloValue(body.name, body.root, counter.element))
    terms = [program.settled(HloValue(advance.computation, operand)) for operand in program.at(advance).operands]
    steps = [step for term in terms if (step := integer(program, term)) is not None]
    before = HloValue(body.name, body.parameters[0], counter.element)
    if program.at(advance).opcode != "add" or len(steps) != 1 or before not in terms:
        return None
    start, stop = integer(program, HloValue(computation, loop.operands[0], counter.element)), integer(program, limit)
    if start is None or stop is None or steps[0] <= 0:
        return None
    ahead = {"LT": stop - start, "LE": stop - start + 1}.get(compare.attribute(r"direction=(\w+)"))
    return None if ahead is None else max(0, -(-ahead // steps[0]))


def integer(program: HloModule, value: HloValue) -> int | None:
    """Return the value of a constant integer scalar; None for any other value."""
    instruction = program.at(program.settled(value))
    number = re.fullmatch(r"-?\d+", instruction.literal.strip())
    return int(number[0]) if instruction.opcode == "constant" and number else None
