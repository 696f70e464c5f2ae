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
from spmd.model_interface.grad_transform import Carry
from spmd.model_interface.model import abstract_key
from spmd.plan.context import current, use_plan
from spmd.plan.fsdp import zero_gradients
from spmd.plan.manual import manual_axes
from spmd.plan.plan import ShardingPlan
from spmd.sharding.batch import BatchArray
from spmd.sharding.mesh import entry_axes, shards_of

_TITLE = "The batch cannot be split into microbatches:"
_EXAMPLES_FIRST = 'P(("data", "fsdp", "expert"))'
_EXAMPLES_LATER = 'P(None, ("data", "fsdp", "expert"))'
_PER_MICROBATCH = "spmd.accumulate(…, per_microbatch=True) for the loss of each microbatch"
_WHOLE = 'spmd.whole("why")'
_ADDING = (*ADDING, "dynamic_update_slice", "max", "min")
"""Operations that combine the result of an iteration with a carried value, in any order."""


def accumulate(
    grad_fn: GradFn, microbatches: int, *, per_microbatch: bool = False, examples: int = 0
) -> GradFn:
    """Accumulate the results of a gradient function over microbatches, one after the other.

    A `GradFn` returns sums, so padding does not change the result. Each microbatch passes its
    variables to the next. Examples are the first dimension of each array of a batch, unless the
    batch table of the rules says otherwise.

    Args:
        per_microbatch: Whether a loss that is no sum over the examples is meant to be one of each
            microbatch. If False, statistics that a model keeps among its variables and declared
            values such as balance losses are of a microbatch (`values_of_microbatches`), and any
            other such loss is an error. If True, `values` are those of the last microbatch.
        examples: Examples of a batch with so many microbatches; one with fewer examples has fewer,
            which are no larger. 0: each batch has as many.

    Raises:
        ConfigError: At trace time: arrays have different numbers of examples, none, or a number
            that does not divide; the model scans over the dimension of the examples; or the loss is
            no sum over the examples.
    """
    if not isinstance(microbatches, int) or microbatches < 1:
        problem = Problem("microbatches", f"is {microbatches}", fix="a whole number, at least 1")
        raise ConfigError("Gradients cannot be accumulated:", [problem])
    if microbatches == 1:
        return grad_fn

    def accumulated(
        params: Any, carry: Carry, batch: Any, key: jax.Array
    ) -> tuple[Any, Sums, Carry]:
        count = _microbatches_of(batch, microbatches, examples)
        if count == 1:
            return grad_fn(params, carry, batch, key)
        split, shared = split_microbatches(batch, count)
        keys = jax.random.split(key, count)

        def add(
            before: tuple[Any, Carry], part: tuple[Any, jax.Array]
        ) -> tuple[tuple[Any, Carry], Any]:
            total, carry = before
            arrays, key = part
            microbatch = join_microbatch(batch, arrays, shared)
            gradients, sums, carry = grad_fn(params, carry, microbatch, key)
            sums, values = _split_values(sums)
            total = jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, (gradients, sums))
            return (total, carry), values

        first = _join_first(batch, split, shared)
        gradients, sums = _trace_results(grad_fn, params, carry, first, keys[0])
        if isinstance(grad_fn, LossGradFn) and not per_microbatch:
            given = params, carry.variables, first, key
            grad_fn.loss.check_additive(_TITLE, *given, fix=_PER_MICROBATCH, statistics=False)
        added, _ = _split_values(sums)
        zeros = zero_gradients(gradients), jax.tree.map(jnp.zeros_like, added)
        ((gradients, sums), carry), values = jax.lax.scan(add, (zeros, carry), (split, keys))
        last_values = jax.tree.map(lambda x: x[-1], values)
        return gradients, sums | last_values, carry

    return with_loss_of(grad_fn, accumulated)


def _microbatches_of(batch: Any, microbatches: int, examples: int) -> int:
    """Return the microbatches of a batch: fewer of one with fewer examples than `examples`."""
    if not examples:
        return microbatches
    for path, split in current().batch.arrays(batch).items():
        if split.examples is not None:
            own = tree.flatten(batch)[path].shape[split.examples] * _parts_of_examples(split)
            return fewer_microbatches(own, microbatches, examples)
    return microbatches


def _parts_of_examples(split: BatchArray) -> int:
    """Return the parts of a batch's examples, of which a manual region has one."""
    assert split.examples is not None, "an array with examples"
    mesh = current().mesh
    if mesh is None:
        return 1
    manual = set(manual_axes())
    axes = entry_axes((*split.spec, None)[split.examples])
    return shards_of(tuple(axis for axis in axes if axis in manual), mesh.shape)


