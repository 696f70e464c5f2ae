"""Shardings of an operation's results under Explicit axes: by JAX's own rules, or by constraints that they reach."""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.jaxpr.propagation import ELEMENTWISE, propagate
from spmd.jaxpr.traced_program import Dims, Operation, TracedProgram, TracedValue
from spmd.sharding.dims import dims_spec
from spmd.sharding.mesh import entry_axes

_LIKE_ADD = ("add_any", "select_n")
"""Element-wise operations that follow the rule of `add`; JAX's own has none, or refuses a mask of fewer axes."""

_REFUSALS = ("DuplicateSpecError", "NotImplementedError", "ShardingTypeError")
"""Errors of JAX's rules; those of its own have no public name."""


def explicit_mesh(axes: Mapping[str, int]) -> AbstractMesh:
    """Return a mesh without devices whose axes are all Explicit."""
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))


def unsharded(value: Any) -> Dims:
    """Return the dims of an array that no axis splits."""
    return ((),) * len(value.shape)


def mesh_dims(spec: P, value: Any, axes: Mapping[str, int], unconstrained: Dims | None = None) -> Dims:
    """Return the axes of each dimension of an array, restricted to `axes`; unconstrained ones are given."""
    entries = [*spec, *((None,) * (len(value.shape) - len(spec)))]
    return tuple(
        (unconstrained or unsharded(value))[dim]
        if entry is P.UNCONSTRAINED
        else tuple(axis for axis in entry_axes(entry) if axis in axes)
        for dim, entry in enumerate(entries)
    )


def result_dims(operation: Operation, given: Sequence[Dims], mesh: AbstractMesh) -> list[Dims] | str:
    """Return the shardings of the results for operands with the given ones, or JAX's reason why there are none."""
    equation = operation.equations[0]
    arrays = [
        jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype, sharding=NamedSharding(mesh, dims_spec(dims)))
        for atom, dims in zip(equation.invars, given, strict=True)
    ]
    # Under Auto axes JAX itself notes shardings of results, on a mesh of that type.
    params = {key: None if isinstance(x, NamedSharding) else x for key, x in equation.params.items()}
    bind: Any = functools.partial(equation.primitive.bind, **params)
    if operation.primitive in _LIKE_ADD:
        arrays = [jax.ShapeDtypeStruct(x.shape, "float32", sharding=x.sharding) for x in arrays if x.shape]
        bind = _sum
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            results = jax.eval_shape(bind, *arrays)
    except Exception as error:
        if type(error).__name__ not in _REFUSALS:
            raise
        if operation.primitive == "reshape" and _keeps_dims(operation, given[0]):
            return propagated_dims(operation, mesh)
        return re.split(r"[.,]? Got |, got |\. ", re.sub("^Use .* as (?=out sharding)", "", str(error)))[0].rstrip(".")
    return [mesh_dims(x.sharding.spec if x.sharding else P(), x, mesh.shape) for x in jax.tree.leaves(results)]


def _sum(*arrays: jax.Array) -> jax.Array:
    return functools.reduce(jax.lax.add, arrays)


def _keeps_dims(reshape: Operation, dims: Dims) -> bool:
    """Return whether all sharded dimensions are among those of the result; JAX refuses to reshape several others."""
    before, after = reshape.inputs[0].shape, reshape.outputs[0].shape
    kept = {(math.prod(after[:dim]), size) for dim, size in enumerate(after)}
    return all((math.prod(before[:dim]), before[dim]) in kept for dim, axes in enumerate(dims) if axes)


def propagated_dims(operation: Operation, mesh: AbstractMesh) -> list[Dims]:
    """Return the shardings of the results as XLA's partitioner propagates them, where they divide the results."""
    inputs = [TracedValue(value.shape, value.itemsize, value.dims) for value in operation.inputs]
    outputs = [TracedValue(value.shape, value.itemsize) for value in operation.outputs]
    copied = Operation(operation.primitive, inputs, outputs, operation.params)
    propagate(TracedProgram(inputs, outputs, [copied]))
    return [
        tuple(
            axes if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else ()
            for axes, size in zip(output.dims or unsharded(output), output.shape, strict=True)
        )
        for output in outputs
    ]


