"""Stored activations take half of bfloat16's memory in the program that the TPU compiler makes for absent chips.

A decoded activation is in memory while its layer is differentiated, so a few layers alone would not show the saving.
"""

import functools

import pytest

from tests.programs import LITTLE_EFFORT, run_script

LAYERS, D_FF, SEQUENCES, LENGTH = 16, 2048, 2048, 128
SCRIPT = f"""
    import json
    import jax, optax, spmd
    from spmd.analysis.memory import estimate_memory, read_memory
    from spmd.analysis.topology import parse_topology, topology_devices
    from spmd.distributed.initialize import initialize
    from spmd.models.llama import LlamaConfig
    from spmd.partition_rules.llama import LLAMA

    initialize(target_platform="tpu")
    mesh = spmd.make_mesh(devices=topology_devices(parse_topology("v5e:2x4")), fsdp=8)
    model = spmd.from_nnx(LlamaConfig(512, 512, {LAYERS}, 4, 4, {D_FF}).build)
    shape = ({SEQUENCES}, {LENGTH})
    batch = {{name: jax.ShapeDtypeStruct(shape, "int32") for name in ("tokens", "targets")}}
    batch["weights"] = jax.ShapeDtypeStruct(shape, "float32")
    found = {{}}
    for remat in ("save:N", "store:int8=N", "store:int8=N offload:N"):
        named = remat.replace("N", "mlp_gate,mlp_up")
        plan = spmd.make_plan(mesh, LLAMA, model, optax.sgd(0.1), remat=named, precision="bf16")
        step = spmd.make_train_step(plan, spmd.next_token_loss(model))
        estimate, memory = estimate_memory(step, batch, "tpu"), read_memory(step.compile(batch))
        saved = estimate.held["activations"]
        found[remat] = {{"saved": saved, "device": memory.temporaries, "host": memory.host_temporaries}}
    print(json.dumps(found))
"""
NAMED = 2 * 2 * LAYERS * SEQUENCES * LENGTH * D_FF // 8  # bytes of both activations on one chip, in bfloat16

pytestmark = pytest.mark.soak


@functools.cache
def compiled() -> dict[str, dict[str, int]]:
    """Policy → bytes of one chip."""
    return run_script(SCRIPT, **LITTLE_EFFORT)


def test_the_ledger_and_the_compiler_save_half() -> None:
    """The ledger saves half without scales, exactly, and the compiler's temporaries nine tenths of that."""
    wide, narrow = compiled()["save:N"], compiled()["store:int8=N"]
    saving = wide["saved"] - narrow["saved"]
    assert saving == NAMED // 2 - NAMED // 64
    assert wide["device"] - narrow["device"] >= 0.9 * saving


def test_codes_can_be_in_host_memory() -> None:
    """Their bytes are there exactly, and the device keeps the scales; the control keeps the codes."""
    kept, moved = compiled()["store:int8=N"], compiled()["store:int8=N offload:N"]
    assert (kept["host"], moved["host"]) == (0, NAMED // 2)
    assert kept["device"] - moved["device"] >= 0.85 * NAMED // 2
