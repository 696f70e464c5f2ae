"""Buffers of a traced step and their lifetimes, without compiling it.

XLA fuses element-wise operations into their neighbours, so most values are never written to memory.
Results of matmuls, collectives and loops are written, and so are operands of matmuls and values
that cross the boundary of a loop. A buffer lives from the operation that writes it to the last that
reads it, directly or through fused operations.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from spmd.jaxpr.traced_program import Operation, TracedProgram, TracedValue

_READS_MEMORY = (
    "dot_general",
    "ragged_dot",
    "pallas_call",
    "scatter-add",
    "scatter",
    "gather",
    "sort",
    "top_k",
)
"""Operations that read their operands from memory: nothing is fused into them."""

_WRITTEN = (*_READS_MEMORY, "all_gather", "concatenate", "cumsum", "ppermute")
"""Operations whose results are written to memory, besides loops and transfers between devices."""

_EXPENSIVE = (
    "exp",
    "exp2",
    "log",
    "log1p",
    "tanh",
    "logistic",
    "erf",
    "div",
    "pow",
    "rsqrt",
    "sqrt",
    "sin",
    "cos",
)
"""Element-wise operations that XLA:CPU does not repeat.

Their results are written if they have several readers.
"""


_Values = frozenset[TracedValue]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One array in memory, and its lifetime.

    Attributes:
        kind: `"saved"` if a loop writes a slice of it in each iteration, `"stacked"` if a reversed
            loop does, `"gathered"` for the larger result of a collective, `"converted"` for a stack
            that is converted to a narrower dtype before its loop, else `"value"`.
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
    program: TracedProgram,
    axes: Mapping[str, int],
    aliased: Iterable[TracedValue] = (),
    platform: str = "tpu",
) -> list[Buffer]:
    """Return the buffers of a program with shardings, besides its arguments.

    Results in `aliased` overwrite donated arguments and have no buffer either.
    """
    repeated = _EXPENSIVE if platform == "cpu" else ()
    return _Lifetimes(program, axes, frozenset(aliased), repeated, start=0).buffers


def saved_activations(program: TracedProgram, axes: Mapping[str, int]) -> list[Buffer]:
    """Return the buffers saved by forward loops for the loops of the backward pass."""
    saved = []
    for operation in program.walk():
        is_loop = operation.primitive in ("scan", "stack_iterations")
        if not is_loop or operation.params["reverse"]:
            continue
        stacks = operation.outputs[operation.params.get("num_carry", 0) :]
        for value in stacks:
            saved.append(_buffer(value, operation, axes, saved=True))
    return saved


def peak_buffers(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return the live buffers at the time of the most bytes in use on the device."""
    peak: list[Buffer] = []
    most = -1
    for now in sorted({buffer.start for buffer in buffers}):
        live = []
        used = 0
        for buffer in buffers:
            if buffer.start <= now <= buffer.end:
                live.append(buffer)
                if not buffer.on_host:
                    used += buffer.bytes
        if used > most:
            peak, most = live, used
    return peak


def heap_bytes(buffers: Iterable[Buffer]) -> int:
    """Return the size of a heap where every buffer keeps one place for its lifetime.

    As in XLA, each buffer goes into the smallest hole that is free for its lifetime, once in order
    of lifetime and once in order of size; the smaller heap of the two counts.
    """
    placed = []
    for buffer in buffers:
        if buffer.bytes and not buffer.on_host:
            placed.append(buffer)
    longest_first = sorted(placed, key=lambda b: (b.start - b.end, -b.bytes, b.start))
    largest_first = sorted(placed, key=lambda b: (-b.bytes, b.start - b.end, b.start))
    return min(_pack(longest_first), _pack(largest_first))


def _pack(buffers: Iterable[Buffer]) -> int:
    """Return the size of a heap after buffers are placed in this order."""
    # first and last byte, start and end of the lifetime
    placed: list[tuple[int, int, int, int]] = []
    top = 0
    for buffer in buffers:
        taken = []
        for low, high, start, end in placed:
            if start <= buffer.end and buffer.start <= end:
                taken.append((low, high))
        low = _smallest_hole(sorted(taken), buffer.bytes)
        high = low + buffer.bytes
        placed.append((low, high, buffer.start, buffer.end))
        top = max(top, high)
    return top


def _smallest_hole(taken: Iterable[tuple[int, int]], size: int) -> int:
    """Return the start of the smallest sufficient hole between sorted ranges, or their end."""
    hole = None
    smallest = 0
    free = 0
    for low, high in taken:
        room = low - free
        if room >= size and (hole is None or room < smallest):
            hole = free
            smallest = room
        free = max(free, high)
    if hole is None:
        return free
    return hole


