"""Replica groups of collectives as axes of a mesh, from every form in which XLA writes them.

| form | example |
|---|---|
| listed | `{{0,1},{2,3}}` |
| iota, transposed or not | `[4,2]<=[2,4]T(1,0)` |
| axes of XLA's own mesh | `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(1)2}` |
| all devices | `{}` |
| pairs | `source_target_pairs={{0,1},{1,0}}` |

Numbers are partitions; partition *i* is the *i*-th device of `mesh.devices.flat`. XLA's own mesh may have other axes
than ours (`axis_0`), so its names are not used.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spmd.analysis.hlo import HloModule, HloValue, Instruction

Groups = Sequence[Sequence[int]]

_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(
    r"replica_groups=@?mesh[\[<](?P<axes>[^\]>]*)[\]>](?:, device_ids=\((?P<ids>\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))?"
    r" \{(?P<used>[^}]*)\}"
)
_INTEGERS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.floor_divide,  # indices are not negative
    "remainder": np.remainder,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "shift-right-logical": np.right_shift,
    "shift-left": np.left_shift,
    "clamp": lambda low, x, high: np.clip(x, low, high),
}


def kind_of(instruction: Instruction) -> str:
    """Return the kind of collective that an instruction is or starts; any other opcode as it is.

    Between TPU slices a collective is a `send` from each chip to its host, with the kind among its attributes.
    """
    between = instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"') if instruction.opcode == "send" else ""
    return between.lower().replace("_", "-") or instruction.opcode.removesuffix("-start")


def read_groups(attributes: str, devices: int) -> tuple[Groups, bool]:
    """Return the groups in an instruction's attributes, and whether they are (source, target) pairs.

    Example:
        >>> read_groups("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", devices=4)
        ([[0, 2], [1, 3]], False)
    """
    if found := _PAIRS.search(attributes):
        return [_numbers(pair) for pair in re.findall(r"\{([\d,]+)\}", found[1])], True
    if found := _IOTA.search(attributes):
        return _iota(found[2]).reshape(_numbers(found[1])).tolist(), False
    if found := _MESH.search(attributes):
        return _mesh_groups(found), False
    listed = _LISTED.search(attributes)
    groups = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1])] if listed else []
    if groups and (groups != [[0]] or devices == 1):
        return groups, False
    # Ids without a channel are replicas, and a JAX program is one; with a channel, one replica is all partitions.
    alone = groups and "channel_id=" not in attributes
    return [[n] for n in range(devices)] if alone else [list(range(devices))], False


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _iota(text: str) -> np.ndarray:
    """Return the array that `[2,4]T(1,0)` denotes: 0, 1, 2, … in that shape, then transposed."""
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids.transpose(_numbers(order)) if order else ids


def _mesh_groups(found: re.Match[str]) -> Groups:
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", found["axes"])}
    text = found["ids"] or f"[{math.prod(sizes.values())}]"
    ids = _iota(text) if text.startswith("[") else np.array(_numbers(text))
    place = dict(zip(sizes, np.indices(tuple(sizes.values())).reshape(len(sizes), -1), strict=True))
    # Devices of a group differ only along the axes used; `:(p)n` is a part of an axis, n devices inside of p.
    for axis, before, size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?", found["used"]):
        if size:
            stride = sizes[axis] // (int(before) * int(size))
            place[axis] = place[axis] - (place[axis] // stride % int(size)) * stride
        else:
            place[axis] = np.zeros_like(place[axis])
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, key in zip(ids.ravel().tolist(), zip(*place.values(), strict=True), strict=True):
        groups.setdefault(tuple(map(int, key)), []).append(device)
    return list(groups.values())


def mesh_axes(groups: Groups, axes: Mapping[str, int], *, pairs: bool = False) -> tuple[str, ...] | None:
    """Return the mesh axes, larger than 1, that groups span; None if the groups are no product of axes.

    A part of the devices along one axis counts as the axis: one hop of several. For (source, target) pairs these are
    the axes along which the devices of a pair differ.

    Example:
        >>> mesh_axes([[0, 2], [1, 3]], {"data": 2, "tensor": 2}), mesh_axes([[0, 3], [1, 2]], {"data": 2, "tensor": 2})
        (('data',), None)
    """
    if len({len(group) for group in groups}) != 1:
        return () if pairs and not groups else None
    members = np.array(groups)
    if members.max() >= math.prod(axes.values()):
        return None
    coordinates = np.stack(np.unravel_index(members, tuple(axes.values())))  # [axis, group, member]
    varying = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
    named = tuple(axis for axis, varies in zip(axes, varying, strict=True) if varies)
    whole = len(named) == 1 or members.shape[1] == math.prod(axes[axis] for axis in named)
    everyone = np.array_equal(np.sort(members, axis=None), np.arange(math.prod(axes.values())))
    return named if pairs or (whole and everyone) else None


def entering(groups: Groups, parts: np.ndarray, kind: str, *, pairs: bool) -> int:
    """Return how many payloads a run of a collective sends into a part from others; the most into any.

    One for each group that spans parts, or for each device in it where every device gets data of its own.
    """
    members = [parts[list(group)].tolist() for group in groups]
    spanning = [numbers[1:] if pairs else numbers for numbers in members if len(set(numbers)) > 1]
    is_own = pairs or kind in ("all-to-all", "collective-permute", "ragged-all-to-all")
    counts = (sum(numbers.count(n) if is_own else n in numbers for numbers in spanning) for n in set(parts.tolist()))
    return max(counts, default=0)


def per_device(program: HloModule, value: HloValue, devices: int) -> np.ndarray | None:
    """Evaluate an integer scalar or table on each device, as int[devices, elements].

    None if it depends on anything but constants and the partition id. A table that the program's text omits is taken
    to hold different numbers.
    """
    value = program.producer(value)
    instruction = program.at(value)
    opcode = instruction.opcode
    if opcode == "partition-id":
        return np.arange(devices)[:, None]
    if opcode == "replica-id":  # a JAX program is one replica
        return np.zeros((devices, 1), int)
    if not instruction.is_move and opcode not in (*_INTEGERS, "constant", "dynamic-slice"):
        return None
    array = instruction.arrays[0]
    if opcode == "constant" and array.dtype[0] in "su" and len(array.dims) < 2:
        # Long tables are omitted from the text. The compiler makes them of the places of devices' shards.
        is_omitted = instruction.literal == "{...}"
        numbers = np.arange(array.size) if is_omitted else np.array(_numbers(instruction.literal))
        return np.broadcast_to(numbers, (devices, array.size))
    known = (per_device(program, HloValue(value.computation, name), devices) for name in instruction.operands)
    operands = [operand for operand in known if operand is not None]
    if len(operands) < len(instruction.operands):
        return None
    if instruction.is_move:
        return operands[0]
    if opcode in _INTEGERS:
        return _INTEGERS[opcode](*operands)
    if opcode == "dynamic-slice" and len(operands) == 2 and array.size == 1:
        return np.take_along_axis(operands[0], np.clip(operands[1], 0, operands[0].shape[1] - 1), axis=1)
    return None
