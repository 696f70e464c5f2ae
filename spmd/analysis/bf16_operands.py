"""Which float32 values a TPU has in bfloat16: those of which nothing but products of the default precision are made.

Such a product multiplies bfloat16, so XLA rounds its operands where they are written, and they take half the bytes.
What a loop reads so is rounded before the loop.
"""

import collections
from collections.abc import Iterator

import jax

from spmd.analysis.jaxpr import Operation, TracedProgram, TracedValue

_FORMS = ("transpose", "reshape", "squeeze", "broadcast_in_dim", "copy", "name", "sharding_constraint", "stack_turns")
"""Operations whose result has the elements of their operands, and is read in their place."""

_ELSEWHERE = None
"""A reader that needs all 32 bits."""


def narrow_operands(program: TracedProgram) -> None:
    """Marks the values of a program, and of those inside it, that are kept in bfloat16; not its inputs.

    Args:
        program: For a TPU.
    """
    readers: dict[int, list[TracedValue | None]] = collections.defaultdict(list)
    values: dict[int, TracedValue] = {}
    for value, reader in [*_reads(program), *((value, _ELSEWHERE) for value in program.outputs)]:
        values[id(value)] = value
        if reader is not value:
            readers[id(value)].append(reader)
    known: dict[int, bool] = {id(value): False for value in program.inputs}

    def is_multiplied(value: TracedValue) -> bool:
        if id(value) not in known:
            known[id(value)] = True  # what goes round in a circle says nothing
            known[id(value)] = all(r is not _ELSEWHERE and is_multiplied(r) for r in readers[id(value)])
        return known[id(value)]

    products = {id(value) for value, reader in _reads(program) if reader is value}
    for key, value in values.items():
        if value.itemsize == 4 and (key in products or readers[key]) and is_multiplied(value):
            value.kept = 2


def _reads(program: TracedProgram) -> Iterator[tuple[TracedValue, TracedValue | None]]:
    """Each value with what is made of it: the same elements elsewhere, itself for a product, None for all else."""
    for operation in program.operations:
        if operation.primitive == "dot_general" and _rounds(operation):
            yield from ((value, value) for value in operation.inputs)
        elif operation.primitive in _FORMS:
            yield from ((value, operation.outputs[0]) for value in operation.inputs)
        elif not operation.bodies:
            yield from ((value, _ELSEWHERE) for value in operation.inputs)
        for body in operation.bodies:
            yield from _reads(body)
            skipped = len(operation.inputs) - len(body.inputs)
            yield from ((value, _ELSEWHERE) for value in operation.inputs[:skipped])
            first, carry = operation.params.get("num_consts", 0), operation.params.get("num_carry", 0)
            for i, (value, inner) in enumerate(zip(operation.inputs[skipped:], body.inputs, strict=True)):
                yield value, _ELSEWHERE if first <= i < first + carry else inner
            for i, (value, outer) in enumerate(zip(body.outputs, operation.outputs, strict=True)):
                yield value, _ELSEWHERE if i < carry else outer


def _rounds(product: Operation) -> bool:
    """Whether a product is of the default precision."""
    default = jax.lax.Precision.DEFAULT
    return product.params["precision"] in (None, default, (default, default))
