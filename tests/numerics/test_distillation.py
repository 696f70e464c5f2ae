"""Distillation from a larger, sharded teacher has the published loss and its gradients, on every mesh."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd import tree
from spmd.errors import ConfigError
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.distillation_loss import distillation_loss
from spmd.gradients.losses import next_token_loss
from spmd.layers.lm_head import LazyLogits, materialize
from spmd.layers.logit_divergence import token_divergences
from spmd.model_interface.model import Model
from spmd.models import mixtral
from spmd.partition_rules.llama import LLAMA
from spmd.plan.plan import make_plan
from spmd.settings.distillation import DistillationConfig
from spmd.sharding.rules import Rules, replicate
from spmd.training.step import make_train_step
from tests import tiny
from tests.tiers import soak_but

LARGER = tiny.replaced(d_model=64, layers=3, heads=8, kv_heads=4, d_ff=96)
CONFIG = DistillationConfig(weight=0.7, temperature=2.0)
RATE = 0.1
MESHES = [
    {"data": 2},
    {"fsdp": 4},
    {"data": 2, "tensor": 2},
    {"fsdp": 2, "sequence": 2, "tensor": 2},
]


def make_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, tiny.CONFIG.vocab, (8, 17)).astype(np.int32)
    weights = (rng.random((8, 16)) > 0.2).astype(np.float32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}


BATCH = make_batch()


@functools.cache
def teacher_params() -> Any:
    """Not as small as initial ones, so that the teacher prefers some tokens."""
    params = jax.jit(tiny.model(LARGER).init)(jax.random.key(5))
    return jax.tree.map(lambda w: 2 * w, params)


def by_hand(params: Any, config: DistillationConfig) -> jax.Array:
    """The mean loss from whole logits."""
    student = tiny.model().apply(params, BATCH["tokens"])
    teacher = tiny.model(LARGER).apply(teacher_params(), BATCH["tokens"])
    targets = BATCH["targets"][..., None]
    entropy = -jnp.take_along_axis(jax.nn.log_softmax(student), targets, -1)[..., 0]
    mine, theirs = (jax.nn.log_softmax(x / config.temperature) for x in (student, teacher))
    if config.reverse:
        mine, theirs = theirs, mine
    divergence = (jnp.exp(theirs) * (theirs - mine)).sum(-1) * config.temperature**2
    losses = (1 - config.weight) * entropy + config.weight * divergence
    return (losses * BATCH["weights"]).sum() / BATCH["weights"].sum()


def pad_words(count: int, path: str, param: jax.Array) -> jax.Array:
    """A teacher's parameter with more words, which it would prefer."""
    if path == "embed/embedding":
        return jnp.pad(param, ((0, count), (0, 0)), constant_values=3.0)
    if path == "lm_head/kernel":
        return jnp.pad(param, ((0, 0), (0, count)), constant_values=3.0)
    return param


def step_on(
    sizes: dict[str, int],
    config: DistillationConfig,
    microbatches: int = 1,
    scale: float = 1.0,
    contexts: tuple[str, str] = ("auto", "auto"),
    padding: int = 0,
) -> tuple[float, Any, Any]:
    """The loss of a step, the parameters before it and its gradients."""
    mesh = tiny.mesh(**sizes)
    mine, theirs = contexts
    larger = dataclasses.replace(LARGER, vocab=LARGER.vocab + padding)
    plan = make_plan(mesh, LLAMA, tiny.model(), optax.sgd(RATE), context=mine)
    teacher = make_plan(mesh, LLAMA, tiny.model(larger), optax.identity(), context=theirs)
    shardings = jax.tree.map(lambda x: x.sharding, teacher.abstract_params)
    scaled = jax.tree.map(lambda w: scale * w, teacher_params())
    frozen = jax.device_put(
        tree.map_with_path(functools.partial(pad_words, padding), scaled), shardings
    )
    loss = distillation_loss(tiny.model(), teacher, config, chunk=8, padded_heads=padding > 0)
    grad_fn = accumulate(value_and_grad(loss), microbatches)
    step = make_train_step(plan, grad_fn=grad_fn)
    state = step.init_state(seed=0)
    before = jax.device_get(state.params)
    state, metrics = step(state, {**step.place_batch(BATCH), "teacher": spmd.whole(frozen)})
    after = jax.device_get(state.params)
    gradients = jax.tree.map(lambda a, b: (a - b) / RATE, before, after)
    return float(metrics["loss"]), before, gradients


