"""Functions of parameters, evaluated so that XLA's partitioner computes them right.

Every loss is evaluated through this module. The function is traced once. Every parameter and
variable with a use that is not proven right (`spmd.plan.input_uses`) is gathered before, and every
operation that XLA computes wrongly is replaced (`spmd.plan.xla_faults`). The result is the same
function of the same arrays.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec as P
from jax.sharding import use_abstract_mesh

from spmd import tree
from spmd.errors import AnnotationError, Problem
from spmd.jaxpr.equations import has_own_rules, is_hijax, replace_equations
from spmd.jaxpr.promoted import multiply_narrow, used_dtype
from spmd.jaxpr.propagation import propagate
from spmd.jaxpr.traced_program import Operation, TracedProgram, TracedValue, read_program
from spmd.jaxpr.upgrades import IS_FIRST_FORM
from spmd.model_interface.wrapped_param import is_wrapped
from spmd.plan.context import current
from spmd.plan.fsdp import gathered
from spmd.plan.input_uses import unproven_uses
from spmd.plan.manual import is_partly_manual, split_axes
from spmd.plan.records import ParamPlacement
from spmd.plan.scopes import comm_scope, fault_scope, param_scope
from spmd.plan.xla_faults import Fault, fault_of, is_whole, left_to_xla, problem_of
from spmd.sharding.batch import BatchArray
from spmd.sharding.dims import extra_axes, spec_dims
from spmd.sharding.mesh import TOKEN_AXES, AnyMesh, spec_axes
from spmd.sharding.optimizer_state import drop_axis

_WRONG = "XLA would compute these operations of the model wrongly:"
_IN_CUSTOM = "is in the code of a custom derivative, which cannot be replaced"
_OUTSIDE = "compute it outside of jax.custom_vjp and jax.custom_jvp"
_IN_CHECKPOINT = (
    "is in a jax.checkpoint under jax_remat3, in which JAX 0.10 evaluates no call of "
    "another formula"
)
_FLAG_OFF = "turn jax_remat3 off, or use JAX 0.12"
_NOT_SEEN = (
    "is in the rules of a custom derivative, or in a gradient function that "
    "differentiates by itself"
)


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """A call of a function of `(params, variables, batch, *others)`, traced once.

    Attributes:
        jaxpr: The function of the leaves of the arguments.
        outputs: The results, as abstract arrays.
    """

    jaxpr: ClosedJaxpr
    outputs: Any
    params: Any
    variables: Any
    batch: Any
    others: tuple[Any, ...]

    def evaluate(self) -> Any:
        """Return the results, right on any mesh.

        Outside of a plan, on one device, and where every axis of the mesh is manual, the function
        is evaluated unchanged, but for the compute dtype of products.

        Raises:
            AnnotationError: An operation would be wrong and cannot be replaced, with its source
                line.
        """
        mesh = current().mesh
        jaxpr = self._in_compute_dtype()
        leaves = jax.tree.leaves((self.params, self.variables, self.batch, self.others))
        if mesh is not None and split_axes(mesh):
            placements = _placements(self.params, self.variables, mesh)
            splits = self._splits_of_batch()
            placements.update(_whole_placements(splits, mesh))
            specs = {number: split.spec for number, split in splits.items()}
            program = _read(jaxpr, placements, specs, mesh)
            self._gather_unproven(leaves, program, placements)
            jaxpr = _without_faults(jaxpr, program, mesh)
        results = jaxpr_as_fun(jaxpr)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(self.outputs), results)

    def _gather_unproven(
        self,
        leaves: list[Any],
        program: TracedProgram,
        placements: Mapping[int, ParamPlacement],
    ) -> None:
        """Gather the inputs with an unproven use, in place."""
        axes = {}
        for number, placed in placements.items():
            axes[number] = _gathered_axes(placed)
        uses = unproven_uses(program, axes, self._first_of_batch)
        for number, is_result_used in uses.items():
            # The derivative of an element-wise function of the input, such as a normalised kernel,
            # combines a gradient with the input. XLA would split the function's result as that
            # gradient is, and compute products of the result wrongly.
            placed = placements[number]
            leaf = leaves[number]
            sum_first = is_result_used or not _is_summed_right(placed, leaf.ndim)
            dtype = used_dtype(program, number)
            leaves[number] = gathered(leaf, placed, dtype=dtype, sum_first=sum_first)

    def _in_compute_dtype(self) -> ClosedJaxpr:
        """Return the function with products of parameters in the compute dtype.

        The other operand may be wider. Parameters enter a model in the compute dtype
        (`spmd.model_interface.compute_dtype`).
        """
        precision = current().precision
        if precision is None:
            return self.jaxpr
        if precision.compute_dtype.itemsize >= jnp.dtype(jnp.float32).itemsize:
            return self.jaxpr
        count = len(jax.tree.leaves(self.params))
        return multiply_narrow(self.jaxpr, count, precision.compute_dtype)

    def _splits_of_batch(self) -> dict[int, BatchArray]:
        """Return the number of each input of the batch → its split."""
        splits = current().batch.arrays(self.batch)
        return dict(enumerate(splits.values(), self._first_of_batch))

    @property
    def _first_of_batch(self) -> int:
        """The number of the first input after parameters and variables."""
        return len(jax.tree.leaves((self.params, self.variables)))


def trace_call(
    function: Callable[..., Any], params: Any, variables: Any, batch: Any, *others: Any
) -> TracedCall:
    """Trace a call of a function of `(params, variables, batch, *others)`.

    The batch may be empty.
    """
    jaxpr, outputs = jax.make_jaxpr(function, return_shape=True)(params, variables, batch, *others)
    return TracedCall(jaxpr, outputs, params, variables, batch, others)


def partition_safe(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function of `(params, variables, batch, *others)`, right on any mesh.

    See `TracedCall.evaluate`.
    """

    def safe(params: Any, variables: Any, batch: Any, *others: Any) -> Any:
        return trace_call(function, params, variables, batch, *others).evaluate()

    return safe


