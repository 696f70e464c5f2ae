"""Muon on kernels of more than two dimensions: as matrices, and on a mesh as on one device."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd
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
            update, state = MUON.update(each, state, params)
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
    for path, update in theirs.items():  # orthogonalizing amplifies rounding
        assert np.linalg.norm(ours[path] - update) < 2e-3 * np.linalg.norm(update), path
