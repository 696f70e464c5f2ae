"""Parser of compiled programs as XLA's CPU, GPU and TPU compilers print them: `parse(compiled.as_text())`."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_MOVES = {"bitcast", "convert", "copy", "copy-done", "copy-start", "reduce-precision", "reshape", "transpose"}
_MOVING_CALLS = re.compile(r'custom_call_target="(ConcatBitcast|AsyncCollective\w+)"')
_CALLS = ("fusion", "call", "async-start", "call-start")
_FORWARDS = ("opt-barrier", "async-done", "async-update", "call-done", "call-update")

_COMPUTATION = re.compile(r"(?P<entry>ENTRY\s+)?%?(?P<name>[\w.~-]+)\s*(?:\(.*)?\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?P<root>ROOT\s+)?%?(?P<name>[\w.~-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{[^{}]*?(?:S\((\d+)\))?\})?")
_HOST_SPACE = "5"
_CALLEES = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.~-]+)")
_CALLEE_LISTS = re.compile(r"\b(branch_computations|called_computations|calls)=\{([^}]*)\}")
_NOT_NAMES = re.compile(r"/\*.*?\*/|\{[^{}]*\}|\[[^\]]*\]")
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
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return -(-self.size * (8 if self.dtype == "pred" else int(bits[1]) if bits else 0) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


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
        """True if the result has the values of the first operand, in another place, layout or precision."""
        return self.opcode in _MOVES or (self.opcode == "custom-call" and bool(_MOVING_CALLS.search(self.attributes)))

    @property
    def index(self) -> int:
        """Element of a tuple that a `get-tuple-element` returns."""
        return int(self.attribute(r"\bindex=(\d+)"))

    @property
    def op_name(self) -> str:
        """Name of the operation in JAX; may be empty."""
        return self.attribute(r'op_name="((?:[^"\\]|\\.)*)"').replace("\\'", "'")

    def attribute(self, pattern: str) -> str:
        """Return the first group of a regular expression in the attributes, or an empty string."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    def callees(self) -> list[tuple[str, str]]:
        """Return (role, computation) for each computation that this instruction names; roles as XLA spells them."""
        found = _CALLEES.findall(self.attributes)
        for role, names in _CALLEE_LISTS.findall(self.attributes):
            found += [(role, name) for name in re.findall(r"[\w.~-]+", names)]
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
        return {int(i.literal): i.name for i in self.instructions.values() if i.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Instruction → its users, each with the position of the operand."""
        users = collections.defaultdict(list)
        for instruction in self.instructions.values():
            for position, operand in enumerate(instruction.operands):
                users[operand].append((instruction, position))
        return users


class HloValue(NamedTuple):
    """Result of an instruction, or one element of a tuple that it returns."""

    computation: str
    name: str
    element: int | None = None


@dataclasses.dataclass(frozen=True)
class HloModule:
    """Parsed module.

    Attributes:
        aliases: Output → entry parameter whose buffer it overwrites, both by number.
        tables: Sections that some versions print above the computations, such as `FileNames`: id → text.
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

    def at(self, value: HloValue) -> Instruction:
        """Return the instruction of a value."""
        return self.computations[value.computation].instructions[value.name]

    def frames(self, instruction: Instruction) -> list[tuple[str, int]]:
        """Return the (file, line) pairs of an instruction, innermost first; empty if none are recorded."""
        frames, stack = self.tables.get("StackFrames", {}), []
        number = int(instruction.attribute(r"stack_frame_id=(\d+)") or 0)
        # Parents' ids are printed one too high: the outermost frame, number 1, is its own parent.
        shift = 1 if _field(frames.get(1, ""), "parent_frame_id") == 1 else 0
        while number in frames:
            location = self.tables["FileLocations"].get(_field(frames[number], "file_location_id"), "")
            file = self.tables["FileNames"].get(_field(location, "file_name_id"), "")
            stack.append((file, _field(location, "line")))
            parent = _field(frames[number], "parent_frame_id") - shift
            number = parent if parent < number else 0
        return stack

    def producer(self, value: HloValue) -> HloValue:
        """Return the origin of a value, through tuples, calls, fusions and loops that forward it unchanged."""
        for _ in range(1000):
            instruction, (computation, _, index) = self.at(value), value
            opcode, operands = instruction.opcode, instruction.operands
            before: HloValue | None = None
            if opcode == "get-tuple-element":
                before = HloValue(computation, operands[0], instruction.index)
            elif opcode == "tuple" and index is not None:
                before = HloValue(computation, operands[index])
            elif opcode in _FORWARDS:
                before = HloValue(computation, operands[0], index)
            elif opcode in _CALLS:
                callee = next((name for _, name in instruction.callees() if name in self.computations), None)
                before = HloValue(callee, self.computations[callee].root, index) if callee else None
            elif opcode == "while" and index is not None and self._is_invariant(instruction, index):
                before = HloValue(computation, operands[0], index)
            elif opcode == "parameter" and computation != self.entry:
                before = self._argument(value, int(instruction.literal))
            if before is None:
                break
            value = before
        return value

    def settled(self, value: HloValue) -> HloValue:
        """Return the origin of a value, through moves too."""
        value = self.producer(value)
        while (instruction := self.at(value)).is_move:
            value = self.producer(HloValue(value.computation, instruction.operands[0]))
        return value

    def _argument(self, value: HloValue, number: int) -> HloValue | None:
        """Return the operand of the calling instruction that a parameter stands for."""
        for caller, call, role in self.callers[value.computation][:1]:
            if call.opcode == "while":
                if value.element is not None and self._is_invariant(call, value.element):
                    return HloValue(caller, call.operands[0], value.element)
            elif call.opcode == "conditional":
                branches = [name for _, name in call.callees()]
                return HloValue(caller, call.operands[1 + branches.index(value.computation)], value.element)
            elif role in ("calls", "to_apply", "called_computations") and call.opcode in _CALLS:
                later = [user for user, _ in self.computations[caller].users[call.name] if not call.operands]
                operands = later[0].operands[1:] if later else call.operands  # those of an asynchronous call may follow
                return HloValue(caller, operands[number], value.element)
        return None

    def _is_invariant(self, loop: Instruction, index: int) -> bool:
        """Tell whether a loop forwards this element of its tuple unchanged."""
        body = self.computations[dict(loop.callees())["body"]]
        root = body.instructions[body.root]
        if root.opcode != "tuple":
            return False
        source = body.instructions[root.operands[index]]
        is_element = source.opcode == "get-tuple-element" and source.operands[0] == body.parameters[0]
        return is_element and source.index == index

    def uses(self, value: HloValue, *, moves: bool = False) -> Iterator[tuple[str, Instruction | None, int]]:
        """Yield (computation, user, operand's position) for every use of a value, or (entry, None, output's number).

        Uses are found through tuples, calls, fusions and loops, and with `moves` through moves too.
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
                for caller, call, role in self.callers[computation.name]:
                    returns = role in ("calls", "to_apply", "body") and call.opcode in (*_CALLS, "while")
                    if returns or call.opcode == "conditional":
                        todo.append(HloValue(caller, call.name, here.element))
                    if role == "body":
                        todo.append(HloValue(computation.name, computation.parameters[0], here.element))
            for user, position in computation.users[here.name]:
                moved = [HloValue(computation.name, user.name)] if moves and user.is_move else []
                following = moved or self._forwarded(here, user, position)
                todo += following
                if not following and user.opcode != "get-tuple-element":
                    yield computation.name, user, position

    def _forwarded(self, value: HloValue, user: Instruction, position: int) -> list[HloValue]:
        """Return the same value as the result of a user, or as the parameters of what that calls."""
        computation, _, index = value
        if user.opcode == "get-tuple-element":
            return [HloValue(computation, user.name)] if user.index == index else []
        if user.opcode == "tuple":
            return [HloValue(computation, user.name, position)] if index is None else []
        if user.opcode in _FORWARDS:
            return [] if position else [HloValue(computation, user.name, index)]
        callees = [(role, name) for role, name in user.callees() if name in self.computations]
        if user.opcode == "while":
            callees = [(role, name) for role, name in callees if role == "body"]
        elif user.opcode == "conditional":
            callees, position = callees[position - 1 : position] if position else [], 0
        elif user.opcode not in _CALLS:
            return []
        return [HloValue(name, self.computations[name].parameters[position], index) for _, name in callees]


def _field(text: str, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", text)
    return int(found[1]) if found else 0


def parse(text: str) -> HloModule:
    """Parse `compiled.as_text()`.

    Example:
        >>> program = parse("HloModule m\\n\\nENTRY main {\\n  ROOT %x = f32[2,3]{1,0} parameter(0)\\n}\\n")
        >>> program.entry, program.at(HloValue("main", "x")).arrays[0].bytes
        ('main', 24)
    """
    lines = text.splitlines()
    header = lines[0] if lines else ""
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {}
    entry, name, root, last, written = "", "", "", "", ""
    table: dict[int, str] = {}
    body: dict[str, Instruction] | None = None
    for line in lines[1:] if header.startswith("HloModule") else lines:
        if body is None:
            if found := _COMPUTATION.match(line):
                name, root, body = found["name"], "", {}
                entry = name if found["entry"] else entry
            elif row := _TABLE_ROW.match(line):
                table[int(row[1])] = row[2] if row[2] is not None else row[3]
            elif line.isalpha():
                table = tables.setdefault(line, {})
        elif line.startswith("}") and not line.startswith("}}"):
            computations[name] = Computation(name, body, root or next(reversed(body), ""))
            body = None
        else:
            if found := _INSTRUCTION.match(line):
                last, written = found["name"], line[found.end() :]
                root = last if found["root"] else root
            else:
                written += line  # the metadata of a Pallas kernel may take several lines
            body[last] = _instruction(last, written)
    aliased = re.search(r"input_output_alias=\{(.*?)\}, \w+=", header)
    pairs = re.findall(r"\{(\d*)\}: \((\d+)", aliased[1]) if aliased else []
    return HloModule(
        computations,
        entry or next(reversed(computations), ""),
        {int(output or 0): int(parameter) for output, parameter in pairs},
        tables,
        _field(header, "num_partitions") or 1,
        _field(header, "replica_count") or 1,
    )


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    start = rest.index("(")
    stop = _closing(rest, start)
    opcode, literal = rest[:start], rest[start + 1 : stop - 1]
    operands: tuple[str, ...] = ()
    if opcode not in ("constant", "parameter", "iota") and literal:
        bare = _NOT_NAMES.sub("", literal)
        while "(" in bare:
            bare = re.sub(r"\([^()]*\)", "", bare)
        operands = tuple(part.split()[-1].lstrip("%") for part in bare.split(","))
    arrays = tuple(
        HloArray(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n), space == _HOST_SPACE)
        for dtype, dims, space in _ARRAY.findall(shape)
    )
    return Instruction(name, opcode, arrays, operands, literal, rest[stop:])


def _closing(text: str, start: int) -> int:
    """Return the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.finditer(r"[()]", text[start:]):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return start + found.end()
    return len(text)
