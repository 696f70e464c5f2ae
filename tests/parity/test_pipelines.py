"""A pipeline gives the numbers of one device, under every schedule it executes and beside every other axis."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from spmd.errors import ConfigError
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.model_interface.model import Model
from spmd.models.decoder import embedding
from spmd.models.mixtral import PRESETS as MIXTRALS
from spmd.models.mixtral import mixtral
from spmd.partition_rules.mixtral import MIXTRAL, MIXTRAL_SHARED
from spmd.pipeline.grad_fn import pipeline, pipelined
from spmd.pipeline.schedule_files import read_schedule
from spmd.pipeline.schedules import make_schedule
from spmd.pipeline.tick_table import TickTable, tabulate
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import ShardingPlan, make_plan
from spmd.precision import make_precision
from spmd.testing import Parity, Reference, Tolerance, token_batches
from spmd.training.batch import place_batch
from spmd.training.state import init_state
from spmd.training.step import make_eval_step, make_train_step
from tests import tiny
from tests.one_device import REORDERED
from tests.rounding import EPS, FACTOR

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
MICROBATCHES = 4
BATCHES = token_batches((16, 16), tiny.CONFIG.vocab, steps=2)


@functools.cache
def tick_table(schedule: str, stages: int, microbatches: int = MICROBATCHES) -> TickTable:
    return tabulate(
        make_schedule(schedule, stages, microbatches, 2 if schedule == "interleaved" else 1)
    )


@functools.cache
def alone(layers: int = 4, tied: bool = False):
    """What every pipeline is compared with: the same microbatches one after the other."""
    config = tiny.replaced(layers=layers, tied=tied)
    grad_fn = accumulate(value_and_grad(tiny.loss_fn(config)), MICROBATCHES)
    return Reference(tiny.plan(config, OPTIMIZER), grad_fn, BATCHES)


def parity(table: TickTable, layers: int = 4, tied: bool = False, options: tuple = (), **axes: int):
    config = tiny.replaced(layers=layers, tied=tied)
    plan = tiny.plan(config, OPTIMIZER, options, pipe=table.stages, **axes)
    return alone(layers, tied).compare(
        plan, pipeline(tiny.loss_fn(config), table), tolerance=REORDERED
    )


def assert_equal(table: TickTable, **layout):
    result = parity(table, **layout)
    assert result.ok, f"\n{result}"


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("1f1b", 4),
        *(pytest.param(name, 4, marks=pytest.mark.soak) for name in ("gpipe", "interleaved")),
    ],
)
def test_four_stages_equal_one_device(schedule, stages):
    """Losses, gradients and parameters after two steps agree but for the order of sums; two stages are in the table."""
    assert_equal(tick_table(schedule, stages), layers=8 if schedule == "interleaved" else 4)


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_stages_that_are_split_both_ways(schedule):
    """Three axes together, with a tied embedding, which is summed once."""
    assert_equal(tick_table(schedule, 2), tied=True, fsdp=2, tensor=2)


@pytest.mark.soak
def test_a_tied_head_is_exchanged_over_tensor_alone(monkeypatch):
    """Where a ZeRO stage keeps the table whole over fsdp, no permute is in a stage's task, where XLA:CPU would hang."""
    config = tiny.replaced(layers=4, tied=True)
    plan = tiny.plan(config, OPTIMIZER, (("zero", 1),), pipe=2, fsdp=2, tensor=2)

    def compile_step():
        step = make_train_step(plan, grad_fn=pipeline(tiny.loss_fn(config), tick_table("1f1b", 2)))
        return step.compile(BATCHES[0])

    compile_step()
    whole, split = embedding.placement_of, P(None, ("fsdp", "tensor"))
    monkeypatch.setattr(
        embedding, "placement_of", lambda path: dataclasses.replace(whole(path), param_spec=split)
    )
    exchanged = rf"f32\[1,{config.vocab},{config.d_model // 4}\]: is moved between devices inside"
    with pytest.raises(ConfigError, match=exchanged):  # the control: it is split over fsdp, too
        compile_step()


@pytest.mark.soak
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_tied_head_beside_every_stage_of_zero(zero):
    """The numbers are those of one device, whatever is kept whole over fsdp; ZeRO 3 is above."""
    assert_equal(tick_table("1f1b", 2), tied=True, options=(("zero", zero),), fsdp=2, tensor=2)


def test_a_schedule_from_a_file(tmp_path):
    """Microbatches may go backward in an order of the user's own."""
    path = tmp_path / "mine.csv"
    path.write_text("F0,F1,,,BW1,BW0,F2,F3,,,BW3,BW2\n,F0,F1,BW1,BW0,,,F2,F3,BW3,BW2,\n")
    assert_equal(tabulate(read_schedule(path)))


def test_a_dropped_microbatch_is_noticed():
    """The control: gradients of three of four microbatches are no gradients of the batch."""
    whole = tick_table("1f1b", 2)
    idle = {
        name: np.where(getattr(whole, name) == 1, -1, getattr(whole, name))
        for name in ("forward", "backward")
    }
    result = parity(dataclasses.replace(whole, **idle))
    assert {row.what for row in result.rows if not row.ok} == {"gradients", "loss"}


@pytest.mark.parametrize(
    ("recompute", "column"), [(False, "backward_saved_slot"), (True, "backward_slot")]
)
def test_a_stale_slot_is_noticed(recompute, column):
    """The control of the slots: a backward task that reads what another microbatch left gives other gradients."""
    whole = tabulate(make_schedule("1f1b", 2, MICROBATCHES), recompute=recompute)
    right = getattr(whole, column)
    stale = np.where(right > 0, right - 1, right)
    assert not parity(dataclasses.replace(whole, **{column: stale})).ok


