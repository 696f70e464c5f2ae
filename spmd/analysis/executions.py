"""Walk over the executed instructions of a compiled program, with their numbers of executions."""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

from spmd.analysis.hlo import HloModule, Instruction
from spmd.analysis.trip_count import trip_count
from spmd.layers.expert_dispatch import EXTRA_PASSES
from spmd.plan.scopes import branch_scope


class Execution(NamedTuple):
    """Executions of one instruction at one place.

    Attributes:
        unknown: The innermost loop of unknown length around it, which is counted as one iteration.
        is_conditional: Whether it is in a branch of unknown share, which is counted as always
            taken.
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

    Passes of experts after the first count as executed 0 times, as with even load. `taken` has
    scope → the share of true predicates of the `jax.lax.cond` in it.
    """
    for instruction in program.computations[program.entry].instructions.values():
        yield from _execute(program, taken, Execution(program.entry, instruction, Fraction(1)))


def _execute(
    program: HloModule, taken: Mapping[str, Fraction], here: Execution
) -> Iterator[Execution]:
    """Yield an execution, and those in all computations called by it."""
    yield here
    computation, instruction, times, *_ = here
    if instruction.opcode.endswith(("-done", "-update")):  # it repeats the callees of its start
        return
    turns = 1
    share = None
    if instruction.opcode == "while":
        trips = _trips(program, computation, instruction)
        if trips is None:
            here = here._replace(unknown=instruction)
        else:
            turns = trips
    elif instruction.opcode == "conditional":
        share = taken.get(branch_scope(instruction.op_name))
        here = here._replace(is_conditional=here.is_conditional or share is None)
    elif instruction.opcode != "call":
        here = here._replace(is_part=True)
    for number, (role, name) in enumerate(instruction.callees()):
        weight = Fraction(turns)
        if role == "condition":  # it is evaluated once more, to end the loop
            weight += 1
        if share is not None:
            weight = share if _is_first_branch(number, role) else 1 - share
        for inner in program.computations[name].instructions.values():
            inside = here._replace(computation=name, instruction=inner, times=times * weight)
            yield from _execute(program, taken, inside)


def _trips(program: HloModule, computation: str, loop: Instruction) -> int | None:
    """Return the number of iterations of a loop; None if it is unknown."""
    if EXTRA_PASSES in loop.op_name.split("/"):
        return 0
    return trip_count(program, computation, loop)


def _is_first_branch(number: int, role: str) -> bool:
    """Return whether a computation is the branch of `jax.lax.cond` for True.

    Branches without a role of their own are numbered by the predicate.
    """
    if role == "branch_computations":
        return number == 1
    return number == 0
