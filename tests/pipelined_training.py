"""Training of small models of tokens, on one device and in a pipeline."""

import jax
import numpy as np
import optax

from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.pipeline.grad_fn import pipeline, pipelined
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan.plan import make_plan
from spmd.training.state import init_state
from spmd.training.step import make_eval_step, make_train_step
from tests import tiny

MICROBATCHES, VOCAB = 4, 64


def batch():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (16, 9), np.int32)
    weights = np.ones((16, 8), np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def make_step(model, rules, schedule="1f1b", chunks=1, recompute=False, **mesh):
    """A step in microbatches: one after the other, or in stages where the mesh has `pipe`."""
    plan = make_plan(tiny.mesh(**mesh), rules, model, optax.adam(1e-2))
    loss_fn = next_token_loss(model)
    grad_fn = accumulate(value_and_grad(loss_fn), MICROBATCHES)
    if "pipe" in mesh:
        tasks = make_schedule(schedule, mesh["pipe"], MICROBATCHES, chunks)
        grad_fn = pipeline(loss_fn, tabulate(tasks, recompute=recompute))
    return make_train_step(plan, grad_fn=grad_fn)


def train(model, rules, *schedule, steps=2, recompute=False, evaluate=True, **mesh):
    """Losses of steps, their last state, and the evaluation's loss, or None.

    Args:
        schedule: A name, and chunks of a stage.
    """
    step = make_step(model, rules, *schedule, recompute=recompute, **mesh)
    state = init_state(step.plan)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
    if not evaluate:
        return losses, jax.device_get(state), None
    evaluated = next_token_loss(model, train=False)
    if "pipe" in mesh:
        evaluated = pipelined(evaluated, mesh["pipe"], MICROBATCHES)
    after = make_eval_step(step.plan, evaluated)(state.params, state.variables, batch())
    return losses, jax.device_get(state), float(after["loss"])


def assert_trains_as(found, wanted):
    """Losses, state and evaluation of a run are those of another."""
    losses, state, evaluated = found
    expected, other, evaluated_other = wanted
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    np.testing.assert_allclose(evaluated, evaluated_other, rtol=1e-6)
    assert_close(state.variables, other.variables, rtol=1e-5, atol=1e-7)
    assert_close(state.params, other.params, rtol=1e-5, atol=1e-6)


def assert_close(found, wanted, **tolerance):
    """Floats within a tolerance; counters and random keys bit for bit."""

    def check(x, y):
        if np.issubdtype(x.dtype, np.floating):
            np.testing.assert_allclose(x, y, **tolerance)
        else:
            np.testing.assert_array_equal(x, y)

    jax.tree.map(check, found, wanted)
