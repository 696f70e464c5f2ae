"""What all stages use is gathered over `pipe` before the ticks, and its gradients are scattered after them."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd.analysis.collectives import find_collectives
from spmd.analysis.hlo import parse
from spmd.analysis.memory import estimate_memory, read_memory
from spmd.partition_rules.llama import LLAMA
from spmd.pipeline import shared_params
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan.context import use_plan
from spmd.plan.plan import ShardingPlan, make_plan
from spmd.sharding.mesh import AXES
from spmd.testing import token_batches
from spmd.training.step import make_train_step
from tests import tiny

CONFIG = tiny.replaced(layers=2)
BATCH = token_batches((8, 16), CONFIG.vocab, steps=1)[0]
WHOLE = {"embed/embedding": P(None, ("fsdp", "tensor")), "lm_head/kernel": P("fsdp", "tensor")}
FIRST = {
    "embed/embedding": P(None, ("pipe", "fsdp", "tensor")),
    "lm_head/kernel": P("fsdp", ("pipe", "tensor")),
}
SIZES = {"embed/embedding": 4 * 64 * 32, "lm_head/kernel": 4 * 64 * 32}


@functools.cache
def plan(table: str = "own") -> ShardingPlan:
    """The plan of Llama's own table, of one without pipe, or of one with pipe before other axes."""
    specs = {"own": {}, "whole": WHOLE, "first": FIRST}[table]
    rules = dataclasses.replace(
        LLAMA, params=[(name, specs.get(name, spec)) for name, spec in LLAMA.params]
    )
    return make_plan(tiny.mesh(pipe=2, fsdp=2, tensor=2), rules, tiny.model(CONFIG), tiny.OPTIMIZER)


@pytest.mark.parametrize("table", ["own", "whole", "first"])
def test_gradients_are_those_of_all_stages(table, monkeypatch):
    """Each element is the sum over the stages, in its place, however the table splits it; then it is stored in parts.

    The control: where parts are named in the mesh's order, `pipe` before other axes, they are in
    others' places.
    """
    random = np.random.default_rng(0)
    shapes = {
        "embed": {"embedding": (64, 32)},
        "lm_head": {"kernel": (32, 64)},
        "norm": {"scale": (32,)},
    }
    stacked = {
        outer: {
            name: random.normal(size=(2, *shape)).astype(np.float32)
            for name, shape in inner.items()
        }
        for outer, inner in shapes.items()
    }

    def are_sums():
        def add(gradients):
            with use_plan(plan(table)):
                return shared_params.sum_over_stages(gradients)

        found = jax.jit(add)(stacked)
        same = jax.tree.map(lambda x, y: np.allclose(x, y.sum(0), atol=1e-6), found, stacked)
        return found, all(jax.tree.leaves(same))

    found, right = are_sums()
    assert right
    kept = found["lm_head"]["kernel"].addressable_shards[0].data.nbytes
    assert kept == SIZES["lm_head/kernel"] // (4 if table == "whole" else 8)
    written = shared_params.dims_spec

    def in_order(dims):
        return written([tuple(sorted(axes, key=AXES.index)) for axes in dims])

    monkeypatch.setattr(shared_params, "dims_spec", in_order)
    assert are_sums()[1] == (table == "whole")


@functools.cache
def compiled(table: str):
    """Kind → bytes that go over `pipe` outside of ticks, and the memory, as estimated and as compiled."""
    table_of = tabulate(make_schedule("1f1b", 2, 2))
    step = make_train_step(plan(table), grad_fn=pipeline(tiny.loss_fn(CONFIG), table_of))
    program = step.compile(BATCH)
    sent: dict[str, int] = {}
    for r in find_collectives(
        parse(program.as_text()), plan(table).mesh.shape, cpu=True, slices=np.zeros(8, int)
    ):
        if r.axes == ("pipe",) and r.kind != "collective-permute" and r.payload > 256:
            sent[r.kind] = sent.get(r.kind, 0) + r.bytes * r.executions
    return sent, estimate_memory(step, BATCH), read_memory(program)


@pytest.mark.soak
def test_bytes_over_pipe():
    """Both are gathered once and their gradients scattered once: what the all-reduce of a table without pipe sends."""
    shared = sum(SIZES.values()) // 4
    sent, _, _ = compiled("own")
    assert sent == {"all-gather": shared, "reduce-scatter": shared}
    assert compiled("whole")[0] == {"all-reduce": 2 * shared}, "the control"


@pytest.mark.soak
def test_memory_as_estimated_and_as_compiled():
    """State is smaller by half of embedding and head, and both figures say so."""
    (_, estimate, memory), (_, estimate_whole, memory_whole) = compiled("own"), compiled("whole")
    saved = 3 * sum(SIZES.values()) // 8  # parameters and two moments
    assert memory_whole.arguments - memory.arguments == saved
    held, held_whole = (
        sum(e.held[name] for name in ("params", "optimizer")) for e in (estimate, estimate_whole)
    )
    assert held_whole - held == saved
