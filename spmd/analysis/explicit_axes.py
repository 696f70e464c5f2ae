"""Check that the layout of every array of a train step is decided, by JAX's own rules for Explicit axes.

Under `AxisType.Explicit` the sharding of a result follows from those of its operands, and JAX refuses an operation that
leaves it open. Steps run under Auto axes, where the compiler then chooses. `check_explicit` evaluates the trace of such
a step one operation at a time on an abstract mesh of Explicit axes. An operation that JAX refuses is undecided, unless
all uses of its result reach a sharding constraint through element-wise operations. After it, the check continues with
the sharding that XLA's partitioner would propagate, so that all are found.
"""

import dataclasses
import functools
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import flax
import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.analysis.collectives import source_line
from spmd.analysis.propagation import propagate
from spmd.analysis.traced_program import Dims, Operation, TracedProgram, TracedValue, read_program
from spmd.plan.manual import dims_spec
from spmd.sharding.mesh import entry_axes
from spmd.sharding.rules import spec_text
from spmd.train.state import abstract_arguments
from spmd.train.step import TrainStep

_LIBRARIES = tuple(f"{os.path.dirname(library.__file__)}{os.sep}" for library in (jax, flax))
_ELEMENTWISE = frozenset(
    "abs add add_any and clamp convert_element_type copy copy_p cos div eq erf exp exp2 expm1 ge gt integer_pow "
    "is_finite le log log1p logistic lt max min mul name ne neg not or pow reduce_precision rsqrt select_n sign sin "
    "sqrt square stop_gradient sub tanh".split()
)


@dataclasses.dataclass(frozen=True, order=True)
class UndecidedLayout:
    """An operation whose result may be sharded in several ways.

    Attributes:
        is_backward: True if it is part of the backward pass alone.
        source: `file:line`.
        operands: Dtype, shape and spec of each array that it takes.
        reason: The reason, in JAX's words.
        count: Number of equal operations of this line.
    """

    is_backward: bool
    source: str
    primitive: str
    operands: str
    reason: str
    count: int = 1

    def __str__(self) -> str:
        times = f" ×{self.count}" if self.count > 1 else ""
        return f"{self.source}: {self.primitive}{times} of {self.operands}: {self.reason}"


def check_explicit(step: TrainStep, batch: Any) -> tuple[UndecidedLayout, ...]:
    """Return the operations of a step whose layout nobody decided; no devices are needed and nothing is compiled.

    The batch has arrays or `jax.ShapeDtypeStruct`s.
    """
    axes = {axis: size for axis, size in step.plan.mesh.shape.items() if size > 1}
    if not axes:
        return ()
    state, batch = abstract_arguments(step.plan, batch)
    program = read_program(step.trace(batch).jaxpr)
    for value, leaf in zip(program.inputs, jax.tree.leaves((state, batch)), strict=True):
        value.dims = _dims(leaf.sharding.spec, value, axes)
    check = _Check()
    new_state = zip(program.outputs, jax.tree.leaves(state), strict=False)  # metrics follow
    check.run(program, _explicit(axes), {v: _dims(leaf.sharding.spec, v, axes) for v, leaf in new_state})
    return check.records()


