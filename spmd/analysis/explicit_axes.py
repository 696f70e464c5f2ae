"""Check that the layout of every array of a train step is decided, by rules for Explicit axes.

Under `AxisType.Explicit` the sharding of a result follows from those of its operands, and JAX
refuses an operation that leaves it open. Steps run under Auto axes, where the compiler then
chooses. `check_explicit` evaluates the trace of such a step one operation at a time on an abstract
mesh of Explicit axes. An operation that JAX refuses is undecided, unless its result reaches a
sharding constraint through element-wise operations. The check then continues with the sharding
that XLA's partitioner would propagate, so that all undecided operations are found.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import flax
import jax
from jax.sharding import AbstractMesh

from spmd.analysis.explicit_rules import (
    constraint_spec,
    decided_dims,
    dims_with_constants,
    explicit_mesh,
    is_collective,
    mesh_dims,
    phase_of,
    propagated_dims,
    result_dims,
    unsharded,
)
from spmd.jaxpr.source import source_line
from spmd.jaxpr.traced_program import DimAxes, Operation, TracedProgram, TracedValue, read_program
from spmd.sharding.dims import dims_spec
from spmd.sharding.mesh import nontrivial_axes
from spmd.sharding.rules import spec_text
from spmd.training.state import abstract_arguments
from spmd.training.step import TrainStep

FIXES = {
    "forward": (
        "annotate(x, NAME) its result, with NAME in the rule table's activations, or constrain it"
    ),
    "backward": (
        "annotate(x, NAME) the array whose gradient it computes: "
        "a gradient is constrained like its array"
    ),
    "rest of the step": "jax.lax.with_sharding_constraint in the optimizer or gradient function",
}
"""Phase of the step → fix for its operations."""

_LIBRARIES = tuple(f"{os.path.dirname(str(library.__file__))}{os.sep}" for library in (jax, flax))


@dataclasses.dataclass(frozen=True)
class UndecidedLayout:
    """An operation with several possible shardings of a result.

    Attributes:
        phase: Phase of the step, a key of `FIXES`.
        source: `file:line`.
        operands: Dtype, shape and spec of each array that it takes; empty for a loop or condition.
        reason: The reason, in JAX's words.
        count: Number of equal operations of this line.
    """

    phase: str
    source: str
    primitive: str
    operands: str
    reason: str
    count: int = 1

    def __str__(self) -> str:
        text = f"{self.source}: {self.primitive}"
        if self.count > 1:
            text += f" ×{self.count}"
        if self.operands:
            text += f" of {self.operands}"
        return f"{text}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class ExplicitCheck:
    """Result of `check_explicit`.

    Attributes:
        axes: Axis → size, of those above 1.
        operations: Number of operations on sharded arrays.
        undecided: Records of operations that leave a layout open, by phase and line.
    """

    axes: Mapping[str, int]
    operations: int
    undecided: tuple[UndecidedLayout, ...]

    @property
    def ok(self) -> bool:
        """True if every layout is decided."""
        return not self.undecided

    def __str__(self) -> str:
        if not self.axes:
            return "nothing to decide: every axis of the mesh has size 1"
        lines = []
        for phase, fix in FIXES.items():
            found = []
            for record in self.undecided:
                if record.phase == phase:
                    found.append(f"  {record}")
            if found:
                lines += [f"{phase}; fix: {fix}", *found]
        count = sum(record.count for record in self.undecided)
        total = f"{self.operations:,} operations on sharded arrays"
        what = f"all {total} are decided"
        if count:
            what = f"{count:,} of {total} leave their layout open"
        axes = " ".join(f"{axis}={size}" for axis, size in self.axes.items())
        lines.append(f"{axes}: {what}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        records = []
        for record in self.undecided:
            records.append(dataclasses.asdict(record) | {"fix": FIXES[record.phase]})
        return {
            "ok": self.ok,
            "mesh": dict(self.axes),
            "operations": self.operations,
            "undecided": records,
        }


def check_explicit(step: TrainStep, batch: Any) -> ExplicitCheck:
    """Find the operations of a step with undecided layouts of their results.

    No devices are needed and nothing is compiled. The batch has arrays or `jax.ShapeDtypeStruct`s.
    """
    axes = nontrivial_axes(step.plan.mesh.shape)
    state, batch = abstract_arguments(step.plan, batch)
    program = read_program(step.trace(batch).jaxpr)
    check = _Check()
    if axes:
        for value, leaf in zip(program.inputs, jax.tree.leaves((state, batch)), strict=True):
            value.dims = mesh_dims(leaf.sharding.spec, value, axes)
        returned = {}
        # Not strict: metrics follow the state.
        for value, leaf in zip(program.outputs, jax.tree.leaves(state), strict=False):
            returned[value] = mesh_dims(leaf.sharding.spec, value, axes)
        check.run(program, explicit_mesh(axes), returned)
    return ExplicitCheck(axes, len(check.seen), check.undecided())


class _Check:
    """Shardings of the values of a program and its bodies, with the undecided operations."""

    def __init__(self) -> None:
        self.seen = set[Operation]()
        self._found: dict[Operation, tuple[str, str]] = {}  # operation → operands, reason
        self._known: dict[Any, list[DimAxes] | str] = {}
        # Constants that a manual region returns: sharded over its own axes only.
        self._constants = set[TracedValue]()

    def run(
        self, program: TracedProgram, mesh: AbstractMesh, returned: Mapping[TracedValue, DimAxes]
    ) -> None:
        """Set the sharding of every value; `returned` has results with a sharding by the caller.

        A constant has none: it is created in the sharding of its use.
        """
        decided = decided_dims(program, mesh, returned)
        for operation in program.operations:
            self._found.pop(operation, None)
            results = self._operation(operation, mesh, decided)
            for output, dims in zip(operation.outputs, results, strict=True):
                output.dims = dims

    def _operation(
        self, operation: Operation, mesh: AbstractMesh, decided: Mapping[TracedValue, DimAxes]
    ) -> Sequence[DimAxes | None]:
        """Check one operation with its bodies, and return the shardings of its results."""
        if operation.primitive in ("scan", "while"):
            return self._loop(operation, mesh)
        if operation.primitive == "cond":
            return self._branches(operation, mesh)
        if operation.primitive == "shard_map":
            return self._manual(operation, mesh)
        return self._results(operation, mesh, decided)

    def undecided(self) -> tuple[UndecidedLayout, ...]:
        """Return one record for equal operations of a line."""
        counts = Counter[tuple[str, str, str, str]]()
        phases: dict[tuple[str, str, str, str], str] = {}
        order = list(FIXES)
        for operation, (operands, reason) in self._found.items():
            key = (_source(operation), operation.primitive, operands, reason)
            counts[key] += 1
            phase = phase_of(operation)
            known = phases.get(key, "rest of the step")
            phases[key] = min(phase, known, key=order.index)
        records = []
        for key, count in counts.items():
            records.append(UndecidedLayout(phases[key], *key, count=count))
        return tuple(sorted(records, key=_position))

    def _report(self, operation: Operation, reason: str) -> None:
        """Record an operation as undecided, with its operands and a reason."""
        arrays = []
        for atom, value in zip(operation.equations[0].invars, operation.inputs, strict=True):
            if value.shape:
                arrays.append(f"{atom.aval.str_short(short_dtypes=True)} {_text(value)}")
        operands = ", ".join(arrays)
        if operation.bodies:
            operands = ""
        self._found[operation] = (operands, reason)

    def _results(
        self, operation: Operation, mesh: AbstractMesh, decided: Mapping[TracedValue, DimAxes]
    ) -> Sequence[DimAxes | None]:
        """Return the shardings of the results of an operation without a body."""
        given = [value.dims for value in operation.inputs]
        spec = constraint_spec(operation)
        if spec is not None:
            return [mesh_dims(spec, operation.outputs[0], mesh.shape, given[0])]
        if operation.primitive in ("device_put", "name", "stored"):
            return given
        if not any(any(dims) for dims in given if dims):
            return _unsharded_results(operation)
        self.seen.add(operation)
        if not operation.equations or is_collective(operation):
            return propagated_dims(operation, mesh)
        whole = [value.dims or unsharded(value) for value in operation.inputs]
        found = self._evaluate(operation, whole, mesh)
        if isinstance(found, str) and None in given:
            found = self._evaluate(operation, dims_with_constants(operation, mesh), mesh)
        if not isinstance(found, str):
            return found
        if all(output in decided for output in operation.outputs):
            return [decided[output] for output in operation.outputs]
        self._report(operation, found)
        return propagated_dims(operation, mesh)

    def _evaluate(
        self, operation: Operation, given: list[DimAxes], mesh: AbstractMesh
    ) -> list[DimAxes] | str:
        """Return the shardings by JAX's rules, or the reason why there are none."""
        key = operation, tuple(given), mesh
        if key not in self._known:  # bodies of loops are visited more than once
            self._known[key] = result_dims(operation, given, mesh)
        return self._known[key]

    def _loop(self, operation: Operation, mesh: AbstractMesh) -> list[DimAxes | None]:
        """Check the body of a loop.

        A carried value is sharded as before the loop; one that starts as a constant, as at the end
        of an iteration.
        """
        (body,) = operation.bodies
        self._enter_loop(operation, body)
        start, count = _carry(operation, body)
        carried_in = body.inputs[start : start + count]
        carried_out = body.outputs[:count]
        self.run(body, mesh, {})
        unknown = _known_at_the_end(carried_in, carried_out)
        while unknown:
            for old, new in unknown:
                old.dims = new.dims
            self.run(body, mesh, {})
            unknown = _known_at_the_end(carried_in, carried_out)
        for old, new in zip(carried_in, carried_out, strict=True):
            if new.dims is not None and old.dims != new.dims:
                both = f"carried {_text(old)} into an iteration and {_text(new)} out of it"
                self._report(operation, f"a value is {both}")
        results = [value.dims for value in carried_in]
        for output, inner in zip(operation.outputs[count:], body.outputs[count:], strict=True):
            if inner.dims is None:
                results.append(None)
            else:
                stacked = unsharded(output)[len(inner.dims) :]
                results.append((*stacked, *inner.dims))
        return results

    def _enter_loop(self, operation: Operation, body: TracedProgram) -> None:
        """Set the shardings of the inputs of a loop's body: whole arrays, and slices of stacks."""
        inputs = operation.inputs[-len(body.inputs) :]
        for value, inner in zip(inputs, body.inputs, strict=True):
            outer = len(value.shape) - len(inner.shape)
            inner.dims = None
            if value.dims is not None:
                inner.dims = value.dims[outer:]
            if value in self._constants:
                self._constants.add(inner)
            if outer and value.dims and value.dims[0]:
                reason = f"iterates over a dimension of {_text(value)} that is sharded"
                self._report(operation, reason)

    def _branches(self, operation: Operation, mesh: AbstractMesh) -> list[DimAxes | None]:
        """Check the branches of a condition; all should return equal shardings."""
        for body in operation.bodies:
            inputs = operation.inputs[-len(body.inputs) :]
            for value, inner in zip(inputs, body.inputs, strict=False):
                inner.dims = value.dims
                if value in self._constants:
                    self._constants.add(inner)
            self.run(body, mesh, {})
        results: list[DimAxes | None] = []
        outputs = [body.outputs for body in operation.bodies]
        for ends in zip(*outputs, strict=True):
            known = [end for end in ends if end.dims is not None]
            if not known:
                results.append(None)
                continue
            first = known[0]
            results.append(first.dims)
            for other in known:
                if other.dims != first.dims:
                    self._report(operation, f"branches return {_text(first)} and {_text(other)}")
                    break
        return results

    def _manual(self, operation: Operation, mesh: AbstractMesh) -> list[DimAxes]:
        """Check a manual region for all axes but the manual ones, decided by its author."""
        (body,) = operation.bodies
        manual = operation.params["newly_manual_axes"]
        axes = {axis: size for axis, size in mesh.shape.items() if axis not in manual}
        if axes:
            for value, inner in zip(operation.inputs, body.inputs, strict=True):
                inner.dims = None
                if value.dims is not None and value not in self._constants:
                    inner.dims = mesh_dims(dims_spec(value.dims), value, axes)
            self.run(body, explicit_mesh(axes), {})
        results = []
        specs = operation.params["out_specs"]
        for output, inner, spec in zip(operation.outputs, body.outputs, specs, strict=True):
            own = mesh_dims(spec, output, mesh.shape)
            rest = unsharded(output)
            if axes and inner.dims:
                rest = inner.dims
            results.append(tuple((*a, *b) for a, b in zip(own, rest, strict=True)))
            if axes and inner.dims is None:
                self._constants.add(output)
        return results


