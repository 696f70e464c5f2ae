"""Replica groups of collectives as axes of a mesh, from all of XLA's notations.

| form | example |
|---|---|
| listed | `{{0,1},{2,3}}` |
| iota, transposed or not | `[4,2]<=[2,4]T(1,0)` |
| axes of XLA's own mesh | `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(1)2}` |
| all devices | `{}` |
| pairs | `source_target_pairs={{0,1},{1,0}}` |

Numbers are partitions; partition *i* is the *i*-th device of `mesh.devices.flat`. XLA's own mesh
may have other axes (`axis_0`) than the plan's mesh, so its names are not used.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spmd.analysis.hlo import HloModule, HloValue, Instruction

Groups = Sequence[Sequence[int]]

_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(
    r"replica_groups=@?mesh[\[<](?P<axes>[^\]>]*)[\]>]"
    r"(?:, device_ids=\((?P<ids>\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))?"
    r" \{(?P<used>[^}]*)\}"
)
_USED_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")
_MESH_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_GROUP = re.compile(r"\{([\d,]+)\}")
_OWN_DATA = ("all-to-all", "collective-permute", "ragged-all-to-all")
"""Kinds of collectives in which every device gets data of its own."""

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
    """Return the kind of a collective or of its start; the opcode of any other instruction.

    Between TPU slices a collective is a `send` from each chip to its host, with the kind among its
    attributes.
    """
    if instruction.opcode == "send":
        between = instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"')
        if between:
            return between.lower().replace("_", "-")
    return instruction.opcode.removesuffix("-start")


def read_groups(attributes: str, devices: int) -> tuple[Groups, bool]:
    """Return the groups in an instruction's attributes, and whether they are pairs.

    Pairs are (source, target).

    Example:
        >>> read_groups("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", devices=4)
        ([[0, 2], [1, 3]], False)
    """
    pairs = _PAIRS.search(attributes)
    if pairs:
        return _listed_groups(pairs[1]), True
    iota = _IOTA.search(attributes)
    if iota:
        return _iota(iota[2]).reshape(_numbers(iota[1])).tolist(), False
    mesh = _MESH.search(attributes)
    if mesh:
        return _mesh_groups(mesh), False
    listed = _LISTED.search(attributes)
    groups = _listed_groups(listed[1]) if listed else []
    if not groups:
        return [list(range(devices))], False
    if groups == [[0]] and devices != 1:
        # Ids without a channel are replicas, and a JAX program is one; with a channel, one replica
        # is all partitions.
        if "channel_id=" in attributes:
            return [list(range(devices))], False
        return [[device] for device in range(devices)], False
    return groups, False


def _listed_groups(text: str) -> list[list[int]]:
    return [_numbers(group) for group in _GROUP.findall(text)]


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _iota(text: str) -> np.ndarray:
    """Read `[2,4]T(1,0)` as an array: 0, 1, 2, … in the shape, then transposed."""
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    if order:
        ids = ids.transpose(_numbers(order))
    return ids


def _mesh_groups(found: re.Match[str]) -> Groups:
    """Return the groups over some axes of a mesh of XLA."""
    sizes: dict[str, int] = {}
    for name, size in _MESH_AXIS.findall(found["axes"]):
        sizes[name] = int(size)
    ids = _mesh_devices(found["ids"], math.prod(sizes.values()))
    coordinates = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)  # [axis, device]
    place = dict(zip(sizes, coordinates, strict=True))
    # Devices of a group differ only along the axes used; `:(p)n` is a part of an axis, n devices
    # inside of p.
    for axis, before, size in _USED_AXIS.findall(found["used"]):
        if size:
            stride = sizes[axis] // (int(before) * int(size))
            place[axis] = place[axis] - (place[axis] // stride % int(size)) * stride
        else:
            place[axis] = np.zeros_like(place[axis])
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, *key in zip(ids.tolist(), *place.values(), strict=True):
        groups.setdefault(tuple(map(int, key)), []).append(device)
    return list(groups.values())


def _mesh_devices(ids: str | None, count: int) -> np.ndarray:
    """Return the devices of a mesh in order; all in their own order if none are written."""
    if not ids:
        return np.arange(count)
    if ids.startswith("["):
        return _iota(ids).ravel()
    return np.array(_numbers(ids))


def mesh_axes(
    groups: Groups, axes: Mapping[str, int], *, pairs: bool = False
) -> tuple[str, ...] | None:
    """Return the mesh axes above size 1 spanned by groups; None for no product of axes.

    A part of the devices along one axis counts as the axis: one hop of several. For (source,
    target) pairs these are the axes along which the devices of a pair differ.

    Example:
        >>> sizes = {"data": 2, "tensor": 2}
        >>> mesh_axes([[0, 2], [1, 3]], sizes), mesh_axes([[0, 3], [1, 2]], sizes)
        (('data',), None)
    """
    if pairs and not groups:
        return ()
    if len(set(map(len, groups))) != 1:
        return None
    members = np.array(groups)
    devices = math.prod(axes.values())
    if members.max() >= devices:
        return None
    coordinates = np.stack(np.unravel_index(members, tuple(axes.values())))  # [axis, group, member]
    varying = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
    named = tuple(axis for axis, varies in zip(axes, varying, strict=True) if varies)
    if pairs:
        return named
    product = math.prod(axes[axis] for axis in named)
    is_whole = len(named) == 1 or members.shape[1] == product
    has_all = np.array_equal(np.sort(members, axis=None), np.arange(devices))
    if not is_whole or not has_all:
        return None
    return named


def program_places(program: HloModule, slices: np.ndarray) -> np.ndarray:
    """Return the devices' numbers in the mesh, `[program, device]`.

    XLA:TPU makes one program for each slice, of the slice's devices in the order of the mesh.

    Args:
        slices: The number of each device's slice.
    """
    devices = program.partitions * program.replicas
    if devices == 1:
        devices = slices.size
    in_order = np.arange(slices.size)
    if devices != slices.size:
        in_order = np.argsort(slices, kind="stable")
    return in_order.reshape(-1, devices)


def mesh_places(instruction: Instruction, groups: Groups, places: np.ndarray) -> Groups:
    """Return the groups of all programs, with the devices' numbers in the mesh.

    Between slices there are several programs, and a `send` joins the same device of all.

    Args:
        groups: Of one program.
        places: `[program, device]` → number in the mesh.
    """
    if instruction.opcode == "send":
        return places.T.tolist()
    if len(places) == 1:
        return groups
    found = []
    for row in places:
        for group in groups:
            found.append(row[list(group)].tolist())
    return found


def cross_slice_count(groups: Groups, parts: np.ndarray, kind: str, *, pairs: bool) -> int:
    """Return the payloads per run of a collective into the part with the most from other parts.

    Count one payload for each group that spans parts, or one for each of its devices if every
    device gets data of its own. `parts` has the number of each device's part, such as its slice.
    """
    is_own = pairs or kind in _OWN_DATA
    payloads: Counter[int] = Counter()
    for group in groups:
        numbers = parts[list(group)].tolist()
        if len(set(numbers)) < 2:
            continue
        if pairs:
            numbers = numbers[1:]  # only the target receives
        if not is_own:
            numbers = list(dict.fromkeys(numbers))
        payloads.update(numbers)
    return max(payloads.values(), default=0)


def per_device(program: HloModule, value: HloValue, devices: int) -> np.ndarray | None:
    """Evaluate an integer scalar or table on each device, as int[devices, elements].

    None if it depends on anything but constants and the partition id. A table that the program's
    text omits is taken to hold different numbers.
    """
    value = program.producer(value)
    instruction = program.at(value)
    opcode = instruction.opcode
    if opcode == "partition-id":
        return np.arange(devices)[:, None]
    if opcode == "replica-id":  # a JAX program is one replica
        return np.zeros((devices, 1), int)
    if _is_table(instruction):
        return np.broadcast_to(_table(instruction), (devices, instruction.arrays[0].size))
    if not instruction.is_move and opcode not in (*_INTEGERS, "dynamic-slice"):
        return None
    operands = []
    for name in instruction.operands:
        operand = per_device(program, HloValue(value.computation, name), devices)
        if operand is None:
            return None
        operands.append(operand)
    return _evaluate(instruction, operands)


def _is_table(instruction: Instruction) -> bool:
    """Return whether an instruction is a constant integer scalar or vector."""
    if instruction.opcode != "constant":
        return False
    array = instruction.arrays[0]
    return array.dtype[0] in "su" and len(array.dims) < 2


def _table(constant: Instruction) -> np.ndarray:
    """Return the numbers of a constant.

    Long tables are omitted from the text: they count as 0, 1, 2, …, since compilers make them of
    the places of devices' shards.
    """
    if constant.literal == "{...}":
        return np.arange(constant.arrays[0].size)
    return np.array(_numbers(constant.literal))


def _evaluate(instruction: Instruction, operands: Sequence[np.ndarray]) -> np.ndarray | None:
    """Evaluate an instruction on each device; None if it is no function of integer scalars."""
    if instruction.is_move:
        return operands[0]
    function = _INTEGERS.get(instruction.opcode)
    if function is not None:
        return function(*operands)
    is_element = instruction.opcode == "dynamic-slice" and instruction.arrays[0].size == 1
    if not is_element or len(operands) != 2:
        return None
    table, start = operands
    last = table.shape[1] - 1
    return np.take_along_axis(table, np.clip(start, 0, last), axis=1)
