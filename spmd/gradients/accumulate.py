"""Gradient accumulation over microbatches, equal to the gradients of the whole batch."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.base import GradFn, LossGradFn, check_results, with_loss_of
from spmd.gradients.losses import VALUES, Sums
from spmd.jaxpr.examples import ADDING, adding_operation
from spmd.jaxpr.propagation import propagate
from spmd.jaxpr.source import equation_line
from spmd.jaxpr.traced_program import Operation, TracedProgram, TracedValue, read_program
from spmd.model_api.grad_transform import Carry
from spmd.model_api.model import abstract_key
from spmd.plan.context import current, use_plan
from spmd.plan.fsdp import zero_gradients
from spmd.plan.plan import ShardingPlan
from spmd.sharding.batch import BatchTable

_TITLE = "The batch cannot be split into microbatches:"
_EXAMPLES_FIRST = 'P(("data", "fsdp", "expert"))'
_PER_MICROBATCH = "spmd.accumulate(…, per_microbatch=True) for the loss of each microbatch"
_WHOLE = 'spmd.whole("why")'
_ADDING = (*ADDING, "dynamic_update_slice", "max", "min")
"""Operations that join what an iteration gives to what a loop carries, in any order."""

_EXAMPLES_LATER = 'P(None, ("data", "fsdp", "expert"))'


def accumulate(grad_fn: GradFn, microbatches: int, *, per_microbatch: bool = False) -> GradFn:
    """Return a gradient function that adds up the results of `grad_fn` on microbatches, one after the other.

    A `GradFn` returns sums, so padding does not change the result. Each microbatch passes its variables to the next.
    Examples are the first dimension of each array of a batch, unless the batch table of the rules says otherwise.

    Args:
        per_microbatch: Whether a loss that is no sum over the examples is meant to be one of each microbatch. Without
            it, statistics that a model keeps among its variables and declared values such as balance losses are of a
            microbatch (`values_of_microbatches`), and any other such loss is an error. With it, `values` are those of
            the last microbatch.

    Raises:
        ConfigError: At trace time: arrays have different numbers of examples, none, or a number that does not divide;
            the model scans over what should be examples; or the loss is no sum over the examples.
    """
    if not isinstance(microbatches, int) or microbatches < 1:
        problem = Problem("microbatches", f"is {microbatches}", fix="a whole number, at least 1")
        raise ConfigError("Gradients cannot be accumulated:", [problem])
    if microbatches == 1:
        return grad_fn

    def accumulated(params: Any, carry: Carry, batch: Any, key: jax.Array) -> tuple[Any, Sums, Carry]:
        split, shared = split_microbatches(batch, microbatches)
        keys = jax.random.split(key, microbatches)

        def add(before: tuple[Any, Carry], part: tuple[Any, jax.Array]) -> tuple[tuple[Any, Carry], Any]:
            total, carry = before
            arrays, key = part
            gradients, sums, carry = grad_fn(params, carry, join_microbatch(batch, arrays, shared), key)
            sums, values = _without_values(sums)
            total = jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, (gradients, sums))
            return (total, carry), values

        first = join_microbatch(batch, {path: x[0] for path, x in split.items()}, shared)
        jaxpr, returned = jax.make_jaxpr(grad_fn, return_shape=True)(params, carry, first, keys[0])
        gradients, sums, _ = check_results(returned)
        _check_no_order(read_program(jaxpr), len(jax.tree.leaves((params, carry))), first)
        if isinstance(grad_fn, LossGradFn) and not per_microbatch:
            given = params, carry.variables, first, key
            grad_fn.loss.check_additive(_TITLE, *given, fix=_PER_MICROBATCH, statistics=False)
        zeros = zero_gradients(gradients), jax.tree.map(jnp.zeros_like, _without_values(sums)[0])
        ((gradients, sums), carry), values = jax.lax.scan(add, (zeros, carry), (split, keys))
        return gradients, sums | jax.tree.map(lambda x: x[-1], values), carry

    return with_loss_of(grad_fn, accumulated)


def _without_values(sums: Sums) -> tuple[Sums, Sums]:
    """Split sums into those that add up, and values that do not, under their key if there are any."""
    others = {name: value for name, value in sums.items() if name == VALUES}
    return {name: value for name, value in sums.items() if name != VALUES}, others


def values_of_microbatches(grad_fn: GradFn, plan: ShardingPlan, batch: Any) -> list[str]:
    """Return the names of what is of a microbatch and not of the batch: declared values, and batch statistics.

    A balance loss is declared in `spmd.model_api.model.Outputs`; statistics are found among the variables.

    Args:
        batch: Arrays, or their shapes.
    """
    if not isinstance(grad_fn, LossGradFn):
        return []
    key = abstract_key()
    with use_plan(plan):
        structure = grad_fn.loss.read(plan.abstract_params, plan.abstract_variables, batch, key)
    return [*structure.declared, *structure.statistics()]


def split_microbatches(batch: Any, microbatches: int) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Split the arrays of a batch: path → `[microbatches, …]`, and path → array that every microbatch has whole.

    Microbatch *i* has the examples *i*, *i* + `microbatches`, …, so each stays split over the devices of the batch.

    Example:
        >>> split_microbatches({"x": jnp.arange(6)}, 2)[0]["x"].tolist()
        [[0, 2, 4], [1, 3, 5]]
    """
    table, arrays = current().batch, tree.flatten(batch)
    dims = {path: table.examples(path) for path in arrays}
    if problems := _example_problems(arrays, dims, microbatches):
        raise ConfigError(_TITLE, problems)
    split, shared = dict[str, jax.Array](), dict[str, jax.Array]()
    for path, x in arrays.items():
        dim = dims[path]
        if dim is None:
            shared[path] = x
            continue
        examples = x.shape[dim] // microbatches
        parts = x.reshape(*x.shape[:dim], examples, microbatches, *x.shape[dim + 1 :])
        split[path] = jnp.moveaxis(parts, dim + 1, 0)
    return split, shared


