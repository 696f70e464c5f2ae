"""Check that a loss is a sum over examples.

The loss of a batch is the sum of those of its parts only if no example influences the loss of
another. Accumulation, pipelines and an exchange once a step compute parts, so they need to know.
The answer is read from the loss, traced for two numbers of examples (`spmd.jaxpr.examples`);
nothing is computed.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import get_abstract_mesh

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.losses import (
    VALUES,
    DeclaresAdditive,
    DeclaresWeighted,
    LossFn,
    Sums,
    check_returned,
)
from spmd.jaxpr.example_labels import Kind, Label, Mix, all_sums
from spmd.jaxpr.example_rules import NUMBER, UNKNOWN
from spmd.jaxpr.examples import UnlikeProgramsError, input_label, label_examples
from spmd.jaxpr.source import equation_line
from spmd.jaxpr.traced_program import Operation, TracedProgram, read_program
from spmd.plan.context import current
from spmd.plan.fsdp import params_for_forward
from spmd.plan.manual import manual_axes
from spmd.plan.partition_safe import trace_call
from spmd.sharding.mesh import BATCH_AXES, shards_of

_DECLARE = "spmd.value_and_grad(loss_fn, additive=True) if it is a sum"
_SUMS = 'return {"loss": losses.sum(), "weight": weights.sum()}'
_EQUAL = 1e-6

_NEAR = 0.25
"""Largest |growth − 1| of a loss taken as a mean, from examples once to the same examples twice.

The growth differs from 1 by noise, and by values of a whole batch.
"""

_UNFIT = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that a loss written for one number of examples may raise."""


@dataclasses.dataclass(frozen=True)
class LossStructure:
    """Dependence of a loss function's results on the examples of a batch.

    Attributes:
        sums: Name of each sum → its label.
        variables: Path of each variable → the label of its next value.
        declared: Names of values of a microbatch that the loss declares, such as balance losses.
        order: Operations of the loss → their place in it.
        unknown: The reason if the structure is unknown; then all other fields are empty.
    """

    sums: Mapping[str, Label] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, Label] = dataclasses.field(default_factory=dict)
    declared: tuple[str, ...] = ()
    order: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    unknown: str = ""

    def statistics(self) -> list[str]:
        """Return the paths of statistics used by the loss, such as the means of batch norm."""
        sums = set[Operation]()
        for label in self.sums.values():
            for mix in label.mixes:
                if self._is_statistic(mix):
                    sums |= mix.sums
        return [path for path, label in self.variables.items() if label.sums & sums]

    def first_mix(self, label: Label, *, statistics: bool) -> Mix | None:
        """Return the first mix of examples before a value; None if there is none.

        Args:
            statistics: Whether to count statistics among the model's variables.
        """
        mixes = [mix for mix in label.mixes if statistics or not self._is_statistic(mix)]

        def place(mix: Mix) -> tuple[bool, int, str]:
            # an index of another example is made from their number, too
            is_minor = mix.what == NUMBER
            return is_minor, self.order.get(mix.operation, len(self.order)), mix.what

        return min(mixes, key=place, default=None)

    def _is_statistic(self, mix: Mix) -> bool:
        return bool(mix.sums) and mix.sums <= all_sums(self.variables.values())


