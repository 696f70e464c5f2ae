"""DPO, IPO and SimPO: the published formulas, on every layout, and the reference model's log-probabilities on any."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import tree
from spmd.data.log_probs import LogProbs
from spmd.data.packed_pairs import PackedPairs
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import token_losses
from spmd.gradients.preference_loss import preference_loss
from spmd.partition_rules.llama import LLAMA
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.run.build import TrainSetup, make_setup
from spmd.run.init_from import initial_state
from spmd.run.open_text import open_text_dataset
from spmd.run.reference import fill_references, pairs_with_reference
from spmd.settings.dpo import DPOConfig
from spmd.sharding.mesh import MeshShape
from tests import tiny
from tests.one_device import Job
from tests.tiers import soak_but

SEQUENCE = 64
VOCAB = tiny.CONFIG.vocab
DPO = DPOConfig()
LOSSES = [
    DPO,
    DPOConfig(label_smoothing=0.2, nll=0.5, beta=0.4),
    DPOConfig(loss="ipo", beta=0.3),
    DPOConfig(loss="simpo", margin=0.5, label_smoothing=0.1),
]


def documents(pairs: int, seed: int = 0) -> PackedPairs:
    """Random pairs of a prompt of three tokens and answers of two to nine."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 13, 2 * pairs)
    ends = np.cumsum(lengths)
    tokens = rng.integers(0, VOCAB, int(ends[-1])).astype(np.uint16)
    mask = np.ones(len(tokens), bool)
    for begin in (ends - lengths).tolist():
        mask[begin : begin + 3] = False
    reference = LogProbs("a reference", len(tokens))
    reference.fill(np.arange(len(tokens)), -4 * rng.random(len(tokens)).astype(np.float32))
    return PackedPairs(tokens, ends, SEQUENCE, mask, reference=reference)


PAIRS = documents(pairs=20)


def batches(steps: int, rows: int = 4) -> list[dict[str, np.ndarray]]:
    return [PAIRS.rows(np.arange(step * rows, (step + 1) * rows)) for step in range(steps)]


LONGEST = 12


