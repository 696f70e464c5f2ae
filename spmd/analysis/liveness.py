"""Which arrays of a traced step are in memory at the same time, without compiling it.

XLA fuses element-wise operations into those around them, so most values of a program are never written to memory. What
is written: results of products, collectives and loops, and what goes into a product or over the edge of a loop. A
buffer lives from the operation that writes it to the last that reads it, directly or through what was fused.

All buffers of a program lie in one heap, whose holes count: `heap_bytes` packs them as XLA does.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from spmd.analysis.jaxpr import Operation, TracedProgram, TracedValue

READS_MEMORY = ("dot_general", "ragged_dot", "pallas_call", "scatter-add", "scatter", "gather", "sort", "top_k")
"""Operations that read their operands from memory, so that nothing is fused into them."""

WRITTEN = (*READS_MEMORY, "concatenate", "cumsum", "ppermute")
"""Operations whose results are written to memory, besides loops and what moves data between devices."""

EXPENSIVE = ("exp", "exp2", "log", "log1p", "tanh", "logistic", "erf", "div", "pow", "rsqrt", "sqrt", "sin", "cos")
"""Element-wise operations that XLA:CPU does not repeat: read more than once, their results are written to memory."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One array in memory, and when.

    Attributes:
        kind: `"saved"` for what a loop writes a slice of in each turn, `"stacked"` for the same of a loop that runs
            backwards, `"gathered"` for what a collective has made larger, `"converted"` for a stack that is converted
            to a narrower dtype before its loop, else `"value"`.
        name: What the model marked it as; may be empty.
        shape: Its global shape.
        bytes: On one device.
        on_host: Whether those are bytes of the host.
        start: The moment at which it is written.
        end: The moment at which it is last read.
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
    """Every buffer of a program but its arguments, with the moments of its life.

    Args:
        program: Traced and propagated.
        axes: Axis → size of the mesh.
        aliased: Results that are written into donated arguments, and so need no buffer of their own.
        platform: Whose compiler it is.
    """
    kept = EXPENSIVE if platform == "cpu" else ()
    return _Lives(program, axes, frozenset(map(id, aliased)), kept, start=0).buffers


def saved_activations(program: TracedProgram, axes: Mapping[str, int]) -> list[Buffer]:
    """What the loops of a program save for others that run backwards, wherever it is used."""
    saved = []
    for operation in program.operations:
        if operation.primitive in ("scan", "stack_turns") and not operation.params["reverse"]:
            stacks = operation.outputs[operation.params.get("num_carry", 0) :]
            saved += [_buffer(value, operation, axes, saved=True) for value in stacks]
        for body in operation.bodies:
            saved += saved_activations(body, axes)
    return saved


def peak_buffers(buffers: Sequence[Buffer]) -> list[Buffer]:
    """The buffers of the moment at which the most bytes of the device are in use."""
    starts = sorted({buffer.start for buffer in buffers})
    moments = ([b for b in buffers if b.start <= start <= b.end] for start in starts)
    return max(moments, key=lambda live: sum(b.bytes for b in live if not b.on_host), default=[])


