"""A train step with a batch, estimated and compiled for devices that may be absent."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax

from spmd.analysis.collective_audit import CollectiveAudit, audit_collectives
from spmd.analysis.cycles import Cycles, count_cycles
from spmd.analysis.hlo import HloModule, parse
from spmd.analysis.memory import CompiledMemory, Estimate, estimate_memory, read_memory
from spmd.analysis.topology import Topology, topology_devices
from spmd.distributed.native_output import REMATERIALIZATION, compiler_log
from spmd.errors import ConfigError
from spmd.gradients.base import LossGradFn
from spmd.observe.metrics import human_duration
from spmd.pipedream.grad_fn import InFlight
from spmd.pipeline.tick_table import TickTable
from spmd.plan.plan import ShardingPlan
from spmd.sharding.mesh import AnyMesh, MeshShape, mesh_of
from spmd.training.batch import count_examples
from spmd.training.compilation_cache import compilation_cache
from spmd.training.step import TrainStep


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PlannedStep:
    """Train step, and its batch: arrays or shapes."""

    step: TrainStep
    batch: Any

    @property
    def plan(self) -> ShardingPlan:
        """The sharding plan of the step."""
        return self.step.plan

    @property
    def mesh(self) -> AnyMesh:
        """The mesh, with devices or abstract."""
        return self.plan.mesh

    @property
    def slices(self) -> Mapping[str, int]:
        """Axis → the number of slices along it."""
        return {axis: self.plan.slices.get(axis, 1) for axis in self.mesh.shape}

    @property
    def tick_table(self) -> TickTable | None:
        """The tasks of its pipeline; None without one."""
        if isinstance(self.step.grad_fn, LossGradFn) and self.step.grad_fn.tick_table:
            return self.step.grad_fn.tick_table
        for transform in self.plan.transforms:
            if isinstance(transform, InFlight):
                return transform.table
        return None

    @property
    def examples(self) -> int:
        """Number of examples in a batch."""
        return count_examples(self.plan, self.batch)


def topology_mesh(shape: MeshShape, topology: Topology, slices: Mapping[str, int]) -> AnyMesh:
    """Return a mesh over the devices of an absent machine."""
    return mesh_of(shape, topology_devices(topology), slices)


def estimate_step(planned: PlannedStep, platform: str = "cpu") -> Estimate:
    """Estimate the memory of the step on each device from its trace, for a platform's compiler."""
    return estimate_memory(planned.step, planned.batch, platform)


@dataclasses.dataclass(frozen=True)
class CompileTime:
    """Seconds that a compiler takes: on a clock, and of all processors together."""

    seconds: float
    processor_seconds: float

    def __str__(self) -> str:
        took = human_duration(self.seconds)
        return f"compiled in {took} ({human_duration(self.processor_seconds)} of processor time)"


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """Compiled step, read; memory and cycles are None where the compiler reports none."""

    audit: CollectiveAudit
    memory: CompiledMemory | None
    cycles: Cycles | None
    program: HloModule
    took: CompileTime


def compile_step(planned: PlannedStep) -> CompiledStep:
    """Compile the step and read the program; raise `MemoryError` if the compiler finds no room."""
    # A cached program has no compiler log; the audit says what is not passed on.
    traced = planned.step.trace(planned.batch)  # JAX keeps it
    began = time.perf_counter(), time.process_time()
    with compilation_cache(None), compiler_log(without=REMATERIALIZATION) as log:
        try:
            compiled = planned.step.compile(planned.batch)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise MemoryError(str(error).partition("\n")[0]) from None
    took = CompileTime(time.perf_counter() - began[0], time.process_time() - began[1])
    program = parse(compiled.as_text() or "")
    table = planned.tick_table
    taken = table.taken if table else {}
    collectives = audit_collectives(
        program,
        planned.mesh,
        log=log,
        slices=planned.slices,
        taken=taken,
        plan=planned.plan,
        jaxpr=traced.jaxpr,
    )
    cycles = None
    try:
        cycles = count_cycles(program, taken)
    except ConfigError as error:  # a loop of unknown length is no reason to show nothing
        warnings = (*collectives.warnings, *error.problems)
        collectives = dataclasses.replace(collectives, warnings=warnings)
    return CompiledStep(collectives, read_memory(compiled), cycles, program, took)


def compile_text(planned: PlannedStep) -> str:
    """Return the text of the compiled step."""
    with compilation_cache(None), compiler_log(without=REMATERIALIZATION):
        return planned.step.compile(planned.batch).as_text() or ""
