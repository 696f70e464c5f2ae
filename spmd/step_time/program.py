"""Compiled TPU program as a schedule: its operations in program order, with the compiler's cycles.

A TPU executes its program in the order in which it is printed. Fusions and other operations have
the cycles that the compiler estimates. Asynchronous operations have a start and a done: collectives
(also those of a SparseCore, and the chains of fusions of XLA:TPU for v5e), and transfers to and
from host memory. Pallas kernels have no cycles; their FLOPs follow from the shapes of their
operands.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction

import numpy as np

from spmd.analysis.collective_record import KINDS
from spmd.analysis.hlo import Computation, HloArray, HloModule, Instruction
from spmd.analysis.overlap import chain_of
from spmd.analysis.replica_groups import (
    kind_of,
    mesh_axes,
    mesh_places,
    program_places,
    read_groups,
)
from spmd.analysis.trip_count import trip_count
from spmd.layers.expert_dispatch import EXTRA_PASSES
from spmd.plan.scopes import branch_scope

_PASSES = {"fwd": 2, "dq": 3, "dkv": 4}
"""Kernel of splash attention → its number of matmuls, recomputed scores included."""
_ALL_GRADIENTS = 5
"""Matmuls of its kernel `dkv` if that computes the gradients of queries too."""

_MIN_TRANSFER = 256
"""Bytes of the smallest array that counts as moved to the host; smaller ones are indices."""


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
        if self.axes is None:
            return "no product of axes"
        return "+".join(self.axes)


@dataclasses.dataclass(frozen=True)
class ScheduledOp:
    """Operation of a program.

    Attributes:
        kind: `"matmul"`, `"attention"`, `"kernel"`, `"memory"`, `"transfer"`, `"start"` or
            `"done"`.
        cycles: The compiler's estimate; 0 for a kernel, a start or a done, unused for a transfer.
        flops: FLOPs of matmuls and attention.
        width: Width of a head, for attention.
        bytes: Bytes that a kernel reads and writes at least.
        transfer: The transfer of a `"transfer"`, a start or a done.
        key: Equal for a start and its done.
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
class ScheduledBlock:
    """Body of a loop, or branch of a condition.

    Attributes:
        times: Iterations of a loop, or the share of the cases in which a branch is taken.
        is_counted: False for a loop of unknown length, which is counted once, or a branch of
            unknown share.
    """

    name: str
    body: "ProgramSchedule"
    times: Fraction
    is_counted: bool = True


ProgramSchedule = tuple[ScheduledOp | ScheduledBlock, ...]


def read_program_schedule(
    program: HloModule, axes: Mapping[str, int], taken: Mapping[str, Fraction], slices: np.ndarray
) -> ProgramSchedule:
    """Return the schedule of a parsed program for a mesh with these axes (axis → size).

    `taken` is as for `spmd.analysis.executions.executions`; `slices` has the number of each
    device's slice.
    """
    return tuple(_Reader(program, axes, taken, slices).read(program.entry))


