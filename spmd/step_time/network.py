"""Time of collectives on a machine's network: the torus of a TPU slice, NVLink inside a host, and what joins them.

| machine | inside | between |
|---|---|---|
| TPU | links to both neighbours in each dimension: a ring where it wraps around, else a line | slices |
| GPU | all GPUs of a host with each other | hosts |

A gather of V bytes over a ring of n chips takes V·(n − 1)/n over the bandwidth of both directions; over several
dimensions of a torus, of all of them together. A line has half of that: its ends receive everything over one link.
Members that are s chips apart share their links with s − 1 other groups ("How to Scale Your Model", Austin et al.,
2025, chapters 2 and 3).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np

from spmd.analysis.topology import Topology
from spmd.sharding.mesh import AXES, MeshShape, arrange_devices
from spmd.step_time.hardware import Hardware

_EXCHANGES = ("all-to-all", "ragged-all-to-all")
_ONE_TO_ONE = ("collective-permute", "collective-broadcast")


@dataclasses.dataclass(frozen=True)
class Place:
    """Position of a device that is absent; has the attributes of a `jax.Device` that meshes are arranged by."""

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
        rings: For each dimension of the torus that the group extends along: chips, the distance between them, and
            whether it closes to a ring.
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
        places: `[device, (part, core, x, y, z)]` in the order of the mesh; a part is a slice or a host.
        efficiency: Share of the published bandwidth that large collectives have.
    """

    topology: Topology
    hardware: Hardware
    places: np.ndarray
    shape: Mapping[str, int]
    efficiency: float = 0.8

    def axis_group(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Return one group of devices that differ along some mesh axes only."""
        numbers = np.arange(len(self.places)).reshape([self.shape[axis] for axis in AXES])
        return tuple(numbers[tuple(slice(None) if axis in axes else 0 for axis in AXES)].ravel().tolist())

    def extent(self, group: Sequence[int]) -> Extent:
        """Return the extent of a group."""
        return _extent(self, tuple(group))

    def links(self, group: Sequence[int]) -> tuple[str, ...]:
        """Return the names of what a group's collectives occupy: dimensions of the torus, and the slow network."""
        extent = self.extent(group)
        inside = [f"dimension {dim}" for dim in extent.dims] or ["inside"] * (extent.local > 1)
        return (*inside, *["between"] * (extent.parts > 1))

    def seconds(self, kind: str, payload: float, group: Sequence[int]) -> float:
        """Return the time of a collective alone on the network; `payload` is that of the audit's records.

        A TPU's hosts get what slices have finished inside; GPUs send to other hosts what they still gather inside.
        """
        parts = self.inside(kind, payload, group), self.between(kind, payload, group)
        return sum(parts) if self.topology.platform == "tpu" else max(parts)

    def inside(self, kind: str, payload: float, group: Sequence[int]) -> float:
        """Return the time of the part of a collective inside slices or hosts."""
        extent, hops = self.extent(group), len(group)
        if extent.local < 2:
            return 0.0
        latency = self.hardware.latency
        if self.topology.platform != "tpu":
            volume = payload * (extent.local - 1) / extent.local * (2 if kind == "all-reduce" else 1)
            return volume / (self.hardware.link * self.efficiency) + latency * math.log2(hops)
        link = self.hardware.link * self.efficiency
        if not extent.rings:  # the cores of one chip
            return latency
        if kind in _ONE_TO_ONE:
            return payload / link + latency
        if kind in _EXCHANGES:  # each link carries what is sent across the middle of its ring
            each = (payload * chips * far / (8 if ring else 4) for chips, far, ring in extent.rings)
            return max(each) / link + latency * hops
        chips = extent.local // extent.cores
        bandwidth = extent.cores * link * sum((2 if ring else 1) / far for _, far, ring in extent.rings)
        volume = payload * (chips - 1) / chips * (2 if kind == "all-reduce" else 1)
        return volume / bandwidth + latency * sum(chips for chips, _, _ in extent.rings)

    def between(self, kind: str, payload: float, group: Sequence[int]) -> float:
        """Return the time of the part of a collective between slices or hosts."""
        extent = self.extent(group)
        if extent.parts < 2:
            return 0.0
        share = (extent.parts - 1) / extent.parts
        # What is gathered or reduced inside crosses once for all members there; the rest is each member's own.
        each = payload if kind in (*_EXCHANGES, *_ONE_TO_ONE) else payload / extent.local
        volume = each * share * (2 if kind == "all-reduce" else 1)
        rounds = math.log2(extent.parts) + 1
        return volume / (self.hardware.network * self.efficiency) + rounds * self.hardware.network_latency

    def waiting(self, seconds: float, straggling: float) -> float:
        """Return the time in which slices wait for the slowest, whose steps vary by the share `straggling` (σ).

        The expected maximum of n normal variables is close to σ·Φ⁻¹((n − 3/8)/(n + 1/4)) (Blom, 1958).
        """
        slices = self.topology.slices
        return seconds * straggling * NormalDist().inv_cdf((slices - 0.375) / (slices + 0.25))


def make_network(
    topology: Topology, shape: MeshShape, slices: Mapping[str, int], hardware: Hardware, efficiency: float = 0.8
) -> Network:
    """Return the network under a mesh on a machine, whose devices need not exist."""
    sizes = shape.resolve(topology.devices)
    return Network(topology, hardware, device_places(topology, sizes, slices), sizes.sizes, efficiency)


def device_places(topology: Topology, sizes: MeshShape, slices: Mapping[str, int]) -> np.ndarray:
    """Return `[device, (part, core, x, y, z)]` in the order of a mesh shape without -1; a part is a slice or a host."""
    places = [_place(topology, number) for number in range(topology.devices)]
    grid = arrange_devices(sizes, places, slices).ravel()
    part = "slice_index" if topology.platform == "tpu" else "process_index"
    return np.array([(getattr(p, part), p.core_on_chip, *p.coords) for p in grid])


@functools.lru_cache(1024)
def _extent(network: Network, group: tuple[int, ...]) -> Extent:
    places = network.places[list(group)]
    first = places[places[:, 0] == places[0, 0]]
    parts, cores = len(np.unique(places[:, 0])), len(np.unique(first[:, 1]))
    rings, dims = [], []
    wraps, lengths = network.topology.wrap, (*network.topology.shape, 1, 1)
    for dim in range(3 if network.topology.platform == "tpu" else 0):
        positions = np.unique(first[:, 2 + dim])
        if len(positions) > 1:
            far = int(np.diff(positions).min())
            closes = wraps[dim] and len(positions) * far == lengths[dim]
            rings.append((len(positions), far, bool(closes)))
            dims.append(dim)
    return Extent(tuple(rings), len(first), parts, cores, tuple(dims))


def _place(topology: Topology, number: int) -> Place:
    chip, kind = topology.chip, topology.chip.device_kind
    if topology.platform != "tpu":
        host, each = divmod(number, topology.shape[-1])
        platform = "gpu" if topology.platform == "cuda" else "cpu"
        return Place(number, platform, kind, (each, 0, 0), process_index=host)
    each = math.prod(topology.shape) * chip.devices
    inside = number % each
    x, y, z = (*topology.shape, 1, 1)[:3]
    at, core = divmod(inside, chip.devices)
    coords = (at % x, at // x % y, at // (x * y) % z)
    return Place(number, "tpu", kind, coords, core, number // each, number // 4)
