"""A group of devices extends along rings and lines of a torus, hosts and slices, from which times follow by hand."""

import math

import pytest

from spmd.analysis.topology import parse_topology
from spmd.chips import Hardware
from spmd.errors import ConfigError
from spmd.sharding.mesh import MeshShape
from spmd.step_time.hardware import hardware_of
from spmd.step_time.network import Extent, Network, make_network

LINK, NETWORK = 1e9, 1e8
ROUND = Hardware(
    peak=1e12,
    memory_bandwidth=1e9,
    link=LINK,
    network=NETWORK,
    host=1e9,
    latency=0,
    network_latency=0,
)
"""A machine without latency and with round speeds."""


def network(
    topology: str, slices: dict[str, int] | None = None, hardware: Hardware = ROUND, **sizes: int
) -> Network:
    return make_network(
        parse_topology(topology), MeshShape(**sizes), slices or {}, hardware, efficiency=1.0
    )


def seconds(
    kind: str,
    payload: float,
    axis: str,
    topology: str,
    slices: dict[str, int] | None = None,
    **sizes: int,
):
    found = network(topology, slices, **sizes)
    return found.seconds(kind, payload, found.axis_group((axis,)))


RING, SIDE = (16, 1, True), (4, 1, True)
SPANS = [
    ("v5e:16x16", {}, {"fsdp": 256}, {"fsdp": Extent((RING, RING), 256, 1)}),
    (
        *("v5e:16x16", {}, {"fsdp": 64, "tensor": 4}),
        {"fsdp": Extent(((4, 4, True), RING), 64, 1), "tensor": Extent(((4, 1, False),), 4, 1)},
    ),
    ("v5e:4x4", {}, {"fsdp": 16}, {"fsdp": Extent(((4, 1, False),) * 2, 16, 1)}),
    ("v5p:4x4x4", {}, {"fsdp": 64}, {"fsdp": Extent((SIDE,) * 3, 64, 1)}),
    (
        *("v5p:4x4x4", {}, {"fsdp": 16, "tensor": 4}),
        {"fsdp": Extent((SIDE,) * 2, 16, 1), "tensor": Extent((SIDE,), 4, 1)},
    ),
    ("v5p:2x2x2", {}, {"fsdp": 8}, {"fsdp": Extent(((2, 1, False),) * 3, 8, 1)}),
    ("tpu7x:4x4x4", {}, {"fsdp": 128}, {"fsdp": Extent((SIDE,) * 3, 128, 1, cores=2)}),
    (
        *("tpu7x:4x4x4", {}, {"fsdp": 64, "tensor": 2}),
        {"fsdp": Extent((SIDE,) * 3, 64, 1), "tensor": Extent((), 2, 1, cores=2)},
    ),
    ("h100:4x8", {}, {"fsdp": 32}, {"fsdp": Extent((), 8, 4)}),
    (
        "h100:4x8",
        {},
        {"fsdp": 4, "tensor": 8},
        {"fsdp": Extent((), 1, 4), "tensor": Extent((), 8, 1)},
    ),
    (
        *("2xv5e:16x16", {"data": 2}, {"data": 2, "fsdp": 256}),
        {"data": Extent((), 1, 2), "fsdp": Extent((RING, RING), 256, 1)},
    ),
    ("2xv5e:16x16", {"fsdp": 2}, {"fsdp": 512}, {"fsdp": Extent((RING, RING), 256, 2)}),
]


@pytest.mark.parametrize(
    ("topology", "slices", "sizes", "spans"),
    SPANS,
    ids=[f"{s[0]} {'x'.join(map(str, s[2].values()))}" for s in SPANS],
)
def test_spans_of_axes(topology, slices, sizes, spans) -> None:
    """Each axis of a mesh extends along rings where a dimension wraps around and all of it is in the group."""
    found = network(topology, slices, **sizes)
    assert {axis: found.extent(found.axis_group((axis,))) for axis in sizes} == spans


def test_groups_of_several_axes() -> None:
    """The group of all axes is the machine, whatever the mesh; that of none is one device."""
    found = network("v5e:16x16", fsdp=64, tensor=4)
    assert found.extent(found.axis_group(("fsdp", "tensor"))) == Extent((RING, RING), 256, 1)
    assert found.axis_group(()) == (0,)
    assert found.seconds("all-gather", 1e9, found.axis_group(())) == 0


