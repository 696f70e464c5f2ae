"""The loss of answers with rewards is the published formula, by tokens and by answers, on every layout."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd import tree
from spmd.errors import ConfigError
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import token_losses
from spmd.gradients.policy_loss import PolicyConfig, policy_loss
from spmd.layers.lm_head import LazyLogits, at_temperature, materialize
from spmd.partition_rules.llama import LLAMA
from tests import tiny
from tests.one_device import Job
from tests.tiers import soak_but

SHAPE = (8, 16)


def make_batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, tiny.CONFIG.vocab, (SHAPE[0], SHAPE[1] + 1)).astype(np.int32)
    lengths = rng.integers(6, SHAPE[1], SHAPE[0])
    place = np.arange(SHAPE[1])
    weights = ((place >= 4) & (place < lengths[:, None])).astype(np.float32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": weights,
        "advantages": rng.normal(size=SHAPE[0]).astype(np.float32),
        "old_log_probs": -(4 + rng.random(SHAPE)).astype(np.float32),
        "reference": -(4 + rng.random(SHAPE)).astype(np.float32),
    }


BATCH = make_batch()


def by_hand(params: Any, batch: dict[str, np.ndarray], config: PolicyConfig) -> jax.Array:
    """The mean loss, token by token, from whole logits."""
    logits = tiny.model().apply(params, batch["tokens"]) / config.temperature
    logits = jax.nn.log_softmax(logits)
    found = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    ratio = jnp.exp(found - batch["old_log_probs"])
    gain = batch["advantages"][:, None]
    high = 1 + (config.clip_high or config.clip)
    losses = -jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - config.clip, high) * gain)
    q = jnp.exp(batch["reference"] - found)
    losses = (losses + config.kl * (q - jnp.log(q) - 1)) * batch["weights"]
    if config.mean == "tokens":
        return losses.sum() / batch["weights"].sum()
    return (losses.sum(axis=1) / batch["weights"].sum(axis=1)).mean()


CONFIGS = [
    PolicyConfig(0.3, 0.4, kl=0.05, temperature=0.7),
    PolicyConfig(0.5, mean="tokens"),
]


@pytest.mark.parametrize("config", soak_but(CONFIGS, CONFIGS[0]), ids=lambda each: each.mean)
def test_the_loss_is_the_published_formula(config: PolicyConfig) -> None:
    params = tiny.model().init(jax.random.key(0))
    loss = policy_loss(tiny.model(), config)

    def mean(params: Any) -> tuple[jax.Array, Any]:
        sums, _ = loss(params, {}, jax.tree.map(jnp.asarray, BATCH), jax.random.key(0))
        return sums["loss"] / sums["weight"], sums

    expected, gradients = jax.jit(jax.value_and_grad(lambda p: by_hand(p, BATCH, config)))(params)
    (found, sums), own = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for path, gradient in tree.flatten(gradients).items():
        largest = float(jnp.abs(gradient).max())
        np.testing.assert_allclose(tree.flatten(own)[path], gradient, atol=3e-5 * largest)
    assert 0 < float(sums["clipped"] / sums["weight"]) < 1
    other = by_hand(params, {**BATCH, "advantages": -BATCH["advantages"]}, config)
    assert abs(float(other - expected)) > 1e-3


def test_a_temperature_divides_logits_in_float32() -> None:
    """Also of a head in bfloat16, with a bias and a soft cap; the control divides the head's narrow input."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (1, 16, 64), jnp.bfloat16)
    kernel = jax.random.normal(keys[1], (64, 96), jnp.bfloat16)
    head = LazyLogits(x, kernel, soft_cap=20.0, bias=jax.random.normal(keys[2], (96,)))
    targets = jnp.arange(16)[None]

    def losses(logits: Any) -> jax.Array:
        return token_losses(logits, targets, chunk=4)[0]

    expected = losses(materialize(head) / 0.7)
    np.testing.assert_allclose(losses(at_temperature(head, 0.7)), expected, rtol=1e-5)
    control = dataclasses.replace(head, x=x / 0.7, bias=head.bias / 0.7, soft_cap=20.0 / 0.7)
    assert jnp.abs(losses(control) - expected).max() > 1e-3
    found = jax.grad(lambda x: losses(at_temperature(dataclasses.replace(head, x=x), 0.7)).sum())
    whole = jax.grad(lambda x: losses(materialize(dataclasses.replace(head, x=x)) / 0.7).sum())
    wide = x.astype(jnp.float32)
    np.testing.assert_allclose(found(wide), whole(wide), rtol=1e-3, atol=1e-4)


def test_without_old_log_probs_ratios_are_one() -> None:
    """The loss is minus the mean advantage, and its gradient is that of the log-probabilities."""
    batch = {name: BATCH[name] for name in ("tokens", "targets", "weights", "advantages")}
    sums, _ = policy_loss(tiny.model())(
        tiny.model().init(jax.random.key(0)),
        {},
        jax.tree.map(jnp.asarray, batch),
        jax.random.key(0),
    )
    mean = float(sums["loss"] / sums["weight"])
    assert mean == pytest.approx(-float(batch["advantages"].mean()), abs=1e-6)
    assert float(sums["clipped"]) == 0


@pytest.mark.soak
def test_every_layout_trains_as_one_device() -> None:
    """Also in microbatches; the control forgets the clipping."""
    loss = policy_loss(tiny.model(), CONFIGS[0])
    job = Job(tiny.model(), LLAMA, value_and_grad(loss), [BATCH, make_batch(1)])
    job.assert_parity(data=2, fsdp=2, tensor=2)
    job.assert_parity(sequence=2, fsdp=2, options=(("attention", "chunked"),))
    job.assert_parity(fsdp=2, grad_fn=accumulate(value_and_grad(loss), 2))
    unclipped = value_and_grad(policy_loss(tiny.model(), PolicyConfig(0.99, 9.0, kl=0.05)))
    assert not job.parity(fsdp=2, grad_fn=unclipped).ok


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="clip"):
        PolicyConfig(clip=1.5)
