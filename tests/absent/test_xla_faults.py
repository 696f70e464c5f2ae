"""A fault of XLA's partitioner in a program for a TPU: which devices sum the gradient of a grouped convolution.

The fault and the formula that is right are those of docs/xla-faults.md, *Convolutions with groups*.
"""

import functools
import importlib.util
from typing import Any

from tests.programs import LITTLE_EFFORT, run_script

COMPILE = """
    import json
    import jax
    import numpy as np
    from jax import lax
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P
    from spmd.analysis.replica_groups import read_groups
    from spmd.analysis.topology import parse_topology, topology_devices
    from spmd.distributed.initialize import initialize

    initialize(target_platform="tpu")
    devices = np.array(topology_devices(parse_topology("v5e:2x4"))).reshape(2, 2, 2)
    mesh = Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    images, replicated = P(("data", "fsdp")), P()

    def convolve(x, k):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=8)

    def manual(x, k):
        return jax.shard_map(convolve, mesh=mesh, in_specs=(images, replicated), out_specs=images)(x, k)

    def reduced_over(convolve):
        def loss(k, x):
            return (convolve(x, k) ** 2).sum()

        shardings = [NamedSharding(mesh, spec) for spec in (replicated, images)]
        gradient = jax.jit(jax.grad(loss), in_shardings=shardings, out_shardings=shardings[0])
        arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((3, 3, 1, 8), (8, 8, 8, 8))]
        text = gradient.lower(*arguments).compile().as_text()
        reduces = [line for line in text.splitlines() if " all-reduce(" in line]
        return [sorted(map(sorted, read_groups(line, devices=8)[0])) for line in reduces]

    print(json.dumps({function.__name__: reduced_over(function) for function in (convolve, manual)}))
"""


@functools.cache
def compiled() -> dict[str, Any]:
    """Convolution → the groups of devices of each all-reduce in the gradient of its kernel."""
    assert importlib.util.find_spec("libtpu"), (
        "the TPU compiler is missing: pip install 'spmd[tpu]'"
    )
    return run_script(COMPILE, **LITTLE_EFFORT)


def test_a_grouped_convolution_sums_too_often() -> None:
    """The batch is in 4 parts, and the gradient is summed over all 8 devices: twice too large."""
    every_device = [list(range(8))]
    assert compiled()["convolve"] == [every_device], (
        "XLA mended a fault: drop `Fault('Convolutions with groups', ...)` of spmd/plan/xla_faults.py, and what "
        "docs/xla-faults.md says of it"
    )


def test_a_manual_convolution_sums_once() -> None:
    """With the formula that is right, the gradient is summed over the 4 devices that differ in data and fsdp."""
    assert compiled()["manual"] == [[[0, 2, 4, 6], [1, 3, 5, 7]]]
