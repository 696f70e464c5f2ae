"""Optimizer state in host memory, updated a piece at a time, trains as state on the device does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from spmd import tree
from spmd.errors import ConfigError, RuleError
from spmd.gradients.accumulate import accumulate
from spmd.gradients.base import value_and_grad
from spmd.host_memory import chunks as cuts
from spmd.model_interface.model import Model
from spmd.optim.config import OptimizerConfig, make_optimizer
from spmd.optim.per_layer import per_layer
from spmd.optim.skip_updates import skip_bad_updates
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.sharding.rules import Rules, replicate
from spmd.testing import assert_parity, token_batches
from spmd.training.state import init_state
from tests import tiny
from tests.rounding import FACTOR, assert_close, noise_of, ratios
from tests.tiers import soak_but

BIG = tiny.replaced(vocab=512)
BATCHES = token_batches((8, 16), BIG.vocab, steps=2)
GRAD_FN = value_and_grad(tiny.loss_fn(BIG))
OFFLOAD = ("offload", ("optimizer_state",))


@pytest.fixture(autouse=True, scope="module")
def small_pieces():
    """Arrays of this size are cut, as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "CHUNK_BYTES", 4096)
        patch.setattr(cuts, "SMALL_BYTES", 256)
        yield


def plan(optimizer, zero=3, offload=True, model=BIG, **sizes):
    options = (("zero", zero), *([OFFLOAD] if offload else []))
    return tiny.plan(model, optimizer, options, **sizes)


def config(name, **fields):
    config = OptimizerConfig(name=name, learning_rate=1e-2, schedule="constant", **fields)
    return make_optimizer(config, steps=3, model=tiny.model(BIG))


def _no_norms(params):
    return tree.map_with_path(lambda path, _: "norm" not in path, params)


OPTIMIZERS = {
    "adamw with a clip": config("adamw", clip_norm=0.1),
    "adafactor": config("adafactor"),
    "lion": config("lion"),
    "sgd": config("sgd"),
    "muon": config("muon"),
    "raw adamw": optax.adamw(1e-2),
    "lamb per layer": per_layer(optax.lamb(1e-2)),
    "adafactor, factored": per_layer(optax.adafactor(1e-2, min_dim_size_to_factor=16)),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "masked": optax.masked(optax.adam(1e-2), _no_norms),
    "an average": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "skipping": skip_bad_updates(config("adamw")),
    "averaged": skip_bad_updates(config("adamw", ema_decay=0.9)),
}


def gradients_of(layout, step):
    """Random gradients, where the plan keeps them."""

    def draw(path, leaf, sharding):
        rng = np.random.default_rng([step, len(path)])
        return jax.device_put(rng.normal(size=leaf.shape).astype(np.float32), sharding)

    return tree.map_with_path(draw, layout.abstract_params, layout.gradient_shardings)


@functools.cache
def updating(name, zero=3, offload=True, pipe=1):
    """Three updates on a mesh as a function, and its arguments: initial parameters and gradients."""
    model = dataclasses.replace(BIG, layers=2 * pipe)
    layout = plan(OPTIMIZERS[name], zero, offload, model, pipe=pipe, fsdp=4 // pipe, tensor=2)
    state = init_state(layout)
    shardings = jax.tree.map(lambda x: x.sharding, (state.params, state.optimizer_state))
    update = jax.jit(layout.storage.make_update(layout), out_shardings=shardings)

    def run(params, gradients):
        held = state.optimizer_state
        for each in gradients:
            params, held = update(each, held, params)
        return jax.device_get((params, held))

    return run, state.params, [gradients_of(layout, step) for step in range(3)]


@functools.cache
def updated(*args, **options):
    """Parameters and state after three updates, on the host."""
    run, *arguments = updating(*args, **options)
    return run(*arguments)


@functools.cache
def lost(name, **options):
    """What float32 loses of both without offload."""
    return noise_of(*updating(name, offload=False, **options))


IN_CI = ("muon",)
"""One whose update is made of pieces, and of whole matrices."""


@pytest.mark.parametrize("name", soak_but(OPTIMIZERS, *IN_CI))
def test_the_update_equals_that_without_offload(name):
    """Every kind of optimizer of the conformance suite, over three updates on a mesh."""
    assert_close(updated(name), updated(name, offload=False), lost(name))


@pytest.mark.parametrize("zero", [1])
def test_it_goes_with_every_zero_stage(zero):
    """Where parameters and gradients are whole over fsdp, so are the pieces of them."""
    name = "adamw with a clip"
    assert_close(updated(name, zero)[0], updated(name, offload=False)[0], lost(name)[0])


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", ["muon", "adamw with a clip", "adafactor, factored", "lamb per layer"]
)
def test_a_piece_is_a_layer_of_each_stage(name):
    """Layers that are split over stages are updated as those that are not."""
    assert_close(updated(name, pipe=2), updated(name, offload=False, pipe=2), lost(name, pipe=2))


