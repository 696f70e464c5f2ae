"""Muon on kernels of more than two dimensions: as matrices, and on a mesh as on one device."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib

import spmd
from spmd.model_interface.kernels import Matrix
from spmd.optim import owned_matrices
from spmd.optim.owned_matrices import UpdateLayout, nesterov_momentum, orthogonalize
from spmd.optim.treatment import Treatment
from spmd.sharding.layer_paths import Stack
from spmd.tree import flatten
from tests import tiny

WIDTH, HEADS, EXPERTS = 8, 4, 2


class Layer(nnx.Module):
    """Flax's attention, experts by an einsum, and a convolution over the sequence."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, use_bias=False, rngs=rngs
        )
        self.experts = nnx.Einsum("besd,edf->besf", (EXPERTS, WIDTH, WIDTH), rngs=rngs)
        self.conv = nnx.Conv(WIDTH, WIDTH, (3,), use_bias=False, rngs=rngs)


class Net(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return Layer(rngs)

        self.tower = create(rngs)


RULES = spmd.Rules(
    [
        ("(query|key|value)/kernel", P("fsdp", "tensor", None)),
        ("out/kernel", P("tensor", None, "fsdp")),
        ("experts/kernel", P(None, "fsdp", "tensor")),
        ("conv/kernel", P(None, "fsdp", "tensor")),
    ],
)
MODEL = spmd.from_nnx(Net)
MUON = spmd.make_optimizer(
    spmd.OptimizerConfig(name="muon", learning_rate=0.1, schedule="constant", weight_decay=0.0),
    3,
    model=MODEL,
)
MATRICES = {
    "tower/attention/query/kernel": (WIDTH, WIDTH),
    "tower/attention/out/kernel": (WIDTH, WIDTH),
    "tower/conv/kernel": (3 * WIDTH, WIDTH),
    "tower/experts/kernel": (WIDTH, WIDTH),
}


def spread(update, sides):
    """Return the largest ratio of singular values of the matrices of an update."""
    values = np.linalg.svd(np.asarray(update).reshape(-1, *sides), compute_uv=False)
    return float((values[:, 0] / values[:, -1]).max())


@functools.cache
def updates(**sizes):
    """Updates of the second step by path, with parameters, gradients and state as the plan of a mesh shards them."""
    plan = spmd.make_plan(tiny.mesh(**sizes), RULES, MODEL, MUON)
    shardings = jax.tree.map(lambda x: x.sharding, plan.abstract_params)
    rng = np.random.default_rng(0)
    draws = [
        jax.tree.map(lambda x: rng.normal(size=x.shape).astype("float32"), plan.abstract_params)
        for _ in range(3)
    ]
    params, *gradients = (jax.tree.map(jax.device_put, draw, shardings) for draw in draws)

    @functools.partial(jax.jit, out_shardings=shardings)
    def run(params, *gradients):
        state = MUON.init(params)
        for each in gradients:
            update, state = MUON.update(each, state, params, layout=UpdateLayout.of(plan))
        return update

    return {path: np.asarray(x) for path, x in spmd.tree.flatten(run(params, *gradients)).items()}


def test_kernels_are_orthogonal_as_matrices_from_inputs_to_outputs():
    """Attention as [in, heads · head_dim], a convolution as [taps · in, out], experts one by one; a control is not."""
    flat = updates()
    for path, sides in MATRICES.items():
        assert spread(flat[path], sides) < 5, path
        assert float(np.sqrt(np.mean(flat[path] ** 2))) == pytest.approx(0.02, rel=0.3)
    assert spread(flat["tower/attention/query/kernel"], (WIDTH // HEADS, WIDTH // HEADS)) > 5


def test_a_mesh_of_2_by_2_by_2_updates_as_one_device_does():
    """Heads, inputs and outputs are split, and the matrices are those of the whole kernel."""
    ours, theirs = updates(data=2, fsdp=2, tensor=2), updates()
    for path, update in theirs.items():
        assert np.linalg.norm(ours[path] - update) < 1e-5 * np.linalg.norm(update), path


STACKS = {"layers": Stack()}
SIDES = {"wide": (16, 32), "tall": (32, 16), "square": (16, 16)}


def tower(layers, kinds):
    """Random stacks of matrices."""
    rng = np.random.default_rng(0)
    shapes = {kind: (layers, *SIDES[kind]) for kind in kinds}
    return {"layers": {kind: rng.normal(size=s).astype("float32") for kind, s in shapes.items()}}


def orthogonalized(updates, specs=None, mesh=None):
    """The updates of a function compiled for a mesh, and its text."""
    treatment = Treatment("muon", STACKS)
    layout = None
    if mesh is not None:
        layout = UpdateLayout(mesh, tuple(specs.items()), jnp.dtype("float32"))
        shardings = {k: NamedSharding(mesh, specs[f"layers/{k}"]) for k in updates["layers"]}
        updates = jax.device_put(updates, {"layers": shardings})
    run = jax.jit(lambda x: orthogonalize(x, treatment, layout, 0.2))
    return jax.device_get(run(updates)), run.lower(updates).compile().as_text()


@pytest.mark.parametrize("layers", [1, 3, 4, 6])
def test_owners_do_what_one_device_does(layers):
    """With fewer matrices than owners, as many, and more: bitwise or nearly; nothing is gathered by every device."""
    updates = tower(layers, SIDES)
    specs = {
        "layers/wide": P(None, "fsdp", "tensor"),
        "layers/tall": P(None, "tensor", "fsdp"),  # transposed, as the first
        "layers/square": P(None, None, "fsdp"),
    }
    found, text = orthogonalized(updates, specs, tiny.mesh(fsdp=2, tensor=2))
    expected, _ = orthogonalized(updates)
    for kind, x in expected["layers"].items():
        np.testing.assert_allclose(found["layers"][kind], x, rtol=1e-5, atol=1e-6)
    assert "all-to-all" in text
    assert "all-gather" not in text


def test_a_stack_that_is_split_stays_where_it_is():
    """Layers over `pipe`: owners are the other devices of a stage. The control: without owners all gather."""
    updates = tower(4, ("wide",))
    specs = {"layers/wide": P("pipe", "fsdp")}
    mesh = tiny.mesh(pipe=2, fsdp=4)
    found, text = orthogonalized(updates, specs, mesh)
    expected, _ = orthogonalized(updates)
    np.testing.assert_allclose(found["layers"]["wide"], expected["layers"]["wide"], atol=1e-6)
    assert "all-gather" not in text
    run = jax.jit(lambda x: orthogonalize(x, Treatment("muon", STACKS), None, 0.2))
    split = jax.device_put(updates, {"layers": {"wide": NamedSharding(mesh, specs["layers/wide"])}})
    text = run.lower(split).compile().as_text()
    assert "all-gather" in text or "all-reduce" in text


def test_devices_without_a_matrix_do_not_compute():
    """Three matrices of each of two kinds on eight owners: the second kind begins where the first ends."""
    updates = tower(3, ("wide", "square"))
    specs = {"layers/wide": P(None, "fsdp"), "layers/square": P(None, "fsdp")}
    mesh = tiny.mesh(fsdp=8)
    layout = UpdateLayout(mesh, tuple(specs.items()), jnp.dtype("float32"))
    kernels = list(owned_matrices._kernels(flatten(updates), Treatment("muon", STACKS), layout))
    first, firsts = 0, []
    for kernel in kernels:
        firsts.append(first)
        first = owned_matrices._next_owner([kernel], layout, first)
    assert (firsts, first) == ([0, 3], 6)
    _, text = orthogonalized(updates, specs, mesh)
    assert text.count(" conditional(") == 2


def test_a_side_split_inside_is_left_to_the_compiler():
    """Head sizes split over `tensor` cannot be moved whole; the update is the same."""
    rng = np.random.default_rng(0)
    updates = {"layers": {"heads": rng.normal(size=(2, 16, 2, 8)).astype("float32")}}
    treatment = Treatment("muon", STACKS, rows={"heads": Matrix((0,), (1, 2))})
    mesh = tiny.mesh(tensor=2)
    layout = UpdateLayout(
        mesh, (("layers/heads", P(None, None, None, "tensor")),), jnp.dtype("float32")
    )
    (kernel,) = owned_matrices._kernels(flatten(updates), treatment, layout)
    assert kernel.owners == ()
    expected = orthogonalize(updates, treatment, None, 0.2)
    found = orthogonalize(updates, treatment, layout, 0.2)
    np.testing.assert_allclose(found["layers"]["heads"], expected["layers"]["heads"], atol=1e-6)


@pytest.mark.parametrize(("compute", "dtype"), [("float16", "float32"), ("bfloat16", "bfloat16")])
def test_one_dtype_whoever_owns(compute, dtype):
    """Of a plan: float32 for float16, whose squares of small gradients are zero; stacks of another dimension, too."""
    mesh = tiny.mesh(fsdp=4)
    state = SimpleNamespace(path="0/stacked/layers/0/mu/layers/wide", spec=P(None, "fsdp"))
    plan = SimpleNamespace(
        mesh=mesh, optimizer_state=[state], precision=SimpleNamespace(compute=compute)
    )
    layout = UpdateLayout.of(plan)
    assert layout.dtype == dtype
    stacks = {"layers": Stack(dim=1)}
    treatment = Treatment("muon", stacks)
    small = {"layers": {"wide": 1e-6 * tower(3, ("wide",))["layers"]["wide"].transpose(1, 0, 2)}}
    (kernel,) = owned_matrices._kernels(flatten(small), treatment, layout)
    assert kernel.owners == ("fsdp",)
    split = jax.device_put(small, NamedSharding(mesh, P("fsdp")))
    found = jax.jit(lambda x: orthogonalize(x, treatment, layout, 0.2))(split)["layers"]["wide"]
    alone = dataclasses.replace(layout, mesh=tiny.mesh())
    expected = jax.jit(lambda x: orthogonalize(x, treatment, alone, 0.2))(small)["layers"]["wide"]
    assert np.sqrt(np.mean(np.square(found))) == pytest.approx(0.2, rel=0.3)
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)


def test_momentum_is_optax():
    """With the orthogonalisation after it, the whole is `optax.contrib.scale_by_muon`, state included."""
    rng = np.random.default_rng(0)
    whole, momentum = contrib.scale_by_muon(beta=0.9), nesterov_momentum(0.9)
    treatment = Treatment("muon", {}, rows={"w": Matrix((0,), (1,))})
    params = jnp.zeros((8, 12))
    state, ours = whole.init(params), momentum.init(params)
    for _ in range(3):
        gradient = jnp.asarray(rng.normal(size=(8, 12)), jnp.float32)
        expected, state = whole.update(gradient, state)
        mixed, ours = momentum.update(gradient, ours)
        found = orthogonalize({"w": mixed}, treatment, None, 1 / np.sqrt(12))["w"]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(ours) == jax.tree.structure(state)
    assert not np.allclose(mixed, gradient), "the control: there is a momentum"
