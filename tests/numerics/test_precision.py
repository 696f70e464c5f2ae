"""Each policy puts every dtype where it says, on any mesh, and what cannot work is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.checkpoint.manager import CheckpointManager
from spmd.errors import ConfigError
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.jaxpr.equations import equations, name_of
from spmd.loss_scaling.loss_scale import LossScale
from spmd.model_interface.grad_transform import Carry
from spmd.optim.master_weights import MasterState, RoundedState, wrap_optimizer_for_precision
from spmd.optim.stochastic_rounding import round_stochastically
from spmd.plan.context import use_plan
from spmd.precision import POLICIES, Precision, make_precision
from spmd.testing import BUGS, Reference, token_batches
from spmd.training.state import abstract_state, init_state
from spmd.training.step import make_train_step
from tests import tiny
from tests.tiers import soak_but

BATCHES = token_batches((8, 10), tiny.CONFIG.vocab, steps=3)
GRAD_FN = value_and_grad(tiny.loss_fn())
OPTIMIZER = spmd.make_optimizer(
    spmd.OptimizerConfig(learning_rate=1e-2, schedule="constant"), steps=10
)
FP16 = dataclasses.replace(POLICIES["fp16"], loss_scale=LossScale(initial=64.0))
PRECISIONS = {**POLICIES, "fp16": FP16}
NARROW = [name for name in POLICIES if name not in ("float32", "float64")]


MESH = {"fsdp": 4, "tensor": 2}


def placed(layout, batch):
    return spmd.place_batch(layout, batch)


def plan(name, **sizes):
    return tiny.plan(optimizer=OPTIMIZER, options=(("precision", PRECISIONS[name]),), **sizes)


@functools.cache
def one_device(name):
    return Reference(plan(name), GRAD_FN, BATCHES)


@functools.cache
def losses(name):
    """The losses of a run on one device."""
    layout, found = plan(name), []
    step, state = make_train_step(layout, grad_fn=GRAD_FN, keep_gradients=True), init_state(layout)
    for batch in BATCHES:
        state, metrics = step(state, placed(layout, batch))
        found.append(float(metrics["loss"]))
    return np.array(found)


def test_policies_by_name():
    """A policy is found by its name, and is a value like any other."""
    assert list(POLICIES) == [
        "float32",
        "float64",
        "bf16",
        "bf16-params",
        "bf16-params-stochastic",
        "fp16",
    ]
    assert all(make_precision(name) is policy for name, policy in POLICIES.items())
    half = make_precision("bf16")
    assert (half.params_dtype, half.compute_dtype, half.gradients_dtype) == (
        jnp.float32,
        jnp.bfloat16,
        jnp.float32,
    )
    assert make_precision(half) is half
    assert make_precision("bfloat16") is half


@pytest.mark.parametrize(
    ("name", "near"), [("bf6", "bf16"), ("float23", "float32"), ("fp17", "fp16")]
)
def test_an_unknown_precision_is_an_error_with_a_suggestion(name, near):
    """The nearest name is in the message."""
    with pytest.raises(ConfigError, match=f'did you mean "{near}"'):
        make_precision(name)


@pytest.mark.parametrize(
    ("fields", "places"),
    [
        ({"compute": "float16"}, ["compute"]),
        ({"params": "float16"}, ["params"]),
        ({"gradients": "float16", "rounding": "up"}, ["gradients", "rounding"]),
        ({"moments": "4bit", "master": "bfloat16"}, ["master", "moments"]),
        ({"accumulation": "bfloat16"}, ["accumulation"]),
        ({"master": "float32"}, ["master"]),
        ({"rounding": "stochastic"}, ["rounding"]),
        ({"params": "bfloat16", "rounding": "stochastic", "master": "float32"}, ["rounding"]),
    ],
    ids=str,
)
def test_dtypes_that_cannot_work_are_all_listed(fields, places):
    """fp16 without loss scaling among them; one error has every problem."""
    with pytest.raises(ConfigError) as caught:
        Precision("mine", **{"params": "float32", "compute": "float32", **fields})
    assert [problem.where for problem in caught.value.problems] == places


@pytest.mark.parametrize(
    "name",
    soak_but(
        ("float32", "bf16", "bf16-params", "bf16-params-stochastic", "fp16"),
        "bf16-params-stochastic",
    ),
)
def test_state_has_the_planned_dtypes_and_bytes(name):
    """After a step, parameters, moments, master weights and variables lie as planned, to the byte."""
    layout = plan(name, **MESH)
    # as other tests compile it
    step = make_train_step(layout, grad_fn=GRAD_FN, keep_gradients=True)
    state, _ = step(init_state(layout), placed(layout, BATCHES[0]))
    policy, held = layout.precision, layout.bytes_per_device()
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {policy.params_dtype}
    assert {leaf.dtype for leaf in layout.gradients} == {policy.gradients}
    inner = (
        state.optimizer_state.inner
        if isinstance(state.optimizer_state, MasterState)
        else state.optimizer_state
    )
    floats = [x.dtype for x in jax.tree.leaves(inner) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert set(floats) == {jnp.dtype(jnp.float32)}
    for part in ("params", "optimizer_state", *(["variables"] if state.variables else [])):
        assert held[part] == sum(
            x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(getattr(state, part))
        )
    per_param = {
        part: round(held[part] / held["params"] * policy.params_dtype.itemsize) for part in held
    }
    assert per_param["optimizer_state"] == 8 + (4 if policy.master else 0)


@pytest.mark.parametrize(
    "name", [pytest.param("bf16-params-stochastic", marks=pytest.mark.soak), "fp16"]
)
def test_a_mesh_trains_as_one_device_does(name):
    """Three steps on eight devices stay within the policy's tolerance; the other policies are in the parity suite."""
    result = one_device(name).compare(plan(name, **MESH))
    assert result.ok, f"\n{result}"


