"""The loss of a pipeline: all stages compute logits, each of some words, and the numbers are those of one device."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import ModelLoss, next_token_loss, token_inputs, token_losses
from spmd.layers import lm_head
from spmd.model_interface.model import Outputs
from spmd.models.decoder import decoder_rules
from spmd.pipeline.grad_fn import pipeline, pipelined
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.testing import Reference, token_batches
from spmd.training.batch import place_batch
from spmd.training.state import init_state
from spmd.training.step import make_eval_step, make_train_step
from tests import linear_stack, tiny
from tests.linear_stack import LinearStack
from tests.one_device import REORDERED
from tests.tiers import soak_but

OPTIMIZER = optax.sgd(0.1, momentum=0.9)
MICROBATCHES = 4
VOCAB = 76  # over tensor=2 and pipe=4: 10, 10, 10 and 8 words


def weighted_token_losses(outputs: Outputs, batch) -> dict:
    """A loss whose weights only the backward pass knows, and a term of the stream and one of the kernel alone."""
    losses, correct = token_losses(outputs.logits, batch["targets"])
    weights = batch["weights"]
    stream, kernel = outputs.logits.x, outputs.logits.kernel
    # Without a weight a target is no word, and its loss any number: it must be a finite one.
    losses = jnp.where(weights > 0, losses, jnp.exp(-losses))
    others = 1e-2 * (stream.astype(jnp.float32) ** 2).mean(axis=-1) + 1e-3 * (kernel**2).mean()
    return {
        "loss": ((jnp.tanh(losses) + others) * weights).sum(),
        "weight": weights.sum(),
        "accuracy": (correct * weights).sum(),
    }


CASES = {
    "llama": (tiny.replaced(layers=4, vocab=VOCAB), next_token_loss),
    "tied": (tiny.replaced(layers=4, vocab=80, tied=True), next_token_loss),
    "cap, bias, z-loss": (
        tiny.replaced(layers=4, vocab=VOCAB, logits_soft_cap=2.0, logits_bias=True),
        functools.partial(next_token_loss, z_loss=1e-2, chunk=8),
    ),
    "ahead": (tiny.replaced(layers=2, vocab=VOCAB, predict_ahead=1), next_token_loss),
    "token losses": (
        tiny.replaced(layers=4, vocab=VOCAB),
        lambda model: ModelLoss(model, token_inputs, weighted_token_losses, additive=True),
    ),
}
LAYOUTS = {
    "pipe=4,tensor=2": (4, {"tensor": 2}),
    "pipe=2,fsdp=2,tensor=2": (2, {"fsdp": 2, "tensor": 2}),
}


CLIPS = {"ahead": "residual=0.02"}
"""Clipped gradients between the stages and the logits: parts of them would be clipped one by one."""


def plan_of(case, precision="float32", **axes):
    """A plan with the table of the case's config, which has a row for a bias."""
    config, _ = CASES[case]
    rules, clips = decoder_rules(config), CLIPS.get(case, "")
    return spmd.make_plan(
        tiny.mesh(**axes),
        rules,
        tiny.model(config),
        OPTIMIZER,
        precision=precision,
        clip_activations=clips,
    )


def batches_of(case, steps):
    """Batches whose last tokens have no weight, and a target that is no word."""
    config, _ = CASES[case]
    batches = token_batches((16, 16), config.vocab, steps=steps)
    for batch in batches:
        batch["weights"] = np.array(batch["weights"])
        batch["weights"][:, -2:] = 0
        batch["targets"] = np.where(batch["weights"] > 0, batch["targets"], -1)
    return batches


def grad_of(loss_fn, stages, schedule="1f1b"):
    chunks = 2 if schedule == "interleaved" else 1
    return pipeline(loss_fn, tabulate(make_schedule(schedule, stages, MICROBATCHES, chunks)))


@functools.cache
def alone(case):
    config, make_loss = CASES[case]
    loss_fn = make_loss(tiny.model(config))
    grad_fn = accumulate(value_and_grad(loss_fn), MICROBATCHES)
    return loss_fn, Reference(plan_of(case), grad_fn, batches_of(case, 2))


def parity(case, layout, schedule="1f1b"):
    stages, axes = LAYOUTS[layout]
    loss_fn, reference = alone(case)
    plan = plan_of(case, pipe=stages, **axes)
    return reference.compare(plan, grad_of(loss_fn, stages, schedule), tolerance=REORDERED)


