"""Walk over what a compiled program executes, with the number of executions of each instruction."""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

from spmd.analysis.hlo import HloModule, Instruction
from spmd.analysis.trip_count import trip_count
from spmd.layers.expert_dispatch import EXTRA_PASSES


class Execution(NamedTuple):
    """Executions of one instruction at one place.

    Attributes:
        unknown: The innermost loop of unknown length around it, which is counted as one turn.
        is_conditional: Whether it is in a branch of unknown share, which is counted as always taken.
        is_part: Whether it is inside an instruction whose own figures include it, such as a fusion.
    """

    computation: str
    instruction: Instruction
    times: Fraction
    unknown: Instruction | None = None
    is_conditional: bool = False
    is_part: bool = False


def executions(program: HloModule, taken: Mapping[str, Fraction]) -> Iterator[Execution]:
    """Yield each instruction once for each place where the program executes it, in order.

    Passes of experts after the first are executed no times, as with even load.

    `taken` has the share of times that a `jax.lax.cond` takes its first branch, by the scope around it.
    """
    for instruction in program.computations[program.entry].instructions.values():
        yield from _execute(program, taken, Execution(program.entry, instruction, Fraction(1)))


def _execute(program: HloModule, taken: Mapping[str, Fraction], here: Execution) -> Iterator[Execution]:
    yield here
    computation, instruction, times, *_ = here
    turns, share = 1, None
    if instruction.opcode == "while":
        is_extra = EXTRA_PASSES in instruction.op_name.split("/")
        trips = 0 if is_extra else trip_count(program, computation, instruction)
        here, turns = (here._replace(unknown=instruction), 1) if trips is None else (here, trips)
    elif instruction.opcode == "conditional":
        share = taken.get(instruction.op_name.removesuffix("/cond").rpartition("/")[2])
        here = here._replace(is_conditional=here.is_conditional or share is None)
    elif instruction.opcode != "call":
        here = here._replace(is_part=True)
    ends = instruction.opcode.endswith(("-done", "-update"))  # it names what its start has called
    for number, (role, name) in enumerate(instruction.callees() if not ends else ()):
        weight = Fraction(turns + (role == "condition"))
        if share is not None:  # branches without a role of their own are numbered by the predicate
            weight = share if number == (role == "branch_computations") else 1 - share
        for inner in program.computations[name].instructions.values():
            yield from _execute(
                program, taken, here._replace(computation=name, instruction=inner, times=times * weight)
            )
