"""Buffers of a traced step and their lifetimes, without compiling it.

XLA fuses element-wise operations into their neighbours, so most values are never written to memory. Written are results
of matmuls, collectives and loops, and whatever enters a matmul or crosses the boundary of a loop. A buffer lives from
the operation that writes it to the last that reads it, directly or through fused operations.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from spmd.jaxpr.traced_program import Operation, TracedProgram, TracedValue

_READS_MEMORY = ("dot_general", "ragged_dot", "pallas_call", "scatter-add", "scatter", "gather", "sort", "top_k")
"""Operations that read their operands from memory: nothing is fused into them."""

_WRITTEN = (*_READS_MEMORY, "all_gather", "concatenate", "cumsum", "ppermute")
"""Operations whose results are written to memory, besides loops and transfers between devices."""

_EXPENSIVE = ("exp", "exp2", "log", "log1p", "tanh", "logistic", "erf", "div", "pow", "rsqrt", "sqrt", "sin", "cos")
"""Element-wise operations that XLA:CPU does not repeat: their results are written if they have several readers."""


_Values = frozenset[TracedValue]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One array in memory, and its lifetime.

    Attributes:
        kind: `"saved"` if a loop writes a slice of it in each iteration, `"stacked"` if a reversed loop does,
            `"gathered"` for the larger result of a collective, `"converted"` for a stack that is converted to a
            narrower dtype before its loop, else `"value"`.
        shape: Global shape; `bytes` are of one device.
        start: Time of the write; `end` is that of the last read.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    bytes: int
    on_host: bool
    start: int = 0
    end: int = 0


def find_buffers(
    program: TracedProgram, axes: Mapping[str, int], aliased: Iterable[TracedValue] = (), platform: str = "tpu"
) -> list[Buffer]:
    """Return the buffers of a propagated program, without its arguments and the results that `aliased` donated ones."""
    repeated = _EXPENSIVE if platform == "cpu" else ()
    return _Lifetimes(program, axes, frozenset(aliased), repeated, start=0).buffers


def saved_activations(program: TracedProgram, axes: Mapping[str, int]) -> list[Buffer]:
    """Return the buffers that forward loops save for loops that run backwards."""
    saved = []
    for operation in program.walk():
        if operation.primitive in ("scan", "stack_iterations") and not operation.params["reverse"]:
            stacks = operation.outputs[operation.params.get("num_carry", 0) :]
            saved += [_buffer(value, operation, axes, saved=True) for value in stacks]
    return saved


def peak_buffers(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return the buffers that are live when most bytes of the device are in use."""
    starts = sorted({buffer.start for buffer in buffers})
    live = ([b for b in buffers if b.start <= start <= b.end] for start in starts)
    return max(live, key=lambda found: sum(b.bytes for b in found if not b.on_host), default=[])


def heap_bytes(buffers: Iterable[Buffer]) -> int:
    """Return the size of a heap in which every buffer keeps one place for its lifetime.

    As in XLA, each buffer goes into the smallest hole that is free for its lifetime, once in order of lifetime and once
    in order of size; the smaller heap of the two counts.
    """
    buffers = [buffer for buffer in buffers if buffer.bytes and not buffer.on_host]
    return min(
        _pack(sorted(buffers, key=lambda b: (b.start - b.end, -b.bytes, b.start))),
        _pack(sorted(buffers, key=lambda b: (-b.bytes, b.start - b.end, b.start))),
    )


def _pack(buffers: Iterable[Buffer]) -> int:
    placed: list[tuple[int, int, int, int]] = []
    top = 0
    for buffer in buffers:
        taken = sorted((low, high) for low, high, start, end in placed if start <= buffer.end and buffer.start <= end)
        best, smallest, free = 0, math.inf, 0
        for low, high in taken:
            if buffer.bytes <= low - free < smallest:
                best, smallest = free, low - free
            free = max(free, high)
        offset = best if smallest < math.inf else free
        placed.append((offset, offset + buffer.bytes, buffer.start, buffer.end))
        top = max(top, offset + buffer.bytes)
    return top


