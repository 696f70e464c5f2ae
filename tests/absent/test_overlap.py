"""Overlap: with each chip's flags, parameters are gathered and gradients reduce-scattered during the matmuls."""

import functools
import importlib.util
import json

import pytest

from spmd.analysis.topology import parse_topology
from spmd.distributed.xla_flags import compiler_options, flags_for
from tests.programs import run_script

COMPILE = """
    import json, sys
    import jax, jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P
    from spmd.analysis.collective_audit import LARGE, audit_collectives
    from spmd.analysis.topology import parse_topology, topology_devices
    from spmd.distributed.initialize import initialize
    from spmd.sharding.mesh import MeshShape, mesh_of

    initialize(target_platform="tpu")
    mesh = mesh_of(MeshShape(fsdp=-1), topology_devices(parse_topology(sys.argv[1])))
    rows = 16 * mesh.size  # a shard is at least a tile
    whole, split, stacked = (NamedSharding(mesh, P(*axes)) for axes in ((), ("fsdp",), (None, "fsdp")))

    def layer(x, kernels):
        up, down = (jax.lax.with_sharding_constraint(k.astype(jnp.bfloat16), whole) for k in kernels)
        return jax.lax.with_sharding_constraint(x + jax.nn.silu(x @ up) @ down.T, split), None

    def loss(kernels, x):
        return (jax.lax.scan(jax.checkpoint(layer), x, kernels)[0].astype(jnp.float32) ** 2).mean()

    def step(kernels, x):
        gradients = jax.lax.with_sharding_constraint(jax.grad(loss)(kernels, x), (stacked, stacked))
        return jax.tree.map(jnp.subtract, kernels, gradients)

    kernels = (jax.ShapeDtypeStruct((4, rows, 1024), jnp.float32, sharding=stacked),) * 2
    x = jax.ShapeDtypeStruct((1024 * mesh.size, rows), jnp.bfloat16, sharding=split)
    lowered = jax.jit(step, donate_argnums=0).lower(kernels, x)
    found = []
    for options in json.loads(sys.argv[2]):
        records = audit_collectives(lowered.compile(compiler_options=options), mesh).records
        found.append([(r.kind, r.is_overlapped) for r in records if r.payload >= LARGE])
    print(json.dumps(found))
"""


@functools.cache
def large_collectives(machine: str) -> list[list[tuple[str, bool]]]:
    """Kind of each large collective and whether it runs beside compute, with the chip's flags and without."""
    assert importlib.util.find_spec("libtpu"), (
        "the TPU compiler is missing: pip install 'spmd[tpu]'"
    )
    kind = parse_topology(machine).chip.device_kind
    both = [compiler_options(flags_for(["preset"], "tpu", kind, crossing=False)), {}]
    # with little effort nothing is asynchronous
    found = run_script(COMPILE, machine, json.dumps(both))
    return [[tuple(record) for record in records] for records in found]


MACHINES = ("v5p:4x4x4", "v6e:16x16", "tpu7x:4x4x4")


@pytest.mark.soak
@pytest.mark.parametrize("machine", MACHINES)
def test_sparse_cores_gather_and_reduce_scatter_during_the_matmuls(machine: str) -> None:
    """Over a whole slice gradients are reduce-scattered, and something runs beside them and beside a gather."""
    found = large_collectives(machine)[0]
    assert {kind for kind, _ in found} == {"all-gather", "reduce-scatter"}
    assert ("all-gather", True) in found
    assert ("reduce-scatter", True) in found


@pytest.mark.soak
def test_control_without_the_flags_all_wait() -> None:
    """By libtpu's own defaults for v5p nothing overlaps, and gradients are all-reduced."""
    found = large_collectives("v5p:4x4x4")[1]
    assert {kind for kind, _ in found} == {"all-gather", "all-reduce"}
    assert not any(overlapped for _, overlapped in found)