class LossReader:
    """Reader of a loss function's structure, with one trace for each batch shape.

    Args:
        additive: Whether the loss is declared to be a sum over examples, and is not read.
    """

    def __init__(self, loss_fn: LossFn, *, additive: bool = False) -> None:
        self.loss_fn = loss_fn
        self.additive = additive or (isinstance(loss_fn, DeclaresAdditive) and loss_fn.additive)
        is_weighted = isinstance(loss_fn, DeclaresWeighted) and loss_fn.weighted
        self.weighted = self.additive or is_weighted
        self._read: dict[Any, LossStructure] = {}

    def read(self, params: Any, variables: Any, batch: Any, key: Any) -> LossStructure:
        """Return the structure of the loss for arguments of these shapes, arrays or abstract."""
        abstract = jax.tree.map(_abstract, (params, variables, batch, key))
        leaves, structure = jax.tree.flatten(abstract)
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        signature = structure, shapes, current(), get_abstract_mesh()
        if signature not in self._read:
            self._read[signature] = self._structure(*abstract)
        return self._read[signature]

    def has_values(self, params: Any, variables: Any, batch: Any, key: jax.Array) -> bool:
        """Return whether the loss returns `values`, reported without a division by the weight."""
        sums = self.read(params, variables, batch, key).sums
        return any(_is_value(name) for name in sums)

    def check_mean(self, params: Any, variables: Any, batch: Any, key: jax.Array) -> None:
        """Raise a `ConfigError` if the loss is a mean and the weight a count.

        The step divides the loss by the weight, so a mean would be divided twice.
        """
        if self.weighted:
            return
        sums = self.read(params, variables, batch, key).sums
        if not sums or sums["loss"].is_zero or sums["weight"].is_zero:
            return
        if _is(sums["loss"].degree, 0) and _is(sums["weight"].degree, 1):
            raise _mean_error("for a batch twice over: loss × 1, weight × 2")

    def check_numbers(self, params: Any, variables: Any, batch: Any, key: jax.Array) -> None:
        """Raise a `ConfigError` as `check_mean` does, from computed losses, for unknown structures.

        Half of a batch is evaluated alone and repeated twice, or all of it where a half does not
        divide over devices: two forward passes in one program, which is compiled. A loss of known
        structure costs nothing.

        Args:
            batch: Arrays of a real batch, in the plan in scope.
        """
        if self.weighted or self._says_degree(params, variables, batch, key):
            return
        dims, count = self._examples(batch)
        if count is None:
            return
        part = count
        if count % (2 * _shards()) == 0:
            part = count // 2

        def loss_and_weight(times: int, params: Any, variables: Any, batch: Any, key: Any) -> Any:
            repeated = _repeat_examples(batch, dims, part, times)
            given = params_for_forward(params)
            call = trace_call(self._sums_of(variables), given, variables, repeated, key)
            sums, _ = call.evaluate()
            return sums["loss"], sums["weight"]

        def once_and_twice(*arguments: Any) -> Any:
            return loss_and_weight(1, *arguments), loss_and_weight(2, *arguments)

        arguments = params, variables, batch, key
        try:
            traced = jax.jit(once_and_twice).trace(*arguments)
        except _UNFIT:  # a loss that is written for one number of examples
            return
        compiled = traced.lower().compile()
        once, twice = jax.device_get(compiled(*arguments))
        loss = _growth(once[0], twice[0])
        weight = _growth(once[1], twice[1])
        if abs(loss - 1) < _NEAR and abs(weight - 2) < _EQUAL:
            raise _mean_error(f"for examples twice over: loss × {loss:.3g}, weight × {weight:.3g}")

    def _says_degree(self, params: Any, variables: Any, batch: Any, key: jax.Array) -> bool:
        """Return whether the growth of loss and weight with the number of examples is known."""
        sums = self.read(params, variables, batch, key).sums
        if not sums:
            return False
        return _has_degree(sums["loss"]) and _has_degree(sums["weight"])

    def check_additive(
        self,
        title: str,
        params: Any,
        variables: Any,
        batch: Any,
        key: jax.Array,
        *,
        fix: str,
        statistics: bool = True,
    ) -> None:
        """Raise a `ConfigError` if a result of the loss is no sum over examples.

        Args:
            title: The title of the error.
            fix: The alternative in the error to declaring the loss a sum.
            statistics: Whether statistics that the model keeps among its variables are an error.
        """
        if self.additive:
            return
        structure = self.read(params, variables, batch, key)
        if structure.unknown:
            problem = Problem("loss_fn", structure.unknown, fix=f"{_DECLARE}; or {fix}")
            raise ConfigError(title, [problem])
        problems = list(_not_additive(structure, fix, statistics))
        if problems:
            raise ConfigError(title, problems)

    def _structure(self, params: Any, variables: Any, batch: Any, key: Any) -> LossStructure:
        """Trace the loss for two numbers of examples, and label its results."""
        dims, count = self._examples(batch)
        if count is None:
            counts = sorted(_counts(tree.flatten(batch), dims))
            found = ", ".join(map(str, counts)) or "none"
            what = f"has a batch whose examples are not known: their numbers are {found}"
            return LossStructure(unknown=what)
        sizes = (count, 2 * count)
        if count <= 1:
            sizes = (2, 4)

        sums_of = self._sums_of(variables)

        def traced(params: Any, variables: Any, batch: Any, key: jax.Array) -> Any:
            return sums_of(params_for_forward(params), variables, batch, key)

        trace = jax.make_jaxpr(traced, return_shape=True)
        programs = list[TracedProgram]()
        for size in sizes:
            resized = _resize(batch, dims, size)
            try:
                jaxpr, outputs = trace(params, variables, resized, key)
            except _UNFIT as error:
                if size == count:
                    raise
                said = str(error).partition("\n")[0]
                what = f"cannot be traced for {size} examples, and it can for {count}: {said}"
                return LossStructure(unknown=what)
            programs.append(read_program(jaxpr))
        first, second = programs
        before = len(jax.tree.leaves((params, variables)))
        inputs = [input_label(None)] * before
        inputs += [input_label(dims[path]) for path in tree.flatten(batch)]
        inputs += [input_label(None)] * (len(first.inputs) - len(inputs))
        return _label_results((first, second), inputs, sizes, list(tree.flatten(outputs)))

    def _sums_of(self, own: Any) -> LossFn:
        """Return the loss function with its results checked."""

        def checked(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Sums, Any]:
            return check_returned(self.loss_fn(params, variables, batch, key), own)

        return checked

    @staticmethod
    def _examples(batch: Any) -> tuple[dict[str, int | None], int | None]:
        """Return path → dimension of examples, and their number; None if arrays have several.

        The number is also None if no array has examples.
        """
        splits = current().batch.arrays(batch)
        arrays = tree.flatten(batch)
        dims = dict[str, int | None]()
        for path, x in arrays.items():
            dim = splits[path].examples
            if dim is not None and dim >= len(x.shape):
                dim = None
            dims[path] = dim
        counts = _counts(arrays, dims)
        if len(counts) != 1:
            return dims, None
        return dims, counts.pop()


