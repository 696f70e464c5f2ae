"""Modules that Flax takes are taken: with plain arrays, sown values, random streams, initial values from inputs."""

import functools
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd
from spmd import tree
from spmd.errors import ConfigError
from spmd.model_interface.model import Model, Outputs
from spmd.plan.plan import ShardingPlan
from spmd.sharding.mesh import MeshShape, abstract_mesh

pytestmark = pytest.mark.compat

WIDTH = 8
X = jax.ShapeDtypeStruct((4, WIDTH), "float32")
KEY = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
SMALL = spmd.replicate("a few bytes")


def plan_of(model: Model, rows: Any = (), optimizer: Any = None) -> ShardingPlan:
    mesh = abstract_mesh(MeshShape(data=2, fsdp=2))
    return spmd.make_plan(
        mesh, spmd.Rules(rows or [("kernel|bias", SMALL)]), model, optimizer or optax.sgd(0.1)
    )


def called(model: Model, *, train: bool = True, **keywords: Any) -> tuple[Any, Any]:
    """Return the outputs and variables of a call, abstract."""
    params, variables = jax.eval_shape(model.init, KEY), jax.eval_shape(model.init_variables, KEY)
    return jax.eval_shape(
        functools.partial(model.forward, train=train, **keywords), params, variables, KEY, X
    )