def _is_summed_right(placement: ParamPlacement, ndim: int) -> bool:
    """Return whether XLA may choose how to sum a gradient into its sharding.

    XLA's sum is right, and one reduce-scatter, if one dimension is scattered, over all axes of that
    dimension in the order of the mesh; if each other dimension has one axis at most; and if one
    axis at most splits anything but the batch, and none in a region that is manual over some axes:
    there XLA aborts for the gradient of a lookup, and permutes that of a product. Otherwise the
    gradient is summed first: XLA computes other products wrongly (docs/xla-faults.md, Products).
    """
    split = split_axes(placement.mesh)
    others = [axis for axis in split if axis not in TOKEN_AXES]
    if len(others) > 1:
        return False
    if others and is_partly_manual():
        return False
    kept = spec_dims(placement.grad_spec, ndim, split)
    used = spec_dims(placement.compute_spec, ndim, split)
    scattered = [dim for dim, axes in enumerate(extra_axes(kept, used)) if axes]
    if len(scattered) > 1:
        return False
    for dim, axes in enumerate(kept):
        if dim in scattered:
            in_order = tuple(axis for axis in split if axis in axes)
            if used[dim] or axes != in_order:
                return False
        elif len(axes) > 1:
            return False
    return True


def _placements(params: Any, variables: Any, mesh: AnyMesh) -> dict[int, ParamPlacement]:
    """Return the number of each placed input → its placement, its `compute_spec` gathered.

    If a parameter is a wrapper of several arrays, its first array is the parameter.
    """
    found = dict[int, ParamPlacement]()
    number = 0
    for arrays, is_variable in ((params, False), (variables, True)):
        for path, node in tree.flatten(arrays, is_leaf=is_wrapped).items():
            placed = _placement(path, mesh, is_variable=is_variable)
            if placed is not None:
                found[number] = placed
            number += len(jax.tree.leaves(node))
    return found


def _whole_placements(splits: Mapping[int, BatchArray], mesh: AnyMesh) -> dict[int, ParamPlacement]:
    """Return the number of each whole array of the batch with a split → its placement.

    Parameters of another plan are gathered for their uses as variables of this one are.
    """
    scope = comm_scope("whole arrays of the batch")
    found = dict[int, ParamPlacement]()
    for number, split in splits.items():
        if split.compute_spec != split.spec:
            spec = split.spec
            found[number] = ParamPlacement(mesh, spec, split.compute_spec, spec, scope=scope)
    return found


def _placement(path: str, mesh: AnyMesh, *, is_variable: bool) -> ParamPlacement | None:
    """Return the placement of a parameter or a variable; None if the plan has none."""
    context = current()
    if path in context.placements:
        placed = context.placements[path].of_stack()
        return dataclasses.replace(placed, compute_spec=_used_spec(placed.param_spec))
    if is_variable and path in context.variables:
        spec = context.variables[path]
        return ParamPlacement(mesh, spec, _used_spec(spec), spec, scope=param_scope(path))
    return None


