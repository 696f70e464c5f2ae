"""Models that nobody here wrote pass the comparison with one device on every mesh, and no bug passes on any of them."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd.errors import ConfigError
from spmd.gradients.base import value_and_grad
from spmd.loss_scaling.loss_scale import LossScale
from spmd.plan.plan import make_plan
from spmd.precision import POLICIES
from spmd.testing import BUGS, Reference, assert_parity, token_batches
from spmd.training.state import init_state
from tests import tiny
from tests.strangers import STRANGERS, stranger

STEPS, ADAMW, SGD = 5, optax.adamw(1e-3), optax.sgd(0.1)
THREE_AXES = {"data": 2, "fsdp": 2, "tensor": 2}
MESHES = [
    {"data": 2},
    {"fsdp": 2},
    {"tensor": 2},
    {"fsdp": 4, "tensor": 2},
    {"data": 4, "tensor": 2},
    {"data": 8},
]


@functools.cache
def plan(name, optimizer=ADAMW, **sizes):
    return make_plan(tiny.mesh(**sizes), stranger(name).rules, stranger(name).model, optimizer)


def grad_fn(name):
    return value_and_grad(stranger(name).loss_fn)


@functools.cache
def one_device(name):
    """Five steps with AdamW, which takes whole steps of gradients that are rounding noise; compiled once."""
    return Reference(plan(name), grad_fn(name), stranger(name).batches(STEPS))


def scale_every_other(grads, first):
    """Every other leaf's gradient, from the first or the second on, is −3 times itself."""

    def wrong(*args):
        gradients, sums, variables = grads(*args)
        leaves, structure = jax.tree.flatten(gradients)
        leaves = [g * -3 if n % 2 == first else g for n, g in enumerate(leaves)]
        return jax.tree.unflatten(structure, leaves), sums, variables

    return wrong


WRONG = {
    **BUGS,
    "even leaves": lambda grads: scale_every_other(grads, 0),
    "odd leaves": lambda grads: scale_every_other(grads, 1),
}
NO_PADDING = ("dit", "vae")
BUG_IN_CI = ("densenet", "odd leaves")


@pytest.mark.soak
@pytest.mark.parametrize("mesh", [THREE_AXES, *MESHES], ids=str)
@pytest.mark.parametrize("name", STRANGERS)
def test_no_false_alarm(name, mesh):
    """Heads, gates and adapters that start at zero, batch statistics and draws: five steps agree with one device."""
    result = one_device(name).compare(plan(name, **mesh))
    assert result.ok, f"\n{result}"
    assert len(result.losses) == STEPS


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        pytest.param(name, bug, marks=[] if (name, bug) == BUG_IN_CI else [pytest.mark.soak])
        for name in STRANGERS
        for bug in WRONG
        if bug != "token-weight" or name not in NO_PADDING
    ],
)
def test_no_silent_pass(name, bug):
    """The same comparison finds every bug on each of these models."""
    result = one_device(name).compare(plan(name, data=2, fsdp=2), WRONG[bug](grad_fn(name)))
    assert not result.ok, f"\n{result}"


def test_padding_cannot_be_counted_where_there_is_none():
    """A bug that the batch cannot have is refused by name."""
    with pytest.raises(
        ConfigError, match="token-weight: needs padding, and the batch has no weights"
    ):
        BUGS["token-weight"](grad_fn("vae"))({}, {}, stranger("vae").batches(1)[0], None)


# One small classifier for what is left.


@functools.cache
def small():
    return Reference(plan("mixer", SGD), grad_fn("mixer"), stranger("mixer").batches(3))


def test_an_update_that_differs_is_found():
    """Gradients that agree are not enough: a plan whose optimizer takes other steps does not pass."""
    found = small().compare(plan("mixer", optax.sgd(0.101), data=2))
    assert {row.what for row in found.rows if not row.ok} == {"updates"}


@pytest.mark.soak
def test_a_state_of_another_seed_is_found():
    """Initial values are equal bit for bit, or it is said."""
    found = dataclasses.replace(small(), seed=1)
    assert found.compare(plan("mixer", SGD, data=2)).ok
    result = found.compare(plan("mixer", SGD, data=2), state=small_state())
    assert {row.what for row in result.rows if not row.ok} == {"initial state"}


def small_state():
    return init_state(plan("mixer", SGD, data=2), 0)


@pytest.mark.soak
def test_plans_of_other_models_are_refused():
    """Two states without the same leaves are no question of rounding; each leaf is named."""
    with pytest.raises(ConfigError, match="attention_0/key/bias: is"):
        small().compare(plan("vit", SGD, data=2))


def spoilt(grads, step, value=math.nan):
    """The gradients of `head/bias` are not finite from a step's batch on."""
    first = jnp.asarray(stranger("mixer").batches(3)[step]["images"])

    def wrong(params, variables, batch, key):
        gradients, sums, variables = grads(params, variables, batch, key)
        bad = jnp.where((batch["images"] == first).all(), value, 0.0)
        return (
            gradients | {"head": gradients["head"] | {"bias": gradients["head"]["bias"] + bad}},
            sums,
            variables,
        )

    return wrong


@pytest.mark.soak
def test_nan_on_both_sides_ends_the_comparison():
    """Steps before it are compared, and the result says where it ended and why."""
    grads = spoilt(grad_fn("mixer"), 1)
    result = Reference(plan("mixer", SGD), grads, stranger("mixer").batches(3)).compare(
        plan("mixer", SGD, data=2)
    )
    assert (result.ok, result.stopped, len(result.losses)) == (True, 2, 2)
    assert any(
        row.path == "head/bias" and row.why.startswith("nan on both sides, in 4 of 4")
        for row in result.rows
    )


@pytest.mark.soak
def test_nan_from_the_first_step_on_is_no_pass():
    """Where nothing is left to compare, that is an error, and not a difference either."""
    grads = spoilt(grad_fn("mixer"), 0)
    with pytest.raises(
        ConfigError, match="step 1: gives no finite parameters or no finite loss, on both sides"
    ):
        assert_parity(
            plan("mixer", SGD, data=2), plan("mixer", SGD), grads, stranger("mixer").batches(1)
        )


def test_nan_on_one_side_alone_is_a_difference():
    """The control: the mesh alone has it, from the first step on."""
    result = small().compare(plan("mixer", SGD, data=2), spoilt(grad_fn("mixer"), 0))
    assert [
        row.path for row in result.rows if row.what == "gradients" and math.isinf(row.error)
    ] == ["head/bias"]


@pytest.mark.soak
def test_a_step_that_overflows_on_both_sides_is_skipped_on_both():
    """A loss scale that is too large for float16: no update, a smaller scale, and the result says so."""
    scale = LossScale(initial=2.0**40, hysteresis=1)
    options = (("precision", dataclasses.replace(POLICIES["fp16"], loss_scale=scale)),)
    batches = token_batches((8, 10), tiny.CONFIG.vocab, steps=2)
    grads = value_and_grad(tiny.loss_fn())
    result = assert_parity(
        tiny.plan(options=options, fsdp=2), tiny.plan(options=options), grads, batches
    )
    assert any("overflow on both sides" in row.why for row in result.rows)
    assert {row.path for row in result.rows if row.what == "transforms"} >= {"loss_scale/scale"}


def test_host_arrays_survive_the_steps_that_donate_them():
    """A state that is taken several times is the same each time: no step writes into the array that it came from."""
    before = {path: x.copy() for path, x in small()._initial.items()}
    small().compare(plan("mixer", SGD, data=2))
    for path, x in small()._initial.items():
        np.testing.assert_array_equal(x, before[path])
