"""Compiled programs as XLA prints them: instructions, who calls whom, loop lengths, replica groups, where data goes.

`parse(compiled.as_text())` reads what CPU, GPU and TPU compilers of XLA write. Nothing here knows of meshes.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_MOVES = {"bitcast", "convert", "copy", "copy-done", "copy-start", "reduce-precision", "reshape", "transpose"}
_MOVING_CALLS = re.compile(r'custom_call_target="(ConcatBitcast|AsyncCollective\w+)"')

_COMPUTATION = re.compile(r"(?P<entry>ENTRY\s+)?%?(?P<name>[\w.~-]+)\s*(?:\(.*)?\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?P<root>ROOT\s+)?%?(?P<name>[\w.~-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_CALLEES = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.~-]+)")
_CALLEE_LISTS = re.compile(r"\b(branch_computations|called_computations|calls)=\{([^}]*)\}")
_NOT_NAMES = re.compile(r"/\*.*?\*/|\{[^{}]*\}|\[[^\]]*\]")
_TABLE_ROW = re.compile(r"(\d+) (?:\"(.*)\"|\{(.*)\})$")


_CALLS = ("fusion", "call", "async-start")


class HloArray(NamedTuple):
    """Element type and dimensions of one array, as one device holds it."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
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
        """Whether the result has the values of the first operand, in another place, layout or precision."""
        return self.opcode in _MOVES or (self.opcode == "custom-call" and bool(_MOVING_CALLS.search(self.attributes)))

    def attribute(self, pattern: str) -> str:
        """The first group of a regular expression in the attributes, or nothing."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    def callees(self) -> list[tuple[str, str]]:
        """(role, computation) for each computation that this instruction names; roles as XLA spells them."""
        found = _CALLEES.findall(self.attributes)
        for role, names in _CALLEE_LISTS.findall(self.attributes):
            found += [(role, name) for name in re.findall(r"[\w.~-]+", names)]
        return found


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order they are written; the last of them, or that marked so, is the root."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    @functools.cached_property
    def parameters(self) -> dict[int, str]:
        """Number → name of the parameter."""
        return {int(i.literal): i.name for i in self.instructions.values() if i.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Instruction → who uses it, and as which operand."""
        users: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for position, operand in enumerate(instruction.operands):
                users.setdefault(operand, []).append((instruction, position))
        return users


class HloValue(NamedTuple):
    """What an instruction computes, or one element of the tuple that it computes."""

    computation: str
    name: str
    element: int | None = None


class Use(NamedTuple):
    """A use of a value: an operand of an instruction, or (no instruction) an output of the whole program."""

    computation: str
    instruction: Instruction | None
    position: int


class Frame(NamedTuple):
    """One line of source code that an instruction comes from."""

    file: str
    line: int