def fewer_microbatches(own: int, microbatches: int, examples: int) -> int:
    """Return the microbatches of `own` examples, no larger than those of a batch of `examples`.

    Example:
        >>> [fewer_microbatches(own, microbatches=4, examples=64) for own in (8, 16, 24, 64)]
        [1, 1, 2, 4]
    """
    return max(-(-own * microbatches // examples), 1)


def _trace_results(
    grad_fn: GradFn, params: Any, carry: Carry, microbatch: Any, key: jax.Array
) -> tuple[Any, Sums]:
    """Return the abstract gradients and sums of a microbatch.

    Raises:
        ConfigError: `grad_fn` is no gradient function, or the model scans over the examples.
    """
    trace = jax.make_jaxpr(grad_fn, return_shape=True)
    jaxpr, returned = trace(params, carry, microbatch, key)
    gradients, sums, _ = check_results(returned)
    before = len(jax.tree.leaves((params, carry)))
    _check_no_order(read_program(jaxpr), before, microbatch)
    return gradients, sums


def _split_values(sums: Sums) -> tuple[Sums, Sums]:
    """Split results into sums over microbatches and `values`.

    The second dictionary is empty without values.
    """
    added = dict(sums)
    others: Sums = {}
    if VALUES in added:
        others[VALUES] = added.pop(VALUES)
    return added, others


def values_of_microbatches(grad_fn: GradFn, plan: ShardingPlan, batch: Any) -> list[str]:
    """Return the names of values of a microbatch, not of the batch: declared ones, and statistics.

    Declared ones, such as a balance loss, are in `spmd.model_interface.model.Outputs`; statistics
    are among the variables.

    Args:
        batch: Arrays, or their shapes.
    """
    if not isinstance(grad_fn, LossGradFn):
        return []
    key = abstract_key()
    with use_plan(plan):
        structure = grad_fn.loss.read(plan.abstract_params, plan.abstract_variables, batch, key)
    return [*structure.declared, *structure.statistics()]


def split_microbatches(
    batch: Any, microbatches: int
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Split a batch: path → array `[microbatches, …]`, and path → array whole in all microbatches.

    Microbatch *i* has the examples *i*, *i* + `microbatches`, …, so each stays split over the
    devices of the batch.

    Example:
        >>> split_microbatches({"x": jnp.arange(6)}, 2)[0]["x"].tolist()
        [[0, 2, 4], [1, 3, 5]]
    """
    arrays = tree.flatten(batch)
    splits = current().batch.arrays(batch)
    dims = {path: array.examples for path, array in splits.items()}
    problems = _example_problems(arrays, dims, microbatches)
    if problems:
        raise ConfigError(_TITLE, problems)
    split = dict[str, jax.Array]()
    shared = dict[str, jax.Array]()
    for path, x in arrays.items():
        dim = dims[path]
        if dim is None:
            shared[path] = x
            continue
        examples = x.shape[dim] // microbatches
        before = x.shape[:dim]
        after = x.shape[dim + 1 :]
        parts = x.reshape(*before, examples, microbatches, *after)
        split[path] = jnp.moveaxis(parts, dim + 1, 0)  # [microbatches, *before, examples, *after]
    return split, shared


def first_microbatch(batch: Any, microbatches: int) -> Any:
    """Return the first of the microbatches of a batch."""
    split, shared = split_microbatches(batch, microbatches)
    return _join_first(batch, split, shared)


def _join_first(batch: Any, split: Mapping[str, jax.Array], shared: Mapping[str, jax.Array]) -> Any:
    """Return the first microbatch from the arrays of all."""
    first = {path: x[0] for path, x in split.items()}
    return join_microbatch(batch, first, shared)


def join_microbatch(
    batch: Any, part: Mapping[str, jax.Array], shared: Mapping[str, jax.Array]
) -> Any:
    """Return a microbatch, a tree like the batch, from its own arrays and the shared ones."""
    arrays = {**shared, **part}
    return tree.map_with_path(lambda path, _: arrays[path], batch)


def _example_problems(
    arrays: Mapping[str, jax.Array], dims: Mapping[str, int | None], microbatches: int
) -> list[Problem]:
    """Return the problems of the numbers of examples of the arrays of a batch."""
    sizes = dict[str, int]()
    problems = list[Problem]()
    for path, x in arrays.items():
        dim = dims[path]
        if dim is None:
            continue
        problem = _dimension_problem(path, x, dim, microbatches)
        if problem is not None:
            problems.append(problem)
        else:
            sizes[path] = x.shape[dim]
    if len(set(sizes.values())) > 1:
        problems.append(_unequal_sizes(arrays, sizes))
    if all(dim is None for dim in dims.values()):
        detail = f"each of {microbatches} microbatches would be the whole batch"
        fix = "microbatches=1"
        problems.append(Problem("batch", "has no array with examples", detail, fix))
    return problems


def _dimension_problem(path: str, x: jax.Array, dim: int, microbatches: int) -> Problem | None:
    """Return the problem of an array's dimension of examples, None if it can be split."""
    where = f"batch {path}".strip()
    if x.ndim <= dim:
        what = f"has no dimension {dim} for examples"
        if x.ndim == 0:
            what = "is a scalar, which has no examples"
        fix = f"Rules(batch=[{_row(path, _WHOLE)}])"
        return Problem(where, what, f"{x.shape}", fix)
    examples = x.shape[dim]
    if examples % microbatches:
        detail = f"{examples} / {microbatches} = {examples / microbatches:.4g}"
        return Problem(where, "does not divide into microbatches", detail, "change one of them")
    return None


def _unequal_sizes(arrays: Mapping[str, jax.Array], sizes: Mapping[str, int]) -> Problem:
    """Return the problem of arrays with different numbers of examples."""
    path = _undeclared(arrays, sizes)
    later = _row(path, _EXAMPLES_LATER)
    whole = _row(path, _WHOLE)
    return Problem(
        "batch",
        "has arrays with different numbers of examples, which would not be split alike",
        detail=", ".join(f"{name}: {size}" for name, size in sizes.items()),
        fix=f"Rules(batch=[{later}]) if they are another dimension, or {whole} if it has none",
    )


def _row(path: str, value: str) -> str:
    """Return a row of the batch table as Python source."""
    pattern = re.escape(path)
    if "\\" in pattern:
        return f'(r"{pattern}", {value})'
    return f'("{pattern}", {value})'


def _undeclared(arrays: Mapping[str, jax.Array], sizes: Mapping[str, int]) -> str:
    """Return the path of the array in the suggested fix.

    One of its later dimensions has the number of examples of another array; without such an array,
    the one with the most examples.
    """
    for path, size in sizes.items():
        others = {other for other in sizes.values() if other != size}
        if others & set(arrays[path].shape[1:]):
            return path
    return max(sizes, key=sizes.__getitem__)


def _ordered_dims(
    program: TracedProgram, *, in_loop: bool = False
) -> Iterator[tuple[Operation, TracedValue, int]]:
    """Yield operations over a dimension of an array in order, with the array and the dimension.

    These are loops whose iterations depend on earlier ones, and cumulative sums.

    Args:
        in_loop: Whether the program is the body of such a loop, where `x[t]` is a slice of size 1.
    """
    for operation in program.operations:
        is_ordered = not all(_adds_up(operation, *carried) for carried in operation.carried)
        for array, dim in _own_ordered_dims(operation, is_ordered=is_ordered, in_loop=in_loop):
            yield operation, array, dim
        for body in operation.bodies:
            yield from _ordered_dims(body, in_loop=in_loop or is_ordered)


def _own_ordered_dims(
    operation: Operation, *, is_ordered: bool, in_loop: bool
) -> Iterator[tuple[TracedValue, int]]:
    """Yield each array and dimension read in order by an operation itself, without its bodies.

    Args:
        is_ordered: Whether the iterations of the operation, a loop, depend on earlier ones.
        in_loop: Whether the operation is in the body of such a loop.
    """
    name = operation.primitive
    params = operation.params
    if name.startswith("cum"):
        yield operation.inputs[0], params["axis"]
    elif name == "dynamic_slice" and in_loop:
        array = operation.inputs[0]
        for dim, taken in enumerate(params["slice_sizes"]):
            if taken == 1 < array.shape[dim]:
                yield array, dim
    elif name == "scan" and is_ordered:
        scanned = params["num_consts"] + params["num_carry"]
        for array in operation.inputs[scanned:]:
            yield array, 0


def _adds_up(loop: Operation, old: TracedValue, new: TracedValue) -> bool:
    """Return whether a loop only adds to a carried value, or counts: its order does not matter."""
    if old is new or not old.is_float:
        return True
    return adding_operation(loop, old, new, _ADDING) is not None


def _check_no_order(program: TracedProgram, before: int, batch: Any) -> None:
    """Raise a `ConfigError` if the first dimension of an array is processed in order, as time is.

    Arrays with a row in the batch table are not checked, since the row declares the dimension of
    the examples.

    Args:
        program: The traced gradient function.
        before: The number of inputs before those of the batch.
        batch: The arrays of a microbatch.
    """
    axes = _mark_examples(program, before, batch)
    propagate(program)
    found = dict[str, str]()  # path → line
    for operation, value, dim in _ordered_dims(program):
        if not value.dims:
            continue
        for axis in value.dims[dim]:
            if axis in axes:
                found.setdefault(axes[axis], equation_line(operation.equations))
    if found:
        problems = [_order_problem(path, line) for path, line in found.items()]
        raise ConfigError(_TITLE, problems)


def _mark_examples(program: TracedProgram, before: int, batch: Any) -> dict[str, str]:
    """Mark the first dimension of each array as split over a mesh axis of its own; axis → path."""
    splits = current().batch.arrays(batch)
    axes = dict[str, str]()
    for number, (path, x) in enumerate(tree.flatten(batch).items(), before):
        if not splits[path].is_declared:
            axis = f"examples of {path}"
            axes[axis] = path
            others = ((),) * (x.ndim - 1)
            program.inputs[number].dims = ((axis,), *others)
    return axes


def _order_problem(path: str, line: str) -> Problem:
    """Return the problem of an array with a loop over its first dimension."""
    later = _row(path, _EXAMPLES_LATER)
    first = _row(path, _EXAMPLES_FIRST)
    return Problem(
        f"batch {path}".strip(),
        f"is gone through in order along its first dimension at {line}, which then is no "
        "dimension of examples",
        "a microbatch would be a part of the steps of each example",
        f"Rules(batch=[{later}]) for [time, batch, …]; or {first} if the loop only adds up what "
        "examples give",
    )
