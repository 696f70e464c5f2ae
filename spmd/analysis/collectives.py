"""Every collective of a parsed program as one record: what it does, over which axes, how often, and to what.

**Payload** is bytes of one execution as one device sees them, whatever the algorithm underneath:

| kind | payload |
|---|---|
| all-gather | the gathered result |
| reduce-scatter | what goes in |
| all-reduce, all-to-all, collective-permute, collective-broadcast | the operand |
| ragged-all-to-all | the operand: an upper bound |

What a compiler writes in the place of something else is read as what it stands for, and noted in `written_as`:

- An all-reduce of which each device keeps its own part alone is a reduce-scatter. XLA:CPU never writes the
  partitioner's reduce-scatter otherwise; a TPU runs the two as one operation when they are fused.
- XLA:CPU converts 16-bit floats to float32 before any collective and back behind it.
- XLA:CPU leaves all-reduces as they are whose results are only added to each other, where GPU and TPU compilers add
  first and reduce once: the backward pass of several kernels with one input, under tensor parallelism.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Mapping

import numpy as np

from spmd.analysis.hlo import HloArray, HloModule, HloValue, Instruction, trip_count
from spmd.analysis.replica_groups import Groups, kind_of, mesh_axes, on_mesh, per_device, read_groups, spans

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
IRREGULAR = "no product of axes"
"""In the place of axes: groups that are unequal, or hold a part of an axis."""

_ONE_ARRAY = ("all-to-all", "ragged-all-to-all")
_CUTS = {"dynamic-slice", "slice", "slice-done", "slice-start"}
_GATHERS = {"all-gather", "all-gather-done", "all-gather-start"}
_EXCHANGES = {"collective-permute", "collective-permute-done", "collective-permute-start", "dynamic-update-slice"}
_MIXES = {"convolution", "custom-call", "dot", "gather", "reduce", "reduce-window", "scatter", "sort"}
_FAR = 4000
# Where constraints are made; who asked for them is one frame up.
_MARKS = tuple(os.sep + os.path.join("spmd", "plan", f"{name}.py") for name in ("context", "fsdp", "annotate"))


@dataclasses.dataclass(frozen=True)
class Collective:
    """One array that one collective instruction moves; instructions that combine several arrays are taken apart.

    Attributes:
        kind: One of `KINDS`: what it does.
        axes: The mesh axes it crosses, in the mesh's order; None where its groups are no product of axes.
        payload: Bytes of one execution on one device, by the convention of its kind.
        executions: How often it runs in one step.
        is_counted: False where an enclosing loop's length is not known; that loop is then counted once.
        is_conditional: It stands in a branch that may not be taken.
        written_as: What the program has in its place, where that is something else: `"f32 all-reduce"`.
        is_fused: It is one operation with the slice that follows, so nothing is moved in vain.
        operand: Element type and dimensions of what goes in, on one device.
        array: The argument of the step that it moves, or whose gradient or new value it makes, where that can be
            told: `params/layers/mlp/up_proj/kernel`.
        op_name: JAX's name of the operation.
        source: `file:line`, the innermost line outside of this package.
        instruction: Its name in the program's text.
        groups: The groups as written.
        crosses: Some of its groups have devices in more than one slice, so it goes over the slow network.
    """

    kind: str
    axes: tuple[str, ...] | None
    payload: int
    executions: int
    is_counted: bool
    is_conditional: bool
    written_as: str
    is_fused: bool
    operand: str
    array: str
    op_name: str
    source: str
    instruction: str
    groups: str
    crosses: bool

    @property
    def bytes(self) -> int:
        """Bytes of one step on one device."""
        return self.payload * self.executions

    @property
    def over(self) -> str:
        """The axes as text, `data+fsdp`."""
        return IRREGULAR if self.axes is None else "+".join(self.axes)


def find_collectives(
    program: HloModule, axes: Mapping[str, int], *, cpu: bool, slices: np.ndarray
) -> tuple[Collective, ...]:
    """All collectives that move something, in the order in which the program runs them.

    Args:
        program: The parsed program.
        axes: Axis → size of the mesh it was compiled for, outermost first.
        cpu: It was compiled by XLA:CPU, so read what only that writes as what it stands for.
        slices: For each device the slice it is in.
    """
    walk = _Walk(program, axes, cpu, slices)
    walk.visit(program.entry, 1, True, False)
    return tuple(walk.merged().values())


class _Walk:
    """A walk through everything the program runs, with how often it runs there."""

    def __init__(self, program: HloModule, axes: Mapping[str, int], cpu: bool, slices: np.ndarray) -> None:
        self.program, self.axes, self.cpu, self.slices = program, axes, cpu, slices
        count = program.partitions * program.replicas
        self.devices = slices.size if count == 1 else count
        in_order = np.arange(slices.size) if self.devices == slices.size else np.argsort(slices, kind="stable")
        self.places = in_order.reshape(-1, self.devices)  # a row for each program
        self.found: dict[tuple[str, ...], Collective] = {}
        self._first: dict[tuple[str, ...], str] = {}
        self._reduced: dict[HloValue, tuple[str, ...]] = {}
        self._talks: dict[str, bool] = {}

    def visit(self, name: str, times: int, counted: bool, conditional: bool) -> None:
        for instruction in self.program.computations[name].instructions.values():
            if kind_of(instruction) in KINDS:
                for key, record in self._records(name, instruction):
                    known = self.found.setdefault(key, record)
                    if self._first.setdefault(key, name) == name:
                        self.found[key] = dataclasses.replace(
                            known,
                            executions=known.executions + times,
                            is_counted=known.is_counted and counted,
                            is_conditional=known.is_conditional or conditional,
                        )
            elif instruction.opcode == "while" and self._any_talks(instruction):
                called, turns = dict(instruction.callees()), trip_count(self.program, name, instruction)
                known_turns = 1 if turns is None else turns
                self.visit(called["condition"], times * (known_turns + 1), counted and turns is not None, conditional)
                self.visit(called["body"], times * known_turns, counted and turns is not None, conditional)
            elif not instruction.opcode.endswith(("-done", "-update")):
                for _, callee in instruction.callees():
                    if self._is_talking(callee):
                        self.visit(callee, times, counted, conditional or instruction.opcode == "conditional")

    def merged(self) -> dict[tuple[str, ...], Collective]:
        """What was found, with all-reduces that are only added to each other taken for one of their sum."""
        sums = {value: terms for value in self._reduced if self.cpu and (terms := self._added_to(value))}
        while alone := [value for value, terms in sums.items() if not terms <= sums.keys()]:
            for value in alone:
                del sums[value]
        found = dict(self.found)
        while sums:
            first, terms = next(iter(sums.items()))
            for value in terms - {first}:
                found.pop(self._reduced[value], None)
            for value in terms | {first}:
                sums.pop(value, None)
            key = self._reduced[first]
            written = f"{found[key].written_as or 'all-reduce'}s that are added"
            found[key] = dataclasses.replace(found[key], written_as=written)
        return found

    def _added_to(self, value: HloValue) -> set[HloValue]:
        """The sum of all-reduces over the same axes that a value is a term of; nothing if it goes anywhere else."""
        terms, todo = {value}, [value]
        while todo:
            added = [self._terms(other) for other in self._other_terms(todo.pop())]
            found = set[HloValue]().union(*added)
            if not all(added) or not found or any(self._over(term) != self._over(value) for term in found):
                return set()
            todo += found - terms
            terms |= found
        return terms if len(terms) > 1 else set()

    def _over(self, value: HloValue) -> tuple[str, ...] | None:
        return self.found[self._reduced[value]].axes

    def _other_terms(self, value: HloValue) -> list[HloValue]:
        """What is added to a value, in each addition that it goes into; nothing if it goes anywhere else."""
        others, todo = [], [value]
        while todo:
            for computation, user, position in self.program.uses(todo.pop()):
                if user is not None and user.is_move:
                    todo.append(HloValue(computation, user.name))
                elif user is not None and user.opcode == "add":
                    others.append(HloValue(computation, user.operands[1 - position]))
                else:
                    return []
        return others

    def _terms(self, value: HloValue) -> set[HloValue]:
        """The all-reduces whose sum a value is; nothing if it is none."""
        value = self.program.settled(value)
        if value in self._reduced:
            return {value}
        instruction = self.program.at(value)
        if instruction.opcode != "add" or not self._other_terms(value):
            return set()
        parts = [self._terms(HloValue(value.computation, operand)) for operand in instruction.operands]
        return set[HloValue]().union(*parts) if all(parts) else set()

    def _any_talks(self, instruction: Instruction) -> bool:
        return any(self._is_talking(callee) for _, callee in instruction.callees())

    def _is_talking(self, name: str) -> bool:
        """Whether a computation, or one that it calls, has a collective."""
        if name not in self._talks:
            here = self.program.computations.get(name)
            self._talks[name] = here is not None and any(
                kind_of(i) in KINDS or self._any_talks(i) for i in here.instructions.values()
            )
        return self._talks[name]

    def _records(self, name: str, instruction: Instruction) -> Iterator[tuple[tuple[str, ...], Collective]]:
        kind, between = kind_of(instruction), instruction.opcode == "send"
        groups, pairs = read_groups(instruction.attributes, self.devices)
        places = self.places.T.tolist() if between else on_mesh(groups, self.places)
        axes = mesh_axes(places, self.axes, pairs=pairs)
        if axes == ():
            return
        written = instruction.attribute(r"((?:replica_groups|source_target_pairs)=.*?)(?:, [a-z_]+=|$)")
        last = self._done(name, instruction)
        in_place = kind == "collective-permute" and "slice_sizes=" in instruction.attributes
        parts = 1 if between else len(instruction.operands)
        apart = parts > 1 and kind not in _ONE_ARRAY and not in_place
        for part in range(parts if apart else 1):
            names = instruction.operands if kind == "all-to-all" else instruction.operands[part : part + 1]
            operands = [HloValue(name, operand) for operand in names]
            arrays = [self.program.at(operand).arrays[0] for operand in operands]
            several = apart or (len(self.program.at(last).arrays) > 1 and kind == "all-to-all")
            results = [
                last._replace(element=part + i if several else None) for i in range(len(operands) if several else 1)
            ]
            narrow = self._narrow(instruction, operands, arrays[0], results) if self.cpu else ""
            moved = [HloArray(narrow or array.dtype, array.dims) for array in arrays]
            scatters = kind == "all-reduce" and not pairs and self._keeps_part(results[0], arrays[0], groups)
            means = "reduce-scatter" if scatters else kind
            metadata = self._metadata(name, instruction, results[0])
            key = self._key(name, instruction, part)
            if means == "all-reduce":
                self._reduced[results[0]] = key
            yield (
                key,
                Collective(
                    kind=means,
                    axes=axes,
                    payload=sum(a.bytes for a in moved) * (max(map(len, places)) if kind == "all-gather" else 1),
                    executions=0,
                    is_counted=True,
                    is_conditional=False,
                    written_as=f"{arrays[0].dtype} {kind}" if narrow else kind if kind != means else "",
                    is_fused=scatters and self._caller(name) == "fusion",
                    operand=str(moved[0]) + (f"×{len(moved)}" if len(moved) > 1 else ""),
                    array=self._argument(operands[0]) or self._destination(results[0]),
                    op_name=metadata.attribute(r'op_name="((?:[^"\\]|\\.)*)"').replace("\\'", "'"),
                    source=self._source(metadata),
                    instruction=instruction.name,
                    groups=written.partition("=")[2],
                    crosses=spans(places, self.slices),
                ),
            )

    def _key(self, name: str, instruction: Instruction, part: int) -> tuple[str, ...]:
        """What tells records apart. A TPU repeats one transfer in every fusion that it runs beside: one chain."""
        chain = instruction.attribute(r'\bchain_id="(\d+)"')
        if chain and self.program.callers[name]:
            channel = instruction.attribute(r"channel_id=(\d+)")
            return (self.program.callers[name][0][0], channel, chain, str(part))
        return (name, instruction.name, str(part))

    def _caller(self, name: str) -> str:
        callers = self.program.callers[name]
        return callers[0][1].opcode if callers else ""

    def _done(self, name: str, instruction: Instruction) -> HloValue:
        """Where the result of an instruction is to be had: for an asynchronous start, its end."""
        while instruction.opcode.endswith(("-start", "-update")):
            users = self.program.computations[name].users[instruction.name]
            later = [user for user, _ in users if user.opcode.endswith(("-done", "-update"))]
            if not later:
                break
            instruction = later[0]
        return HloValue(name, instruction.name)

    def _metadata(self, name: str, instruction: Instruction, result: HloValue) -> Instruction:
        """The instruction that knows most of where this comes from."""
        users = self.program.computations[name].users[result.name]
        element = [
            u
            for u, _ in users
            if u.opcode == "get-tuple-element" and u.attribute(r"\bindex=(\d+)") == str(result.element)
        ]
        calls = [call for _, call, _ in self.program.callers[name]]
        known = [i for i in (*element[:1], instruction, self.program.at(result), *calls) if "op_name=" in i.attributes]
        return known[0] if known else instruction

    def _source(self, metadata: Instruction) -> str:
        frames = self.program.frames(metadata)
        asked = [frame for frame in frames if not frame.file.endswith(_MARKS)]
        return next((f"{_relative(frame.file)}:{frame.line}" for frame in asked or frames), "")

    def _keeps_part(self, result: HloValue, array: HloArray, groups: Groups) -> bool:
        """Whether each device of a group uses its own part of a value and nothing else, all parts being equal."""
        members = len(groups[0])
        todo, slices = [result], 0
        while todo:
            for computation, user, position in self.program.uses(todo.pop()):
                if user is None:
                    return False
                if user.is_move:
                    todo.append(HloValue(computation, user.name))
                    continue
                if user.opcode != "dynamic-slice" or position or user.arrays[0].size * members != array.size:
                    return False
                starts = [per_device(self.program, HloValue(computation, o), self.devices) for o in user.operands[1:]]
                if not all(start is not None and start.shape[1] == 1 for start in starts):
                    return False
                corner = np.concatenate([start for start in starts if start is not None], axis=1)
                if any(len(np.unique(corner[list(group)], axis=0)) != members for group in groups):
                    return False
                slices += 1
        return slices > 0

    def _narrow(
        self, instruction: Instruction, operands: list[HloValue], array: HloArray, results: list[HloValue]
    ) -> str:
        """The 16-bit type that data has before it is widened for this collective alone; nothing if it is not."""
        before = {a.dtype for o in operands for v in self._trail(o) for a in self.program.at(v).arrays}
        halves = [dtype for dtype in sorted(before) if HloArray(dtype, (1,)).bytes == 2]
        if array.dtype != "f32" or "_promoted" not in instruction.attribute(r"to_apply=(\S+)"):
            return halves[0] if array.dtype == "f32" and halves and "to_apply=" not in instruction.attributes else ""
        # The compiler marks the reductions that it has widened; the type stands behind them.
        todo, types = list(results), set[str]()
        while todo:
            for computation, user, _ in self.program.uses(todo.pop()):
                if user is not None and user.opcode == "convert":
                    types.add(user.arrays[0].dtype)
                elif user is not None and (user.is_move or user.opcode in _CUTS):
                    todo.append(HloValue(computation, user.name))
        return next(iter(sorted({*types, *halves})), "bf16")

    def _trail(self, value: HloValue) -> Iterator[HloValue]:
        """The values behind a value, through what only moves, converts, cuts, gathers or exchanges parts."""
        for _ in range(_FAR):
            value = self.program.producer(value)
            yield value
            instruction = self.program.at(value)
            if not instruction.is_move and instruction.opcode not in _CUTS | _GATHERS | _EXCHANGES:
                return
            value = HloValue(value.computation, instruction.operands[0])

    def _argument(self, value: HloValue) -> str:
        """The argument of the program that a value is, moved, converted, cut or gathered."""
        *_, last = self._trail(value)
        is_argument = self.program.at(last).opcode == "parameter" and last.computation == self.program.entry
        return _path(self.program.at(last)) if is_argument else ""

    def _destination(self, result: HloValue) -> str:
        """The parameter whose new value follows from a value element by element; nothing where several do, or none."""
        inputs = self.program.computations[self.program.entry].parameters
        todo, seen, reached = [result], {result}, set[str]()
        while todo and len(seen) < _FAR:
            for computation, user, position in self.program.uses(todo.pop()):
                if user is None:
                    if (number := self.program.aliases.get(position)) is not None:
                        reached.add(_path(self.program.at(HloValue(self.program.entry, inputs[number]))))
                elif (user.is_move or user.opcode not in _MIXES) and any(
                    a.size > 1 and a.dtype != "pred" for a in user.arrays
                ):
                    following = HloValue(computation, user.name)
                    if following not in seen:
                        seen.add(following)
                        todo.append(following)
        params = {path for path in reached if path.startswith("params/")}
        return params.pop() if len(params) == 1 and len(seen) < _FAR else ""


def _path(parameter: Instruction) -> str:
    """`state.params['mlp']['kernel']` as `params/mlp/kernel`."""
    name = parameter.attribute(r'op_name="((?:[^"\\]|\\.)*)"').replace("\\'", "'")
    parts = ["".join(part) for part in re.findall(r"\['([^']*)'\]|\[(\d+)\]|\.?(\w+)", name)]
    starts = [i for i, part in enumerate(parts) if part in ("params", "variables", "optimizer_state")]
    return "/".join(parts[starts[0] :] if starts else parts)


def _relative(file: str) -> str:
    """The file as it is imported, without the folder that Python found it in."""
    roots = [root for root in map(os.path.abspath, sys.path) if file.startswith(f"{root}{os.sep}")]
    return file.removeprefix(max(roots, key=len, default="")).lstrip(os.sep) if roots else file
