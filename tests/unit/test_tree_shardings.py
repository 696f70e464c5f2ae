"""Shardings of a loop's own trees: by rule, by the parameters, by the structure of optimizer state, or an error."""

from typing import Any

import jax
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import spmd
from spmd import Rules, replicate
from spmd.errors import RuleError

MESH = AbstractMesh((2, 4), ("dp", "mp"))
EXPLICIT = AbstractMesh((2, 4), ("dp", "mp"), axis_types=(AxisType.Explicit,) * 2)
RULES = Rules([("up/kernel", P("dp", "mp")), ("down/kernel", P("mp", "dp")), ("bias", P("mp"))])
SPECS = {"up": {"kernel": P("dp", "mp"), "bias": P("mp")}, "down": {"kernel": P("mp", "dp")}}


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def params():
    return {
        "up": {"kernel": array(256, 512), "bias": array(512)},
        "down": {"kernel": array(512, 256)},
    }


def specs(tree):
    return jax.tree.map(lambda sharding: sharding.spec, tree)


class MyState(TrainState):
    """A state with fields of its own."""

    reference: Any = None
    loss_scale: Any = None
    batch_stats: Any = None


def state(tx, **fields):
    def make(params):
        return MyState.create(apply_fn=None, params=params, tx=tx, **fields)

    return jax.eval_shape(make, params())


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT])
def test_parameters_by_their_rules(mesh):
    """On a mesh with other axes than a plan's, of both kinds."""
    found = RULES.shardings(mesh, params())
    assert specs(found) == SPECS
    assert {sharding.mesh for sharding in jax.tree.leaves(found)} == {mesh}


def test_a_train_state_of_flax():
    """Moments and the reference model as the parameters, counts and scalars whole, factors by dimension."""
    found = RULES.shardings(MESH, state(optax.adam(1e-3), reference=params(), loss_scale=1.0))
    assert specs(found.params) == specs(found.reference) == SPECS
    adam = found.opt_state[0]
    assert specs(adam.mu) == specs(adam.nu) == SPECS
    assert specs((found.step, adam.count, found.loss_scale)) == (P(), P(), P())
    (factored, *_) = RULES.shardings(MESH, state(optax.adafactor(1e-3))).opt_state
    assert specs(factored.v_row["up"]["kernel"]) == P("dp")
    assert specs(factored.v_col["up"]["kernel"]) == P("mp")


def test_a_field_that_nothing_explains_is_an_error():
    """By its path; control: with a rule it has a sharding."""
    stats = {"mean": array(512)}
    with pytest.raises(RuleError, match=r"batch_stats/mean: no rule matches"):
        RULES.shardings(MESH, state(optax.sgd(0.1), batch_stats=stats))
    more = Rules([*RULES.params, ("mean", replicate("a few KiB"))])
    found = more.shardings(MESH, state(optax.sgd(0.1), batch_stats=stats))
    assert specs(found.batch_stats) == {"mean": P()}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


def test_the_states_of_nnx():
    """Of a module and of its optimizer, in their own structure; random keys and counts are whole."""
    rules = Rules([("up/kernel", P("dp", "mp")), ("bias", P("mp"))])

    def make():
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        return nnx.state((model, optimizer))

    made = jax.eval_shape(make)
    found = rules.shardings(MESH, made)
    assert jax.tree.structure(found) == jax.tree.structure(made)
    model, optimizer = found[0], found[1]
    assert model["up"]["kernel"].get_value().spec == P("dp", "mp")
    assert optimizer["opt_state"][0]["mu"]["up"]["kernel"].get_value().spec == P("dp", "mp")
    assert model["drop"]["rngs"]["key"].get_value().spec == P()


def test_a_suggested_table_has_shardings():
    """With a rule for a scalar, too; the control: a rule for a scalar that is not there is idle."""
    tree = {**params(), "scale": array()}
    names = {"spmd": spmd, "P": P}
    exec(spmd.suggest_rules(tree, MESH), names)
    found = names["rules"].shardings(MESH, tree)
    assert specs(found["scale"]) == P()
    with pytest.raises(RuleError, match="matches no parameter"):
        names["rules"].shardings(MESH, params())


def test_everything_that_does_not_fit_is_in_one_error():
    """An unknown axis, a dimension that is not divided, a parameter without a rule, a rule without one."""
    rules = Rules([("up/kernel", P("dp", "tensor")), ("bias", P("mp")), ("head", P("dp"))])
    small = {"up": {"kernel": array(8, 16), "bias": array(6)}, "down": {"kernel": array(4, 4)}}
    with pytest.raises(RuleError) as caught:
        rules.shardings(MESH, small)
    text = str(caught.value)
    assert "'tensor'" in text
    assert "6 / (mp=4)" in text
    assert "down/kernel: no rule matches" in text
    assert "('head') : matches no parameter" in text or "'head'): matches no parameter" in text


def test_what_is_no_array_and_no_mesh_is_named():
    """Instead of a traceback of JAX."""
    with pytest.raises(RuleError, match="up/name: is 'a', not an array"):
        RULES.shardings(MESH, {"up": {"name": "a"}})
    with pytest.raises(RuleError, match=r"mesh: is .*\n +fix: a mesh of JAX"):
        RULES.shardings({"dp": 2}, params())
    other = state(optax.sgd(0.1)).replace(opt_state={"m": array(3)})
    with pytest.raises(RuleError, match=r"opt_state/m: is no state of tx\.init"):
        RULES.shardings(MESH, other)
