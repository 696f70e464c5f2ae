"""Losses that are exchanged once a step: a sum equals one device, and what is none is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import ConfigError
from spmd.testing import Reference
from tests import tiny
from tests.one_device import REORDERED, SGD

SIZE, OUT = 8, 4
MODEL = spmd.Model(
    lambda key: {"kernel": jax.random.normal(key, (SIZE, OUT)) / 2},
    lambda params, x: jnp.tanh(x @ params["kernel"]),
)
RULES = spmd.Rules([("kernel", P("fsdp", None))])
_double = Primitive("double")
_double.def_impl(lambda x: 2 * x)
_double.def_abstract_eval(lambda x: x)
mlir.register_lowering(_double, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
ad.deflinear2(_double, lambda dy, x: [2 * dy])


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    weights = (np.arange(16) % 5 > 0).astype(np.float32)
    return [{"x": rng.normal(size=(16, SIZE)).astype(np.float32), "weights": weights}]


def loss_of(losses):
    """A loss of the outputs of each example and their weights."""

    def loss_fn(params, variables, batch, key):
        found = losses(MODEL.apply(params, batch["x"]))
        return {
            "loss": (found * batch["weights"]).sum(),
            "weight": batch["weights"].sum(),
        }, variables

    return loss_fn


def squares(y):
    return (y**2).sum(-1)


def contrastive(y):
    return jax.nn.logsumexp(y @ y.T, axis=-1)


def primitive(y):
    return _double.bind(y).sum(-1)


def grad_fn_of(losses, **options):
    return spmd.accumulate(spmd.value_and_grad(loss_of(losses), **options), 2, per_microbatch=True)


def plan(**sizes: int) -> spmd.ShardingPlan:
    return spmd.make_plan(tiny.mesh(**sizes), RULES, MODEL, SGD)


@functools.cache
def alone(losses, **options) -> Reference:
    return Reference(plan(), grad_fn_of(losses, **options), batches())


def once(losses, axes=("data",), declared=False, options=(), **sizes):
    """A mesh that exchanges once a step, compared with one device."""
    grad_fn = spmd.defer_grad_reduction(
        grad_fn_of(losses, **dict(options)), axes, additive=declared
    )
    return alone(losses, **dict(options)).compare(plan(**sizes), grad_fn, tolerance=REORDERED)


@pytest.mark.parametrize(
    ("axes", "sizes"), [(("data",), {"data": 4}), (("data", "fsdp"), {"data": 2, "fsdp": 2})]
)
def test_a_sum_equals_one_device(axes, sizes):
    """Exchanged once a step, on two meshes."""
    result = once(squares, axes, **sizes)
    assert result.ok, f"\n{result}"


def test_a_contrastive_loss_is_refused():
    """Each device would have its own, of its examples alone."""
    with pytest.raises(
        ConfigError, match=r"Gradients cannot be exchanged once a step(.|\n)*`dot_general` at"
    ):
        once(contrastive, data=2)


@pytest.mark.soak
def test_a_contrastive_loss_in_parts_is_another():
    """The control: declared to be a sum, it differs."""
    assert not once(contrastive, options=(("additive", True),), data=2).ok


def test_a_primitive_of_ones_own_is_declared():
    """It is refused by its name; declared, it equals one device."""
    with pytest.raises(ConfigError, match="`double` at"):
        once(primitive, data=2)
    assert once(primitive, options=(("additive", True),), data=2).ok


def test_a_gradient_function_of_ones_own_is_declared():
    """Nothing is known of it, so an exchange refuses it unless it is declared to sum over examples."""

    def own(params, carry, batch, key):
        (loss, weight), gradients = jax.value_and_grad(total, has_aux=True)(params, batch)
        return gradients, {"loss": loss, "weight": weight}, carry

    def total(params, batch):
        sums, _ = loss_of(squares)(params, {}, batch, None)
        return sums["loss"], sums["weight"]

    def traced(**options):
        step = spmd.make_train_step(
            plan(data=2), grad_fn=spmd.defer_grad_reduction(own, ("data",), **options)
        )
        step.trace(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches()[0]))

    with pytest.raises(ConfigError, match="grad_fn: is not made from a loss function"):
        traced()
    traced(additive=True)


def test_values_are_not_divided():
    """A step reports them as they are: numbers by their names, arrays among the others; sums are divided."""

    def loss_fn(params, variables, batch, key):
        y = MODEL.apply(params, batch["x"])
        sums = {
            "loss": squares(y).sum(),
            "weight": jnp.float32(len(y)),
            "ones": jnp.float32(len(y)),
        }
        return {**sums, "values": {"largest": y.max(), "columns": y.max(0)}}, variables

    layout = plan(data=2)
    state = spmd.init_state(layout)
    y = MODEL.apply(jax.device_get(state.params), batches()[0]["x"])
    _, metrics = spmd.make_train_step(layout, loss_fn)(state, batches()[0])
    assert metrics["ones"] == 1
    np.testing.assert_allclose(metrics["largest"], y.max(), rtol=1e-6)
    np.testing.assert_allclose(metrics["arrays"]["columns"], y.max(0), rtol=1e-6)


def doubled_step(reduce, **options):
    """A step and its state, for a loss with a primitive that nothing is known of."""
    plan = spmd.make_plan(
        tiny.mesh(data=2), spmd.Rules([("kernel", spmd.replicate("small"))]), MODEL, SGD
    )

    def loss_fn(params, variables, batch, key):
        losses = primitive(MODEL.apply(params, batch["x"]) ** 2)
        return {"loss": reduce(losses), "weight": jnp.float32(losses.size)}, variables

    return spmd.make_train_step(plan, loss_fn, **options), spmd.init_state(plan)


def test_a_mean_that_its_numbers_alone_show_is_refused():
    """The first batch twice over has the same mean and twice the weight; the switch, and a sum, go through."""
    (batch,) = batches()
    step, state = doubled_step(jnp.mean)
    with pytest.raises(ConfigError, match="twice over: loss × 1, weight × 2"):
        step(state, batch)
    for reduce, options in ((jnp.mean, {"check_first_batch": False}), (jnp.sum, {})):
        step, state = doubled_step(reduce, **options)
        step(state, batch)


def test_a_loss_for_one_number_of_examples_is_left_alone():
    """A mean that no other number of examples can be given is not evaluated on half of a batch."""
    (batch,) = batches()
    table = np.ones(16, np.float32)
    step, state = doubled_step(lambda losses: (losses * table).mean())
    step(state, batch)
