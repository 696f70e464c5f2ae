"""Gradients that are exchanged once a step are those that are exchanged in each microbatch, and are sent once."""

import dataclasses
import functools

import jax
import pytest

import spmd
from spmd.analysis.collective_audit import CollectiveAudit, audit_collectives
from spmd.gradients import deferred_reduction
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import GradFn, value_and_grad
from spmd.gradients.deferred_reduction import defer_grad_reduction
from spmd.layers import router
from spmd.models.mixtral import PRESETS
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan.communication import deferred_reduction_bytes
from spmd.plan.plan import ShardingPlan
from spmd.testing import Parity, Reference, pad_unevenly, token_batches
from tests import tiny
from tests.one_device import REORDERED, SGD

MICROBATCHES = 4
BATCHES = token_batches((16, 16), tiny.CONFIG.vocab, steps=1)
TIED = tiny.replaced(tied=True)
BOTH = ("data", "fsdp")
ALL = {"data": 2, "fsdp": 2, "tensor": 2}
STAGES = {"pipe": 2, "data": 2, "fsdp": 2}
CAPACITY = dataclasses.replace(PRESETS["test"].router, dispatch="capacity")
EXPERTS = dataclasses.replace(PRESETS["test"], layers=1, router=CAPACITY)


def grad_fn_of(config=tiny.CONFIG, stages: int = 1) -> GradFn:
    """A gradient function of four microbatches."""
    if stages == 1:
        return accumulate(value_and_grad(tiny.loss_fn(config)), MICROBATCHES)
    return pipeline(tiny.loss_fn(config), tabulate(make_schedule("1f1b", stages, MICROBATCHES, 1)))


def plan_of(config=tiny.CONFIG, zero: int = 3, **sizes: int) -> ShardingPlan:
    return tiny.plan(config, SGD, (("zero", zero),), **sizes)


@functools.cache
def alone(config) -> Reference:
    return Reference(plan_of(config), grad_fn_of(config), BATCHES)


def parity(axes, config=tiny.CONFIG, zero: int = 3, **sizes: int) -> Parity:
    grad_fn = defer_grad_reduction(grad_fn_of(config, sizes.get("pipe", 1)), axes)
    return alone(config).compare(plan_of(config, zero, **sizes), grad_fn, tolerance=REORDERED)


@functools.cache
def audit(axes, **sizes: int) -> CollectiveAudit:
    plan = plan_of(**sizes)
    step = spmd.make_train_step(
        plan, grad_fn=defer_grad_reduction(grad_fn_of(stages=sizes.get("pipe", 1)), axes)
    )
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCHES[0])
    return audit_collectives(step.compile(batch), plan.mesh)


def runs(found: CollectiveAudit, axis: str) -> set[int]:
    """How often each array above the size of a loss is exchanged over an axis."""
    reductions = [
        r
        for r in found.records
        if r.kind in ("all-reduce", "reduce-scatter") and axis in r.over.split("+")
    ]
    return {r.executions for r in reductions if r.payload >= 1024}


@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        (BOTH, ALL),
        pytest.param(BOTH, STAGES | {"config": TIED}, marks=pytest.mark.soak),
        pytest.param(
            BOTH, {"data": 2, "fsdp": 2, "sequence": 2, "zero": 2}, marks=pytest.mark.soak
        ),
        pytest.param(("data",), ALL, marks=pytest.mark.soak),
        pytest.param(("data",), STAGES, marks=pytest.mark.soak),
        pytest.param(BOTH, {"data": 2, "fsdp": 2, "zero": 1}, marks=pytest.mark.soak),
    ],
)
def test_once_a_step_equals_once_a_microbatch(axes, layout):
    """Losses, gradients and updates are those of one device, up to the order of sums."""
    result = parity(axes, **layout)
    assert result.ok, f"\n{result}"


def test_the_control_differs(monkeypatch):
    """A sum that skips data is seen."""
    monkeypatch.setattr(deferred_reduction, "psum", lambda x, axes: x)
    assert not parity(("data",), data=2, fsdp=2).ok


@pytest.mark.soak
def test_each_array_is_sent_once():
    """Of four microbatches there is one exchange over each axis; without the wrapper, the control, one for each."""
    once, each = audit(BOTH, **ALL), audit((), **ALL)
    assert runs(once, "data") == runs(once, "fsdp") == {1}
    assert min(runs(each, "data") | runs(each, "fsdp")) == MICROBATCHES
    # some are gathered once anyway
    assert 3 * once.bytes("all-gather", "fsdp") < each.bytes("all-gather", "fsdp")


def test_a_pipeline_sends_each_array_once():
    """No stage exchanges in a tick, so no branch that may not be taken holds a collective over data or fsdp.

    Over pipe, the branch that all stages take sends the stream to the logits.
    """
    found = audit(BOTH, **STAGES)
    assert runs(found, "data") == runs(found, "fsdp") == {1}
    assert {r.axes for r in found.records if r.is_conditional} == {("pipe",)}


def test_the_bytes_that_the_plan_says_are_sent():
    """The audit finds them to the byte, besides the three sums of a loss."""
    found, said = audit(BOTH, **ALL), deferred_reduction_bytes(plan_of(**ALL), BOTH)
    sent = [
        r
        for r in found.records
        if "deferred_reduction.py" in r.source and r.kind in ("all-reduce", "reduce-scatter")
    ]
    assert sum(r.bytes for r in sent if r.payload > 4) == said[0]


@functools.cache
def mixture(**sizes: int) -> ShardingPlan:
    return spmd.make_plan(tiny.mesh(**sizes), MIXTRAL, spmd.from_nnx(EXPERTS.build), SGD)


@functools.cache
def experts_alone() -> tuple[GradFn, Reference]:
    grad_fn = accumulate(value_and_grad(spmd.next_token_loss(mixture().model)), 2)
    return grad_fn, Reference(
        mixture(), grad_fn, [pad_unevenly(token_batches((8, 8), EXPERTS.vocab, steps=1)[0], seed=0)]
    )


@pytest.mark.parametrize(
    ("is_mean", "layout"),
    [
        pytest.param(True, {"data": 2}, marks=pytest.mark.soak),
        (False, {"data": 2}),
        pytest.param(True, {"data": 2, "expert": 2}, marks=pytest.mark.soak),
    ],
)
@pytest.mark.soak
def test_experts_that_are_exchanged_once_equal_one_device(monkeypatch, is_mean, layout):
    """Losses of routers are of all devices' examples; averaged over those of one device, the control, they differ."""
    if not is_mean:
        monkeypatch.setattr(
            router, "batch_mean", lambda x, valid: x.mean(axis=tuple(range(valid.ndim)))
        )
    grad_fn, alone = experts_alone()
    result = alone.compare(
        mixture(**layout), defer_grad_reduction(grad_fn, ("data",)), tolerance=REORDERED
    )
    assert result.ok == is_mean, f"\n{result}"