def assert_same(gradients: Any, expected: Any) -> None:
    """Gradients agree, relative to the largest of each parameter."""
    found = tree.flatten(gradients)
    for path, gradient in tree.flatten(expected).items():
        largest = float(jnp.abs(gradient).max())
        np.testing.assert_allclose(found[path], gradient, atol=3e-5 * largest)


@pytest.mark.parametrize("sizes", soak_but(MESHES, MESHES[0]), ids=str)
def test_the_loss_is_the_published_one(sizes: dict[str, int]) -> None:
    """In microbatches too; the control is another teacher."""
    loss, params, gradients = step_on(sizes, CONFIG, microbatches=2)
    expected, own = jax.value_and_grad(by_hand)(params, CONFIG)
    assert loss == pytest.approx(float(expected), rel=2e-6)
    assert_same(gradients, own)
    other, _, _ = step_on(sizes, CONFIG, microbatches=2, scale=0.5)
    assert abs(other - loss) > 0.05


@pytest.mark.soak
@pytest.mark.parametrize("sizes", [{}, {"data": 2, "tensor": 2}], ids=str)
def test_words_that_one_head_lacks_have_no_share(sizes: dict[str, int]) -> None:
    """A teacher with a head padded by a half has the loss and gradients of the one without padding."""
    loss, params, gradients = step_on(sizes, CONFIG, padding=32)
    expected, own = jax.value_and_grad(by_hand)(params, CONFIG)
    assert loss == pytest.approx(float(expected), rel=2e-6)
    assert_same(gradients, own)


@pytest.mark.soak
def test_the_reverse_divergence() -> None:
    config = DistillationConfig(weight=1.0, reverse=True)
    loss, params, gradients = step_on({"data": 2, "tensor": 2}, config)
    expected, own = jax.value_and_grad(by_hand)(params, config)
    assert loss == pytest.approx(float(expected), rel=2e-6)
    assert_same(gradients, own)


def test_what_no_teacher_can_be() -> None:
    """Without parameters in the batch, of another vocabulary, on another mesh, with variables."""
    plan = tiny.plan(optimizer=optax.sgd(RATE))
    same = make_plan(tiny.mesh(), LLAMA, tiny.model(LARGER), optax.identity())
    elsewhere = make_plan(tiny.mesh(fsdp=2), LLAMA, tiny.model(LARGER), optax.identity())
    words = tiny.replaced(vocab=128)
    other = make_plan(tiny.mesh(), LLAMA, tiny.model(words), optax.identity())
    for teacher, batch, what in (
        (same, BATCH, "is not in the batch"),
        (other, {**BATCH, "teacher": other}, "predicts 128 tokens, the student 64"),
        (elsewhere, {**BATCH, "teacher": elsewhere}, "is on the mesh"),
    ):
        given = dict(batch)
        if "teacher" in given:
            given["teacher"] = spmd.whole(jax.jit(teacher.model.init)(jax.random.key(0)))
        step = make_train_step(plan, distillation_loss(tiny.model(), teacher))
        with pytest.raises(ConfigError, match=what):
            step(step.init_state(seed=0), given)
    with pytest.raises(ConfigError, match="weight"):
        DistillationConfig(weight=0.0)
    step = make_train_step(plan, distillation_loss(tiny.model(), same))
    params = jax.jit(same.model.init)(jax.random.key(0))
    for given, what in (
        (params, "would be split as examples are"),
        (spmd.whole(step.init_state(seed=0).params), r"float32\[3, 64, 96\] is needed"),
    ):
        with pytest.raises(ConfigError, match=what):
            step(step.init_state(seed=0), {**BATCH, "teacher": given})
    rows = Rules([("kernel", replicate("small"))], activations=[])
    count = Model(
        lambda key: {"kernel": jnp.ones((64, 64))},
        lambda params, tokens: params["kernel"][tokens],
        lambda key: {"count": jnp.zeros(())},
        lambda params, variables, key, tokens, train: (params["kernel"][tokens], variables),
    )
    rows = dataclasses.replace(rows, params=[*rows.params, ("count", replicate("small"))])
    with pytest.raises(ConfigError, match="has variables"):
        distillation_loss(tiny.model(), make_plan(tiny.mesh(), rows, count, optax.identity()))
    with pytest.raises(ConfigError, match="chunk"):
        distillation_loss(tiny.model(), same, chunk=0)


