"""Every layout gives the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.testing import TOLERANCES, Reference, drop_weights, scale_gradients, token_batches
from tests import tiny
from tests.rounding import EPS, FACTOR

BATCHES = token_batches((8, 16), tiny.CONFIG.vocab, steps=5)
UNPADDED = token_batches((8, 16), tiny.CONFIG.vocab, steps=5, padding=0.0)
GRAD_FN = value_and_grad(tiny.loss_fn())


@functools.cache
def one_device(optimizer=tiny.OPTIMIZER, steps=5, padded=True):
    """What every layout is compared with, compiled once."""
    return Reference(
        tiny.plan(optimizer=optimizer), GRAD_FN, (BATCHES if padded else UNPADDED)[:steps]
    )


def parity(grad_fn=GRAD_FN, optimizer=tiny.OPTIMIZER, steps=5, padded=True, **layout):
    """The comparison of a layout with one device."""
    return one_device(optimizer, steps, padded).compare(
        tiny.plan(optimizer=optimizer, **layout), grad_fn
    )


def assert_equal(**layout):
    result = parity(**layout)
    assert result.ok, f"\n{result}"
    return result


@pytest.mark.soak
def test_eight_devices_equal_one():
    """Five steps with AdamW: the initial state is bitwise equal; losses agree to 1e-5, gradients and updates to 1e-4.
    Axes of two devices are in the table."""
    result = assert_equal(data=2, fsdp=4)
    assert len(result.losses) == 5
    assert {row.what for row in result.rows} == {
        "initial state",
        "gradients",
        "loss",
        "updates",
        "optimizer state",
    }


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("a missing token weight", drop_weights),
        ("a sum taken for a mean", lambda f: scale_gradients(f, 1.01)),
        ("a loss reduced over one shard", lambda f: _mean_of_means(f)),
    ],
)
def test_control_a_wrong_reduction_is_caught(name, bug):
    """The comparison that the other tests pass fails on a deliberate bug."""
    result = parity(bug(GRAD_FN), fsdp=4)
    assert not result.ok, f"{name} went unnoticed:\n{result}"


def _mean_of_means(grad_fn):
    """Each half of the batch is averaged by itself: right without padding, wrong with it."""

    def wrong(params, carry, batch, key):
        halves = [jax.tree.map(lambda x, i=i: x[i::2], batch) for i in range(2)]
        parts = [grad_fn(params, carry, half, key) for half in halves]
        weight = sum(sums["weight"] for _, sums, _ in parts)
        means = [
            jax.tree.map(
                lambda x, s=sums: x / s["weight"] * weight / 2,
                (grads, {**sums, "weight": sums["weight"]}),
            )
            for grads, sums, _ in parts
        ]
        grads, sums = jax.tree.map(jnp.add, *means)
        return grads, {**sums, "weight": weight}, carry

    return wrong


@pytest.mark.soak
def test_the_control_is_right_without_padding():
    """The mean-of-means control differs by its padding alone: without padding it passes."""
    wrong = _mean_of_means(GRAD_FN)
    assert_equal(grad_fn=wrong, fsdp=4, padded=False)
    assert not parity(grad_fn=wrong, fsdp=4).ok


def test_accumulation_equals_the_whole_batch():
    """Gradients summed over four microbatches equal those of the full batch, with padding in the data."""
    assert_equal(grad_fn=accumulate(GRAD_FN, 4))


@pytest.mark.soak
def test_bf16_follows_float32():
    """bfloat16 compute with float32 parameters stays near float32, and is not it."""
    plan = tiny.plan(fsdp=4, options=(("precision", "bf16"),))
    result = one_device().compare(plan, tolerance=TOLERANCES["bfloat16"])
    assert result.ok, f"\n{result}"
    assert result.losses != result.reference_losses


@pytest.mark.soak
def test_unrolled_layers_equal_scanned_ones():
    """A list of layers starts bitwise equal to stacked layers and trains the same."""
    unrolled = tiny.replaced(stacked=False)
    stacked_plan, list_plan = tiny.plan(), tiny.plan(unrolled)
    from_stack, from_list = (p.model.init(jax.random.key(3)) for p in (stacked_plan, list_plan))
    for i in range(tiny.CONFIG.layers):
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_array_equal(a[i], b),
            from_stack["layers"],
            from_list["layers"][i],
        )
    batch = jax.tree.map(jnp.asarray, BATCHES[0])
    key = jax.random.key(0)
    stacked_grads, sums, _ = GRAD_FN(from_stack, spmd.Carry(), batch, key)
    list_grads, list_sums, _ = value_and_grad(tiny.loss_fn(unrolled))(
        from_list, spmd.Carry(), batch, key
    )
    np.testing.assert_allclose(sums["loss"], list_sums["loss"], rtol=FACTOR * EPS)
    for i in range(tiny.CONFIG.layers):
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-4),
            stacked_grads["layers"],
            list_grads["layers"][i],
        )
