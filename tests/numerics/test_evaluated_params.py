"""Runs, their checkpoints and restored models are evaluated at the parameters that the optimizer says."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax import contrib

import spmd
from spmd import tree
from spmd.checkpoint.manager import CheckpointManager
from spmd.generate import text
from spmd.host_memory import chunks as offload_chunks
from spmd.optim.evaluated_params import evaluated_kinds, find_evaluated_params
from spmd.optim.extra_args import update_with
from spmd.optim.lookahead import keep_slow_params
from spmd.run.load_params import restore_model

B1 = 0.5
PARAMS = {"layers": {"w": jnp.arange(6.0).reshape(2, 3)}, "b": jnp.ones(3)}


def schedule_free(b1=B1, **fields):
    return contrib.schedule_free_sgd(0.1, warmup_steps=2, b1=b1, **fields)


def only_layers(params):
    return tree.map_with_path(lambda path, _: path.startswith("layers"), params)


def by_name(params):
    return tree.map_with_path(lambda path, _: path.partition("/")[0], params)


def free(node, name, params):
    z = node.z[name]
    return jax.tree.map(lambda y, z: (y - (1 - B1) * z) / B1, params[name], z)


# Optimizer, the path of the schedule-free state in its state, and the parameters that it updates.
NESTED = {
    "alone": (schedule_free(), lambda s: s, ("layers", "b")),
    "chain": (optax.chain(optax.clip(1.0), schedule_free()), lambda s: s[1], ("layers", "b")),
    "masked": (optax.masked(schedule_free(), only_layers), lambda s: s.inner_state, ("layers",)),
    "partition": (
        optax.partition({"layers": schedule_free(), "b": optax.sgd(0.1)}, by_name),
        lambda s: s.inner_states["layers"].inner_state,
        ("layers",),
    ),
    "hyperparams": (
        optax.inject_hyperparams(contrib.schedule_free_sgd)(learning_rate=0.1, b1=B1),
        lambda s: s.inner_state,
        ("layers", "b"),
    ),
    "steps": (
        optax.MultiSteps(schedule_free(), 2).gradient_transformation(),
        lambda s: s.inner_opt_state,
        ("layers", "b"),
    ),
    "if finite": (
        optax.apply_if_finite(schedule_free(), 2),
        lambda s: s.inner_state,
        ("layers", "b"),
    ),
    "skip": (spmd.skip_bad_updates(schedule_free()), lambda s: s.inner, ("layers", "b")),
    "per layer": (spmd.per_layer(schedule_free()), lambda s: s.stacked["layers"], ("layers",)),
}


def updated(optimizer, steps=6):
    """Return the state and the parameters after some updates."""

    @jax.jit
    def run(params):
        state = optimizer.init(params)
        for step in range(steps):
            gradients = jax.tree.map(lambda p, step=step: jnp.cos(p * (step + 2)), params)
            updates, state = update_with(optimizer, gradients, state, params, {})
            params = optax.apply_updates(params, updates)
        return state, params

    return run(PARAMS)


@pytest.mark.parametrize("name", NESTED)
def test_a_schedule_free_state_is_found_wherever_it_is(name):
    """What another transform updates stays as it is; control: the parameters themselves are others."""
    optimizer, where, own = NESTED[name]
    state, params = updated(optimizer)
    found = find_evaluated_params(state, params)
    for part in PARAMS:
        if part in own:
            expected = free(where(state), part, params)
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
                found[part],
                expected,
            )
            assert not np.allclose(
                *(jax.tree.leaves(x[part])[0] for x in (found, params)), rtol=1e-3
            )
        elif name != "per layer":
            jax.tree.map(np.testing.assert_array_equal, found[part], params[part])


@pytest.mark.compat
def test_a_lookahead_trains_as_in_optax_and_keeps_its_slow_parameters():
    """Inside a chain, too; other optimizers are not touched."""
    optimizer = optax.chain(
        optax.clip(1.0), optax.lookahead(optax.adam(0.1), sync_period=3, slow_step_size=0.5)
    )
    state, params = updated(keep_slow_params(optimizer), steps=5)
    pair = optax.LookaheadParams.init_synced(PARAMS)
    plain = optimizer.init(pair)
    for step in range(5):
        gradients = jax.tree.map(lambda p, step=step: jnp.cos(p * (step + 2)), pair.fast)
        updates, plain = optimizer.update(gradients, plain, pair)
        pair = optax.apply_updates(pair, updates)
    for ours, theirs in ((params, pair.fast), (find_evaluated_params(state, params), pair.slow)):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), ours, theirs
        )
    assert evaluated_kinds(state) == ("slow parameters",)
    assert find_evaluated_params(keep_slow_params(optax.adam(0.1)).init(PARAMS), PARAMS) is PARAMS


def test_an_average_is_of_the_evaluated_parameters():
    """After one update it is the parameters of schedule-free, not those of its gradients."""
    state, _ = updated(spmd.with_ema(schedule_free(), 0.9), steps=1)
    alone, same = updated(schedule_free(), steps=1)
    np.testing.assert_allclose(
        spmd.ema_params(state)["b"], find_evaluated_params(alone, same)["b"], rtol=1e-6
    )
    assert evaluated_kinds(state) == ("averaged parameters",)


RULES = spmd.Rules([("w", P("fsdp", "tensor"))])
MODEL = spmd.Model(
    lambda key: {"w": jax.random.normal(key, (8, 2))}, lambda params, x: x @ params["w"]
)


def loss_fn(params, variables, batch, key):
    """Sum of squares."""
    error = MODEL.apply(params, batch["x"]) - batch["y"]
    return {"loss": (error**2).sum(), "weight": jnp.float32(8)}, variables


def numbers(start, steps):
    """Batches, each from its own number."""
    for n in range(start, steps):
        x = np.random.default_rng(n).normal(size=(8, 8)).astype(np.float32)
        yield {"x": x, "y": x[:, :2]}


def plan(optimizer, **options):
    return spmd.make_plan(
        spmd.make_mesh(data=2, fsdp=2, tensor=2), RULES, MODEL, optimizer, **options
    )


def first(optimizer_state, params):
    """The point of a transform of one's own: its parameters three times."""
    return jax.tree.map(lambda w, trace: 3 * w + 0 * trace, params, optimizer_state[0].trace)


