"""Linen modules in a pipeline: the numbers of one device, with batch statistics and arguments of a mode."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from spmd.errors import ConfigError
from spmd.plan.linen_model import from_linen
from spmd.plan.nnx_model import from_nnx
from spmd.sharding.rules import Rules, replicate
from tests.pipelined_training import assert_trains_as, batch, make_step, train
from tests.tiers import soak_but

WIDTH = 8
RULES = Rules(
    params=[
        ("embed/embedding", P(None, "fsdp")),
        ("(linear|head)/kernel", P("fsdp", "tensor")),
        ("bias|scale|mean|var", replicate("small")),
    ],
    stacked={"blocks": "pipe"},
)


class Block(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        y = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        y = nn.Dense(WIDTH, name="linear")(nn.gelu(y))
        return x + nn.Dropout(self.rate, deterministic=not train)(y), None


class Net(nn.Module):
    """Dropout of the embedding, and, at a rate of layers, in these."""

    blocks: int = 4
    rate_of_layers: float = 0.0

    def setup(self):
        self.embed = nn.Embed(64, WIDTH)
        self.dropout = nn.Dropout(0.2)
        stack = nn.scan(
            Block,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.blocks,
            in_axes=nn.broadcast,
        )
        self.stack = stack(self.rate_of_layers, name="blocks")
        self.head = nn.Dense(64)

    def embed_inputs(self, tokens, train=False):
        return self.dropout(self.embed(tokens), deterministic=not train), None

    def apply_layers(self, x, context, train=False):
        return self.stack(x, train)

    def compute_outputs(self, x, values):
        return self.head(x)

    def __call__(self, tokens, train=False):
        x, context = self.embed_inputs(tokens, train)
        return self.compute_outputs(*self.apply_layers(x, context, train))


def make_model(layers="blocks", **fields):
    tokens = jax.ShapeDtypeStruct((2, 8), "int32")
    return from_linen(Net(**fields), tokens, train={"train": True}, layers=layers)


LAYOUTS = {
    "1f1b": (4, "1f1b", 1, {"pipe": 2, "fsdp": 2, "tensor": 2}),
    "interleaved": (4, "interleaved", 2, {"pipe": 2, "data": 2}),
    "uneven": (5, "1f1b", 1, {"pipe": 2, "fsdp": 2}),
}
"""Name → layers, schedule, chunks of a stage, and mesh."""


@pytest.mark.parametrize("layout", soak_but(LAYOUTS, "1f1b"))
def test_a_linen_module_has_the_numbers_of_one_device(layout):
    """Its stages are copies with fewer layers."""
    layers, schedule, chunks, mesh = LAYOUTS[layout]
    model = make_model(blocks=layers)
    found = train(model, RULES, schedule, chunks, **mesh)
    assert_trains_as(found, train(model, RULES))


def test_the_mode_reaches_the_layers():
    """Statistics change in training alone."""
    model = make_model()
    parts = model.layered()
    params = model.init(jax.random.key(0))
    variables = model.init_variables(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 8, WIDTH)) * 3
    changed = []
    for is_training in (False, True):
        _, after = parts.apply_layers(params, variables, x, None, train=is_training)
        mean = after["batch_stats"]["blocks"]["norm"]["mean"]
        changed.append(float(jnp.abs(mean).max()) > 0)
    assert changed == [False, True]


def test_random_numbers_in_layers_are_refused():
    """Stages have no key: the error names the method."""
    step = make_step(make_model(rate_of_layers=0.3), RULES, pipe=2)
    said = r"Net.apply_layers: draws random numbers(.|\n)*none in apply_layers; or a module of nnx"
    with pytest.raises(ConfigError, match=said):
        step.trace(batch())


def test_a_field_that_is_not_there():
    """Is an error with the nearest, and so is one that counts no stacked layers. Without a field, the error about a
    pipeline says what is missing."""
    with pytest.raises(ConfigError, match=r"layers: is 'block', and Net has no such(.|\n)*blocks"):
        make_model(layers="block")
    model = own_model(Unrolled(), train={})
    with pytest.raises(
        ConfigError, match="layers: is 'blocks', and no parameter has a row for each"
    ):
        model.apply(model.init(jax.random.key(0)), batch()["tokens"])
    with pytest.raises(ConfigError, match=r'spmd\.from_linen also layers="…"'):
        make_step(make_model(layers=""), RULES, pipe=2).trace(batch())


class Sows(Net):
    def apply_layers(self, x, context, train=False):
        self.sow("sizes", "x", jnp.square(x).mean())
        return super().apply_layers(x, context, train)


class Scaled(Net):
    """A scalar, and an array with as many elements as there are layers, before the stack in the order of paths."""

    def setup(self):
        super().setup()
        self.a_scale = self.param("a_scale", nn.initializers.ones, ())
        self.a_weights = self.param("a_weights", nn.initializers.ones, (4,))

    def compute_outputs(self, x, values):
        return super().compute_outputs(x * self.a_scale * self.a_weights.sum(), values)


class Asks(Net):
    """Layers that only ask whether there are random numbers."""

    def apply_layers(self, x, context, train=False):
        x, values = super().apply_layers(x, context, train)
        return (x * 2 if self.has_rng("dropout") else x), values


def own_model(module, **options):
    tokens = jax.ShapeDtypeStruct((2, 8), "int32")
    options = {"train": {"train": True}, "layers": "blocks", **options}
    return from_linen(module, tokens, **options)


@pytest.mark.parametrize(
    ("module", "pieces"),
    [(Scaled(), [(0, 2), (2, 4)]), (Asks(), [(0, 4)])],
    ids=["scalars", "asks"],
)
def test_the_parts_are_the_whole(module, pieces):
    """With some layers after the others, as stages run them; a module that asks for keys has some."""
    model = own_model(module)
    parts, key = model.layered(), jax.random.key(0)
    params, variables = model.init(key), model.init_variables(key)
    tokens = batch()["tokens"]
    whole, _ = model.forward(params, variables, key, tokens, train=True)
    (x, context), _ = parts.embed_inputs(params, variables, key, tokens, train=True)
    for first, end in pieces:
        rows = slice(first, end)
        own = {**params, "blocks": jax.tree.map(lambda x, rows=rows: x[rows], params["blocks"])}
        statistics = jax.tree.map(lambda x, rows=rows: x[rows], variables)
        (x, _), _ = parts.apply_layers(own, statistics, x, context, train=True)
    found, _ = parts.compute_outputs(params, variables, x, None, train=True)
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)


class Unrolled(nn.Module):
    blocks: int = 2

    def setup(self):
        self.embed = nn.Embed(64, WIDTH)
        self.list = [nn.Dense(WIDTH) for _ in range(self.blocks)]

    def embed_inputs(self, tokens):
        return self.embed(tokens), None

    def apply_layers(self, x, context):
        for layer in self.list:
            x = layer(x)
        return x, None

    def compute_outputs(self, x, values):
        return self.embed.attend(x)

    def __call__(self, tokens, train=False):
        x, context = self.embed_inputs(tokens)
        return self.compute_outputs(*self.apply_layers(x, context))


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [
        (Sows(), {}, "sizes: is sown in apply_layers, and stages"),
        (
            Net(),
            {"train": {"method": "__call__"}},
            "method: is chosen by the mode, and stages call",
        ),
    ],
    ids=["sows", "method"],
)
def test_what_cannot_be_pipelined(module, options, said):
    """Is an error with the reason."""
    with pytest.raises(ConfigError, match=said):
        make_step(own_model(module, **options), RULES, pipe=2).trace(batch())


class TakesItsMode(nnx.Module):
    """A module of nnx with an argument of its mode, which its layers take."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, WIDTH, rngs=rngs)
        kernel = jax.random.normal(rngs.params(), (4, WIDTH, WIDTH)) * 0.1
        self.blocks = nnx.Dict(kernel=nnx.Param(kernel))

    def embed_inputs(self, tokens):
        return self.embed(tokens), None

    def apply_layers(self, x, context, train=False):
        scale = 2.0 if train else 1.0
        return jax.lax.scan(
            lambda x, kernel: (x + scale * jnp.tanh(x @ kernel), None),
            x,
            self.blocks["kernel"][...],
        )

    def compute_outputs(self, x, values):
        return self.embed.attend(x)

    def __call__(self, tokens, train=False):
        x, context = self.embed_inputs(tokens)
        return self.compute_outputs(*self.apply_layers(x, context, train=train))


def test_arguments_of_a_mode_reach_the_parts_of_nnx():
    """Each that one takes; one that none takes is an error."""
    model = from_nnx(TakesItsMode, train={"train": True})
    params = model.init(jax.random.key(0))
    parts = model.layered()
    x = jnp.ones((1, 2, WIDTH))
    with_mode, without = (
        parts.apply_layers(params, {}, x, None, train=train)[0][0] for train in (True, False)
    )
    assert float(jnp.abs(with_mode - without).max()) > 0.1
    other = from_nnx(TakesItsMode, train={"deterministic": False})
    with pytest.raises(ConfigError, match="deterministic: is an argument of the mode, and no part"):
        other.layered()
