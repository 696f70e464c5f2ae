"""Shardings of an operation's results under Explicit axes.

They follow JAX's own rules, or constraints that the results reach.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.jaxpr.propagation import ELEMENTWISE, propagate
from spmd.jaxpr.traced_program import DimAxes, Operation, TracedProgram, TracedValue
from spmd.sharding.dims import dims_spec
from spmd.sharding.mesh import entry_axes

_LIKE_ADD = ("add_any", "select_n")
"""Element-wise operations that follow the rule of `add`.

JAX's own rule does not exist, or refuses a mask of fewer axes.
"""

_REFUSALS = ("DuplicateSpecError", "NotImplementedError", "ShardingTypeError")
"""Names of the errors of JAX's rules: some of the classes are not public."""


def explicit_mesh(axes: Mapping[str, int]) -> AbstractMesh:
    """Return an abstract mesh of Explicit axes."""
    types = (AxisType.Explicit,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types)


def unsharded(value: Any) -> DimAxes:
    """Return the dims of an unsharded array."""
    return ((),) * len(value.shape)


def mesh_dims(
    spec: P, value: Any, axes: Mapping[str, int], unconstrained: DimAxes | None = None
) -> DimAxes:
    """Return the axes of each dimension of an array, restricted to `axes`.

    `unconstrained` has the axes of dimensions that the spec leaves open.
    """
    rank = len(value.shape)
    entries = [*spec, *((None,) * (rank - len(spec)))]
    left_open = unconstrained or unsharded(value)
    dims = []
    for dim, entry in enumerate(entries):
        if entry is P.UNCONSTRAINED:
            dims.append(left_open[dim])
        else:
            dims.append(tuple(axis for axis in entry_axes(entry) if axis in axes))
    return tuple(dims)


def result_dims(
    operation: Operation, given: Sequence[DimAxes], mesh: AbstractMesh
) -> list[DimAxes] | str:
    """Return the shardings of the results by JAX's rules, for given shardings of the operands.

    If JAX finds none, return its reason.
    """
    equation = operation.equations[0]
    arrays = []
    for atom, dims in zip(equation.invars, given, strict=True):
        sharding = NamedSharding(mesh, dims_spec(dims))
        array = jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype, sharding=sharding)
        arrays.append(array)
    bind = _bind(operation)
    if operation.primitive in _LIKE_ADD:
        bind = _sum
        arrays = _without_scalars(arrays)
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            results = jax.eval_shape(bind, *arrays)
    except Exception as error:
        if type(error).__name__ not in _REFUSALS:
            raise
        if operation.primitive == "reshape" and _keeps_dims(operation, given[0]):
            return propagated_dims(operation, mesh)
        return _reason(error)
    found = []
    for result in jax.tree.leaves(results):
        spec = result.sharding.spec if result.sharding else P()
        found.append(mesh_dims(spec, result, mesh.shape))
    return found


def _bind(operation: Operation) -> Any:
    """Return an operation as a function of its operands."""
    equation = operation.equations[0]
    params = {}
    for key, value in equation.params.items():
        params[key] = value
        # Under Auto axes JAX itself records shardings of results, on a mesh of Auto axes.
        if isinstance(value, NamedSharding):
            params[key] = None
    return functools.partial(equation.primitive.bind, **params)