class _Reader:
    """Reader of the schedule of one program."""

    def __init__(
        self,
        program: HloModule,
        axes: Mapping[str, int],
        taken: Mapping[str, Fraction],
        slices: np.ndarray,
    ) -> None:
        self.program = program
        self.axes = axes
        self.taken = taken
        self.places = program_places(program, slices)
        self.devices = self.places.shape[1]

    def read(self, name: str) -> Iterator[ScheduledOp | ScheduledBlock]:
        """Yield the operations and blocks of a computation."""
        for instruction in self.program.computations[name].instructions.values():
            yield from self._read(name, instruction)

    def _read(self, name: str, instruction: Instruction) -> Iterator[ScheduledOp | ScheduledBlock]:
        if instruction.opcode == "while":
            yield self._loop(name, instruction)
        elif instruction.opcode == "conditional":
            yield from self._branches(instruction)
        elif instruction.opcode == "call":
            for _, callee in instruction.callees():
                yield from self.read(callee)
        else:
            operation = self._operation(name, instruction)
            if operation is not None:
                yield operation

    def _loop(self, name: str, loop: Instruction) -> ScheduledBlock:
        body = tuple(self.read(dict(loop.callees())["body"]))
        if EXTRA_PASSES in loop.op_name.split("/"):
            return ScheduledBlock(loop.name, body, Fraction(0))
        trips = trip_count(self.program, name, loop)
        if trips is None:
            return ScheduledBlock(loop.name, body, Fraction(1), is_counted=False)
        return ScheduledBlock(loop.name, body, Fraction(trips))

    def _branches(self, condition: Instruction) -> Iterator[ScheduledBlock]:
        """Yield the branches of a condition with their shares; equal ones if these are unknown."""
        callees = condition.callees()
        share = self.taken.get(branch_scope(condition.op_name))
        for number, (role, callee) in enumerate(callees):
            # Branches without a role of their own are numbered by the predicate.
            is_first = number == (role == "branch_computations")
            if share is None:
                part = Fraction(1, len(callees))
            elif is_first:
                part = share
            else:
                part = 1 - share
            body = tuple(self.read(callee))
            yield ScheduledBlock(f"{condition.name} {number}", body, part, share is not None)

    def _operation(self, name: str, instruction: Instruction) -> ScheduledOp | None:
        """Return the operation of an instruction; None if it takes no time."""
        collective = self._collective(instruction)
        if collective is not None:
            chain = chain_of(collective)
            if chain is not None:
                return self._link(instruction, collective, chain)
        opcode = instruction.opcode
        if opcode.endswith("-update"):
            return None
        if opcode.endswith("-done"):
            start = self._start(name, instruction)
            return self._asynchronous("done", instruction.name, name, start)
        if opcode.endswith("-start") or opcode == "send":
            return self._asynchronous("start", instruction.name, name, instruction)
        cycles = instruction.estimated_cycles
        if collective is not None:
            transfer = self._transfer(collective)
            return ScheduledOp(instruction.name, "transfer", cycles, transfer=transfer)
        kernel = self.program.kernel_of(name, instruction)
        if kernel is not None:
            return self._kernel(kernel.computation, self.program.at(kernel))
        if not cycles:
            return None
        return self._compute(instruction, cycles)

    def _link(
        self, instruction: Instruction, collective: Instruction, chain: tuple[str, str]
    ) -> ScheduledOp:
        """Return the operation of a link of a chain.

        A chain repeats its collective in every fusion: the first and the last have nothing to
        compute.
        """
        label = instruction.name
        if not label.startswith(("async-collective-start", "async-collective-done")):
            return self._compute(instruction, instruction.estimated_cycles)
        kind = "done"
        if "start" in label.partition(".")[0]:
            kind = "start"
        return ScheduledOp(label, kind, transfer=self._transfer(collective), key=chain)

    def _asynchronous(
        self, kind: str, label: str, name: str, start: Instruction
    ) -> ScheduledOp | None:
        """Return the start or the end of a transfer; None for copies on the device."""
        moved = self._moved(start)
        if moved is None:
            return None
        return ScheduledOp(label, kind, transfer=moved, key=(name, start.name))

    def _compute(self, instruction: Instruction, cycles: int) -> ScheduledOp:
        flops = self._matmul_flops(instruction)
        kind = "matmul" if flops else "memory"
        return ScheduledOp(instruction.name, kind, cycles, flops)

    def _matmul_flops(self, instruction: Instruction) -> float:
        """Return the FLOPs of all matmuls in an instruction."""
        total = 0.0
        for _, callee in instruction.callees():
            computation = self.program.computations[callee]
            for inner in computation.instructions.values():
                if inner.opcode in ("convolution", "dot"):
                    total += _product_flops(computation, inner)
                else:
                    total += self._matmul_flops(inner)
        return total

    def _kernel(self, name: str, instruction: Instruction) -> ScheduledOp:
        """Return the operation of a Pallas kernel."""
        instructions = self.program.computations[name].instructions
        inputs: list[HloArray] = []
        for operand in instruction.operands:
            inputs += instructions[operand].arrays[:1]
        size = sum(array.bytes for array in (*inputs, *instruction.arrays))
        text = f"{instruction.attributes} {instruction.name}"
        found = re.search(r"splash_mha_(fwd|dq|dkv)", text)
        if found is None:
            return ScheduledOp(instruction.name, "kernel", bytes=size)
        matmuls = _PASSES[found[1]]
        if found[1] == "dkv" and _has_query_gradients(instruction):
            matmuls = _ALL_GRADIENTS
        flops, width = _attention(inputs, matmuls, _block_sizes(text, found[1]))
        return ScheduledOp(instruction.name, "attention", flops=flops, width=width, bytes=size)

    def _start(self, name: str, done: Instruction) -> Instruction:
        """Return the start of an asynchronous operation from its end."""
        instructions = self.program.computations[name].instructions
        while not done.opcode.endswith("-start") and done.operands and done.opcode != "send":
            done = instructions[done.operands[0]]
        return done

    def _moved(self, start: Instruction) -> Transfer | None:
        """Return the transfer of an asynchronous operation over a network or to the host.

        None for copies on the device.
        """
        collective = self._collective(start)
        if collective is not None:
            return self._transfer(collective)
        if not any(array.on_host for array in start.arrays):
            return None
        sizes = []
        for array in start.arrays:
            if array.bytes >= _MIN_TRANSFER:
                sizes.append(array.bytes)
        kind = "from host"
        if "update" in start.opcode or start.arrays[0].on_host:
            kind = "to host"
        return Transfer(kind, min(sizes, default=0), start.name)

    def _collective(self, instruction: Instruction) -> Instruction | None:
        """Return the collective of an instruction: itself, started by it, or inside of it."""
        if kind_of(instruction) in KINDS:
            return instruction
        if instruction.opcode.endswith(("-done", "-update")):
            return None
        for _, callee in instruction.callees():
            for inner in self.program.computations[callee].instructions.values():
                found = self._collective(inner)
                if found is not None:
                    return found
        return None

    def _transfer(self, instruction: Instruction) -> Transfer:
        """Return the transfer of a collective."""
        kind = kind_of(instruction)
        groups, pairs = read_groups(instruction.attributes, self.devices)
        places = mesh_places(instruction, groups, self.places)
        around = self._computation_of(instruction)
        if kind == "all-reduce" and around.name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # XLA:TPU fuses an all-reduce with the slice of each device
        payload = 0
        for name in instruction.operands:
            payload += around.instructions[name].arrays[0].bytes
        if kind == "all-gather":
            payload *= max(map(len, places))
        axes = mesh_axes(places, self.axes, pairs=pairs)
        return Transfer(kind, payload, instruction.name, tuple(places[0]), axes)

    def _computation_of(self, instruction: Instruction) -> Computation:
        """Return the computation of an instruction."""
        computations = self.program.computations.values()
        return next(c for c in computations if c.instructions.get(instruction.name) is instruction)