class _Lifetimes:
    """Buffers of a program and of its bodies; `end` is the time after its last operation.

    `roots` maps a value to the buffers that are read in its place, through fused operations; `free`
    holds the values that have no buffer of their own.
    """

    def __init__(
        self,
        program: TracedProgram,
        axes: Mapping[str, int],
        free: _Values,
        repeated: Sequence[str],
        start: int,
    ) -> None:
        self.program = program
        self.axes = axes
        self.repeated = repeated
        self.free = free | set(program.inputs)
        self.roots: dict[TracedValue, _Values] = {}
        for value in program.inputs:
            self.roots[value] = frozenset([value])
        self.written: dict[TracedValue, tuple[Operation | None, int]] = {}
        self.last: dict[TracedValue, int] = {}
        self.saved: set[TracedValue] = set()
        self.buffers: list[Buffer] = []
        self.readers = collections.Counter[TracedValue]()
        for operation in program.operations:
            self.readers.update(set(operation.inputs))
        self.times: list[int] = []
        self.end = start
        for operation in program.operations:
            self.times.append(self.end)
            self.end = self._run(operation, self.end)
        self._return(free)
        self._add_written()
        self.buffers += self._converted()

    def _run(self, operation: Operation, now: int) -> int:
        """Record the reads, writes and bodies of an operation; return the time of the next one."""
        self._read(operation, now)
        inside = []
        for body in operation.bodies:
            free = frozenset(body.outputs)
            inside.append(_Lifetimes(body, self.axes, free, self.repeated, now + 1))
        self._write(operation, now, inside)
        for inner in inside:
            self.buffers += inner.buffers
            now = max(now, inner.end)
        if inside:
            for value in operation.inputs + operation.outputs:
                self._keep(self._roots(value), now)
        return now + 1

    def _return(self, free: _Values) -> None:
        """Read the results at the end; `free` has those with a buffer outside."""
        for value in self.program.outputs:
            roots = self._roots(value)
            self._keep(roots, self.end)
            if value in free and roots and _is_reshaped(value, roots):
                self.free |= roots  # a view of a result, whose buffer is outside

    def _add_written(self) -> None:
        """Add the buffers of all written values, with their lifetimes."""
        for value, (writer, start) in self.written.items():
            if value in self.free:
                continue
            buffer = _buffer(value, writer, self.axes, saved=value in self.saved)
            end = self.last.get(value, start)
            self.buffers.append(dataclasses.replace(buffer, start=start, end=end))

    def _roots(self, value: TracedValue) -> _Values:
        return self.roots.get(value, frozenset())

    def _keep(self, roots: _Values, until: int) -> None:
        for root in roots:
            self.last[root] = until

    def _read(self, operation: Operation, now: int) -> None:
        """Extend the lifetimes of the buffers read by an operation until now."""
        from_memory = (
            bool(operation.bodies)
            or operation.primitive in _READS_MEMORY
            or _moves(operation, self.axes)
        )
        saves = operation.primitive == "stack_iterations" and not operation.params["reverse"]
        for value in operation.inputs:
            roots = self._roots(value)
            if from_memory and _is_fused(value, roots):
                # The result of fused operations is written here, to be read from memory.
                self.written[value] = (None, now)
                self._keep(roots, now)
                roots = frozenset([value])
                self.roots[value] = roots
            if saves:
                self.saved |= roots
            self._keep(roots, now)

    def _write(self, operation: Operation, now: int, inside: "Sequence[_Lifetimes]") -> None:
        """Record the results written by an operation; `inside` are the lifetimes of its bodies."""
        is_written = (
            bool(operation.bodies)
            or operation.primitive in _WRITTEN
            or _moves(operation, self.axes)
        )
        for i, value in enumerate(operation.outputs):
            operand = _returned_operand(operation, i)
            is_kept = operation.primitive in self.repeated and self.readers[value] > 1
            if operand is not None:
                self.roots[value] = self._roots(operand)
            elif is_written or is_kept:
                self.written[value] = (operation, _written_at(operation, i, now, inside))
                self.roots[value] = frozenset([value])
            else:
                self.roots[value] = frozenset().union(*map(self._roots, operation.inputs))

    def written_at(self, i: int) -> int:
        """Return the time of the write of a result or, for a view, of its buffer."""
        value = self.program.outputs[i]
        roots = self._roots(value)
        times = [self.written[root][1] for root in roots if root in self.written]
        if times and _is_view(value, roots):
            return times[0]
        return self.end

    def _converted(self) -> Iterator[Buffer]:
        """Yield the narrower copies made by XLA before loops.

        They are copies of arrays that a loop reads in a narrower dtype, whole or in slices.
        """
        lifetimes: dict[_Values, tuple[int, int, int]] = {}  # bytes, start, end
        ends = [*self.times, self.end][1:]
        for operation, now, after in zip(self.program.operations, self.times, ends, strict=True):
            if operation.primitive != "scan":
                continue
            if operation.params["length"] == operation.params["unroll"]:
                continue
            for i, value in enumerate(operation.inputs):
                before = value.kept or value.itemsize
                width = _read_width(operation, i, before)
                if width >= before:
                    continue
                source = self.roots.get(value, frozenset([value]))
                start = now
                if source in lifetimes:
                    _, start, _ = lifetimes[source]
                lifetimes[source] = (value.bytes(self.axes) // before * width, start, after)
        for size, start, end in lifetimes.values():
            yield Buffer("converted", "", (), size, False, start, end)


def _written_at(operation: Operation, i: int, now: int, inside: Sequence[_Lifetimes]) -> int:
    """Return the time of the write of result `i` of an operation; `now` is its start."""
    if operation.primitive in ("cond", "shard_map") and inside:  # both run their bodies once
        return min(inner.written_at(i) for inner in inside)
    return now


def _read_width(scan: Operation, i: int, width: int) -> int:
    """Return the bytes of an operand's element as read by a loop; `width` is in memory."""
    (body,) = scan.bodies
    inner = body.inputs[i]
    if inner.kept:
        return inner.kept
    is_slice = i >= scan.params["num_consts"] + scan.params["num_carry"]
    if not is_slice:
        return width
    widths = []
    for operation in body.operations:
        if inner not in operation.inputs:
            continue
        if operation.primitive != "convert_element_type":
            return width
        widths.append(operation.outputs[0].itemsize)
    return max(widths, default=width)


def _returned_operand(operation: Operation, i: int) -> TracedValue | None:
    """Return the operand returned unchanged as result `i` by some branch of a condition.

    The other branches overwrite it. None for other operations.
    """
    if operation.primitive != "cond":
        return None
    for body in operation.bodies:
        operands = operation.inputs[-len(body.inputs) :]
        for inner, operand in zip(body.inputs, operands, strict=False):
            if inner is body.outputs[i]:
                return operand
    return None


def _is_view(value: TracedValue, roots: _Values) -> bool:
    """Tell whether a value needs no buffer: it is a view of one, or can overwrite it."""
    (root, *rest) = roots
    if rest or root.itemsize != value.itemsize:
        return False
    return math.prod(root.shape) == math.prod(value.shape)


def _is_fused(value: TracedValue, roots: _Values) -> bool:
    """Tell whether a value is the result of fused operations on buffers, without its own."""
    return bool(roots) and roots != {value} and not _is_view(value, roots)


def _is_reshaped(value: TracedValue, roots: _Values) -> bool:
    """Tell whether a value is one buffer with other dimensions of size 1."""
    (root, *_) = roots
    return _is_view(value, roots) and _without_ones(root.shape) == _without_ones(value.shape)


def _without_ones(shape: Iterable[int]) -> list[int]:
    return [size for size in shape if size > 1]


def _moves(operation: Operation, axes: Mapping[str, int]) -> bool:
    """Tell whether an operation sends data between devices or memories.

    Its result needs a buffer then.
    """
    if operation.primitive == "device_put":
        pairs = zip(operation.inputs, operation.outputs, strict=True)
        return any(before.on_host != after.on_host for before, after in pairs)
    if operation.primitive != "sharding_constraint":
        return False
    value = operation.inputs[0]
    if value.dims is None:
        return False
    return value.bytes(axes) != operation.outputs[0].bytes(axes)


def _buffer(
    value: TracedValue,
    operation: Operation | None,
    axes: Mapping[str, int],
    *,
    saved: bool = False,
) -> Buffer:
    """Return the buffer of a written value, without its lifetime."""
    size = value.bytes(axes)
    kind = "value"
    if saved:
        kind = "saved"
    elif operation is not None:
        kind = _kind(value, operation, size, axes)
    return Buffer(kind, value.name, value.shape, size, value.on_host)


def _kind(value: TracedValue, operation: Operation, size: int, axes: Mapping[str, int]) -> str:
    """Return the kind of the buffer of a result; `size` is its bytes on one device."""
    if operation.primitive == "scan":
        stacks = operation.outputs[operation.params["num_carry"] :]
        if value not in stacks:
            return "value"
        return "stacked" if operation.params["reverse"] else "saved"
    if operation.primitive in ("all_gather", "sharding_constraint"):
        grows = size > operation.inputs[0].bytes(axes)
        return "gathered" if grows else "value"
    return "value"
