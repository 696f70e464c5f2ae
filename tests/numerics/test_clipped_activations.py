"""Gradients of named activations are clipped token by token, alike on every mesh and in microbatches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd import tree
from spmd.errors import AnnotationError, SpmdError
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.partition_rules.llama import LLAMA
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.plan.annotate import annotate
from spmd.plan.context import use_plan
from spmd.plan.plan import make_plan
from spmd.sharding.rules import Rules, replicate
from spmd.training.step import make_train_step
from tests import tiny
from tests.tiers import soak_but

RATE = 1000.0  # much more than the parameters, so that their change is the gradient
LIMIT = 0.05
MESHES = [
    {"data": 2, "fsdp": 2},
    {"sequence": 2, "tensor": 2},
    {"fsdp": 2, "sequence": 2, "tensor": 2},
    {"pipe": 2, "tensor": 2},
]


def two_layers(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(annotate(x @ params["a"], "hidden")) @ params["b"]


def test_a_gradient_has_at_most_the_norm() -> None:
    """By the formula of two layers, in vectors below and above it; the control has no limit."""
    rules = Rules([("a|b", replicate("small"))], activations=[("hidden", jax.P())])
    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(3, 5)), "b": rng.normal(size=(5, 2))}
    params = jax.tree.map(jnp.float32, params)
    x = jnp.float32(rng.normal(size=(4, 3)) * np.array([[1.0], [0.1], [1.0], [0.0]]))

    def gradient(clips: str) -> jax.Array:
        model = spmd.Model(lambda key: params, two_layers)
        plan = make_plan(tiny.mesh(), rules, model, optax.sgd(1.0), clip_activations=clips)

        def loss(params: Any) -> jax.Array:
            with use_plan(plan):
                return (two_layers(params, x) ** 2).sum() / 2

        return jax.grad(loss)(params)["a"]

    hidden = jnp.tanh(x @ params["a"])
    own = (hidden @ params["b"] @ params["b"].T) * (1 - hidden**2)
    norms = jnp.linalg.norm(own, axis=1, keepdims=True)
    limit = float(jnp.sort(norms[:, 0])[2]) / 2
    clipped = own * jnp.minimum(1, limit / jnp.maximum(norms, 1e-9))
    assert (norms > limit).sum() == 2
    np.testing.assert_allclose(gradient(f"hidden={limit}"), x.T @ clipped, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gradient(""), x.T @ own, rtol=1e-4, atol=1e-6)


def gradients(sizes: dict[str, int], clips: str = f"residual={LIMIT}", parts: int = 1) -> Any:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, tiny.CONFIG.vocab, (8, 17)).astype(np.int32)
    weights = np.ones((8, 16), np.float32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}
    plan = make_plan(
        tiny.mesh(**sizes), LLAMA, tiny.model(), optax.sgd(RATE), clip_activations=clips
    )
    loss = next_token_loss(tiny.model())
    if "pipe" in sizes:
        grad_fn = pipeline(loss, tabulate(make_schedule("1f1b", 2, 2, 1)))
    else:
        grad_fn = accumulate(value_and_grad(loss), parts)
    step = make_train_step(plan, grad_fn=grad_fn)
    state = step.init_state(seed=0)
    before = jax.device_get(state.params)
    state, _ = step(state, batch)
    after = jax.device_get(state.params)
    return tree.flatten(jax.tree.map(lambda a, b: (a - b) / RATE, before, after))


@pytest.mark.parametrize("sizes", soak_but(MESHES), ids=str)
def test_all_meshes_clip_alike(sizes: dict[str, int]) -> None:
    """In microbatches too; without a limit gradients are others, and a large limit is none."""
    alone = gradients({}, parts=2)
    for path, gradient in gradients(sizes).items():
        largest = np.abs(alone[path]).max()
        np.testing.assert_allclose(gradient, alone[path], atol=3e-5 * largest)
    free = gradients({}, clips="")
    loose = gradients({}, clips="residual=1e6")
    differ = 0
    for path, gradient in free.items():
        np.testing.assert_allclose(loose[path], gradient, atol=1e-6 * np.abs(gradient).max())
        differ += np.abs(alone[path] - gradient).max() > 0.01 * np.abs(gradient).max()
    assert differ > len(free) / 2


def test_what_cannot_be_clipped() -> None:
    """Unknown activations, other forms, float16; and an activation inside of a derivative's own rule."""
    for clips, precision, what in (
        ("residul=1", "float32", 'did you mean "residual"'),
        ("residual", "float32", "has 'residual'"),
        ("residual=0", "float32", "has 'residual=0'"),
        ("residual=1,residual=2", "float32", "has residual twice"),
        ("residual=1", "fp16", "clipped at norms multiplied by the scale"),
    ):
        with pytest.raises(SpmdError, match=what):
            tiny.plan(options=(("clip_activations", clips), ("precision", precision)))
    plan = tiny.plan(options=(("clip_activations", "residual=1"),))
    assert "clip gradients of residual=1" in plan.heading
    plan = tiny.plan(options=(("clip_activations", "logits=1,residual=1"),))
    step = make_train_step(plan, next_token_loss(tiny.model()))
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "weights": tokens.update(dtype=jnp.float32)}
    with pytest.raises(AnnotationError, match="has logits, which JAX does not differentiate"):
        step.trace(batch)


def is_clipped(name: str) -> bool:
    """Whether the gradient of an activation is clipped in the traced step; False if that is refused."""
    batch = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("tokens", "targets")}
    batch["weights"] = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    plan = tiny.plan(options=(("clip_activations", f"{name}=1"),))
    step = make_train_step(plan, next_token_loss(tiny.model()))
    try:
        step.trace(batch)
    except AnnotationError:
        return False
    return True


@pytest.mark.soak
def test_every_activation_is_clipped_or_refused() -> None:
    """Refused are integers, and what is inside of functions with a derivative of their own."""
    names = list(dict(LLAMA.activations))
    refused = [name for name in names if not is_clipped(name)]
    assert set(refused) == {"logits", "embed_tokens", "attention_input", "mlp_input"}
