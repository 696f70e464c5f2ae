"""The average of the parameters is optimizer state: right on any mesh, saved, evaluated, and untouched by a skip."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.checkpoint.manager import CheckpointManager
from spmd.errors import ConfigError
from spmd.run.load_params import restore_model

DECAY, STEPS = 0.9, 6
RULES = spmd.Rules(params=[("w", P("fsdp", "tensor"))], activations=[])
MODEL = spmd.Model(
    lambda key: {"w": jax.random.normal(key, (4, 2))}, lambda params, x: x @ params["w"]
)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
CONFIG = spmd.RunConfig(
    steps=STEPS, checkpoint_every=3, max_to_keep=9, evaluate=spmd.EvaluationInterval(every=3)
)


def loss_fn(params, variables, batch, key):
    """Sum of squares."""
    error = MODEL.apply(params, batch["x"]) - batch["y"]
    return {"loss": (error**2).sum(), "weight": jnp.float32(8)}, variables


def numbers(start, steps):
    """Batches, each from its own number."""
    for n in range(start, steps):
        x = np.random.default_rng(n).normal(size=(8, 4)).astype(np.float32)
        yield {"x": x, "y": x[:, :2]}


@functools.cache
def plan(optimizer=None, **options):
    mesh = spmd.make_mesh(data=2, fsdp=2, tensor=2)
    return spmd.make_plan(
        mesh, RULES, MODEL, optimizer or spmd.with_ema(OPTIMIZER, DECAY), **options
    )


@functools.cache
def step():
    return spmd.make_train_step(plan(), loss_fn)


def run(folder, **fields):
    sets = {"val": lambda: numbers(50, 52)}
    return spmd.Run(
        folder, step(), numbers, config=CONFIG, evaluation=sets, evaluation_loss=loss_fn, **fields
    )


def averages_of_a_plain_loop(params, decay):
    """Bias-corrected average of the parameters after each step on one device, and the last parameters."""
    state, total, weights, averages = OPTIMIZER.init(params), np.zeros((4, 2)), 0.0, []
    for batch in numbers(0, STEPS):
        gradients = jax.grad(lambda p, b=batch: loss_fn(p, {}, b, None)[0]["loss"] / 8)(params)
        updates, state = OPTIMIZER.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        total, weights = (
            decay * total + (1 - decay) * np.asarray(params["w"]),
            decay * weights + (1 - decay),
        )
        averages.append(total / weights)
    return averages, params


def test_a_target_network_begins_at_the_initial_parameters():
    """Without the correction of its start the average moves by a fixed share; with it the start has no weight."""
    averages = {}
    for debias in (False, True):
        optimizer = spmd.with_ema(optax.sgd(1.0), 0.5, debias=debias)
        params = {"w": jnp.array(4.0)}
        state = optimizer.init(params)
        for _ in range(2):  # w is 3, then 2
            updates, state = optimizer.update({"w": jnp.array(1.0)}, state, params)
            params = optax.apply_updates(params, updates)
        averages[debias] = float(spmd.ema_params(state)["w"])
    assert averages == {False: 2.75, True: pytest.approx(7 / 3)}


def test_it_is_the_average_of_a_plain_loop_and_a_resumed_run_has_the_same_bits(tmp_path):
    """On data=2, fsdp=2, tensor=2; another decay gives another average. Evaluations, restored models and the best
    checkpoint are of the average."""
    result = run(tmp_path / "whole").train()
    found = spmd.ema_params(result.state.optimizer_state)["w"]
    assert found.sharding.spec == P("fsdp", "tensor")
    initial = jax.device_get(spmd.init_state(plan(), CONFIG.seed).params)
    averages, last = averages_of_a_plain_loop(initial, DECAY)
    np.testing.assert_allclose(found, averages[-1], rtol=1e-5, atol=1e-6)
    assert not np.allclose(found, averages_of_a_plain_loop(initial, 0.8)[0][-1], rtol=1e-3)
    np.testing.assert_allclose(result.state.params["w"], last["w"], rtol=1e-5, atol=1e-6)

    batches = list(numbers(50, 52))
    for w, is_evaluated in ((found, True), (last["w"], False)):
        loss = (
            sum(float(loss_fn({"w": np.asarray(w)}, {}, b, None)[0]["loss"]) for b in batches) / 16
        )
        assert np.isclose(loss, result.evaluation["val_loss"], rtol=1e-4) == is_evaluated
    with CheckpointManager(tmp_path / "whole/checkpoints", read_only=True) as checkpoints:
        np.testing.assert_array_equal(restore_model(checkpoints, None, plan()).params["w"], found)
        np.testing.assert_allclose(
            restore_model(checkpoints, 3, plan()).params["w"], averages[2], rtol=1e-5, atol=1e-6
        )
        trained = restore_model(checkpoints, None, plan(), trained=True).params["w"]
        np.testing.assert_array_equal(trained, result.state.params["w"])

    stops = [type("Stop", (spmd.Hook,), {"wants_stop": lambda self, step: step == 4})()]
    run(tmp_path / "cut", hooks=stops).train()
    again = run(tmp_path / "cut").train("always")
    assert again.steps == 2
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(again.state), jax.device_get(result.state)
    )
    lines = [json.loads(line) for line in (tmp_path / "cut/metrics.jsonl").read_text().splitlines()]
    assert [line["val_loss"] for line in lines if "val_loss" in line][-1] == result.evaluation[
        "val_loss"
    ]


@pytest.mark.parametrize(
    "options", [{"zero": 1}, {"precision": "bf16-params"}, {"precision": "fp16"}]
)
def test_it_is_found_and_stored_as_the_parameters_are(options):
    """Sharded over fsdp by ZeRO, in float32 beside master weights and below the count of skipped steps."""
    layout = plan(**options)
    (entry,) = (entry for entry in layout.optimizer_state if entry.path.endswith("ema/w"))
    assert (entry.spec, str(entry.dtype)) == (P("fsdp", "tensor"), "float32")
    assert not any("ema" in entry.path for entry in plan(OPTIMIZER).optimizer_state)


def test_a_skipped_update_does_not_move_it():
    """Neither the average nor its count; one that a wrapper outside would count is refused."""
    params = {"w": jnp.ones(3)}
    optimizer = spmd.skip_bad_updates(spmd.with_ema(OPTIMIZER, DECAY))
    _, once = optimizer.update({"w": jnp.ones(3)}, optimizer.init(params), params)
    _, skipped = optimizer.update({"w": jnp.full(3, jnp.nan)}, once, params)
    _, taken = optimizer.update({"w": jnp.ones(3)}, once, params)
    np.testing.assert_array_equal(spmd.ema_params(skipped)["w"], spmd.ema_params(once)["w"])
    assert skipped.inner.averaged == 1
    assert not np.allclose(spmd.ema_params(taken)["w"], spmd.ema_params(once)["w"])
    with pytest.raises(ConfigError, match="skips updates that the average would count"):
        spmd.with_ema(spmd.skip_bad_updates(OPTIMIZER), DECAY).init(params)


def test_a_decay_that_averages_nothing_is_refused():
    """Of 1, which never moves, and above; 0 in a config keeps no average."""
    for decay in (0.0, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="above 0 and below 1"):
            spmd.with_ema(OPTIMIZER, decay)
    with pytest.raises(ConfigError, match=r"ema_decay: is 1\.0"):
        spmd.OptimizerConfig(ema_decay=1.0)
    with pytest.raises(ConfigError, match="keeps no average"):
        spmd.ema_params(spmd.make_optimizer(spmd.OptimizerConfig(), 10).init({"w": jnp.ones(3)}))
    assert dataclasses.asdict(spmd.OptimizerConfig())["ema_decay"] == 0
