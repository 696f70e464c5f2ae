"""PowerSGD sends what its formula says in the programs that compilers for absent machines make."""

import jax
import pytest

from spmd.analysis.topology import missing_extra, parse_topology
from tests.programs import LITTLE_EFFORT, run_script
from tests.soak.test_coded_comm_on_pods import OLD

SCRIPT = """
    import dataclasses, json, sys
    import spmd
    from spmd.analysis.topology import parse_topology
    from spmd.distributed.initialize import initialize
    from spmd.plan.communication import reductions
    from spmd.run.build import make_setup
    from spmd.run.load_config import load_config
    from spmd.run.planned_step import compile_step, topology_mesh

    topology = parse_topology(sys.argv[1])
    initialize(target_platform=topology.platform)
    axes = dict(pair.split("=") for pair in sys.argv[2].split(","))
    mesh = spmd.MeshShape(**{axis: int(size) for axis, size in axes.items()})
    config = load_config("llama3-8b")
    model = dataclasses.replace(config.model, layers=2, d_model=1024, heads=8, kv_heads=8, d_ff=4096, vocab=8192)
    data = dataclasses.replace(config.data, batch=max(64, topology.devices), sequence=256)
    fields = {"model": model, "data": data, "mesh": mesh, "compress": spmd.CompressConfig(gradients="powersgd:4")}
    slices = spmd.MeshShape(data=topology.slices)
    config = dataclasses.replace(config, **fields, slices=slices, devices=topology.devices)
    setup = make_setup(config, topology_mesh(config.mesh, topology, config.slices.sizes))
    audit = compile_step(setup).audit
    over = [r for r in audit.records if r.over == "data" and r.dtype == "f32" and r.payload > 4]
    sent = sum(r.payload * r.executions for r in over if r.crosses or topology.slices == 1)
    planned = sum(sum(transfer.arrays) for transfer in reductions(setup.plan))
    print(json.dumps([sent, planned, len(audit.broken)]))
"""

pytestmark = pytest.mark.soak


@pytest.mark.parametrize(
    ("topology", "padding"),
    [
        ("v5e:2x4", 0),
        ("v5p:2x2x2", 0),
        # between slices XLA sends many arrays, and the sums of a loss, as one of whole tiles
        ("2xv5e:2x2", 8192),
        ("v5e:16x16", 0),
        ("2xv5e:16x16", 8192),
        ("v5p:4x4x8", 0),
        ("tpu7x:4x4x4", 0),
        ("h100:16x8", 0),
    ],
)
def test_bytes_on_the_wire_are_those_of_the_formula(topology: str, padding: int) -> None:
    """4·r·(n/f + m) of each matrix as it is compressed, to the byte; what crosses slices is no more than that."""
    machine = parse_topology(topology)
    if absent := missing_extra(machine):
        pytest.skip(str(absent))
    if topology.startswith("tpu7x") and jax.__version_info__ < (0, 12):
        pytest.skip(OLD)
    sent, formula, broken = run_script(
        SCRIPT, topology, f"data={machine.devices // 4},fsdp=4", **LITTLE_EFFORT
    )
    assert formula <= sent <= formula + padding
    assert broken == 0
