"""Stored activations take half of bfloat16's memory in the program that the TPU compiler makes for absent chips.

A decoded activation is in memory while its layer is differentiated, so a few layers alone would not
show the saving.
"""

import functools

import jax
import pytest

from spmd.analysis.topology import missing_extra, parse_topology
from tests.programs import LITTLE_EFFORT, run_script
from tests.soak.test_coded_comm_on_pods import OLD

LAYERS, D_FF, SEQUENCES, LENGTH = 16, 2048, 256, 128
"""Sizes of the model, and the sequences of each device with their length."""
FSDP = 8
"""Over all 256 devices the program of this small model has other peaks, and codes save nothing (decision 0041)."""
SCRIPT = f"""
    import json, sys
    import jax, optax, spmd
    from spmd.analysis.memory import estimate_memory, read_memory
    from spmd.analysis.topology import parse_topology, topology_devices
    from spmd.distributed.initialize import initialize
    from spmd.models.decoder import DecoderConfig
    from spmd.partition_rules.llama import LLAMA

    topology, policies = parse_topology(sys.argv[1]), sys.argv[2:]
    initialize(target_platform=topology.platform)
    devices, slices = topology_devices(topology), {{"data": topology.slices}}
    mesh = spmd.make_mesh(devices=devices, slices=slices, data=len(devices) // {FSDP}, fsdp={FSDP})
    model = spmd.from_nnx(DecoderConfig(512, 512, {LAYERS}, 4, 4, {D_FF}).build)
    shape = ({SEQUENCES} * len(devices), {LENGTH})
    batch = {{name: jax.ShapeDtypeStruct(shape, "int32") for name in ("tokens", "targets")}}
    batch["weights"] = jax.ShapeDtypeStruct(shape, "float32")
    found = {{}}
    for remat in policies:
        named = remat.replace("N", "mlp_gate,mlp_up")
        options = {{"remat": named, "precision": "bf16", "slices": slices}}
        plan = spmd.make_plan(mesh, LLAMA, model, optax.sgd(0.1), **options)
        step = spmd.make_train_step(plan, spmd.next_token_loss(model))
        estimate = estimate_memory(step, batch, topology.platform)
        memory = read_memory(step.compile(batch))
        saved = estimate.held["activations"]
        found[remat] = {{"saved": saved, "device": memory.temporaries, "host": memory.host_temporaries}}
    print(json.dumps(found))
"""
# bytes of both activations on one chip, in bfloat16
NAMED = 2 * 2 * LAYERS * SEQUENCES * LENGTH * D_FF

pytestmark = pytest.mark.soak


KEPT, STORED, MOVED = "save:N", "store:int8=N", "store:int8=N offload:N"


@functools.cache
def compiled(topology: str, *policies: str) -> dict[str, dict[str, int]]:
    """Policy → bytes of one device."""
    machine = parse_topology(topology)
    if absent := missing_extra(machine):
        pytest.skip(str(absent))
    if topology.startswith("tpu7x") and jax.__version_info__ < (0, 12):
        pytest.skip(OLD)
    return run_script(SCRIPT, topology, *policies, **LITTLE_EFFORT)


@pytest.mark.parametrize(
    "topology", ["v5e:16x16", "2xv5e:16x16", "v5p:4x4x8", "tpu7x:4x4x4", "h100:16x8"]
)
def test_the_ledger_and_the_compiler_save_half(topology: str) -> None:
    """The ledger saves half without scales, exactly, and the compiler's temporaries nine tenths of that."""
    found = compiled(topology, KEPT, STORED)
    wide, narrow = found[KEPT], found[STORED]
    saving = wide["saved"] - narrow["saved"]
    assert saving == NAMED // 2 - NAMED // 64
    assert wide["device"] - narrow["device"] >= 0.9 * saving


def test_codes_can_be_in_host_memory() -> None:
    """Their bytes are there exactly, and the device keeps the scales; the control keeps the codes."""
    found = compiled("v5e:2x4", STORED, MOVED)
    kept, moved = found[STORED], found[MOVED]
    assert (kept["host"], moved["host"]) == (0, NAMED // 2)
    assert kept["device"] - moved["device"] >= 0.85 * NAMED // 2
