"""Operations computed wrongly by XLA's partitioner, and equivalent formulas computed right.

Each fault has a reproduction in plain JAX on the page docs/xla-faults.md, and a test that fails
when XLA mends it. `fault_of` returns the fault of an operation on a mesh; its `formula` is a
function with the same results.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P
from jax.sharding import use_abstract_mesh

from spmd.errors import Problem
from spmd.jaxpr.source import equation_line
from spmd.jaxpr.traced_program import Operation, TracedProgram, TracedValue
from spmd.plan.context import keep_whole
from spmd.plan.manual import shard_map_over, split_axes
from spmd.plan.scopes import read_fault
from spmd.sharding.mesh import BATCH_AXES, AnyMesh, is_cpu, shards_of

Formula = Callable[..., Any]
"""A function of an operation's operands that returns its results."""

_DimsOfOperands = list[tuple[TracedValue, Sequence[int]]]
"""Some dimensions of each operand of an operation."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Kind of operation computed wrongly by XLA where it is split.

    Attributes:
        name: Heading on the page docs/xla-faults.md.
        applies: Whether an operation may have the fault.
        formula: The function to compute instead on a mesh.
        instead: The formula in words.
        whole: The dimensions of the operands that must be whole. Where they are, the operation is
            right unchanged, and may stay in the code of a custom derivative, which cannot be
            replaced. None if the operation may never stay.
    """

    name: str
    applies: Callable[[Operation, AnyMesh], bool]
    formula: Callable[[Operation, AnyMesh], Formula]
    instead: str
    whole: Callable[[Operation], _DimsOfOperands] | None = None


def _is_convolution(operation: Operation, mesh: AnyMesh) -> bool:
    return operation.primitive == "conv_general_dilated"


def _has_groups(operation: Operation, mesh: AnyMesh) -> bool:
    if not _is_convolution(operation, mesh):
        return False
    params = operation.params
    return max(params["feature_group_count"], params["batch_group_count"]) > 1


def _has_windows(operation: Operation, mesh: AnyMesh) -> bool:
    return operation.primitive.startswith(("reduce_window", "select_and_"))


def _is_cpu_transform(operation: Operation, mesh: AnyMesh) -> bool:
    return operation.primitive == "fft" and is_cpu(mesh)


def _local_convolution(operation: Operation, mesh: AnyMesh) -> Formula:
    """Let each device convolve its own examples, and its own channels.

    Channels are split over `tensor` if the kernel is, by groups.
    """
    numbers = operation.params["dimension_numbers"]
    batch = _axes_of_examples(operation, mesh)
    channels = _axes_of_groups(operation, mesh)
    groups = operation.params["feature_group_count"] // shards_of(channels, mesh.shape)
    local = functools.partial(_bind, operation, feature_group_count=groups)
    images = _spec({numbers.lhs_spec[0]: batch, numbers.lhs_spec[1]: channels})
    kernel = _spec({numbers.rhs_spec[0]: channels})
    result = _spec({numbers.out_spec[0]: batch, numbers.out_spec[1]: channels})
    return shard_map_over(mesh, split_axes(mesh), local, (images, kernel), result)


def _axes_of_examples(operation: Operation, mesh: AnyMesh) -> tuple[str, ...]:
    """Return the split axes of the examples of a convolution; none if they do not divide."""
    split = split_axes(mesh)
    axes = tuple(axis for axis in BATCH_AXES if axis in split)
    dim = operation.params["dimension_numbers"].lhs_spec[0]
    examples = operation.inputs[0].shape[dim]
    if operation.params["batch_group_count"] > 1 or examples % shards_of(axes, mesh.shape):
        return ()
    return axes


def _axes_of_groups(operation: Operation, mesh: AnyMesh) -> tuple[str, ...]:
    """Return `tensor` if channels are split over it and its parts are whole groups."""
    if "tensor" not in split_axes(mesh):
        return ()
    if operation.params["feature_group_count"] % mesh.shape["tensor"]:
        return ()
    numbers = operation.params["dimension_numbers"]
    images, kernel = operation.inputs
    for value, dim in ((images, numbers.lhs_spec[1]), (kernel, numbers.rhs_spec[0])):
        if value.dims and "tensor" in value.dims[dim]:
            return ("tensor",)
    return ()


def _whole_convolution(operation: Operation, mesh: AnyMesh) -> Formula:
    """Keep the spatial dimensions of images, kernel and result whole."""
    numbers = operation.params["dimension_numbers"]

    def convolve(images: jax.Array, kernel: jax.Array) -> jax.Array:
        images = keep_whole(images, mesh, numbers.lhs_spec[2:])
        kernel = keep_whole(kernel, mesh, numbers.rhs_spec[2:])
        return keep_whole(_bind(operation, images, kernel), mesh, numbers.out_spec[2:])

    return convolve


def _spatial_dims(operation: Operation) -> _DimsOfOperands:
    numbers = operation.params["dimension_numbers"]
    images, kernel = operation.inputs
    return [(images, numbers.lhs_spec[2:]), (kernel, numbers.rhs_spec[2:])]


def _window_dims(operation: Operation) -> _DimsOfOperands:
    dims = _dims_of_window(operation)
    found: _DimsOfOperands = []
    for value in operation.inputs:
        if value.shape:  # the initial value of a window is a scalar
            found.append((value, dims))
    return found


