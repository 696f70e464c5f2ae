"""Optimizers get the loss, its gradients and the function of it that they ask for, on a mesh as in plain optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from spmd.errors import RuleError
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.model_interface.model import Model
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.rules import Rules, replicate
from spmd.testing import assert_parity
from spmd.training.state import init_state
from spmd.training.step import make_train_step
from tests import tiny

STEPS, EXAMPLES = 4, 16
RULES = Rules([("kernel", P("fsdp", "tensor")), ("bias", replicate("small"))])
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
PLATEAU = optax.chain(
    optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1, cooldown=0, rtol=0.5)
)
BACKTRACKING = optax.chain(
    optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10, store_grad=True)
)
SOAKED = ("backtracking", "polyak")
OPTIMIZERS = {
    "plateau": PLATEAU,
    "lbfgs": optax.lbfgs(),
    "backtracking": BACKTRACKING,
    "polyak": optax.polyak_sgd(1.0),
}


@functools.cache
def model():
    return from_nnx(
        lambda rngs: nnx.Sequential(
            nnx.Linear(8, 16, rngs=rngs), nnx.tanh, nnx.Linear(16, 8, rngs=rngs)
        )
    )


def batch():
    return {"x": np.random.default_rng(0).normal(size=(EXAMPLES, 8)).astype(np.float32)}


def loss_fn(params, variables, batch, key):
    y = model().apply(params, batch["x"])
    return {
        "loss": jnp.square(y - jnp.sin(batch["x"])).sum(),
        "weight": jnp.float32(len(y)),
    }, variables


def plan(optimizer, **options):
    sizes = options.pop("sizes", MESH)
    return make_plan(tiny.mesh(**sizes), RULES, model(), optimizer, **options)


def losses(layout, grad_fn=None):
    step, state = (
        make_train_step(layout, grad_fn=grad_fn or value_and_grad(loss_fn)),
        init_state(layout),
    )
    found = []
    for _ in range(STEPS):
        state, metrics = step(state, batch())
        found.append(float(metrics["loss"]))
    return np.array(found)


def losses_of_optax(optimizer):
    """The same steps without this package."""
    params = jax.device_get(init_state(plan(optimizer, sizes={})).params)

    def mean(params):
        return loss_fn(params, {}, batch(), None)[0]["loss"] / EXAMPLES

    @jax.jit
    def step(params, state):
        value, gradients = jax.value_and_grad(mean)(params)
        extra = {"value": value, "grad": gradients, "value_fn": mean}
        updates, state = optimizer.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state, value

    state, found = optimizer.init(params), []
    for _ in range(STEPS):
        params, state, value = step(params, state)
        found.append(float(value))
    return np.array(found)


@pytest.mark.parametrize(
    "name", ["plateau", "lbfgs", *(pytest.param(name, marks=pytest.mark.soak) for name in SOAKED)]
)
def test_a_mesh_trains_as_plain_optax_does(name):
    """Learning rates and line searches see the mean loss of the batch."""
    np.testing.assert_allclose(
        losses(plan(OPTIMIZERS[name])), losses_of_optax(OPTIMIZERS[name]), rtol=1e-5
    )


@pytest.mark.soak
def test_a_line_search_sees_the_loss_of_every_microbatch():
    """The loss at another place is that of the gradient function, here the sum of two microbatches."""
    grad_fn = accumulate(value_and_grad(loss_fn), 2)
    np.testing.assert_allclose(
        losses(plan(optax.lbfgs()), grad_fn), losses_of_optax(optax.lbfgs()), rtol=1e-5
    )


@pytest.mark.soak
def test_control_a_line_search_on_another_loss_is_another_run():
    """What a line search is told matters: on half of the loss L-BFGS takes other steps."""

    def half(params, variables, batch, key):
        sums, variables = loss_fn(params, variables, {"x": batch["x"][: EXAMPLES // 2]}, key)
        return sums, variables

    other = losses(plan(optax.lbfgs()), value_and_grad(half))
    assert np.abs(other / losses_of_optax(optax.lbfgs()) - 1).max() > 1e-2


@pytest.mark.soak
def test_the_parity_check_gives_them_too():
    """One device takes the update with the loss and the gradients of the mesh."""
    grad_fn, optimizer = value_and_grad(loss_fn), optax.lbfgs()
    assert_parity(plan(optimizer), plan(optimizer, sizes={}), grad_fn, [batch()] * 2)


def test_offloaded_parts_get_the_value():
    """A learning rate that follows the loss works with state in host memory, of a stack of layers."""

    def apply(params, x):
        return jax.lax.scan(
            lambda x, kernel: (jnp.tanh(x @ kernel), None), x, params["layers"]["kernel"]
        )[0]

    def stack_loss(params, variables, batch, key):
        y = apply(params, batch["x"])
        return {
            "loss": jnp.square(y - jnp.sin(batch["x"])).sum(),
            "weight": jnp.float32(len(y)),
        }, variables

    stack = Model(lambda key: {"layers": {"kernel": jax.random.normal(key, (2, 8, 8))}}, apply)
    rules = Rules([("layers/kernel", P("fsdp", "tensor"))])
    usual = make_plan(tiny.mesh(**MESH), rules, stack, PLATEAU)
    offloaded = make_plan(tiny.mesh(**MESH), rules, stack, PLATEAU, offload=("optimizer_state",))
    assert any(entry.on_host for entry in offloaded.optimizer_state)
    grad_fn = value_and_grad(stack_loss)
    np.testing.assert_allclose(losses(offloaded, grad_fn), losses(usual, grad_fn), rtol=1e-5)


@pytest.mark.compat
def test_what_a_step_cannot_give_is_refused_in_the_plan():
    """A line search over parts, and arguments that no step has, are named with what there is."""
    with pytest.raises(
        RuleError, match="missing 2 required keyword-only arguments: 'grad' and 'value_fn'"
    ) as caught:
        plan(optax.lbfgs(), offload=("optimizer_state",))
    assert "offload nothing" in str(caught.value)
    sharpness = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True)
    with pytest.raises(RuleError, match="grad_fn must be provided") as caught:
        plan(sharpness)
    assert "it gets value, grad, value_fn" in str(caught.value)
