"""Axes on the slow network: which devices share a slice, and what a step sends between slices, to the byte."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from spmd.analysis.replica_groups import cross_slice_count
from spmd.analysis.topology import missing_extra, parse_topology
from spmd.commands.plan import run_plan
from spmd.errors import ConfigError, MeshError
from spmd.run.build import planned_mesh
from spmd.run.load_config import load_config
from spmd.sharding.mesh import AXES, MeshShape, mesh_of, slice_numbers
from tests.programs import run_script


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a device as the arrangement of a mesh looks at."""

    id: int
    process_index: int
    platform: str = "gpu"
    slice_index: int = 0
    device_kind: str = "NVIDIA H100"


def hosts(count, gpus, **fields):
    return [Device(i, i // gpus, **fields) for i in range(count * gpus)]


def slices_of(mesh, slices):
    """The processes of the devices in each slice of a mesh, by what the mesh's places say."""
    numbers = slice_numbers(mesh.shape, slices)
    return [
        sorted({d.process_index for d, n in zip(mesh.devices.flat, numbers, strict=True) if n == i})
        for i in range(numbers.max() + 1)
    ]


@pytest.mark.parametrize(
    ("shape", "slices", "expected"),
    [
        ({"data": 4, "fsdp": 8}, {"data": 4}, [[0], [1], [2], [3]]),
        ({"data": 4, "fsdp": 8}, {"data": 2}, [[0, 1], [2, 3]]),
        ({"fsdp": 4, "tensor": 8}, {"fsdp": 4}, [[0], [1], [2], [3]]),
        ({"data": 4, "tensor": 8}, {"tensor": 4}, [[0], [1], [2], [3]]),
        ({"data": 4, "fsdp": 8}, {"data": 2, "fsdp": 2}, [[0], [1], [2], [3]]),
    ],
)
def test_a_slice_is_made_of_whole_hosts(shape, slices, expected):
    """Of four hosts with eight GPUs each: whichever axis crosses, the places of a slice are those of its hosts."""
    mesh = mesh_of(MeshShape(**shape), hosts(4, 8), slices)
    assert slices_of(mesh, slices) == expected


def test_without_slices_an_inner_axis_crosses_hosts():
    """The control: `tensor` over four hosts' GPUs, unless it is said to stay inside."""
    mesh = mesh_of(MeshShape(data=2, tensor=4), hosts(4, 2), None)
    rows = mesh.devices.reshape(2, 4)
    assert {tuple(d.process_index for d in row) for row in rows} == {(0, 0, 1, 1), (2, 2, 3, 3)}


def test_the_devices_say_what_their_slices_are():
    """GPUs of several fast networks are told apart by their `slice_index`, whatever the processes."""
    devices = [Device(i, i, slice_index=i % 2) for i in range(8)]
    mesh = mesh_of(MeshShape(data=2, fsdp=4), devices, {"data": 2})
    assert [d.slice_index for d in mesh.devices.flat] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("devices", "slices", "complaint"),
    [
        (hosts(4, 2), {"data": 8}, "product of slices = 8, and the devices form 4 hosts"),
        (
            hosts(1, 8, platform="tpu"),
            {"data": 2},
            "product of slices = 2, and the devices form 1 slices",
        ),
        (
            [Device(i, 0, "tpu", i // 4) for i in range(8)],
            None,
            "product of slices = 1, and the devices form 2 slices",
        ),
        (
            [Device(i, i // 3) for i in range(8)],
            {"data": 3},
            "slices.data: is 3, and mesh.data is 8",
        ),
        ([Device(i, i // 6) for i in range(8)], {"data": 2}, "have unequal numbers of devices"),
    ],
)
def test_what_does_not_fit_the_devices(devices, slices, complaint):
    """The product of slices, what the devices form, and a TPU whose slices no axis is said to cross."""
    with pytest.raises(MeshError, match=complaint):
        mesh_of(MeshShape(data=8), devices, slices)


@pytest.mark.parametrize("sizes", list(itertools.product([1, 2], repeat=3)))
def test_places_and_devices_agree(sizes):
    """For every choice of crossing axes of a 2 × 2 × 2 mesh, a place's slice is that of the device there."""
    slices = dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))
    total = int(np.prod(sizes))
    mesh = mesh_of(MeshShape(data=2, fsdp=2, tensor=2), jax.devices(), slices)
    numbers = slice_numbers(mesh.shape, slices)
    assert [d.id * total // 8 for d in mesh.devices.flat] == numbers.tolist()
    whole = [list(range(8))]
    assert cross_slice_count(whole, numbers, "all-gather", pairs=False) == (total > 1)


def test_a_config_names_its_slices(capsys):
    """`--slices.data 2`: refused where it does not divide, and said by the plan."""
    config = load_config("demo")
    assert config.slices.sizes == dict.fromkeys(AXES, 1)
    with pytest.raises(ConfigError, match=r"slices.fsdp: is 4, and mesh.fsdp is 2"):
        dataclasses.replace(config, slices=MeshShape(fsdp=4))
    with pytest.raises(ConfigError, match=r"slices.data: is -1"):
        dataclasses.replace(config, slices=MeshShape(data=-1))
    inferred = dataclasses.replace(
        config, mesh=MeshShape(fsdp=-1, tensor=2), slices=MeshShape(fsdp=3)
    )
    with pytest.raises(MeshError, match=r"slices.fsdp: is 3, and mesh.fsdp is 4"):
        planned_mesh(inferred)
    run_plan(["demo", "--slices.data", "2"])
    assert (
        "slices 2 of 4 devices; over the slow network, × inside: data 2 × 1"
        in capsys.readouterr().out
    )


# a TPU pads rows of less than 128 columns
VOCAB, D, LAYERS, D_FF, BATCH, SEQ = 512, 512, 2, 512, 16, 32
KERNELS = LAYERS * (4 * D * D + 3 * D * D_FF) + D * VOCAB
EMBEDDING, NORMS = VOCAB * D, (2 * LAYERS + 1) * D
# bytes of one device's shards of the gradients over fsdp=4, in float32
SHARDS = KERNELS + EMBEDDING
SCALES = 4 * NORMS  # those of norms, which go whole, or as shards too

COMPILE = f"""
    import json, sys
    import jax, optax, spmd
    from spmd.models.decoder import DecoderConfig
    from spmd.partition_rules.llama import LLAMA
    from spmd.distributed.initialize import initialize
    from spmd.analysis.collective_audit import audit_collectives
    from spmd.analysis.topology import parse_topology, topology_devices
    from spmd.sharding.mesh import MeshShape, mesh_of

    topology = parse_topology(sys.argv[1])
    simulated = topology.platform == "cpu"
    initialize(8) if simulated else initialize(target_platform=topology.platform)
    model = spmd.from_nnx(DecoderConfig({VOCAB}, {D}, {LAYERS}, 8, 8, {D_FF}).build)
    dtypes = {{"tokens": "int32", "targets": "int32", "weights": "float32"}}
    batch = {{name: jax.ShapeDtypeStruct(({BATCH}, {SEQ}), dtype) for name, dtype in dtypes.items()}}
    found = {{}}
    for crossing, shape in (("data", MeshShape(data=2, fsdp=4)), ("fsdp", MeshShape(fsdp=8))):
        slices = {{crossing: 2}}
        mesh = mesh_of(shape, topology_devices(topology), slices)
        plan = spmd.make_plan(mesh, LLAMA, model, optax.sgd(0.1), remat="full")
        step = spmd.make_train_step(plan, spmd.next_token_loss(model))
        audit = audit_collectives(step.compile(batch), mesh, slices=slices)
        found[crossing] = {{kind: audit.bytes(kind, crossing=True) for kind in ("all-gather", "reduce-scatter",
            "all-reduce", "all-to-all", "collective-permute")}}
        found[crossing]["text"] = str(audit)
        found[crossing]["all"] = audit.bytes()
    print(json.dumps(found))
"""


@functools.cache
def crossing(topology):
    """Crossing axis → kind → bytes between two slices of four devices."""
    return run_script(COMPILE, topology)


TOPOLOGIES = [
    topology if topology == "cpu:8" else pytest.param(topology, marks=pytest.mark.soak)
    for topology in ("cpu:8", "2xv5e:2x2", "h100:2x4")
    if "h100" not in topology or missing_extra(parse_topology(topology)) is None
]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_hybrid_sharding_sends_gradients_between_slices_and_nothing_else(topology):
    """`data` over slices, `fsdp` inside: each device all-reduces its shard of the gradients, and a few scalars; no
    parameter is gathered and no gradient scattered across."""
    found = crossing(topology)["data"]
    assert {
        kind: found[kind]
        for kind in ("all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    } == {
        "all-gather": 0,
        "reduce-scatter": 0,
        "all-to-all": 0,
        "collective-permute": 0,
    }, found["text"]
    assert 2 * SHARDS <= found["all-reduce"] <= 2 * (SHARDS + SCALES + 64), found["text"]
    assert "over the slow network, slices data=2" in found["text"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_control_sharding_over_slices_gathers_parameters_between_them(topology):
    """The other assignment, `fsdp` over both slices, is seen to cross, with more bytes."""
    found = crossing(topology)["fsdp"]
    assert found["all-gather"] > 0, found["text"]
    crosses = sum(value for kind, value in found.items() if kind not in ("text", "all"))
    assert crosses > 1.5 * crossing(topology)["data"]["all-reduce"], found["text"]