def _transformed_dims(operation: Operation) -> _DimsOfOperands:
    (value,) = operation.inputs
    ndim = len(value.shape)
    transformed = len(operation.params["fft_lengths"])
    return [(value, range(ndim - transformed, ndim))]


def _dims_of_window(operation: Operation) -> list[int]:
    """Return the dimensions with windows over several elements."""
    windows = operation.params["window_dimensions"]
    strides = operation.params["window_strides"]
    dims = []
    for dim, (window, stride) in enumerate(zip(windows, strides, strict=True)):
        if window > 1 or stride > 1:
            dims.append(dim)
    return dims


def _whole_windows(operation: Operation, mesh: AnyMesh) -> Formula:
    """Keep the dimensions with windows over several elements whole."""
    dims = _dims_of_window(operation)

    def whole(x: jax.Array) -> jax.Array:
        if x.ndim == 0:
            return x
        return keep_whole(x, mesh, dims)

    def reduce(*arrays: jax.Array) -> Any:
        operands = [whole(x) for x in arrays]
        return jax.tree.map(whole, _bind(operation, *operands))

    return reduce


def _row_major_transform(operation: Operation, mesh: AnyMesh) -> Formula:
    """Lay operand and result out by rows, and keep the transformed dimensions whole."""
    transformed = len(operation.params["fft_lengths"])

    def by_rows(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    def whole(x: jax.Array) -> jax.Array:
        return keep_whole(x, mesh, range(x.ndim - transformed, x.ndim))

    def transform(x: jax.Array) -> jax.Array:
        # In this order, so that the layout comes last in the backward pass, too.
        return whole(by_rows(_bind(operation, by_rows(whole(x)))))

    return transform


def _bind(operation: Operation, *arrays: jax.Array, **changes: Any) -> Any:
    equation = operation.equations[0]
    params = {**equation.params, **changes}
    return equation.primitive.bind(*arrays, **params)


def _spec(entries: dict[int, tuple[str, ...]]) -> P:
    """Return the spec of an array from the axes of its split dimensions."""
    ndim = max(entries) + 1
    return P(*(entries.get(dim) or None for dim in range(ndim)))


FAULTS = (
    Fault(
        name="Convolutions with groups",
        applies=_has_groups,
        formula=_local_convolution,
        instead="each device convolves its own examples",
    ),
    Fault(
        name="Convolutions over a split dimension",
        applies=_is_convolution,
        formula=_whole_convolution,
        instead="spatial dimensions are kept whole",
        whole=_spatial_dims,
    ),
    Fault(
        name="FFTs on CPUs",
        applies=_is_cpu_transform,
        formula=_row_major_transform,
        instead="operand and result are laid out by rows",
        whole=_transformed_dims,
    ),
    Fault(
        name="Windows over a split dimension",
        applies=_has_windows,
        formula=_whole_windows,
        instead="the dimensions of a window are kept whole",
        whole=_window_dims,
    ),
)
"""All known faults; the first that applies to an operation counts."""


def fault_of(operation: Operation, mesh: AnyMesh) -> Fault | None:
    """Return the possible fault of an operation on a mesh."""
    for fault in FAULTS:
        if fault.applies(operation, mesh):
            return fault
    return None


def replaced_fault(operation: Operation) -> str:
    """Return the name of the fault behind a formula's operation; empty for any other operation."""
    scopes = "/".join(str(equation.source_info.name_stack) for equation in operation.equations)
    return read_fault(scopes)


def left_to_xla(program: TracedProgram, mesh: AnyMesh) -> Iterator[tuple[Operation, Fault]]:
    """Yield the operations with a fault and no replacement, except in fully manual regions."""
    for operation in program.walk():
        fault = fault_of(operation, mesh)
        if fault is None or replaced_fault(operation):
            continue
        with use_abstract_mesh(operation.equations[0].ctx.cur_abstract_mesh):
            if split_axes(mesh):
                yield operation, fault


def is_whole(operation: Operation, fault: Fault, mesh: AnyMesh) -> bool:
    """Return whether the dimensions of `Fault.whole` are known to be whole.

    Where the sharding of an operand is unknown, they are whole if `sequence` has size 1: no other
    axis splits them.
    """
    if fault.whole is None:
        return False
    for value, dims in fault.whole(operation):
        if value.dims is None and mesh.shape["sequence"] > 1:
            return False
        if value.dims is not None and any(value.dims[dim] for dim in dims):
            return False
    return True


def problem_of(operation: Operation, fault: Fault, mesh: AnyMesh, where: str, fix: str) -> Problem:
    """Return the problem of an operation with a fault of XLA.

    Args:
        where: The reason why no formula replaces the operation.
    """
    line = equation_line(operation.equations) or operation.primitive
    axes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in split_axes(mesh))
    shapes = " and ".join(str(value.shape) for value in operation.inputs)
    if fault.whole is not None:
        fix += (
            ", or split no other dimension of its operands than the examples: Rules(batch=…, "
            "activations=…)"
        )
    detail = f"on {axes}: docs/xla-faults.md, {fault.name}"
    return Problem(line, f"{operation.primitive} of {shapes} {where}", detail, fix)