class _Check:
    """Shardings of the values of a program and its bodies, with the operations that leave them open."""

    def __init__(self) -> None:
        self._found: dict[Operation, tuple[str, str]] = {}  # operation → operands, reason
        self._known: dict[Any, list[Dims] | str] = {}
        self._constants = set[TracedValue]()  # of manual regions: they are sharded over manual axes only

    def run(self, program: TracedProgram, mesh: AbstractMesh, returned: Mapping[TracedValue, Dims]) -> None:
        """Set the sharding of every value; `returned` has those of results that are decided by the caller."""
        decided = _decided_later(program, mesh, returned)
        for operation in program.operations:
            self._found.pop(operation, None)
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

    def records(self) -> tuple[UndecidedLayout, ...]:
        """Return one record for equal operations of a line."""
        counts, forward = Counter[tuple[str, ...]](), set()
        for operation, (operands, reason) in self._found.items():
            infos = [equation.source_info for equation in operation.equations]
            frames = [(f.file_name, f.line_num) for info in infos if info.traceback for f in info.traceback.frames]
            own = [frame for frame in frames if not frame[0].startswith(_LIBRARIES)]
            key = (source_line(own or frames), operation.primitive, operands, reason)
            counts[key] += 1
            if not any("transpose(" in str(info.name_stack) for info in infos):
                forward.add(key)
        return tuple(sorted(UndecidedLayout(key not in forward, *key, n) for key, n in counts.items()))

    def _report(self, operation: Operation, reason: str) -> None:
        arrays = [
            f"{atom.aval.str_short(short_dtypes=True)} {spec_text(dims_spec(value.dims or ((),) * len(value.shape)))}"
            for atom, value in zip(operation.equations[0].invars, operation.inputs, strict=False)
            if value.shape
        ]
        self._found[operation] = (", ".join(arrays), reason)

    def _results(
        self, operation: Operation, mesh: AbstractMesh, decided: Mapping[TracedValue, Dims]
    ) -> Sequence[Dims | None]:
        given = [value.dims for value in operation.inputs]
        if (spec := _chosen_spec(operation)) is not None:
            return [_dims(spec, operation.outputs[0], mesh.shape, given[0])]
        if operation.primitive == "device_put":
            return given
        if not any(any(dims) for dims in given if dims):
            is_constant = all(value.dims is None or not value.shape for value in operation.inputs)
            return [None if is_constant else _whole(output) for output in operation.outputs]
        if not operation.equations or _is_collective(operation):
            return _propagated(operation, mesh)
        found = self._evaluate(operation, [dims or _whole(v) for v, dims in zip(operation.inputs, given, strict=True)], mesh)
        if isinstance(found, str) and None in given:  # constants take any layout
            found = self._evaluate(operation, _with_constants(operation, mesh), mesh)
        if not isinstance(found, str):
            return found
        if all(output in decided for output in operation.outputs):
            return [decided[output] for output in operation.outputs]
        self._report(operation, found)
        return _propagated(operation, mesh)

    def _evaluate(self, operation: Operation, given: list[Dims], mesh: AbstractMesh) -> list[Dims] | str:
        """Return the shardings of the results by JAX's rules, or the reason why there are none."""
        key = operation, tuple(given), mesh
        if key not in self._known:
            self._known[key] = _evaluate(operation.equations[0], given, mesh)
        return self._known[key]

    def _loop(self, operation: Operation, mesh: AbstractMesh) -> list[Dims | None]:
        """Check the body of a loop; what it carries is sharded like its initial value, constants like the result."""
        (body,), inputs = operation.bodies, operation.inputs[-len(operation.bodies[0].inputs) :]
        count = len(body.outputs)
        start = len(inputs) - count
        if operation.primitive == "scan":
            start, count = operation.params["num_consts"], operation.params["num_carry"]
        for value, inner in zip(inputs, body.inputs, strict=True):
            inner.dims = value.dims if value.dims is None else value.dims[len(value.shape) - len(inner.shape) :]
        carried = list(zip(body.inputs[start : start + count], body.outputs[:count], strict=True))
        self.run(body, mesh, {})
        while unknown := [(old, new) for old, new in carried if old.dims is None and new.dims is not None]:
            for old, new in unknown:
                old.dims = new.dims
            self.run(body, mesh, {})
        for old, new in carried:
            if new.dims is not None and old.dims != new.dims:
                self._report(operation, f"a value is carried {_text(old)} into an iteration and {_text(new)} out of it")
        if any(v.dims and v.dims[0] for v, inner in zip(inputs, body.inputs, strict=True) if len(v.shape) > len(inner.shape)):
            self._report(operation, "the dimension that it iterates over is sharded")
        results = [old.dims for old, _ in carried]
        for output, inner in zip(operation.outputs[count:], body.outputs[count:], strict=True):
            results.append(None if inner.dims is None else ((),) * (len(output.shape) - len(inner.shape)) + inner.dims)
        return results

    def _branches(self, operation: Operation, mesh: AbstractMesh) -> list[Dims | None]:
        for body in operation.bodies:
            for value, inner in zip(operation.inputs[-len(body.inputs) :], body.inputs, strict=False):
                inner.dims = value.dims
            self.run(body, mesh, {})
        results = []
        for ends in zip(*(body.outputs for body in operation.bodies), strict=True):
            known = [end for end in ends if end.dims is not None]
            results.append(known[0].dims if known else None)
            if other := [end for end in known if end.dims != known[0].dims]:
                self._report(operation, f"branches return {_text(known[0])} and {_text(other[0])}")
        return results

    def _manual(self, operation: Operation, mesh: AbstractMesh) -> list[Dims]:
        """Check a region for the axes that are not manual in it; the author decides the others."""
        (body,), manual = operation.bodies, operation.params["newly_manual_axes"]
        axes = {axis: size for axis, size in mesh.shape.items() if axis not in manual}
        if axes:
            for value, inner in zip(operation.inputs, body.inputs, strict=True):
                is_constant = value.dims is None or value in self._constants
                inner.dims = None if is_constant else _within(value.dims or (), axes)
            self.run(body, _explicit(axes), {})
        results = []
        for output, inner, spec in zip(operation.outputs, body.outputs, operation.params["out_specs"], strict=True):
            own, rest = _dims(spec, output, mesh.shape), (inner.dims if axes and inner.dims else _whole(output))
            results.append(tuple((*a, *b) for a, b in zip(own, rest, strict=True)))
            if axes and inner.dims is None:
                self._constants.add(output)
        return results


