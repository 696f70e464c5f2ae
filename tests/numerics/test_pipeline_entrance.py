"""Layers before the stages of a pipeline: each stage runs them for some microbatches, with one device's numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.pipeline import entrance
from spmd.pipeline.grad_fn import pipeline, pipelined
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.testing import Reference, token_batches
from spmd.training.batch import place_batch
from spmd.training.state import init_state
from spmd.training.step import make_eval_step, make_train_step
from tests import tiny
from tests.linear_stack import RULES, LinearStack
from tests.one_device import REORDERED
from tests.tiers import soak_but

WIDTH, VOCAB, SEQUENCE = 8, 64, 8
calls = []


def record(x):
    def host(_):
        calls.append(1)
        return np.zeros((), np.float32)

    return jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x[0, 0, 0])


@jax.custom_vjp
def counted(x):
    """The same numbers, and a call for each evaluation of them."""
    return x + record(x)


counted.defvjp(lambda x: (counted(x), None), lambda _, d: (d,))


class Net(LinearStack):
    """A layer of another kind before the stack, with dropout of its own."""

    def __init__(self, rngs, is_counted=False, has_first=True):
        super().__init__(rngs, VOCAB, layers=8, width=WIDTH)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs) if has_first else None
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.is_counted = is_counted

    def embed_inputs(self, tokens):
        x = self.dropout(self.embed(tokens))
        if self.first is not None:
            x = x + jnp.tanh(self.first(x))
        return (counted(x) if self.is_counted else x), None


@functools.cache
def loss_of(train=True, **options):
    return next_token_loss(spmd.from_nnx(lambda rngs: Net(rngs, **options)), train=train)


def plan_of(loss_fn, **axes):
    return spmd.make_plan(tiny.mesh(**axes), RULES, loss_fn.model, optax.sgd(0.1))


def grad_of(loss_fn, name, stages, microbatches, **options):
    chunks = 2 if name == "interleaved" else 1
    schedule = make_schedule(name, stages, microbatches, chunks)
    return pipeline(loss_fn, tabulate(schedule, **options))


@functools.cache
def alone(microbatches):
    loss_fn = loss_of()
    batches = token_batches((2 * microbatches, SEQUENCE), VOCAB, steps=2)
    grad_fn = accumulate(value_and_grad(loss_fn), microbatches)
    return Reference(plan_of(loss_fn), grad_fn, batches)


def parity(name, stages, microbatches, *, recompute=False):
    grad_fn = grad_of(loss_of(), name, stages, microbatches, recompute=recompute)
    plan = plan_of(loss_of(), pipe=stages, fsdp=2)
    return alone(microbatches).compare(plan, grad_fn, tolerance=REORDERED)


ROWS = [
    ("gpipe", 2, 4),
    ("gpipe", 4, 6),
    ("1f1b", 4, 4),
    ("1f1b", 4, 6),
    ("1f1b", 2, 3),
    ("interleaved", 2, 4),
]


@pytest.mark.parametrize("row", soak_but(ROWS, ("1f1b", 4, 6)), ids=str)
@pytest.mark.parametrize("recompute", soak_but([False, True], False))
def test_first_layers_equal_one_device(row, recompute):
    """Also with fewer microbatches in the last group than stages; each has its own random state."""
    result = parity(*row, recompute=recompute)
    assert result.ok, f"\n{result}"


def test_another_microbatch_is_noticed(monkeypatch):
    """The control: a stage that runs the backward pass of another microbatch has other gradients."""
    leave = entrance.LayersEntrance.leave

    def wrong(self, held, number, gradient, d_shared):
        other = dataclasses.replace(self, leaving=np.roll(self.leaving, 1))
        return leave(other, held, number, gradient, d_shared)

    monkeypatch.setattr(entrance.LayersEntrance, "leave", wrong)
    assert not parity("1f1b", 4, 6).ok


def test_each_stage_runs_its_own_microbatches():
    """Six microbatches in two groups of four; a lookup is each stage's, of all six."""
    batch = token_batches((12, SEQUENCE), VOCAB, steps=1)[0]

    def count(has_first):
        loss_fn = dataclasses.replace(loss_of(is_counted=True, has_first=has_first), additive=True)
        plan = plan_of(loss_fn, pipe=4)
        step = make_train_step(plan, grad_fn=grad_of(loss_fn, "1f1b", 4, 6))
        state, placed = init_state(plan), place_batch(plan, batch)
        calls.clear()
        jax.block_until_ready(step(state, placed))
        return len(calls)

    assert count(has_first=True) == 2 * 4
    assert count(has_first=False) == 4 * 6


@pytest.mark.soak
def test_evaluation_runs_them_too():
    """The sums of microbatches through the stages are those of one device."""
    loss_fn = loss_of(train=False, is_counted=True)
    batch = token_batches((12, SEQUENCE), VOCAB, steps=1)[0]

    def sums(plan, loss_fn):
        state = init_state(plan)
        placed = place_batch(plan, batch)
        return jax.device_get(make_eval_step(plan, loss_fn)(state.params, state.variables, placed))

    loss_fn = dataclasses.replace(loss_fn, additive=True)
    expected = sums(plan_of(loss_fn), loss_fn)
    calls.clear()
    found = sums(plan_of(loss_fn, pipe=4), pipelined(loss_fn, 4, 6))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-6, err_msg=name)
    assert len(calls) == 2 * 4
