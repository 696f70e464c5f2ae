"""Pipelines as the compilers of a TPU slice and of GPUs see them: memory by microbatches, and what goes over `pipe`."""

import functools

import pytest

from spmd.foresight.closed_forms import pipeline_traffic
from spmd.foresight.topology import missing_extra, parse_topology
from tests.programs import run_script

LAYERS, D, D_FF, VOCAB, SEQ, EXAMPLES = 4, 512, 1024, 512, 256, 4
COMPILE = f"""
    import json, sys
    import jax, optax, spmd
    from models.llama import LlamaConfig
    from partition_rules.llama import LLAMA
    from spmd import launch
    from spmd.foresight.collectives import audit_collectives
    from spmd.foresight.memory import estimate_memory, read_memory
    from spmd.foresight.topology import parse_topology, topology_devices
    from spmd.gradients.lockstep import make_program
    from spmd.gradients.pipeline import pipeline
    from spmd.gradients.schedules import make_schedule

    topology = parse_topology(sys.argv[1])
    launch.start(launch.Launch(absent=topology.platform))
    devices = topology_devices(topology)
    model = spmd.from_nnx(LlamaConfig({VOCAB}, {D}, {LAYERS}, 8, 8, {D_FF}).build)
    found = {{}}
    for case in sys.argv[2:]:
        name, stages, microbatches, chunks = [part if part.isalnum() and not part.isdigit() else int(part)
                                              for part in case.split()]
        mesh = spmd.make_mesh(devices=devices, pipe=stages, fsdp=2, tensor=2)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
        plan = spmd.make_plan(mesh, LLAMA, model, optimizer, attention="xla")
        program = make_program(make_schedule(name, stages, microbatches, chunks))
        batch = {{name: jax.ShapeDtypeStruct(({EXAMPLES} * microbatches, {SEQ}), "int32") for name in ("tokens", "targets")}}
        batch["weights"] = jax.ShapeDtypeStruct(({EXAMPLES} * microbatches, {SEQ}), "float32")
        step = spmd.make_train_step(plan, grad_fn=pipeline(spmd.next_token_loss(model), program))
        estimate, compiled = estimate_memory(step, batch, topology.platform), step.compile(batch)
        memory, records = read_memory(compiled), audit_collectives(compiled, mesh).records
        over_pipe = [(r.kind, r.over, r.payload, r.executions, r.is_conditional) for r in records if "pipe" in r.over]
        found[case] = {{
            "ticks": program.ticks,
            "temporaries": memory.temporaries,
            "total": memory.total,
            "estimate": estimate.total,
            "stages": estimate.held["stages"],
            "over pipe": over_pipe,
            "irregular": [r.kind for r in records if r.axes is None],
        }}
    print(json.dumps(found))
"""
FEW, MANY = 4, 32
FLAT = {"1f1b": "1f1b 2 {} 1", "interleaved": "interleaved 2 {} 2"}
GROWS = {"gpipe": "gpipe 2 {} 1"}
CASES = [case.format(m) for case in (FLAT | GROWS).values() for m in (FEW, MANY)]

pytestmark = pytest.mark.slow


@functools.cache
def compiled(topology, *cases):
    """What each pipeline holds and sends, compiled in one process for all."""
    return run_script(COMPILE, topology, *cases)