def _counts(arrays: Mapping[str, Any], dims: Mapping[str, int | None]) -> set[int]:
    """Return the different numbers of examples of some arrays."""
    return {arrays[path].shape[dim] for path, dim in dims.items() if dim is not None}


def _repeat_examples(batch: Any, dims: Mapping[str, int | None], count: int, times: int) -> Any:
    """Return the first `count` examples of a batch, repeated `times` times."""

    def repeat(path: str, x: Any) -> Any:
        dim = dims[path]
        if dim is None:
            return x
        first = jax.lax.slice_in_dim(x, 0, count, axis=dim)
        return jax.numpy.concatenate([first] * times, axis=dim)

    return tree.map_with_path(repeat, batch)


def _growth(before: Any, after: Any) -> float:
    """Return the factor between two numbers, NaN from zero."""
    if not before:
        return math.nan
    return float(after) / float(before)


def _label_results(
    programs: tuple[TracedProgram, TracedProgram],
    inputs: Sequence[Label],
    sizes: tuple[int, int],
    paths: Sequence[str],
) -> LossStructure:
    """Label the results of a loss.

    Args:
        programs: The loss for two numbers of examples, `sizes`.
        paths: Paths of the results: sums below `0`, variables below `1`.
    """
    try:
        labels = label_examples(programs, inputs, sizes, _split_axes())
    except UnlikeProgramsError as error:
        what = f"has other operations for {sizes[1]} examples than for {sizes[0]}: {error}"
        return LossStructure(unknown=what)
    sums = dict[str, Label]()
    variables = dict[str, Label]()
    for path, label in zip(paths, labels.results, strict=True):
        if path.startswith("0/"):
            sums[path.removeprefix("0/")] = label
        elif path.startswith("1/"):
            variables[path.removeprefix("1/")] = label
    order = {operation: place for place, operation in enumerate(programs[0].walk())}
    return LossStructure(sums, variables, tuple(labels.declared), order)


