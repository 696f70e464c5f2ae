"""Codes on the wire of pods: bytes in the programs that compilers make for absent chips."""

import functools
import json

import jax
import pytest

from spmd.analysis.topology import missing_extra, parse_topology
from tests.programs import LITTLE_EFFORT, run_script

SCRIPT = """
    import json, sys
    import jax, optax, spmd
    from spmd.analysis.collective_audit import audit_collectives
    from spmd.analysis.topology import parse_topology, topology_devices
    from spmd.distributed.initialize import initialize
    from spmd.models.decoder import DecoderConfig
    from spmd.partition_rules.llama import LLAMA

    topology, slices = parse_topology(sys.argv[1]), json.loads(sys.argv[2])
    initialize(target_platform=topology.platform)
    devices = topology_devices(topology)
    mesh = spmd.make_mesh(devices=devices, slices=slices, fsdp=len(devices))
    model = spmd.from_nnx(DecoderConfig(4096, 2048, 2, 16, 4, 4096).build)
    batch = {name: jax.ShapeDtypeStruct((len(devices), 256), "int32") for name in ("tokens", "targets")}
    batch["weights"] = jax.ShapeDtypeStruct((len(devices), 256), "float32")
    found = {}
    for name, compress in json.loads(sys.argv[3]).items():
        options = {"remat": "full", "precision": "bf16", "slices": slices}
        plan = spmd.make_plan(mesh, LLAMA, model, optax.sgd(0.1), compress=spmd.CompressConfig(**compress), **options)
        step = spmd.make_train_step(plan, spmd.next_token_loss(model)).compile(batch)
        audit = audit_collectives(step, mesh, plan=plan, slices=slices)
        kernels = [r for r in audit.records if r.cause.param.endswith("kernel")]
        layers = [r for r in kernels if r.cause.param.startswith("layers/")]
        gathers = [r for r in kernels if "all-gather" in (r.kind, r.equivalent_kind)]
        found[name] = {
            "gathered": {dtype: sum(r.bytes for r in gathers if r.dtype == dtype) for dtype in ("bf16", "s8", "f32")},
            "into slices": {
                dtype: sum(r.slice_bytes for r in layers if r.dtype == dtype) for dtype in ("bf16", "s8", "f32")
            },
            "broken": [str(problem) for problem in audit.broken],
        }
    print(json.dumps(found))
"""
CODES = {"plain": {}, "int8": {"gather": "int8", "gradients": "int8"}}
ZERO_PLUS_PLUS = {"plain": {}, "zero++": {"gather": "int8", "gradients": "int4"}}

OLD = "0.0.42 of libtpu, that of JAX 0.10, ends the process at a bfloat16 reduce-scatter over these 128 devices"

pytestmark = pytest.mark.soak


@functools.cache
def compiled(topology: str, slices: str, codecs: str) -> dict[str, dict]:
    """Codecs → bytes of one device, and into a slice."""
    return run_script(SCRIPT, topology, slices, codecs, **LITTLE_EFFORT)


@pytest.mark.parametrize(
    "topology", ["v5e:2x4", "v5e:16x16", "v5p:4x4x8", "tpu7x:4x4x4", "h100:16x8"]
)
def test_gathers_send_half_of_bfloat16(topology) -> None:
    """To the byte, and one float32 for each block of 128 beside them; nothing that was promised is wide."""
    if absent := missing_extra(parse_topology(topology)):
        pytest.skip(str(absent))
    if topology.startswith("tpu7x") and jax.__version_info__ < (0, 12):
        pytest.skip(OLD)
    found = compiled(topology, "{}", json.dumps(CODES))
    plain, narrow = (found[name]["gathered"] for name in CODES)
    assert narrow["s8"] == plain["bf16"] / 2 > 0
    assert narrow["f32"] <= narrow["s8"] * 4 / 128
    assert (plain["s8"], narrow["bf16"]) == (0, 0)
    assert not found["int8"]["broken"]


@pytest.mark.parametrize("topology", ["2xv5e:4x4", "2xv5e:16x16"])
def test_zero_plus_plus_sends_a_quarter_over_slices(topology) -> None:
    """Of layers' kernels: one gather in int8 and int4 gradients, for two gathers and gradients in bfloat16."""
    found = compiled(topology, json.dumps({"fsdp": 2}), json.dumps(ZERO_PLUS_PLUS))
    plain, narrow = (found[name]["into slices"] for name in ZERO_PLUS_PLUS)
    assert narrow["s8"] == plain["bf16"] / 4 > 0
    assert narrow["f32"] <= narrow["s8"] / 16  # scales: of int8 a 32nd, of int4 a 16th
    assert not found["zero++"]["broken"]
