"""Microbatches are made of examples: arrays without examples, or with them elsewhere, are declared or refused."""

import functools

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
from spmd.gradients import accumulate as accumulation
from spmd.gradients.accumulate import accumulate, join_microbatch, split_microbatches
from spmd.gradients.additive import LossReader
from spmd.gradients.base import value_and_grad
from spmd.model_interface.grad_transform import Carry
from spmd.plan.context import override
from spmd.plan.nnx_model import from_nnx
from spmd.sharding.batch import BatchTable, whole
from spmd.sharding.mesh import BATCH_AXES
from spmd.sharding.rules import Rules, replicate
from tests import tiny
from tests.numerics.test_partition_safe import TOLERANCE

TIME_MAJOR = P(None, BATCH_AXES)
ONE_GRAPH = whole("one graph for all examples")
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


class Graph(nnx.Module):
    """Messages over the edges of one graph, for features of several examples."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, batch):
        h = jnp.tanh(self.a(batch["x"]))
        messages = jnp.tanh(self.b(h[:, batch["senders"]]))
        return h + jax.vmap(lambda m: jax.ops.segment_sum(m, batch["receivers"], h.shape[1]))(
            messages
        )


class BigGraph(Graph):
    """The rows are the nodes of one graph, as in jraph, and there are no examples."""

    def __call__(self, batch):
        return super().__call__({**batch, "x": batch["x"][None]})


class Recurrent(nnx.Module):
    """A recurrent network over `[time, batch, features]`."""

    time_major = True

    def __init__(self, rngs):
        self.a = nnx.RNN(nnx.GRUCell(4, 8, rngs=rngs), time_major=self.time_major)
        self.b = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, batch):
        return self.b(self.a(batch["x"]))


class BatchMajor(Recurrent):
    """The same over `[batch, time, features]`."""

    time_major = False


class Scaled(nnx.Module):
    """A scalar, such as a temperature, is part of the batch."""

    def __init__(self, rngs):
        self.a = nnx.Linear(4, 8, rngs=rngs)

    def __call__(self, batch):
        return self.a(batch["x"]) * batch["temperature"]


class Weighted(Scaled):
    """Each example has a temperature of its own, and several steps."""

    def __call__(self, batch):
        return super().__call__({**batch, "temperature": batch["temperature"][None, :, None]})


class Summed(nnx.Module):
    """A loop over the examples only adds up what they give."""

    def __init__(self, rngs):
        self.a = nnx.Linear(4, 8, rngs=rngs)

    def __call__(self, batch):
        def add(total, x):
            y = jnp.tanh(self.a(x))
            return total + (y**2).sum(), y

        return jax.lax.scan(add, jnp.float32(0), batch["x"])[1]


class Stepped(nnx.Module):
    """A recurrent network as a loop that takes one step at a time from the array."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, batch):
        x, first = self.a(batch["x"]), jnp.zeros((batch["x"].shape[1], 8))
        return jax.lax.fori_loop(0, len(x), lambda t, h: jnp.tanh(self.b(h) + x[t]), first)[None]


class Cumulative(Scaled):
    """Values over `[time, batch, features]` that add up over time."""

    def __call__(self, batch):
        return jnp.cumsum(self.a(batch["x"]), axis=0)


