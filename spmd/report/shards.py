"""Placement of a mesh on its machine, and of one array on a mesh, as rectangles to draw."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from spmd.analysis.topology import Topology
from spmd.plan.plan import ShardingPlan
from spmd.plan.records import PlanEntry
from spmd.sharding.dims import spec_dims
from spmd.sharding.mesh import AXES, BATCH_AXES, MeshShape
from spmd.step_time.network import device_places

MOST_DEVICES = 4096
"""Devices of a mesh in a chart; those of further slices or hosts are left to the text."""
_GAP = 1
"""Columns or rows between two panels."""
_ASPECT = 1.6
"""Width of a pleasant picture in units of its height."""


@dataclasses.dataclass(frozen=True)
class DeviceMap:
    """Devices of a mesh at their places on the machine.

    Attributes:
        indices: Mesh axis larger than 1 → index of each device along it.
        x: Column of each drawn device; `y` is its row, from the top.
        batch: `[device, 2]`, its first example of a batch, and the one after its last.
        panels: Label of each block of devices (a plane of a torus, a host) → column and row of its
            corner.
        links: Segments `(x0, y0, x1, y1)` between neighbours in a plane, and over its edge where
            links wrap around.
        total: Devices of the mesh, drawn or not.
    """

    indices: Mapping[str, np.ndarray]
    x: np.ndarray
    y: np.ndarray
    batch: np.ndarray
    panels: Mapping[str, tuple[float, float]]
    links: tuple[tuple[float, float, float, float], ...]
    total: int

    @property
    def width(self) -> float:
        """Columns."""
        return float(self.x.max()) + 1

    @property
    def height(self) -> float:
        """Rows."""
        return float(self.y.max()) + 1


@dataclasses.dataclass(frozen=True)
class ShardPicture:
    """An array and the shard of the first device.

    Attributes:
        rows: Length of the last dimension but one, 1 for a vector; `columns` of the last.
        row_axes: Mesh axes that split the rows, with sizes; `column_axes` those of the columns.
        outer: The dimensions before these two: length → axes.
        shards: Different shards; each is on `copies` devices.
    """

    entry: PlanEntry
    rows: int
    columns: int
    row_axes: Mapping[str, int]
    column_axes: Mapping[str, int]
    outer: tuple[tuple[int, Mapping[str, int]], ...]
    shards: int
    copies: int

    @property
    def row_parts(self) -> int:
        """Parts of the rows."""
        return math.prod(self.row_axes.values())

    @property
    def column_parts(self) -> int:
        """Parts of the columns."""
        return math.prod(self.column_axes.values())


@dataclasses.dataclass(frozen=True)
class _Panels:
    """Blocks of devices, `columns` of them side by side, with a gap between any two.

    Attributes:
        width: Devices in a row of a block; `height` in a column of it.
    """

    columns: int
    width: int
    height: int

    def corner(self, number: Any) -> tuple[Any, Any]:
        """Return the column and the row of the first device of a block, or of each in an array."""
        x = number % self.columns * (self.width + _GAP)
        y = number // self.columns * (self.height + _GAP)
        return x, y


def shard_pictures(plan: ShardingPlan) -> tuple[ShardPicture, ...]:
    """Return a picture of the largest parameter of each rule, the largest first."""
    by_size = sorted(plan.params, key=lambda entry: (-math.prod(entry.shape), entry.path))
    largest: dict[str, PlanEntry] = {}
    for entry in by_size:
        largest.setdefault(entry.rule, entry)
    return tuple(_picture(entry, plan.mesh.shape) for entry in largest.values())


def _picture(entry: PlanEntry, sizes: Mapping[str, int]) -> ShardPicture:
    used = tuple(axis for axis in AXES if sizes[axis] > 1)
    axes_of_dims = spec_dims(entry.spec, len(entry.shape), used)
    dims: list[tuple[int, dict[str, int]]] = []
    shards = 1
    for length, axes in zip(entry.shape, axes_of_dims, strict=True):
        split = {axis: sizes[axis] for axis in axes}
        dims.append((length, split))
        shards *= math.prod(split.values())
    while len(dims) < 2:  # a vector is drawn as one row, a scalar as one element
        dims.insert(0, (1, {}))
    *outer, (rows, row_axes), (columns, column_axes) = dims
    return ShardPicture(
        entry=entry,
        rows=rows,
        columns=columns,
        row_axes=row_axes,
        column_axes=column_axes,
        outer=tuple(outer),
        shards=shards,
        copies=math.prod(sizes.values()) // shards,
    )


def map_devices(
    topology: Topology, sizes: Mapping[str, int], slices: Mapping[str, int], batch: int
) -> DeviceMap:
    """Return the places of a mesh's devices on a machine, their indices and examples of a batch."""
    places = device_places(topology, MeshShape(**sizes), slices)
    part, core, x, y, z = places.T
    if topology.platform == "cpu":  # simulated devices have no places: as a block
        y, x = divmod(x, max(8, math.ceil(math.sqrt(_ASPECT * len(x)))))
    cores = int(core.max()) + 1
    depth = int(z.max()) + 1
    width = (int(x.max()) + 1) * cores
    height = int(y.max()) + 1

    panel = part * depth + z  # a plane of a torus, or a host
    drawn = _are_drawn(panel, y, width, height)
    count = int(panel[drawn].max()) + 1
    panels = _Panels(_columns(count, width, height), width, height)
    corner_x, corner_y = panels.corner(panel)

    corners = {}
    links: list[tuple[float, float, float, float]] = []
    for number in range(count):
        corner = panels.corner(number)
        part_number, plane = divmod(number, depth)
        corners[_label(topology, part_number, plane, depth)] = corner
        if topology.chip.dims:
            links += _links(topology, width, height, *corner)

    indices = _mesh_indices(sizes)
    drawn_indices = {}
    for axis in AXES:
        if sizes[axis] > 1:
            drawn_indices[axis] = indices[axis][drawn]
    return DeviceMap(
        indices=drawn_indices,
        x=(corner_x + x * cores + core)[drawn],
        y=(corner_y + y)[drawn],
        batch=_examples(indices, sizes, batch)[drawn],
        panels=corners,
        links=tuple(links),
        total=len(places),
    )


