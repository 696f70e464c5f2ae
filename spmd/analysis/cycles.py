"""Compute time of a compiled TPU program, by its compiler's cycles.

The compiler estimates the cycles of each operation; those of a program are the sum over all
executions. Pallas kernels, collectives, asynchronous copies, the work of SparseCores and waiting
have no estimate: they are listed as not counted. Programs of other compilers have no cycles at all.
"""

import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from spmd.analysis.collective_record import KINDS
from spmd.analysis.executions import executions
from spmd.analysis.hlo import HloModule, Instruction
from spmd.analysis.replica_groups import kind_of
from spmd.errors import ConfigError, Problem

_FREE = (
    "bitcast",
    "call",
    "conditional",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "tuple",
    "while",
)


@dataclasses.dataclass(frozen=True)
class Cycles:
    """Estimated cycles of one run of a program on one device.

    Attributes:
        cycles: Kind of operation → its cycles, the most first.
        uncounted: Kind of operation without an estimate → its executions, but for scalars.
        is_bound: Whether a branch of unknown share is counted as always taken.
    """

    cycles: Mapping[str, int]
    uncounted: Mapping[str, int]
    is_bound: bool

    def text(self, clock: float | None) -> str:
        """Return one line, with the time if the clock (Hz) is known."""
        total = sum(self.cycles.values())
        amount = f"{total:,} cycles"
        if clock:
            frequency = f"{clock / 1e9:.4g} GHz"
            amount = f"{total / clock:.4g} s by the compiler's cycles at {frequency}"
        if self.is_bound:
            amount = f"at most {amount}"
        without = ["waiting"]
        for kind, times in self.uncounted.items():
            without.append(f"{times:,} {kind}")
        return f"compute of a step: {amount}; without {', '.join(without)}"

    def to_json(self, clock: float | None) -> dict[str, Any]:
        """Return everything as JSON values."""
        seconds = clock
        if clock:
            seconds = sum(self.cycles.values()) / clock
        return {"seconds": seconds, **dataclasses.asdict(self)}


def count_cycles(program: HloModule, taken: Mapping[str, Fraction]) -> Cycles | None:
    """Return the cycles of a parsed program; None if its compiler estimates none.

    `taken` is for `executions`. A loop of unknown length raises `ConfigError`.
    """
    counted: dict[str, Fraction] = {}
    uncounted: dict[str, Fraction] = {}
    unknown: dict[str, Problem] = {}
    is_bound = False
    for here in executions(program, taken):
        instruction = here.instruction
        if here.is_part:
            continue
        cycles = instruction.estimated_cycles
        if cycles:
            kind = instruction.opcode
            counted[kind] = counted.get(kind, Fraction()) + here.times * cycles
        else:
            kind = _without_cycles(program, here.computation, instruction)
            if not kind:
                continue
            uncounted[kind] = uncounted.get(kind, Fraction()) + here.times
        is_bound |= here.is_conditional
        if here.unknown:
            where = f"{here.unknown.name} ({here.unknown.op_name})"
            unknown[where] = Problem(
                where,
                "is a loop of unknown length",
                "cycles cannot be counted",
                "jax.lax.scan, or bounds that do not depend on data",
            )
    if not counted:
        return None
    if unknown:
        raise ConfigError("The program has loops of unknown length:", unknown.values())
    return Cycles(_rounded(counted), _rounded(uncounted), is_bound)


def _rounded(kinds: Mapping[str, Fraction]) -> dict[str, int]:
    """Return kind → whole number, the largest first."""
    largest_first = sorted(kinds.items(), key=lambda item: -item[1])
    return {kind: round(number) for kind, number in largest_first}


def _without_cycles(program: HloModule, computation: str, instruction: Instruction) -> str:
    """Return the kind of an operation without an estimate.

    Return an empty string for a free operation, and for the end of an asynchronous one.
    """
    opcode = instruction.opcode
    name, _, _ = instruction.name.partition(".")
    if opcode.endswith(("-done", "-update")) or name.endswith("-done"):
        return ""
    if opcode in _FREE or all(array.size <= 1 for array in instruction.arrays):
        return ""
    if _communicates(program, instruction):
        return "collectives"
    if program.kernel_of(computation, instruction):
        return "Pallas kernels"
    if opcode == "fusion":
        return name
    if opcode != "custom-call":
        return opcode
    return ""


def _communicates(program: HloModule, instruction: Instruction) -> bool:
    """Return whether an instruction is a collective, or has one inside."""
    if kind_of(instruction) in KINDS:
        return True
    for _, callee in instruction.callees():
        for inner in program.computations[callee].instructions.values():
            if _communicates(program, inner):
                return True
    return False