class Attribute(nnx.Module):
    """A linear layer beside something else."""

    def __init__(self, make: Any, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.extra = make(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


ATTRIBUTES = {
    "a table": (lambda rngs: jnp.arange(8.0), {"extra": "float32[8]"}),
    "of NumPy": (lambda rngs: np.arange(8.0), {"extra": "float32[8]"}),
    "a random key": (lambda rngs: rngs.noise(), {"extra": "uint32[2]"}),
    "a list": (
        lambda rngs: nnx.List([jnp.ones(2), jnp.zeros(3, bool)]),
        {"extra/0": "float32[2]", "extra/1": "bool[3]"},
    ),
    "a dictionary": (lambda rngs: nnx.data({"a": (jnp.ones(2),)}), {"extra/a/0": "float32[2]"}),
    "in a layer": (
        lambda rngs: Attribute(lambda rngs: jnp.ones(2), rngs),
        {"extra/extra": "float32[2]"},
    ),
}


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_arrays_that_are_attributes_are_variables_without_a_rule(kind: str) -> None:
    """Each has a line in the plan, replicated for a reason; a rule that matches splits it."""
    make, expected = ATTRIBUTES[kind]
    model = spmd.from_nnx(lambda rngs: Attribute(make, rngs))
    plan = plan_of(model)
    assert {e.path: f"{e.dtype}{list(e.shape)}" for e in plan.variables} == expected
    assert all(entry.spec == P() and "attribute" in entry.reason for entry in plan.variables)
    called(model)


def test_a_rule_splits_an_array_that_is_an_attribute() -> None:
    """A large table need not be on every device."""
    model = spmd.from_nnx(lambda rngs: Attribute(lambda rngs: jnp.ones((8, 2)), rngs))
    (entry,) = plan_of(model, [("kernel|bias", SMALL), ("extra", P("fsdp"))]).variables
    assert entry.spec == P("fsdp")
    assert entry.bytes_per_device == 8 * 2 * 4 // 2


def test_variables_may_be_pytrees() -> None:
    """A dictionary in one variable has one path for each array, and a call returns the same ones."""

    def make(rngs: nnx.Rngs) -> nnx.Variable:
        return nnx.BatchStat({"a": jnp.ones(2), "b": (jnp.zeros(3), [jnp.zeros(())])})

    model = spmd.from_nnx(lambda rngs: Attribute(make, rngs))
    variables = jax.eval_shape(model.init_variables, KEY)
    assert list(tree.flatten(variables)) == ["extra/a", "extra/b/0", "extra/b/1/0"]
    assert called(model)[1] == variables


class Layer(nnx.Module):
    """A layer of a stack, with a table that `nnx.vmap` does or does not stack."""

    def __init__(self, mark: Any, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.table = mark(jnp.arange(8.0))


class Stack(nnx.Module):
    """Three of them."""

    def __init__(self, mark: Any, rngs: nnx.Rngs) -> None:
        make = nnx.vmap(lambda rngs: Layer(mark, rngs), in_axes=(0,), out_axes=0)
        self.layers = nnx.split_rngs(splits=3)(make)(rngs)


def test_a_table_in_stacked_layers_is_stacked_or_refused() -> None:
    """Flax stacks what is marked as data; a plain one, of which it would keep one under tracing, is named."""
    marked = spmd.from_nnx(lambda rngs: Stack(nnx.data, rngs))
    assert jax.eval_shape(marked.init_variables, KEY)["layers"]["table"].shape == (3, 8)
    with pytest.raises(
        ConfigError, match=r"layers/table: is made in nnx.vmap.*\n.*\n.*self.table = nnx.data"
    ):
        spmd.from_nnx(lambda rngs: Stack(lambda x: x, rngs)).info()


def test_arrays_that_flax_does_not_see_are_refused_at_once() -> None:
    """A closure, a partial function and an object of one's own; the control holds none."""

    class Hidden(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            table = jnp.arange(8.0)
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.closure = lambda x: x + table
            self.partial = functools.partial(jnp.add, table)
            self.object = types.SimpleNamespace(table=table)
            self.fine = functools.partial(jnp.add, 3.0)
            self.activation = nnx.relu

    with pytest.raises(ConfigError) as caught:
        plan_of(spmd.from_nnx(Hidden))
    assert [problem.where for problem in caught.value.problems] == ["closure", "object", "partial"]


class Sowing(nn.Module):
    """Sows values, with some reductions, into some collections."""

    sown: tuple[tuple[str, str, Any, Any], ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.Dense(WIDTH, name="dense")(x)
        for collection, name, value, reduction in self.sown:
            self.sow(collection, name, value(h), **(reduction or {}))
        return h


ADD = {"reduce_fn": lambda a, b: a + b, "init_fn": lambda: 0.0}
LAST = {"reduce_fn": lambda a, b: b, "init_fn": lambda: None}
LIST = {"reduce_fn": lambda a, b: [*a, b], "init_fn": list}


def test_sown_values_are_outputs_and_no_variables() -> None:
    """Losses and metrics of any collection are scalars by name; Flax's own for debugging is dropped."""
    sown = (
        ("losses", "a", jnp.mean, None),
        ("losses", "b", jnp.mean, ADD),
        ("anything", "c", jnp.max, None),
        ("anything", "d", jnp.abs, None),
        ("intermediates", "e", jnp.abs, None),
    )
    model = spmd.from_linen(Sowing(sown), X)
    plan = plan_of(model)
    assert not plan.variables
    outputs, variables = called(model)
    assert isinstance(outputs, Outputs)
    assert variables == {}
    assert sorted(outputs.losses) == ["losses/a", "losses/b"]
    assert sorted(outputs.metrics) == ["anything/c"]
    assert sorted(outputs.intermediates) == ["anything/d"]


def test_a_module_that_sows_for_debugging_alone_returns_what_it_returns() -> None:
    """As under Flax, unless these values are asked for as losses."""
    module = Sowing((("intermediates", "e", jnp.mean, None),))
    assert called(spmd.from_linen(module, X))[0] == X
    outputs, _ = called(spmd.from_linen(module, X, losses=("intermediates",)))
    assert sorted(outputs.losses) == ["intermediates/e"]
    with pytest.raises(ConfigError, match="losses 'balance': is nothing that the module sows"):
        called(spmd.from_linen(module, X, losses=("balance",)))


def test_unknown_reductions_are_refused_by_the_plan_at_once() -> None:
    """An array that is no tuple, a list, and a loss for each example."""
    sown = (
        ("losses", "array", jnp.abs, ADD),
        ("losses", "examples", lambda h: h.mean(-1), None),
        ("metrics", "last", jnp.abs, LAST),
        ("metrics", "list", jnp.mean, LIST),
        ("metrics", "fine", jnp.mean, LAST),
    )
    with pytest.raises(ConfigError) as caught:
        plan_of(spmd.from_linen(Sowing(sown), X))
    names = ["losses/array", "losses/examples", "metrics/last", "metrics/list"]
    assert [problem.where for problem in caught.value.problems] == names


class Block(nn.Module):
    """A layer of a scanned stack that sows."""

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        h = nn.Dense(WIDTH, name="dense")(x)
        self.sow("losses", "balance", (h**2).mean())
        self.sow("metrics", "mean", h.mean())
        return h, None


class Scanned(nn.Module):
    """Four of them: as many as there are examples."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        axes = {"params": 0, "losses": 0, "metrics": 0}
        scan = nn.scan(nn.remat(Block), variable_axes=axes, split_rngs={"params": True}, length=4)
        return scan(name="layers")(x, None)[0]


def test_scanned_layers_sow_one_value_each() -> None:
    """Their losses are added up, their metrics are one array; a loss for each example is told from them."""
    model = spmd.from_linen(Scanned(), X)
    model.info()
    outputs, _ = called(model)
    assert {name: x.shape for name, x in outputs.losses.items()} == {"losses/layers/balance": ()}
    assert {name: x.shape for name, x in outputs.arrays.items()} == {"metrics/layers/mean": (4,)}


class Auxiliary(nnx.Variable):
    """A loss that NNX modules sow."""


class NnxSowing(Attribute):
    """Sows a loss, and a value for debugging."""

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.linear(x)
        self.sow(Auxiliary, "balance", (h**2).mean())
        self.sow(nnx.Intermediate, "hidden", h)
        return h


def test_nnx_modules_sow() -> None:
    """By the type of the variable: losses as asked, others are metrics, and Flax's own for debugging is dropped."""
    plain = spmd.from_nnx(lambda rngs: NnxSowing(lambda rngs: None, rngs))
    assert sorted(called(plain)[0].metrics) == ["balance"]
    assert not called(plain)[1]
    loss = spmd.from_nnx(lambda rngs: NnxSowing(lambda rngs: None, rngs), losses=Auxiliary)
    assert sorted(called(loss)[0].losses) == ["balance"]
    unknown = spmd.from_nnx(lambda rngs: Attribute(lambda rngs: None, rngs), losses=Auxiliary)
    with pytest.raises(ConfigError, match="losses 'Auxiliary': is nothing that the module sows"):
        called(unknown)


class ActNorm(nn.Module):
    """Its initial parameters, and a running mean, are computed from its first input."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mean = self.param("mean", lambda key: x.mean(0))
        scale = self.param("scale", lambda key: x.std(0) + 1)
        running = self.variable("stats", "mean", lambda: x.mean(0))
        zeros = self.variable("stats", "zeros", lambda: jnp.zeros_like(x[0]))
        return (x - mean[None]) / scale[None] + nn.Dense(WIDTH, name="dense")(
            running.value + zeros.value
        )[None]


def test_initial_values_from_inputs_need_inputs() -> None:
    """With arrays they are taken; with shapes every such value is named, and no other."""
    model = spmd.from_linen(ActNorm(), np.ones(X.shape, X.dtype))
    assert sorted(tree.flatten(jax.eval_shape(model.init, KEY))) == [
        "dense/bias",
        "dense/kernel",
        "mean",
        "scale",
    ]
    assert sorted(tree.flatten(jax.eval_shape(model.init_variables, KEY))) == [
        "stats/mean",
        "stats/zeros",
    ]
    with pytest.raises(ConfigError, match="arrays in place of shapes") as caught:
        plan_of(spmd.from_linen(ActNorm(), X))
    assert [problem.where for problem in caught.value.problems] == ["mean", "scale", "stats/mean"]


class Noise(nn.Module):
    """Draws from a stream of its own, also in evaluation."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(WIDTH)(x) + jax.random.normal(self.make_rng("noise"), x.shape)


def test_random_streams_work_or_are_named() -> None:
    """Any stream has a key in training; in evaluation one that is asked for has."""
    called(spmd.from_linen(Noise(), X))
    called(spmd.from_linen(Noise(), X, evaluation_rngs=("noise",)), train=False)
    with pytest.raises(ConfigError, match=r"random stream 'noise', which has no key") as caught:
        called(spmd.from_linen(Noise(), X), train=False)
    assert 'evaluation_rngs=("noise",)' in caught.value.problems[0].fix


class Persistent(nn.Module):
    """Misuses its variables, in one of several ways."""

    way: str

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        count = self.variable("counts", "n", jnp.zeros, ())
        if self.way == "evaluation":
            count.value += 1
        if self.way == "late" and train:
            self.variable("late", "n", jnp.zeros, ())
        if self.way == "mixed" and train:
            self.sow("counts", "loss", x.mean())
            self.sow("counts", "other", x.mean())
        return nn.Dense(WIDTH)(x) + count.value


@pytest.mark.parametrize(
    ("way", "train", "message"),
    [
        ("evaluation", False, "changes a variable in evaluation"),
        ("late", True, "needs a variable that does not exist"),
        ("mixed", True, "counts/loss/0: is added to the variables by a call"),
    ],
)
def test_variables_that_a_call_adds_or_changes_are_named(
    way: str, train: bool, message: str
) -> None:
    """In words, with the line of the module, where Flax would raise an error of its own or grow the state."""
    modes = {"train": {"train": True}, "evaluate": {"train": False}}
    with pytest.raises(ConfigError, match=message):
        called(spmd.from_linen(Persistent(way), X, **modes), train=train)


def test_what_no_checkpoint_could_hold_is_refused_by_the_plan() -> None:
    """Arrays without elements and names that make no path, of parameters and variables, all at once."""
    leaves = {name: jax.ShapeDtypeStruct((2,), "float32") for name in ("fine", "a/b", "", "..")}
    params = {"lora": jax.ShapeDtypeStruct((4, 0), "float32"), **leaves, "a": {"b": leaves["fine"]}}
    variables = {"empty": jax.ShapeDtypeStruct((0,), "float32")}

    def zeros(shapes: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def model():
        return Model(lambda key: zeros(params), lambda params, x: x, lambda key: zeros(variables))

    with pytest.raises(ConfigError) as caught:
        plan_of(model())
    assert sorted(problem.where for problem in caught.value.problems) == [
        "",
        "..",
        "a/b",
        "empty",
        "lora",
    ]
    del params["a"], params[""], params[".."], params["lora"], variables["empty"]
    plan_of(model(), [("fine|b", SMALL)])
