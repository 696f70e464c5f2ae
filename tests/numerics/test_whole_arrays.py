"""Arrays of a batch that are marked whole: every device, microbatch and stage sees all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import ConfigError, MeshError, RuleError
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.deferred_reduction import defer_grad_reduction
from spmd.gradients.losses import ModelLoss, cross_entropy
from spmd.pipedream.grad_fn import InFlight
from spmd.pipeline.grad_fn import pipeline
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import tabulate
from spmd.testing import token_batches
from tests import tiny
from tests.one_device import Job

RULES = spmd.Rules([("up", P("fsdp", "tensor")), ("down", P("tensor", "fsdp"))])
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
BOTH = ("data", "fsdp")
RNG = np.random.default_rng(0)
MODEL = spmd.Model(
    lambda key: {
        "up": jax.random.normal(key, (4, 16)) / 2,
        "down": jax.random.normal(jax.random.fold_in(key, 1), (16, 4)) / 4,
    },
    lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"],
)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def of(marked):
    """Arrays with or without a mark."""
    return getattr(marked, "value", marked)


def loss_fn(params, variables, batch, key):
    """Distance to the nearest center, as a soft minimum, and to the outputs of a teacher."""
    y = MODEL.apply(params, batch["x"])
    squares = jnp.square(y[:, None] - of(batch["centers"])[None]).sum(-1)
    near = -jax.nn.logsumexp(-squares, axis=1)
    far = jnp.square(y - MODEL.apply(of(batch["teacher"]), batch["x"])).sum(-1)
    return {"loss": (near + far).sum(), "weight": jnp.float32(len(y))}, variables


def placed_teacher():
    """Parameters split as those of another plan."""
    mesh = tiny.mesh(**SIZES)
    rows = {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp")}
    teacher = {"up": normal(4, 16), "down": normal(16, 4)}
    return {name: jax.device_put(x, NamedSharding(mesh, rows[name])) for name, x in teacher.items()}


@functools.cache
def batch():
    return {
        "x": normal(16, 4),
        "centers": spmd.whole(normal(3, 4)),
        "teacher": spmd.whole(placed_teacher()),
    }


@functools.cache
def job():
    """Steps on one device, without microbatches."""
    return Job(MODEL, RULES, value_and_grad(loss_fn), [batch()])


def unmarked():
    """The same batch; its centers have no mark."""
    return {**batch(), "centers": batch()["centers"].value}


@pytest.mark.parametrize(
    "grad_fn",
    [
        accumulate(value_and_grad(loss_fn), 4),
        defer_grad_reduction(accumulate(value_and_grad(loss_fn), 2), BOTH),
    ],
    ids=["accumulated", "deferred"],
)
def test_microbatches_have_whole_arrays(grad_fn):
    """Loss, gradients and updates are those of one device; without the mark the step is refused."""
    result = job().assert_parity(grad_fn=grad_fn, **SIZES)
    np.testing.assert_allclose(result.losses, result.reference_losses, rtol=1e-5)
    plan = spmd.make_plan(tiny.mesh(**SIZES), RULES, MODEL, optax.sgd(0.1))
    step = spmd.make_train_step(plan, grad_fn=grad_fn)
    with pytest.raises((ConfigError, MeshError), match=r"centers|examples"):
        step(spmd.init_state(plan), unmarked())


def test_a_placed_array_keeps_its_sharding(tmp_path):
    """The compiled step takes a teacher as it is split; a run counts the examples of other arrays."""
    plan = spmd.make_plan(tiny.mesh(**SIZES), RULES, MODEL, optax.sgd(0.1))
    step = spmd.make_train_step(plan, loss_fn)
    given, _ = step.compile(batch()).input_shardings
    _, shardings = given
    teacher = shardings["teacher"].value
    assert teacher["up"].is_equivalent_to(plan.abstract_params["up"].sharding, 2)
    assert not teacher["up"].is_fully_replicated
    assert shardings["centers"].value.is_fully_replicated
    run = spmd.Run(tmp_path, step, lambda *_: [batch()], config=spmd.RunConfig())
    assert run.examples == 16
    placed = step.place_batch(batch())
    assert placed["teacher"].value["up"] is batch()["teacher"].value["up"]


@functools.cache
def stage_job():
    """A pipeline's loss with the weights of classes, which come with the batch."""
    model = tiny.model()

    def sums(outputs, batch):
        weights = batch["weights"] * of(batch["class_weights"])[batch["targets"]]
        return cross_entropy(outputs.logits, batch["targets"], weights)

    loss = ModelLoss(model, lambda batch: (batch["tokens"],), sums)
    (batch,) = token_batches((16, 16), tiny.CONFIG.vocab, steps=1)
    class_weights = spmd.whole(np.abs(normal(tiny.CONFIG.vocab)))
    return Job(
        model, tiny.LLAMA, value_and_grad(loss), [{**batch, "class_weights": class_weights}]
    ), loss


def test_stages_have_whole_arrays():
    """A pipeline with four microbatches; without the mark it is refused."""
    job, loss = stage_job()
    grad_fn = pipeline(loss, tabulate(make_schedule("1f1b", 2, 4, 1)))
    job.assert_parity(grad_fn=grad_fn, pipe=2, data=2, fsdp=2)
    plan = tiny.plan(pipe=2, data=2, fsdp=2)
    (batch,) = job.batches
    bare = {**batch, "class_weights": batch["class_weights"].value}
    with pytest.raises(ConfigError, match="different numbers of examples"):
        spmd.make_train_step(plan, grad_fn=grad_fn).trace(bare)


def test_a_row_copies_an_array_on_the_mesh_to_every_device():
    """The same array with a mark stays split."""
    rules = spmd.Rules(RULES.params, batch=[("teacher/.*", spmd.whole("of another plan"))])
    plan = spmd.make_plan(tiny.mesh(**SIZES), rules, MODEL, optax.sgd(0.1))
    x = spmd.place_batch(plan, {"x": normal(8, 4)})["x"]
    teacher = batch()["teacher"].value
    placed = spmd.place_batch(plan, {"x": x, "teacher": teacher})
    assert placed["teacher"]["up"].is_fully_replicated
    assert placed["x"] is x
    marked = spmd.place_batch(plan, {"x": x, "teacher": spmd.whole(teacher)})
    assert marked["teacher"].value["up"] is teacher["up"]
    sharding = teacher["up"].sharding
    on_host = jax.device_put(teacher["up"], sharding.with_memory_kind("pinned_host"))
    fetched = spmd.place_batch(plan, {"x": x, "up": spmd.whole(on_host)})["up"].value
    assert fetched.sharding.is_equivalent_to(sharding, 2)
    assert fetched.sharding.memory_kind == "device"


def test_what_cannot_be_marked():
    """Nothing, numbers, arrays of another mesh, and arrays that stay in flight between steps."""
    for nothing in ({}, [1, 2]):
        with pytest.raises(RuleError, match="is not made of arrays"):
            spmd.whole(nothing)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("rows"))
    other = jax.device_put(normal(4, 2), sharding)
    plan = spmd.make_plan(tiny.mesh(**SIZES), RULES, MODEL, optax.sgd(0.1))
    with pytest.raises(MeshError, match="split over rows, which the plan's mesh does not have"):
        spmd.place_batch(plan, {"x": normal(8, 4), "other": spmd.whole(other)})
    job, loss = stage_job()
    with pytest.raises(ConfigError, match="batch class_weights: is a WholeArrays"):
        InFlight.of(loss, tabulate(make_schedule("pipedream", 2, 4, 1)), job.batches[0])
