"""Compiled TPU program as a schedule: its operations in program order, with the compiler's cycles.

A TPU executes its program in the order in which it is printed. Fusions and other operations have the cycles that the
compiler estimates. What runs beside them has a start and a done: collectives (also those that a SparseCore runs, and
the chains of fusions of XLA:TPU for v5e), and transfers to and from host memory. Pallas kernels have no cycles; their
FLOPs follow from the shapes of their operands.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction

import numpy as np

from spmd.analysis.collective_record import KINDS
from spmd.analysis.hlo import HloArray, HloModule, Instruction
from spmd.analysis.overlap import chain_of
from spmd.analysis.replica_groups import kind_of, mesh_axes, read_groups
from spmd.analysis.trip_count import trip_count
from spmd.layers.expert_dispatch import EXTRA_PASSES

_PASSES = {"fwd": 2, "dq": 3, "dkv": 4}
"""Matmuls of the kernels of splash attention: scores and values; those and their gradients."""

_MIN_TRANSFER = 256
"""Bytes of the smallest array that a transfer to the host moves; the others are indices."""


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Collective, or copy to or from host memory.

    Attributes:
        kind: Kind of a collective, `"to host"` or `"from host"`.
        payload: Bytes, as `spmd.analysis.collective_record` counts them.
        group: Devices, by their number in the mesh.
        axes: Mesh axes; None if the groups are no product of axes.
        instruction: Name of the collective itself, which may be inside of a fusion.
    """

    kind: str
    payload: int
    instruction: str
    group: tuple[int, ...] = ()
    axes: tuple[str, ...] | None = ()

    @property
    def over(self) -> str:
        """Axes as text, or the host."""
        if self.kind.endswith(" host"):
            return "host"
        return "no product of axes" if self.axes is None else "+".join(self.axes)


@dataclasses.dataclass(frozen=True)
class Operation:
    """Operation of a program.

    Attributes:
        kind: `"matmul"`, `"attention"`, `"kernel"`, `"memory"`, `"transfer"`, `"start"` or `"done"`.
        cycles: Estimated by the compiler; 0 for a transfer or a kernel.
        flops: Of matmuls and attention.
        width: Of a head, of attention.
        bytes: That a kernel reads and writes at least.
        transfer: What a transfer moves; of a start and a done too.
        key: Joins a start and its done.
    """

    name: str
    kind: str
    cycles: int = 0
    flops: float = 0.0
    width: int = 0
    bytes: int = 0
    transfer: Transfer | None = None
    key: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Block:
    """Operations that are executed several times, or only in a share of the cases.

    Attributes:
        times: Trips of a loop, or the share of a branch.
        is_counted: False for a loop of unknown length, which is counted once, or a branch of unknown share.
    """

    name: str
    body: "Schedule"
    times: Fraction
    is_counted: bool = True


Schedule = tuple[Operation | Block, ...]


def read_schedule(
    program: HloModule, axes: Mapping[str, int], taken: Mapping[str, Fraction], slices: np.ndarray
) -> Schedule:
    """Return the schedule of a parsed program for a mesh with these axes (axis → size).

    `taken` is as for `spmd.analysis.executions.executions`; `slices` has the number of each device's slice.
    """
    return tuple(_Reader(program, axes, taken, slices).read(program.entry))


