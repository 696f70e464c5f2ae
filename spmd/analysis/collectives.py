"""Search for the collectives of a parsed program: kind, mesh axes, executions, and the array that is moved.

Compilers write some collectives in another form, noted in `written_as`:

- The partitioner's reduce-scatter is an all-reduce of which each device keeps only its own part. XLA:GPU makes a
  reduce-scatter of it, XLA:TPU a fusion `all-reduce-scatter`, and XLA:CPU nothing: there it counts as a reduce-scatter.
  Elsewhere one that is left counts as the all-reduce it is; most TPUs leave them over most slices (`xla_flags.CHIPS`).
- XLA:TPU makes all-reduces, of zeros with each device's own part, of small gathers and of gathers over a slice without
  wrap-around links. They count as the all-reduces they are.
- XLA:CPU converts 16-bit floats to float32 and 8-bit floats to float16 before a collective, and back after it.
- Between TPU slices a collective is a `send` and a `recv` with the same rendezvous.
- XLA:CPU keeps all-reduces whose results are only added to each other, where GPU and TPU compilers add first and reduce
  once: the backward pass of several kernels with one input, under tensor parallelism.
"""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from types import MappingProxyType

import numpy as np

from spmd.analysis.collective_record import KINDS, Collective
from spmd.analysis.executions import Execution, executions
from spmd.analysis.hlo import HloArray, HloModule, HloValue, Instruction
from spmd.analysis.overlap import chain_of, compute_beside
from spmd.analysis.replica_groups import Groups, entering, kind_of, mesh_axes, per_device, read_groups
from spmd.coded_comm import codes, comm
from spmd.jaxpr.source import source_line
from spmd.plan import annotate, context, fsdp, local_param, manual
from spmd.plan.scopes import read_names
from spmd.sharding import collectives, param_comm

_ONE_ARRAY = ("all-to-all", "ragged-all-to-all")
_SLICES = {"dynamic-slice", "slice", "slice-done", "slice-start"}
_GATHERS = {"all-gather", "all-gather-done", "all-gather-start"}
_PERMUTES = {"collective-permute", "collective-permute-done", "collective-permute-start", "dynamic-update-slice"}
_MIXES = {"convolution", "custom-call", "dot", "gather", "reduce", "reduce-window", "scatter", "sort"}
_MAX_VALUES = 4000
_WIDENED = {"f32": ("bf16", "f16"), "f16": ("f8e4m3fn", "f8e5m2")}  # by XLA:CPU: type in the program → that of the data
# These modules apply constraints for their caller, which is one frame up.
_WRAPPERS = tuple(
    f"{os.sep}{module.__name__.replace('.', os.sep)}.py"
    for module in (annotate, codes, collectives, comm, context, fsdp, local_param, manual, param_comm)
)

_Key = tuple[str, ...]


def find_collectives(
    program: HloModule,
    axes: Mapping[str, int],
    *,
    cpu: bool,
    slices: np.ndarray,
    taken: Mapping[str, Fraction] = MappingProxyType({}),
) -> tuple[Collective, ...]:
    """Return the collectives that move data over a mesh with these axes (axis → size), in execution order.

    `cpu` tells whether XLA:CPU compiled the program; `slices` has the number of each device's slice; `taken` is for
    `spmd.analysis.executions.executions`.
    """
    search = _Search(program, axes, cpu, slices)
    for execution in executions(program, taken):
        search.record(execution)
    return tuple(search.merged().values())