def first_microbatch(batch: Any, microbatches: int) -> Any:
    """Return the first of the microbatches of a batch."""
    split, shared = split_microbatches(batch, microbatches)
    return join_microbatch(batch, {path: x[0] for path, x in split.items()}, shared)


def join_microbatch(batch: Any, part: Mapping[str, jax.Array], shared: Mapping[str, jax.Array]) -> Any:
    """Return a microbatch, a tree like the batch, from its own arrays and those of all microbatches."""
    arrays = {**shared, **part}
    return tree.map_with_path(lambda path, _: arrays[path], batch)


def _example_problems(
    arrays: Mapping[str, jax.Array], dims: Mapping[str, int | None], microbatches: int
) -> list[Problem]:
    """Return what is wrong with the numbers of examples of the arrays of a batch."""
    sizes, problems = dict[str, int](), list[Problem]()
    for path, x in arrays.items():
        dim, where = dims[path], f"batch {path}".strip()
        if dim is None:
            continue
        if x.ndim <= dim:
            what = "is a scalar, which has no examples" if not x.ndim else f"has no dimension {dim} for examples"
            problems.append(Problem(where, what, f"{x.shape}", f"Rules(batch=[{_row(path, _WHOLE)}])"))
        elif x.shape[dim] % microbatches:
            detail = f"{x.shape[dim]} / {microbatches} = {x.shape[dim] / microbatches:.4g}"
            problems.append(Problem(where, "does not divide into microbatches", detail, "change one of them"))
        else:
            sizes[path] = x.shape[dim]
    if len(set(sizes.values())) > 1:
        detail = ", ".join(f"{path}: {size}" for path, size in sizes.items())
        what = "has arrays with different numbers of examples, which would not be split alike"
        path = _undeclared(arrays, sizes)
        later, none = _row(path, _EXAMPLES_LATER), _row(path, _WHOLE)
        fix = f"Rules(batch=[{later}]) if they are another dimension, or {none} if it has none"
        problems.append(Problem("batch", what, detail, fix))
    if all(dim is None for dim in dims.values()):
        detail = f"each of {microbatches} microbatches would be the whole batch"
        problems.append(Problem("batch", "has no array with examples", detail, "microbatches=1"))
    return problems


