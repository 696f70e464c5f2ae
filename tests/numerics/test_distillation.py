"""Distillation from a larger, sharded teacher has the published loss and its gradients, on every mesh."""

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
from spmd.gradients.distillation_loss import DistillationConfig, distillation_loss
from spmd.partition_rules.llama import LLAMA
from spmd.plan.plan import make_plan
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


def step_on(
    sizes: dict[str, int], config: DistillationConfig, microbatches: int = 1, scale: float = 1.0
) -> tuple[float, Any, Any]:
    """The loss of a step, the parameters before it and its gradients."""
    mesh = tiny.mesh(**sizes)
    plan = make_plan(mesh, LLAMA, tiny.model(), optax.sgd(RATE))
    teacher = make_plan(mesh, LLAMA, tiny.model(LARGER), optax.identity())
    shardings = jax.tree.map(lambda x: x.sharding, teacher.abstract_params)
    frozen = jax.device_put(jax.tree.map(lambda w: scale * w, teacher_params()), shardings)
    loss = distillation_loss(tiny.model(), teacher, config, chunk=8)
    grad_fn = accumulate(value_and_grad(loss), microbatches)
    step = make_train_step(plan, grad_fn=grad_fn)
    state = step.init_state(seed=0)
    before = jax.device_get(state.params)
    state, metrics = step(state, {**step.place_batch(BATCH), "teacher": spmd.whole(frozen)})
    after = jax.device_get(state.params)
    gradients = jax.tree.map(lambda a, b: (a - b) / RATE, before, after)
    return float(metrics["loss"]), before, gradients


@pytest.mark.parametrize("sizes", soak_but(MESHES, MESHES[-1]), ids=str)
def test_the_loss_is_the_published_one(sizes: dict[str, int]) -> None:
    """In microbatches too; the control is another teacher."""
    loss, params, gradients = step_on(sizes, CONFIG, microbatches=2)
    expected, own = jax.value_and_grad(by_hand)(params, CONFIG)
    assert loss == pytest.approx(float(expected), rel=2e-6)
    for path, gradient in tree.flatten(own).items():
        largest = float(jnp.abs(gradient).max())
        np.testing.assert_allclose(tree.flatten(gradients)[path], gradient, atol=3e-5 * largest)
    other, _, _ = step_on(sizes, CONFIG, microbatches=2, scale=0.5)
    assert abs(other - loss) > 0.05


@pytest.mark.soak
def test_the_reverse_divergence() -> None:
    config = DistillationConfig(weight=1.0, reverse=True)
    loss, params, gradients = step_on({"data": 2, "tensor": 2}, config)
    expected, own = jax.value_and_grad(by_hand)(params, config)
    assert loss == pytest.approx(float(expected), rel=2e-6)
    for path, gradient in tree.flatten(own).items():
        largest = float(jnp.abs(gradient).max())
        np.testing.assert_allclose(tree.flatten(gradients)[path], gradient, atol=3e-5 * largest)


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