class _Search:
    """Search through everything that the program executes, with the number of executions."""

    def __init__(self, program: HloModule, axes: Mapping[str, int], cpu: bool, slices: np.ndarray) -> None:
        self.program, self.axes, self.cpu, self.slices = program, axes, cpu, slices
        count = program.partitions * program.replicas
        self.devices = slices.size if count == 1 else count
        in_order = np.arange(slices.size) if self.devices == slices.size else np.argsort(slices, kind="stable")
        self.places = in_order.reshape(-1, self.devices)  # one row for each program
        self.found: dict[_Key, Collective] = {}
        self._first: dict[_Key, str] = {}
        self._reduced: dict[HloValue, _Key] = {}

    def record(self, here: Execution) -> None:
        """Record the executions of an instruction, if it is a collective."""
        for key, record in self._records(*here[:2]) if kind_of(here.instruction) in KINDS else ():
            known = self.found.setdefault(key, record)
            if self._first.setdefault(key, here.computation) == here.computation:
                self.found[key] = dataclasses.replace(
                    known,
                    executions=known.executions + round(here.times),
                    is_counted=known.is_counted and here.unknown is None,
                    is_conditional=known.is_conditional or here.is_conditional,
                )

    def merged(self) -> dict[_Key, Collective]:
        """Return the records, with all-reduces that are only added to each other as one all-reduce of their sum."""
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
        """Return the all-reduces over the same axes whose sum has this term; empty if the value has other uses."""
        terms, todo = {value}, [value]
        axes = self.found[self._reduced[value]].axes
        while todo:
            added = [self._terms(other) for other in self._other_terms(todo.pop())]
            found = set[HloValue]().union(*added)
            if not all(added) or not found or any(self.found[self._reduced[term]].axes != axes for term in found):
                return set()
            todo += found - terms
            terms |= found
        return terms if len(terms) > 1 else set()

    def _other_terms(self, value: HloValue) -> list[HloValue]:
        """Return the other term of each addition that uses a value; empty if it has other uses."""
        others = []
        for computation, user, position in self.program.uses(value, moves=True):
            if user is None or user.opcode != "add":
                return []
            others.append(HloValue(computation, user.operands[1 - position]))
        return others

    def _terms(self, value: HloValue) -> set[HloValue]:
        """Return the all-reduces whose sum a value is; empty if it is no such sum."""
        value = self.program.settled(value)
        if value in self._reduced:
            return {value}
        instruction = self.program.at(value)
        if instruction.opcode != "add" or not self._other_terms(value):
            return set()
        parts = [self._terms(HloValue(value.computation, operand)) for operand in instruction.operands]
        return set[HloValue]().union(*parts) if all(parts) else set()

    def _records(self, name: str, instruction: Instruction) -> Iterator[tuple[_Key, Collective]]:
        kind, between = kind_of(instruction), instruction.opcode == "send"
        groups, pairs = read_groups(instruction.attributes, self.devices)
        places = groups if len(self.places) == 1 else [row[list(g)].tolist() for row in self.places for g in groups]
        places = self.places.T.tolist() if between else places
        axes = mesh_axes(places, self.axes, pairs=pairs)
        if axes == ():
            return
        written = instruction.attribute(r"(?:replica_groups|source_target_pairs)=(.*?)(?:, [a-z_]+=|$)")
        last, enters = self._done(name, instruction), entering(places, self.slices, kind, pairs=pairs)
        is_overlapped, cycles = compute_beside(self.program, name, instruction)
        in_place = kind == "collective-permute" and "slice_sizes=" in instruction.attributes
        parts = 1 if between else len(instruction.operands)
        apart = parts > 1 and kind not in _ONE_ARRAY and not in_place
        for part in range(parts if apart else 1):
            is_tuple = kind == "all-to-all" and not between
            names = instruction.operands if is_tuple else instruction.operands[part : part + 1]
            operands = [HloValue(name, operand) for operand in names]
            arrays = [self.program.at(operand).arrays[0] for operand in operands]
            results = [last]
            if apart or (len(self.program.at(last).arrays) > 1 and is_tuple):
                results = [last._replace(element=part + i) for i in range(len(operands))]
            narrow = self._narrow(instruction, operands, arrays[0], results) if self.cpu else ""
            moved = [HloArray(narrow or array.dtype, array.dims) for array in arrays]
            reduces, form, stands_for, source = kind == "all-reduce" and not pairs, kind, "", operands[0]
            if reduces and name.startswith("all-reduce-scatter"):
                form, stands_for = "all-reduce-scatter", "reduce-scatter"
            elif reduces and (own := self._own_part(operands[0], len(groups[0]))):
                stands_for, source = "all-gather", own
            elif reduces and self._keeps_part(results[0], arrays[0], groups):
                stands_for = "reduce-scatter"
            means = stands_for if stands_for == "reduce-scatter" and (form != kind or self.cpu) else kind
            metadata = self._metadata(name, instruction, operands[0], results[0])
            operations = read_names(metadata.op_name)
            key = self._key(name, instruction, part)
            if means == "all-reduce":
                self._reduced[results[0]] = key
            yield (
                key,
                Collective(
                    kind=means,
                    axes=axes,
                    payload=sum(a.bytes for a in moved) * (max(map(len, places)) if kind == "all-gather" else 1),
                    written_as=f"{arrays[0].dtype} {kind}" if narrow else form if form != means else "",
                    stands_for=stands_for,
                    entering=enters,
                    dtype=moved[0].dtype,
                    operand=str(moved[0]) + (f"×{len(moved)}" if len(moved) > 1 else ""),
                    array=self._argument(source) or self._destination(results[0]),
                    factor=self._factor(source) if kind in ("all-reduce", "reduce-scatter") else "",
                    op_name=operations[part] if apart and len(operations) == parts else metadata.op_name,
                    source=source_line(self.program.frames(metadata), _WRAPPERS),
                    instruction=instruction.name,
                    groups=written,
                    crosses=enters > 0,
                    is_overlapped=is_overlapped,
                    overlapped_cycles=cycles,
                ),
            )

    def _key(self, name: str, instruction: Instruction, part: int) -> _Key:
        # A TPU repeats a transfer in every fusion that it overlaps with: a chain, recorded once.
        if (chain := chain_of(instruction)) and self.program.callers[name]:
            return (self.program.callers[name][0][0], *chain, str(part))
        return (name, instruction.name, str(part))

    def _done(self, name: str, instruction: Instruction) -> HloValue:
        """Return the result of an instruction: of a start that of its `-done`, of a send the received."""
        if instruction.opcode == "send":
            return HloValue(name, next(self._peers(name, instruction), instruction).name, 0)
        while instruction.opcode.endswith(("-start", "-update")):
            users = self.program.computations[name].users[instruction.name]
            later = [user for user, _ in users if user.opcode.endswith(("-done", "-update"))]
            if not later:
                break
            instruction = later[0]
        return HloValue(name, instruction.name)

    def _peers(self, name: str, instruction: Instruction) -> Iterator[Instruction]:
        """Yield the other end of a transfer between slices: `recv-done` of a `send`, or `send` of a `recv-done`."""
        computation, rendezvous = self.program.computations[name], r'_xla_host_transfer_rendezvous="([^"]*)"'
        is_send = instruction.opcode == "send"
        key = (instruction if is_send else computation.instructions[instruction.operands[0]]).attribute(rendezvous)
        for other in computation.instructions.values():
            if other.opcode == ("recv" if is_send else "send") and other.attribute(rendezvous) == key != "":
                yield from (user for user, _ in computation.users[other.name]) if is_send else [other]

    def _metadata(self, name: str, instruction: Instruction, operand: HloValue, result: HloValue) -> Instruction:
        """Return the instruction with the most specific metadata on the origin of a result."""
        users = [user for user, _ in self.program.computations[name].users[result.name]]
        element = [u for u in users if u.opcode == "get-tuple-element" and u.index == result.element]
        calls = [call for _, call, _ in self.program.callers[name]]
        loops = [call for call in calls if call.opcode in ("while", "conditional")]
        inner = (call for call in calls if call not in loops)
        known = [i for i in (*element[:1], instruction, self.program.at(result), *inner) if "op_name=" in i.attributes]
        # Combined collectives may have none; then that of what is moved, or of what uses an argument of the program.
        near = [] if any("/" in i.op_name for i in known) else [*map(self.program.at, self._origins(operand)), *users]
        return next((i for i in (*known, *near, *loops) if "/" in i.op_name), known[0] if known else instruction)

    def _own_part(self, operand: HloValue, members: int) -> HloValue | None:
        """Return what a device puts into an array that is otherwise zeros, if it is 1/members of that."""
        whole = self.program.settled(operand)
        update = self.program.at(whole)
        if update.opcode != "dynamic-update-slice":
            return None
        rest, part = (HloValue(whole.computation, name) for name in update.operands[:2])
        if self.program.at(self.program.settled(rest)).opcode != "broadcast":
            return None
        return part if self.program.at(part).arrays[0].size * members == update.arrays[0].size else None

    def _keeps_part(self, result: HloValue, array: HloArray, groups: Groups) -> bool:
        """Tell whether each device of a group uses only its own shard of a value, all shards being equal."""
        members, corner = len(groups[0]), None
        for computation, user, position in self.program.uses(result, moves=True):
            if user is None or user.opcode != "dynamic-slice" or position:
                return False
            starts = [per_device(self.program, HloValue(computation, o), self.devices) for o in user.operands[1:]]
            known = [start for start in starts if start is not None and start.shape[1] == 1]
            if len(known) < len(starts) or user.arrays[0].size * members != array.size:
                return False
            corner = np.concatenate(known, axis=1)
            if any(len(np.unique(corner[list(group)], axis=0)) != members for group in groups):
                return False
        return corner is not None

    def _narrow(
        self, instruction: Instruction, operands: list[HloValue], array: HloArray, results: list[HloValue]
    ) -> str:
        """Return the type of data that is widened for this collective only, or an empty string."""
        before = {a.dtype for o in operands for v in self._origins(o) for a in self.program.at(v).arrays}
        narrow = sorted(before.intersection(_WIDENED.get(array.dtype, ())))
        reducer = instruction.attribute(r"to_apply=(\S+)")
        if not reducer:
            return narrow[0] if narrow else ""
        # The users of a widened reduction convert back to the type. The compiler marks it, but not a combined one.
        todo, types = list(results), set[str]()
        while todo:
            for computation, user, _ in self.program.uses(todo.pop()):
                if user is not None and user.opcode == "convert":
                    types.add(user.arrays[0].dtype)
                elif user is not None and (user.is_move or user.opcode in _SLICES):
                    todo.append(HloValue(computation, user.name))
                else:
                    types.add(array.dtype)
        if array.dtype == "f32" and "_promoted" in reducer:
            return next(iter(sorted({*types, *narrow} - {"f32"})), "bf16")
        return narrow[0] if narrow and types == {narrow[0]} else ""

    def _origins(self, value: HloValue) -> Iterator[HloValue]:
        """Yield the values that a value comes from, through moves, conversions, slices, gathers and permutes."""
        for _ in range(_MAX_VALUES):
            value = self.program.producer(value)
            yield value
            instruction = self.program.at(value)
            if instruction.opcode == "recv-done":
                instruction = next(self._peers(value.computation, instruction), instruction)
            elif not instruction.is_move and instruction.opcode not in _SLICES | _GATHERS | _PERMUTES:
                return
            value = HloValue(value.computation, instruction.operands[0])

    def _argument(self, value: HloValue) -> str:
        """Return the path of the program's argument that a value comes from, or an empty string."""
        *_, last = self._origins(value)
        is_argument = self.program.at(last).opcode == "parameter" and last.computation == self.program.entry
        return _path(self.program.at(last)) if is_argument else ""

    def _factor(self, value: HloValue) -> str:
        """Return the path of the argument whose product a value is, or an empty string."""
        product = self.program.settled(value)
        instruction = self.program.at(product)
        if instruction.opcode not in ("convolution", "dot"):
            return ""
        paths = (self._argument(HloValue(product.computation, operand)) for operand in instruction.operands)
        return next((path for path in paths if path.startswith(("params/", "variables/", "transforms/"))), "")

    def _destination(self, result: HloValue) -> str:
        """Return the path of the only parameter whose new value depends element-wise on a value, or an empty string."""
        inputs = self.program.computations[self.program.entry].parameters
        todo, seen, reached = [result], {result}, set[str]()
        while todo and len(seen) < _MAX_VALUES:
            for computation, user, position in self.program.uses(todo.pop()):
                if user is None:
                    if (number := self.program.aliases.get(position)) is not None:
                        reached.add(_path(self.program.at(HloValue(self.program.entry, inputs[number]))))
                elif user.is_move or user.opcode not in _MIXES:
                    following = self._done(computation, user)
                    if following not in seen and any(a.size > 1 and a.dtype != "pred" for a in user.arrays):
                        seen.add(following)
                        todo.append(following)
        params = {path for path in reached if path.startswith("params/")}
        return params.pop() if len(params) == 1 and len(seen) < _MAX_VALUES else ""


def _path(parameter: Instruction) -> str:
    """Return the path of an argument: `state.params['mlp']['kernel']` as `params/mlp/kernel`."""
    parts = ["".join(part) for part in re.findall(r"\['([^']*)'\]|\[(\d+)\]|\.?(\w+)", parameter.op_name)]
    starts = [i for i, part in enumerate(parts) if part in ("params", "variables", "transforms", "optimizer_state")]
    return "/".join(parts[starts[0] :] if starts else parts)