def answers_of(batch: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Tokens, targets, weights and reference `[pair, side, token]`: each answer by itself, padded at its end."""
    found: tuple[list, ...] = ([], [], [], [])
    for row, numbers in enumerate(batch["pairs"]):
        for number in range(1, int(numbers.max()) + 1):
            for sign in (1, -1):
                of_answer = numbers == sign * number
                names = ("tokens", "targets", "weights", "reference")
                for name, values in zip(names, found, strict=True):
                    own = batch[name][row, of_answer]
                    values.append(np.pad(own, (0, LONGEST - len(own))))
    return tuple(np.stack(values).reshape(-1, 2, LONGEST) for values in found)


def by_hand(params: Any, answers: tuple[np.ndarray, ...], config: DPOConfig) -> jax.Array:
    """The mean loss of some pairs."""
    tokens, targets, weights, reference = answers
    logits = tiny.model().apply(params, tokens.reshape(-1, LONGEST))
    every = jax.nn.log_softmax(logits).reshape(*tokens.shape, VOCAB)
    own = jnp.take_along_axis(every, targets[..., None], axis=-1)[..., 0] * weights
    compared = own
    if config.loss != "simpo":
        compared = own - reference * weights
    sums, lengths = compared.sum(axis=-1), weights.sum(axis=-1)
    means = sums / lengths
    nll = -own[:, 0].sum(axis=-1) / lengths[:, 0]
    if config.loss == "ipo":
        losses = (means[:, 0] - means[:, 1] - 1 / (2 * config.scale)) ** 2
    else:
        chosen, rejected = (means if config.loss == "simpo" else sums).T
        margin = config.scale * (chosen - rejected) - config.target_margin
        share = config.label_smoothing
        losses = -(1 - share) * jnp.log(jax.nn.sigmoid(margin))
        losses = losses - share * jnp.log(jax.nn.sigmoid(-margin))
    return (losses + config.nll * nll).mean()


@pytest.mark.parametrize(
    "config", soak_but(LOSSES, LOSSES[0], LOSSES[2]), ids=lambda each: each.loss
)
def test_the_loss_is_the_published_formula(config: DPOConfig) -> None:
    """Of packed pairs, as of each answer by itself: the value and every gradient; another beta is another loss."""
    params = tiny.model().init(jax.random.key(0))
    (batch,) = batches(1, rows=2)
    hand = functools.partial(by_hand, answers=answers_of(batch), config=config)
    expected, gradients = jax.jit(jax.value_and_grad(hand))(params)

    @functools.partial(jax.jit, static_argnums=1)
    def mean(params: Any, config: DPOConfig) -> jax.Array:
        loss = preference_loss(tiny.model(), config)
        sums, _ = loss(params, {}, jax.tree.map(jnp.asarray, batch), jax.random.key(0))
        return sums["loss"] / sums["weight"]

    found, own = jax.jit(jax.value_and_grad(mean), static_argnums=1)(params, config)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for path, gradient in tree.flatten(gradients).items():
        largest = float(jnp.abs(gradient).max())
        np.testing.assert_allclose(tree.flatten(own)[path], gradient, atol=2e-5 * largest)
    other = mean(params, dataclasses.replace(config, beta=2 * config.scale))
    assert abs(float(other - expected)) > 1e-3


@functools.cache
def job(loss: str, parts: int = 1) -> Job:
    loss_fn = preference_loss(tiny.model(), DPOConfig(loss=loss))
    grad_fn = accumulate(value_and_grad(loss_fn), parts)
    return Job(tiny.model(), LLAMA, grad_fn, batches(2))


LAYOUTS = [
    ("dpo", {"data": 2, "sequence": 2, "tensor": 2}),
    ("ipo", {"data": 2, "fsdp": 2, "tensor": 2}),
    ("simpo", {"fsdp": 2, "sequence": 2, "tensor": 2}),
]


@pytest.mark.parametrize("layout", soak_but(LAYOUTS, LAYOUTS[0]), ids=str)
def test_every_layout_trains_as_one_device(layout: tuple[str, dict[str, int]]) -> None:
    """Two steps; the ring of a split sequence has its tokens in another order."""
    loss, sizes = layout
    job(loss).assert_parity(**sizes, options=(("attention", "chunked"),))


@pytest.mark.soak
def test_a_wrong_pair_is_noticed() -> None:
    """The control of the comparison: tokens of a pair without their place, as if pairs were split over devices."""
    loss_fn = preference_loss(tiny.model(), DPO)

    def mixed(params: Any, variables: Any, batch: Any, key: jax.Array) -> Any:
        moved = {**batch, "pairs": jnp.roll(batch["pairs"], 4, axis=1)}
        return loss_fn(params, variables, moved, key)

    assert not job("dpo").parity(fsdp=2, grad_fn=value_and_grad(mixed)).ok


@pytest.mark.soak
def test_microbatches_and_stages_train_as_whole_batches() -> None:
    """Pairs are within their rows, so that rows may be taken apart."""
    loss_fn = preference_loss(tiny.model(), DPO)
    table = tabulate(make_schedule("1f1b", 2, 2, 1))
    job("dpo").assert_parity(fsdp=2, grad_fn=accumulate(value_and_grad(loss_fn), 2))
    job("dpo").assert_parity(pipe=2, fsdp=2, grad_fn=pipeline(loss_fn, table))


def setup_of(folder: Path, sizes: dict[str, int], **fields: Any) -> TrainSetup:
    """The setup of a run on a few pairs."""
    rng = np.random.default_rng(0)
    lines = []
    for number in range(24):
        answers = [str(rng.integers(10 ** rng.integers(1, 6))) for _ in range(2)]
        line = {"prompt": f"{number}?", "chosen": answers[0], "rejected": answers[1]}
        lines.append(json.dumps(line))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    (folder / "template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    data = spmd.DataConfig(
        source=(str(folder / "pairs.jsonl"),),
        sequence=32,
        batch=4,
        validation=0.2,
        cache=str(folder / "cache"),
    )
    config = spmd.TrainConfig(
        model=dataclasses.replace(tiny.CONFIG, vocab=256),
        rules=LLAMA,
        data=data,
        task="dpo",
        chat=spmd.ChatConfig(template=str(folder / "template.jinja")),
        **fields,
    )
    return make_setup(config, tiny.mesh(**sizes))


def log_probs_of(setup: TrainSetup) -> tuple[PackedPairs, np.ndarray]:
    """The training rows of a setup, and the log-probabilities under its initial model."""
    (part, _) = pairs_with_reference(open_text_dataset(setup.config).parts)
    state = initial_state(setup)
    assert [*fill_references(setup, [part], state)][-1][1] == len(part)
    assert part.reference is not None
    return part, part.reference.values


PLACES = [{"data": 2, "fsdp": 2, "tensor": 2}, {"sequence": 2, "fsdp": 4}, {"pipe": 2, "fsdp": 2}]


@pytest.mark.parametrize("sizes", soak_but(PLACES, PLACES[1]), ids=str)
def test_the_reference_model_is_the_initial_one_on_any_layout(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    """Each answer's tokens have the log-probabilities of the model applied to that answer alone."""
    setup = setup_of(tmp_path, sizes, mesh=MeshShape(**sizes), attention="chunked")
    part, values = log_probs_of(setup)
    params = jax.tree.map(jnp.asarray, jax.device_get(initial_state(setup).params))
    begins = np.concatenate([[0], part.ends[:-1]])
    spans = list(zip(begins.tolist(), part.ends.tolist(), strict=True))[:8]
    ids = np.zeros((len(spans), LONGEST + 1), np.int32)
    for row, (begin, end) in enumerate(spans):
        ids[row, : end - begin] = part.tokens[begin:end]
    logits = jax.jit(setup.plan.model.apply)(params, ids[:, :-1])
    expected = -token_losses(logits, jnp.asarray(ids[:, 1:]))[0]
    for row, (begin, end) in enumerate(spans):
        is_answer = part.mask[begin + 1 : end]
        found = values[begin + 1 : end][is_answer]
        own = expected[row, : end - begin - 1][is_answer]
        np.testing.assert_allclose(found, own, atol=2e-5)
    assert np.unique(values[np.isfinite(values)]).size > 50


@pytest.mark.soak
def test_a_step_begins_at_the_reference(tmp_path: Path) -> None:
    """The first step has the loss ln 2 and no margin; then the preferred answers gain."""
    setup = setup_of(tmp_path, {}, optimizer=spmd.OptimizerConfig(learning_rate=1e-2), steps=6)
    part, _ = log_probs_of(setup)
    state = initial_state(setup)
    margins = []
    for _ in range(6):
        batch = setup.step.place_batch(part.rows(np.arange(4)))
        state, metrics = setup.step(state, batch)
        margins.append(float(metrics["reward_margin"]))
        if len(margins) == 1:
            np.testing.assert_allclose(metrics["loss"], np.log(2), atol=1e-5)
    assert abs(margins[0]) < 1e-4
    assert margins[-1] > 0.1
