"""The loss scale moves as it does elsewhere, changes no number that fits, and leaves out steps that do not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import ConfigError
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.gradients.keep_carry import KeepCarry
from spmd.loss_scaling.loss_scale import LossScale
from spmd.model_interface.grad_transform import Carry
from spmd.model_interface.model import Model
from spmd.optim.skip_updates import skip_bad_updates, skipped_steps
from spmd.plan.context import override, use_plan
from spmd.plan.plan import make_plan
from spmd.precision import POLICIES, Precision
from spmd.sharding.mesh import make_mesh
from spmd.sharding.rules import Rules
from spmd.training.state import init_state
from spmd.training.step import make_eval_step, make_train_step

BAD, GOOD = False, True


def trajectory(scaling, finite):
    """The scale after each step."""
    scales, state = [], scaling.start()
    for flag in finite:
        state = scaling.after(state, jnp.array(flag))
        scales.append(float(state["scale"]))
    return scales


def deepspeed(finite, initial, window):
    """The recurrence of DeepSpeed's `FP16_Optimizer._update_scale`, as its source states it, at commit 023f361."""
    scale, last, scales = float(initial), -1, []
    for step, flag in enumerate(finite):
        if not flag:
            scale, last = max(scale / 2, 1.0), step
        elif (stable := step - last - 1) > 0 and stable % window == 0:
            scale *= 2
        scales.append(scale)
    return scales


# `delayed_shift` is the hysteresis of DeepSpeed's DynamicLossScaler.
@pytest.mark.parametrize(
    ("fields", "finite", "expected"),
    [
        # Published: the unit tests of DeepSpeed (deepspeedai/DeepSpeed,
        # tests/unit/runtime/half_precision, test_dynamic_loss_scale.py): no overflow, all overflow,
        # some overflow, with a minimum of 1 and of 0.25.
        (
            {"initial": 256, "growth_interval": 2},
            [GOOD] * 7,
            [256, 256, 512, 512, 1024, 1024, 2048],
        ),
        ({"initial": 16, "growth_interval": 2}, [BAD] * 8, [8, 4, 2, 1, 1, 1, 1, 1]),
        (
            {"initial": 16, "growth_interval": 2, "floor": 0.25},
            [BAD] * 8,
            [8, 4, 2, 1, 0.5, 0.25, 0.25, 0.25],
        ),
        ({"initial": 256, "growth_interval": 2}, [BAD, BAD], [128, 64]),
        (
            {"initial": 256, "growth_interval": 2},
            [BAD, BAD, GOOD, GOOD, GOOD],
            [128, 64, 64, 64, 128],
        ),
        (
            {"initial": 256, "growth_interval": 2},
            [BAD, BAD, GOOD, GOOD, GOOD, BAD],
            [128, 64, 64, 64, 128, 64],
        ),
        # By its rules: hysteresis is used up by steps that need not be in a row, and renewed when
        # the scale grows.
        ({"hysteresis": 2}, [BAD, BAD, BAD], [16, 8, 4]),
        ({"hysteresis": 2, "growth_interval": 3}, [BAD, GOOD, BAD], [16, 16, 8]),
        (
            {"hysteresis": 2, "growth_interval": 2},
            [BAD, GOOD, GOOD, GOOD, BAD, BAD],
            [16, 16, 16, 32, 32, 16],
        ),
        (
            {"growth_interval": 1, "growth_factor": 4.0, "backoff_factor": 0.25},
            [GOOD, GOOD, BAD],
            [16, 64, 16],
        ),
        ({"floor": 8.0}, [BAD, BAD], [8, 8]),
        # A ceiling, and a minimum gap between divisions, also where the scale grows in between.
        ({"initial": 2.0**99, "growth_interval": 1}, [GOOD] * 3, [2.0**99, 2.0**100, 2.0**100]),
        ({"growth_interval": 1, "ceiling": 24.0}, [GOOD] * 4 + [BAD], [16, 24, 24, 24, 12]),
        ({"backoff_interval": 3}, [BAD] * 7, [8, 8, 8, 4, 4, 4, 2]),
        ({"backoff_interval": 3}, [BAD, GOOD, GOOD, GOOD, BAD, BAD], [8, 8, 8, 8, 4, 4]),
        (
            {"backoff_interval": 4, "growth_interval": 1},
            [BAD, GOOD, GOOD, BAD, BAD],
            [8, 8, 16, 16, 8],
        ),
        ({"backoff_interval": 2, "hysteresis": 2}, [BAD] * 5, [16, 8, 8, 4, 4]),
    ],
)
def test_the_scale_moves_as_published(fields, finite, expected):
    """Backoff to the floor, growth after so many good steps more, hysteresis, the ceiling and the gap."""
    assert trajectory(LossScale(**{"initial": 16, "hysteresis": 1, **fields}), finite) == expected


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_the_scale_moves_as_deepspeeds(window):
    """Whatever overflows when, the scale is DeepSpeed's after every step."""
    scaling = LossScale(initial=256, growth_interval=window, hysteresis=1)
    for seed in range(3):
        finite = np.random.default_rng(seed).random(60) > 0.15
        assert trajectory(scaling, finite) == deepspeed(finite, 256, window)


