"""Evaluations draw noise by the place of a batch; no weight depends on parameters; float64 models stay float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import ConfigError
from spmd.gradients.base import value_and_grad
from spmd.model_interface.grad_transform import Carry
from spmd.model_interface.model import Model
from spmd.plan.nnx_model import from_nnx
from spmd.sharding.rules import Rules, replicate
from spmd.training.step import make_eval_step
from tests import tiny
from tests.numerics.test_partition_safe import errors, on_mesh, on_one_device

MODEL = Model(lambda key: {"kernel": jnp.ones((8, 8))}, lambda p, x: x @ p["kernel"])
BATCH = {"x": np.ones((8, 8), np.float32)}
RULES = Rules([("kernel", P(None, "tensor"))])


@functools.cache
def plan(**sizes):
    return spmd.make_plan(tiny.mesh(**sizes), RULES, MODEL, optax.sgd(0.1))


# Noise.


def times(params, variables, batch, key):
    """The sum of the random times of a diffusion's loss."""
    return {"loss": jax.random.uniform(key, (8,)).sum(), "weight": jnp.float32(8)}, variables


@functools.cache
def evaluation(**sizes):
    """A function of the place of a batch that returns the loss of an evaluation."""
    layout = plan(**sizes)
    step, params, batch = (
        make_eval_step(layout, times),
        spmd.init_state(layout).params,
        spmd.place_batch(layout, BATCH),
    )
    return lambda *place, **named: float(step(params, {}, batch, *place, **named)["loss"])


PLACES = [*itertools.product(("", "val", "test"), (0, 1, 2, 511, 2**31))]


def test_each_batch_of_an_evaluation_draws_its_own_noise():
    """Batches of another set, or of another number, draw other numbers, and the same batch the same ones again."""
    draw = evaluation(data=2, tensor=2)
    drawn = {place: draw(*place) for place in PLACES}
    assert len(set(drawn.values())) == len(PLACES)
    assert {place: draw(*place) for place in PLACES} == drawn
    assert draw() == drawn["", 0]
    assert draw(name="val", number=2) == drawn["val", 2]


def test_another_step_and_another_mesh_draw_the_same_noise():
    """The noise is that of the place alone."""
    draws = [
        evaluation(**sizes)("val", 3)
        for sizes in ({"data": 2, "tensor": 2}, {"data": 8}, {"data": 1})
    ]
    again = make_eval_step(plan(data=8), times)(
        spmd.init_state(plan(data=8)).params, {}, BATCH, "val", 3
    )
    assert {*draws, float(again["loss"])} == {draws[0]}


def test_noise_is_compiled_once():
    """The place is an argument of one program."""
    layout, traced = plan(data=8), []

    def counted(*arguments):
        traced.append(None)
        return times(*arguments)

    step, params = make_eval_step(layout, counted), spmd.init_state(layout).params
    for place in PLACES[:4]:
        step(params, {}, spmd.place_batch(layout, BATCH), *place)
    assert len(traced) == 1


def test_a_run_draws_other_noise_for_each_batch(tmp_path, capsys):
    """The mean of many uniform times is near a half, in each set, and the same in each evaluation."""
    layout, count = plan(data=8), 64

    def batches(start, steps):
        return (BATCH for _ in range(start, steps))

    def loss_fn(params, variables, batch, key):
        return {
            "loss": (MODEL.apply(params, batch["x"]) ** 2).sum(),
            "weight": jnp.float32(8),
        }, variables

    sets = {name: lambda: batches(0, count) for name in ("val", "test")}
    step = spmd.make_train_step(layout, loss_fn)
    found = []
    for number in range(2):
        run = spmd.Run(
            str(tmp_path / str(number)),
            step,
            batches,
            config=spmd.RunConfig(steps=1),
            evaluation=sets,
            evaluation_loss=times,
        )
        found.append(run.train().evaluation)
    capsys.readouterr()
    means = [found[0][f"{name}_loss"] for name in sets]
    error = 0.289 / np.sqrt(8 * count)
    assert all(abs(mean - 0.5) < 5 * error for mean in means)
    assert means[0] != means[1]
    assert found[0] == found[1]


# Weights.


def predicted(params, batch):
    return MODEL.apply(params, batch["x"])


WEIGHTS = {
    "a parameter": lambda p, b: jnp.exp(p["kernel"]).sum(),
    "a mask by its size": lambda p, b: jax.nn.sigmoid(predicted(p, b)).sum(),
    "a softmax": lambda p, b: jax.nn.softmax(predicted(p, b)).max(-1).sum(),
    "a loop": lambda p, b: jax.lax.scan(
        lambda c, x: (c + (x @ p["kernel"]).sum(), None), 0.0, b["x"]
    )[0],
    "both": lambda p, b: b["x"].sum() + 1e-9 * p["kernel"].sum(),
}
"""Name → a weight that is trained with the parameters."""
CONSTANTS = {
    "a size": lambda p, b: jnp.float32(8),
    "an int": lambda p, b: 8,
    "the batch": lambda p, b: b["x"].sum(),
    "a count of outputs": lambda p, b: (predicted(p, b) > 0).sum().astype(jnp.float32),
    "a largest output": lambda p, b: predicted(p, b).argmax(-1).sum().astype(jnp.float32) + 1,
    "a stopped gradient": lambda p, b: jax.lax.stop_gradient(jnp.exp(p["kernel"]).sum()),
    "a shape": lambda p, b: jnp.float32(p["kernel"].size),
    "zero times": lambda p, b: jnp.zeros_like(p["kernel"]).sum() + 8,
}
"""Name → a weight that is constant, at least between steps."""


