"""The examples of other models than language models take the steps of a plain Flax and optax loop on one device."""

import importlib

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd import tree

MODELS = {"diffusion_transformer": "DiT", "recommender": "Recommender", "t5_encoder_decoder": "T5"}


def plain_losses(example, make, params, key, batches):
    """Loss of each batch in a loop without meshes, plans and this package's gradients."""
    graph, state, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)

    @jax.jit
    def step(params, optimizer_state, batch, key):
        def mean_loss(params):
            nnx.replace_by_pure_dict(state, params)
            losses, weights = example.losses(nnx.merge(graph, state, rest), batch, key)
            return (losses * weights).sum() / weights.sum()

        loss, gradients = jax.value_and_grad(mean_loss)(params)
        updates, optimizer_state = example.OPTIMIZER.update(gradients, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state, loss

    optimizer_state, losses = example.OPTIMIZER.init(params), []
    for number, batch in enumerate(batches):
        params, optimizer_state, loss = step(
            params, optimizer_state, batch, jax.random.fold_in(key, number)
        )
        losses.append(float(loss))
    return losses


def compare(monkeypatch, name, steps, other_key=False):
    """Losses of `steps` steps on data=2, fsdp=2, tensor=2, and of the plain loop from the same parameters."""
    example = importlib.import_module(f"examples.{name}")
    make = getattr(example, MODELS[name])
    if hasattr(example, "LAYERS") and steps < 20:
        monkeypatch.setattr(example, "LAYERS", 1)
    monkeypatch.setattr(example, "MODEL", model := spmd.from_nnx(lambda rngs: make(rngs)))
    mesh = spmd.make_mesh(data=2, fsdp=2, tensor=2)
    plan = spmd.make_plan(mesh, example.RULES, model, example.OPTIMIZER)
    state, step = spmd.init_state(plan), spmd.make_train_step(plan, example.loss_fn)
    params, key = (
        jax.device_get(state.params),
        jax.random.wrap_key_data(np.asarray(state.key) + other_key, impl="threefry2x32"),
    )
    found = []
    for batch in example.batches(0, steps):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    paths = {
        tuple(part if not part.isdecimal() else int(part) for part in path.split("/")): x
        for path, x in tree.flatten(params).items()
    }
    return found, plain_losses(
        example, make, nnx.traversals.unflatten_mapping(paths), key, example.batches(0, steps)
    )


@pytest.fixture(autouse=True)
def promotion():
    """Examples add vectors to matrices, as their users do."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize(
    "name",
    [
        name if name == "recommender" else pytest.param(name, marks=pytest.mark.soak)
        for name in MODELS
    ],
)
@pytest.mark.parametrize("steps", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_losses_are_those_of_a_plain_loop(name, steps, monkeypatch):
    """To 1e-5; in three steps, with one layer."""
    found, plain = compare(monkeypatch, name, steps)
    np.testing.assert_allclose(found, plain, rtol=1e-5)
    assert abs(found[1] / plain[0] - 1) > 1e-3, "the control: losses of other batches"


@pytest.mark.soak
def test_control_another_key_gives_other_losses(monkeypatch):
    """The noise of the diffusion is that of the step's key."""
    found, plain = compare(monkeypatch, "diffusion_transformer", 1, other_key=True)
    assert abs(found[0] - plain[0]) > 1e-3