def test_a_state_of_before_goes_on():
    """The state has the names it always had, so that checkpoints of before this rule are restored."""
    assert {
        name: float(x) for name, x in LossScale(initial=16, growth_interval=2).start().items()
    } == {
        "scale": 16,
        "good_steps": 0,
        "hysteresis": 2,
    }


def test_what_is_out_of_range_is_listed():
    """One error has every field that cannot be used."""
    with pytest.raises(ConfigError) as caught:
        LossScale(
            0.5,
            growth_interval=0,
            growth_factor=1.0,
            backoff_factor=1.0,
            backoff_interval=0,
            hysteresis=0,
        )
    names = (
        "backoff_factor",
        "backoff_interval",
        "growth_factor",
        "growth_interval",
        "hysteresis",
        "initial",
    )
    assert [problem.where for problem in caught.value.problems] == [
        f"loss_scale.{name}" for name in names
    ]
    for fields, wrong in (
        ({"ceiling": 512.0}, "initial"),
        ({"initial": 2.0, "floor": 2.0, "ceiling": 1.0}, "ceiling"),
    ):
        with pytest.raises(ConfigError) as caught:
            LossScale(**fields)
        assert f"loss_scale.{wrong}" in [problem.where for problem in caught.value.problems]


WIDTH = 8
RULES = Rules([("kernel", P("fsdp", "tensor")), ("mean", P("tensor"))])
SCALING = LossScale(initial=4.0, growth_interval=2, hysteresis=1)
PRECISION = Precision("scaled float32", params="float32", compute="float32", loss_scale=SCALING)


def forward(params, variables, key, x, *, train):
    """A layer that keeps a mean of what it has seen."""
    del key
    y = x @ params["kernel"]
    return y, {"mean": 0.9 * variables["mean"] + 0.1 * y.mean(axis=0)} if train else variables


MODEL = Model(
    lambda key: {"kernel": jax.random.normal(key, (WIDTH, WIDTH))},
    lambda params, x: x @ params["kernel"],
    lambda key: {"mean": jnp.zeros(WIDTH)},
    forward,
)
OPTIMIZER = optax.adam(0.1)


def loss_fn(params, variables, batch, key):
    """Knows nothing of scaling."""
    y, variables = MODEL.forward(params, variables, key, batch["x"], train=True)
    losses = ((y - 1) ** 2).mean(axis=-1)
    return {"loss": (losses * batch["weights"]).sum(), "weight": batch["weights"].sum()}, variables


GRAD_FN = value_and_grad(loss_fn)


def batch(seed, spoilt=False):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(8, WIDTH)).astype(np.float32)
    x[3, 2] = np.inf if spoilt else x[3, 2]
    return {"x": x, "weights": (rng.random(8) > 0.3).astype(np.float32)}


@functools.cache
def plan(precision=PRECISION, optimizer=OPTIMIZER, **sizes):
    return make_plan(
        make_mesh(devices=jax.devices()[: 8 if sizes else 1], **sizes),
        RULES,
        MODEL,
        optimizer,
        precision=precision,
    )


def train(layout, batches, grad_fn=GRAD_FN):
    step, state, metrics = make_train_step(layout, grad_fn=grad_fn), init_state(layout), []
    for one in batches:
        one = spmd.place_batch(layout, one)
        state, more = step(state, one)
        metrics.append(jax.device_get(more))
    return jax.device_get(state), metrics


@pytest.mark.parametrize("microbatches", [1, 2])
def test_scaling_changes_no_number_that_fits(microbatches):
    """Losses, gradients' norms and parameters are those without scaling, whatever the scale does meanwhile."""
    grad_fn, batches = accumulate(GRAD_FN, microbatches), [batch(seed) for seed in range(5)]
    scaled, scaled_metrics = train(plan(), batches, grad_fn)
    plain, metrics = train(plan(POLICIES["float32"]), batches, grad_fn)
    # Equal but for the order in which the compiler fuses arithmetic.
    for ours, theirs in (
        (scaled.params, plain.params),
        (scaled_metrics, metrics),
        (scaled.variables["mean"], plain.variables["mean"]),
    ):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), ours, theirs
        )
    # grew after 3 and 5 steps, not with each microbatch
    assert float(scaled.transforms["loss_scale"]["scale"]) == 16.0


