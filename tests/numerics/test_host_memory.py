"""Parameters in host memory train, evaluate and sample as parameters on the device do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import AnnotationError, ConfigError, RuleError
from spmd.generate.generator import Generator
from spmd.generate.sampling import Sampling
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.host_memory.param import HostParam
from spmd.jaxpr.equations import equations
from spmd.models.decoder.linear import dense
from spmd.optim import master_weights
from spmd.optim.config import OptimizerConfig, make_optimizer
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.precision import POLICIES
from spmd.sharding.rules import Rules, replicate
from spmd.testing import Reference, token_batches
from spmd.training.state import init_state
from spmd.training.step import make_eval_step, make_train_step
from tests import tiny
from tests.rounding import assert_close, noise_of

OPTIMIZER = make_optimizer(
    OptimizerConfig(learning_rate=1e-2, schedule="constant", clip_norm=0.1), steps=3
)
BATCHES = token_batches((8, 16), tiny.CONFIG.vocab, steps=2)
GRAD_FN = value_and_grad(tiny.loss_fn())
PARAMS, BOTH = ("params",), ("params", "optimizer_state")


@functools.cache
def plan(offload=(), zero=3, remat="full", precision="float32", **sizes):
    options = (("zero", zero), ("remat", remat), ("precision", precision), ("offload", offload))
    return tiny.plan(optimizer=OPTIMIZER, options=options, **sizes or {"fsdp": 4, "tensor": 2})


@functools.cache
def without(zero=3, precision="float32"):
    """The steps of a plan without offload, compiled once."""
    return Reference(plan((), zero, "full", precision), GRAD_FN, BATCHES)


@pytest.mark.soak
@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.soak), 3])
@pytest.mark.parametrize("offload", [BOTH])
def test_training_equals_that_without_offload(offload, zero):
    """Losses, gradients and updates of two steps with a clip."""
    result = without(zero).compare(plan(offload, zero))
    assert result.ok, f"\n{result}"


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["bf16", "bf16-params"])
def test_it_goes_with_narrow_parameters(precision):
    """The layer is fetched as it is stored, and its gradient has the dtype that gradients have."""
    result = without(3, precision).compare(plan(BOTH, 3, "full", precision))
    assert result.ok, f"\n{result}"


@pytest.mark.soak
def test_stochastic_rounding_draws_the_same_bits(monkeypatch):
    """A piece of an update is rounded as it would be in the whole: parameters in bfloat16 are bitwise the same."""
    # no other rounding
    precision = dataclasses.replace(POLICIES["bf16-params-stochastic"], exchange="float32")

    def errors():
        result = without(3, precision).compare(plan(BOTH, 3, "full", precision))
        return [row.error for row in result.rows if row.what == "updates"]

    assert not any(errors())
    monkeypatch.setattr(master_weights, "salt_of", lambda path: 1)  # the control: other bits
    assert any(errors())


@pytest.mark.soak
def test_control_a_lost_gradient_is_seen(monkeypatch):
    """The comparison of the tests above can fail: here no gradient comes back to what was fetched."""
    monkeypatch.setattr(
        HostParam, "at_layer", lambda self: jax.device_put(self.array, self.sharding)
    )
    assert not without().compare(plan(PARAMS), value_and_grad(tiny.loss_fn())).ok


def test_kernels_of_layers_live_in_host_memory():
    """Norms, the embedding and the head stay; a step leaves everything where it was."""
    layout = plan(BOTH)
    kinds = {leaf.path: leaf.memory_kind for leaf in layout.params}
    hosted = {path for path, kind in kinds.items() if kind == "pinned_host"}
    assert hosted == {
        path for path in kinds if path.startswith("layers/") and path.endswith("kernel")
    }
    step, state = make_train_step(layout, grad_fn=GRAD_FN), init_state(layout)
    for _ in range(2):
        found = {path: x.sharding.memory_kind for path, x in tree.flatten(state.params).items()}
        assert found == kinds
        state, _ = step(state, BATCHES[0])


def test_the_plan_tells_host_and_device_apart():
    """Gradients are on the device; what is in host memory is not among a device's bytes, and all is somewhere."""
    offloaded, usual = plan(BOTH), plan()
    assert {leaf.memory_kind for leaf in offloaded.gradients} == {"device"}
    here, there = offloaded.bytes_per_device(), offloaded.bytes_on_host()
    assert there.keys() == {"params", "optimizer_state"}
    assert {
        name: size + there.get(name, 0) for name, size in here.items()
    } == usual.bytes_per_device()
    assert "in host memory for each: params" in str(offloaded)
    assert usual.bytes_on_host() == {}
    assert "host memory" not in str(usual)


