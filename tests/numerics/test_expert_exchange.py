"""What experts' devices exchange, in the optimised program of each compiler."""

import functools
import json

import pytest

from spmd.analysis.topology import missing_extra, parse_topology
from tests.programs import run_script

COMPILE = """
    import dataclasses, json, sys
    import jax, optax, spmd
    from spmd.models.mixtral import mixtral, PRESETS, RouterConfig
    from spmd.partition_rules.mixtral import MIXTRAL
    from spmd.distributed.initialize import initialize
    from spmd.analysis.collective_audit import audit_collectives
    from spmd.analysis.topology import parse_topology, topology_devices

    topology = parse_topology(sys.argv[1])
    on_cpu = topology.platform == "cpu"
    initialize(8 if on_cpu else 0, target_platform="" if on_cpu else topology.platform)
    found = {}
    for dispatch, remat, sizes in json.loads(sys.argv[2]):
        router = RouterConfig(experts=8, dispatch=dispatch)
        config = mixtral(vocab=256, d_model=256, layers=3, heads=4, kv_heads=2, d_ff=256, router=router)
        model = spmd.from_nnx(config.build)
        mesh = spmd.make_mesh(devices=topology_devices(topology), **sizes)
        plan = spmd.make_plan(mesh, MIXTRAL, model, optax.sgd(0.1), remat=remat, precision="bf16")
        batch = {name: jax.ShapeDtypeStruct((8, 64), "int32") for name in ("tokens", "targets")}
        batch["weights"] = jax.ShapeDtypeStruct((8, 64), "float32")
        step = spmd.make_train_step(plan, spmd.next_token_loss(model)).compile(batch)
        records = audit_collectives(step, mesh).records
        found[f"{dispatch} {remat}"] = [
            (r.kind, r.over, r.source, r.executions, r.bytes) for r in records if r.executions
        ]
    print(json.dumps(found))
"""


@functools.cache
def collectives(topology, questions):
    return run_script(COMPILE, topology, questions)


def exchanges(records, kind="all-to-all"):
    """How often rows are exchanged between the devices of experts in a step, and how often single numbers of them."""
    sizes = [
        (size / n, n) for k, _, source, n, size in records if k == kind and "layers/moe" in source
    ]
    most = max(size for size, _ in sizes)
    return sum(n for size, n in sizes if size == most), sum(n for size, n in sizes if size < most)


MIXED = {"fsdp": 2, "expert": 2, "tensor": 2}
ON_CPU = json.dumps(
    [["dropless", "none", MIXED], ["capacity", "none", {"expert": 8}], ["capacity", "full", MIXED]]
)


@pytest.mark.soak
def test_two_all_to_alls_forward_and_two_backward():
    """In each of three layers, by both kinds of dispatch; weights go there, and their gradients back.

    Recomputation sends rows and weights there once more, and no result back.
    """
    found = collectives("cpu:8", ON_CPU)
    assert exchanges(found["dropless none"]) == (3 * 4, 3 * 2)
    assert exchanges(found["capacity none"]) == (3 * 4, 3 * 2)
    assert exchanges(found["capacity full"]) == (3 * 5, 3 * 3)


@pytest.mark.soak
def test_nothing_else_of_tokens_is_gathered():
    """Routing needs no all-gather, and dropless dispatch one of sizes: four bytes for each expert of each device."""
    for name, records in collectives("cpu:8", ON_CPU).items():
        gathered = [
            (over, source, size / n) for k, over, source, n, size in records if k == "all-gather"
        ]
        assert not [source for _, source, _ in gathered if "router" in source], name
        sizes = [
            size for over, source, size in gathered if over == "expert" and "layers/moe" in source
        ]
        assert all(size <= 4 * 8 * 2 for size in sizes), name
        assert bool(sizes) is name.startswith("dropless")


ABSENT = {"v5e:2x4": "ragged-all-to-all", "h100:1x8": "all-to-all"}


@pytest.mark.soak
@pytest.mark.parametrize(
    "topology", [t for t in ABSENT if missing_extra(parse_topology(t)) is None]
)
def test_tpus_send_only_rows_that_are_filled(topology):
    """Their exchange is a ragged all-to-all, as often as on CPUs; GPUs exchange blocks."""
    (records,) = collectives(topology, json.dumps([["dropless", "none", MIXED]])).values()
    # on TPUs a number is as wide as these rows
    assert sum(exchanges(records, ABSENT[topology])) == 3 * (4 + 2)
    assert {k for k, _, source, *_ in records if "all-to-all" in k and "layers/moe" in source} == {
        ABSENT[topology]
    }