def heap_bytes(buffers: Iterable[Buffer]) -> int:
    """The size of a heap that holds all buffers, each at one place for as long as it lives.

    XLA places one buffer after the other into the smallest hole that is free for its whole life: once the longest-lived
    first, once the largest first, and it takes the better of both.
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


class _Lives:
    """The buffers of a program and of those inside it; `end` is the moment after its last operation."""

    def __init__(
        self, program: TracedProgram, axes: Mapping[str, int], free: frozenset[int], kept: Sequence[str], start: int
    ) -> None:
        self.program, self.axes, self.kept = program, axes, kept
        self.free = free | {id(value) for value in program.inputs}
        self.roots: dict[int, frozenset[TracedValue]] = {id(value): frozenset([value]) for value in program.inputs}
        self.written: dict[int, tuple[TracedValue, Operation | None, int]] = {}
        self.last: dict[int, int] = {}
        self.saved: set[int] = set()
        self.buffers: list[Buffer] = []
        self.readers = collections.Counter(id(value) for o in program.operations for value in set(o.inputs))
        self.moments: list[int] = []
        now, self.end = start, start
        for operation in program.operations:
            self.moments.append(now)
            self._read(operation, now)
            inside = [_Lives(body, axes, frozenset(map(id, body.outputs)), kept, now + 1) for body in operation.bodies]
            self._write(operation, now, inside)
            for inner in inside:
                self.buffers += inner.buffers
                now = max(now, inner.end)
            for value in (*operation.inputs, *operation.outputs):
                for root in self.roots.get(id(value), ()) if operation.bodies else ():
                    self.last[id(root)] = max(now, self.last.get(id(root), 0))
            now += 1
        self.end = now
        for value in program.outputs:
            known = self.roots.get(id(value), frozenset())
            self.last.update((id(root), now) for root in known)
            if id(value) in free and known and _is_reshaped(value, known):
                self.free |= set(map(id, known))  # another form of a result, which has its buffer outside
        self.buffers += [
            dataclasses.replace(
                _buffer(value, operation, axes, saved=key in self.saved), start=when, end=self.last.get(key, when)
            )
            for key, (value, operation, when) in self.written.items()
            if key not in self.free
        ]
        self.buffers += self._converted()

    def _read(self, operation: Operation, now: int) -> None:
        for value in operation.inputs:
            known = self.roots.get(id(value), frozenset())
            reads = operation.bodies or operation.primitive in READS_MEMORY or _moves(operation, self.axes)
            if reads and known and known != {value} and not _is_view(value, known):
                self.written[id(value)] = (value, None, now)  # what was fused so far is written, to be read here
                self.last.update((id(root), now) for root in known)
                self.roots[id(value)] = known = frozenset([value])
            if operation.primitive == "stack_turns" and not operation.params["reverse"]:
                self.saved.update(map(id, known))
            self.last.update((id(root), now) for root in known)

    def _write(self, operation: Operation, now: int, inside: "Sequence[_Lives]") -> None:
        for i, value in enumerate(operation.outputs):
            repeated = operation.primitive in self.kept and self.readers[id(value)] > 1
            if operation.primitive == "cond" and (given := _given_back(operation, i)):
                self.roots[id(value)] = self.roots.get(id(given), frozenset())  # what a branch returns as it was given
            elif operation.bodies or operation.primitive in WRITTEN or repeated or _moves(operation, self.axes):
                once = operation.primitive in ("cond", "shard_map")
                when = min(inner.written_at(i) for inner in inside) if once and inside else now
                self.written[id(value)] = (value, operation, when)
                self.roots[id(value)] = frozenset([value])
            else:
                sources = (self.roots.get(id(source), frozenset()) for source in operation.inputs)
                self.roots[id(value)] = frozenset().union(*sources)

    def written_at(self, i: int) -> int:
        """The moment at which a result is written, alone or before it gets its final form."""
        value = self.program.outputs[i]
        roots = self.roots.get(id(value), frozenset())
        moments = [self.written[id(root)][2] for root in roots if id(root) in self.written]
        return moments[0] if roots and moments and _is_view(value, roots) else self.end

    def _converted(self) -> Iterator[Buffer]:
        """What loops read in a narrower dtype than it has, in slices or whole: XLA converts it before them."""
        lives: dict[frozenset[int], tuple[int, int, int]] = {}
        for operation, now, after in zip(
            self.program.operations, self.moments, [*self.moments, self.end][1:], strict=True
        ):
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
                    source = frozenset(id(root) for root in self.roots.get(id(value), [value]))
                    size = value.bytes(self.axes) // before * width
                    lives[source] = (size, lives.get(source, (0, now, 0))[1], after)
        for size, start, end in lives.values():
            yield Buffer("converted", "", (), size, False, start, end)


def _given_back(condition: Operation, i: int) -> TracedValue | None:
    """The operand that some branch returns as a result, unchanged: then the others write theirs over it."""
    for body in condition.bodies:
        operands = dict(zip(map(id, body.inputs), condition.inputs[-len(body.inputs) :], strict=False))
        if given := operands.get(id(body.outputs[i])):
            return given
    return None


def _is_view(value: TracedValue, roots: frozenset[TracedValue]) -> bool:
    """Whether a value is one buffer in another form, or one that is written over it: it needs none of its own."""
    (root, *rest) = roots
    return not rest and root.itemsize == value.itemsize and math.prod(root.shape) == math.prod(value.shape)


def _is_reshaped(value: TracedValue, roots: frozenset[TracedValue]) -> bool:
    """Whether a value is one buffer with other dimensions of size 1."""
    (root, *_) = roots
    return _is_view(value, roots) and [n for n in root.shape if n > 1] == [n for n in value.shape if n > 1]


def _moves(operation: Operation, axes: Mapping[str, int]) -> bool:
    """Whether an operation sends data between devices or memories, which needs a buffer for the result."""
    if operation.primitive == "device_put":
        return any(a.on_host != b.on_host for a, b in zip(operation.inputs, operation.outputs, strict=True))
    if operation.primitive != "sharding_constraint":
        return False
    value, output = operation.inputs[0], operation.outputs[0]
    return value.dims is not None and value.bytes(axes) != output.bytes(axes)


def _buffer(value: TracedValue, operation: Operation | None, axes: Mapping[str, int], *, saved: bool = False) -> Buffer:
    kind = "value"
    if saved:
        kind = "saved"
    elif operation is not None and operation.primitive == "scan":
        if value in operation.outputs[operation.params["num_carry"] :]:
            kind = "stacked" if operation.params["reverse"] else "saved"
    elif operation is not None and operation.primitive == "sharding_constraint":
        kind = "gathered" if value.bytes(axes) > operation.inputs[0].bytes(axes) else "value"
    return Buffer(kind, value.name, value.shape, value.bytes(axes), value.on_host)
