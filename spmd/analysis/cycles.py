"""Compute time of a compiled TPU program: the cycles that its compiler estimates for each operation, times executions.

Pallas kernels, collectives, asynchronous copies and the work of SparseCores have no estimate, and waiting has none:
what is not counted is listed. Programs of other compilers have no cycles at all.
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
        """Return one line, with the time at a clock in Hz, if that is known."""
        total, bound = sum(self.cycles.values()), "at most " * self.is_bound
        at = (
            f"{total / clock:.4g} s by the compiler's cycles at {clock / 1e9:.4g} GHz" if clock else f"{total:,} cycles"
        )
        without = ", ".join(["waiting", *(f"{times:,} {kind}" for kind, times in self.uncounted.items())])
        return f"compute of a step: {bound}{at}; without {without}"

    def to_json(self, clock: float | None) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {"seconds": clock and sum(self.cycles.values()) / clock, **dataclasses.asdict(self)}


def count_cycles(program: HloModule, taken: Mapping[str, Fraction]) -> Cycles | None:
    """Return the cycles of a parsed program; None if its compiler estimates none.

    `taken` is for `executions`. A loop of unknown length raises `ConfigError`.
    """
    found: dict[bool, dict[str, Fraction]] = {True: {}, False: {}}
    unknown, is_bound = dict[str, Problem](), False
    for _, instruction, times, loop, is_conditional, is_part in executions(program, taken):
        cycles = int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)
        if is_part or not (kind := instruction.opcode if cycles else _without_cycles(program, instruction)):
            continue
        kinds = found[cycles > 0]
        kinds[kind] = kinds.get(kind, Fraction()) + times * (cycles or 1)
        is_bound |= is_conditional
        if loop:
            where, fix = f"{loop.name} ({loop.op_name})", "jax.lax.scan, or bounds that do not depend on data"
            unknown[where] = Problem(where, "is a loop of unknown length", "cycles cannot be counted", fix)
    if found[True] and unknown:
        raise ConfigError("The program has loops of unknown length:", unknown.values())
    counted, uncounted = (
        {kind: round(n) for kind, n in sorted(kinds.items(), key=lambda item: -item[1])} for kinds in found.values()
    )
    return Cycles(counted, uncounted, is_bound) if counted else None


def _without_cycles(program: HloModule, instruction: Instruction) -> str:
    """Return the kind of an operation without an estimate; empty if it does nothing, or ends what another started."""
    name, opcode = instruction.name.partition(".")[0], instruction.opcode
    is_end = opcode.endswith(("-done", "-update")) or name.endswith("-done")
    if is_end or opcode in _FREE or all(array.size <= 1 for array in instruction.arrays):
        return ""
    if _communicates(program, instruction):
        return "collectives"
    if opcode == "custom-call":
        return "Pallas kernels" if "tpu_custom_call" in instruction.attributes else ""
    return name if opcode == "fusion" else opcode


def _communicates(program: HloModule, instruction: Instruction) -> bool:
    called = (program.computations[name].instructions.values() for _, name in instruction.callees())
    return kind_of(instruction) in KINDS or any(_communicates(program, inner) for some in called for inner in some)
