"""A train step is a function of JAX: a part of a larger program, checked as it is alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from spmd.errors import ConfigError, MeshError
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.rules import Rules, replicate
from spmd.training.loop import fit
from spmd.training.state import init_state
from spmd.training.step import make_train_step
from tests import tiny

pytestmark = pytest.mark.compat

STEPS = 3
RULES = Rules([("kernel", P("fsdp", "tensor")), ("bias", replicate("small"))])


def layers(rngs):
    return nnx.Sequential(
        nnx.Linear(8, 16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
    )


@functools.cache
def model():
    return from_nnx(layers)


@functools.cache
def plan():
    return make_plan(tiny.mesh(data=2, fsdp=2, tensor=2), RULES, model(), optax.adam(0.1))


def loss_fn(params, variables, batch, key):
    y, variables = model().forward(params, variables, key, batch["x"], train=True)
    return {"loss": jnp.square(y - batch["x"]).sum(), "weight": jnp.float32(len(y))}, variables


@functools.cache
def step():
    return make_train_step(plan(), loss_fn)


def inputs():
    return np.random.default_rng(0).normal(size=(STEPS, 16, 8)).astype(np.float32)


@functools.cache
def trained():
    """State and losses of the steps one by one."""
    state, losses = init_state(plan()), []
    for x in inputs():
        state, metrics = step()(state, {"x": x})
        losses.append(float(metrics["loss"]))
    return jax.device_get(state), losses


def test_steps_in_a_scan_are_the_steps_one_by_one():
    """State, noise and layout are the same, and so are the losses."""

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state, xs):
        return jax.lax.scan(lambda state, x: step()(state, {"x": x}), state, xs)

    state, metrics = train(init_state(plan()), inputs())
    expected, losses = trained()
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-6)
    for found, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    # XLA chose the layout of what the program returned
    after, _ = step()(state, {"x": inputs()[0]})
    shardings = jax.tree.map(lambda x: x.sharding.spec, after.params)
    assert shardings == jax.tree.map(lambda x: x.sharding.spec, plan().abstract_params)


def test_a_traced_step_is_checked_as_any_other():
    """Batches that do not divide, states of another kind, and compile options inside of a program are refused."""
    state = init_state(plan())
    with pytest.raises(MeshError, match=r"7 / \(data=2 × fsdp=2\)"):
        jax.eval_shape(step(), state, {"x": jnp.zeros((7, 8))})
    with pytest.raises(ConfigError, match="state: is a dict"):
        jax.eval_shape(step(), state.params, {"x": jnp.zeros((8, 8))})
    with_options = make_train_step(
        plan(), loss_fn, compiler_options={"xla_cpu_enable_fast_math": False}
    )
    with pytest.raises(ConfigError, match="compiler_options"):
        jax.eval_shape(with_options, state, {"x": jnp.zeros((8, 8))})


@pytest.mark.parametrize("divisor", [None, 1])
def test_fit_takes_batches_that_jax_makes(divisor):
    """They may be drawn from the step's number, or cut from an array on the device."""
    on_device = jnp.asarray(inputs())

    def batches():
        for number in range(STEPS):
            drawn = jax.random.normal(jax.random.fold_in(jax.random.key(0), number), (16, 8))
            yield {"x": drawn if divisor is None else on_device[number] / divisor}

    state = fit(init_state(plan()), step(), batches(), steps=STEPS)
    expected = trained()[0].params
    same = all(
        np.allclose(found, wanted, rtol=1e-5, atol=1e-6)
        for found, wanted in zip(
            jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True
        )
    )
    assert same == (divisor == 1)
