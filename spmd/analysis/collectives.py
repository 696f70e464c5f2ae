"""Search for the collectives of a parsed program: kind, mesh axes, executions, and the array moved.

Compilers write some collectives in another form, noted in `hlo_form`:

- The partitioner writes a reduce-scatter as an all-reduce of which each device keeps only its own
  part. XLA:GPU compiles it to a reduce-scatter, XLA:TPU to a fusion `all-reduce-scatter`. XLA:CPU
  does not rewrite it; there it counts as a reduce-scatter. On other backends an all-reduce that
  remains counts as an all-reduce; most TPUs leave them over most slices (`spmd.chips.Chip.flags`).
- XLA:TPU writes small gathers, and gathers over a slice without wrap-around links, as all-reduces
  of zeros with each device's own part. They count as all-reduces.
- XLA:CPU converts 16-bit floats to float32 and 8-bit floats to float16 before a collective, and
  back after it.
- Between TPU slices a collective is a `send` and a `recv` with the same rendezvous.
- XLA:CPU keeps all-reduces whose results are only added to each other, where GPU and TPU compilers
  add first and reduce once, as in the backward pass of several kernels with one input under tensor
  parallelism. They count as one.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType

import numpy as np

from spmd.analysis.collective_record import KINDS, Collective
from spmd.analysis.executions import Execution, executions
from spmd.analysis.hlo import Computation, HloArray, HloModule, HloValue, Instruction
from spmd.analysis.overlap import chain_of, compute_beside
from spmd.analysis.replica_groups import (
    Groups,
    cross_slice_count,
    kind_of,
    mesh_axes,
    mesh_places,
    per_device,
    program_places,
    read_groups,
)
from spmd.coded_comm import codes, comm
from spmd.jaxpr.source import source_line
from spmd.plan import annotate, context, fsdp, manual, sharded_param
from spmd.plan.scopes import read_names
from spmd.sharding import collectives, param_comm

_ONE_ARRAY = ("all-to-all", "ragged-all-to-all")
_SLICES = {"dynamic-slice", "slice", "slice-done", "slice-start"}
_GATHERS = {"all-gather", "all-gather-done", "all-gather-start"}
_PERMUTES = {
    "collective-permute",
    "collective-permute-done",
    "collective-permute-start",
    "dynamic-update-slice",
}
_PASSED_ON = _SLICES | _GATHERS | _PERMUTES
_MIXES = {
    "convolution",
    "custom-call",
    "dot",
    "gather",
    "reduce",
    "reduce-window",
    "scatter",
    "sort",
}
_MAX_VALUES = 4000
# XLA:CPU: dtype in the program → possible dtypes of the data.
_WIDENED = {"f32": ("bf16", "f16"), "f16": ("f8e4m3fn", "f8e5m2")}
# These modules apply constraints for their caller, which is one frame up.
_WRAPPER_MODULES = (
    annotate,
    codes,
    collectives,
    comm,
    context,
    fsdp,
    sharded_param,
    manual,
    param_comm,
)
_WRAPPERS = tuple(
    f"{os.sep}{module.__name__.replace('.', os.sep)}.py" for module in _WRAPPER_MODULES
)
_TABLES = ("params", "variables", "transforms", "optimizer_state")

_RENDEZVOUS = r'_xla_host_transfer_rendezvous="([^"]*)"'
_GROUPS = r"(?:replica_groups|source_target_pairs)=(.*?)(?:, [a-z_]+=|$)"
_PATH_PART = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.?(\w+)")

_Key = tuple[str, ...]


def find_collectives(
    program: HloModule,
    axes: Mapping[str, int],
    *,
    cpu: bool,
    slices: np.ndarray,
    taken: Mapping[str, Fraction] = MappingProxyType({}),
) -> tuple[Collective, ...]:
    """Return the collectives of a program over a mesh, in execution order.

    `axes` has the mesh's axis → size; `cpu` tells whether XLA:CPU compiled the program; `slices`
    has the number of each device's slice; `taken` is for `spmd.analysis.executions.executions`.
    """
    search = _Search(program, axes, cpu, slices)
    for execution in executions(program, taken):
        search.record(execution)
    return tuple(search.merged().values())


@dataclasses.dataclass(frozen=True)
class _Transfer:
    """One collective instruction, with the figures shared by its records.

    Attributes:
        kind: The kind in the program; `Collective.kind` differs for some all-reduces.
        groups: Groups of devices by their number in the program; `places` by their number in the
            mesh.
        pairs: Whether groups are (source, target) pairs.
        axes: As for `Collective`.
        result: Result of the instruction; for a start, the result of its `-done`.
        cross_slice_count: As for `Collective`, like the following.
    """

    computation: str
    instruction: Instruction
    kind: str
    groups: Groups
    places: Groups
    pairs: bool
    axes: tuple[str, ...] | None
    result: HloValue
    cross_slice_count: int
    is_overlapped: bool
    overlapped_cycles: int

    @property
    def between(self) -> bool:
        """True for a transfer between TPU slices."""
        return self.instruction.opcode == "send"

    @property
    def members(self) -> int:
        """Devices in one group of the program."""
        return len(self.groups[0])

    @property
    def is_combined(self) -> bool:
        """True if the instruction moves several arrays, each with a record of its own."""
        if self.between or self.kind in _ONE_ARRAY or len(self.instruction.operands) < 2:
            return False
        in_place = (
            self.kind == "collective-permute" and "slice_sizes=" in self.instruction.attributes
        )
        return not in_place

    @property
    def is_split(self) -> bool:
        """True if the operands are the parts of one array, one for each device of a group."""
        return self.kind == "all-to-all" and not self.between

    @property
    def is_reduction(self) -> bool:
        """True for an all-reduce over groups of devices."""
        return self.kind == "all-reduce" and not self.pairs

    @property
    def is_scatter_fusion(self) -> bool:
        """True for the all-reduce in an `all-reduce-scatter` fusion of XLA:TPU."""
        return self.is_reduction and self.computation.startswith("all-reduce-scatter")

    @property
    def records(self) -> int:
        """Number of records of the instruction."""
        return len(self.instruction.operands) if self.is_combined else 1

    def operands(self, part: int) -> list[HloValue]:
        """Return the operands of one record."""
        names = self.instruction.operands[part : part + 1]
        if self.is_split:
            names = self.instruction.operands
        return [HloValue(self.computation, name) for name in names]


class _Search:
    """Search of a program for collectives, with their numbers of executions."""

    def __init__(
        self, program: HloModule, axes: Mapping[str, int], cpu: bool, slices: np.ndarray
    ) -> None:
        self.program = program
        self.axes = axes
        self.cpu = cpu
        self.slices = slices
        self.places = program_places(program, slices)
        self.devices = self.places.shape[1]
        self.found: dict[_Key, Collective] = {}
        self._first: dict[_Key, str] = {}
        self._reduced: dict[HloValue, _Key] = {}

    def record(self, here: Execution) -> None:
        """Record the executions of an instruction, if it is a collective."""
        if kind_of(here.instruction) not in KINDS:
            return
        for key, record in self._records(here.computation, here.instruction):
            self.found.setdefault(key, record)
            # A chain has its collective in several computations: the first one counts.
            if self._first.setdefault(key, here.computation) == here.computation:
                self._count(key, here)

    def _count(self, key: _Key, here: Execution) -> None:
        """Add the executions of an instruction to its record."""
        known = self.found[key]
        self.found[key] = dataclasses.replace(
            known,
            executions=known.executions + round(here.times),
            is_counted=known.is_counted and here.unknown is None,
            is_conditional=known.is_conditional or here.is_conditional,
        )

    def merged(self) -> dict[_Key, Collective]:
        """Return the records, with one for all-reduces used only as terms of one sum (XLA:CPU)."""
        found = dict(self.found)
        sums = self._sums()
        while sums:
            first, terms = next(iter(sums.items()))
            for value in terms - {first}:
                found.pop(self._reduced[value], None)
            for value in terms | {first}:
                sums.pop(value, None)
            key = self._reduced[first]
            written = f"{found[key].hlo_form or 'all-reduce'}s that are added"
            found[key] = dataclasses.replace(found[key], hlo_form=written)
        return found

    def _sums(self) -> dict[HloValue, set[HloValue]]:
        """Return all-reduce → all terms of its sum; empty except on XLA:CPU.

        A sum counts only if all of its terms are all-reduces with such a sum.
        """
        sums: dict[HloValue, set[HloValue]] = {}
        if not self.cpu:
            return sums
        for value in self._reduced:
            terms = self._added_to(value)
            if terms:
                sums[value] = terms
        while True:
            alone = [value for value, terms in sums.items() if not terms <= sums.keys()]
            if not alone:
                return sums
            for value in alone:
                del sums[value]

    def _added_to(self, value: HloValue) -> set[HloValue]:
        """Return the all-reduces over the same axes in a sum with a value.

        Empty if the value has other uses.
        """
        axes = self._axes_of(value)
        terms = {value}
        todo = [value]
        while todo:
            found = self._terms_of_all(self._other_terms(todo.pop()))
            if not found or any(self._axes_of(term) != axes for term in found):
                return set()
            todo += found - terms
            terms |= found
        if len(terms) == 1:
            return set()
        return terms

    def _axes_of(self, reduced: HloValue) -> tuple[str, ...] | None:
        """Return the mesh axes of an all-reduce."""
        return self.found[self._reduced[reduced]].axes

    def _other_terms(self, value: HloValue) -> list[HloValue]:
        """Return the other terms in the additions of a value; empty if it has other uses."""
        others = []
        for computation, user, position in self.program.uses(value, moves=True):
            if user is None or user.opcode != "add":
                return []
            others.append(HloValue(computation, user.operands[1 - position]))
        return others

    def _terms(self, value: HloValue) -> set[HloValue]:
        """Return the all-reduces in a sum; empty if a value is no sum of all-reduces."""
        value = self.program.settled(value)
        if value in self._reduced:
            return {value}
        instruction = self.program.at(value)
        if instruction.opcode != "add" or not self._other_terms(value):
            return set()
        operands = [HloValue(value.computation, operand) for operand in instruction.operands]
        return self._terms_of_all(operands)

    def _terms_of_all(self, values: Iterable[HloValue]) -> set[HloValue]:
        """Return the all-reduces in several sums; empty if one value is no sum of all-reduces."""
        union: set[HloValue] = set()
        for value in values:
            terms = self._terms(value)
            if not terms:
                return set()
            union |= terms
        return union

    def _records(self, name: str, instruction: Instruction) -> Iterator[tuple[_Key, Collective]]:
        """Yield the records of a collective with their keys; none if nothing leaves its device."""
        transfer = self._transfer(name, instruction)
        if transfer is None:
            return
        for part in range(transfer.records):
            key = self._key(name, instruction, part)
            result = self._results(transfer, part)[0]
            record = self._record(transfer, part)
            if record.kind == "all-reduce":
                self._reduced[result] = key
            yield key, record

    def _transfer(self, name: str, instruction: Instruction) -> _Transfer | None:
        """Return the figures of a collective; None if nothing leaves its device."""
        kind = kind_of(instruction)
        groups, pairs = read_groups(instruction.attributes, self.devices)
        places = mesh_places(instruction, groups, self.places)
        axes = mesh_axes(places, self.axes, pairs=pairs)
        if axes == ():
            return None
        is_overlapped, cycles = compute_beside(self.program, name, instruction)
        return _Transfer(
            computation=name,
            instruction=instruction,
            kind=kind,
            groups=groups,
            places=places,
            pairs=pairs,
            axes=axes,
            result=self._done(name, instruction),
            cross_slice_count=cross_slice_count(places, self.slices, kind, pairs=pairs),
            is_overlapped=is_overlapped,
            overlapped_cycles=cycles,
        )

    def _record(self, transfer: _Transfer, part: int) -> Collective:
        """Return the record of one array of a collective, before its executions are counted."""
        instruction = transfer.instruction
        operands = transfer.operands(part)
        results = self._results(transfer, part)
        arrays = [self.program.at(operand).arrays[0] for operand in operands]
        narrow = self._narrow(instruction, operands, arrays[0], results)
        moved = [HloArray(narrow or array.dtype, array.dims) for array in arrays]
        equivalent_kind, source = self._purpose(transfer, operands[0], arrays[0], results[0])
        kind = self._kind(transfer, equivalent_kind)
        metadata = self._metadata(transfer.computation, instruction, operands[0], results[0])
        return Collective(
            kind=kind,
            axes=transfer.axes,
            payload=_payload(transfer, moved),
            hlo_form=_hlo_form(transfer, kind, arrays[0].dtype if narrow else ""),
            equivalent_kind=equivalent_kind,
            cross_slice_count=transfer.cross_slice_count,
            dtype=moved[0].dtype,
            operand=_shape_text(moved),
            array=self._argument(source) or self._destination(results[0]),
            factor=self._factor(transfer, source),
            op_name=_operation_of(transfer, part, metadata.op_name),
            source=source_line(self.program.frames(metadata), _WRAPPERS),
            instruction=instruction.name,
            groups=instruction.attribute(_GROUPS),
            crosses=transfer.cross_slice_count > 0,
            is_overlapped=transfer.is_overlapped,
            overlapped_cycles=transfer.overlapped_cycles,
        )

    def _results(self, transfer: _Transfer, part: int) -> list[HloValue]:
        """Return the results of one record: elements of a tuple, if there are several arrays."""
        last = transfer.result
        is_tuple = len(self.program.at(last).arrays) > 1
        if transfer.is_combined:
            return [last._replace(element=part)]
        if transfer.is_split and is_tuple:
            count = len(transfer.instruction.operands)
            return [last._replace(element=element) for element in range(count)]
        return [last]

    def _purpose(
        self, transfer: _Transfer, operand: HloValue, array: HloArray, result: HloValue
    ) -> tuple[str, HloValue]:
        """Return the collective written as an all-reduce, and the value sent by a device.

        The collective is empty for other kinds and for a genuine all-reduce. For a gather, the
        value is the device's own part.
        """
        if not transfer.is_reduction:
            return "", operand
        if transfer.is_scatter_fusion:
            return "reduce-scatter", operand
        own = self._own_part(operand, transfer.members)
        if own is not None:
            return "all-gather", own
        if self._keeps_part(result, array, transfer.groups):
            return "reduce-scatter", operand
        return "", operand

    def _kind(self, transfer: _Transfer, equivalent_kind: str) -> str:
        """Return the kind for the record: a reduce-scatter also as written by XLA:CPU and TPUs."""
        is_written = self.cpu or transfer.is_scatter_fusion
        if equivalent_kind == "reduce-scatter" and is_written:
            return "reduce-scatter"
        return transfer.kind

    def _key(self, name: str, instruction: Instruction, part: int) -> _Key:
        # A TPU repeats a transfer in every fusion that it overlaps with: a chain, recorded once.
        chain = chain_of(instruction)
        callers = self.program.callers[name]
        if chain and callers:
            return (callers[0][0], *chain, str(part))
        return (name, instruction.name, str(part))

    def _done(self, name: str, instruction: Instruction) -> HloValue:
        """Return the result of an instruction.

        Of a start the result of its `-done`, of a send the received array.
        """
        if instruction.opcode == "send":
            received = next(self._peers(name, instruction), instruction)
            return HloValue(name, received.name, 0)
        while instruction.opcode.endswith(("-start", "-update")):
            users = self.program.computations[name].users[instruction.name]
            later = [user for user, _ in users if user.opcode.endswith(("-done", "-update"))]
            if not later:
                break
            instruction = later[0]
        return HloValue(name, instruction.name)

    def _peers(self, name: str, instruction: Instruction) -> Iterator[Instruction]:
        """Yield the other end of a transfer between slices.

        `recv-done` of a `send`, or `send` of a `recv-done`.
        """
        computation = self.program.computations[name]
        if instruction.opcode == "send":
            for received in _matching(computation, "recv", instruction.attribute(_RENDEZVOUS)):
                for user, _ in computation.users[received.name]:
                    yield user
        else:
            received = computation.instructions[instruction.operands[0]]
            yield from _matching(computation, "send", received.attribute(_RENDEZVOUS))

    def _metadata(
        self, name: str, instruction: Instruction, operand: HloValue, result: HloValue
    ) -> Instruction:
        """Return the instruction with the most specific metadata on the origin of a result."""
        candidates = []
        users = [user for user, _ in self.program.computations[name].users[result.name]]
        for user in users:
            if user.opcode == "get-tuple-element" and user.index == result.element:
                candidates.append(user)
                break
        candidates += [instruction, self.program.at(result)]
        loops = []
        for _, call, _ in self.program.callers[name]:
            if call.opcode in ("while", "conditional"):
                loops.append(call)
            else:
                candidates.append(call)
        named = _first_with_scope(candidates)
        if named is None:
            # Combined collectives may have none: take that of the operand's origins or, for an
            # argument of the program, of the result's users.
            near = [self.program.at(value) for value in self._origins(operand)]
            named = _first_with_scope([*near, *users, *loops])
        if named is not None:
            return named
        for candidate in candidates:
            if "op_name=" in candidate.attributes:
                return candidate
        return instruction

    def _own_part(self, operand: HloValue, members: int) -> HloValue | None:
        """Return a device's own 1/members of an otherwise constant operand; else None."""
        whole = self.program.settled(operand)
        update = self.program.at(whole)
        if update.opcode != "dynamic-update-slice":
            return None
        rest = HloValue(whole.computation, update.operands[0])
        part = HloValue(whole.computation, update.operands[1])
        if self.program.at(self.program.settled(rest)).opcode != "broadcast":
            return None
        if self.program.at(part).arrays[0].size * members != update.arrays[0].size:
            return None
        return part

    def _keeps_part(self, result: HloValue, array: HloArray, groups: Groups) -> bool:
        """Tell whether each device of a group uses only its own shard of a value.

        All shards have the same size.
        """
        members = len(groups[0])
        is_used = False
        for computation, user, position in self.program.uses(result, moves=True):
            if user is None or user.opcode != "dynamic-slice" or position:
                return False
            corner = self._corner(computation, user)
            if corner is None or user.arrays[0].size * members != array.size:
                return False
            if not _all_differ(corner, groups):  # two devices use the same shard
                return False
            is_used = True
        return is_used

    def _corner(self, computation: str, part: Instruction) -> np.ndarray | None:
        """Return the start of a dynamic slice on each device, as int[devices, dimensions].

        None if it is unknown.
        """
        starts = []
        for operand in part.operands[1:]:
            start = per_device(self.program, HloValue(computation, operand), self.devices)
            if start is None or start.shape[1] != 1:
                return None
            starts.append(start)
        return np.concatenate(starts, axis=1)

    def _narrow(
        self,
        instruction: Instruction,
        operands: list[HloValue],
        array: HloArray,
        results: list[HloValue],
    ) -> str:
        """Return the dtype of data widened for this collective only, or an empty string."""
        if not self.cpu:
            return ""
        before = self._types_before(operands).intersection(_WIDENED.get(array.dtype, ()))
        narrowest = min(before, default="")
        reducer = instruction.attribute(r"to_apply=(\S+)")
        if not reducer:
            return narrowest
        # Users of a widened reduction convert its result back. The compiler marks a widened
        # reduction, unless it is combined.
        after = self._types_after(results, array.dtype)
        if array.dtype == "f32" and "_promoted" in reducer:
            return min((before | after) - {"f32"}, default="bf16")
        if narrowest and after == {narrowest}:
            return narrowest
        return ""

    def _types_before(self, operands: Iterable[HloValue]) -> set[str]:
        """Return the dtypes of operands' origins."""
        types: set[str] = set()
        for operand in operands:
            for origin in self._origins(operand):
                for array in self.program.at(origin).arrays:
                    types.add(array.dtype)
        return types

    def _types_after(self, results: Iterable[HloValue], dtype: str) -> set[str]:
        """Return the dtypes after conversion by users of results, or `dtype` for other users."""
        types: set[str] = set()
        todo = list(results)
        while todo:
            for computation, user, _ in self.program.uses(todo.pop()):
                if user is None:
                    types.add(dtype)
                elif user.opcode == "convert":
                    types.add(user.arrays[0].dtype)
                elif user.is_move or user.opcode in _SLICES:
                    todo.append(HloValue(computation, user.name))
                else:
                    types.add(dtype)
        return types

    def _origins(self, value: HloValue) -> Iterator[HloValue]:
        """Yield a value's origins, through moves, conversions, slices, gathers and permutes."""
        for _ in range(_MAX_VALUES):
            value = self.program.producer(value)
            yield value
            instruction = self.program.at(value)
            if instruction.opcode == "recv-done":
                instruction = next(self._peers(value.computation, instruction), instruction)
            elif not instruction.is_move and instruction.opcode not in _PASSED_ON:
                return
            value = HloValue(value.computation, instruction.operands[0])

    def _argument(self, value: HloValue) -> str:
        """Return the path of the program's argument behind a value, or an empty string."""
        *_, last = self._origins(value)
        instruction = self.program.at(last)
        if instruction.opcode != "parameter" or last.computation != self.program.entry:
            return ""
        return _path(instruction)

    def _factor(self, transfer: _Transfer, value: HloValue) -> str:
        """Return the path of the parameter in a sum of products, or an empty string."""
        if transfer.kind not in ("all-reduce", "reduce-scatter"):
            return ""
        product = self.program.settled(value)
        instruction = self.program.at(product)
        if instruction.opcode not in ("convolution", "dot"):
            return ""
        for operand in instruction.operands:
            path = self._argument(HloValue(product.computation, operand))
            if path.startswith(("params/", "variables/", "transforms/")):
                return path
        return ""

    def _destination(self, result: HloValue) -> str:
        """Return the path of the parameter updated element-wise from a value.

        Return an empty string if there is none, or if there are several.
        """
        todo = [result]
        seen = {result}
        params = set()
        while todo and len(seen) < _MAX_VALUES:
            for computation, user, position in self.program.uses(todo.pop()):
                if user is None:
                    path = self._overwritten(position)
                    if path.startswith("params/"):
                        params.add(path)
                elif user.is_move or user.opcode not in _MIXES:
                    following = self._done(computation, user)
                    if following not in seen and _has_numbers(user):
                        seen.add(following)
                        todo.append(following)
        if len(params) == 1 and len(seen) < _MAX_VALUES:
            return params.pop()
        return ""

    def _overwritten(self, output: int) -> str:
        """Return the path of the argument overwritten by an output, or an empty string."""
        number = self.program.aliases.get(output)
        if number is None:
            return ""
        name = self.program.computations[self.program.entry].parameters[number]
        return _path(self.program.at(HloValue(self.program.entry, name)))