def test_of_one_gradient_adamw_makes_the_same_moments_bit_for_bit():
    """And parameters to one rounding: inside a loop XLA turns the division by a scalar into a product."""
    (_, state), (_, expected) = updated("raw adamw"), updated("raw adamw", offload=False)
    jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_control_another_optimizer_is_seen():
    """The comparison of the tests above can fail: here by another weight decay."""
    found = ratios(
        updated("adamw with a clip")[0],
        updated("raw adamw", offload=False)[0],
        lost("raw adamw")[0],
    )
    assert max(found.values()) > 100 * FACTOR


@pytest.mark.soak
def test_training_equals_that_without_offload():
    """The whole step, with accumulation and a clip, and a step that is not finite, which changes nothing."""
    offloaded, usual = (
        plan(OPTIMIZERS["skipping"], offload=offload, fsdp=4, tensor=2) for offload in (True, False)
    )
    assert_parity(offloaded, usual, accumulate(GRAD_FN, 2), BATCHES)


def test_large_state_lives_in_host_memory_and_small_state_does_not():
    """Layers and pieces of large arrays are on the host; scalars and norms stay; the plan says which."""
    layout = plan(OPTIMIZERS["raw adamw"], fsdp=2)
    kinds = {leaf.path: leaf.memory_kind for leaf in layout.optimizer_state}
    assert kinds["0/mu/layers/mlp/up_proj/kernel"] == kinds["0/nu/embed/embedding"] == "pinned_host"
    assert (
        kinds["0/count"]
        == kinds["0/mu/layers/mlp_norm/scale"]
        == kinds["0/mu/norm/scale"]
        == "device"
    )
    held = {
        path: x.sharding.memory_kind
        for path, x in tree.flatten(init_state(layout).optimizer_state).items()
    }
    assert held == kinds
    assert "pinned_host" in layout.text("optimizer_state")


def test_each_parameter_is_in_one_cut():
    """Layers go one at a time, large arrays in pieces of bounded size, the rest together."""
    layout = plan(OPTIMIZERS["raw adamw"], fsdp=2)
    assert sorted(path for cut in layout.storage.chunks for path in cut.paths) == sorted(
        leaf.path for leaf in layout.params
    )
    chunks = {
        chunk.paths[0]: (chunk.dim, chunk.chunks, chunk.shards) for chunk in layout.storage.chunks
    }
    assert chunks["layers/attention/k_proj/kernel"] == (0, BIG.layers, 1)
    assert chunks["embed/embedding"] == (1, 2, 2)
    assert chunks["norm/scale"] == (0, 1, 1)


def test_a_split_dimension_is_cut_inside_the_shards():
    """Where every dimension is split, each device cuts its own part, and nothing is sent."""
    model = Model(lambda key: {"w": jnp.ones((128, 256))}, lambda params: params)
    layout = make_plan(
        tiny.mesh(fsdp=4, tensor=2),
        Rules([("w", P("fsdp", "tensor"))]),
        model,
        optax.adam(1e-2),
        offload=("optimizer_state",),
    )
    assert [(chunk.dim, chunk.chunks, chunk.shards) for chunk in layout.storage.chunks] == [
        (0, 4, 4)
    ]
    state = init_state(layout)
    update = jax.jit(layout.storage.make_update(layout))
    program = update.lower(state.params, state.optimizer_state, state.params).compile().as_text()
    assert not any(
        kind in program for kind in ("all-gather", "all-to-all", "collective-permute", "all-reduce")
    )


@pytest.mark.parametrize(
    ("shape", "spec", "dim"),
    [
        ((4096, 128_256), P("fsdp", "tensor"), 1),
        ((128_256, 4096), P(None, ("fsdp", "tensor")), 1),
        ((8192, 8192), P(), 0),
    ],
)
def test_thin_shards_are_cut_along_their_rows_of_tiles(shape, spec, dim):
    """[128, 16032] and [128256, 16] pad less the other way round, so a TPU lays them out so; [8192, 8192] does not."""
    model = Model(lambda key: {"w": jnp.ones(shape)}, lambda params: params)
    rules = Rules([("w", spec if spec else replicate("to cut it whole"))])
    layout = make_plan(
        abstract_mesh(MeshShape(fsdp=32, tensor=8)),
        rules,
        model,
        optax.adam(1e-2),
        offload=OFFLOAD[1],
    )
    assert [cut.dim for cut in layout.storage.chunks] == [dim]
    assert all(
        leaf.memory_kind == "pinned_host" for leaf in layout.optimizer_state if leaf.shape == shape
    )


def test_an_optimizer_that_looks_at_all_parameters_is_refused():
    """A norm of the whole gradient cannot be taken piece by piece; the error says where it belongs."""
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    with pytest.raises(RuleError, match=r"depends on .*\n.*two_phase"):
        plan(clipped, fsdp=8)


@pytest.mark.parametrize(
    ("mesh", "offload", "complaint"),
    [
        (MeshShape(fsdp=8), ("optimizer-state",), 'did you mean "optimizer_state"'),
        (MeshShape(pipe=2, fsdp=4), ("params",), "does not go with a pipeline"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(mesh, offload, complaint):
    """An unknown name, and parameters of layers that are split over stages."""
    with pytest.raises(ConfigError, match=complaint):
        make_plan(
            abstract_mesh(mesh),
            tiny.plan().rules,
            tiny.model(BIG),
            optax.adam(1e-2),
            offload=offload,
        )