class Chunked(Scaled):
    """A loop over chunks of examples that only adds up what they give."""

    def __call__(self, batch):
        y = self.a(batch["x"])

        def add(chunk, total):
            return total + (jax.lax.dynamic_slice_in_dim(y, 2 * chunk, 2) ** 2).sum()

        return y * jax.lax.stop_gradient(
            jax.lax.fori_loop(0, len(y) // 2, add, jnp.float32(0)) * 0 + 1
        )


EDGES = {"senders": RNG.integers(0, 6, 12), "receivers": RNG.integers(0, 6, 12)}
CASES = {
    "graph": (Graph, {"x": normal(8, 6, 4), **EDGES}, (("senders|receivers", ONE_GRAPH),)),
    "time": (Recurrent, {"x": normal(6, 8, 4)}, (("x", TIME_MAJOR),)),
    "batch": (BatchMajor, {"x": normal(8, 6, 4)}, ()),
    "scalar": (
        Scaled,
        {"x": normal(8, 4), "temperature": np.float32(0.7)},
        (("temperature", whole("one for all")),),
    ),
    "sum": (Summed, {"x": normal(8, 4)}, ()),
    "chunks": (Chunked, {"x": normal(8, 4)}, ()),
    "loop": (Stepped, {"x": normal(6, 8, 4)}, (("x", TIME_MAJOR),)),
    "cumulative": (Cumulative, {"x": normal(6, 8, 4)}, (("x", TIME_MAJOR),)),
    "steps": (Weighted, {"x": normal(6, 8, 4), "temperature": normal(8)}, (("x", TIME_MAJOR),)),
    "one graph": (BigGraph, {"x": normal(6, 4), **EDGES}, ((".*", ONE_GRAPH),)),
}
"""Name → a model, a batch, and the rows that say where its examples are."""
IN_SOAK = {"scalar": "graph", "sum": "chunks"}
"""Case that is soak → one that is like it."""


def step_of(name, microbatches, declared=True):
    """A step that accumulates, under the rows of a case or without them."""
    kind, _, rows = CASES[name]
    model = from_nnx(lambda rngs: kind(rngs))

    def loss_fn(params, variables, batch, key):
        y, variables = model.forward(params, variables, key, batch, train=True)
        return {"loss": (y**2).sum(), "weight": jnp.float32(y.size)}, variables

    rules = Rules(
        [(".*kernel", P(None, "tensor")), ("bias", replicate("small"))],
        batch=rows if declared else (),
    )
    plan = spmd.make_plan(tiny.mesh(data=2, tensor=2), rules, model, optax.sgd(0.1))
    grad_fn = accumulate(value_and_grad(loss_fn), microbatches)
    return spmd.make_train_step(plan, grad_fn=grad_fn, keep_gradients=True)


@functools.cache
def metrics_of(name, microbatches):
    """Loss and gradients of a step."""
    step = step_of(name, microbatches)
    return jax.device_get(step(spmd.init_state(step.plan), CASES[name][1])[1])


def error(found, wanted):
    """The largest difference of a gradient, or of the loss."""
    found, wanted = (
        {"loss": metrics["loss"], **tree.flatten(metrics["gradients"])}
        for metrics in (found, wanted)
    )
    return max(float(np.abs(found[path] - x).max() / np.abs(x).max()) for path, x in wanted.items())


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("batch", "one graph", *IN_SOAK)]
)
def test_declared_arrays_have_the_gradients_of_the_whole_batch(name):
    """Loss and gradients in two microbatches agree to 1e-5, whichever dimension the examples are."""
    assert error(metrics_of(name, 2), metrics_of(name, 1)) <= TOLERANCE


@pytest.mark.soak
@pytest.mark.parametrize("name", IN_SOAK)
def test_other_declared_arrays_have_them_too(name):
    """The same for more cases."""
    assert error(metrics_of(name, 2), metrics_of(name, 1)) <= TOLERANCE


@pytest.mark.parametrize(
    "name",
    [
        "graph",
        "loop",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("time", "cumulative")),
    ],
)
def test_control_without_the_table(name, monkeypatch):
    """Where the first dimension of each array is split regardless, gradients are wrong by more than a hundredth."""
    monkeypatch.setattr(BatchTable, "examples", lambda self, path: 0)
    monkeypatch.setattr(accumulation, "_example_problems", lambda *_: [])
    monkeypatch.setattr(LossReader, "check_additive", lambda *_, **options: None)
    assert error(metrics_of.__wrapped__(name, 2), metrics_of(name, 1)) > 0.01


REFUSED = {
    "graph": (
        [
            "batch: has arrays with different numbers of examples",
            "receivers: 12, senders: 12, x: 8",
        ],
        'Rules(batch=[("receivers", ',
    ),
    "time": (
        [
            "batch x: is gone through in order along its first dimension at",
            "no dimension of examples",
        ],
        'Rules(batch=[("x", P(None, ("data", "fsdp", "expert")))])',
    ),
    "scalar": (
        ["batch temperature: is a scalar, which has no examples"],
        '("temperature", spmd.whole("why"))',
    ),
    "loop": (["batch x: is gone through in order"], '("x", P(None, ("data", "fsdp", "expert")))'),
    "cumulative": (["batch x: is gone through in order"], '("x", P(("data", "fsdp", "expert")))'),
    "steps": (
        ["batch: has arrays with different numbers of examples", "temperature: 8, x: 6"],
        'Rules(batch=[("x", P(None, ("data", "fsdp", "expert")))])',
    ),
}
"""Case → words of the error without its rows, and of the fix."""


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_that_are_not_declared_are_refused(name):
    """The error names the array and the row to write, before anything is compiled."""
    words, fix = REFUSED[name]
    step = step_of(name, 2, declared=False)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), CASES[name][1])
    with pytest.raises(ConfigError, match="The batch cannot be split into microbatches:") as caught:
        step.trace(batch)
    assert all(word in str(caught.value) for word in (*words, fix)), str(caught.value)


def test_a_batch_without_examples_is_refused():
    """Microbatches that are the whole batch each would compute the same again."""
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), CASES["one graph"][1])
    with pytest.raises(ConfigError, match="batch: has no array with examples"):
        step_of("one graph", 2).trace(batch)