ROUTED = dataclasses.replace(
    MIXTRALS["test"],
    layers=4,
    router=dataclasses.replace(MIXTRALS["test"].router, balance=0.1, z_loss=0.01),
)


@functools.cache
def routed() -> Model:
    return from_nnx(ROUTED.build)


def routed_plan(**axes: int) -> ShardingPlan:
    return make_plan(tiny.mesh(**axes), MIXTRAL, routed(), OPTIMIZER)


@functools.cache
def routed_alone(train: bool = True) -> Reference:
    """What every pipeline with experts is compared with; in evaluation there are no auxiliary losses."""
    grad_fn = accumulate(value_and_grad(next_token_loss(routed(), train=train)), MICROBATCHES)
    return Reference(routed_plan(), grad_fn, token_batches((16, 16), ROUTED.vocab, steps=2))


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_experts_and_their_losses(schedule):
    """Routers' losses and metrics of all stages are those of one device, beside expert and data parallelism."""
    grad_fn = pipeline(next_token_loss(routed()), tick_table(schedule, 2))

    def compared(reference: Reference) -> Parity:
        return reference.compare(
            routed_plan(pipe=2, expert=2, data=2), grad_fn, tolerance=REORDERED
        )

    result = compared(routed_alone())
    assert result.ok, f"\n{result}"
    assert not compared(routed_alone(train=False)).ok, (
        "the control: auxiliary losses are a part of the loss"
    )


@pytest.mark.soak
def test_first_layers_of_another_kind():
    """Dense first layers that the table does not split over `pipe` run before the stages; the numbers are the same."""
    shape = mixtral(
        *(64, 32, 6, 4, 2, 16),
        dense_layers=2,
        dense_d_ff=64,
        shared_d_ff=16,
        router=MIXTRALS["test"].router,
    )
    rules = MIXTRAL_SHARED
    loss_fn = next_token_loss(from_nnx(shape.build))

    def plan(**axes):
        return make_plan(tiny.mesh(**axes), rules, loss_fn.model, OPTIMIZER)

    alone = Reference(plan(), accumulate(value_and_grad(loss_fn), MICROBATCHES), BATCHES)
    assert alone.compare(
        plan(pipe=2), pipeline(loss_fn, tick_table("1f1b", 2)), tolerance=REORDERED
    ).ok
    control = alone.compare(plan(), value_and_grad(loss_fn), tolerance=REORDERED)
    assert not control.ok, "the control: routers' losses of a batch"


@pytest.mark.soak
def test_loss_scaling():
    """What is differentiated is the scaled loss, and its gradients are scaled back, as on one device."""
    precision = make_precision("fp16")
    precision = dataclasses.replace(
        precision, loss_scale=dataclasses.replace(precision.loss_scale, initial=8.0)
    )
    config = tiny.replaced(layers=4)
    model = tiny.model(config)
    loss_fn = next_token_loss(model)

    def plan(**axes):
        return make_plan(
            tiny.mesh(**axes), tiny.plan(config).rules, model, OPTIMIZER, precision=precision
        )

    alone = Reference(plan(), accumulate(value_and_grad(loss_fn), MICROBATCHES), BATCHES)
    tolerance = Tolerance(loss=1e-3, gradients=2e-2, updates=3e-5)
    result = alone.compare(
        plan(pipe=2, data=2), pipeline(loss_fn, tick_table("1f1b", 2)), tolerance=tolerance
    )
    assert result.ok, f"\n{result}"
    assert not any("both sides" in row.why for row in result.rows), "nothing overflows"


def test_evaluation_goes_through_the_stages():
    """The sums of a batch that goes through the stages are those of one device; one microbatch fewer has others.

    The first of four stages has two of the five layers.
    """
    config = tiny.replaced(layers=5)
    loss_fn = next_token_loss(tiny.model(config), train=False)
    whole = tiny.plan(config, OPTIMIZER)
    plan = tiny.plan(config, OPTIMIZER, pipe=4, fsdp=2)

    def sums(plan, loss_fn, batch):
        state = init_state(plan)
        placed = place_batch(plan, batch)
        return jax.device_get(make_eval_step(plan, loss_fn)(state.params, state.variables, placed))

    expected = sums(whole, loss_fn, BATCHES[0])
    found = sums(plan, pipelined(loss_fn, 4, MICROBATCHES), BATCHES[0])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=FACTOR * EPS, err_msg=name)
    fewer = {**BATCHES[0], "weights": jnp.asarray(BATCHES[0]["weights"]).at[::MICROBATCHES].set(0)}
    assert sums(whole, loss_fn, fewer)["loss"] != pytest.approx(float(expected["loss"]), rel=1e-2)


@pytest.mark.soak
@pytest.mark.parametrize("remat", ["none", "full/2"])
@pytest.mark.parametrize("unroll", [2, 3])
def test_unrolled_layers_of_a_stage_are_those_of_one_device(unroll: int, remat: str):
    """In groups of equal size, since a stage is a region that is manual over `pipe`; six layers are three for each."""
    config = tiny.replaced(layers=6, unroll=unroll)
    plan = tiny.plan(config, OPTIMIZER, (("remat", remat),), pipe=2, fsdp=2)
    result = alone(6).compare(
        plan, pipeline(tiny.loss_fn(config), tick_table("1f1b", 2)), tolerance=REORDERED
    )
    assert result.ok, str(result)