def test_a_gather_uses_both_directions_of_all_rings() -> None:
    """V·(n − 1)/n over two directions in each of two dimensions; a reduction the same; an all-reduce is both."""
    once = 1e9 * 255 / 256 / (4 * LINK)
    assert seconds("all-gather", 1e9, "fsdp", "v5e:16x16", fsdp=256) == pytest.approx(once)
    assert seconds("reduce-scatter", 1e9, "fsdp", "v5e:16x16", fsdp=256) == pytest.approx(once)
    assert seconds("all-reduce", 1e9, "fsdp", "v5e:16x16", fsdp=256) == pytest.approx(2 * once)


def test_a_line_takes_twice_the_time_of_a_ring() -> None:
    """A 4 × 4 × 4 cube wraps around; four chips of a v5e do not."""
    ring = seconds("all-gather", 1e9, "tensor", "v5p:4x4x4", fsdp=16, tensor=4)
    assert ring == pytest.approx(1e9 * 3 / 4 / (2 * LINK))
    assert seconds("all-gather", 1e9, "tensor", "v5e:16x16", fsdp=64, tensor=4) == pytest.approx(
        2 * ring
    )


def test_groups_that_are_apart_share_links() -> None:
    """Of fsdp 64 × tensor 4, one dimension of fsdp is strided by 4: 2/4 of a link beside the 2 of the other."""
    shared = seconds("all-gather", 1e9, "fsdp", "v5e:16x16", fsdp=64, tensor=4)
    assert shared == pytest.approx(1e9 * 63 / 64 / (LINK * (2 + 2 / 4)))
    exchanged = seconds("all-to-all", 1e9, "fsdp", "v5e:16x16", fsdp=64, tensor=4)
    assert exchanged == pytest.approx(max(1e9 * 4 * 4 / 8, 1e9 * 16 / 8) / LINK)


def test_an_all_to_all_crosses_the_middle() -> None:
    """n/8 of what each member sends over a link of a ring, n/4 of a line."""
    assert seconds("all-to-all", 1e9, "tensor", "v5p:4x4x4", fsdp=16, tensor=4) == pytest.approx(
        0.5
    )
    assert seconds("all-to-all", 1e9, "tensor", "v5e:16x16", fsdp=64, tensor=4) == pytest.approx(
        1.0
    )
    assert seconds("all-to-all", 1e9, "expert", "v5e:16x16", data=16, expert=16) == pytest.approx(
        2.0
    )


def test_a_permute_takes_one_link() -> None:
    """However many members a group has."""
    for sizes in ({"sequence": 256}, {"data": 64, "sequence": 4}):
        assert seconds(
            "collective-permute", 1e9, "sequence", "v5e:16x16", **sizes
        ) == pytest.approx(1.0)


def test_the_members_of_an_irregular_group_are_counted() -> None:
    """A pair on a diagonal moves half, not three quarters as a square of four would."""
    pair, square = (
        seconds("all-gather", 1e9, axis, "v5e:2x4", data=2, tensor=4) for axis in ("data", "tensor")
    )
    found = network("v5e:2x4", data=2, tensor=4)
    span = found.extent(found.axis_group(("data",)))
    assert span.local == 2
    assert pair == pytest.approx(1e9 / 2 / (LINK * sum(1 / far for _, far, _ in span.rings)))
    assert square == pytest.approx(1e9 * 3 / 4 / (2 * LINK))


def test_cores_of_a_chip_cost_a_hop() -> None:
    """Two devices of a TPU7x share memory; with all chips, both use the links."""
    found = network(
        "tpu7x:4x4x4", hardware=hardware_of(parse_topology("tpu7x:4x4x4")), fsdp=64, tensor=2
    )
    assert found.seconds("all-gather", 1e9, found.axis_group(("tensor",))) == found.hardware.latency
    assert seconds("all-gather", 1e9, "fsdp", "tpu7x:4x4x4", fsdp=128) == pytest.approx(
        1e9 * 63 / 64 / (2 * 6 * LINK)
    )


def test_hosts_of_gpus() -> None:
    """The longer of what 8 GPUs do by NVLink and what 4 hosts do, each GPU with its own card and an eighth."""
    inside, between = 1e9 * 7 / 8 / LINK, 1e9 / 8 * 3 / 4 / NETWORK
    assert seconds("all-gather", 1e9, "fsdp", "h100:4x8", fsdp=32) == pytest.approx(
        max(inside, between)
    )
    found = network("h100:4x8", fsdp=32)
    group = found.axis_group(("fsdp",))
    assert found.inside("all-gather", 1e9, group) == pytest.approx(inside)
    assert found.between("all-reduce", 1e9, group) == pytest.approx(2 * between)
    assert seconds("all-gather", 1e9, "tensor", "h100:4x8", fsdp=4, tensor=8) == pytest.approx(
        inside
    )