@pytest.mark.parametrize(
    ("name", "microbatches"), [("batch", 2), ("sum", 2), ("chunks", 2), ("graph", 1)]
)
def test_what_needs_no_row(name, microbatches):
    """A recurrent layer over steps behind the examples, and a batch that is not split at all, are not refused."""
    step = step_of(name, microbatches, declared=False)
    step.trace(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), CASES[name][1]))


def test_the_scan_of_a_layer_is_no_time():
    """A loop over layers, with the examples in its carry, is none over examples."""
    layers = np.ones((3, 4, 4), np.float32) / 4

    def loss_fn(params, variables, batch, key):
        y = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), batch, params)[0]
        return {"loss": (y**2).sum(), "weight": jnp.float32(y.size)}, variables

    x, key = normal(8, 4), jax.random.key(0)
    one, four = (
        jax.jit(accumulate(value_and_grad(loss_fn), n))(layers, Carry(), x, key)[0] for n in (1, 4)
    )
    np.testing.assert_allclose(four, one, rtol=1e-5)


def test_a_smaller_batch_has_fewer_microbatches():
    """As large as those of the largest batch, or smaller; its gradients are those of the batch at once."""
    kernel = np.ones((4, 2), np.float32)

    def loss_fn(params, variables, batch, key):
        return {"loss": ((batch @ params) ** 2).sum(), "weight": jnp.float32(len(batch))}, variables

    grad_fn = accumulate(value_and_grad(loss_fn), 4, examples=16)
    for rows, parts in ((16, [4]), (12, [3]), (4, []), (6, [2])):
        arguments = kernel, Carry(), normal(rows, 4), jax.random.key(0)
        jaxpr = jax.make_jaxpr(grad_fn)(*arguments)
        scans = [each for each in jaxpr.eqns if each.primitive.name == "scan"]
        assert [scan.params["length"] for scan in scans] == parts
        whole = value_and_grad(loss_fn)(*arguments)[0]
        np.testing.assert_allclose(grad_fn(*arguments)[0], whole, rtol=1e-5)


# The split itself.


def split(batch, microbatches, *rows):
    with override(batch=BatchTable(rows)):
        return split_microbatches(batch, microbatches)


def test_microbatches_take_turns():
    """Microbatch i has the examples i, i + n, …, of any dimension, and arrays without examples whole."""
    batch = {"x": jnp.arange(6), "y": jnp.arange(12).reshape(2, 6), "graph": jnp.arange(3)}
    parts, shared = split(batch, 3, ("y", TIME_MAJOR), ("graph", ONE_GRAPH))
    assert parts["x"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert parts["y"].tolist() == [[[0, 3], [6, 9]], [[1, 4], [7, 10]], [[2, 5], [8, 11]]]
    assert shared["graph"].tolist() == [0, 1, 2]
    part = join_microbatch(batch, {path: x[1] for path, x in parts.items()}, shared)
    assert jax.tree.map(lambda x: x.tolist(), part) == {
        "x": [1, 4],
        "y": [[1, 4], [7, 10]],
        "graph": [0, 1, 2],
    }


@pytest.mark.parametrize(
    ("batch", "rows", "words"),
    [
        ({"x": np.ones(4), "y": np.ones(6)}, (), "x: 4, y: 6"),
        ({"x": np.ones(5), "y": np.ones(5)}, (), "5 / 2 = 2.5"),
        ({"x": np.ones(4), "y": np.float32(1)}, (), "is a scalar"),
        ({"x": np.ones(4)}, (("x", TIME_MAJOR),), "has no dimension 1 for examples"),
        ({"x": np.ones((4, 6)), "y": np.ones(4)}, (("x", TIME_MAJOR),), "x: 6, y: 4"),
    ],
)
def test_numbers_of_examples(batch, rows, words):
    """Arrays with different numbers of examples, none, or one that does not divide are refused."""
    with pytest.raises(ConfigError) as caught:
        split(batch, 2, *rows)
    assert words in str(caught.value)


def test_a_batch_that_is_one_array():
    """An array that is the whole batch is split by its first dimension; a pair of arrays by its own paths."""
    parts, shared = split(jnp.arange(4), 2)
    assert join_microbatch(
        jnp.arange(4), {path: x[0] for path, x in parts.items()}, shared
    ).tolist() == [0, 2]
    parts, shared = split((jnp.arange(4), jnp.arange(3)), 2, ("1", ONE_GRAPH))
    assert [*parts] == ["0"]
    assert [*shared] == ["1"]


@pytest.mark.parametrize("microbatches", [0, -1, 1.5, "2"])
def test_the_number_of_microbatches(microbatches):
    """It is a whole number, at least 1."""
    with pytest.raises(ConfigError, match="at least 1"):
        accumulate(value_and_grad(lambda *_: None), microbatches)
