"""Links that wrap around: with them, whole slices gather parameters by all-gathers, as the pods do."""

import functools
import importlib.util
import json

import pytest

from spmd.analysis.topology import parse_topology
from spmd.commands.plan import run_plan
from tests.programs import run_script

ROWS, COLUMNS = 4096, 14336  # a kernel of Llama 3 8B, in bfloat16
KERNEL = 2 * ROWS * COLUMNS
COMPILE = f"""
    import dataclasses, json, sys
    import jax
    from jax.sharding import NamedSharding, PartitionSpec
    from spmd.analysis.collective_audit import audit_collectives
    from spmd.analysis.topology import Topology, parse_topology, topology_devices
    from spmd.distributed.initialize import initialize
    from spmd.sharding.mesh import MeshShape, mesh_of

    initialize(target_platform="tpu")

    def gathers(topology):
        slices = {{"data": topology.slices}}
        mesh = mesh_of(MeshShape(data=topology.slices, fsdp=-1), topology_devices(topology), slices)
        split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ()))
        kernel = jax.ShapeDtypeStruct(({ROWS}, {COLUMNS}), "bfloat16", sharding=split)
        compiled = jax.jit(lambda kernel: kernel, out_shardings=whole).lower(kernel).compile()
        records = audit_collectives(compiled, mesh, slices=slices).records
        return [(r.kind, r.over, r.bytes, r.equivalent_kind) for r in records]

    class Unlinked(Topology):
        wrap = (False, False, False)

    found = {{}}
    for name in sys.argv[1:]:
        topology = parse_topology(name)
        unlinked = Unlinked(**{{f.name: getattr(topology, f.name) for f in dataclasses.fields(topology)}})
        found[name] = gathers(topology), gathers(unlinked)
    print(json.dumps(found))
"""


@functools.cache
def gathers(*names: str) -> dict[str, list[list[tuple[str, str, int, str]]]]:
    """Machine → the collectives that gather a kernel over a whole slice, with its links and without."""
    assert importlib.util.find_spec("libtpu"), (
        "the TPU compiler is missing: pip install 'spmd[tpu]'"
    )
    found = run_script(COMPILE, *names)
    return {
        name: [[tuple(record) for record in records] for records in both]
        for name, both in found.items()
    }


ALL_GATHER = [("all-gather", "fsdp", KERNEL, "")]
ALL_REDUCE = [("all-reduce", "fsdp", 2 * KERNEL, "all-gather")]
PODS = ("v5p:4x4x8", "v5e:16x16", "2xv5e:16x16")
OTHERS = ("v4:4x4x4", "v6e:16x16", "tpu7x:4x4x4", "2xv4:4x4x4", "2xv5p:4x4x8", "2xtpu7x:4x4x4")


@pytest.mark.parametrize("name", PODS)
def test_parameters_are_gathered_by_all_gathers(name: str) -> None:
    """Over whole slices of 128 and 256 chips, and over each of two."""
    assert gathers(*PODS)[name][0] == ALL_GATHER


def test_control_without_links_a_cube_gathers_by_all_reduces() -> None:
    """Zeros with each chip's own part are summed, with twice the bytes; the audit tells what they stand for."""
    assert gathers(*PODS)["v5p:4x4x8"][1] == ALL_REDUCE


@pytest.mark.parametrize(("machine", "wrap"), [("v5e:2x4", [False] * 3), ("cpu:8", [])])
def test_a_plan_says_which_links_wrap_around(
    machine: str, wrap: list[bool], capsys: pytest.CaptureFixture
) -> None:
    """In the line about the machine, and as values."""
    run_plan(["demo", "--topology", machine])
    printed = capsys.readouterr().out
    assert (
        f"memory of one device, {machine}{' (no links wrap around)' if wrap else ''}\n" in printed
    )
    run_plan(["demo", "--topology", machine, "--json"])
    assert json.loads(capsys.readouterr().out)["wrap"] == wrap


@pytest.mark.soak
@pytest.mark.parametrize("name", ["v4:4x4x4", "v6e:16x16", "tpu7x:4x4x4"])
def test_other_machines(name: str) -> None:
    """The same, and without links those of three dimensions gather by all-reduces."""
    linked, unlinked = gathers(*OTHERS)[name]
    assert linked == ALL_GATHER
    assert unlinked == (ALL_GATHER if name.startswith("v6e") else ALL_REDUCE)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in OTHERS if name.startswith("2x")])
def test_the_compiler_takes_no_links_of_several_cubes(name: str) -> None:
    """Two slices of three dimensions gather by all-reduces with links and without; a plan says so."""
    assert gathers(*OTHERS)[name] == [ALL_REDUCE, ALL_REDUCE]
    assert "the compiler does not use" in parse_topology(name).links
