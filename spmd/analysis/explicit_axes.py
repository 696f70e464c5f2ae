"""Check that the layout of every array of a train step is decided, by JAX's own rules for Explicit axes.

Under `AxisType.Explicit` the sharding of a result follows from those of its operands, and JAX refuses an operation that
leaves it open. Steps run under Auto axes, where the compiler then chooses. `check_explicit` evaluates the trace of such
a step one operation at a time on an abstract mesh of Explicit axes. An operation that JAX refuses is undecided, unless
its result reaches a sharding constraint through element-wise operations. After it, the check continues with the
sharding that XLA's partitioner would propagate, so that all such operations are found.
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
from spmd.jaxpr.traced_program import Dims, Operation, TracedProgram, TracedValue, read_program
from spmd.sharding.dims import dims_spec
from spmd.sharding.rules import spec_text
from spmd.training.state import abstract_arguments
from spmd.training.step import TrainStep

FIXES = {
    "forward": "annotate(x, NAME) its result, with NAME in the rule table's activations, or constrain it",
    "backward": "annotate(x, NAME) the array whose gradient it computes: a gradient is constrained like its array",
    "rest of the step": "jax.lax.with_sharding_constraint in the optimizer or gradient function",
}
"""Phase of the step → fix for its operations."""

_LIBRARIES = tuple(f"{os.path.dirname(str(library.__file__))}{os.sep}" for library in (jax, flax))


@dataclasses.dataclass(frozen=True)
class UndecidedLayout:
    """An operation whose result may be sharded in several ways.

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
        times = f" ×{self.count}" if self.count > 1 else ""
        return f"{self.source}: {self.primitive}{times}{' of ' * bool(self.operands)}{self.operands}: {self.reason}"


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
            if records := [record for record in self.undecided if record.phase == phase]:
                lines += [f"{phase}; fix: {fix}", *(f"  {record}" for record in records)]
        count, total = (
            sum(record.count for record in self.undecided),
            f"{self.operations:,} operations on sharded arrays",
        )
        what = f"{count:,} of {total} leave their layout open" if count else f"all {total} are decided"
        lines.append(f"{' '.join(f'{axis}={size}' for axis, size in self.axes.items())}: {what}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        records = [dataclasses.asdict(record) | {"fix": FIXES[record.phase]} for record in self.undecided]
        return {"ok": self.ok, "mesh": dict(self.axes), "operations": self.operations, "undecided": records}


def check_explicit(step: TrainStep, batch: Any) -> ExplicitCheck:
    """Find the operations of a step whose layout nobody decided; no devices are needed and nothing is compiled.

    The batch has arrays or `jax.ShapeDtypeStruct`s.
    """
    axes = {axis: size for axis, size in step.plan.mesh.shape.items() if size > 1}
    state, batch = abstract_arguments(step.plan, batch)
    program, check = read_program(step.trace(batch).jaxpr), _Check()
    if axes:
        for value, leaf in zip(program.inputs, jax.tree.leaves((state, batch)), strict=True):
            value.dims = mesh_dims(leaf.sharding.spec, value, axes)
        new_state = zip(program.outputs, jax.tree.leaves(state), strict=False)  # metrics follow
        check.run(program, explicit_mesh(axes), {v: mesh_dims(leaf.sharding.spec, v, axes) for v, leaf in new_state})
    return ExplicitCheck(axes, len(check.seen), check.undecided())


class _Check:
    """Shardings of the values of a program and its bodies, with the operations that leave them open."""

    def __init__(self) -> None:
        self.seen = set[Operation]()
        self._found: dict[Operation, tuple[str, str]] = {}  # operation → operands, reason
        self._known: dict[Any, list[Dims] | str] = {}
        self._constants = set[TracedValue]()  # that a manual region returns: sharded over its own axes only

    def run(self, program: TracedProgram, mesh: AbstractMesh, returned: Mapping[TracedValue, Dims]) -> None:
        """Set the sharding of every value; `returned` has those of results that are decided by the caller.

        A constant has none: it is created in whichever sharding it is used.
        """
        decided = decided_dims(program, mesh, returned)
        for operation in program.operations:
            self._found.pop(operation, None)
            results: Sequence[Dims | None]
            if operation.primitive in ("scan", "while"):
                results = self._loop(operation, mesh)
            elif operation.primitive == "cond":
                results = self._branches(operation, mesh)
            elif operation.primitive == "shard_map":
                results = self._manual(operation, mesh)
            else:
                results = self._results(operation, mesh, decided)
            for output, dims in zip(operation.outputs, results, strict=True):
                output.dims = dims

    def undecided(self) -> tuple[UndecidedLayout, ...]:
        """Return one record for equal operations of a line."""
        counts, phases = Counter[tuple[str, str, str, str]](), dict[tuple[str, str, str, str], str]()
        for operation, (operands, reason) in self._found.items():
            traces = [equation.source_info.traceback for equation in operation.equations]
            frames = [(frame.file_name, frame.line_num) for trace in traces if trace for frame in trace.frames]
            own = [frame for frame in frames if not frame[0].startswith(_LIBRARIES)]
            key = (source_line(own or frames), operation.primitive, operands, reason)
            counts[key] += 1
            phases[key] = min(phase_of(operation), phases.get(key, "rest of the step"), key=list(FIXES).index)
        records = [UndecidedLayout(phases[key], *key, count=n) for key, n in counts.items()]
        return tuple(sorted(records, key=_position))

    def _report(self, operation: Operation, reason: str) -> None:
        atoms = zip(operation.equations[0].invars, operation.inputs, strict=True)
        arrays = [f"{atom.aval.str_short(short_dtypes=True)} {_text(value)}" for atom, value in atoms if value.shape]
        self._found[operation] = ("" if operation.bodies else ", ".join(arrays), reason)

    def _results(
        self, operation: Operation, mesh: AbstractMesh, decided: Mapping[TracedValue, Dims]
    ) -> Sequence[Dims | None]:
        given = [value.dims for value in operation.inputs]
        if (spec := constraint_spec(operation)) is not None:
            return [mesh_dims(spec, operation.outputs[0], mesh.shape, given[0])]
        if operation.primitive in ("device_put", "name", "stored"):
            return given
        if not any(any(dims) for dims in given if dims):
            is_constant = all(value.dims is None or not value.shape for value in operation.inputs)
            return [None if is_constant else unsharded(output) for output in operation.outputs]
        self.seen.add(operation)
        if not operation.equations or is_collective(operation):
            return propagated_dims(operation, mesh)
        found = self._evaluate(operation, [value.dims or unsharded(value) for value in operation.inputs], mesh)
        if isinstance(found, str) and None in given:
            found = self._evaluate(operation, dims_with_constants(operation, mesh), mesh)
        if not isinstance(found, str):
            return found
        if all(output in decided for output in operation.outputs):
            return [decided[output] for output in operation.outputs]
        self._report(operation, found)
        return propagated_dims(operation, mesh)

    def _evaluate(self, operation: Operation, given: list[Dims], mesh: AbstractMesh) -> list[Dims] | str:
        key = operation, tuple(given), mesh
        if key not in self._known:  # bodies of loops are visited more than once
            self._known[key] = result_dims(operation, given, mesh)
        return self._known[key]

    def _loop(self, operation: Operation, mesh: AbstractMesh) -> list[Dims | None]:
        """Check the body of a loop; a value that it carries is sharded as at the start, a constant as at the end."""
        (body,) = operation.bodies
        inputs, count = operation.inputs[-len(body.inputs) :], len(body.outputs)
        start = len(inputs) - count
        if operation.primitive == "scan":
            start, count = operation.params["num_consts"], operation.params["num_carry"]
        for value, inner in zip(inputs, body.inputs, strict=True):
            outer = len(value.shape) - len(inner.shape)
            inner.dims = None if value.dims is None else value.dims[outer:]
            self._constants |= {inner} if value in self._constants else set()
            if outer and value.dims and value.dims[0]:
                self._report(operation, f"iterates over a dimension of {_text(value)} that is sharded")
        carried = list(zip(body.inputs[start : start + count], body.outputs[:count], strict=True))
        self.run(body, mesh, {})
        while unknown := [(old, new) for old, new in carried if old.dims is None and new.dims is not None]:
            for old, new in unknown:
                old.dims = new.dims
            self.run(body, mesh, {})
        for old, new in carried:
            if new.dims is not None and old.dims != new.dims:
                self._report(operation, f"a value is carried {_text(old)} into an iteration and {_text(new)} out of it")
        results = [old.dims for old, _ in carried]
        for output, inner in zip(operation.outputs[count:], body.outputs[count:], strict=True):
            results.append(None if inner.dims is None else (*unsharded(output)[len(inner.dims) :], *inner.dims))
        return results

    def _branches(self, operation: Operation, mesh: AbstractMesh) -> list[Dims | None]:
        for body in operation.bodies:
            for value, inner in zip(operation.inputs[-len(body.inputs) :], body.inputs, strict=False):
                inner.dims = value.dims
                self._constants |= {inner} if value in self._constants else set()
            self.run(body, mesh, {})
        results: list[Dims | None] = []
        for ends in zip(*(body.outputs for body in operation.bodies), strict=True):
            known = [end for end in ends if end.dims is not None]
            results.append(known[0].dims if known else None)
            if other := [end for end in known if end.dims != known[0].dims]:
                self._report(operation, f"branches return {_text(known[0])} and {_text(other[0])}")
        return results

    def _manual(self, operation: Operation, mesh: AbstractMesh) -> list[Dims]:
        """Check a manual region for the axes that are not manual in it; its author decides the others."""
        (body,), manual = operation.bodies, operation.params["newly_manual_axes"]
        axes = {axis: size for axis, size in mesh.shape.items() if axis not in manual}
        if axes:
            for value, inner in zip(operation.inputs, body.inputs, strict=True):
                is_constant = value.dims is None or value in self._constants
                inner.dims = None if is_constant else mesh_dims(dims_spec(value.dims or ()), value, axes)
            self.run(body, explicit_mesh(axes), {})
        results = []
        for output, inner, spec in zip(operation.outputs, body.outputs, operation.params["out_specs"], strict=True):
            own, rest = mesh_dims(spec, output, mesh.shape), (axes and inner.dims) or unsharded(output)
            results.append(tuple((*a, *b) for a, b in zip(own, rest, strict=True)))
            if axes and inner.dims is None:
                self._constants.add(output)
        return results


def _position(record: UndecidedLayout) -> tuple[Any, ...]:
    file, _, line = record.source.rpartition(":")
    return list(FIXES).index(record.phase), file, len(line), line, record.primitive, record.operands


def _text(value: TracedValue) -> str:
    return spec_text(dims_spec(value.dims or unsharded(value)))