class _Reader:
    def __init__(
        self, program: HloModule, axes: Mapping[str, int], taken: Mapping[str, Fraction], slices: np.ndarray
    ) -> None:
        self.program, self.axes, self.taken = program, axes, taken
        count = program.partitions * program.replicas
        self.devices = slices.size if count == 1 else count
        in_order = np.arange(slices.size) if self.devices == slices.size else np.argsort(slices, kind="stable")
        self.places = in_order.reshape(-1, self.devices)

    def read(self, name: str) -> Iterator[Operation | Block]:
        """Yield what a computation executes."""
        for instruction in self.program.computations[name].instructions.values():
            yield from self._read(name, instruction)

    def _read(self, name: str, instruction: Instruction) -> Iterator[Operation | Block]:
        opcode, callees = instruction.opcode, instruction.callees()
        if opcode == "while":
            is_extra = EXTRA_PASSES in instruction.op_name.split("/")
            trips = 0 if is_extra else trip_count(self.program, name, instruction)
            body = tuple(self.read(dict(callees)["body"]))
            yield Block(instruction.name, body, Fraction(1 if trips is None else trips), trips is not None)
        elif opcode == "conditional":
            share = self.taken.get(instruction.op_name.removesuffix("/cond").rpartition("/")[2])
            for number, (role, callee) in enumerate(callees):
                weight = Fraction(1, len(callees)) if share is None else share
                is_first = number == (role == "branch_computations")
                part = weight if share is None or is_first else 1 - weight
                yield Block(f"{instruction.name} {number}", tuple(self.read(callee)), part, share is not None)
        elif opcode == "call":
            for _, callee in callees:
                yield from self.read(callee)
        elif (operation := self._operation(name, instruction)) is not None:
            yield operation

    def _operation(self, name: str, instruction: Instruction) -> Operation | None:
        cycles = int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)
        found = self._collective(instruction)
        chain, label = found and chain_of(found), instruction.name
        if found is not None and chain:
            # A chain repeats its collective in every fusion: the first and the last have nothing to compute.
            is_end = label.startswith(("async-collective-start", "async-collective-done"))
            if is_end:
                kind = "start" if "start" in label.partition(".")[0] else "done"
                return Operation(label, kind, transfer=self._transfer(found), key=chain)
            return self._compute(instruction, cycles)
        if instruction.opcode.endswith("-update"):
            return None
        if instruction.opcode.endswith("-done"):
            start = self._start(name, instruction)
            moved = self._moved(start)
            return Operation(label, "done", transfer=moved, key=(name, start.name)) if moved else None
        if instruction.opcode.endswith("-start") or instruction.opcode == "send":
            moved = self._moved(instruction)
            return Operation(label, "start", transfer=moved, key=(name, label)) if moved else None
        if found is not None:
            return Operation(label, "transfer", cycles, transfer=self._transfer(found))
        if instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.attributes:
            return self._kernel(name, instruction)
        return self._compute(instruction, cycles) if cycles else None

    def _compute(self, instruction: Instruction, cycles: int) -> Operation:
        flops = self._matmul_flops(instruction)
        return Operation(instruction.name, "matmul" if flops else "memory", cycles, flops)

    def _matmul_flops(self, instruction: Instruction) -> float:
        """Return the FLOPs of all matmuls in an instruction."""
        total = 0.0
        for _, callee in instruction.callees():
            computation = self.program.computations[callee]
            for inner in computation.instructions.values():
                if inner.opcode in ("convolution", "dot"):
                    operands = [computation.instructions[operand].arrays[0].size for operand in inner.operands[:2]]
                    # lhs, rhs and result of an M × K × N product have M·K, K·N and M·N elements.
                    total += 2 * math.sqrt(math.prod(operands) * inner.arrays[0].size)
                else:
                    total += self._matmul_flops(inner)
        return total

    def _kernel(self, name: str, instruction: Instruction) -> Operation:
        instructions = self.program.computations[name].instructions
        inputs = [array for operand in instruction.operands for array in instructions[operand].arrays[:1]]
        size = sum(array.bytes for array in (*inputs, *instruction.arrays))
        if which := re.search(r"splash_mha_(fwd|dq|dkv)", f"{instruction.attributes} {instruction.name}"):
            flops, width = _attention(inputs, _PASSES[which[1]])
            return Operation(instruction.name, "attention", flops=flops, width=width, bytes=size)
        return Operation(instruction.name, "kernel", bytes=size)

    def _start(self, name: str, done: Instruction) -> Instruction:
        instructions = self.program.computations[name].instructions
        while not done.opcode.endswith("-start") and done.operands and done.opcode != "send":
            done = instructions[done.operands[0]]
        return done

    def _moved(self, start: Instruction) -> Transfer | None:
        """Return what an asynchronous operation moves over a network or to the host; None for copies on the device."""
        if (collective := self._collective(start)) is not None:
            return self._transfer(collective)
        if not any(array.on_host for array in start.arrays):
            return None
        moved = min((a.bytes for a in start.arrays if a.bytes >= _MIN_TRANSFER), default=0)
        is_written = "update" in start.opcode or start.arrays[0].on_host
        return Transfer("to host" if is_written else "from host", moved, start.name)

    def _collective(self, instruction: Instruction) -> Instruction | None:
        """Return the collective that an instruction is, starts, or has inside."""
        if kind_of(instruction) in KINDS:
            return instruction
        if instruction.opcode.endswith(("-done", "-update")):
            return None
        inside = (
            self._collective(inner)
            for _, callee in instruction.callees()
            for inner in self.program.computations[callee].instructions.values()
        )
        return next((found for found in inside if found is not None), None)

    def _transfer(self, instruction: Instruction) -> Transfer:
        kind, between = kind_of(instruction), instruction.opcode == "send"
        groups, pairs = read_groups(instruction.attributes, self.devices)
        places = groups if len(self.places) == 1 else [row[list(g)].tolist() for row in self.places for g in groups]
        places = self.places.T.tolist() if between else places
        inside = self.program.computations.values()
        around = next(c for c in inside if c.instructions.get(instruction.name) is instruction)
        if kind == "all-reduce" and around.name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # XLA:TPU reduces and keeps each device's part in one fusion
        payload = sum(around.instructions[name].arrays[0].bytes for name in instruction.operands)
        payload *= max(map(len, places)) if kind == "all-gather" else 1
        return Transfer(kind, payload, instruction.name, tuple(places[0]), mesh_axes(places, self.axes, pairs=pairs))


def _attention(inputs: list[HloArray], matmuls: int) -> tuple[float, int]:
    """Return FLOPs and head width of a kernel of causal attention, from its operands: a table of blocks, queries, keys.

    The table is `[heads, query blocks, key blocks]`. Where windows end early it lists only the blocks that a query
    block meets, or that a key block meets in the kernel of their gradients; blocks of both are equally long.
    """
    wide = [array for array in inputs if array.dtype in ("bf16", "f32") and len(array.dims) >= 3]
    *batch, queries, width = wide[0].dims
    keys = wide[1].dims[-2]
    blocks = next((array.dims[-2:] for array in inputs if array.dtype == "s8" and len(array.dims) == 3), (1, 1))
    met, of = sorted((blocks[0] * keys, blocks[1] * queries))
    share = met / of if met < of else (blocks[0] + 1) / (2 * blocks[0])
    return matmuls * 2 * math.prod(batch) * queries * keys * width * share, width