def dims_with_constants(operation: Operation, mesh: AbstractMesh) -> list[Dims]:
    """Return the operands' shardings, with constants sharded like the result or another operand."""
    results = zip(operation.outputs, propagated_dims(operation, mesh), strict=True)
    arrays = [*results, *((v, v.dims) for v in operation.inputs if v.dims and any(v.dims))]
    shardings = []
    for value in operation.inputs:
        alike = [(other.shape, dims) for other, dims in arrays if len(other.shape) == len(value.shape)]
        shape, dims = next((x for x in alike if x[0] == value.shape), alike[-1] if alike else (value.shape, ()))
        sizes = zip(value.shape, shape, dims or unsharded(value), strict=True)
        shardings.append(value.dims or tuple(axes if size % other == 0 else () for size, other, axes in sizes))
    return shardings


def decided_dims(
    program: TracedProgram, mesh: AbstractMesh, returned: Mapping[TracedValue, Dims]
) -> dict[TracedValue, Dims]:
    """Return the shardings of values whose uses reach one sharding constraint, through element-wise operations alone.

    A sum of a whole array does not count, as it takes any layout, and neither does what the backward pass does with a
    value of the forward pass. Of values that the program returns, `returned` has those that its caller decides.
    """
    backward = {value for o in program.operations if phase_of(o) == "backward" for value in o.outputs}
    wanted: dict[TracedValue, set[Dims | None]] = {value: {dims} for value, dims in returned.items()}
    for operation in reversed(program.operations):
        if operation.outputs and not any(output.shape for output in operation.outputs):
            continue
        spec, is_counted = constraint_spec(operation), phase_of(operation) != "backward"
        after = wanted.get(operation.outputs[0], set()) if operation.outputs else set()
        for i, value in enumerate(operation.inputs):
            dims: set[Dims | None] = {None}
            if spec is not None:
                dims = {mesh_dims(spec, value, mesh.shape)}
            elif operation.primitive == "shard_map":
                if operation.params["newly_manual_axes"].issuperset(mesh.axis_names):
                    dims = {mesh_dims(operation.params["in_specs"][i], value, mesh.shape)}
            elif operation.primitive in ELEMENTWISE and value.shape == operation.outputs[0].shape:
                dims = after
            elif operation.primitive == "transpose":
                order = operation.params["permutation"]
                dims = {known and tuple(known[order.index(dim)] for dim in range(len(order))) for known in after}
            if is_counted or value in backward:
                wanted.setdefault(value, set()).update(dims)
    agreed = {value: next(iter(found)) for value, found in wanted.items() if len(found) == 1}
    return {value: dims for value, dims in agreed.items() if dims is not None}


def constraint_spec(operation: Operation) -> P | None:
    """Return the spec of a sharding constraint; None of another operation."""
    names = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}
    target = operation.params.get(names.get(operation.primitive, ""))
    return target.spec if isinstance(target, NamedSharding) else None


def is_collective(operation: Operation) -> bool:
    """Return whether an operation communicates over axes that are manual around it."""
    names = [operation.params.get(name, ()) for name in ("axes", "axis_name")]
    return any(isinstance(name, str) for axes in names for name in (axes if isinstance(axes, tuple) else (axes,)))


def phase_of(operation: Operation) -> str:
    """Return the phase of the step that an operation is part of; recomputation is part of the forward pass."""
    names = "/".join(str(equation.source_info.name_stack) for equation in operation.equations)
    if "transpose(" in names and "rematted_computation" not in names:
        return "backward"
    return "forward" if "jvp(" in names else "rest of the step"