class _Lifetimes:
    """Buffers of a program and of its bodies; `end` is the time after its last operation.

    `roots` maps a value to the buffers that are read in its place, through fused operations; `free` holds the values
    that have no buffer of their own.
    """

    def __init__(
        self, program: TracedProgram, axes: Mapping[str, int], free: _Values, repeated: Sequence[str], start: int
    ) -> None:
        self.program, self.axes, self.repeated = program, axes, repeated
        self.free = free | set(program.inputs)
        self.roots: dict[TracedValue, _Values] = {value: frozenset([value]) for value in program.inputs}
        self.written: dict[TracedValue, tuple[Operation | None, int]] = {}
        self.last: dict[TracedValue, int] = {}
        self.saved: set[TracedValue] = set()
        self.buffers: list[Buffer] = []
        self.readers = collections.Counter(value for o in program.operations for value in set(o.inputs))
        self.times: list[int] = []
        now, self.end = start, start
        for operation in program.operations:
            self.times.append(now)
            self._read(operation, now)
            inside = [_Lifetimes(body, axes, frozenset(body.outputs), repeated, now + 1) for body in operation.bodies]
            self._write(operation, now, inside)
            for inner in inside:
                self.buffers += inner.buffers
                now = max(now, inner.end)
            if inside:
                for value in operation.inputs + operation.outputs:
                    self.last.update(dict.fromkeys(self._roots(value), now))
            now += 1
        self.end = now
        for value in program.outputs:
            roots = self._roots(value)
            self.last.update(dict.fromkeys(roots, now))
            if value in free and roots and _is_reshaped(value, roots):
                self.free |= roots  # a view of a result, whose buffer is outside
        for value, (writer, when) in self.written.items():
            if value not in self.free:
                buffer = _buffer(value, writer, axes, saved=value in self.saved)
                self.buffers.append(dataclasses.replace(buffer, start=when, end=self.last.get(value, when)))
        self.buffers += self._converted()

    def _roots(self, value: TracedValue) -> _Values:
        return self.roots.get(value, frozenset())

    def _read(self, operation: Operation, now: int) -> None:
        for value in operation.inputs:
            roots = self._roots(value)
            reads = operation.bodies or operation.primitive in _READS_MEMORY or _moves(operation, self.axes)
            if reads and roots and roots != {value} and not _is_view(value, roots):
                self.written[value] = (None, now)  # the fused operations are written here to be read
                self.last.update(dict.fromkeys(roots, now))
                self.roots[value] = roots = frozenset([value])
            if operation.primitive == "stack_iterations" and not operation.params["reverse"]:
                self.saved |= roots
            self.last.update(dict.fromkeys(roots, now))

    def _write(self, operation: Operation, now: int, inside: "Sequence[_Lifetimes]") -> None:
        for i, value in enumerate(operation.outputs):
            kept = operation.primitive in self.repeated and self.readers[value] > 1
            if operation.primitive == "cond" and (given := _returned_operand(operation, i)):
                self.roots[value] = self._roots(given)
            elif operation.bodies or operation.primitive in _WRITTEN or kept or _moves(operation, self.axes):
                once = operation.primitive in ("cond", "shard_map")
                when = min(inner.written_at(i) for inner in inside) if once and inside else now
                self.written[value] = (operation, when)
                self.roots[value] = frozenset([value])
            else:
                self.roots[value] = frozenset().union(*map(self._roots, operation.inputs))

    def written_at(self, i: int) -> int:
        """Return the time at which a result, or the buffer that it is a view of, is written."""
        value = self.program.outputs[i]
        roots = self._roots(value)
        times = [self.written[root][1] for root in roots if root in self.written]
        return times[0] if times and _is_view(value, roots) else self.end

    def _converted(self) -> Iterator[Buffer]:
        """Yield the narrower copies that XLA makes of what a loop reads in a narrower dtype, whole or in slices."""
        lifetimes: dict[_Values, tuple[int, int, int]] = {}
        ends = [*self.times, self.end][1:]
        for operation, now, after in zip(self.program.operations, self.times, ends, strict=True):
            if operation.primitive != "scan" or operation.params["length"] == operation.params["unroll"]:
                continue
            (body,) = operation.bodies
            for i, (value, inner) in enumerate(zip(operation.inputs, body.inputs, strict=True)):
                readers = [o for o in body.operations if inner in o.inputs]
                is_slice = i >= operation.params["num_consts"] + operation.params["num_carry"]
                before = width = value.kept or value.itemsize
                if inner.kept:
                    width = inner.kept
                elif is_slice and readers and all(o.primitive == "convert_element_type" for o in readers):
                    width = max(o.outputs[0].itemsize for o in readers)
                if width < before:
                    source = self.roots.get(value, frozenset([value]))
                    size = value.bytes(self.axes) // before * width
                    lifetimes[source] = (size, lifetimes.get(source, (0, now, 0))[1], after)
        for size, start, end in lifetimes.values():
            yield Buffer("converted", "", (), size, False, start, end)


def _returned_operand(condition: Operation, i: int) -> TracedValue | None:
    """Return the operand that some branch returns unchanged as result `i`: the other branches overwrite it."""
    for body in condition.bodies:
        operands = dict(zip(body.inputs, condition.inputs[-len(body.inputs) :], strict=False))
        if given := operands.get(body.outputs[i]):
            return given
    return None


def _is_view(value: TracedValue, roots: _Values) -> bool:
    """Tell whether a value is a view of one buffer or can overwrite it, so that it needs none of its own."""
    (root, *rest) = roots
    return not rest and root.itemsize == value.itemsize and math.prod(root.shape) == math.prod(value.shape)


def _is_reshaped(value: TracedValue, roots: _Values) -> bool:
    """Tell whether a value is one buffer with other dimensions of size 1."""
    (root, *_) = roots
    return _is_view(value, roots) and [n for n in root.shape if n > 1] == [n for n in value.shape if n > 1]


def _moves(operation: Operation, axes: Mapping[str, int]) -> bool:
    """Tell whether an operation sends data between devices or memories, so that its result needs a buffer."""
    if operation.primitive == "device_put":
        return any(a.on_host != b.on_host for a, b in zip(operation.inputs, operation.outputs, strict=True))
    if operation.primitive != "sharding_constraint":
        return False
    value, output = operation.inputs[0], operation.outputs[0]
    return value.dims is not None and value.bytes(axes) != output.bytes(axes)


def _buffer(value: TracedValue, operation: Operation | None, axes: Mapping[str, int], *, saved: bool = False) -> Buffer:
    size, primitive = value.bytes(axes), operation.primitive if operation else ""
    kind = "saved" if saved else "value"
    if operation and primitive == "scan" and not saved and value in operation.outputs[operation.params["num_carry"] :]:
        kind = "stacked" if operation.params["reverse"] else "saved"
    elif operation and primitive in ("all_gather", "sharding_constraint") and not saved:
        kind = "gathered" if size > operation.inputs[0].bytes(axes) else kind
    return Buffer(kind, value.name, value.shape, size, value.on_host)