def _are_drawn(panel: np.ndarray, row: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return whether each device is one of the first panels and rows, of at most `MOST_DEVICES`."""
    most_panels = max(1, MOST_DEVICES // (width * height))
    most_rows = max(1, MOST_DEVICES // width)
    return (panel < most_panels) & (row < most_rows)


def _mesh_indices(sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return mesh axis → index of each device along it."""
    shape = tuple(MeshShape(**sizes).sizes.values())
    indices = np.indices(shape).reshape(len(AXES), -1)  # [axis, device]
    return dict(zip(AXES, indices, strict=True))


def _examples(
    indices: Mapping[str, np.ndarray], sizes: Mapping[str, int], batch: int
) -> np.ndarray:
    """Return the first example of each device, and the one after its last: `[device, 2]`."""
    shape = [sizes[axis] for axis in BATCH_AXES]
    own = [indices[axis] for axis in BATCH_AXES]
    row = np.ravel_multi_index(own, shape)
    parts = math.prod(shape)
    return np.stack([row * batch // parts, (row + 1) * batch // parts], axis=1)


def _columns(count: int, width: int, height: int) -> int:
    """Return the number of panels in a row for a picture of a pleasant shape."""
    return min(
        range(1, count + 1),
        key=lambda columns: _distortion(columns, count, width, height),
    )


def _distortion(columns: int, count: int, width: int, height: int) -> float:
    """Return the distance of a picture from the pleasant aspect ratio, 0 for none."""
    rows = math.ceil(count / columns)
    aspect = columns * (width + _GAP) / (rows * (height + _GAP))
    return abs(math.log(aspect / _ASPECT))


def _label(topology: Topology, part: int, plane: int, depth: int) -> str:
    """Return the name of a panel; empty if it is the only one of its kind."""
    names = []
    if topology.platform == "tpu":
        if topology.slices > 1:
            names.append(f"slice {part}")
        if depth > 1:
            names.append(f"z = {plane}")
    elif topology.hosts > 1:
        names.append(f"{topology.part} {part}")
    return ", ".join(names)


def _links(
    topology: Topology, width: int, height: int, left: float, top: float
) -> Iterator[tuple[float, float, float, float]]:
    """Yield the links of one plane; a stub over the edge is half of a link around the torus."""
    over_x, over_y = map(_stub, topology.wrap[:2])
    for row in range(height):
        yield left - over_x, top + row, left + width - 1 + over_x, top + row
    for column in range(width):
        yield left + column, top - over_y, left + column, top + height - 1 + over_y


def _stub(wraps: bool) -> float:
    """Return the length of a link over the edge of a plane."""
    if wraps:
        return 0.45
    return 0.0