def _has_degree(label: Label) -> bool:
    """Return whether the growth of a sum with the number of examples is known."""
    return label.is_zero or label.degree is not None


def _is_value(name: str) -> bool:
    """Return whether a result is one of `values`, not a sum."""
    return name.startswith(f"{VALUES}/")


def _shards() -> int:
    """Return the number of shards of a batch's examples on the mesh in scope."""
    mesh = current().mesh
    if mesh is None:
        return 1
    return shards_of(BATCH_AXES, mesh.shape)


def _mean_error(detail: str) -> ConfigError:
    what = "is a mean over the examples, and the weight is their number"
    detail = f"{detail}; the step divides the loss by the weight"
    fix = f'{_SUMS}; or the mean with "weight": jnp.float32(1)'
    return ConfigError(
        "Loss is divided by its weight twice:", [Problem("sum 'loss'", what, detail, fix)]
    )


def has_part_of_batch() -> bool:
    """Return whether the code being traced sees the examples of one device only."""
    return bool(_split_axes())


def _split_axes() -> frozenset[str]:
    """Return the manual batch axes of size above 1 in the region being traced."""
    return frozenset(manual_axes()).intersection(BATCH_AXES)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    own = x.dtype if hasattr(x, "dtype") else jax.dtypes.result_type(x)
    # Host arrays of 64 bits enter a program in 32, and newer releases of JAX warn of shapes that
    # say otherwise.
    dtype = jax.dtypes.canonicalize_dtype(own, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(jax.numpy.shape(x), dtype)


def _resize(batch: Any, dims: Mapping[str, int | None], size: int) -> Any:
    """Return an abstract batch with `size` examples."""

    def resize(path: str, x: Any) -> Any:
        dim = dims[path]
        if dim is None:
            return x
        shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return tree.map_with_path(resize, batch)


def _is(degree: float | None, power: int) -> bool:
    return degree is not None and abs(degree - power) < _EQUAL


def _not_additive(structure: LossStructure, fix: str, statistics: bool) -> Iterator[Problem]:
    """Yield a problem for each result of a loss other than a sum over examples."""
    for name, label in structure.sums.items():
        if _is_value(name):
            yield Problem(
                name.removeprefix(f"{VALUES}/"),
                "is reported as it is, and a part of a batch has its own",
                fix=f"a sum in its place; or {fix}",
            )
            continue
        if label.is_zero:
            continue
        where = f"sum {name!r}"
        mix = structure.first_mix(label, statistics=statistics)
        if mix is not None:
            yield _mix_problem(where, mix, fix)
            continue
        problem = _growth_problem(where, label)
        if problem is not None:
            yield problem


def _mix_problem(where: str, mix: Mix, fix: str) -> Problem:
    """Return the problem of a sum with an operation across examples."""
    place = f"`{mix.operation.primitive}`"
    line = equation_line(mix.operation.equations)
    if line:
        place = f"{place} at {line}"
    declare = _DECLARE
    if mix.what == UNKNOWN:
        declare = "spmd.per_example(function) around it"
    what = f"is no sum over the examples: {place} {mix.what}"
    return Problem(where, what, fix=f"{declare}; or {fix}")


def _growth_problem(where: str, label: Label) -> Problem | None:
    """Return the problem of a sum not proportional to the number of examples; None without one."""
    counted_again = "each part of a batch would count it again"
    is_count = label.value is not None and _is(label.degree, 1)
    if label.value is not None and not is_count:
        what = f"is {label.value[0]:g} for any number of examples"
        return Problem(where, what, counted_again, _SUMS)
    if label.kind is Kind.SHARED and not is_count and not label.mixes:
        return Problem(where, "depends on no example", counted_again, "multiply it by the weight")
    if _is(label.degree, 0) and not label.mixes:
        detail = "a mean of means is not that of the whole"
        return Problem(where, "is a mean over the examples", detail, _SUMS)
    if not _is(label.degree, 1):
        return Problem(where, "does not grow as the number of examples does", fix=_SUMS)
    return None