def _used_spec(spec: P) -> P:
    for axis in TOKEN_AXES:
        spec = drop_axis(spec, axis)
    return spec


def _gathered_axes(placement: ParamPlacement) -> frozenset[str]:
    """Return the axes of the gather of a parameter."""
    split = split_axes(placement.mesh)
    axes = set(spec_axes(placement.param_spec))
    return frozenset(axes.intersection(TOKEN_AXES, split))


def _read(
    jaxpr: ClosedJaxpr,
    placements: Mapping[int, ParamPlacement],
    batch: Mapping[int, P],
    mesh: AnyMesh,
) -> TracedProgram:
    """Return the program with the shardings of its values, as far as its inputs determine them."""
    program = read_program(jaxpr)
    for number, placed in placements.items():
        _set_dims(program.inputs[number], placed.param_spec, mesh)
    for number, spec in batch.items():
        _set_dims(program.inputs[number], spec, mesh)
    propagate(program)
    return program


def _set_dims(value: TracedValue, spec: P, mesh: AnyMesh) -> None:
    value.dims = tuple(spec_dims(spec, len(value.shape), split_axes(mesh)))


def _without_faults(jaxpr: ClosedJaxpr, program: TracedProgram, mesh: AnyMesh) -> ClosedJaxpr:
    """Replace the operations with a fault of XLA.

    Raises:
        AnnotationError: All of them that cannot be replaced.
    """
    replacements = dict[int, ClosedJaxpr]()
    problems = list[Problem]()
    for operation, fault in _faulty_operations(program, mesh):
        equation, *around = operation.equations
        with use_abstract_mesh(equation.ctx.cur_abstract_mesh):
            if not split_axes(mesh):
                continue
            if any(map(has_own_rules, around)):
                if not is_whole(operation, fault, mesh):
                    problems.append(problem_of(operation, fault, mesh, _IN_CUSTOM, _OUTSIDE))
                continue
            if IS_FIRST_FORM and any(map(is_hijax, around)):
                problems.append(problem_of(operation, fault, mesh, _IN_CHECKPOINT, _FLAG_OFF))
                continue
            replacements[id(equation)] = _trace_formula(operation, fault, mesh)
    if problems:
        raise AnnotationError(_WRONG, problems)
    return replace_equations(jaxpr, replacements)


def _faulty_operations(program: TracedProgram, mesh: AnyMesh) -> list[tuple[Operation, Fault]]:
    faulty = []
    for operation in program.walk():
        fault = fault_of(operation, mesh)
        if fault:
            faulty.append((operation, fault))
    return faulty


def _trace_formula(operation: Operation, fault: Fault, mesh: AnyMesh) -> ClosedJaxpr:
    """Trace the formula in place of an operation."""
    arrays = []
    for atom in operation.equations[0].invars:
        arrays.append(jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype))
    formula = jax.named_call(fault.formula(operation, mesh), name=fault_scope(fault.name))
    return jax.make_jaxpr(formula)(*arrays)


def check_replaced(jaxpr: ClosedJaxpr, specs: Sequence[P], mesh: AnyMesh) -> None:
    """Raise an error with all operations of a step with a fault of XLA and no replacement.

    `TracedCall.evaluate` replaces operations of the loss. It sees neither the rules of custom
    derivatives nor computations of a gradient function around the loss.

    Args:
        specs: The specs of the arguments of the step, one for each input of `jaxpr`.
    """
    program = read_program(jaxpr)
    if not split_axes(mesh) or not list(left_to_xla(program, mesh)):
        return
    for value, spec in zip(program.inputs, specs, strict=True):
        _set_dims(value, spec, mesh)
    propagate(program)
    fix = f"{_OUTSIDE}, and differentiate by spmd.value_and_grad"
    # One for each line: forward and backward operations have the same line.
    problems = dict[tuple[str, str], Problem]()
    for operation, fault in left_to_xla(program, mesh):
        if not is_whole(operation, fault, mesh):
            problem = problem_of(operation, fault, mesh, _NOT_SEEN, fix)
            problems.setdefault((problem.where, fault.name), problem)
    if problems:
        raise AnnotationError(_WRONG, problems.values())
