"""Float32 values that a TPU keeps in bfloat16: those read only by matmuls of the default precision.

Such a matmul multiplies bfloat16, so XLA rounds its operands when it writes them, in half the bytes. Operands of a loop
that are read this way are rounded before the loop.
"""

import collections
from collections.abc import Iterator

import jax

from spmd.jaxpr.traced_program import TracedProgram, TracedValue

_ALIASES = {
    *("transpose", "reshape", "squeeze", "broadcast_in_dim", "copy", "name", "stored", "sharding_constraint"),
    "stack_iterations",
}
"""Operations whose result has the elements of their operands, and is read in their place."""

_DEFAULT = jax.lax.Precision.DEFAULT
_DEFAULT_PRECISIONS = (None, _DEFAULT, (_DEFAULT, _DEFAULT))
_FULL_PRECISION = None
"""Reader that needs all 32 bits."""


def narrow_operands(program: TracedProgram) -> None:
    """Mark the values of a program for a TPU that are kept in bfloat16, its inputs excepted."""
    readers: dict[TracedValue, list[TracedValue | None]] = collections.defaultdict(list)
    for value, reader in [*_reads(program), *((value, _FULL_PRECISION) for value in program.outputs)]:
        readers[value].append(reader)
    known = dict.fromkeys(program.inputs, False)

    def is_multiplied(value: TracedValue) -> bool:
        if value not in known:
            known[value] = True  # a cycle, such as a matmul that is its own reader, is no evidence against it
            known[value] = all(r is not _FULL_PRECISION and is_multiplied(r) for r in readers[value])
        return known[value]

    for value in list(readers):
        if value.itemsize == 4 and readers[value] and is_multiplied(value):
            value.kept = 2


def _reads(program: TracedProgram) -> Iterator[tuple[TracedValue, TracedValue | None]]:
    """Yield each operand with its reader: the value that has its elements, itself for a matmul, else None."""
    for operation in program.operations:
        if operation.primitive == "dot_general" and operation.params["precision"] in _DEFAULT_PRECISIONS:
            yield from ((value, value) for value in operation.inputs)
        elif operation.primitive in _ALIASES:
            yield from ((value, operation.outputs[0]) for value in operation.inputs)
        elif not operation.bodies:
            yield from ((value, _FULL_PRECISION) for value in operation.inputs)
        for body in operation.bodies:
            yield from _reads(body)
            skipped = len(operation.inputs) - len(body.inputs)
            yield from ((value, _FULL_PRECISION) for value in operation.inputs[:skipped])
            first, carry = operation.params.get("num_consts", 0), operation.params.get("num_carry", 0)
            for i, (value, inner) in enumerate(zip(operation.inputs[skipped:], body.inputs, strict=True)):
                yield value, _FULL_PRECISION if first <= i < first + carry else inner
            for i, (value, outer) in enumerate(zip(body.outputs, operation.outputs, strict=True)):
                yield value, _FULL_PRECISION if i < carry else outer