@dataclasses.dataclass(frozen=True)
class HloModule:
    """A parsed module.

    Attributes:
        computations: By name.
        entry: The name of the computation that runs.
        aliases: Output → entry parameter whose buffer it takes over, both by number.
        tables: The sections that some versions print above the computations, `FileNames` and the like: id → text.
        partitions: `num_partitions` of the header.
        replicas: `replica_count` of the header.
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
        callers: dict[str, list[tuple[str, Instruction, str]]] = {name: [] for name in self.computations}
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                for role, callee in instruction.callees():
                    callers.setdefault(callee, []).append((computation.name, instruction, role))
        return callers

    def at(self, value: HloValue) -> Instruction:
        """The instruction of a value."""
        return self.computations[value.computation].instructions[value.name]

    def frames(self, instruction: Instruction) -> list[Frame]:
        """The source lines of an instruction, innermost first; nothing where none are recorded."""
        if file := instruction.attribute(r'source_file="([^"]*)"'):
            return [Frame(file, int(instruction.attribute(r"source_line=(\d+)") or 0))]
        frames, stack = self.tables.get("StackFrames", {}), []
        number = int(instruction.attribute(r"stack_frame_id=(\d+)") or 0)
        # Numbers of parents are printed one too high: the outermost frame, number 1, names itself.
        shift = 1 if _field(frames.get(1, ""), "parent_frame_id") == 1 else 0
        while number in frames:
            location = self.tables["FileLocations"].get(_field(frames[number], "file_location_id"), "")
            file = self.tables["FileNames"].get(_field(location, "file_name_id"), "")
            stack.append(Frame(file, _field(location, "line")))
            parent = _field(frames[number], "parent_frame_id") - shift
            number = parent if parent < number else 0
        return stack

    def producer(self, value: HloValue) -> HloValue:
        """Where a value comes from, through tuples, calls, fusions and loops that pass it on unchanged."""
        for _ in range(1000):
            instruction, (computation, _, index) = self.at(value), value
            opcode, operands = instruction.opcode, instruction.operands
            before: HloValue | None = None
            if opcode == "get-tuple-element":
                before = HloValue(computation, operands[0], int(instruction.attribute(r"\bindex=(\d+)")))
            elif opcode == "tuple" and index is not None:
                before = HloValue(computation, operands[index])
            elif opcode == "opt-barrier" or opcode in ("async-done", "async-update"):
                before = HloValue(computation, operands[0], index)
            elif opcode in _CALLS:
                callee = next((name for _, name in instruction.callees() if name in self.computations), None)
                before = HloValue(callee, self.computations[callee].root, index) if callee else None
            elif opcode == "while" and index is not None and self._is_kept(instruction, index):
                before = HloValue(computation, operands[0], index)
            elif opcode == "parameter" and computation != self.entry:
                before = self._argument(value, int(instruction.literal))
            if before is None:
                return value
            value = before
        return value

    def settled(self, value: HloValue) -> HloValue:
        """Where a value comes from, also through what moves it."""
        value = self.producer(value)
        while (instruction := self.at(value)).is_move:
            value = self.producer(HloValue(value.computation, instruction.operands[0]))
        return value

    def _argument(self, value: HloValue, number: int) -> HloValue | None:
        for caller, call, role in self.callers[value.computation][:1]:
            if call.opcode == "while":
                if value.element is not None and self._is_kept(call, value.element):
                    return HloValue(caller, call.operands[0], value.element)
            elif call.opcode == "conditional":
                branches = [name for _, name in call.callees()]
                return HloValue(caller, call.operands[1 + branches.index(value.computation)], value.element)
            elif role in ("calls", "to_apply", "called_computations") and call.opcode in (
                "fusion",
                "call",
                "async-start",
            ):
                return HloValue(caller, call.operands[number], value.element)
        return None

    def _is_kept(self, loop: Instruction, index: int) -> bool:
        """Whether a loop hands on this element of its tuple as it got it."""
        body = self.computations[dict(loop.callees())["body"]]
        root = body.instructions[body.root]
        if root.opcode != "tuple":
            return False
        source = body.instructions[root.operands[index]]
        return (
            source.opcode == "get-tuple-element"
            and source.operands[0] == body.parameters[0]
            and source.attribute(r"\bindex=(\d+)") == str(index)
        )

    def uses(self, value: HloValue) -> Iterator[Use]:
        """Every use of a value, through tuples, calls, fusions and loops."""
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
                    yield Use(self.entry, None, here.element or 0)
                for caller, call, role in self.callers[computation.name]:
                    if (
                        role in ("calls", "to_apply", "body")
                        and call.opcode in ("fusion", "call", "while", "async-start")
                    ) or call.opcode == "conditional":
                        todo.append(HloValue(caller, call.name, here.element))
                    if role == "body":
                        todo.append(HloValue(computation.name, computation.parameters[0], here.element))
            for user, position in computation.users[here.name]:
                following = self._inside(here, user, position)
                todo += following
                if not following and user.opcode != "get-tuple-element":
                    yield Use(computation.name, user, position)

    def _inside(self, value: HloValue, user: Instruction, position: int) -> list[HloValue]:
        """Where a value goes on to in a user that only hands it on."""
        computation, _, index = value
        if user.opcode == "get-tuple-element":
            return [HloValue(computation, user.name)] if user.attribute(r"\bindex=(\d+)") == str(index) else []
        if user.opcode == "tuple":
            return [HloValue(computation, user.name, position)] if index is None else []
        if user.opcode in ("opt-barrier", "async-done", "async-update"):
            return [HloValue(computation, user.name, index)]
        roles = [(role, name) for role, name in user.callees() if name in self.computations]
        if user.opcode == "while":
            roles = [(role, name) for role, name in roles if role == "body"]
        elif user.opcode == "conditional":
            roles, position = roles[position - 1 : position] if position else [], 0
        elif user.opcode not in _CALLS:
            return []
        return [HloValue(name, self.computations[name].parameters[position], index) for _, name in roles]


def _field(text: str, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", text)
    return int(found[1]) if found else 0


def parse(text: str) -> HloModule:
    """Reads `compiled.as_text()`.

    Example:
        >>> program = parse("HloModule m\\n\\nENTRY main {\\n  ROOT %x = f32[2,3]{1,0} parameter(0)\\n}\\n")
        >>> program.entry, program.at(Value("main", "x")).arrays[0].bytes
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
                written += line  # what a Pallas kernel says of itself may be several lines
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
        HloArray(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(shape)
    )
    return Instruction(name, opcode, arrays, operands, literal, rest[stop:])


def _closing(text: str, start: int) -> int:
    """The position behind the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.finditer(r"[()]", text[start:]):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return start + found.end()
    return len(text)


def trip_count(program: HloModule, computation: str, loop: Instruction) -> int | None:
    """How often a `while` turns: as the compiler says, or from its start, step and condition; None if that fails.

    Args:
        program: The program.
        computation: The name of the computation that holds the loop.
        loop: The `while` instruction.
    """
    if known := loop.attribute(r"known_trip_count\D*(\d+)"):
        return int(known)
    called = dict(loop.callees())
    test = program.settled(HloValue(called["condition"], program.computations[called["condition"]].root))
    compare = program.at(test)
    if compare.opcode != "compare":
        return None
    counter, limit = (program.settled(HloValue(test.computation, operand)) for operand in compare.operands)
    if counter.element is None or program.at(counter).opcode != "parameter":
        return None
    body = program.computations[called["body"]]
    advance = program.settled(HloValue(body.name, body.root, counter.element))
    terms = [program.settled(HloValue(advance.computation, operand)) for operand in program.at(advance).operands]
    steps = [step for term in terms if (step := integer(program, term)) is not None]
    before = HloValue(body.name, body.parameters[0], counter.element)
    if program.at(advance).opcode != "add" or len(steps) != 1 or before not in terms:
        return None
    start, stop = integer(program, HloValue(computation, loop.operands[0], counter.element)), integer(program, limit)
    if start is None or stop is None or steps[0] <= 0:
        return None
    ahead = {"LT": stop - start, "LE": stop - start + 1}.get(compare.attribute(r"direction=(\w+)"))
    return None if ahead is None else max(0, -(-ahead // steps[0]))


def integer(program: HloModule, value: HloValue) -> int | None:
    """The value of a constant integer scalar; None if it is something else."""
    instruction = program.at(program.settled(value))
    number = re.fullmatch(r"-?\d+", instruction.literal.strip())
    return int(number[0]) if instruction.opcode == "constant" and number else None
