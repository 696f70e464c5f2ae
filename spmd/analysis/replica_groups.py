"""Which devices a collective connects, as axes of a mesh, from every form in which XLA writes it.

| form | example |
|---|---|
| listed | `{{0,1},{2,3}}` |
| iota, transposed or not | `[4,2]<=[2,4]T(1,0)` |
| axes of XLA's own mesh | `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(1)2}` |
| all devices | `{}` |
| pairs | `source_target_pairs={{0,1},{1,0}}` |

Numbers are partitions; partition *i* is the *i*-th device of `mesh.devices.flat`. XLA's own mesh may have other axes
than ours (`axis_0`), so its names are never taken over.
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
    """What kind of collective an instruction is or starts; any other opcode as it is.

    Between TPU slices a collective is a `send` from each chip to its host, with the kind among its attributes.
    """
    between = instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"') if instruction.opcode == "send" else ""
    return between.lower().replace("_", "-") or instruction.opcode.removesuffix("-start")


def read_groups(attributes: str, devices: int) -> tuple[Groups, bool]:
    """The groups of partitions in an instruction's attributes.

    Args:
        attributes: The text behind the instruction's operands.
        devices: How many partitions there are.

    Returns:
        The groups, and whether they are (source, target) pairs.

    Example:
        >>> read_groups("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", 4)
        ([[0, 2], [1, 3]], False)
    """
    if found := _PAIRS.search(attributes):
        return [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", found[1])], True
    if found := _IOTA.search(attributes):
        return _iota(found[2]).reshape(_numbers(found[1])).tolist(), False
    if found := _MESH.search(attributes):
        return _mesh_groups(found), False
    listed = _LISTED.search(attributes)
    groups = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1])] if listed else []
    # Without a channel, ids are replicas, and a JAX program is one; with it, the replica stands for all partitions.
    if not groups or (groups == [[0]] and devices > 1):
        replica_mode = "channel_id=" not in attributes and groups
        return [[n] for n in range(devices)] if replica_mode else [list(range(devices))], False
    return groups, False


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _iota(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`: 0, 1, 2, … in that shape, then transposed."""
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids.transpose(_numbers(order)) if order else ids


def _mesh_groups(found: re.Match[str]) -> Groups:
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", found["axes"])}
    text = found["ids"] or ""
    ids = (
        np.array(_numbers(text))
        if text and not text.startswith("[")
        else _iota(text or f"[{math.prod(sizes.values())}]")
    )
    place = dict(zip(sizes, np.indices(tuple(sizes.values())).reshape(len(sizes), -1), strict=True))
    # Devices of a group agree in all coordinates but the axes used; `:(p)n` is the part of n behind a part of p.
    for axis, before, size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?", found["used"]):
        if size:
            behind = sizes[axis] // (int(before) * int(size))
            place[axis] = place[axis] - (place[axis] // behind % int(size)) * behind
        else:
            place[axis] = np.zeros_like(place[axis])
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, key in zip(ids.ravel().tolist(), zip(*place.values(), strict=True), strict=True):
        groups.setdefault(tuple(map(int, key)), []).append(device)
    return list(groups.values())


def mesh_axes(groups: Groups, axes: Mapping[str, int], *, pairs: bool = False) -> tuple[str, ...] | None:
    """The axes of a mesh that groups span, in the mesh's order; axes of size 1 are never among them.

    Args:
        groups: From `read_groups`.
        axes: Axis → size, outermost first: `mesh.shape`.
        pairs: The groups are (source, target) pairs: then the axes along which a pair's devices differ.

    Returns:
        None where the groups are no product of axes: unequal, not of all devices, or of a part of an axis.

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
    whole = members.shape[1] == math.prod(axes[axis] for axis in named)
    everyone = np.array_equal(np.sort(members, axis=None), np.arange(math.prod(axes.values())))
    return named if pairs or (whole and everyone) else None


def on_mesh(groups: Groups, places: np.ndarray) -> Groups:
    """Groups of the partitions of one program as groups of devices of the mesh.

    Args:
        groups: From `read_groups`.
        places: int[programs, partitions]: the devices; a TPU has one program for each slice.

    Example:
        >>> on_mesh([[0, 1]], np.array([[0, 1], [2, 3]]))
        [[0, 1], [2, 3]]
    """
    return [[int(row[i]) for i in group] for row in places for group in groups] if len(places) > 1 else groups


def spans(groups: Groups, parts: np.ndarray) -> bool:
    """Whether some group has devices in more than one part.

    Args:
        groups: From `read_groups`.
        parts: For each device the number of its part, such as its slice.

    Example:
        >>> spans([[0, 1], [2, 3]], np.array([0, 0, 1, 1])), spans([[0, 2], [1, 3]], np.array([0, 0, 1, 1]))
        (False, True)
    """
    return any(len(set(parts[list(group)].tolist())) > 1 for group in groups)


def per_device(program: HloModule, value: HloValue, devices: int) -> np.ndarray | None:
    """An integer of the program as each device computes it from its own number.

    Args:
        program: The program.
        value: A scalar, or a constant table; one that the program's text leaves out is taken for different numbers.
        devices: How many partitions there are.

    Returns:
        `[devices, elements]`, or None where it depends on anything else.
    """
    value = program.producer(value)
    instruction = program.at(value)
    if instruction.opcode == "partition-id":
        return np.arange(devices)[:, None]
    if (
        instruction.opcode == "constant"
        and instruction.arrays[0].dtype[0] in "su"
        and len(instruction.arrays[0].dims) < 2
    ):
        size = instruction.arrays[0].size
        # A long table is left out of the program's text. The compiler makes them of the places of devices' parts.
        numbers = np.arange(size) if instruction.literal == "{...}" else np.array(_numbers(instruction.literal))
        return np.broadcast_to(numbers, (devices, size))
    operands = []
    if instruction.is_move or instruction.opcode in (*_INTEGERS, "dynamic-slice"):
        for name in instruction.operands:
            operand = per_device(program, HloValue(value.computation, name), devices)
            if operand is None:
                return None
            operands.append(operand)
    if instruction.is_move:
        return operands[0]
    if instruction.opcode in _INTEGERS:
        return _INTEGERS[instruction.opcode](*operands)
    if instruction.opcode == "dynamic-slice" and len(operands) == 2 and instruction.arrays[0].size == 1:
        return np.take_along_axis(operands[0], np.clip(operands[1], 0, operands[0].shape[1] - 1), axis=1)
    return None
