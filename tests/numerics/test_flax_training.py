"""Modules with plain arrays, sown losses, random streams and initial values from inputs train as under plain Flax."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.checkpoint.manager import CheckpointManager
from spmd.model_interface.model import PRNG, Model, as_outputs
from spmd.training.state import abstract_state
from tests import tiny

pytestmark = pytest.mark.compat

WIDTH, STEPS = 8, 3
OPTIMIZER = optax.adam(1e-2)
SMALL = spmd.replicate("a few bytes")
BATCHES = [
    np.random.default_rng(n).normal(size=(8, WIDTH)).astype(np.float32) for n in range(STEPS)
]


class Auxiliary(nnx.Variable):
    """A loss that is sown."""


class NnxNet(nnx.Module):
    """A table, a random projection, a key that each call splits, a dictionary in a variable, and a sown loss."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.table = jnp.arange(8.0) / 8
        self.projection = nnx.data({"matrix": jax.random.normal(rngs.params(), (WIDTH, WIDTH))})
        self.key = rngs.noise()
        self.seen = nnx.BatchStat({"mean": jnp.zeros(WIDTH), "count": jnp.zeros(())})

    def __call__(self, x: jax.Array) -> jax.Array:
        self.key, key = jax.random.split(self.key)
        x = x + 0.1 * jax.random.normal(key, x.shape)
        seen = self.seen.get_value()
        self.seen.set_value({"mean": seen["mean"] + x.mean(0), "count": seen["count"] + 1})
        h = self.linear(x) + self.table[None]
        self.sow(Auxiliary, "size", (h**2).mean())
        return h @ self.projection["matrix"]


class ActNorm(nn.Module):
    """A normalization that starts from its first input."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mean = self.param("mean", lambda key: x.mean(0))
        scale = self.param("scale", lambda key: x.std(0) + 0.5)
        return (x - mean[None]) / scale[None]


class LinenNet(nn.Module):
    """Batch statistics, a sown loss and a metric, noise of a stream of its own, and an ActNorm."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="bn")(x)
        h = ActNorm(name="norm")(nn.Dense(WIDTH, name="dense")(x))
        self.sow("losses", "size", (h**4).mean())
        self.sow("metrics", "largest", h.max())
        return h + 0.1 * jax.random.normal(self.make_rng("noise"), h.shape) if train else h


MODES: dict[str, Any] = {"train": {"train": True}, "evaluate": {"train": False}}


@functools.cache
def model(kind: str) -> Model:
    if kind == "nnx":
        return spmd.from_nnx(NnxNet, losses=Auxiliary)
    return spmd.from_linen(LinenNet(), BATCHES[0], rngs=("noise",), **MODES)


@functools.cache
def plan(kind: str) -> Any:
    if kind == "nnx":
        rules = spmd.Rules([("linear/kernel", jax.P("fsdp")), ("bias|seen/.*", SMALL)])
    else:
        rules = spmd.Rules([("dense/kernel", jax.P("fsdp")), ("bias|scale|mean|var", SMALL)])
    return spmd.make_plan(tiny.mesh(data=2, fsdp=4), rules, model(kind), OPTIMIZER)


def ours(kind: str, share: float = 1.0) -> tuple[list[float], Any]:
    """Return the losses of some steps, and the state after them."""

    def loss_fn(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
        returned, variables = model(kind).forward(params, variables, key, batch, train=True)
        outputs = as_outputs(returned)
        (auxiliary,) = outputs.losses.values()
        weight = jnp.float32(batch.shape[0])
        return {
            "loss": (outputs.logits**2).sum() + share * auxiliary * weight,
            "weight": weight,
        }, variables

    state, step, losses = spmd.init_state(plan(kind)), spmd.make_train_step(plan(kind), loss_fn), []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


def theirs(kind: str) -> tuple[list[float], Any]:
    """Return the losses of the same steps by Flax and optax alone, and the variables after them."""
    root = jax.random.key(0, impl=PRNG)
    key, steps = jax.random.fold_in(root, 0), jax.random.fold_in(root, 1)
    if kind == "nnx":
        graph, params, variables = nnx.split(NnxNet(nnx.Rngs(key)), nnx.Param, ...)

        def loss_fn(params: Any, variables: Any, batch: Any, key: Any) -> tuple[jax.Array, Any]:
            module = nnx.merge(graph, params, variables, copy=True)
            out, sown = nnx.capture(module, Auxiliary)(batch)
            (auxiliary,) = jax.tree.leaves(sown)
            return (out**2).sum() / len(batch) + auxiliary, nnx.state(module, nnx.Not(nnx.Param))
    else:
        made = dict(LinenNet().init(key, BATCHES[0], train=False))
        params, variables = made["params"], {"batch_stats": made["batch_stats"]}

        def loss_fn(params: Any, variables: Any, batch: Any, key: Any) -> tuple[jax.Array, Any]:
            rngs, mutable = {"noise": jax.random.fold_in(key, 0)}, ["batch_stats", "losses"]
            call = functools.partial(LinenNet().apply, train=True, rngs=rngs, mutable=mutable)
            out, after = call({"params": params, **variables}, batch)
            (auxiliary,) = jax.tree.leaves(after["losses"])
            return (out**2).sum() / len(batch) + auxiliary, {"batch_stats": after["batch_stats"]}

    @jax.jit
    def step(params: Any, variables: Any, state: Any, batch: Any, key: Any) -> Any:
        (loss, variables), gradients = jax.value_and_grad(loss_fn, has_aux=True)(
            params, variables, batch, key
        )
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), variables, state, loss

    state, losses = OPTIMIZER.init(params), []
    for number, batch in enumerate(BATCHES):
        params, variables, state, loss = step(
            params, variables, state, batch, jax.random.fold_in(steps, number)
        )
        losses.append(float(loss))
    return losses, variables


def as_data(x: jax.Array) -> jax.Array:
    """Return the data of a random key, and other arrays as they are."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_steps_equal_plain_flax_and_optax(kind: str, tmp_path: Any) -> None:
    """Losses of three steps, and the variables after them; a checkpoint restores all of these, plain arrays too."""
    losses, state = ours(kind)
    expected, variables = theirs(kind)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    found = jax.tree.leaves(jax.device_get(state.variables))
    for ours_after, theirs_after in zip(
        found, map(as_data, jax.tree.leaves(variables)), strict=True
    ):
        np.testing.assert_allclose(ours_after, theirs_after, rtol=1e-4, atol=1e-5)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(STEPS, state, {"step": STEPS}, {})
        checkpoints.wait()
        restored, _ = checkpoints.restore(STEPS, abstract_state(plan(kind)))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(restored))


@pytest.mark.soak
def test_control_a_loss_that_is_left_out_is_caught() -> None:
    """Without the sown loss the steps differ by more than the tolerance."""
    assert not np.allclose(ours("linen", share=0.0)[0], theirs("linen")[0], rtol=1e-3)
