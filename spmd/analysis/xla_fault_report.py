"""Operations of a program with a fault of XLA (docs/xla-faults.md), and their replacements."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from spmd.jaxpr.source import equation_line
from spmd.jaxpr.traced_program import Operation, TracedProgram, read_program
from spmd.plan.xla_faults import FAULTS, fault_of, left_to_xla, replaced_fault
from spmd.sharding.mesh import AnyMesh, nontrivial_axes
from spmd.training.step import TrainStep

PAGE = "docs/xla-faults.md"
PRODUCTS = "Products"
_FEWEST_AXES = 3
"""Least number of mesh axes above size 1 with which XLA computes some products wrongly."""

_GATHERED = "what XLA could multiply wrongly is gathered before the loss"
_LEFT = "left to XLA, which does not split it there"
_GATHER = "wrong for some layouts; right if split kernels are gathered before it"
_REPLACED_IN = ("plan/xla_faults.py",)

_Found = tuple[str, str, str, str]
"""Fault, primitive, source line and answer."""


@dataclasses.dataclass(frozen=True)
class FaultyOperation:
    """Operations of one line with one of the faults.

    Attributes:
        fault: Heading on the page.
        source: `file:line` of the model; empty if JAX kept none.
        answer: How the plan avoids the fault, such as the formula in place of the operation, or a
            note that XLA does not split it; without a plan, the condition of right results.
        count: Number of such operations, forward and backward.
    """

    fault: str
    primitive: str
    source: str
    answer: str
    count: int

    def __str__(self) -> str:
        text = f"{self.fault}: {self.primitive}"
        if self.count > 1:
            text += f" ×{self.count}"
        if self.source:
            text += f" at {self.source}"
        return f"{text}: {self.answer}"


@dataclasses.dataclass(frozen=True)
class FaultReport:
    """Operations of a program with wrong results wherever XLA splits them.

    Attributes:
        axes: Axis → size, of those above 1.
        operations: One record for equal operations of a line.
    """

    axes: Mapping[str, int]
    operations: tuple[FaultyOperation, ...]

    def __str__(self) -> str:
        if not self.operations:
            return (
                f"no operation of this program is on the page of what XLA computes wrongly ({PAGE})"
            )
        title = (
            f"operations of this program that XLA computes wrongly where it splits them ({PAGE}):"
        )
        return "\n  ".join([title, *map(str, self.operations)])

    def to_json(self) -> list[dict[str, Any]]:
        """Return the operations as JSON values."""
        return [dataclasses.asdict(operation) for operation in self.operations]


def find_faults(step: TrainStep, batch: Any) -> FaultReport:
    """List the operations of a step with a fault of XLA.

    Nothing is compiled, and the batch may be abstract.
    """
    mesh = step.plan.mesh
    program = read_program(step.trace(batch).jaxpr)
    found = Counter(_faults(program, mesh))
    for product in _products(program, mesh):
        found[PRODUCTS, product.primitive, "", _GATHERED] += 1
    return _report(found, mesh)


def find_faults_in(jaxpr: Any, mesh: AnyMesh) -> FaultReport:
    """List the operations of a traced function that XLA may compute wrongly; there is no plan."""
    program = read_program(jaxpr)
    found: Counter[_Found] = Counter()
    for operation, fault in left_to_xla(program, mesh):
        answer = f"right if {fault.instead}"
        found[fault.name, operation.primitive, _line(operation), answer] += 1
    for product in _products(program, mesh):
        found[PRODUCTS, product.primitive, _line(product), _GATHER] += 1
    return _report(found, mesh)


def _report(found: Mapping[_Found, int], mesh: AnyMesh) -> FaultReport:
    """Return the report of counted operations."""
    operations = []
    for key, count in found.items():
        operations.append(FaultyOperation(*key, count))
    return FaultReport(
        nontrivial_axes(mesh.shape), tuple(sorted(operations, key=dataclasses.astuple))
    )


def _products(program: TracedProgram, mesh: AnyMesh) -> Iterator[Operation]:
    """Yield the products that XLA may compute wrongly on a mesh."""
    if len(nontrivial_axes(mesh.shape)) >= _FEWEST_AXES:
        yield from _outside_of_regions(program, "dot_general")


def _faults(program: TracedProgram, mesh: AnyMesh) -> Iterator[_Found]:
    """Yield fault, primitive, source line and answer of each faulty operation."""
    instead = {fault.name: fault.instead for fault in FAULTS}
    is_split = bool(nontrivial_axes(mesh.shape))
    for operation in program.walk():
        fault = fault_of(operation, mesh)
        if fault is None:
            continue
        replaced = replaced_fault(operation)
        if replaced:
            yield replaced, operation.primitive, _line(operation), instead[replaced]
        elif not is_split:
            yield fault.name, operation.primitive, _line(operation), fault.instead
    for operation, fault in left_to_xla(program, mesh):
        yield fault.name, operation.primitive, _line(operation), _LEFT


def _line(operation: Operation) -> str:
    return equation_line(operation.equations, _REPLACED_IN)


def _outside_of_regions(program: TracedProgram, primitive: str) -> Iterator[Operation]:
    """Yield the operations of one primitive outside of manual regions."""
    for operation in program.operations:
        if operation.primitive == primitive:
            yield operation
        elif operation.primitive != "shard_map":
            for body in operation.bodies:
                yield from _outside_of_regions(body, primitive)
