"""The loss of a pipeline: all stages compute logits, each of some words, and the numbers are those of one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
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
from spmd.sharding.rules import Rules, replicate
from spmd.testing import Reference, token_batches
from spmd.training.batch import place_batch
from spmd.training.state import init_state
from spmd.training.step import make_eval_step, make_train_step
from tests import tiny
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
    "token losses": (
        tiny.replaced(layers=4, vocab=VOCAB),
        lambda model: ModelLoss(model, token_inputs, weighted_token_losses, additive=True),
    ),
}
LAYOUTS = {
    "pipe=4,tensor=2": (4, {"tensor": 2}),
    "pipe=2,fsdp=2,tensor=2": (2, {"fsdp": 2, "tensor": 2}),
}


def plan_of(config, **axes):
    """A plan with the table of the config, which has a row for a bias."""
    rules = decoder_rules(config)
    return spmd.make_plan(tiny.mesh(**axes), rules, tiny.model(config), OPTIMIZER)


def grad_of(loss_fn, stages, schedule="1f1b"):
    chunks = 2 if schedule == "interleaved" else 1
    return pipeline(loss_fn, tabulate(make_schedule(schedule, stages, MICROBATCHES, chunks)))


@functools.cache
def alone(case):
    config, make_loss = CASES[case]
    loss_fn = make_loss(tiny.model(config))
    batches = token_batches((16, 16), config.vocab, steps=2)
    grad_fn = accumulate(value_and_grad(loss_fn), MICROBATCHES)
    return loss_fn, Reference(plan_of(config), grad_fn, batches)


def parity(case, layout, schedule="1f1b"):
    config, _ = CASES[case]
    stages, axes = LAYOUTS[layout]
    loss_fn, reference = alone(case)
    plan = plan_of(config, pipe=stages, **axes)
    return reference.compare(plan, grad_of(loss_fn, stages, schedule), tolerance=REORDERED)


ROWS = [(case, layout) for case in CASES for layout in LAYOUTS]
ROWS_OF_CI = ("cap, bias, z-loss", "pipe=4,tensor=2"), ("token losses", "pipe=4,tensor=2")


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


class Plain(nnx.Module):
    """A model of a user's own, whose logits are an array."""

    def __init__(self, rngs, vocab, width=8, layers=4):
        make = nnx.vmap(lambda rngs: nnx.Linear(width, width, rngs=rngs), in_axes=0, out_axes=0)
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.layers = nnx.split_rngs(splits=layers)(make)(rngs)

    def embed_inputs(self, tokens):
        return self.embed(tokens), None

    def apply_layers(self, x, context):
        scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(lambda layer, x: x + jnp.tanh(layer(x)))(self.layers, x), None

    def compute_outputs(self, x, values):
        return self.embed.attend(x)

    def __call__(self, tokens):
        return self.compute_outputs(*self.apply_layers(*self.embed_inputs(tokens)))


PLAIN_RULES = Rules(
    [
        ("embed/embedding", P(None, "fsdp")),
        ("layers/kernel", P("fsdp")),
        ("bias", replicate("small")),
    ],
    stacked={"layers": "pipe"},
)


def product_sizes(loss_fn, plan, vocab):
    """The sizes of dimensions of all products in a step over four stages."""
    step = make_train_step(plan, grad_fn=grad_of(loss_fn, 4))
    text = step.lower(token_batches((8, 16), vocab, steps=1)[0]).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert products
    return {int(size) for line in products for size in re.findall(r"(?<=[<x])\d+(?=x)", line)}


def test_a_stage_multiplies_its_words_alone():
    """Read from the traced step: 20 of 80 words; all of them where the model returns an array."""
    config = tiny.replaced(layers=4, vocab=80)
    own = product_sizes(tiny.loss_fn(config), plan_of(config, pipe=4, fsdp=2), 80)
    assert 20 in own
    assert 80 not in own
    model = spmd.from_nnx(lambda rngs: Plain(rngs, 80))
    plan = spmd.make_plan(tiny.mesh(pipe=4, fsdp=2), PLAIN_RULES, model, OPTIMIZER)
    plain = product_sizes(next_token_loss(model), plan, 80)
    assert 80 in plain
    assert 20 not in plain


@pytest.mark.parametrize("case", soak_but(CASES, "cap, bias, z-loss"))
def test_evaluation_divides_words(case):
    """The sums of an evaluation through the stages are those of one device."""
    config, make_loss = CASES[case]
    loss_fn = make_loss(tiny.model(config))
    batch = token_batches((16, 16), config.vocab, steps=1)[0]

    def sums(plan, loss_fn):
        state = init_state(plan)
        placed = place_batch(plan, batch)
        return jax.device_get(make_eval_step(plan, loss_fn)(state.params, state.variables, placed))

    expected = sums(plan_of(config), loss_fn)
    plan = plan_of(config, pipe=4, tensor=2)
    found = sums(plan, pipelined(loss_fn, 4, MICROBATCHES))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-6, err_msg=name)
