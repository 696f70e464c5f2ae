"""Uses of a traced function's inputs, to find the inputs in need of a gather before the function.

XLA computes some operations wrongly where an operand is split over an axis that splits the batch
too (decision 0011). A use of such an input is proven right if it is one of these:

- a view (a cast, a transpose, a slice), whose result is followed to its own uses;
- an element-wise operation or a sum of nothing that depends on the batch, such as weight decay in a
  loss, and any element-wise operation if no axis of the batch splits the input;
- a lookup of rows whose columns are split, with indices that are split over other axes;
- a sharding constraint after which the array is not split so: XLA gathers it there;
- a region that is manual over these axes, where a layer gathers its parameter by itself.

Any other use is reported, and whether it is one of the input itself (and its views) or of an
element-wise function of the input, such as a normalised kernel. Layers of Flax and of the user are
treated alike.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec as P

from spmd.jaxpr.propagation import ELEMENTWISE, REDUCTIONS, VIEWS
from spmd.jaxpr.traced_program import Operation, TracedProgram, TracedValue
from spmd.sharding.mesh import spec_axes

Sources = frozenset[tuple[int, bool]]
"""The inputs of a value: the number of each, and whether the value is an element-wise result."""

_NONE: Sources = frozenset()
_FOLLOWED = {
    *VIEWS,
    "broadcast_in_dim",
    "device_put",
    "dynamic_slice",
    "expand_dims",
    "name",
    "rev",
    "slice",
    "split",
}


def unproven_uses(
    program: TracedProgram, axes: Mapping[int, frozenset[str]], batch: int
) -> dict[int, bool]:
    """Return the number of each input with an unproven use → whether a result of it has one.

    A result is an element-wise function of the input.

    Args:
        program: The traced function, with the shardings of its values.
        axes: The number of each input to follow → the axes of the batch that split it, possibly
            none.
        batch: The number of the first input that depends on the batch; earlier inputs are
            parameters and variables.
    """
    uses = _Uses(axes)
    for number in axes:
        uses.sources[program.inputs[number]] = frozenset([(number, False)])
    uses.dynamic.update(program.inputs[batch:])
    uses.follow(program)
    return uses.found


@dataclasses.dataclass
class _Uses:
    """Views and element-wise results of followed inputs, and values dependent on the batch.

    Attributes:
        sources: Value → the inputs that it is a view or an element-wise result of.
        dynamic: Values that depend on the batch.
        found: Input with an unproven use → whether an element-wise result of it has one.
    """

    axes: Mapping[int, frozenset[str]]
    sources: dict[TracedValue, Sources] = dataclasses.field(default_factory=dict)
    dynamic: set[TracedValue] = dataclasses.field(default_factory=set)
    found: dict[int, bool] = dataclasses.field(default_factory=dict)

    def follow(self, program: TracedProgram) -> None:
        """Follow the inputs through the operations of a program."""
        for operation in program.operations:
            if operation.bodies:
                self._follow_bodies(operation)
            else:
                self._follow_operation(operation)

    def _sources_of(self, values: Sequence[TracedValue]) -> Sources:
        return _NONE.union(*(self.sources.get(value, _NONE) for value in values))

    def _report(self, sources: Sources) -> None:
        for number, is_result in sources:
            self.found[number] = self.found.get(number, False) or is_result

    def _split(self, sources: Sources) -> Iterator[tuple[int, bool]]:
        """Yield the sources with a dimension split over an axis of the batch."""
        for number, is_result in sources:
            if self.axes[number]:
                yield number, is_result

    def _set(self, values: Sequence[TracedValue], sources: Sources) -> None:
        for value in values:
            # A scalar is split over nothing.
            self.sources[value] = sources if value.shape else _NONE

    def _follow_operation(self, operation: Operation) -> None:
        sources = self._sources_of(operation.inputs)
        is_dynamic = any(value in self.dynamic for value in operation.inputs)
        if operation.primitive == "sharding_constraint":
            self._set(operation.outputs, self._after_constraint(operation, sources))
        elif operation.primitive in _FOLLOWED:
            self._set(operation.outputs, sources)
        elif operation.primitive in ELEMENTWISE or operation.primitive in REDUCTIONS:
            self._follow_elementwise(operation, sources)
        elif operation.primitive != "gather" or not self._is_aligned_lookup(operation):
            self._report(sources)
        if is_dynamic:
            self.dynamic.update(operation.outputs)

    def _after_constraint(self, constraint: Operation, sources: Sources) -> Sources:
        """Return the sources still split over an axis of the batch after a constraint."""
        spec = getattr(constraint.params["sharding"], "spec", None)  # None for a single device
        if spec is None or P.UNCONSTRAINED in spec:
            return sources
        kept = set(spec_axes(spec))
        still_split = set()
        for number, is_result in sources:
            if self.axes[number] & kept:
                still_split.add((number, is_result))
        return frozenset(still_split)

    def _follow_elementwise(self, operation: Operation, sources: Sources) -> None:
        """Follow an element-wise operation or a sum, proven right without arrays of the batch."""
        mixes = any(value in self.dynamic and value.shape for value in operation.inputs)
        if mixes:
            self._report(Sources(self._split(sources)))
            self._set(operation.outputs, _NONE)
            return
        results = Sources((number, True) for number, _ in sources)
        self._set(operation.outputs, results)

    def _is_aligned_lookup(self, lookup: Operation) -> bool:
        """Return whether each device can look rows up in its own columns.

        No axis splits both columns and indices.
        """
        table, indices = lookup.inputs[:2]
        if table.dims is None or indices.dims is None:
            return False
        sizes = zip(table.dims, table.shape, lookup.params["slice_sizes"], strict=True)
        for axes, size, taken in sizes:
            if axes and size != taken:  # rows are split, not columns
                return False
        axes_of_columns = set[str]().union(*table.dims)
        axes_of_indices = set[str]().union(*indices.dims)
        return axes_of_columns.isdisjoint(axes_of_indices)

    def _follow_bodies(self, operation: Operation) -> None:
        """Follow inputs through the bodies of a loop, a condition or a manual region."""
        if operation.primitive == "while":
            # Its condition, which is no body, may use the carried values.
            self._report(self._sources_of(operation.inputs))
        for body in operation.bodies:
            first = len(operation.inputs) - len(body.inputs)
            # Operands of the condition of a `while` loop, and the index of a branch, are not among
            # the body's.
            self._report(self._sources_of(operation.inputs[:first]))
            self._enter(operation, body, first)
            self.follow(body)
            while self._carry_over(operation):
                self.follow(body)
            for output, inner in zip(operation.outputs, body.outputs, strict=True):
                known = self.sources.get(output, _NONE)
                self.sources[output] = known | self.sources.get(inner, _NONE)
                if inner in self.dynamic:
                    self.dynamic.add(output)

    def _enter(self, operation: Operation, body: TracedProgram, first: int) -> None:
        """Follow the operands of an operation into a body.

        Args:
            first: The number of the body's first operand.
        """
        manual = operation.params.get("newly_manual_axes", frozenset())
        for value, inner in zip(operation.inputs[first:], body.inputs, strict=True):
            sources = self.sources.get(value, _NONE)
            if manual:
                # An input split over these axes alone, or over none, is a local array there.
                sources = Sources(source for source in sources if self.axes[source[0]] - manual)
            self.sources[inner] = sources
            if value in self.dynamic:
                self.dynamic.add(inner)

    def _carry_over(self, operation: Operation) -> bool:
        """Add a loop's values after an iteration to those before; return whether any is new."""
        is_more = False
        for old, new in operation.carried:
            before = self.sources.get(old, _NONE)
            after = self.sources.get(new, _NONE)
            if after - before:
                self.sources[old] = before | after
                is_more = True
            if new in self.dynamic and old not in self.dynamic:
                self.dynamic.add(old)
                is_more = True
        return is_more
