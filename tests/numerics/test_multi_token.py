"""Multi-token prediction, in a small DeepSeek-V3: its loss, and equal numbers on every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.errors import ConfigError
from spmd.generate.generator import Generator
from spmd.generate.sampling import Sampling
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.layers.ahead import has_ahead, tokens_ahead
from spmd.models.decoder import DecoderConfig, decoder_rules
from spmd.models.deepseek import PRESETS
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.testing import BUGS, Reference, token_batches
from tests import tiny
from tests.one_device import REORDERED, SGD, Job

LLAMA = DecoderConfig(vocab=64, d_model=32, layers=2, d_ff=48, predict_ahead=2)
DEEPSEEK = dataclasses.replace(PRESETS["test-deepseek"], predict_ahead=1)


def packed(batch):
    """The batch with documents of different lengths in each row."""
    seq = batch["tokens"].shape[1]
    starts = np.array([[0] * 5 + [5] * (seq - 5), [0] * 9 + [9] * (seq - 9)], np.int32)
    return {**batch, "segments": np.tile(starts, (len(batch["tokens"]) // 2, 1))}


BATCHES = [packed(batch) for batch in token_batches((8, 16), 64, steps=2)]


@functools.cache
def model(config):
    return from_nnx(config.build)


@functools.cache
def job(config):
    grad_fn = value_and_grad(next_token_loss(model(config), chunk=7))
    return Job(model(config), decoder_rules(config), grad_fn, BATCHES)


def sums(config, batch, params=None, train=True):
    """What the loss adds up."""
    key = jax.random.key(0)
    params = model(config).init(key) if params is None else params
    loss = jax.jit(next_token_loss(model(config), train=train))
    return loss(params, model(config).init_variables(key), batch, key)[0]


def test_tokens_ahead_are_those_of_the_same_document():
    """Beyond the end of a row there is a 0, and beyond that of a document no token counts."""
    x = jnp.array([[1, 2, 3, 4, 5]])
    assert tokens_ahead(x, 2).tolist() == [[3, 4, 5, 0, 0]]
    assert tokens_ahead(x, 7).tolist() == [[0] * 5]
    segments = jnp.array([[0, 0, 2, 2, 2]])
    assert has_ahead(segments, 5, 2).tolist() == [[False, False, True, False, False]]
    assert has_ahead(None, 5, 2).tolist() == [[True, True, True, False, False]]


def test_the_loss_is_that_of_the_modules():
    """Cross-entropy of tokens 2 and 3 ahead, by hand from the logits, over the weight of all tokens."""
    batch = BATCHES[0]
    params = model(LLAMA).init(jax.random.key(0))
    outputs, _ = model(LLAMA).forward(
        params, {}, None, batch["tokens"], batch["segments"], train=True
    )
    total = 0.0
    for steps, logits in enumerate(outputs.ahead, 1):
        losses = -jax.nn.log_softmax(logits)
        for row, start in np.ndindex(8, 16 - steps):
            end = start + steps
            if batch["segments"][row, start] == batch["segments"][row, end]:
                target = batch["targets"][row, end]
                total += batch["weights"][row, end] * float(losses[row, start, target])
    found = sums(LLAMA, batch, params)
    assert float(found["ahead_loss"]) == pytest.approx(total / 2, rel=1e-5)
    plain = sums(LLAMA, batch, params, train=False)
    assert float(found["loss"]) == pytest.approx(
        float(plain["loss"]) + LLAMA.ahead_weight * total / 2, rel=1e-5
    )
    assert "ahead_loss" not in plain


def test_no_module_sees_what_it_predicts():
    """The logits of the token two ahead depend on the next token, on none after it or of another document."""
    batch = {name: jnp.asarray(x) for name, x in BATCHES[0].items()}
    params = model(LLAMA).init(jax.random.key(0))

    @jax.jit
    def first(tokens):
        outputs, _ = model(LLAMA).forward(params, {}, None, tokens, batch["segments"], train=True)
        return outputs.ahead[0]

    changed = batch["tokens"].at[0, 3].add(1) % 64
    moved = np.abs(first(changed) - first(batch["tokens"]))[0].max(axis=-1) > 0
    # row 0: documents of tokens 0 to 4 and 5 to 15
    assert moved.tolist() == [False, False, True, True, True] + [False] * 11


def test_the_next_token_is_predicted_as_without_modules():
    """Logits, loss and text of evaluation are bit for bit those of the model alone."""
    alone = dataclasses.replace(LLAMA, predict_ahead=0)
    params = model(LLAMA).init(jax.random.key(0))
    rest = {name: x for name, x in params.items() if name != "ahead"}
    batch = BATCHES[0]
    evaluated, plain = sums(LLAMA, batch, params, train=False), sums(alone, batch, rest)
    np.testing.assert_array_equal(evaluated["loss"], plain["loss"])
    texts = []
    for config, arrays in ((LLAMA, params), (alone, rest)):
        plan = make_plan(tiny.mesh(), decoder_rules(config), model(config), SGD)
        generator = Generator(plan, window=32, sampling=Sampling(temperature=0.0))
        assert not generator.whole_window
        texts.append(generator.write(arrays, {}, [np.arange(5)], tokens=8)[0])
    np.testing.assert_array_equal(*texts)


@pytest.mark.soak
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "expert": 2, "tensor": 2},
        {"fsdp": 2, "sequence": 2, "tensor": 2},
        {"fsdp": 2, "sequence": 2, "expert": 2},
    ],
    ids=str,
)
def test_a_small_deepseek_v3_trains_as_on_one_device(sizes):
    """Latent attention, a dense layer, shared experts, balancing by biases and a token more."""
    result = job(DEEPSEEK).assert_parity(**sizes)
    assert "variables" in {row.what for row in result.rows}


@pytest.mark.soak
def test_two_stages_train_as_one_device():
    """The dense layer is in front of the stages, and the module behind them."""
    config = dataclasses.replace(DEEPSEEK, predict_ahead=2)
    table = tabulate(make_schedule("1f1b", 2, 2, 1))
    loss_fn = next_token_loss(model(config), chunk=7)
    reference = job(config)
    alone = Reference(reference.alone.plan, accumulate(reference.grad_fn, 2), BATCHES)
    plan = make_plan(tiny.mesh(pipe=2, fsdp=2, expert=2), reference.rules, model(config), SGD)
    result = alone.compare(plan, pipeline(loss_fn, table), tolerance=REORDERED)
    assert result.ok, f"\n{result}"
    assert "variables" in {row.what for row in result.rows}


@pytest.mark.soak
def test_modules_train_as_on_one_device():
    """Two of them after a Llama, with documents, on three axes."""
    job(LLAMA).assert_parity(fsdp=2, sequence=2, tensor=2)


@pytest.mark.soak
def test_control_a_bug_is_caught():
    """The same comparison fails on gradients that are 1 % off."""
    bug = BUGS["gradient-scale"](job(LLAMA).grad_fn)
    assert not job(LLAMA).parity(grad_fn=bug, fsdp=2).ok


def test_a_weight_without_modules_is_refused():
    """It would act on nothing."""
    with pytest.raises(ConfigError, match=r"model\.ahead_weight: acts on nothing"):
        DecoderConfig(ahead_weight=0.1)