def test_gradients_inside_are_scaled():
    """What is differentiated is the scaled loss, and what is reported is not: the control of the test above."""
    params, carry = (
        {"kernel": jnp.eye(WIDTH)},
        Carry({"mean": jnp.zeros(WIDTH)}, {"loss_scale": SCALING.start()}),
    )
    key = jax.random.key(0)
    plain, sums, _ = GRAD_FN(params, carry, batch(0), key)
    with use_plan(plan()):
        inside, scaled_sums, after = GRAD_FN(params, carry, batch(0), key)
    np.testing.assert_array_equal(inside["kernel"], 4 * plain["kernel"])
    assert float(sums["loss"]) == float(scaled_sums["loss"])
    assert (after.variables.keys(), after.transforms.keys()) == ({"mean"}, {"loss_scale"})


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 4, "tensor": 2}, {"data": 8}], ids=str)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_that_overflows_changes_nothing_but_the_scale(sizes, microbatches):
    """Parameters, moments and statistics stay, on every device, the step is counted, and the next step is taken."""
    grad_fn, layout = accumulate(GRAD_FN, microbatches), plan(**sizes)
    before, _ = train(layout, [batch(0)], grad_fn)
    skipped, metrics = train(layout, [batch(0), batch(1, spoilt=True)], grad_fn)
    assert not np.isfinite(metrics[1]["gradient_norm"])
    assert int(skipped_steps(skipped.optimizer_state)) == 1
    assert int(skipped.step) == 2
    jax.tree.map(np.testing.assert_array_equal, before.params, skipped.params)
    jax.tree.map(
        np.testing.assert_array_equal, before.optimizer_state.inner, skipped.optimizer_state.inner
    )
    np.testing.assert_array_equal(before.variables["mean"], skipped.variables["mean"])
    assert float(skipped.transforms["loss_scale"]["scale"]) == 2.0
    after, _ = train(layout, [batch(0), batch(1, spoilt=True), batch(2)], grad_fn)
    assert np.isfinite(after.variables["mean"]).all()
    assert not np.array_equal(before.params["kernel"], after.params["kernel"])


def test_every_device_holds_the_same_scale():
    """It is whole everywhere, and the plan says why."""
    layout = plan(fsdp=4, tensor=2)
    lines = [str(leaf) for leaf in layout.transform_states if leaf.path.startswith("loss_scale")]
    assert len(lines) == 3
    assert all("every device scales by the same number" in line for line in lines)
    step = make_train_step(layout, grad_fn=GRAD_FN)
    one = spmd.place_batch(layout, batch(0, spoilt=True))
    state, _ = step(init_state(layout), one)
    held = {
        float(shard.data) for shard in state.transforms["loss_scale"]["scale"].addressable_shards
    }
    assert held == {2.0}


def test_statistics_survive_a_skipped_step_without_scaling():
    """`KeepCarry` is to variables what `skip_bad_updates` is to parameters; without it they are lost for good."""
    layout = plan(POLICIES["float32"], skip_bad_updates(OPTIMIZER))
    kept, _ = train(layout.with_transforms(KeepCarry()), [batch(0), batch(1, spoilt=True)])
    assert np.isfinite(kept.variables["mean"]).all()
    assert int(skipped_steps(kept.optimizer_state)) == 1
    lost, _ = train(layout, [batch(0), batch(1, spoilt=True)])
    assert not np.isfinite(lost.variables["mean"]).all()  # control


def test_evaluation_and_the_model_do_not_mind_the_scale():
    """A loss function that knows nothing of it evaluates, and so does the plan's own model."""
    layout = plan()
    state = init_state(layout)
    sums = make_eval_step(layout, loss_fn)(state.params, state.variables, batch(0))
    assert np.isfinite(float(sums["loss"]))
    outputs, after = layout.model.forward(
        state.params, state.variables, None, batch(0)["x"], train=True
    )
    assert outputs.shape == (8, WIDTH)
    assert sorted(after) == ["mean"]


def test_float16_gradients_vanish_without_a_scale():
    """A gradient below what float16 holds is zero without scaling and right with it."""

    def small(params, variables, batch, key):
        y = (batch["x"].astype(jnp.float16) * params["w"].astype(jnp.float16)).astype(jnp.float32)
        return {"loss": (y * 1e-9).sum(), "weight": jnp.float32(1)}, variables

    args = ({"w": jnp.ones(4)}, {"x": jnp.ones(4)}, jax.random.key(0))
    scaling = LossScale(initial=2.0**15)
    grad_fn, carry = value_and_grad(small), Carry({}, {"loss_scale": scaling.start()})
    gradients = [grad_fn(args[0], carry, *args[1:])[0]["w"]]
    with override(transforms=(scaling,)):
        gradients.append(scaling.wrap(grad_fn)(args[0], carry, *args[1:])[0]["w"])
    assert float(jnp.abs(gradients[0]).max()) == 0.0
    np.testing.assert_allclose(gradients[1], 1e-9, rtol=1e-3)


def test_equal_plans_have_equal_optimizers():
    """Wrapping the optimizer for a precision gives the same object again, so equal plans compare equal."""
    ours, again = (
        make_plan(
            make_mesh(fsdp=8), RULES, MODEL, OPTIMIZER, precision=dataclasses.replace(PRECISION)
        )
        for _ in "ab"
    )
    assert ours == again
    assert ours.optimizer is again.optimizer
