"""Machines are known by name without JAX, and what is no machine is an error with the arithmetic."""

import json
import math
import subprocess
import sys
import textwrap
import types

import pytest

from spmd.analysis import topology as room
from spmd.analysis.topology import (
    EXTRAS,
    cloud_slice,
    example_machines,
    missing_extra,
    parse_topology,
)
from spmd.chips import CHIPS, peak_flops
from spmd.errors import MeshError


@pytest.mark.parametrize(
    ("name", "chips", "devices", "hosts", "gib"),
    [
        ("v5e:16x16", 256, 256, 64, 15.75),
        ("v5e:1x1", 1, 1, 1, 15.75),
        ("v5e:2x4", 8, 8, 2, 15.75),
        ("2xv5e:16x16", 512, 512, 128, 15.75),
        ("v5p:4x4x8", 128, 128, 32, 95.74),
        ("v4:2x2x2", 8, 8, 2, 30.75),
        ("v6e:16x16", 256, 256, 64, 31.25),
        ("tpu7x:4x4x4", 64, 128, 16, 94.75),
        ("h100:16x8", 128, 128, 16, 71.683),
        ("a100:2x8", 16, 16, 2, 72),
    ],
)
def test_sizes(name, chips, devices, hosts, gib):
    """Chips, devices, hosts and usable memory, in GiB, as the compilers have them."""
    topology = parse_topology(name)
    assert (topology.chips, topology.devices, topology.hosts) == (chips, devices, hosts)
    assert topology.memory == pytest.approx(gib * 2**30, rel=1e-5)
    assert str(topology) == name


@pytest.mark.parametrize(
    ("name", "wrap", "links"),
    [
        ("v5p:4x4x8", (True, True, True), "links wrap around in x, y, z"),
        ("v4:4x4x4", (True, True, True), "links wrap around in x, y, z"),
        ("tpu7x:4x8x12", (True, True, True), "links wrap around in x, y, z"),
        ("v5p:2x4x4", (False, False, False), "no links wrap around"),
        ("v4:4x4x2", (False, False, False), "no links wrap around"),
        ("tpu7x:2x2x2", (False, False, False), "no links wrap around"),
        ("v5e:16x16", (True, True, False), "links wrap around in x, y"),
        ("v6e:8x16", (False, True, False), "links wrap around in y"),
        ("v5e:8x8", (False, False, False), "no links wrap around"),
        ("2xv5e:16x16", (True, True, False), "links wrap around in x, y"),
        ("2xv5p:2x2x1", (False, False, False), "no links wrap around"),
        (
            "2xv5p:4x4x8",
            (True, True, True),
            "links wrap around in x, y, z, which the compiler does not use for several",
        ),
        ("h100:16x8", (), ""),
        ("cpu:16", (), ""),
    ],
)
def test_links_that_wrap_around(name, wrap, links):
    """Whole cubes of 4 × 4 × 4 chips in all dimensions, and a pod's 16 chips in theirs; a plan says which."""
    topology = parse_topology(name)
    assert topology.wrap == wrap
    assert topology.links.removesuffix(" slices") == links


@pytest.mark.parametrize("name", ["v5p:4x4x8", "v5e:16x16", "2xv5e:2x2"])
def test_the_compiler_is_told_which_links_wrap_around(name, monkeypatch):
    """The description of a machine has them, those of several slices too."""
    asked = {}

    def describe(name, platform, **options):
        asked.update(options)
        return types.SimpleNamespace(devices=())

    monkeypatch.setattr(room.topologies, "get_topology_desc", describe)
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: True)
    assert room.topology_devices(parse_topology(name)) == []
    assert asked["wrap"] == parse_topology(name).wrap


def test_simulated_devices_have_no_memory_of_their_own():
    """So nothing can be said to fit or not."""
    assert parse_topology("cpu:16384").devices == 16384
    assert parse_topology("cpu:8").memory is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("v9:16x16", "known: cpu, v2, v3, v4, v5e, v5p, v6e, tpu7x, a100, h100"),
        ("v5:4x4", 'did you mean "v5'),
        ("", "such as v5e:16x16, h100:16x8, v4-32 or cpu:8"),
        ("v5e:256", "v5e:AxB"),
        ("v5p:16x16", "v5p:AxBxC"),
        ("v5e:0x4", "v5e:AxB"),
        ("h100:8", "h100:HOSTSxGPUS"),
        ("cpu", "cpu:N"),
        ("cpu:-1", "cpu:N"),
        ("v5e:32x16", "32 × 16 = 512 > 256"),
        ("2xh100:4x8", "h100:16x8, and slices over data for the network of hosts"),
        ("0xv5e:2x4", "only TPUs have slices"),
        ("2xv5e", "v5e:AxB"),
        ("v5e:3x4", "dimension 0: 3 / 2 = 1.5"),
        ("v5p:4x5x8", "dimension 1: 5 / 2 = 2.5"),
    ],
)
def test_what_is_no_machine(text, complaint):
    """The message has what there is, the form, or the arithmetic."""
    with pytest.raises(MeshError, match=r".") as caught:
        parse_topology(text)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("name", "same", "hosts"),
    [
        ("v2-8", "v2:2x2", 1),
        ("v3-32", "v3:4x4", 4),
        ("v4-8", "v4:2x2x1", 1),
        ("v4-32", "v4:2x2x4", 4),
        ("v5litepod-8", "v5e:2x4", 1),
        ("v5litepod-64", "v5e:8x8", 16),
        ("v5p-128", "v5p:4x4x4", 16),
        ("v5p-9984", "v5p:8x12x52", 1248),
        ("v5p-12288", "v5p:16x16x24", 1536),
        ("v6e-8", "v6e:2x4", 1),
        ("v6e-256", "v6e:16x16", 64),
        ("tpu7x-128", "tpu7x:4x4x4", 16),
        ("2xv5litepod-256", "2xv5e:16x16", 128),
        ("tpu-v5-lite-podslice:4x4", "v5e:4x4", 4),
        ("tpu-v6e-slice:2x4", "v6e:2x4", 2),
    ],
)
def test_names_of_google_cloud_are_topologies(name, same, hosts):
    """Cores of older kinds and chips of newer ones are counted; eight chips of one name are one host."""
    topology, other = parse_topology(name), parse_topology(same)
    assert (topology.kind, topology.shape, topology.slices, topology.hosts) == (
        other.kind,
        other.shape,
        other.slices,
        hosts,
    )
    assert topology.memory == other.memory


