"""The blocks of splash attention of each TPU, with gradients, fit its on-chip memory: they compile for it."""

import pytest

from tests.programs import run_script

pytestmark = pytest.mark.soak

COMPILE = """
    import json, sys
    import jax, jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from spmd.analysis.topology import parse_topology, topology_devices
    from spmd.chips import SplashBlocks
    from spmd.distributed.initialize import initialize
    from spmd.distributed.xla_flags import compiler_options, flags_for
    from spmd.layers.attention_options import AttentionOptions
    from spmd.layers.splash_attention import Queries, splash_attention

    initialize(target_platform="tpu")
    topology = parse_topology(sys.argv[1])
    here = NamedSharding(Mesh(np.array(topology_devices(topology)[:1]), ("x",)), P())

    def compiles(blocks, word, dim, window, seq=8192, parts=1):
        def total(query, key, value):
            options = AttentionOptions(window)
            out = splash_attention(
                query, key, value, None, None, options, queries=Queries(parts), blocks=blocks
            )
            return out.astype(jnp.float32).sum()

        def heads(count, seq):
            return jax.ShapeDtypeStruct((1, seq, count, dim), "bfloat16", sharding=here)

        flags = flags_for([word], "tpu", topology.chip.device_kind, crossing=False)
        arguments = heads(8, seq // parts), heads(8, seq), heads(8, seq)
        lowered = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*arguments)
        try:
            lowered.compile(compiler_options=compiler_options(flags))
        except jax.errors.JaxRuntimeError:
            return False
        return True

    own = topology.chip.splash_blocks
    huge = SplashBlocks((2048, 4096), (2048, 4096), (2048, 4096), 4096)
    print(json.dumps({
        "preset": compiles(own, "preset", 128, None),
        "quick": compiles(own, "quick", 128, None),
        "wide heads": compiles(own, "quick", 256, None),
        "window": compiles(own, "quick", 128, 1024),
        "long": compiles(own, "preset", 128, None, 131_072, 8),
        "long, quick": compiles(own, "quick", 128, None, 131_072, 8),
        "control": compiles(huge, "quick", 128, None),
    }))
"""


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_blocks_fit_the_chip(topology):
    """Also without the flag for more on-chip memory; the control, of larger blocks, does not."""
    found = run_script(COMPILE, topology)
    assert not found.pop("control")
    assert all(found.values()), found