def _payload(transfer: _Transfer, moved: Iterable[HloArray]) -> int:
    """Return the bytes of one execution (`spmd.analysis.collective_record`)."""
    size = sum(array.bytes for array in moved)
    if transfer.kind == "all-gather":  # the gathered result
        size *= max(map(len, transfer.places))
    return size


def _hlo_form(transfer: _Transfer, kind: str, widened: str) -> str:
    """Return the form in the program, if it differs from the kind.

    `widened` is the type of data that XLA:CPU converted to it for the collective, else empty.
    """
    if widened:
        return f"{widened} {transfer.kind}"
    form = transfer.kind
    if transfer.is_scatter_fusion:
        form = "all-reduce-scatter"
    if form == kind:
        return ""
    return form


def _shape_text(arrays: Sequence[HloArray]) -> str:
    """Return type and dimensions of an array, and the number of equal parts."""
    text = str(arrays[0])
    if len(arrays) > 1:
        text += f"×{len(arrays)}"
    return text


def _operation_of(transfer: _Transfer, part: int, op_name: str) -> str:
    """Return the operation of one record, or of all if the compiler kept no name for each array."""
    operations = read_names(op_name)
    if transfer.is_combined and len(operations) == transfer.records:
        return operations[part]
    return op_name


def _matching(computation: Computation, opcode: str, rendezvous: str) -> Iterator[Instruction]:
    """Yield the sends or receives with a rendezvous; none for an empty one."""
    for instruction in computation.instructions.values():
        if instruction.opcode != opcode or not rendezvous:
            continue
        if instruction.attribute(_RENDEZVOUS) == rendezvous:
            yield instruction


def _first_with_scope(instructions: Iterable[Instruction]) -> Instruction | None:
    """Return the first instruction with the scoped name of a JAX operation; else None."""
    for instruction in instructions:
        if "/" in instruction.op_name:
            return instruction
    return None


def _all_differ(corner: np.ndarray, groups: Groups) -> bool:
    """Return whether all devices of each group have different rows in int[devices, dimensions]."""
    members = len(groups[0])
    for group in groups:
        rows = corner[list(group)]
        if len(np.unique(rows, axis=0)) != members:
            return False
    return True


def _has_numbers(instruction: Instruction) -> bool:
    """Return whether a result has an array other than scalars and masks."""
    return any(array.size > 1 and array.dtype != "pred" for array in instruction.arrays)


def _path(parameter: Instruction) -> str:
    """Return the path of an argument: `state.params['mlp']['kernel']` as `params/mlp/kernel`."""
    parts = ["".join(groups) for groups in _PATH_PART.findall(parameter.op_name)]
    for start, part in enumerate(parts):
        if part in _TABLES:
            return "/".join(parts[start:])
    return "/".join(parts)