def _product_flops(computation: Computation, product: Instruction) -> float:
    """Return the FLOPs of a matmul.

    lhs, rhs and result of an M × K × N product have M·K, K·N and M·N elements.
    """
    elements = product.arrays[0].size
    for operand in product.operands[:2]:
        elements *= computation.instructions[operand].arrays[0].size
    return 2 * math.sqrt(elements)


def _has_query_gradients(kernel: Instruction) -> bool:
    """Return whether a kernel returns gradients of queries beside those of keys and of values.

    They have a dimension more, the blocks of keys, and are summed over it after the kernel.
    """
    return max(len(array.dims) for array in kernel.arrays) > len(kernel.arrays[-1].dims)


def _block_sizes(text: str, kernel: str) -> tuple[int, int] | None:
    """Return the queries and keys of a block, as the kernel's metadata say; None without any."""
    suffix = f"_{kernel}"
    if kernel == "fwd":
        suffix = ""
    sizes = []
    for what in ("q", "kv"):
        found = re.search(rf"block_{what}{suffix}\W+(\d+)", text)
        if found is None:
            return None
        sizes.append(int(found[1]))
    queries, keys = sizes
    return queries, keys


def _attention(
    inputs: list[HloArray], matmuls: int, sizes: tuple[int, int] | None
) -> tuple[float, int]:
    """Return FLOPs and head width of a kernel of causal attention, from its operands.

    The operands are a table of blocks, queries and keys. The table is `[heads, query blocks, key
    blocks]`. With sliding windows it lists only the key blocks inside the window of each query
    block, or, in the kernel of the gradients of keys, the query blocks of each key block.

    Args:
        sizes: Queries and keys of a block; if not known, they are equally long.
    """
    wide = []
    blocks = None
    for array in inputs:
        if array.dtype in ("bf16", "f32") and len(array.dims) >= 3:
            wide.append(array)
        elif array.dtype == "s8" and len(array.dims) == 3 and blocks is None:
            blocks = array.dims[-2:]
    query_blocks, key_blocks = blocks or (1, 1)
    *batch, queries, width = wide[0].dims
    keys = wide[1].dims[-2]
    if sizes is None:
        size = min(queries // query_blocks, keys // key_blocks)
        sizes = size, size
    share = (query_blocks * sizes[0] / queries) * (key_blocks * sizes[1] / keys)
    if share == 1:  # no windows: a causal mask
        share = _causal_share(keys, sizes)
    return matmuls * 2 * math.prod(batch) * queries * keys * width * share, width


def _causal_share(keys: int, sizes: tuple[int, int]) -> float:
    """Return the share of blocks that a causal mask leaves.

    A device with a part of the queries has the mean over all of them: their order is balanced
    (`spmd.layers.zigzag`).
    """
    query_blocks, key_blocks = keys // sizes[0], keys // sizes[1]
    met = 0
    for number in range(1, query_blocks + 1):
        met += math.ceil(number * sizes[0] / sizes[1])
    return met / (query_blocks * key_blocks)
