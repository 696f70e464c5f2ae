"""The audit of a function for a TPU slice that is not here, on axes of both types."""

import pytest

from tests.programs import run_script

pytestmark = pytest.mark.soak

COMPILE = """
    import json
    import jax, jax.numpy as jnp, numpy as np, spmd
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
    from spmd.distributed.initialize import initialize
    from spmd.analysis.topology import parse_topology, topology_devices

    initialize(target_platform="tpu")
    devices = np.array(topology_devices(parse_topology("v5e:2x4"))).reshape(2, 4)
    found = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = Mesh(devices, ("dp", "mp"), axis_types=(kind, kind))

        def floats(*spec):
            return jax.ShapeDtypeStruct((1024, 1024), "bfloat16", sharding=NamedSharding(mesh, P(*spec)))

        def product(x, kernel):
            if kind == AxisType.Auto:
                return x @ kernel
            return jnp.dot(x, kernel, out_sharding=NamedSharding(mesh, P("dp")))

        audit = spmd.audit_function(product, floats("dp", "mp"), floats("mp")).collectives
        found.append([audit.backend, *[(r.kind, r.axes, r.dtype, r.payload) for r in audit.records]])
    print(json.dumps(found))
"""


def test_a_product_is_summed_over_the_axis_that_splits_it():
    """In bfloat16, over the function's own axis."""
    expected = ["tpu", ["all-reduce", ["mp"], "bf16", 2**20]]
    assert run_script(COMPILE) == [expected, expected]