def weighted(weight):
    def loss_fn(params, variables, batch, key):
        return {
            "loss": (predicted(params, batch) ** 2).sum(),
            "weight": weight(params, batch),
        }, variables

    return loss_fn


def trace(loss_fn):
    layout = plan(data=2, tensor=2)
    spmd.make_train_step(layout, loss_fn).trace(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCH)
    )


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_that_is_trained_is_refused(name):
    """The error names the parameter and both ways out, under a plan and without one."""
    words = "sum 'weight': changes with the parameters kernel"
    with pytest.raises(ConfigError, match=words) as caught:
        trace(weighted(WEIGHTS[name]))
    assert "jax.lax.stop_gradient(weight)" in caught.value.problems[0].fix
    with pytest.raises(ConfigError, match=words):
        value_and_grad(weighted(WEIGHTS[name]))(
            {"kernel": jnp.ones((8, 8))}, Carry(), BATCH, jax.random.key(0)
        )


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_weight_that_is_constant_is_taken(name):
    """The control: sizes, counts, sums of the batch and stopped gradients are weights."""
    trace(weighted(CONSTANTS[name]))


def test_names_of_many_parameters():
    """Three parameters are named, and the others are said to be there."""
    params = {name: jnp.ones(2) for name in "abcde"}

    def loss_fn(params, variables, batch, key):
        total = sum(x.sum() for name, x in params.items() if name != "a")
        return {"loss": total + params["a"].sum(), "weight": total}, variables

    with pytest.raises(ConfigError, match="changes with the parameters b, c, d and others"):
        value_and_grad(loss_fn)(params, Carry(), BATCH, jax.random.key(0))


def test_the_way_out_has_the_gradient_of_the_mean():
    """A loss divided by its weight, with a weight of one, has the gradient of the whole mean."""

    def mean(params, batch):
        return (predicted(params, batch) ** 2).sum() / jax.nn.sigmoid(
            predicted(params, batch)
        ).sum()

    def loss_fn(params, variables, batch, key):
        return {"loss": mean(params, batch), "weight": jnp.float32(1)}, variables

    params = {"kernel": jnp.eye(8) * 0.1}
    gradients, _, _ = jax.jit(value_and_grad(loss_fn))(params, Carry(), BATCH, jax.random.key(0))
    np.testing.assert_allclose(
        gradients["kernel"], jax.grad(mean)(params, BATCH)["kernel"], rtol=1e-5
    )


# Models in float64.


class Wide(nnx.Module):
    """A network whose parameters are float64, unless another dtype is given."""

    def __init__(self, rngs, dtype=jnp.float64):
        self.a = nnx.Linear(8, 8, param_dtype=dtype, rngs=rngs)
        self.b = nnx.Linear(8, 4, param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


WIDE_RULES = Rules([("kernel", P("fsdp", "tensor")), ("bias", replicate("small"))])
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


def network(dtype):
    """A model in a dtype, its loss and a batch."""
    model = from_nnx(lambda rngs: Wide(rngs, dtype))

    def loss_fn(params, variables, batch, key):
        return {
            "loss": (model.apply(params, batch["x"]) ** 2).sum(),
            "weight": jnp.ones((), dtype),
        }, variables

    return model, loss_fn, {"x": np.random.default_rng(0).normal(size=(8, 8)).astype(dtype)}


@pytest.fixture
def wide():
    """A network in float64."""
    with jax.enable_x64(True):
        yield network(jnp.float64)


@pytest.mark.parametrize("precision", ["float32", "bf16", "bf16-params"])
def test_a_float64_model_needs_the_policy(wide, precision):
    """Another policy would round its parameters, and the error names each of them and the policy."""
    model, _, _ = wide
    with pytest.raises(ConfigError, match="would round it") as caught:
        spmd.make_plan(tiny.mesh(**SIZES), WIDE_RULES, model, optax.sgd(0.1), precision=precision)
    assert {problem.where for problem in caught.value.problems} == {
        "a/bias",
        "a/kernel",
        "b/bias",
        "b/kernel",
    }
    assert {problem.fix for problem in caught.value.problems} == {'precision="float64"'}


def largest_error(model, loss_fn, batch, precision):
    """The largest difference between a mesh and one device."""
    found = on_mesh(model, WIDE_RULES, loss_fn, batch, (("precision", precision),), **SIZES)
    return max(errors(found, on_one_device(model, loss_fn, batch)).values())


def test_a_float64_model_has_the_gradients_of_one_device(wide):
    """Under its policy value and gradients agree to 1e-12."""
    assert largest_error(*wide, "float64") <= 1e-12


def test_control_a_float32_model():
    """In float32 the same comparison differs by more."""
    assert 1e-12 < largest_error(*network(jnp.float32), "float32") <= 1e-5


def test_a_float64_model_trains(wide):
    """A step keeps parameters, gradients, the optimizer's state and the loss in float64."""
    model, loss_fn, batch = wide
    layout = spmd.make_plan(
        tiny.mesh(data=2), WIDE_RULES, model, optax.adam(1e-3), precision="float64"
    )
    state, metrics = spmd.make_train_step(layout, loss_fn, keep_gradients=True)(
        spmd.init_state(layout), batch
    )
    arrays = jax.tree.leaves(
        (state.params, state.optimizer_state, metrics["gradients"], metrics["loss"])
    )
    assert {x.dtype.name for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)} == {"float64"}


def test_float64_needs_the_setting_of_jax():
    """Without 64 bits in JAX the policy is refused, with the setting to make."""
    with pytest.raises(ConfigError, match="float64, which JAX is not set to compute in") as caught:
        spmd.make_plan(tiny.mesh(data=2), RULES, MODEL, optax.sgd(0.1), precision="float64")
    assert "jax_enable_x64" in caught.value.problems[0].fix
