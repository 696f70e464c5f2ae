"""Parser of compiled programs as XLA's CPU, GPU and TPU compilers print them.

```python
program = parse(compiled.as_text())
```
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_MOVES = {
    "bitcast",
    "convert",
    "copy",
    "copy-done",
    "copy-start",
    "reduce-precision",
    "reshape",
    "transpose",
}
_MOVING_CALLS = re.compile(r'custom_call_target="(ConcatBitcast|AsyncCollective\w+)"')
_CALLS = ("fusion", "call", "async-start", "call-start")
_NO_OPERANDS = ("constant", "parameter", "iota")
_FORWARDS = ("opt-barrier", "async-done", "async-update", "call-done", "call-update")

_COMPUTATION = re.compile(r"(?P<entry>ENTRY\s+)?%?(?P<name>[\w.~-]+)\s*(?:\(.*)?\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?P<root>ROOT\s+)?%?(?P<name>[\w.~-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{[^{}]*?(?:S\((\d+)\))?\})?")
_HOST_SPACE = "5"
_CALLEES = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.~-]+)"
)
_CALLEE_LISTS = re.compile(r"\b(branch_computations|called_computations|calls)=\{([^}]*)\}")
_NOT_NAMES = re.compile(r"/\*.*?\*/|\{[^{}]*\}|\[[^\]]*\]")
_NAME = re.compile(r"[\w.~-]+")
_BITS = re.compile(r"[a-z]+(\d+)")
_TABLE_ROW = re.compile(r"(\d+) (?:\"(.*)\"|\{(.*)\})$")


class HloArray(NamedTuple):
    """Element type and dimensions of one array on one device, or in host memory for it."""

    dtype: str
    dims: tuple[int, ...]
    on_host: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without padding; types narrower than a byte are packed."""
        return (self.size * _bits(self.dtype) + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def _bits(dtype: str) -> int:
    """Return the width of an element; 0 for types without data, such as tokens."""
    if dtype == "pred":
        return 8
    found = _BITS.match(dtype)
    return int(found[1]) if found else 0


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its operands by name, and its attributes as text."""

    name: str
    opcode: str
    arrays: tuple[HloArray, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @property
    def is_move(self) -> bool:
        """True if the result has the first operand's values, in any place, layout or precision."""
        if self.opcode == "custom-call":
            return bool(_MOVING_CALLS.search(self.attributes))
        return self.opcode in _MOVES

    @property
    def is_kernel(self) -> bool:
        """True for a Pallas kernel of a TPU."""
        return self.opcode == "custom-call" and "tpu_custom_call" in self.attributes

    @property
    def index(self) -> int:
        """Tuple index of a `get-tuple-element`."""
        return int(self.attribute(r"\bindex=(\d+)"))

    @property
    def op_name(self) -> str:
        """Name of the operation in JAX; may be empty."""
        return self.attribute(r'op_name="((?:[^"\\]|\\.)*)"').replace("\\'", "'")

    def attribute(self, pattern: str) -> str:
        """Return the first group of a regular expression in the attributes, or an empty string."""
        found = re.search(pattern, self.attributes)
        if found is None:
            return ""
        return found[1]

    @property
    def estimated_cycles(self) -> int:
        """The compiler's estimate of cycles on a TPU; 0 without one.

        libtpu writes 2⁶³ − 1 for some small fusions, as no estimate.
        """
        cycles = int(self.attribute(r'"estimated_cycles":"(\d+)"') or 0)
        if cycles >= 2**63 - 1:
            return 0
        return cycles

    def callees(self) -> list[tuple[str, str]]:
        """Return (role, computation) for each computation named by this instruction.

        Roles are as XLA spells them.
        """
        found = _CALLEES.findall(self.attributes)
        for role, names in _CALLEE_LISTS.findall(self.attributes):
            for name in _NAME.findall(names):
                found.append((role, name))
        return found


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in printed order, and the name of the root."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    @functools.cached_property
    def parameters(self) -> dict[int, str]:
        """Number → name of the parameter."""
        parameters = {}
        for instruction in self.instructions.values():
            if instruction.opcode == "parameter":
                parameters[int(instruction.literal)] = instruction.name
        return parameters

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Instruction → its users, each with the position of the operand."""
        users = collections.defaultdict(list)
        for instruction in self.instructions.values():
            for position, operand in enumerate(instruction.operands):
                users[operand].append((instruction, position))
        return users


class HloValue(NamedTuple):
    """Result of an instruction, or one element of its tuple."""

    computation: str
    name: str
    element: int | None = None


@dataclasses.dataclass(frozen=True)
class HloModule:
    """Parsed module.

    Attributes:
        aliases: Output → entry parameter whose buffer it overwrites, both by number.
        tables: Sections that some versions print above the computations, such as `FileNames`: id →
            text.
    """

    computations: dict[str, Computation]
    entry: str
    aliases: dict[int, int]
    tables: dict[str, dict[int, str]]
    partitions: int
    replicas: int

    @functools.cached_property
    def callers(self) -> dict[str, list[tuple[str, Instruction, str]]]:
        """Computation → (calling computation, calling instruction, role) for each call."""
        callers = collections.defaultdict(list)
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                for role, callee in instruction.callees():
                    callers[callee].append((computation.name, instruction, role))
        return callers

    def kernel_of(self, computation: str, instruction: Instruction) -> HloValue | None:
        """Return a Pallas kernel: the instruction itself, or one inside of a fusion.

        XLA:TPU fuses kernels with the writing of their results into stacks.
        """
        if instruction.is_kernel:
            return HloValue(computation, instruction.name)
        if instruction.opcode != "fusion":
            return None
        for _, callee in instruction.callees():
            for inner in self.computations[callee].instructions.values():
                if inner.is_kernel:
                    return HloValue(callee, inner.name)
        return None

    def at(self, value: HloValue) -> Instruction:
        """Return the instruction of a value."""
        return self.computations[value.computation].instructions[value.name]

    def frames(self, instruction: Instruction) -> list[tuple[str, int]]:
        """Return the (file, line) pairs of an instruction, innermost first; empty if unknown."""
        frames = self.tables.get("StackFrames", {})
        stack = []
        number = int(instruction.attribute(r"stack_frame_id=(\d+)") or 0)
        # Parents' ids are printed one too high: the outermost frame, number 1, is its own parent.
        shift = 1 if _field(frames.get(1, ""), "parent_frame_id") == 1 else 0
        while number in frames:
            frame = frames[number]
            location = self.tables["FileLocations"].get(_field(frame, "file_location_id"), "")
            file = self.tables["FileNames"].get(_field(location, "file_name_id"), "")
            stack.append((file, _field(location, "line")))
            parent = _field(frame, "parent_frame_id") - shift
            if parent >= number:
                break
            number = parent
        return stack

    def producer(self, value: HloValue) -> HloValue:
        """Return the origin of a value, through tuples, calls, fusions and unchanged loop state."""
        for _ in range(1000):
            before = self._source(value)
            if before is None:
                break
            value = before
        return value

    def _source(self, value: HloValue) -> HloValue | None:
        """Return the value forwarded unchanged as this one; None if its instruction computes it."""
        computation, _, index = value
        instruction = self.at(value)
        opcode = instruction.opcode
        operands = instruction.operands
        if opcode == "get-tuple-element":
            return HloValue(computation, operands[0], instruction.index)
        if opcode in _FORWARDS:
            return HloValue(computation, operands[0], index)
        if opcode in _CALLS:
            for _, callee in self._callees(instruction):
                return HloValue(callee, self.computations[callee].root, index)
        elif opcode == "parameter" and computation != self.entry:
            return self._argument(value, int(instruction.literal))
        elif opcode == "tuple" and index is not None:
            return HloValue(computation, operands[index])
        elif opcode == "while" and index is not None and self._is_invariant(instruction, index):
            return HloValue(computation, operands[0], index)
        return None

    def settled(self, value: HloValue) -> HloValue:
        """Return the origin of a value, through moves too."""
        value = self.producer(value)
        instruction = self.at(value)
        while instruction.is_move:
            value = self.producer(HloValue(value.computation, instruction.operands[0]))
            instruction = self.at(value)
        return value

    def _argument(self, value: HloValue, number: int) -> HloValue | None:
        """Return the caller's operand for a parameter; None without one or if a loop changes it."""
        callers = self.callers[value.computation]
        if not callers:
            return None
        caller, call, role = callers[0]
        if call.opcode == "while":
            if value.element is None or not self._is_invariant(call, value.element):
                return None
            return HloValue(caller, call.operands[0], value.element)
        if call.opcode == "conditional":
            branches = [name for _, name in call.callees()]
            operand = call.operands[1 + branches.index(value.computation)]
            return HloValue(caller, operand, value.element)
        if role in ("calls", "to_apply", "called_computations") and call.opcode in _CALLS:
            operands = self._operands(caller, call)
            return HloValue(caller, operands[number], value.element)
        return None

    def _operands(self, computation: str, call: Instruction) -> tuple[str, ...]:
        """Return the operands of a call; an asynchronous one may get them after its start."""
        users = self.computations[computation].users[call.name]
        if call.operands or not users:
            return call.operands
        later, _ = users[0]
        return later.operands[1:]

    def _is_invariant(self, loop: Instruction, index: int) -> bool:
        """Tell whether a loop forwards this element of its tuple unchanged."""
        body = self.computations[dict(loop.callees())["body"]]
        root = body.instructions[body.root]
        if root.opcode != "tuple":
            return False
        source = body.instructions[root.operands[index]]
        if source.opcode != "get-tuple-element" or source.operands[0] != body.parameters[0]:
            return False
        return source.index == index

    def uses(
        self, value: HloValue, *, moves: bool = False
    ) -> Iterator[tuple[str, Instruction | None, int]]:
        """Yield (computation, user, operand's position) for every use of a value.

        For a result of the program (entry, None, output's number). Uses are found through tuples,
        calls, fusions and loops, and with `moves` through moves too.
        """
        seen: set[HloValue] = set()
        todo = [value]
        while todo:
            here = todo.pop()
            if here in seen:
                continue
            seen.add(here)
            computation = self.computations[here.computation]
            if computation.root == here.name:
                if computation.name == self.entry:
                    yield self.entry, None, here.element or 0
                todo += self._returned(here)
            for user, position in computation.users[here.name]:
                if moves and user.is_move:
                    todo.append(HloValue(computation.name, user.name))
                    continue
                following = self._forwarded(here, user, position)
                todo += following
                if not following and user.opcode != "get-tuple-element":
                    yield computation.name, user, position

    def _returned(self, root: HloValue) -> Iterator[HloValue]:
        """Yield the callers' results, and a loop's next input, with the value of a root."""
        name, _, element = root
        for caller, call, role in self.callers[name]:
            is_result = role in ("calls", "to_apply", "body") and call.opcode in (*_CALLS, "while")
            if is_result or call.opcode == "conditional":
                yield HloValue(caller, call.name, element)
            if role == "body":  # of the next iteration
                yield HloValue(name, self.computations[name].parameters[0], element)

    def _forwarded(self, value: HloValue, user: Instruction, position: int) -> list[HloValue]:
        """Return the same value as the result of a user, or as parameters of its callees."""
        computation, _, index = value
        if user.opcode == "get-tuple-element":
            if user.index != index:
                return []
            return [HloValue(computation, user.name)]
        if user.opcode == "tuple":
            if index is not None:
                return []
            return [HloValue(computation, user.name, position)]
        if user.opcode in _FORWARDS:
            if position:
                return []
            return [HloValue(computation, user.name, index)]
        return self._passed(user, position, index)

    def _passed(self, user: Instruction, position: int, element: int | None) -> list[HloValue]:
        """Return the callees' parameters for an operand."""
        callees = self._callees(user)
        if user.opcode == "conditional":
            if not position:  # the predicate
                return []
            # Each branch has one operand.
            callees = callees[position - 1 : position]
            position = 0
        elif user.opcode == "while":
            callees = [(role, name) for role, name in callees if role == "body"]
        elif user.opcode not in _CALLS:
            return []
        found = []
        for _, name in callees:
            parameter = self.computations[name].parameters[position]
            found.append(HloValue(name, parameter, element))
        return found

    def _callees(self, user: Instruction) -> list[tuple[str, str]]:
        """Return (role, computation) for callees in the program."""
        return [(role, name) for role, name in user.callees() if name in self.computations]


def _field(text: str, name: str) -> int:
    """Return the number of a field in a row of a table; 0 without it."""
    found = re.search(rf"\b{name}=(\d+)", text)
    if found is None:
        return 0
    return int(found[1])


def parse(text: str) -> HloModule:
    """Parse `compiled.as_text()`.

    Example:
        >>> text = "HloModule m\\n\\nENTRY main {\\n  ROOT %x = f32[2,3]{1,0} parameter(0)\\n}\\n"
        >>> program = parse(text)
        >>> program.entry, program.at(HloValue("main", "x")).arrays[0].bytes
        ('main', 24)
    """
    lines = text.splitlines()
    header = lines[0] if lines else ""
    parser = _Parser()
    if header.startswith("HloModule"):
        lines = lines[1:]
    for line in lines:
        parser.read(line)
    computations = parser.computations
    return HloModule(
        computations,
        parser.entry or next(reversed(computations), ""),
        _aliases(header),
        parser.tables,
        _field(header, "num_partitions") or 1,
        _field(header, "replica_count") or 1,
    )


def _aliases(header: str) -> dict[int, int]:
    """Return output → overwritten parameter, from a module's first line."""
    aliases: dict[int, int] = {}
    found = re.search(r"input_output_alias=\{(.*?)\}, \w+=", header)
    if found is None:
        return aliases
    for output, parameter in re.findall(r"\{(\d*)\}: \((\d+)", found[1]):
        aliases[int(output or 0)] = int(parameter)
    return aliases


class _Parser:
    """Reader of the lines of a module after its header, one by one."""

    def __init__(self) -> None:
        self.computations: dict[str, Computation] = {}
        self.tables: dict[str, dict[int, str]] = {}
        self.entry = ""
        self._table: dict[int, str] = {}
        self._name = ""
        self._root = ""
        self._body: dict[str, Instruction] | None = None
        self._last = ""
        self._written = ""

    def read(self, line: str) -> None:
        """Read the next line."""
        if self._body is None:
            self._read_outside(line)
        elif line.startswith("}") and not line.startswith("}}"):
            root = self._root or next(reversed(self._body), "")
            self.computations[self._name] = Computation(self._name, self._body, root)
            self._body = None
        else:
            instruction = self._read_instruction(line)
            self._body[instruction.name] = instruction

    def _read_outside(self, line: str) -> None:
        """Read a line between computations: the start of one, or a part of a table."""
        computation = _COMPUTATION.match(line)
        if computation:
            self._name = computation["name"]
            self._root = ""
            self._body = {}
            if computation["entry"]:
                self.entry = self._name
            return
        row = _TABLE_ROW.match(line)
        if row:
            quoted, braced = row[2], row[3]
            self._table[int(row[1])] = braced if quoted is None else quoted
        elif line.isalpha():
            self._table = self.tables.setdefault(line, {})

    def _read_instruction(self, line: str) -> Instruction:
        """Read an instruction, or a further line of the last one."""
        found = _INSTRUCTION.match(line)
        if found:
            self._last = found["name"]
            self._written = line[found.end() :]
            if found["root"]:
                self._root = self._last
        else:
            self._written += line  # the metadata of a Pallas kernel may take several lines
        return _instruction(self._last, self._written)


def _instruction(name: str, text: str) -> Instruction:
    """Parse an instruction from the text after its name: `f32[2]{0} add(%a, %b), metadata={…}`."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    shape = text[:end]
    rest = text[end:].lstrip()
    start = rest.index("(")
    stop = _closing(rest, start)
    opcode = rest[:start]
    literal = rest[start + 1 : stop - 1]
    operands: tuple[str, ...] = ()
    if opcode not in _NO_OPERANDS and literal:
        operands = _operand_names(literal)
    return Instruction(name, opcode, _arrays(shape), operands, literal, rest[stop:])


def _operand_names(text: str) -> tuple[str, ...]:
    """Return the names in a list of operands, with or without types before them."""
    bare = _NOT_NAMES.sub("", text)
    while "(" in bare:  # types of nested tuples
        bare = re.sub(r"\([^()]*\)", "", bare)
    return tuple(part.split()[-1].lstrip("%") for part in bare.split(","))


def _arrays(shape: str) -> tuple[HloArray, ...]:
    """Return the arrays of a shape, or of all elements of a tuple's shape."""
    arrays = []
    for dtype, dims, space in _ARRAY.findall(shape):
        sizes = []
        for size in dims.split(","):
            if size:
                sizes.append(int(size.lstrip("<=")))  # a dynamic size is printed with its bound
        arrays.append(HloArray(dtype, tuple(sizes), space == _HOST_SPACE))
    return tuple(arrays)


def _closing(text: str, start: int) -> int:
    """Return the position after the closing parenthesis for the one at `start`."""
    depth = 0
    for found in re.finditer(r"[()]", text[start:]):
        if found[0] == "(":
            depth += 1
        else:
            depth -= 1
        if depth == 0:
            return start + found.end()
    return len(text)