ROWS = [
    (case, layout)
    for case, (config, _) in CASES.items()
    for layout, (stages, _) in LAYOUTS.items()
    if config.layers >= stages
]


ROWS_OF_CI = (("token losses", "pipe=4,tensor=2"),)


@pytest.mark.parametrize("row", soak_but(ROWS, *ROWS_OF_CI), ids="/".join)
def test_words_of_all_stages_equal_one_device(row):
    """Also words that do not divide: padding has no probability, also under a cap, whose derivative reads logits."""
    case, layout = row
    result = parity(case, layout)
    assert result.ok, f"\n{result}"


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_words_of_all_stages_under_other_schedules(schedule):
    result = parity("token losses", "pipe=2,fsdp=2,tensor=2", schedule)
    assert result.ok, f"\n{result}"


def test_a_cotangent_of_one_stage_alone_is_noticed(monkeypatch):
    """The control: without the sum of cotangents, only the last stage's words have gradients."""
    monkeypatch.setattr(lm_head._Layout, "of_all_parts", lambda layout, cotangent: cotangent)
    result = parity("token losses", "pipe=4,tensor=2")
    assert {row.what for row in result.rows if not row.ok} >= {"gradients"}


def product_sizes(lowered):
    """The sizes of dimensions of all products of a traced program."""
    lines = lowered.as_text().splitlines()
    products = [line for line in lines if "stablehlo.dot_general" in line]
    assert products
    return {int(size) for line in products for size in re.findall(r"(?<=[<x])\d+(?=x)", line)}


def step_sizes(loss_fn, plan, vocab):
    step = make_train_step(plan, grad_fn=grad_of(loss_fn, 4))
    return product_sizes(step.lower(token_batches((8, 16), vocab, steps=1)[0]))


def test_a_stage_multiplies_its_words_alone():
    """Read from the traced step: 20 of 80 words; all of them where the model returns an array."""
    own = step_sizes(tiny.loss_fn(CASES["tied"][0]), plan_of("tied", pipe=4, fsdp=2), 80)
    assert 20 in own
    assert 80 not in own
    model = spmd.from_nnx(lambda rngs: LinearStack(rngs, vocab=80, layers=4))
    plan = spmd.make_plan(tiny.mesh(pipe=4, fsdp=2), linear_stack.RULES, model, OPTIMIZER)
    plain = step_sizes(next_token_loss(model), plan, 80)
    assert 80 in plain
    assert 20 not in plain


def test_words_that_are_gathered_are_the_last_stages():
    """A table that stores words over `fsdp` keeps the gathers that it had, of the head of one stage."""
    config, _ = CASES["tied"]
    config = dataclasses.replace(config, tied=False)
    head = ("lm_head/kernel", P(None, ("tensor", "fsdp")))
    rules = decoder_rules(config)
    others = [row for row in rules.params if row[0] != "lm_head/kernel"]
    rules = dataclasses.replace(rules, params=[head, *others])
    plan = spmd.make_plan(tiny.mesh(pipe=4, fsdp=2), rules, tiny.model(config), OPTIMIZER)
    sizes = step_sizes(tiny.loss_fn(config), plan, 80)
    assert 80 in sizes
    assert 20 not in sizes


@pytest.mark.parametrize("precision", soak_but(["bf16", "float32"], "bf16"))
@pytest.mark.parametrize("case", soak_but(CASES, "llama"))
def test_evaluation_divides_words(case, precision):
    """The sums of an evaluation through the stages are those of one device, and a stage has the products of its words.

    Narrow floats are summed over stages beside another axis, where XLA:CPU would end the process.
    """
    config, make_loss = CASES[case]
    loss_fn = make_loss(tiny.model(config))
    stages = config.layers
    (batch,) = batches_of(case, 1)
    plan = plan_of(case, precision, pipe=stages, tensor=2)

    def sums(plan, loss_fn):
        state = init_state(plan)
        given = state.params, state.variables, place_batch(plan, batch)
        step = make_eval_step(plan, loss_fn)
        return jax.device_get(step(*given)), jax.jit(step).lower(*given)

    expected, _ = sums(plan_of(case, precision), loss_fn)
    found, lowered = sums(plan, pipelined(loss_fn, stages, MICROBATCHES))
    rtol = {"float32": 2e-6, "bf16": 5e-2}[precision]
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, err_msg=name)
    words = config.vocab // 2
    sizes = product_sizes(lowered)
    assert -(-words // stages) in sizes
    assert words not in sizes