def test_a_slice_is_printed_with_its_size():
    """Chips, shape and hosts; control: a name with the shape has no more than its links."""
    assert parse_topology("v4-32").details == "16 chips, 2x2x4, 4 hosts; no links wrap around"
    assert parse_topology("v6e-8").details.startswith("8 chips, 2x4, 1 host;")
    assert parse_topology("2xv5litepod-64").details.startswith(
        "2 slices of 8x8, 128 chips, 32 hosts"
    )
    assert parse_topology("v4:2x2x4").details == "no links wrap around"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("v4-33", "v4-32 and v4-64"),
        ("v5litepod-48", "v5litepod-32 and v5litepod-64"),
        ("v5p-6", "v5p-8 and v5p-16"),
        ("v3-16", "v3-8 and v3-32"),
        ("0xv4-32", "v4-32"),
    ],
)
def test_a_slice_that_does_not_exist_is_refused(name, nearest):
    """One sentence with the nearest ones, for the flag that names it."""
    with pytest.raises(MeshError) as caught:
        cloud_slice(name, "tpu")
    (problem,) = caught.value.problems
    assert problem.where == "tpu"
    assert nearest in problem.fix
    with pytest.raises(MeshError, match="no such kind of TPU"):
        cloud_slice("h100-8")


def test_every_host_of_a_slice_has_its_chips():
    """The compiler is told a host of eight chips; control: of the same shape by name, hosts of four."""
    for name, bounds in (("v5litepod-8", (2, 4, 1)), ("v5e:2x4", (2, 2, 1))):
        topology = parse_topology(name)
        assert topology.host_bounds == bounds
        assert math.prod(bounds) * topology.hosts == topology.chips


def test_nothing_compiles_for_amd():
    """XLA needs one of its GPUs; control: NVIDIA's compiler is an extra."""
    absent = missing_extra(parse_topology("mi300x:1x8"))
    assert absent is not None
    assert "on a machine with one" in absent.what


def test_every_kind_has_an_example_and_a_peak():
    """The list of examples is complete, and the utilization of each chip can be computed."""
    examples = [parse_topology(name) for name in example_machines()]
    assert {example.kind for example in examples} == set(CHIPS)
    assert all(peak_flops(chip.device_kind) for chip in CHIPS.values() if chip.platform != "cpu")


def test_a_missing_compiler_is_named(monkeypatch):
    """Each platform but the CPU has its extra; one that is there is not asked for."""
    for platform, (extra, modules) in EXTRAS.items():
        topology = next(
            t for t in map(parse_topology, example_machines()) if t.platform == platform
        )
        monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: None)
        assert missing_extra(topology).fix == f"pip install 'spmd[{extra}]'"
        monkeypatch.setattr(
            room.importlib.util, "find_spec", lambda name, there=modules[0]: name == there or None
        )
        assert missing_extra(topology) is None
    assert missing_extra(parse_topology("cpu:8")) is None


PROBE = """
    import json, sys
    from spmd.distributed.initialize import initialize
    from spmd.analysis.topology import missing_extra, parse_topology, topology_devices
    from spmd.sharding.mesh import MeshShape, mesh_of
    initialize(target_platform="tpu")
    found = []
    for name in sys.argv[1:]:
        topology = parse_topology(name)
        if missing_extra(topology):
            found.append(name)
            continue
        devices = topology_devices(topology)
        mesh = mesh_of(MeshShape(fsdp=-1, tensor=4), devices)
        hosts = len({device.process_index for device in devices})
        tensor = [device.coords for device in mesh.devices[0, 0, 0, 0, 0]]
        found.append([len(devices), hosts, devices[0].device_kind, tensor, str(mesh.axis_types[0])])
    print(json.dumps(found))
"""


def test_the_compiler_knows_the_same_machines():
    """With the TPU extra, devices, hosts and kinds are the compiler's, neighbours on `tensor` are neighbours in the
    network, and nothing is printed; without it, the extra is asked for by name.
    """
    names = ["v4:2x2x2", "v5e:16x16", "v5p:4x4x8", "v6e:2x4", "tpu7x:2x2x2"]
    command = [sys.executable, "-c", textwrap.dedent(PROBE), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for name, found in zip(names, json.loads(done.stdout), strict=True):
        topology = parse_topology(name)
        if missing_extra(topology):
            assert found == name
            continue
        devices, hosts, kind, tensor, axis_type = found
        assert (devices, hosts, kind) == (
            topology.devices,
            topology.hosts,
            topology.chip.device_kind,
        )
        # chips in their box
        assert math.prod(max(side) - min(side) + 1 for side in zip(*tensor, strict=True)) <= 4
        assert axis_type.endswith("Auto")