def _source(operation: Operation) -> str:
    """Return the innermost line of an operation outside of JAX and Flax."""
    frames = []
    own = []
    for equation in operation.equations:
        trace = equation.source_info.traceback
        if not trace:
            continue
        for frame in trace.frames:
            line = (frame.file_name, frame.line_num)
            frames.append(line)
            if not frame.file_name.startswith(_LIBRARIES):
                own.append(line)
    return source_line(own or frames)


def _unsharded_results(operation: Operation) -> list[DimAxes | None]:
    """Return the shardings of results of unsharded operands; None for results of constants."""
    is_constant = all(value.dims is None or not value.shape for value in operation.inputs)
    results: list[DimAxes | None] = []
    for output in operation.outputs:
        results.append(None if is_constant else unsharded(output))
    return results


def _carry(loop: Operation, body: TracedProgram) -> tuple[int, int]:
    """Return the position of the first carried input of a loop's body, and the number carried."""
    if loop.primitive == "scan":
        return loop.params["num_consts"], loop.params["num_carry"]
    count = len(body.outputs)
    return len(body.inputs) - count, count


def _known_at_the_end(
    carried_in: Sequence[TracedValue], carried_out: Sequence[TracedValue]
) -> list[tuple[TracedValue, TracedValue]]:
    """Return the carried (input, output) pairs with a sharding of the output only."""
    found = []
    for old, new in zip(carried_in, carried_out, strict=True):
        if old.dims is None and new.dims is not None:
            found.append((old, new))
    return found


def _position(record: UndecidedLayout) -> tuple[Any, ...]:
    """Return a sort key: phase, file, line and operation."""
    file, _, line = record.source.rpartition(":")
    phase = list(FIXES).index(record.phase)
    return phase, file, len(line), line, record.primitive, record.operands


def _text(value: TracedValue) -> str:
    return spec_text(dims_spec(value.dims or unsharded(value)))