@pytest.mark.soak
def test_padding_is_left_out_of_both_models() -> None:
    """Experts of a student see no padding: cross-entropy and balance are those of the next-token loss."""
    config = mixtral.PRESETS["test"]
    model = tiny.model(config)
    weights = np.ones((8, 16), np.float32)
    weights[:, 6:] = 0
    batch = jax.tree.map(jnp.asarray, {**BATCH, "weights": weights})
    teacher = make_plan(tiny.mesh(), LLAMA, tiny.model(LARGER), optax.identity())
    params = jax.jit(model.init)(jax.random.key(0))
    key = jax.random.key(1)
    plain, _ = next_token_loss(model)(params, {}, batch, key)
    given = {**batch, "teacher": spmd.whole(teacher_params())}
    both, _ = distillation_loss(model, teacher)(params, {}, given, key)
    assert "balance_loss" in plain
    for name in ("balance_loss", "accuracy"):
        np.testing.assert_allclose(both[name], plain[name], rtol=1e-5)
    blind, _ = distillation_loss(model, teacher)(params, {}, {**given, "valid": weights == 2}, key)
    assert abs(float(blind["balance_loss"] - plain["balance_loss"])) > 1e-3  # the control


@pytest.mark.soak
def test_models_with_other_attention_have_one_order_of_tokens() -> None:
    """A ring of the student beside an all-to-all of the teacher: no zigzag order, and the same loss."""
    alone, _, _ = step_on({"data": 2}, CONFIG)
    for contexts in (("ring", "all-to-all"), ("all-to-all", "ring"), ("ring", "ring")):
        found, _, _ = step_on({"data": 2, "sequence": 2}, CONFIG, contexts=contexts)
        assert found == pytest.approx(alone, rel=2e-6)


def test_masked_words_and_odd_lengths() -> None:
    """A word without a share adds nothing, also to the gradient; a prime length is padded to whole chunks."""
    student, teacher = jnp.array([[[0.0, 1.0, -jnp.inf]]]), jnp.array([[[0.0, 2.0, -jnp.inf]]])
    value, gradient = jax.value_and_grad(lambda x: token_divergences(x, teacher).sum())(student)
    expected = token_divergences(student[..., :2], teacher[..., :2])
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-6)
    assert np.isfinite(gradient).all()
    shorter = token_divergences(student[..., :2], teacher)
    np.testing.assert_allclose(shorter, expected, rtol=1e-6)
    x = jax.random.normal(jax.random.key(0), (2, 2, 13, 8))
    kernels = jax.random.normal(jax.random.key(1), (2, 8, 5))
    heads = [LazyLogits(*arrays) for arrays in zip(x, kernels, strict=True)]
    whole = token_divergences(*map(materialize, heads))
    np.testing.assert_allclose(token_divergences(*heads, chunk=8), whole, atol=1e-5)