def _evaluate(equation: Any, given: Sequence[Dims], mesh: AbstractMesh) -> list[Dims] | str:
    arrays = [
        jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype, sharding=NamedSharding(mesh, dims_spec(dims)))
        for atom, dims in zip(equation.invars, given, strict=True)
    ]
    # Under Auto axes JAX itself notes shardings of results, on a mesh of that type.
    params = {key: None if isinstance(x, NamedSharding) else x for key, x in equation.params.items()}
    bind = functools.partial(equation.primitive.bind, **params)
    try:
        with jax.sharding.use_abstract_mesh(mesh):  # sums of gradients have no rule of their own
            results = jax.eval_shape(jax.lax.add if equation.primitive.name == "add_any" else bind, *arrays)
    except Exception as error:
        if type(error).__name__ != "ShardingTypeError":  # it has no public name
            raise
        return re.split(r"[.,]? [Gg]ot |\. ", str(error))[0].rstrip(".")
    return [_dims(x.sharding.spec if x.sharding else P(), x, mesh.shape) for x in jax.tree.leaves(results)]


def _decided_later(
    program: TracedProgram, mesh: AbstractMesh, returned: Mapping[TracedValue, Dims]
) -> dict[TracedValue, Dims]:
    """Return the values all of whose uses reach one sharding constraint, through element-wise operations alone."""
    wanted: dict[TracedValue, list[Dims | None]] = {}
    for output in program.outputs:
        wanted.setdefault(output, []).append(returned.get(output))

    def agreed(value: TracedValue) -> Dims | None:
        uses = wanted.get(value, [])
        return uses[0] if uses and all(dims == uses[0] for dims in uses) else None

    for operation in reversed(program.operations):
        spec = _chosen_spec(operation)
        for i, value in enumerate(operation.inputs):
            dims = None
            if operation.primitive == "shard_map" and set(mesh.axis_names) <= operation.params["newly_manual_axes"]:
                dims = _dims(operation.params["in_specs"][i], value, mesh.shape)
            elif spec is not None:
                dims = _dims(spec, value, mesh.shape)
            elif operation.primitive in _ELEMENTWISE and value.shape == operation.outputs[0].shape:
                dims = agreed(operation.outputs[0])
            elif operation.primitive == "transpose" and (after := agreed(operation.outputs[0])) is not None:
                order = operation.params["permutation"]
                dims = tuple(after[order.index(dim)] for dim in range(len(order)))
            wanted.setdefault(value, []).append(dims)
    return {value: dims for value in wanted if (dims := agreed(value)) is not None}


def _chosen_spec(operation: Operation) -> P | None:
    """Return the spec that a constraint gives to its operand."""
    names = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}
    target = operation.params.get(names.get(operation.primitive, ""))
    return target.spec if isinstance(target, NamedSharding) else None


def _is_collective(operation: Operation) -> bool:
    """Return whether an operation communicates over axes that are manual around it."""
    names = [operation.params.get(name, ()) for name in ("axes", "axis_name")]
    return any(isinstance(name, str) for axes in names for name in (axes if isinstance(axes, tuple) else (axes,)))


def _propagated(operation: Operation, mesh: AbstractMesh) -> list[Dims]:
    """Return the shardings that XLA's partitioner would choose, of those that divide the results."""
    inputs, outputs = (
        [TracedValue(value.shape, value.itemsize, dims) for value, dims in values]
        for values in (((v, v.dims) for v in operation.inputs), ((v, None) for v in operation.outputs))
    )
    copied = Operation(operation.primitive, inputs, outputs, operation.params)
    propagate(TracedProgram(inputs, outputs, [copied]))
    return [
        tuple(
            axes if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else ()
            for axes, size in zip(output.dims or _whole(output), output.shape, strict=True)
        )
        for output in outputs
    ]


def _with_constants(operation: Operation, mesh: AbstractMesh) -> list[Dims]:
    """Return the operands' shardings, with constants sharded like the result or another operand."""
    results = list(zip(operation.outputs, _propagated(operation, mesh), strict=True))
    arrays = [*results, *((v, v.dims) for v in operation.inputs if v.dims and any(v.dims))]
    shardings = []
    for value in operation.inputs:
        alike = [(v, dims) for v, dims in arrays if len(v.shape) == len(value.shape)]
        like, dims = next(((v, dims) for v, dims in alike if v.shape == value.shape), (alike or [(value, _whole(value))])[-1])
        sizes = zip(value.shape, like.shape, dims, strict=True)
        shardings.append(value.dims or tuple(axes if size % other == 0 else () for size, other, axes in sizes))
    return shardings


def _explicit(axes: Mapping[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))


def _dims(spec: P, value: Any, axes: Mapping[str, int], open_dims: Dims | None = None) -> Dims:
    """Return the axes of each dimension, of those in a mesh; an unconstrained dimension is as in `open_dims`."""
    entries = [*spec, *((None,) * (len(value.shape) - len(spec)))]
    open_dims = open_dims or _whole(value)
    return tuple(
        open_dims[i] if entry is P.UNCONSTRAINED else tuple(axis for axis in entry_axes(entry) if axis in axes)
        for i, entry in enumerate(entries)
    )


def _within(dims: Dims, axes: Mapping[str, int]) -> Dims:
    return tuple(tuple(axis for axis in entry if axis in axes) for entry in dims)


def _whole(value: Any) -> Dims:
    return ((),) * len(value.shape)


def _text(value: TracedValue) -> str:
    return spec_text(dims_spec(value.dims or _whole(value)))
