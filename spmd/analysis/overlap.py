"""Compute that a compiled program has in its schedule while a collective runs.

A program is printed in the order of its schedule. An asynchronous collective is a start and a done with other
instructions between them; a SparseCore gets the operands in an `-update` after the start. XLA:TPU for v5e writes a
chain: fusions that repeat the collective, each but the first and the last with something to compute.
"""

from spmd.analysis.hlo import HloModule, Instruction

_COMPUTES = ("fusion", "custom-call", "convolution", "dot", "while")


def chain_of(instruction: Instruction) -> tuple[str, str] | None:
    """Return the channel and the number of the chain that an instruction belongs to, if it does."""
    chain = instruction.attribute(r'\bchain_id="(\d+)"')
    return (instruction.attribute(r"channel_id=(\d+)"), chain) if chain else None


def compute_beside(program: HloModule, name: str, instruction: Instruction) -> tuple[bool, int]:
    """Return whether anything is computed while a collective of a computation runs, and its cycles on a TPU.

    These are the compiler's estimate, without Pallas kernels and loops, for which it has none.
    """
    calls, chain = program.callers[name], chain_of(instruction)
    while not instruction.opcode.endswith("-start") and calls and calls[0][1].opcode not in ("while", "conditional"):
        name, instruction, _ = calls[0]
        calls = program.callers[name]
    order, users = list(program.computations[name].instructions.values()), program.computations[name].users
    start = last = instruction
    while later := [user for user, _ in users[last.name] if user.opcode.endswith(("-update", "-done"))]:
        start, last = start if start.operands else later[0], later[0]
    between = order[order.index(start) + 1 : order.index(last)]
    if chain:
        callees = {c.name for c in program.computations.values() if chain in map(chain_of, c.instructions.values())}
        between = [i for i in order if any(callee in callees for _, callee in i.callees())][1:-1]
    cycles = [int(i.attribute(r'"estimated_cycles":"(\d+)"') or 0) for i in between]
    return any(i.opcode in _COMPUTES for i in between), sum(cycles)
