"""Losses that are sums over examples, and those that are not.

The loss of a batch is the sum of those of its parts only if no example has an influence on another's. Accumulation,
pipelines and an exchange once a step compute parts, so they ask. The answer is read from the loss, traced for two
numbers of examples (`spmd.jaxpr.examples`); nothing is computed.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import get_abstract_mesh

from spmd import tree
from spmd.errors import ConfigError, Problem
from spmd.gradients.losses import VALUES, LossFn, Sums, check_returned
from spmd.jaxpr.example_labels import Kind, Label, Mix, all_sums
from spmd.jaxpr.example_rules import NUMBER, UNKNOWN
from spmd.jaxpr.examples import UnlikeProgramsError, input_label, label_examples
from spmd.jaxpr.source import equation_line
from spmd.jaxpr.traced_program import TracedProgram, read_program
from spmd.plan.context import current
from spmd.plan.fsdp import params_for_forward
from spmd.plan.partition_safe import trace_call
from spmd.sharding.mesh import BATCH_AXES

_DECLARE = "spmd.value_and_grad(loss_fn, additive=True) if it is a sum"
_SUMS = 'return {"loss": losses.sum(), "weight": weights.sum()}'
_EQUAL = 1e-6

_NEAR = 0.25
"""How far the mean of examples twice over may be from their mean, by noise and by what is of a whole batch."""

_UNFIT = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
"""What a loss may raise that is written for one number of examples."""


@dataclasses.dataclass(frozen=True)
class LossStructure:
    """Dependence of a loss function's results on the examples of a batch.

    Attributes:
        sums: Name of each sum → its label.
        variables: Path of each variable → the label of its next value.
        declared: Names of values of a microbatch that the loss declares, such as balance losses.
        order: Operations of the loss → their place in it.
        unknown: The reason why nothing is known; then all others are empty.
    """

    sums: Mapping[str, Label] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, Label] = dataclasses.field(default_factory=dict)
    declared: tuple[str, ...] = ()
    order: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    unknown: str = ""

    def statistics(self) -> list[str]:
        """Return the paths of variables with statistics of a batch that the loss uses, such as means of batch norm."""
        used = frozenset(mix for label in self.sums.values() for mix in label.mixes if self._is_statistic(mix))
        sums = frozenset(operation for mix in used for operation in mix.sums)
        return [path for path, label in self.variables.items() if label.sums & sums]

    def first_mix(self, label: Label, *, statistics: bool) -> Mix | None:
        """Return the first operation after which a value is no sum over examples.

        Args:
            statistics: Whether statistics count that the model keeps among its variables.
        """
        mixes = [mix for mix in label.mixes if statistics or not self._is_statistic(mix)]

        def place(mix: Mix) -> tuple[bool, int, str]:
            is_minor = mix.what == NUMBER  # an index of another example is made from their number, too
            return is_minor, self.order.get(mix.operation, len(self.order)), mix.what

        return min(mixes, key=place, default=None)

    def _is_statistic(self, mix: Mix) -> bool:
        return bool(mix.sums) and mix.sums <= all_sums(self.variables.values())


class LossReader:
    """Reads the structure of a loss function; each shape of batch is read once.

    Args:
        additive: Whether the loss is declared to be a sum over examples, and is not read.
    """

    def __init__(self, loss_fn: LossFn, *, additive: bool = False) -> None:
        self.loss_fn = loss_fn
        self.additive = additive or getattr(loss_fn, "additive", False)
        self.weighted = self.additive or getattr(loss_fn, "weighted", False)
        self._read: dict[Any, LossStructure] = {}

    def read(self, params: Any, variables: Any, batch: Any, key: Any) -> LossStructure:
        """Return the structure of the loss for arguments of these shapes, arrays or abstract ones."""
        leaves, structure = jax.tree.flatten((params, variables, batch, key))
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in map(_abstract, leaves))
        around = get_abstract_mesh()
        signature = structure, shapes, current(), around
        if signature not in self._read:
            self._read[signature] = self._structure(*jax.tree.map(_abstract, (params, variables, batch, key)))
        return self._read[signature]

    def has_values(self, params: Any, variables: Any, batch: Any, key: jax.Array) -> bool:
        """Return whether the loss reports values as they are."""
        return any(name.startswith(f"{VALUES}/") for name in self.read(params, variables, batch, key).sums)

    def check_mean(self, params: Any, variables: Any, batch: Any, key: jax.Array) -> None:
        """Raise a `ConfigError` if the loss is a mean and the weight a count, so that it would be divided twice."""
        if self.weighted:
            return
        sums = self.read(params, variables, batch, key).sums
        if not sums or sums["loss"].is_zero or sums["weight"].is_zero:
            return
        if _is(sums["loss"].degree, 0) and _is(sums["weight"].degree, 1):
            raise _mean_error("for a batch twice over: loss × 1, weight × 2")

    def check_numbers(self, params: Any, variables: Any, batch: Any, key: jax.Array) -> None:
        """Raise a `ConfigError` as `check_mean` does, for a loss whose structure does not say, from its numbers.

        Half of a batch is evaluated alone and twice over, or all of it where devices do not divide a half: two forward
        passes in one program, which is compiled. A loss whose structure is known costs nothing.

        Args:
            batch: Arrays of a real batch, in the plan in scope.
        """
        if self.weighted or self._says_degree(params, variables, batch, key):
            return
        dims, count = self._examples(batch)
        if count is None:
            return
        part = count // 2 if count % (2 * _shards()) == 0 else count

        def take(path: str, x: Any, *, times: int) -> Any:
            dim = dims[path]
            if dim is None:
                return x
            taken = jax.lax.slice_in_dim(x, 0, part, axis=dim)
            return jax.numpy.concatenate([taken] * times, axis=dim)

        def loss_and_weight(params: Any, variables: Any, batch: Any, key: jax.Array, *, times: int) -> Any:
            some = tree.map_with_path(functools.partial(take, times=times), batch)
            given = params_for_forward(params)
            sums, _ = trace_call(self._sums_of(variables), given, variables, some, key).evaluate()
            return sums["loss"], sums["weight"]

        def once_and_twice(*arguments: Any) -> Any:
            return loss_and_weight(*arguments, times=1), loss_and_weight(*arguments, times=2)

        given = params, variables, batch, key
        try:
            traced = jax.jit(once_and_twice).trace(*given)
        except _UNFIT:  # a loss that is written for one number of examples
            return
        once, twice = jax.device_get(traced.lower().compile()(*given))
        loss, weight = (
            float(after) / float(before) if before else math.nan for before, after in zip(once, twice, strict=True)
        )
        if abs(loss - 1) < _NEAR and abs(weight - 2) < _EQUAL:
            raise _mean_error(f"for examples twice over: loss × {loss:.3g}, weight × {weight:.3g}")

    def _says_degree(self, params: Any, variables: Any, batch: Any, key: jax.Array) -> bool:
        """Return whether the structure says how loss and weight grow with the number of examples."""
        sums = self.read(params, variables, batch, key).sums
        return bool(sums) and all(sums[name].is_zero or sums[name].degree is not None for name in ("loss", "weight"))

    def check_additive(
        self, title: str, params: Any, variables: Any, batch: Any, key: jax.Array, *, fix: str, statistics: bool = True
    ) -> None:
        """Raise a `ConfigError` if a result of the loss is no sum over examples.

        Args:
            title: The title of the error.
            fix: The way out for a loss that is none.
            statistics: Whether statistics that the model keeps among its variables are an error.
        """
        if self.additive:
            return
        structure = self.read(params, variables, batch, key)
        if structure.unknown:
            problem = Problem("loss_fn", structure.unknown, fix=f"{_DECLARE}; or {fix}")
            raise ConfigError(title, [problem])
        if problems := list(_not_additive(structure, fix, statistics)):
            raise ConfigError(title, problems)

    def _structure(self, params: Any, variables: Any, batch: Any, key: Any) -> LossStructure:
        """Trace the loss for two numbers of examples, and label its results."""
        arrays = tree.flatten(batch)
        dims, count = self._examples(batch)
        if count is None:
            found = ", ".join(map(str, sorted(_counts(arrays, dims)))) or "none"
            return LossStructure(unknown=f"has a batch whose examples are not known: their numbers are {found}")
        sizes = (count, 2 * count) if count > 1 else (2, 4)

        sums_of = self._sums_of(variables)

        def traced(params: Any, variables: Any, batch: Any, key: jax.Array) -> Any:
            return sums_of(params_for_forward(params), variables, batch, key)

        programs, paths = list[TracedProgram](), list[str]()
        for size in sizes:
            resized = tree.map_with_path(lambda path, x, size=size: _resized(x, dims[path], size), batch)
            try:
                jaxpr, outputs = jax.make_jaxpr(traced, return_shape=True)(params, variables, resized, key)
            except _UNFIT as error:
                if size == count:
                    raise
                said = str(error).partition("\n")[0]
                return LossStructure(unknown=f"cannot be traced for {size} examples, and it can for {count}: {said}")
            programs.append(read_program(jaxpr))
            paths = list(tree.flatten(outputs))
        before = len(jax.tree.leaves((params, variables)))
        inputs = [input_label(None)] * before
        inputs += [input_label(dims[path]) for path in arrays]
        inputs += [input_label(None)] * (len(programs[0].inputs) - len(inputs))
        try:
            labels = label_examples((programs[0], programs[1]), inputs, sizes, _split_axes())
        except UnlikeProgramsError as error:
            what = f"has other operations for {sizes[1]} examples than for {sizes[0]}: {error}"
            return LossStructure(unknown=what)
        labelled = dict(zip(paths, labels.results, strict=True))
        sums = {path.removeprefix("0/"): label for path, label in labelled.items() if path.startswith("0/")}
        after = {path.removeprefix("1/"): label for path, label in labelled.items() if path.startswith("1/")}
        order = {operation: place for place, operation in enumerate(programs[0].walk())}
        return LossStructure(sums, after, tuple(labels.declared), order)

    def _sums_of(self, own: Any) -> LossFn:
        """Return the loss function with its results checked."""

        def checked(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Sums, Any]:
            return check_returned(self.loss_fn(params, variables, batch, key), own)

        return checked

    @staticmethod
    def _examples(batch: Any) -> tuple[dict[str, int | None], int | None]:
        """Return each array's dimension of examples, by path, and their number; None if arrays do not agree on it."""
        table, arrays = current().batch, tree.flatten(batch)
        dims = dict[str, int | None]()
        for path, x in arrays.items():
            dim = table.examples(path)
            dims[path] = dim if dim is not None and dim < len(x.shape) else None
        counts = _counts(arrays, dims)
        return dims, counts.pop() if len(counts) == 1 else None


