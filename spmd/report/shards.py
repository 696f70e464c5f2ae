"""Placement of a mesh on its machine, and of one array on a mesh, as rectangles to draw."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np

from spmd.analysis.topology import Topology
from spmd.plan.plan import ShardingPlan
from spmd.plan.records import PlanEntry
from spmd.sharding.dims import spec_dims
from spmd.sharding.mesh import AXES, BATCH_AXES, MeshShape
from spmd.step_time.network import device_places

MOST_DEVICES = 4096
"""Devices of a mesh that are drawn; those of further slices or hosts are left to the text."""
_GAP, _ASPECT = 1, 1.6


@dataclasses.dataclass(frozen=True)
class DeviceMap:
    """Devices of a mesh where they are on the machine.

    Attributes:
        indices: Mesh axis larger than 1 → index of each device along it.
        x: Column of each drawn device; `y` is its row, from the top.
        batch: `[device, 2]`, its first example of a batch, and the one after its last.
        panels: Label of each block of devices (a plane of a torus, a host) → column and row of its corner.
        links: Segments `(x0, y0, x1, y1)` between neighbours in a plane, and over its edge where links wrap around.
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
        rows: Length of the last dimension but one, 1 for a vector; `columns` is that of the last.
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


def shard_pictures(plan: ShardingPlan) -> tuple[ShardPicture, ...]:
    """Return a picture of the largest parameter of each rule, the largest first."""
    largest: dict[str, PlanEntry] = {}
    for entry in sorted(plan.params, key=lambda e: (-math.prod(e.shape), e.path)):
        largest.setdefault(entry.rule, entry)
    return tuple(_picture(entry, plan.mesh.shape) for entry in largest.values())


def _picture(entry: PlanEntry, sizes: Mapping[str, int]) -> ShardPicture:
    axes = tuple(axis for axis in AXES if sizes[axis] > 1)
    dims = spec_dims(entry.spec, len(entry.shape), axes)
    split = [{axis: sizes[axis] for axis in dim} for dim in dims]
    padding = [(1, dict[str, int]())] * max(0, 2 - len(entry.shape))
    *outer, rows, columns = [*padding, *zip(entry.shape, split, strict=True)]
    shards = math.prod(size for dim in split for size in dim.values())
    copies = math.prod(sizes.values()) // shards
    return ShardPicture(entry, rows[0], columns[0], rows[1], columns[1], tuple(outer), shards, copies)


def map_devices(topology: Topology, sizes: Mapping[str, int], slices: Mapping[str, int], batch: int) -> DeviceMap:
    """Return where the devices of a mesh are on a machine, with their indices and their examples of a batch."""
    shape = MeshShape(**sizes)
    places = device_places(topology, shape, slices)
    indices = dict(zip(AXES, np.indices(tuple(shape.sizes.values())).reshape(len(AXES), -1), strict=True))
    part, core, x, y, z = places.T
    if topology.platform == "cpu":  # simulated devices have no places: as a block
        y, x = divmod(x, max(8, math.ceil(math.sqrt(_ASPECT * len(x)))))
    cores, depth = int(core.max()) + 1, int(z.max()) + 1
    width, height = (int(x.max()) + 1) * cores, int(y.max()) + 1
    panel = part * depth + z
    each = width * height
    drawn = (panel < max(1, MOST_DEVICES // each)) & (y < max(1, MOST_DEVICES // width))
    count = int(panel[drawn].max()) + 1
    columns = _columns(count, width, height)
    corner_x, corner_y = panel % columns * (width + _GAP), panel // columns * (height + _GAP)
    parts = math.prod(sizes[axis] for axis in BATCH_AXES)
    row = np.ravel_multi_index([indices[axis] for axis in BATCH_AXES], [sizes[axis] for axis in BATCH_AXES])
    corners = [(n % columns * (width + _GAP), n // columns * (height + _GAP)) for n in range(count)]
    labels = [_label(topology, n // depth, n % depth, depth) for n in range(count)]
    links = [link for at in corners for link in _links(topology, width, height, *at)] if topology.chip.dims else []
    return DeviceMap(
        {axis: indices[axis][drawn] for axis in AXES if sizes[axis] > 1},
        (corner_x + x * cores + core)[drawn],
        (corner_y + y)[drawn],
        np.stack([row * batch // parts, (row + 1) * batch // parts], axis=1)[drawn],
        dict(zip(labels, corners, strict=True)),
        tuple(links),
        len(places),
    )


def _columns(count: int, width: int, height: int) -> int:
    """Return how many panels are in a row, for a picture of a pleasant shape."""

    def shape(columns: int) -> float:
        rows = math.ceil(count / columns)
        return abs(math.log(columns * (width + _GAP) / (rows * (height + _GAP)) / _ASPECT))

    return min(range(1, count + 1), key=shape)


def _label(topology: Topology, part: int, plane: int, depth: int) -> str:
    if topology.platform != "tpu":
        return f"host {part}" if topology.hosts > 1 else ""
    names = [f"slice {part}"] * (topology.slices > 1) + [f"z = {plane}"] * (depth > 1)
    return ", ".join(names)


def _links(
    topology: Topology, width: int, height: int, left: float, top: float
) -> Iterator[tuple[float, float, float, float]]:
    """Yield the links of one plane; a stub over the edge is half of a link that wraps around."""
    over_x, over_y = (0.45 if wraps else 0.0 for wraps in topology.wrap[:2])
    for row in range(height):
        yield left - over_x, top + row, left + width - 1 + over_x, top + row
    for column in range(width):
        yield left + column, top - over_y, left + column, top + height - 1 + over_y