def _without_scalars(arrays: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    """Return arrays of one dtype and without scalars, so that they can be added."""
    kept = []
    for array in arrays:
        if array.shape:
            kept.append(jax.ShapeDtypeStruct(array.shape, "float32", sharding=array.sharding))
    return kept


def _sum(*arrays: jax.Array) -> jax.Array:
    return functools.reduce(jax.lax.add, arrays)


def _reason(error: Exception) -> str:
    """Return the first sentence of an error of JAX, without the values received."""
    text = re.sub("^Use .* as (?=out sharding)", "", str(error))
    first = re.split(r"[.,]? Got |, got |\. ", text)[0]
    return first.rstrip(".")


def _keeps_dims(reshape: Operation, dims: DimAxes) -> bool:
    """Return whether a reshape keeps all sharded dimensions.

    JAX refuses such a reshape, too, if it changes several other dimensions.
    """
    before = reshape.inputs[0].shape
    after = reshape.outputs[0].shape
    kept = set()  # elements before a dimension, and its size
    for dim, size in enumerate(after):
        kept.add((math.prod(after[:dim]), size))
    for dim, axes in enumerate(dims):
        place = (math.prod(before[:dim]), before[dim])
        if axes and place not in kept:
            return False
    return True


def propagated_dims(operation: Operation, mesh: AbstractMesh) -> list[DimAxes]:
    """Return the shardings of the results by the propagation of XLA's partitioner.

    Axes that do not divide a dimension of a result do not split it.
    """
    inputs = []
    for value in operation.inputs:
        inputs.append(TracedValue(value.shape, value.itemsize, value.dims))
    outputs = []
    for value in operation.outputs:
        outputs.append(TracedValue(value.shape, value.itemsize))
    copied = Operation(operation.primitive, inputs, outputs, operation.params)
    propagate(TracedProgram(inputs, outputs, [copied]))
    found = []
    for output in outputs:
        dims = []
        for axes, size in zip(output.dims or unsharded(output), output.shape, strict=True):
            parts = 1
            for axis in axes:
                parts *= mesh.shape[axis]
            dims.append(axes if size % parts == 0 else ())
        found.append(tuple(dims))
    return found


def dims_with_constants(operation: Operation, mesh: AbstractMesh) -> list[DimAxes]:
    """Return the operands' shardings, with constants sharded like the result or another operand."""
    arrays = []
    for output, dims in zip(operation.outputs, propagated_dims(operation, mesh), strict=True):
        arrays.append((output.shape, dims))
    for value in operation.inputs:
        if value.dims and any(value.dims):
            arrays.append((value.shape, value.dims))
    return [value.dims or _constant_dims(value, arrays) for value in operation.inputs]


def _constant_dims(
    constant: TracedValue, arrays: Sequence[tuple[tuple[int, ...], DimAxes]]
) -> DimAxes:
    """Return the sharding of a constant after the most similar array.

    It is the first array of the same shape, else the last one with as many dimensions. Only
    dimensions with a multiple of the array's size follow it.
    """
    shape = constant.shape
    dims = unsharded(constant)
    for other, other_dims in arrays:
        if other == constant.shape:
            shape, dims = other, other_dims
            break
        if len(other) == len(constant.shape):
            shape, dims = other, other_dims
    found = []
    for size, other_size, axes in zip(
        constant.shape, shape, dims or unsharded(constant), strict=True
    ):
        found.append(axes if size % other_size == 0 else ())
    return tuple(found)


def decided_dims(
    program: TracedProgram, mesh: AbstractMesh, returned: Mapping[TracedValue, DimAxes]
) -> dict[TracedValue, DimAxes]:
    """Return the shardings of values if all of their uses lead to the same sharding constraint.

    The uses reach it through element-wise operations and transposes alone; a value with any other
    use has none. A sum of a whole array does not count, as it takes any layout, and neither do uses
    of forward values in the backward pass. `returned` has the results of the program with a
    sharding decided by its caller.
    """
    backward = _backward_values(program)
    wanted: dict[TracedValue, set[DimAxes | None]] = {}
    for value, dims in returned.items():
        wanted[value] = {dims}
    for operation in reversed(program.operations):
        if operation.outputs and not any(output.shape for output in operation.outputs):
            continue
        is_backward = phase_of(operation) == "backward"
        for number, value in enumerate(operation.inputs):
            if not is_backward or value in backward:
                found = _wanted_dims(operation, number, mesh, wanted)
                wanted.setdefault(value, set()).update(found)
    decided = {}
    for value, found in wanted.items():
        if len(found) == 1:
            (agreed,) = found
            if agreed is not None:
                decided[value] = agreed
    return decided


def _backward_values(program: TracedProgram) -> set[TracedValue]:
    values = set[TracedValue]()
    for operation in program.operations:
        if phase_of(operation) == "backward":
            values.update(operation.outputs)
    return values


def _wanted_dims(
    operation: Operation,
    number: int,
    mesh: AbstractMesh,
    wanted: Mapping[TracedValue, set[DimAxes | None]],
) -> set[DimAxes | None]:
    """Return the shardings wanted of an operand by an operation; None stands for any layout.

    `wanted` has the shardings wanted of the operation's results.
    """
    value = operation.inputs[number]
    spec = constraint_spec(operation)
    if spec is not None:
        return {mesh_dims(spec, value, mesh.shape)}
    if operation.primitive == "shard_map":
        if operation.params["newly_manual_axes"].issuperset(mesh.axis_names):
            return {mesh_dims(operation.params["in_specs"][number], value, mesh.shape)}
        return {None}
    after: set[DimAxes | None] = set()
    if operation.outputs:
        after = wanted.get(operation.outputs[0], set())
    if operation.primitive in ELEMENTWISE and value.shape == operation.outputs[0].shape:
        return after
    if operation.primitive == "transpose":
        return {_before_transpose(dims, operation.params["permutation"]) for dims in after}
    return {None}


def _before_transpose(dims: DimAxes | None, permutation: Sequence[int]) -> DimAxes | None:
    """Return the sharding of an operand from the sharding of its transpose."""
    if not dims:
        return dims
    return tuple(dims[permutation.index(dim)] for dim in range(len(permutation)))


_TARGETS = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}
"""Sharding constraint → name of its sharding among its parameters."""


def constraint_spec(operation: Operation) -> P | None:
    """Return the spec of a sharding constraint; None of another operation."""
    target = operation.params.get(_TARGETS.get(operation.primitive, ""))
    if not isinstance(target, NamedSharding):
        return None
    return target.spec


def is_collective(operation: Operation) -> bool:
    """Return whether an operation communicates over manual axes."""
    for parameter in ("axes", "axis_name"):
        axes = operation.params.get(parameter, ())
        if not isinstance(axes, tuple):
            axes = (axes,)
        for axis in axes:
            if isinstance(axis, str):  # reductions on one device have numbers of dimensions
                return True
    return False


def phase_of(operation: Operation) -> str:
    """Return an operation's phase of the step, a key of `spmd.analysis.explicit_axes.FIXES`.

    Recomputation is part of the forward pass.
    """
    names = "/".join(str(equation.source_info.name_stack) for equation in operation.equations)
    if "transpose(" in names and "rematted_computation" not in names:
        return "backward"
    if "jvp(" in names:
        return "forward"
    return "rest of the step"