def test_slices_wait_for_what_is_inside() -> None:
    """Between two slices half of each device's own part, after all of it inside."""
    inside, between = 1e9 * 255 / 256 / (4 * LINK), 1e9 / 256 / 2 / NETWORK
    whole = seconds("all-gather", 1e9, "fsdp", "2xv5e:16x16", {"fsdp": 2}, fsdp=512)
    assert whole == pytest.approx(inside + between)
    data = seconds("all-reduce", 1e9, "data", "2xv5e:16x16", {"data": 2}, data=2, fsdp=256)
    assert data == pytest.approx(2 * 1e9 / 2 / NETWORK)


def test_latency_and_efficiency() -> None:
    """A hop for each chip of each ring; large transfers have a share of the published bandwidth."""
    topology, shape = parse_topology("v5e:16x16"), MeshShape(fsdp=256)
    hardware = hardware_of(topology)
    found = make_network(topology, shape, {}, hardware, efficiency=0.5)
    group = found.axis_group(("fsdp",))
    assert found.seconds("all-gather", 0, group) == pytest.approx(32 * hardware.latency)
    moved = found.seconds("all-gather", 1e9, group) - 32 * hardware.latency
    assert moved == pytest.approx(1e9 * 255 / 256 / (4 * hardware.link * 0.5))
    hosts = parse_topology("h100:4x8")
    gpus = make_network(hosts, MeshShape(fsdp=32), {}, hardware_of(hosts))
    assert gpus.between("all-gather", 0, range(32)) == pytest.approx(
        (math.log2(4) + 1) * gpus.hardware.network_latency
    )


def test_speeds_of_chips() -> None:
    """The two devices of a TPU7x chip have half of its speeds each; a simulated device has none, by the flag's name."""
    assert hardware_of(parse_topology("tpu7x:4x4x4")).memory_bandwidth == 3690e9
    assert hardware_of(parse_topology("v5e:1x1")).peak == pytest.approx(197e12)
    with pytest.raises(ConfigError, match=r"topology: is cpu:8: no speeds are known of cpu"):
        hardware_of(parse_topology("cpu:8"))


def test_transfers_of_different_dimensions_use_other_links():
    """Axes of a torus lie along dimensions of their own; slices and hosts are joined by another network."""
    found = network("v5p:4x4x4", fsdp=16, tensor=4)
    fsdp, tensor = (found.links(found.axis_group((axis,))) for axis in ("fsdp", "tensor"))
    assert len(fsdp) == 2
    assert len(tensor) == 1
    assert not set(fsdp) & set(tensor)
    sliced = network("2xv5p:4x4x4", {"data": 2}, data=2, fsdp=64)
    assert sliced.links(sliced.axis_group(("data",))) == ("between",)
    hosts = network("h100:4x8", fsdp=32)
    assert hosts.links(hosts.axis_group(("fsdp",))) == ("inside", "between")


def test_pcie_is_no_nvlink() -> None:
    """A gather inside of a host takes as long as its own links; control: NVLink of A100 is faster."""
    payload, times = 8e9, {}
    for kind in ("l40s", "a100"):
        machine = parse_topology(f"{kind}:1x8")
        found = network(f"{kind}:1x8", hardware=hardware_of(machine), fsdp=8)
        times[kind] = found.seconds("all-gather", payload, found.axis_group(("fsdp",)))
    assert times["l40s"] == pytest.approx(payload * 7 / 8 / 32e9, rel=0.01)
    assert times["l40s"] > 9 * times["a100"]


def test_nvlink_joins_hosts() -> None:
    """72 GPUs of 18 hosts are one domain, 144 are two; control: GPUs of other hosts use the network."""
    group = network("gb200:18x4", fsdp=72)
    assert group.extent(group.axis_group(("fsdp",))) == Extent((), 72, 1)
    assert group.links(group.axis_group(("fsdp",))) == ("inside",)
    two = network("gb200:36x4", fsdp=144)
    assert two.extent(two.axis_group(("fsdp",))) == Extent((), 72, 2)
    hosts = network("h100:18x4", fsdp=72)
    assert hosts.extent(hosts.axis_group(("fsdp",))) == Extent((), 4, 18)


def test_domains_are_the_slices_of_a_mesh() -> None:
    """Data over two domains, and everything else in one of them."""
    found = network("gb200:36x4", {"data": 2}, data=2, fsdp=72)
    assert found.extent(found.axis_group(("fsdp",))) == Extent((), 72, 1)
    assert found.extent(found.axis_group(("data",))) == Extent((), 1, 2)
