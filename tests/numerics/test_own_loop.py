"""A loop of one's own with shardings and annotations of a table takes the steps of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import RuleError

RULES = spmd.Rules(
    [
        ("up/kernel", P(None, "mp")),
        ("down/kernel", P("mp", None)),
        ("bias", spmd.replicate("tiny")),
    ],
    activations=[("hidden", P("dp", "mp"))],
)
GATHERED = spmd.Rules(
    [("up/kernel", P(None, "mp")), ("down/kernel|bias", spmd.replicate("tiny"))],
    activations=[("hidden", P("dp"))],
)
"""Along Explicit axes JAX refuses a product of two split dimensions, unless its call says more."""
STEPS = 4


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64, name="up")(x))
        return nn.Dense(1, name="down")(spmd.annotate(x, "hidden"))


MODEL, OPTIMIZER = MLP(), optax.adafactor(1e-2, min_dim_size_to_factor=8)


def init(key):
    params = MODEL.init(key, jnp.ones((1, 8)))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)


def step(state, x, y):
    def loss(params):
        return ((state.apply_fn({"params": params}, x) - y) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def batch():
    x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


def losses(step, state, x, y):
    found = []
    for _ in range(STEPS):
        state, value = step(state, x, y)
        found.append(float(value))
    return state, found


def make_mesh(kind):
    return jax.make_mesh((2, 4), ("dp", "mp"), axis_types=(kind,) * 2)


@pytest.mark.parametrize(("kind", "rules"), [(AxisType.Auto, RULES), (AxisType.Explicit, GATHERED)])
def test_a_flax_loop_equals_one_device(kind, rules):
    """Losses to 1e-6, on axes of both kinds, with state that is split as its parameters are."""
    state = jax.jit(init)(jax.random.key(0))
    _, expected = losses(jax.jit(step), state, *batch())
    mesh = make_mesh(kind)
    shardings = rules.shardings(mesh, jax.eval_shape(init, jax.random.key(0)))
    state = jax.device_put(state, shardings)
    x, y = (jax.device_put(array, NamedSharding(mesh, P("dp"))) for array in batch())
    with jax.set_mesh(mesh), spmd.use_rules(rules, mesh):
        state, found = losses(jax.jit(step), state, x, y)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert state.params["up"]["kernel"].sharding.spec == P(None, "mp")


@pytest.mark.parametrize(
    ("kind", "operation"),
    [(AxisType.Auto, "sharding_constraint"), (AxisType.Explicit, "reshard")],
)
def test_an_annotation_acts_in_the_scope_of_a_table(kind, operation):
    """As a constraint, or along Explicit axes a reshard; the control, without the scope, has neither."""
    mesh = make_mesh(kind)
    x = jax.ShapeDtypeStruct((32, 64), "float32", sharding=NamedSharding(mesh, P()))

    def annotated(x):
        return spmd.annotate(x, "hidden")

    with jax.set_mesh(mesh):
        assert operation not in str(jax.make_jaxpr(annotated)(x))
        with spmd.use_rules(RULES, mesh):
            assert operation in str(jax.make_jaxpr(annotated)(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 64, rngs=rngs)
        self.down = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(spmd.annotate(nnx.relu(self.up(x)), "hidden"))


def nnx_losses(mesh=None):
    """Losses of a loop of NNX, sharded if there is a mesh."""
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    if mesh is not None:
        state = nnx.state((model, optimizer))
        nnx.update((model, optimizer), jax.device_put(state, RULES.shardings(mesh, state)))

    @nnx.jit
    def train(model, optimizer, x, y):
        value, gradients = nnx.value_and_grad(lambda model: ((model(x) - y) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return value

    found = [float(train(model, optimizer, *batch())) for _ in range(STEPS)]
    return found, model.up.kernel.get_value().sharding


def test_an_nnx_loop_equals_one_device():
    """With the states of the module and of its optimizer on the mesh."""
    expected, _ = nnx_losses()
    mesh = make_mesh(AxisType.Auto)
    with spmd.use_rules(RULES, mesh):
        found, sharding = nnx_losses(mesh)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert sharding.spec == P(None, "mp")


def test_a_scope_on_another_mesh_is_refused():
    """Before anything is traced, with the axis."""
    mesh = jax.make_mesh((8,), ("dp",))
    with pytest.raises(RuleError, match="'mp'"), spmd.use_rules(RULES, mesh):
        pass
    with (
        pytest.raises(RuleError, match=r"mesh: is .*\n +fix: a mesh of JAX"),
        spmd.use_rules(RULES, 8),
    ):
        pass