def test_one_layer_is_fetched_at_a_time():
    """No array as large as a stack is ever moved; each layer's kernel is, in the forward pass and in the backward."""
    layout = plan(PARAMS)
    layers = tiny.CONFIG.layers
    stacks = {leaf.shape for leaf in layout.params if leaf.on_host}
    moved = list(_fetched(make_train_step(layout, grad_fn=GRAD_FN).trace(BATCHES[0]).jaxpr))
    assert stacks.isdisjoint(moved)
    for shape in stacks:
        assert shape[0] == layers
        assert moved.count(shape[1:]) >= 2


def _fetched(jaxpr):
    """The shapes of all that is brought from host memory to the device."""
    for equation in equations(jaxpr):
        if equation.primitive.name == "device_put":
            for source, result in zip(equation.invars, equation.outvars, strict=True):
                if (source.aval.memory_space, result.aval.memory_space) == (
                    jax.memory.Space.Host,
                    jax.memory.Space.Device,
                ):
                    yield result.aval.shape


@pytest.mark.soak
def test_evaluation_and_samples_are_the_same():
    """Nothing is differentiated there."""
    losses, samples = [], []
    for layout in (plan(PARAMS), plan()):
        params, evaluate = init_state(layout).params, make_eval_step(layout, tiny.loss_fn())
        losses.append(evaluate(params, {}, BATCHES[0])["loss"])
        samples.append(
            Generator(layout, 8, Sampling(temperature=0.0)).write(
                params, {}, [[1, 2]] * 8, tokens=3
            )
        )
    assert_close(*losses, noise_of(lambda params: evaluate(params, {}, BATCHES[0])["loss"], params))
    np.testing.assert_array_equal(*samples)


@pytest.mark.parametrize("remat", ["none", "selective", "full/2"])
def test_a_policy_that_keeps_layers_is_refused(remat):
    """It would keep the fetched parameters too, all layers of them."""
    with pytest.raises(
        ConfigError, match=r"needs every layer to be recomputed(.*\n)+.*fix: remat full"
    ):
        plan(PARAMS, 3, remat)


def test_a_model_without_stacks_is_refused():
    """Layers in a list have no stack to take one from."""
    with pytest.raises(RuleError, match="there is no stack of layers"):
        tiny.plan(
            tiny.replaced(stacked=False),
            OPTIMIZER,
            (("remat", "full"), ("offload", PARAMS)),
            fsdp=8,
        )


def test_a_model_that_takes_all_parameters_at_once_is_refused():
    """A foreign model would have all layers on the device; the error says which parameters, and what to do."""

    class Foreign(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(
                lambda key: nnx.Linear(32, 32, rngs=nnx.Rngs(key)), in_axes=0, out_axes=0
            )
            self.embed, self.layers = (
                nnx.Embed(64, 32, rngs=rngs),
                make(jax.random.split(rngs.params(), 2)),
            )

        def __call__(self, tokens):
            x = self.embed(tokens)
            x = jax.lax.scan(lambda x, layer: (layer(x), None), x, self.layers)[0]
            return self.embed.attend(x)

    rules = Rules(
        [("layers/kernel", P("fsdp")), ("bias|embedding|layers/bias", replicate("small"))],
        stacked={"layers": None},
    )
    model = from_nnx(lambda rngs: Foreign(rngs))
    layout = make_plan(
        tiny.mesh(fsdp=8), rules, model, optax.adam(1e-2), remat="full", offload=PARAMS
    )
    with pytest.raises(
        AnnotationError,
        match=r"Model reads all parameters at once:\n  layers/kernel: .*layer by layer\n.*remat_layer",
    ):
        make_train_step(layout, next_token_loss(model)).trace(BATCHES[0])


def test_a_matmul_outside_of_a_layer_is_refused():
    """Its kernel would be read from host memory, and have no gradient."""
    sharding = NamedSharding(tiny.mesh(fsdp=8), P())
    kernel = nnx.Param(HostParam(jnp.ones((8, 4)), None, sharding, "layers/kernel"))
    with pytest.raises(
        AnnotationError,
        match=r"Model reads all parameters at once:\n  layers/kernel: .*layer by layer",
    ):
        dense(jnp.ones((2, 3, 8)), kernel)