def _row(path: str, value: str) -> str:
    """Return a row of the batch table as it is written."""
    pattern = re.escape(path)
    if "\\" in pattern:
        return f'(r"{pattern}", {value})'
    return f'("{pattern}", {value})'


def _undeclared(arrays: Mapping[str, jax.Array], sizes: Mapping[str, int]) -> str:
    """Return the array that a fix names: one that has the examples of another in a later dimension, or the longest."""
    for path, size in sizes.items():
        others = {other for other in sizes.values() if other != size}
        if others & set(arrays[path].shape[1:]):
            return path
    return max(sizes, key=sizes.__getitem__)


def _ordered_dims(program: TracedProgram, *, in_loop: bool = False) -> Iterator[tuple[Operation, TracedValue, int]]:
    """Yield operations that go through a dimension of an array in order, with the array and the dimension.

    These are loops whose iterations depend on those before them, and cumulative sums. `in_loop` tells whether the
    program is the body of such a loop, where `x[t]` is a slice of size 1.
    """
    for operation in program.operations:
        name, params = operation.primitive, operation.params
        depends = not all(_adds_up(operation, *carried) for carried in operation.carried)
        if name.startswith("cum"):
            yield operation, operation.inputs[0], params["axis"]
        elif name == "dynamic_slice" and in_loop:
            array = operation.inputs[0]
            for dim, taken in enumerate(params["slice_sizes"]):
                if taken == 1 < array.shape[dim]:
                    yield operation, array, dim
        elif name == "scan" and depends:
            for array in operation.inputs[params["num_consts"] + params["num_carry"] :]:
                yield operation, array, 0
        for body in operation.bodies:
            yield from _ordered_dims(body, in_loop=in_loop or depends)


def _adds_up(loop: Operation, old: TracedValue, new: TracedValue) -> bool:
    """Return whether a loop only adds to a value that it carries, or counts, so that the order makes no difference."""
    return old is new or not old.is_float or adding_operation(loop, old, new, _ADDING) is not None


def _check_no_order(program: TracedProgram, before: int, batch: Any) -> None:
    """Raise a `ConfigError` if the model goes through the dimension of examples in order, so that it is time.

    Arrays with a row in the batch table are not checked: their author has said which dimension is the examples.

    Args:
        program: The traced gradient function.
        before: The number of inputs before those of the batch.
        batch: The arrays of a microbatch.
    """
    table: BatchTable = current().batch
    axes = dict[str, str]()
    for number, (path, x) in enumerate(tree.flatten(batch).items(), before):
        if table.value(path) is None:
            axis = f"examples of {path}"  # as if an axis of the mesh split the examples of each array
            axes[axis] = path
            program.inputs[number].dims = ((axis,), *((),) * (x.ndim - 1))
    propagate(program)
    found = dict[str, str]()
    for operation, value, dim in _ordered_dims(program):
        for axis in value.dims[dim] if value.dims else ():
            if axis in axes:
                found.setdefault(axes[axis], equation_line(operation.equations))
    problems = [
        Problem(
            f"batch {path}".strip(),
            f"is gone through in order along its first dimension at {line}, which then is no dimension of examples",
            "a microbatch would be a part of the steps of each example",
            f"Rules(batch=[{_row(path, _EXAMPLES_LATER)}]) for [time, batch, …]; or "
            f"{_row(path, _EXAMPLES_FIRST)} if the loop only adds up what examples give",
        )
        for path, line in found.items()
    ]
    if problems:
        raise ConfigError(_TITLE, problems)
