"""Time of collectives on a machine's network.

It is the torus of a TPU slice or the links inside a host, and the network between slices or hosts.

| machine | inside | between |
|---|---|---|
| TPU | links to both neighbours in each dimension: a ring if it wraps, else a line | slices |
| GPU | all GPUs of a host with each other, by NVLink, Infinity Fabric or PCIe | hosts |
| GPU on an NVLink switch for several hosts | all GPUs of the switch | switches |

A gather of V bytes over a ring of n chips takes V·(n − 1)/n divided by the bandwidth of both
directions; over several dimensions of a torus, by the bandwidth of all of them together. A line has
half of that: its ends receive everything over one link. Members that are s chips apart share their
links with s − 1 other groups ("How to Scale Your Model", Austin et al., 2025, chapters 2 and 3).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np

from spmd.analysis.topology import Topology
from spmd.chips import Hardware
from spmd.sharding.mesh import AXES, MeshShape, arrange_devices

_EXCHANGES = ("all-to-all", "ragged-all-to-all")
_ONE_TO_ONE = ("collective-permute", "collective-broadcast")


@dataclasses.dataclass(frozen=True)
class Place:
    """Position of an absent device, with the attributes of a `jax.Device` for mesh layouts."""

    id: int
    platform: str
    device_kind: str
    coords: tuple[int, ...]
    core_on_chip: int = 0
    slice_index: int = 0
    process_index: int = 0


@dataclasses.dataclass(frozen=True)
class Extent:
    """Extent of a group of devices.

    Attributes:
        rings: For each dimension of the torus that the group extends along: chips, the distance
            between them, and whether it closes to a ring.
        local: Members in one slice or host.
        parts: Slices or hosts.
        cores: Members on one chip.
        dims: The dimensions of `rings`.
    """

    rings: tuple[tuple[int, int, bool], ...]
    local: int
    parts: int
    cores: int = 1
    dims: tuple[int, ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """Network under a mesh.

    Attributes:
        places: `[device, (part, core, x, y, z)]` in the order of the mesh; a part is a slice or a
            host.
        efficiency: Share of the published bandwidth that large collectives have.
    """

    topology: Topology
    hardware: Hardware
    places: np.ndarray
    shape: Mapping[str, int]
    efficiency: float = 0.8

    def axis_group(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the first group of devices along some mesh axes."""
        sizes = [self.shape[axis] for axis in AXES]
        numbers = np.arange(len(self.places)).reshape(sizes)
        index: list[slice | int] = [0] * len(AXES)
        for dim, axis in enumerate(AXES):
            if axis in axes:
                index[dim] = slice(None)
        return tuple(numbers[tuple(index)].ravel().tolist())

    def extent(self, group: Sequence[int]) -> Extent:
        """Return the extent of a group."""
        return _extent(self, tuple(group))

    def links(self, group: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the links occupied by a group's collectives.

        They are dimensions of the torus or the network inside a host, and the slow network.
        """
        extent = self.extent(group)
        names = [f"dimension {dim}" for dim in extent.dims]
        if not names and extent.local > 1:
            names.append("inside")
        if extent.parts > 1:
            names.append("between")
        return tuple(names)

    def seconds(self, kind: str, payload: float, group: Sequence[int]) -> float:
        """Return the time of a collective alone on the network; `payload` is as in an audit.

        TPU slices finish the part inside before hosts start the part between slices; GPUs overlap
        the parts inside and between hosts.
        """
        inside = self.inside(kind, payload, group)
        between = self.between(kind, payload, group)
        if self.topology.platform == "tpu":
            return inside + between
        return max(inside, between)

    def inside(self, kind: str, payload: float, group: Sequence[int]) -> float:
        """Return the time of the part of a collective inside slices or hosts."""
        extent = self.extent(group)
        if extent.local < 2:
            return 0.0
        if self.topology.platform == "tpu":
            return self._on_torus(kind, payload, extent, len(group))
        volume = payload * (extent.local - 1) / extent.local * _passes(kind)
        latency = self.hardware.latency * math.log2(len(group))
        return volume / (self.hardware.link * self.efficiency) + latency

    def _on_torus(self, kind: str, payload: float, extent: Extent, hops: int) -> float:
        """Return the time of a collective inside of TPU slices."""
        latency = self.hardware.latency
        link = self.hardware.link * self.efficiency
        if not extent.rings:  # the cores of one chip
            return latency
        if kind in _ONE_TO_ONE:
            return payload / link + latency
        if kind in _EXCHANGES:  # the links in the middle of a ring carry the traffic between halves
            times = []
            for chips, far, is_ring in extent.rings:
                times.append(payload * chips * far / (4 * _directions(is_ring)))
            return max(times) / link + latency * hops
        chips = extent.local // extent.cores
        rings = sum(_directions(is_ring) / far for _, far, is_ring in extent.rings)
        bandwidth = extent.cores * link * rings
        volume = payload * (chips - 1) / chips * _passes(kind)
        return volume / bandwidth + latency * sum(length for length, _, _ in extent.rings)

    def between(self, kind: str, payload: float, group: Sequence[int]) -> float:
        """Return the time of the part of a collective between slices or hosts."""
        extent = self.extent(group)
        if extent.parts < 2:
            return 0.0
        share = (extent.parts - 1) / extent.parts
        # Gathered or reduced data crosses once for all members inside; exchanged and permuted data
        # is each member's own.
        each = payload
        if kind not in (*_EXCHANGES, *_ONE_TO_ONE):
            each = payload / extent.local
        volume = each * share * _passes(kind)
        latency = (math.log2(extent.parts) + 1) * self.hardware.network_latency
        return volume / (self.hardware.network * self.efficiency) + latency

    def waiting(self, seconds: float, straggling: float) -> float:
        """Return the expected wait for the slowest slice.

        Steps of slices have the relative standard deviation `straggling` (σ). The expected maximum
        of n normal variables is close to σ·Φ⁻¹((n − 3/8)/(n + 1/4)) (Blom, 1958).
        """
        slices = self.topology.slices
        return seconds * straggling * NormalDist().inv_cdf((slices - 0.375) / (slices + 0.25))


def _passes(kind: str) -> int:
    """Return the number of passes of a collective's bytes over the network."""
    if kind == "all-reduce":  # a reduce-scatter and an all-gather
        return 2
    return 1


def _directions(is_ring: bool) -> int:
    """Return the number of links into an end: one of a line, two of a ring."""
    return 2 if is_ring else 1


def make_network(
    topology: Topology,
    shape: MeshShape,
    slices: Mapping[str, int],
    hardware: Hardware,
    efficiency: float = 0.8,
) -> Network:
    """Return the network under a mesh on a machine; its devices need not exist."""
    sizes = shape.resolve(topology.devices)
    places = device_places(topology, sizes, slices)
    return Network(topology, hardware, places, sizes.sizes, efficiency)


def device_places(topology: Topology, sizes: MeshShape, slices: Mapping[str, int]) -> np.ndarray:
    """Return `[device, (part, core, x, y, z)]` in the order of a mesh shape without -1.

    A part is a slice or a host (`Topology.part`).
    """
    places = [_place(topology, number) for number in range(topology.devices)]
    part = "slice_index"
    if topology.part == "host":
        part = "process_index"
    rows = []
    for place in arrange_devices(sizes, places, slices).ravel():
        rows.append((getattr(place, part), place.core_on_chip, *place.coords))
    return np.array(rows)


@functools.lru_cache(1024)
def _extent(network: Network, group: tuple[int, ...]) -> Extent:
    places = network.places[list(group)]
    first = places[places[:, 0] == places[0, 0]]  # members in the first part
    rings: dict[int, tuple[int, int, bool]] = {}
    if network.topology.platform == "tpu":
        rings = _rings(network.topology, first[:, 2:])
    return Extent(
        rings=tuple(rings.values()),
        local=len(first),
        parts=len(np.unique(places[:, 0])),
        cores=len(np.unique(first[:, 1])),
        dims=tuple(rings),
    )


def _rings(topology: Topology, places: np.ndarray) -> dict[int, tuple[int, int, bool]]:
    """Return dimension of the torus → ring of members at `[member, (x, y, z)]`, as in `Extent`."""
    lengths = (*topology.shape, 1, 1)
    rings = {}
    for dim in range(3):
        positions = np.unique(places[:, dim])
        if len(positions) == 1:
            continue
        far = int(np.diff(positions).min())
        closes = topology.wrap[dim] and len(positions) * far == lengths[dim]
        rings[dim] = (len(positions), far, bool(closes))
    return rings


def _place(topology: Topology, number: int) -> Place:
    """Return the position of a device by its number."""
    chip = topology.chip
    if topology.platform != "tpu":
        host, inside = divmod(number, topology.shape[-1])
        platform = "gpu"
        if topology.platform == "cpu":
            platform = "cpu"
        domain = 0
        coords = (inside, 0, 0)
        if chip.joined:
            domain, within = divmod(number, chip.joined)
            coords = (inside, within // topology.shape[-1], 0)
        return Place(
            number, platform, chip.device_kind, coords, slice_index=domain, process_index=host
        )
    slice_index, inside = divmod(number, math.prod(topology.shape) * chip.devices)
    at, core = divmod(inside, chip.devices)
    x, y, z = (*topology.shape, 1, 1)[:3]
    return Place(
        number,
        "tpu",
        chip.device_kind,
        coords=(at % x, at // x % y, at // (x * y) % z),
        core_on_chip=core,
        slice_index=slice_index,
        process_index=number // (topology.devices // topology.hosts),
    )