@pytest.mark.soak
def test_control_a_missing_reduction_is_found():
    """The tolerances of narrow policies are wide, and still notice gradients of half of the batch."""
    assert (
        not one_device("bf16-params")
        .compare(plan("bf16-params", **MESH), BUGS["reduction"](GRAD_FN))
        .ok
    )


@pytest.mark.parametrize("name", soak_but(NARROW, "bf16", "fp16"))
def test_a_narrow_policy_follows_float32(name):
    """The losses are near those of float32, and are not them."""
    assert 0 < np.abs(losses(name) / losses("float32") - 1).max() < 1e-2


@pytest.mark.parametrize(
    "name", soak_but(("bf16-params", "bf16-params-stochastic", "fp16"), "bf16-params-stochastic")
)
def test_a_run_resumes_bitwise(name, tmp_path):
    """Two steps, a checkpoint and a third step end as three steps do, with everything the policy keeps."""
    layout = plan(name, **MESH)
    step = make_train_step(layout, grad_fn=GRAD_FN, keep_gradients=True)

    def take(state, batches):
        for batch in batches:
            state, _ = step(state, placed(layout, batch))
        return state

    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(2, take(init_state(layout), BATCHES[:2]), {"step": 2}, {})
        checkpoints.wait()
        restored, _ = checkpoints.restore(2, abstract_state(layout))
    straight, resumed = take(init_state(layout), BATCHES), take(restored, BATCHES[2:])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(straight), jax.device_get(resumed))


def outputs(jaxpr, primitive):
    """The abstract values that a primitive computes, inside loops too."""
    for equation in equations(jaxpr):
        if name_of(equation) == primitive:
            yield equation.outvars[0].aval


def gradient_dtypes(precision, grad_fn):
    layout = tiny.plan(options=(("precision", precision),), fsdp=2)
    with use_plan(layout):
        program = jax.make_jaxpr(grad_fn)(
            layout.abstract_params, Carry(), BATCHES[0], jax.random.key(0)
        )
    matrices = {aval.dtype for aval in outputs(program, "dot_general") if aval.ndim == 2}
    count = len(jax.tree.leaves(layout.abstract_params))
    return {str(d) for d in matrices}, {str(aval.dtype) for aval in program.out_avals[:count]}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_of_bfloat16_parameters_are_float32(microbatches):
    """They leave their matmul in float32, are summed over devices and microbatches in it, and leave in it."""
    grad_fn = accumulate(GRAD_FN, microbatches)
    assert gradient_dtypes("bf16-params", grad_fn) == ({"float32"}, {"float32"})
    rounded = Precision("rounded", params="bfloat16", compute="bfloat16", gradients="bfloat16")
    sums = "bfloat16" if microbatches == 1 else "float32"
    # control: where the policy says otherwise
    assert gradient_dtypes(rounded, grad_fn) == ({"bfloat16"}, {sums})


