"""Compute time of a compiled TPU program: the cycles that its compiler estimates for each operation, times executions.

Pallas kernels, collectives, asynchronous copies and the work of SparseCores have no estimate, and waiting has none:
what is not counted is listed. Programs of other compilers have no cycles at all.
"""

import collections
import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from spmd.analysis.collective_record import KINDS
from spmd.analysis.executions import executions
from spmd.analysis.hlo import HloModule, Instruction
from spmd.analysis.replica_groups import kind_of
from spmd.errors import ConfigError, Problem

_FREE = {"after-all", "bitcast", "call", "conditional", "constant", "get-tuple-element", "opt-barrier", "parameter"}
_FREE |= {"partition-id", "replica-id", "tuple", "while"}


@dataclasses.dataclass(frozen=True)
class Cycles:
    """Estimated cycles of one run of a program on one device.

    Attributes:
        cycles: Kind of operation → its cycles.
        uncounted: Kind of operation without an estimate → its executions; scalars are left out.
        is_bound: Whether a branch of unknown share is counted as always taken.
    """

    cycles: Mapping[str, int]
    uncounted: Mapping[str, int]
    is_bound: bool

    def seconds(self, clock: float) -> float:
        """Return the duration of all cycles at a clock in Hz."""
        return sum(self.cycles.values()) / clock

    def text(self, clock: float | None) -> str:
        """Return one line; `clock` is None if it is unknown."""
        amount = f"{sum(self.cycles.values()):,} cycles"
        if clock:
            amount = f"{self.seconds(clock):.4g} s by the compiler's cycles at {clock / 1e9:.4g} GHz"
        others = collections.Counter[str]()
        for kind, times in self.uncounted.items():
            others[kind if kind in ("collectives", "Pallas kernels") else "other operations"] += times
        without = ", ".join(["waiting", *(f"{times:,} {kind}" for kind, times in sorted(others.items()))])
        return f"compute of a step: {'at most ' * self.is_bound}{amount}; without {without}"

    def to_json(self, clock: float | None) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {"seconds": clock and self.seconds(clock), **dataclasses.asdict(self)}


def count_cycles(program: HloModule, taken: Mapping[str, Fraction]) -> Cycles | None:
    """Return the cycles of a parsed program; None if its compiler estimates none.

    `taken` is for `spmd.analysis.executions.executions`.

    Raises:
        ConfigError: A loop has an unknown length.
    """
    counted, uncounted, unknown, is_bound = dict[str, Fraction](), dict[str, Fraction](), dict[str, Problem](), False
    for _, instruction, times, loop, is_conditional, is_part in executions(program, taken):
        cycles = int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)
        if is_part or not (kind := instruction.opcode if cycles else _without_cycles(program, instruction)):
            continue
        found = counted if cycles else uncounted
        found[kind] = found.get(kind, Fraction()) + times * (cycles or 1)
        is_bound |= is_conditional
        if loop:
            what, fix = "is a loop of unknown length", "jax.lax.scan, or bounds that do not depend on data"
            unknown[loop.name] = Problem(loop.op_name or loop.name, what, f"{loop.name} in the program", fix)
    if counted and unknown:
        raise ConfigError("The cycles of this program cannot be counted:", unknown.values())
    most_first = sorted(((kind, round(cycles)) for kind, cycles in counted.items()), key=lambda item: -item[1])
    others = {kind: round(times) for kind, times in uncounted.items()}
    return Cycles(dict(most_first), others, is_bound) if counted else None


def _without_cycles(program: HloModule, instruction: Instruction) -> str:
    """Return the kind of an operation that has no estimate; empty if it does no work, or none of its own."""
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
