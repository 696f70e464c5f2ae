"""The core set of absent hardware: what a step holds and sends, as the compilers of v5e and v5p slices make it.

One program for each chip, a pipeline and an offload among them; everything else about absent
machines is soak.
"""

import functools
import importlib.util

import pytest

from tests.absent.test_pipeline import (
    CASES,
    FEW,
    assert_branches_are_known,
    assert_streams_and_shared_gradients,
)
from tests.absent.test_pipeline import compiled as pipelines
from tests.programs import LITTLE_EFFORT, run_script

VOCAB, WIDTH, LAYERS, HEADS, D_FF, EXAMPLES, LENGTH, CHIPS = 512, 512, 2, 4, 1024, 16, 128, 8
MICROBATCHES = 2
COMPILE = f"""
    import collections, json, sys
    import jax, spmd
    from spmd.gradients.accumulate import accumulate
    from spmd.gradients.base import value_and_grad
    from spmd.models.decoder import DecoderConfig
    from spmd.partition_rules.llama import LLAMA, LLAMA_TIED
    from spmd.distributed.initialize import initialize
    from spmd.analysis.collective_audit import audit_collectives
    from spmd.analysis.memory import read_memory
    from spmd.analysis.topology import parse_topology, topology_devices

    initialize(target_platform="tpu")
    model = spmd.from_nnx(DecoderConfig({VOCAB}, {WIDTH}, {LAYERS}, {HEADS}, {HEADS}, {D_FF}).build)
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
            "gathered": sum(r.bytes for r in records if r.kind == "all-gather"),
            "reduced": sum(r.bytes for r in records if r.kind in ("reduce-scatter", "all-reduce")),
            "permuted": sum(r.bytes for r in records if r.kind == "collective-permute"),
        }}
    tied = spmd.from_nnx(DecoderConfig({VOCAB}, {WIDTH}, {LAYERS}, {HEADS}, {HEADS}, {D_FF}, tied=True).build)
    mesh = spmd.make_mesh(devices=topology_devices(parse_topology("v5e:2x4")), fsdp={CHIPS // 2}, tensor=2)
    plan = spmd.make_plan(mesh, LLAMA_TIED, tied, optimizer, remat="full", precision="bf16")
    step = spmd.make_train_step(plan, grad_fn=accumulate(value_and_grad(spmd.next_token_loss(tied)), {MICROBATCHES}))
    found["tied"] = collections.Counter()
    for record in audit_collectives(step.compile(batch), mesh).records:
        if "embed/embedding" in record.op_name or "tied" in record.op_name:
            found["tied"][record.kind] += record.bytes
    print(json.dumps(found))
"""
KERNELS = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * D_FF) + WIDTH * VOCAB
EMBEDDING, NORMS = VOCAB * WIDTH, (2 * LAYERS + 1) * WIDTH
FLOAT32, BF16 = 4, 2


@functools.cache
def compiled() -> dict[str, dict[str, int]]:
    """Machine and offload → bytes of one chip, from one process for all."""
    assert importlib.util.find_spec("libtpu"), (
        "the TPU compiler is missing: pip install 'spmd[tpu]'"
    )
    return run_script(COMPILE, **LITTLE_EFFORT)


PLAIN = ("v5e:2x4", "v5p:2x2x2")
TEMPORARIES = {"v5e:2x4": 24.5e6, "v5p:2x2x2": 28.5e6}
"""Bytes that the compiler of libtpu 0.0.42 takes with little effort, 23.7 and 27.6 MB, and 3 % more."""


@pytest.mark.parametrize("topology", PLAIN)
def test_a_step_sends_what_zero_3_sends(topology: str) -> None:
    """Kernels are gathered in bfloat16, those of layers twice; their gradients are scattered in bfloat16, in two hops.

    The second hop swaps halves of what half of the chips left. Norms are all-reduced. In one hop
    all gradients would be all-reduced: 2 × 2 bytes.
    """
    found = compiled()[topology]
    head = WIDTH * VOCAB
    # and the tokens
    assert found["gathered"] == BF16 * (2 * (KERNELS - head) + head) + 4 * EXAMPLES * LENGTH
    # and a few sums
    assert found["reduced"] == pytest.approx(BF16 * KERNELS + 2 * FLOAT32 * NORMS, abs=128)
    assert found["permuted"] == BF16 * KERNELS // CHIPS


@pytest.mark.parametrize("topology", PLAIN)
def test_a_step_holds_what_the_plan_says(topology: str) -> None:
    """Parameters with two moments, norms whole, and the batch are the arguments; temporaries have a bound."""
    found = compiled()[topology]
    split = 3 * FLOAT32 * (KERNELS + EMBEDDING) // CHIPS
    batch = 3 * 4 * EXAMPLES * LENGTH // CHIPS
    assert split + batch < found["arguments"] < split + batch + 3 * FLOAT32 * NORMS + 8 * 1024
    assert found["temporaries"] < TEMPORARIES[topology]


def test_offloaded_moments_leave_the_chip() -> None:
    """What is on the host is no argument on the device, to the byte; updates in pieces take less than half of it."""
    before, after = compiled()["v5e:2x4"], compiled()["v5e:2x4 optimizer_state"]
    moments = 2 * FLOAT32 * (KERNELS - WIDTH * VOCAB) // CHIPS
    assert (before["host"], after["host"]) == (0, moments)
    assert before["arguments"] - after["arguments"] == moments
    assert after["temporaries"] - before["temporaries"] < moments / 2


def test_a_tied_head_sends_what_a_head_sends_and_its_columns() -> None:
    """The head is gathered over fsdp and its gradient scattered, as without ties; columns are exchanged over tensor.

    A newer compiler ends the process if the lookup's table, or the sum of its two gradients, is
    split like the head.
    """
    found = compiled()["tied"]
    head, columns = BF16 * WIDTH * VOCAB // 2, FLOAT32 * WIDTH * VOCAB // CHIPS
    assert found.keys() == {"all-gather", "reduce-scatter", "all-to-all"}
    assert found["all-gather"] == found["reduce-scatter"] == MICROBATCHES * head
    assert found["all-to-all"] <= (1 + MICROBATCHES) * columns  # the table once a step


@pytest.mark.soak
def test_a_pipeline_sends_streams_and_shared_gradients() -> None:
    """Two stages under 1F1B, as a v5e slice runs them."""
    assert_streams_and_shared_gradients(pipelines("v5e:2x4", CASES[0])[CASES[0]])


@pytest.mark.soak
def test_a_schedule_knows_how_often_a_pipeline_computes() -> None:
    """The same program: its collectives and its cycles are those of four microbatches, not of six ticks."""
    assert_branches_are_known(pipelines("v5e:2x4", CASES[0])[CASES[0]], FEW)
