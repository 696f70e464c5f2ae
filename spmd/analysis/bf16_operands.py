"""Float32 values kept in bfloat16 on TPUs: operands of default-precision matmuls only.

Such a matmul multiplies bfloat16, so XLA rounds its operands when it writes them, in half the
bytes. Operands of a loop with only such uses are rounded before the loop.
"""

import collections
from collections.abc import Iterator

import jax

from spmd.jaxpr.traced_program import Operation, TracedProgram, TracedValue

_ALIASES = {
    "transpose",
    "reshape",
    "squeeze",
    "broadcast_in_dim",
    "copy",
    "name",
    "stored",
    "sharding_constraint",
    "stack_iterations",
}
"""Operations that only forward elements: readers of the result are readers of the operands."""

_DEFAULT = jax.lax.Precision.DEFAULT
_DEFAULT_PRECISIONS = (None, _DEFAULT, (_DEFAULT, _DEFAULT))
_FULL_PRECISION = None
"""Reader that needs all 32 bits."""

_Reader = TracedValue | None


def narrow_operands(program: TracedProgram) -> None:
    """Mark the values of a TPU program kept in bfloat16, its inputs excepted."""
    readers = collections.defaultdict[TracedValue, list[_Reader]](list)
    for value, reader in _reads(program):
        readers[value].append(reader)
    for value in program.outputs:
        readers[value].append(_FULL_PRECISION)
    known = dict.fromkeys(program.inputs, False)
    for value in list(readers):
        if value.itemsize == 4 and readers[value] and _is_multiplied(value, readers, known):
            value.kept = 2


def _is_multiplied(
    value: TracedValue,
    readers: collections.defaultdict[TracedValue, list[_Reader]],
    known: dict[TracedValue, bool],
) -> bool:
    """Return whether a value is read by matmuls only, through all aliases; `known` is a cache."""
    if value not in known:
        # A cycle, such as a matmul that is its own reader, is no evidence against it.
        known[value] = True
        known[value] = all(
            reader is not _FULL_PRECISION and _is_multiplied(reader, readers, known)
            for reader in readers[value]
        )
    return known[value]


def _reads(program: TracedProgram) -> Iterator[tuple[TracedValue, _Reader]]:
    """Yield each operand with its reader.

    The reader is the operand itself for a matmul, the value with the same elements for an alias or
    across the boundary of a body, else `_FULL_PRECISION`.
    """
    for operation in program.operations:
        for value in operation.inputs:
            if _is_default_matmul(operation):
                yield value, value
            elif operation.primitive in _ALIASES:
                yield value, operation.outputs[0]
            elif not operation.bodies:
                yield value, _FULL_PRECISION
        for body in operation.bodies:
            yield from _reads_of_body(operation, body)


def _is_default_matmul(operation: Operation) -> bool:
    """Return whether an operation is a matmul of the default precision."""
    if operation.primitive != "dot_general":
        return False
    return operation.params["precision"] in _DEFAULT_PRECISIONS


def _reads_of_body(
    operation: Operation, body: TracedProgram
) -> Iterator[tuple[TracedValue, _Reader]]:
    """Yield the reads in a body and across its boundary."""
    yield from _reads(body)
    skipped = len(operation.inputs) - len(body.inputs)
    for value in operation.inputs[:skipped]:
        yield value, _FULL_PRECISION
    first = operation.params.get("num_consts", 0)
    carry = operation.params.get("num_carry", 0)
    inputs = zip(operation.inputs[skipped:], body.inputs, strict=True)
    for i, (value, inner) in enumerate(inputs):
        is_carried = first <= i < first + carry
        yield value, (_FULL_PRECISION if is_carried else inner)
    for i, (value, outer) in enumerate(zip(body.outputs, operation.outputs, strict=True)):
        is_carried = i < carry
        yield value, (_FULL_PRECISION if is_carried else outer)