def test_master_weights_are_the_truth():
    """Parameters are the master weights, rounded; a thousand updates that are too small to show do add up."""
    optimizer = wrap_optimizer_for_precision(optax.sgd(1.0), POLICIES["bf16-params"])
    params = {"w": jnp.full(4, 1.0, jnp.bfloat16)}
    state = optimizer.init(params)
    for _ in range(1000):
        updates, state = optimizer.update({"w": jnp.full(4, 2.0**-14)}, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(params["w"], state.master["w"].astype(jnp.bfloat16))
    np.testing.assert_allclose(state.master["w"], 1 - 1000 * 2.0**-14, rtol=1e-6)


def test_stochastic_rounding_keeps_what_nearest_loses():
    """The same updates add up in the mean without master weights; rounded to the nearest they are all lost."""

    def train(precision):
        optimizer = wrap_optimizer_for_precision(optax.sgd(1.0), precision)

        def one(carry, _):
            params, state = carry
            updates, state = optimizer.update(
                {"w": jnp.linspace(1, 2, 4096) * 2.0**-14}, state, params
            )
            return (optax.apply_updates(params, updates), state), None

        params = {"w": jnp.full(4096, 1.0, jnp.bfloat16)}
        return jax.lax.scan(one, (params, optimizer.init(params)), length=1000)[0]

    (params, state) = train(POLICIES["bf16-params-stochastic"])
    assert isinstance(state, RoundedState)
    moved = 1 - np.asarray(params["w"], np.float64)
    np.testing.assert_allclose(moved.mean(), 1.5 * 1000 * 2.0**-14, rtol=2e-2)
    nearest = dataclasses.replace(POLICIES["bf16-params-stochastic"], rounding="nearest")
    assert (np.asarray(train(nearest)[0]["w"], np.float64) == 1).all()  # control


def test_stochastic_rounding_is_unbiased_and_keeps_what_fits():
    """The mean over seeds and the mean over numbers are exact; bfloat16 numbers, infinities and NaN do not change."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=4096), jnp.float32)
    seeds = jnp.arange(400, dtype=jnp.uint32) * jnp.uint32(2654435761)
    rounded = np.asarray(jax.vmap(lambda seed: round_stochastically(x, seed))(seeds), np.float64)
    error = (rounded - np.asarray(x, np.float64)) / np.abs(x)
    step = 2.0**-7  # the distance to the next bfloat16, at most, relative to the number
    assert np.abs(error).max() <= step
    assert np.abs(error.mean(axis=0)).max() < 5 * step / 2 / np.sqrt(len(seeds))
    assert np.abs(error.mean(axis=1)).max() < 5 * step / 2 / np.sqrt(x.size)
    exact = jnp.array([0.0, -0.0, 1.0, -3.5, jnp.inf, -jnp.inf, jnp.nan])
    np.testing.assert_array_equal(
        round_stochastically(exact, jnp.uint32(7)).astype(jnp.float32), exact
    )
    # control: nearest is biased for each
    truncated = np.asarray(jax.lax.reduce_precision(x, 8, 7) - x, np.float64)
    assert np.abs(truncated / np.abs(x)).max() > 5 * step / 2 / np.sqrt(len(seeds))


def test_stochastic_rounding_does_not_see_layout():
    """A stack is rounded as its layers are, a split array as a whole one, and a last-bit error seldom shows."""
    x, seed = (
        jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 64)), jnp.float32),
        jnp.uint32(5),
    )
    whole = np.asarray(round_stochastically(x, seed))
    np.testing.assert_array_equal(
        whole, np.stack([round_stochastically(layer, seed) for layer in x])
    )
    split = jax.device_put(
        x, jax.NamedSharding(tiny.mesh(fsdp=4, tensor=2), P(None, "fsdp", "tensor"))
    )
    np.testing.assert_array_equal(whole, jax.jit(round_stochastically)(split, seed))
    near = round_stochastically(jnp.nextafter(x, jnp.inf), seed)
    assert (np.asarray(near) != whole).mean() < 1e-3
    # control: another step
    assert 0.3 < (np.asarray(round_stochastically(x, jnp.uint32(6))) != whole).mean() < 0.4
    # rows are not rounded alike
    assert len({tuple(row) for row in np.asarray(whole[0] > x[0])}) == 16