def _counts(arrays: Mapping[str, Any], dims: Mapping[str, int | None]) -> set[int]:
    return {arrays[path].shape[dim] for path, dim in dims.items() if dim is not None}


def _shards() -> int:
    """Return the number of parts that the mesh in scope splits the examples of a batch into."""
    mesh = current().mesh
    if mesh is None:
        return 1
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def _mean_error(detail: str) -> ConfigError:
    what = "is a mean over the examples, and the weight is their number"
    detail = f"{detail}; the step divides the loss by the weight"
    fix = f'{_SUMS}; or the mean with "weight": jnp.float32(1)'
    return ConfigError("The loss would be divided twice:", [Problem("sum 'loss'", what, detail, fix)])


def has_part_of_batch() -> bool:
    """Return whether the code that is traced here has the examples of one device only."""
    return bool(_split_axes())


def _split_axes() -> frozenset[str]:
    """Return the axes that split the examples and are manual here."""
    around = get_abstract_mesh()
    return frozenset(axis for axis in around.manual_axes if axis in BATCH_AXES and around.shape[axis] > 1)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    own = x.dtype if hasattr(x, "dtype") else jax.dtypes.result_type(x)
    # Host arrays of 64 bits enter a program in 32, and newer releases of JAX warn of shapes that say otherwise.
    dtype = jax.dtypes.canonicalize_dtype(own, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(jax.numpy.shape(x), dtype)


def _resized(x: Any, dim: int | None, size: int) -> Any:
    """Return an abstract array with another number of examples."""
    if dim is None:
        return x
    return jax.ShapeDtypeStruct((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.dtype)


def _is(degree: float | None, power: int) -> bool:
    return degree is not None and abs(degree - power) < _EQUAL


def _not_additive(structure: LossStructure, fix: str, statistics: bool) -> Iterator[Problem]:
    """Yield a problem for each sum of a loss that is no sum over examples."""
    for name, label in structure.sums.items():
        if name.startswith(f"{VALUES}/"):
            what = "is reported as it is, and a part of a batch has its own"
            yield Problem(name.removeprefix(f"{VALUES}/"), what, fix=f"a sum in its place; or {fix}")
            continue
        if label.is_zero:
            continue
        where = f"sum {name!r}"
        mix = structure.first_mix(label, statistics=statistics)
        is_count = label.value is not None and _is(label.degree, 1)
        if mix is not None:
            line = equation_line(mix.operation.equations)
            place = f"`{mix.operation.primitive}`" + (f" at {line}" if line else "")
            declare = "spmd.per_example(function) around it" if mix.what == UNKNOWN else _DECLARE
            yield Problem(where, f"is no sum over the examples: {place} {mix.what}", fix=f"{declare}; or {fix}")
        elif label.value is not None and not is_count:
            detail = "each part of a batch would count it again"
            yield Problem(where, f"is {label.value[0]:g} for any number of examples", detail, _SUMS)
        elif label.kind is Kind.SHARED and not is_count and not label.mixes:
            detail = "each part of a batch would count it again"
            yield Problem(where, "depends on no example", detail, "multiply it by the weight")
        elif _is(label.degree, 0) and not label.mixes:
            yield Problem(where, "is a mean over the examples", "a mean of means is not that of the whole", _SUMS)
        elif not _is(label.degree, 1):
            yield Problem(where, "does not grow as the number of examples does", fix=_SUMS)
