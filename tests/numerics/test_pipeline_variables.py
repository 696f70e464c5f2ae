"""Variables of models in a pipeline: random state and tables give one device's numbers; others are refused."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import ConfigError
from spmd.gradients.deferred_reduction import choose_deferred_reduction
from spmd.gradients.losses import next_token_loss
from spmd.model_interface.model import LayeredModel
from spmd.models.decoder import decoder_rules
from spmd.models.mixtral import PRESETS as MIXTRALS
from spmd.pipedream.grad_fn import InFlight
from spmd.pipeline.grad_fn import pipeline, pipelined
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.pipeline.variables import MicrobatchVariables
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.run.check import Check
from spmd.sharding.rules import Rules, replicate
from spmd.training.state import init_state
from spmd.training.step import make_eval_step, make_train_step
from tests import tiny
from tests.pipelined_training import MICROBATCHES, assert_trains_as, batch, train
from tests.tiers import soak_but

WIDTH = 8
RULES = Rules(
    params=[
        ("embed/embedding", P(None, "fsdp")),
        ("linear/kernel", P("fsdp", "tensor")),
        ("bias|scale|mean|var", replicate("small")),
    ],
    stacked={"layers": "pipe"},
)


class Layer(nnx.Module):
    def __init__(self, rngs, norm=False):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs) if norm else None

    def __call__(self, x):
        if self.norm is not None:
            x = self.norm(x)
        return x + self.dropout(jnp.tanh(self.linear(x)))


class Net(nnx.Module):
    """Dropout of the embedding, of each layer, and, with the embedding's random state, before the head; and a table."""

    def __init__(self, rngs, layers=4, norm=False):
        make = nnx.vmap(lambda rngs: Layer(rngs, norm), in_axes=0, out_axes=0)
        self.embed = nnx.Embed(64, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.table = jnp.arange(WIDTH, dtype=jnp.float32) / WIDTH
        self.layers = nnx.split_rngs(splits=layers)(make)(rngs)

    def embed_inputs(self, tokens):
        return self.dropout(self.embed(tokens)) + self.table[None, None], None

    def apply_layers(self, x, context):
        scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(lambda layer, x: layer(x))(self.layers, x), None

    def compute_outputs(self, x, values):
        return self.embed.attend(self.dropout(x))

    def __call__(self, tokens):
        x, context = self.embed_inputs(tokens)
        return self.compute_outputs(*self.apply_layers(x, context))


class Lists(Net):
    """Dropout in lists, and a table that passes through `nnx.remat`."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.List([nnx.Dropout(0.2, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)])

    def embed_inputs(self, tokens):
        return self.dropout[1](self.dropout[0](self.embed(tokens))), None

    def compute_outputs(self, x, values):
        x = nnx.remat(lambda net, x: x * net.table[None, None])(self, x)
        return self.embed.attend(self.dropout[0](x))


class OneOfAllLayers(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.layers.dropout = nnx.Dropout(0.3, rngs=rngs)


class DropsBetweenLayers(Net):
    """Layers share one random state, which each stage would have for itself."""

    def apply_layers(self, x, context):
        x, values = super().apply_layers(x, context)
        return self.dropout(x), values


class NormOfEmbedding(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def embed_inputs(self, tokens):
        x, context = super().embed_inputs(tokens)
        return self.norm(x), context


class ReadsOld(Layer):
    """Subtracts the running mean from before the microbatch."""

    def __call__(self, x):
        return super().__call__(x - self.norm.mean[...][None, None])


class ReadsStatistics(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        make = nnx.vmap(lambda rngs: ReadsOld(rngs, norm=True), in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=4)(make)(rngs)


class Penalty(nnx.Variable):
    """A type of sown values."""


class Sows(Net):
    def apply_layers(self, x, context):
        x, values = super().apply_layers(x, context)
        self.sow(Penalty, "size", jnp.square(x).mean())
        return x, values


def make_model(layers=4, **fields):
    return from_nnx(lambda rngs: Net(rngs, layers, **fields))


@functools.cache
def one_device(layers, norm=False):
    return train(make_model(layers, norm=norm), RULES)


LAYOUTS = {
    "1f1b": (4, "1f1b", 1, {"pipe": 2, "fsdp": 2}),
    "gpipe": (4, "gpipe", 1, {"pipe": 2, "data": 2}),
    "interleaved": (4, "interleaved", 2, {"pipe": 2, "tensor": 2}),
    "four-stages": (4, "1f1b", 1, {"pipe": 4, "fsdp": 2}),
    "three-axes": (4, "1f1b", 1, {"pipe": 2, "fsdp": 2, "tensor": 2}),
    "recomputed": (4, "1f1b", 1, {"pipe": 2, "fsdp": 2, "recompute": True}),
    "uneven": (5, "1f1b", 1, {"pipe": 2, "fsdp": 2}),
}
"""Name → layers, schedule, chunks of a stage, and mesh."""


@pytest.mark.parametrize("layout", soak_but(LAYOUTS, "three-axes"))
@pytest.mark.parametrize("norm", soak_but([False, True], True), ids=["dropout", "both"])
def test_variables_are_those_of_one_device(layout, norm):
    """Dropout of embedding, layers and head, and batch statistics of layers, after two steps of four microbatches; so
    are losses, parameters and an evaluation."""
    layers, schedule, chunks, mesh = LAYOUTS[layout]
    found = train(make_model(layers, norm=norm), RULES, schedule, chunks, **mesh)
    assert_trains_as(found, one_device(layers, norm))
    _, state, _ = found
    of_layers = state.variables["layers"]
    assert of_layers["dropout"]["rngs"]["count"].tolist() == [8] * layers
    assert int(state.variables["dropout"]["rngs"]["count"]) == 16, "twice in a microbatch"
    if norm:
        changes = np.abs(of_layers["norm"]["mean"]).max(axis=1)  # from zero
        assert (changes > 1e-3).all(), "of every layer"


@pytest.mark.soak
def test_variables_in_lists_are_those_of_one_device():
    """Their paths have numbers; and what passes through a transform of Flax is no change."""
    model = from_nnx(Lists)
    found = train(model, RULES, pipe=2, fsdp=2)
    assert_trains_as(found, train(model, RULES))
    _, state, _ = found
    assert int(state.variables["dropout"][0]["rngs"]["count"]) == 16


class Tables(Net):
    """A table, and dropout that drops nothing."""

    def __init__(self, rngs):
        super().__init__(rngs, layers=5)
        self.eval()


def test_tables_are_no_obstacle_to_an_exchange_beside_uneven_stages():
    """The program is traced where stages have layers of unequal numbers."""
    model = from_nnx(Tables)
    plan = make_plan(tiny.mesh(pipe=2, data=2), RULES, model, optax.adam(1e-2))
    grad_fn = pipeline(next_token_loss(model), tabulate(make_schedule("1f1b", 2, MICROBATCHES)))
    assert choose_deferred_reduction(grad_fn, plan, batch(), "auto").axes == ("data",)


def test_control_of_statistics(monkeypatch):
    """Microbatches with the statistics from before the first one leave others."""
    monkeypatch.setattr(MicrobatchVariables, "with_statistics", lambda self, statistics: self)
    _, state, _ = train(make_model(norm=True), RULES, evaluate=False, pipe=2, fsdp=2)
    _, one, _ = one_device(4, norm=True)
    found, wanted = (x.variables["layers"]["norm"]["var"] for x in (state, one))
    assert np.abs(found - wanted).max() > 1e-2


@pytest.mark.parametrize("recompute", [False, True])
def test_tables_know_the_order_of_microbatches(recompute):
    """Also where the last stage has backward tasks alone."""
    table = tabulate(make_schedule("1f1b", 2, MICROBATCHES), recompute=recompute)
    assert table.is_in_order
    backward = np.where(table.backward >= 0, MICROBATCHES - 1 - table.backward, -1)
    assert dataclasses.replace(table, backward=backward).is_in_order is not recompute


def test_an_evaluation_changes_no_statistics():
    """A loss in training mode would."""
    model = make_model(norm=True)
    plan = make_plan(tiny.mesh(pipe=2), RULES, model, optax.adam(1e-2))
    loss_fn = pipelined(next_token_loss(model), 2, MICROBATCHES)
    state = init_state(plan)
    with pytest.raises(ConfigError, match="layers/norm/mean: is changed by the examples of an"):
        make_eval_step(plan, loss_fn)(state.params, state.variables, batch())


def test_a_schedule_in_another_order_is_refused():
    """Batch statistics follow the order of the microbatches."""
    schedule = make_schedule("1f1b", 2, MICROBATCHES)
    table = tabulate(schedule)
    swap = {0: 1, 1: 0}
    forward = np.vectorize(lambda i: swap.get(i, i))(table.forward)
    assert table.is_in_order
    other = dataclasses.replace(table, forward=forward)
    model = make_model(norm=True)
    plan = make_plan(tiny.mesh(pipe=2), RULES, model, optax.adam(1e-2))
    step = make_train_step(plan, grad_fn=pipeline(next_token_loss(model), other))
    with pytest.raises(ConfigError, match="schedule: has stages with microbatches in another"):
        step.trace(batch())


def test_control_of_dropout(monkeypatch):
    """Microbatches with the random state of the first have other numbers."""
    at = MicrobatchVariables.at
    monkeypatch.setattr(MicrobatchVariables, "at", lambda self, i: at(self, 0))
    losses, _, _ = train(make_model(norm=True), RULES, steps=1, evaluate=False, pipe=2, fsdp=2)
    expected, _, _ = one_device(4, norm=True)
    assert abs(losses[0] / expected[0] - 1) > 1e-3


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            NormOfEmbedding,
            "norm/mean: is changed by the examples of each microbatch, and is outside",
        ),
        (ReadsStatistics, "layers/norm/mean: changes with each microbatch, and the loss"),
        (DropsBetweenLayers, "dropout/rngs/count: is changed in apply_layers by the layers"),
        (
            OneOfAllLayers,
            r"layers/dropout/rngs/count: is one of all layers, of the shape \(\), and",
        ),
        (Sows, "size: is sown in apply_layers, and stages"),
    ],
)
def test_what_stages_cannot_change(make, said):
    """Statistics outside of layers or read by the loss, one random state of all layers, and sown values are refused
    before anything compiles."""
    model = from_nnx(make)
    plan = make_plan(tiny.mesh(pipe=2), RULES, model, optax.adam(1e-2))
    table = tabulate(make_schedule("1f1b", 2, MICROBATCHES))
    step = make_train_step(plan, grad_fn=pipeline(next_token_loss(model), table))
    with pytest.raises(ConfigError, match=said):
        step.trace(batch())


@pytest.mark.parametrize(
    ("after", "said"),
    [(None, "embed_inputs: returns "), ({}, "embed_inputs: returns variables without dropout/")],
)
def test_parts_of_functions_return_their_variables(after, said):
    """A part that returns none, or not all, is named, with what to return."""
    parts = LayeredModel(
        lambda params, variables, key, tokens, train: (
            (params["embed"]["embedding"][tokens], None),
            after,
        ),
        lambda params, variables, x, context, train: (x, None),
        lambda params, variables, x, values, train: x,
    )
    model = make_model()
    whole = dataclasses.replace(model, layered=lambda: parts)
    plan = make_plan(tiny.mesh(pipe=2), RULES, whole, optax.adam(1e-2))
    grad_fn = pipeline(next_token_loss(whole), tabulate(make_schedule("1f1b", 2, MICROBATCHES)))
    with pytest.raises(ConfigError, match=rf"{said}(.|\n)*return result, variables"):
        make_train_step(plan, grad_fn=grad_fn).trace(batch())


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        (False, "dropout/rngs/count: changes while microbatches are in"),
        (True, "layers/norm/mean: changes while microbatches are in"),
    ],
)
def test_pipedream_refuses_variables_that_change(norm, said):
    """Its microbatches in flight are of two steps."""
    model = make_model(norm=norm)
    table = tabulate(make_schedule("pipedream", 2, MICROBATCHES))
    plan = make_plan(tiny.mesh(pipe=2), RULES, model, optax.adam(1e-2))
    in_flight = InFlight.of(next_token_loss(model), table, batch())
    with pytest.raises(ConfigError, match=said):
        plan.with_transforms(in_flight)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("router", "mesh"),
    [({"jitter": 0.1}, {"pipe": 2}), ({"bias_rate": 1e-2}, {"pipe": 2, "data": 2, "fsdp": 2})],
    ids=["noise", "biases-exchanged-once"],
)
def test_variables_of_routers_are_those_of_one_device(router, mesh):
    """Noise of each layer; biases, where gradients are exchanged once a step."""
    base = MIXTRALS["test"]
    router = dataclasses.replace(base.router, **router)
    model = dataclasses.replace(
        base, layers=2, vocab=256, stacked=True, router=router, predict_ahead=1
    )
    data = spmd.DataConfig(source=("stdlib",), tokenizer="bytes", sequence=16, batch=16)
    exchange = "data+fsdp" if "data" in mesh else "none"
    config = spmd.TrainConfig(
        model=model, rules=decoder_rules(model), data=data, defer_grad_reduction=exchange
    )
    assert Check(config, 2).compare(tiny.mesh(**mesh)).ok