RUNS = {
    "master weights": (schedule_free(), {"precision": "bf16-params"}),
    "loss scale": (schedule_free(), {"precision": "fp16"}),
    "zero 1": (schedule_free(), {"zero": 1}),
    "offload": (schedule_free(), {"offload": ("optimizer_state",)}),
    "lookahead": (optax.lookahead(optax.sgd(0.1), 2, 0.5), {}),
    "function": (optax.sgd(0.1, momentum=0.9), {"evaluation_params": first}),
}


def expected(name, state):
    """Return the parameters to evaluate by the optimizer's own formula, in NumPy."""
    inner, w = state.optimizer_state, np.asarray(state.params["w"], np.float32)
    if name == "master weights":
        inner, w = inner.inner, np.asarray(inner.master["w"])
    if name == "loss scale":
        inner = inner.inner
    if name == "lookahead":
        return np.asarray(inner.slow["w"])
    if name == "function":
        return 3 * w
    return (w - (1 - B1) * np.asarray(inner.z["w"])) / B1


@pytest.mark.parametrize("name", RUNS)
def test_a_run_its_checkpoint_and_a_restored_model_have_one_point(name, tmp_path, monkeypatch):
    """On data=2, fsdp=2, tensor=2; control: the loss at the parameters of the gradients is another one."""
    monkeypatch.setattr(offload_chunks, "SMALL_BYTES", 0)
    optimizer, options = RUNS[name]
    layout = plan(optimizer, **options)
    assert any(entry.on_host for entry in layout.optimizer_state) == (name == "offload")
    config = spmd.RunConfig(steps=3, checkpoint_every=3)
    sets, step = {"val": lambda: numbers(50, 51)}, spmd.make_train_step(layout, loss_fn)
    result = spmd.Run(
        tmp_path, step, numbers, config=config, evaluation=sets, evaluation_loss=loss_fn
    ).train()
    w = jnp.asarray(expected(name, result.state)).astype(layout.abstract_params["w"].dtype)
    with CheckpointManager(tmp_path / "checkpoints", read_only=True) as checkpoints:
        restored = restore_model(checkpoints, None, layout).params["w"]
        trained = restore_model(checkpoints, None, layout, trained=True).params["w"]
    assert restored.sharding == layout.abstract_params["w"].sharding
    np.testing.assert_allclose(
        np.asarray(restored, np.float32), np.asarray(w, np.float32), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(trained, result.state.params["w"])
    np.testing.assert_array_equal(spmd.evaluated_params(layout, result.state)["w"], restored)
    generator = SimpleNamespace(load=lambda params, variables: params)
    generated_with = text.load_state(generator, result.state, layout)
    np.testing.assert_array_equal(generated_with["w"], restored)
    (batch,) = numbers(50, 51)
    tolerance = 0.02 if "precision" in options else 1e-4
    for point, is_evaluated in ((restored, True), (trained, False)):
        loss = float(loss_fn({"w": np.asarray(point, np.float32)}, {}, batch, None)[0]["loss"]) / 8
        assert np.isclose(loss, result.evaluation["val_loss"], rtol=tolerance) == is_evaluated


def test_a_function_that_gives_no_parameters_is_refused():
    """With another signature, from a state that it cannot read, and with another tree; all before anything compiles."""
    for function, what in (
        (lambda state: state, "takes state"),
        (contrib.schedule_free_eval_params, "cannot be computed from the optimizer's state"),
        (lambda state, params: params["w"], "does not return the model's parameters"),
    ):
        with pytest.raises(spmd.SpmdError, match=f"evaluation_params: {what}"):
            plan(optax.sgd(0.1), evaluation_params=function)
    assert plan(schedule_free(), evaluation_params=contrib.schedule_free_eval_params)
