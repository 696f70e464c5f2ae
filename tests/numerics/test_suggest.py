"""A suggested table passes the audit as it is, and splits as much as tables that are written by hand."""

import dataclasses

import jax
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import RuleError
from spmd.sharding.mesh import MeshShape, abstract_mesh
from tests.numerics.test_wild import EXAMPLES, HYBRID, TURNS
from tests.wild import several


@pytest.fixture(autouse=True)
def promotion():
    """Strangers add vectors to matrices."""
    with jax.numpy_rank_promotion("allow"):
        yield


def read(text):
    """The table that a text makes when it is pasted."""
    names = {"spmd": spmd, "P": P}
    exec(text, names)
    return names["rules"]


def bytes_of(mesh, rules, example):
    plan = spmd.make_plan(mesh, rules, example.model(), example.optimizer)
    return sum(entry.bytes_per_device for entry in (*plan.params, *plan.optimizer_state))


IN_CI = ("resnet", "scanned", "mamba", "clip")


@pytest.mark.parametrize(
    "name",
    [name if name in IN_CI else pytest.param(name, marks=pytest.mark.soak) for name in EXAMPLES],
)
def test_models_of_others_hold_as_few_bytes_as_by_hand(name):
    """At most 1.2 times the bytes of the table written for the model."""
    example = EXAMPLES[name]
    mesh = abstract_mesh(MeshShape(**HYBRID))
    rules = read(spmd.suggest_rules(example.model(), mesh))
    tables = ("activations", "batch", "logical")
    rules = dataclasses.replace(rules, **{table: getattr(example.rules, table) for table in tables})
    assert bytes_of(mesh, rules, example) <= 1.2 * bytes_of(mesh, example.rules, example)


SMALL = spmd.replicate("a few bytes")


@pytest.mark.parametrize("name", TURNS)
def test_several_networks_have_one_table(name):
    """A GAN, and an actor with a critic: within 1.2 of a table by hand; the control, all whole, is not."""
    models = {}
    for network, part in TURNS[name].parts.items():
        inputs = jax.ShapeDtypeStruct((1, part.features), "float32")
        models[network] = spmd.from_linen(part.network, inputs)

    def init(key):
        return {network: model.init(key) for network, model in models.items()}

    mesh, adam = abstract_mesh(MeshShape(**HYBRID)), optax.adam(1e-2)
    all_whole = spmd.Rules([("kernel", SMALL), ("bias", SMALL)])
    sizes = []
    for rules in (
        spmd.Rules(several.MATRICES),
        read(spmd.suggest_rules(models, mesh)),
        all_whole,
    ):
        plan = spmd.make_plan(mesh, rules, spmd.Model(init, lambda params, x: x), adam)
        sizes.append(sum(e.bytes_per_device for e in (*plan.params, *plan.optimizer_state)))
    by_hand, suggested, whole = sizes
    assert suggested <= 1.2 * by_hand < whole
    shapes = jax.eval_shape(init, jax.random.key(0))
    assert (
        spmd.suggest_rules(shapes, mesh).splitlines()[:-2]
        == (spmd.suggest_rules(models, mesh).splitlines()[:-2])
    )


class Layers(nn.Module):
    """Three layers, stacked along a dimension."""

    dim: int

    @nn.compact
    def __call__(self, x):
        layer = nn.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes={"params": self.dim},
            split_rngs={"params": True},
            length=3,
        )
        return layer(nn.Dense(16, name="layers"), x, None)[0]


def test_stacks_of_all_networks_are_in_the_table():
    """The control, stacks of one name along other dimensions, is an error."""
    mesh = AbstractMesh((2, 4), ("dp", "mp"))
    x = jax.ShapeDtypeStruct((4, 16), "float32")
    first, second = (spmd.from_linen(Layers(dim), x) for dim in (0, 1))
    rules = read(spmd.suggest_rules({"actor": first, "critic": first}, mesh))
    assert rules.stacks["layers"].dim == 0
    assert rules.match("critic/layers/kernel").spec == P(None, "dp", "mp")
    with pytest.raises(RuleError, match=r"critic: its stack 'layers' is .*dim=1"):
        spmd.suggest_rules({"actor": first, "critic": second}, mesh)


def test_modules_in_a_tree_have_the_paths_of_their_shardings():
    """Modules of NNX in a dictionary; a module of Linen, whose inputs are unknown, is an error."""
    networks = {name: nnx.Linear(8, 16, rngs=nnx.Rngs(0)) for name in ("actor", "critic")}
    mesh = AbstractMesh((2, 4), ("dp", "mp"))
    rules = read(spmd.suggest_rules(networks, mesh))
    assert rules.shardings(mesh, networks)["actor"].kernel.get_value().spec == P("dp", "mp")
    with pytest.raises(RuleError, match=r"actor: is a MLP\n +fix: spmd.from_linen"):
        spmd.suggest_rules({"actor": several.ACTOR, "critic": networks["critic"]}, mesh)


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def test_axes_of_any_mesh_by_shape():
    """Into more outputs rows first, into fewer columns first; what an axis does not divide is left whole."""
    params = {
        "up": {"kernel": floats(64, 256), "bias": floats(256)},
        "down": {"kernel": floats(256, 64)},
        "odd": {"kernel": floats(3, 64), "weight": floats(3, 5)},
        "table": {"long": floats(2**16)},
        "scale": floats(),
    }
    text = spmd.suggest_rules(params, AbstractMesh((2, 4), ("dp", "mp")))
    assert set(text.splitlines()[2:-3]) == {
        '        ("up/kernel", P("dp", "mp")),',
        '        ("down/kernel", P("mp", "dp")),',
        '        ("odd/kernel", P(None, "mp")),',
        '        ("long", P("dp")),',
        '        ("bias", spmd.replicate("vectors, 1 KiB in all")),',
        '        ("weight", spmd.replicate("no axis divides 3 × 5")),',
        '        ("scale", spmd.replicate("one element")),',
    }
    one = read(spmd.suggest_rules(params, AbstractMesh((4,), ("x",))))
    assert one.match("up/kernel").spec == P("x", None)


def test_experts_are_split_over_their_axis():
    """The control: where the axis has size 1 they are whole."""
    params = {"experts": {"kernel": floats(4, 64, 256)}}
    for experts, first in ((2, "expert"), (1, None)):
        mesh = abstract_mesh(MeshShape(expert=experts, fsdp=2, tensor=2))
        assert read(spmd.suggest_rules(params, mesh)).match("experts/kernel").spec[0] == first


def test_rows_are_split_over_the_sequence_too():
    """As in the tables of decoders; where the axis has size 1, no row names it."""
    params = {"up": {"kernel": jax.ShapeDtypeStruct((16, 64), "float32")}}
    split = read(spmd.suggest_rules(params, abstract_mesh(MeshShape(fsdp=2, sequence=4))))
    assert dict(split.params)["kernel"] == P(("fsdp", "sequence"), "tensor")
    whole = read(spmd.suggest_rules(params, abstract_mesh(MeshShape(fsdp=2))))
    assert dict(whole.params)["kernel"] == P("fsdp", "tensor")
    odd = {"up": {"kernel": jax.ShapeDtypeStruct((36, 24), "float32")}}
    alone = read(spmd.suggest_rules(odd, abstract_mesh(MeshShape(fsdp=4, sequence=8))))
    assert dict(alone.params)["kernel"] == P(
        "tensor", "sequence"
    )  # 36 / (4 · 8) is no whole number
    theirs = AbstractMesh((2, 2, 2), ("fsdp", "expert", "tensor"))
    assert read(spmd.suggest_rules(params, theirs)).params
