"""The core set of absent hardware: what a step holds and sends, as the compilers of v5e and v5p slices make it.

One program for each chip, a pipeline and an offload among them; everything else about absent machines is soak.
"""

import functools
import importlib.util

from tests.programs import LITTLE_EFFORT, run_script

VOCAB, WIDTH, LAYERS, HEADS, D_FF, EXAMPLES, LENGTH, CHIPS = 512, 512, 2, 4, 1024, 16, 128, 8
COMPILE = f"""
    import json, sys
    import jax, spmd
    from models.llama import LlamaConfig
    from partition_rules.llama import LLAMA
    from spmd import launch
    from spmd.foresight.collectives import audit_collectives
    from spmd.foresight.memory import estimate_memory, read_memory
    from spmd.foresight.topology import parse_topology, topology_devices

    launch.start(launch.Launch(absent="tpu"))
    model = spmd.from_nnx(LlamaConfig({VOCAB}, {WIDTH}, {LAYERS}, {HEADS}, {HEADS}, {D_FF}).build)
    batch = {{name: jax.ShapeDtypeStruct(({EXAMPLES}, {LENGTH}), "int32") for name in ("tokens", "targets")}}
    batch["weights"] = jax.ShapeDtypeStruct(({EXAMPLES}, {LENGTH}), "float32")
    optimizer = spmd.make_optimizer(spmd.OptimizerConfig(schedule="constant"), steps=10)
    found = {{}}
    for topology, offload in (("v5e:2x4", ()), ("v5e:2x4", ("optimizer_state",)), ("v5p:2x2x2", ())):
        mesh = spmd.make_mesh(devices=topology_devices(parse_topology(topology)), fsdp={CHIPS})
        plan = spmd.make_plan(mesh, LLAMA, model, optimizer, remat="full", precision="bf16", offload=offload)
        step = spmd.make_train_step(plan, spmd.next_token_loss(model))
        compiled = step.compile(batch)
        memory, records = read_memory(compiled), audit_collectives(compiled, mesh).records
        found[" ".join([topology, *offload])] = {{
            "arguments": memory.arguments,
            "temporaries": memory.temporaries,
            "host": memory.host_arguments,
            "estimate": estimate_memory(step, batch, "tpu").total - memory.arguments,
            "gathered": sum(r.bytes for r in records if r.kind == "all-gather"),
            "reduced": sum(r.bytes for r in records if r.kind in ("reduce-scatter", "all-reduce")),
        }}
    print(json.dumps(found))
"""
KERNELS = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * D_FF) + WIDTH * VOCAB
EMBEDDING, NORMS = VOCAB * WIDTH, (2 * LAYERS + 1) * WIDTH
FLOAT32, BF16 = 4, 2


@functools.cache
def compiled() -> dict[str, dict[str, int]]:
    """Machine and offload → bytes of one chip, from one process for all."""
    assert importlib.util.find_spec("libtpu"), "the TPU compiler is missing: pip install 'spmd[tpu]'"
    return run_script(COMPILE, **LITTLE_EFFORT)


def test_print():
    print(compiled(), KERNELS, EMBEDDING, NORMS)
    assert 0
