"""Gradient functions return sums, so they compose: accumulation adds up to the whole batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.errors import ConfigError
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.model_interface.grad_transform import Carry
from tests.rounding import assert_close, noise_of

pytestmark = pytest.mark.compat

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
PARAMS = {"w": jnp.asarray([1.0, -2.0, 0.5]), "deep": ({"b": jnp.float32(0.3)}, [jnp.ones((2, 2))])}
X, Y = RNG.integers(-4, 5, (12, 3)).astype(np.float32), RNG.integers(0, 3, 12).astype(np.float32)
BATCHES = {
    "an array": X,
    "a dictionary": {"x": X, "weights": Y},
    "nested": {"x": (X, [Y, {"z": RNG.integers(0, 9, (12, 2, 2))}])},
    "ranks": (Y, X, RNG.integers(0, 9, (12, 2, 3, 2))),
}


def plain(sums_fn):
    """The loss function of a model without variables."""
    return lambda params, variables, batch, key: (sums_fn(params, batch, key), variables)


@plain
def quadratic(params, batch, key):
    """Sums over examples of something that uses every leaf of the batch and every parameter, with padding."""
    del key
    leaves = [
        jnp.asarray(x, jnp.float32).reshape(x.shape[0], -1).sum(axis=1)
        for x in jax.tree.leaves(batch)
    ]
    weights = (leaves[-1] % 2 == 0).astype(jnp.float32)
    scale = params["w"].sum() + params["deep"][0]["b"] + params["deep"][1][0].sum()
    losses = sum((leaf * scale) ** 2 for leaf in leaves)
    return {
        "loss": (losses * weights).sum(),
        "weight": weights.sum(),
        "examples": jnp.float32(weights.size),
    }


@functools.cache
def whole(name):
    """Gradients and sums of a batch at once, and what float32 loses of them."""

    def compute(params):
        return value_and_grad(quadratic)(params, Carry(), BATCHES[name], KEY)[:2]

    return compute(PARAMS), noise_of(compute, PARAMS)


def test_value_and_grad_returns_the_gradient_of_the_sum_and_the_sums():
    """Nothing is divided: that is the step's one division."""
    grads, sums, _ = value_and_grad(quadratic)(PARAMS, Carry(), X, KEY)
    expected = jax.grad(lambda p: quadratic(p, {}, X, KEY)[0]["loss"])(PARAMS)
    jax.tree.map(np.testing.assert_array_equal, grads, expected)
    jax.tree.map(np.testing.assert_array_equal, sums, quadratic(PARAMS, {}, X, KEY)[0])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 12])
def test_accumulation_equals_the_whole_batch(batch, microbatches):
    """For any tree of arrays, gradients and every sum are those of the whole batch."""
    grads, sums, _ = jax.jit(accumulate(value_and_grad(quadratic), microbatches))(
        PARAMS, Carry(), BATCHES[batch], KEY
    )
    assert jax.tree.structure(grads) == jax.tree.structure(PARAMS)
    assert_close((grads, sums), *whole(batch))
    assert sums["examples"] == 12
    assert 0 < sums["weight"] < 12


def test_accumulation_composes_with_itself():
    """A GradFn in, a GradFn out: 2 × 3 microbatches are the whole batch too."""
    nested = accumulate(accumulate(value_and_grad(quadratic), 3), 2)(PARAMS, Carry(), X, KEY)
    assert_close(nested[:2], *whole("an array"))


def test_one_microbatch_is_the_function_itself():
    """Nothing is wrapped where there is nothing to do."""
    grad_fn = value_and_grad(quadratic)
    assert accumulate(grad_fn, 1) is grad_fn


@pytest.mark.parametrize("microbatches", [2, 4])
def test_a_microbatch_takes_every_kth_example(microbatches):
    """A sum of squares of sums shows which examples were together: those that lie k apart."""
    x = RNG.integers(0, 100, 12).astype(np.float32)

    @plain
    def square_of_sum(w, x, key):
        return {"loss": w * x.sum() ** 2, "weight": jnp.float32(x.size)}

    grad_fn = accumulate(value_and_grad(square_of_sum), microbatches, per_microbatch=True)
    grads, sums, _ = grad_fn(jnp.float32(1), Carry(), x, KEY)
    parts = [x[i::microbatches].sum() ** 2 for i in range(microbatches)]
    assert float(grads) == float(sums["loss"]) == sum(parts)
    assert sum(parts) != sum(part.sum() ** 2 for part in np.split(x, microbatches))


def test_every_microbatch_has_a_key_of_its_own():
    """Draws differ between microbatches, so dropout would not repeat itself, and follow from the step's key."""

    @plain
    def draws(w, x, key):
        draw = jax.random.uniform(key)
        return {"loss": w * draw, "weight": jnp.float32(1), "squares": draw**2}

    microbatches = 4
    grad_fn = accumulate(value_and_grad(draws), microbatches, per_microbatch=True)
    grads, sums, _ = grad_fn(jnp.float32(1), Carry(), X, KEY)
    total = float(sums["loss"])
    assert float(grads) == pytest.approx(total)
    # By Cauchy and Schwarz the two sides are equal where all draws are, and only there.
    assert float(sums["squares"]) > 1.05 * total**2 / microbatches
    again = grad_fn(jnp.float32(1), Carry(), X, KEY)[1]
    other = grad_fn(jnp.float32(1), Carry(), X, jax.random.key(1))[1]
    assert float(again["loss"]) == total != float(other["loss"])


def test_gradients_keep_their_dtypes():
    """Each leaf is accumulated in the dtype that the gradient function gives it."""
    params = {"a": jnp.ones(3, jnp.float32), "b": jnp.ones(3, jnp.bfloat16)}

    @plain
    def loss_fn(params, x, key):
        return {
            "loss": (x @ (params["a"] + params["b"].astype(jnp.float32))).sum(),
            "weight": jnp.float32(x.size),
        }

    grads, sums, _ = accumulate(value_and_grad(loss_fn), 3)(params, Carry(), X, KEY)
    assert {name: leaf.dtype for name, leaf in grads.items()} == {
        "a": jnp.float32,
        "b": jnp.bfloat16,
    }
    assert sums["loss"].dtype == jnp.float32


def test_memory_of_activations_shrinks_with_microbatches():
    """What is large for the whole batch is never that large in the accumulated program."""
    width = 64

    @plain
    def loss_fn(w, x, key):
        wide = jnp.tanh(x[:, :, None] * w[None, None])  # [batch, 3, width]
        return {"loss": wide.sum(), "weight": jnp.float32(x.size)}

    def shapes(grad_fn):
        return str(jax.make_jaxpr(grad_fn)(jnp.ones(width), Carry(), X, KEY))

    assert "f32[12,3,64]" in shapes(value_and_grad(loss_fn))
    accumulated = shapes(accumulate(value_and_grad(loss_fn), 4))
    assert "f32[12,3,64]" not in accumulated
    assert "f32[3,3,64]" in accumulated


@pytest.mark.parametrize(
    ("microbatches", "batch", "complaint"),
    [
        (0, X, "microbatches: is 0"),
        (-2, X, "microbatches: is -2"),
        (5, X, r"12 / 5 = 2\.4"),
        (5, {"a": X, "b": X[:10]}, r"12 / 5 = 2\.4"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_an_error(microbatches, batch, complaint):
    """With the arithmetic, whichever leaf it is."""
    with pytest.raises(ConfigError, match=complaint):
        accumulate(value_and_grad(quadratic), microbatches)(PARAMS, Carry(), batch, KEY)
