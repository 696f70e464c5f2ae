"""Compute scheduled while a collective of a compiled program runs.

A program is printed in the order of its schedule. An asynchronous collective is a start and a done
with other instructions between them; a SparseCore gets the operands in an `-update` after the
start. XLA:TPU for v5e writes a chain: fusions that repeat the collective, each but the first and
the last with something to compute.
"""

from spmd.analysis.hlo import Computation, HloModule, Instruction

_COMPUTES = ("fusion", "custom-call", "convolution", "dot", "while")


def chain_of(instruction: Instruction) -> tuple[str, str] | None:
    """Return the channel and the number of the chain of an instruction, if it belongs to one."""
    chain = instruction.attribute(r'\bchain_id="(\d+)"')
    if not chain:
        return None
    return instruction.attribute(r"channel_id=(\d+)"), chain


def compute_beside(program: HloModule, name: str, instruction: Instruction) -> tuple[bool, int]:
    """Return whether anything is computed beside a collective, and the cycles of it on a TPU.

    `name` is the computation of the collective. The cycles are the compiler's estimate, without
    Pallas kernels and loops, for which it has none.
    """
    chain = chain_of(instruction)
    name, instruction = _outermost(program, name, instruction)
    if chain is None:
        between = _before_the_end(program.computations[name], instruction)
    else:
        between = _inside_chain(program, program.computations[name], chain)
    computes = False
    cycles = 0
    for beside in between:
        cycles += beside.estimated_cycles
        if beside.opcode in _COMPUTES:
            computes = True
    return computes, cycles


def _outermost(program: HloModule, name: str, instruction: Instruction) -> tuple[str, Instruction]:
    """Return the scheduled instruction around another one, with its computation.

    It is a start, or an instruction of the entry computation, a loop's body or a branch.
    """
    while not instruction.opcode.endswith("-start"):
        calls = program.callers[name]
        if not calls:
            break
        caller, call, _ = calls[0]
        if call.opcode in ("while", "conditional"):
            break
        name, instruction = caller, call
    return name, instruction


def _before_the_end(computation: Computation, start: Instruction) -> list[Instruction]:
    """Return the instructions between a start and its done."""
    last = start
    while True:
        later = []
        for user, _ in computation.users[last.name]:
            if user.opcode.endswith(("-update", "-done")):
                later.append(user)
        if not later:
            break
        last = later[0]
        if not start.operands:  # a SparseCore gets them in the update
            start = last
    order = list(computation.instructions.values())
    return order[order.index(start) + 1 : order.index(last)]


def _inside_chain(
    program: HloModule, computation: Computation, chain: tuple[str, str]
) -> list[Instruction]:
    """Return the fusions of a chain, without the first and the last."""
    callees = set()
    for callee in program.computations.values():
        if chain in map(chain_of, callee.instructions.values()):
            callees.add(callee.name)
    links = []
    for instruction in computation.instructions.values():
        if any(name in callees for _, name in instruction.callees()):
            links.append(instruction)
    return links[1:-1]
