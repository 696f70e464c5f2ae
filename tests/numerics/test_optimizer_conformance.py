"""One suite that every optimizer passes: its state is split as planned and stays so, and splitting changes no number.

The tree has what makes trouble: stacked layers, a square matrix whose dimensions look alike, an
embedding, scales, and parameters beside the stack. The mesh is fsdp=4 × tensor=2.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib

from spmd.errors import RuleError
from spmd.model_interface.model import Model
from spmd.optim.config import OptimizerConfig, make_optimizer
from spmd.optim.layerwise import assert_layerwise, check_layerwise
from spmd.optim.master_weights import wrap_optimizer_for_precision
from spmd.optim.per_layer import per_layer
from spmd.plan.plan import ShardingPlan, make_plan
from spmd.plan.records import PlanEntry
from spmd.precision import POLICIES
from spmd.sharding.mesh import make_mesh
from spmd.sharding.rules import Rules, replicate
from spmd.tree import flatten, map_with_path
from tests.rounding import FACTOR, assert_close, noise_of, ratios
from tests.tiers import soak_but

LAYERS = 2
SHAPES = {
    "embed": {"embedding": (16, 8)},
    "layers": {
        "down": {"kernel": (LAYERS, 16, 8)},
        "norm": {"scale": (LAYERS, 8)},
    },
    "norm": {"scale": (8,)},
    "square": {"kernel": (8, 8)},
}
RULES = Rules(
    [
        ("embedding", P("tensor", "fsdp")),
        ("down/kernel", P("tensor", "fsdp")),
        ("kernel", P("fsdp", "tensor")),
        ("scale", replicate("a few bytes")),
    ]
)


def draw(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32), SHAPES, is_leaf=is_shape
    )


def is_shape(node: Any) -> bool:
    return isinstance(node, tuple)


MODEL = Model(lambda key: jax.tree.map(jnp.zeros, SHAPES, is_leaf=is_shape), lambda params: params)


class RowRmsState(NamedTuple):
    """A user's own state: a counter, a mean square for every row, and an average of the parameters."""

    count: jax.Array
    rows: Any
    average: Any


def scale_by_row_rms() -> optax.GradientTransformation:
    """A user's own transform, which looks at rows of one layer and at nothing across layers."""

    def init(params: Any) -> RowRmsState:
        rows = jax.tree.map(lambda p: jnp.zeros(p.shape[:-1]), params)
        return RowRmsState(jnp.zeros([], jnp.int32), rows, params)

    def update(updates: Any, state: RowRmsState, params: Any = None) -> tuple[Any, RowRmsState]:
        rows = jax.tree.map(
            lambda r, g: 0.9 * r + 0.1 * jnp.mean(g**2, axis=-1), state.rows, updates
        )
        average = jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, state.average, params)
        updates = jax.tree.map(
            lambda g, r: g / jnp.expand_dims(jnp.sqrt(r) + 1e-8, -1), updates, rows
        )
        return updates, RowRmsState(state.count + 1, rows, average)

    return optax.GradientTransformation(init, update)


def matrices(params: Any) -> Any:
    """Muon's dimension numbers for stacks as for layers: the last two dimensions of every kernel."""
    numbers = contrib.MuonDimensionNumbers(-2, -1)
    return map_with_path(lambda path, _: numbers if path.endswith("kernel") else None, params)


def kernels(params: Any) -> Any:
    return map_with_path(lambda path, _: path.endswith("kernel"), params)


def muon_or_adamw(params: Any) -> Any:
    return map_with_path(
        lambda path, _: "muon" if "layers" in path and path.endswith("kernel") else "adamw", params
    )


def config(name: Any, **fields: Any) -> optax.GradientTransformation:
    config = OptimizerConfig(name=name, learning_rate=0.1, schedule="constant", **fields)
    outside = {"embed/embedding": None, "square/kernel": None} if name == "muon" else None
    return make_optimizer(config, steps=10, matrices=outside)


FACTORED = dict(learning_rate=0.1, min_dim_size_to_factor=8)
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "adamw": optax.adamw(0.1),
    "lion": optax.lion(0.1),
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adafactor": per_layer(optax.adafactor(**FACTORED)),
    "adafactor with momentum": per_layer(optax.adafactor(**FACTORED, momentum=0.9)),
    "adafactor unfactored": per_layer(optax.adafactor(0.1, factored=False)),
    "muon": per_layer(contrib.muon(0.1)),
    "muon by dimension numbers": contrib.muon(
        0.1, muon_weight_dimension_numbers=matrices, consistent_rms=0.2
    ),
    "sm3": per_layer(optax.sm3(0.1)),
    "lamb": per_layer(optax.lamb(0.1)),
    "multi steps": optax.MultiSteps(optax.adamw(0.1), 2).gradient_transformation(),
    "masked": optax.masked(optax.adamw(0.1), kernels),
    "muon and adamw": optax.partition(
        {"muon": per_layer(contrib.muon(0.1)), "adamw": optax.adamw(0.1)}, muon_or_adamw
    ),
    "inject hyperparams": optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 9)
    ),
    "ema": optax.chain(optax.ema(0.9), optax.scale(-0.1)),
    "schedule free": contrib.schedule_free_adamw(0.1),
    "apply if finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "mechanic": contrib.mechanize(optax.adam(0.1)),
    "own chain": optax.chain(optax.clip_by_global_norm(1.0), scale_by_row_rms(), optax.scale(-0.1)),
    "config adafactor": config("adafactor"),
    "config muon": config("muon"),
    "config adamw in 8 bits": config("adamw", moments="8bit", moments_block=2),
    "config adamw in bfloat16": config("adamw", moments="bfloat16"),
    "config lion in 8 bits": config("lion", moments="8bit", moments_block=2),
    "config sgd in bfloat16": config("sgd", moments="bfloat16"),
    "master weights": wrap_optimizer_for_precision(optax.adamw(0.1), POLICIES["bf16-params"]),
}
RAW = {
    "adafactor": optax.adafactor(**FACTORED),
    "lamb behind a clip": optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1)),
    "lamb in steps": optax.MultiSteps(optax.lamb(0.1), 1).gradient_transformation(),
    "muon": contrib.muon(0.1),
    "sm3": optax.sm3(0.1),
    "block rms": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "centralize": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "decay by rank": optax.adamw(
        0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    ),
}


IN_ZERO_1 = ("adamw", "adafactor", "config muon", "config adamw in 8 bits")
"""Of each kind of state one: like parameters, factored, by matrix, in blocks."""
STAGES = [*((name, 3) for name in OPTIMIZERS), *((name, 1) for name in IN_ZERO_1)]


def plan_of(optimizer: optax.GradientTransformation, zero: int = 3) -> ShardingPlan:
    assert jax.device_count() == 8
    return make_plan(make_mesh(fsdp=4, tensor=2), RULES, MODEL, optimizer, zero=zero)


def move(
    optimizer: optax.GradientTransformation, params: Any, state: Any, gradients: Any
) -> tuple[Any, Any]:
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


GRADIENTS = (draw(1), draw(2))


@functools.cache
def on_one_device(name: str) -> tuple[Any, Any]:
    """Parameters and state after two updates, and what float32 loses of them."""
    optimizer = OPTIMIZERS[name]
    init, update = jax.jit(optimizer.init), jax.jit(functools.partial(move, optimizer))

    def run(params: Any, gradients: Any) -> Any:
        state = init(params)
        for each in gradients:
            params, state = update(params, state, each)
        return params, state

    return run(draw(0), GRADIENTS), noise_of(run, draw(0), GRADIENTS)


class Run(NamedTuple):
    """Parameters with optimizer state, as one tree: after init and after two updates."""

    plan: ShardingPlan
    before: Any
    after: Any


@functools.cache
def on_the_mesh(name: str, zero: int) -> Run:
    plan = plan_of(OPTIMIZERS[name], zero)
    shardings = jax.tree.map(
        lambda leaf: leaf.sharding, (plan.abstract_params, plan.abstract_optimizer_state)
    )
    params = jax.device_put(draw(0), shardings[0])
    state = jax.jit(plan.optimizer.init, out_shardings=shardings[1])(params)
    # Where the state ends up is left to the partitioner, so that staying as it was proves
    # something.
    update = jax.jit(functools.partial(move, plan.optimizer), out_shardings=(shardings[0], None))
    before = after = (params, state)
    for gradients in GRADIENTS:
        after = update(*after, jax.device_put(gradients, plan.gradient_shardings))
    return Run(plan, before, after)


def wrong_shards(leaves: tuple[PlanEntry, ...], arrays: Any) -> list[str]:
    """The arrays that do not lie as planned, in their sharding or in the bytes that the first device holds."""
    wrong = []
    for leaf, (path, array) in zip(leaves, flatten(arrays).items(), strict=True):
        assert leaf.path == path
        held = sum(
            shard.data.nbytes
            for shard in array.addressable_shards
            if shard.device == jax.devices()[0]
        )
        planned = NamedSharding(array.sharding.mesh, leaf.spec)
        if (
            not array.sharding.is_equivalent_to(planned, array.ndim)
            or held != leaf.bytes_per_device
        ):
            wrong.append(path)
    return wrong


@pytest.mark.parametrize(("name", "zero"), STAGES)
@pytest.mark.compat
def test_state_lies_as_planned_and_stays(name: str, zero: int) -> None:
    """After init and after updates every leaf has the planned sharding and bytes; ZeRO-1 replicates only parameters."""
    run = on_the_mesh(name, zero)
    for params, state in (run.before, run.after):
        assert not wrong_shards(run.plan.params, params)
        assert not wrong_shards(run.plan.optimizer_state, state)
    tables = (run.plan.params, run.plan.gradients, run.plan.optimizer_state)
    over_fsdp = [any("fsdp" in str(leaf.spec) for leaf in table) for table in tables]
    assert over_fsdp == [zero == 3, zero == 3, True]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_matrix_of_the_state_is_whole(name: str) -> None:
    """Every array of the state as large as a matrix of parameters is split over all eight devices, in ZeRO-1 too."""
    matrices = [
        leaf
        for leaf in plan_of(OPTIMIZERS[name], zero=1).optimizer_state
        if np.prod(leaf.shape) >= 64
    ]
    assert all(
        leaf.bytes_per_device * 8 == np.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
        for leaf in matrices
    )
    assert matrices or "adafactor" in name


@pytest.mark.parametrize(("name", "zero"), STAGES)
def test_a_mesh_updates_as_one_device_does(name: str, zero: int) -> None:
    """Two updates on the mesh give the parameters and the state of one device."""
    assert_close(on_the_mesh(name, zero).after, *on_one_device(name))


@pytest.mark.parametrize("name", soak_but(OPTIMIZERS, *[*OPTIMIZERS][::2]))
def test_a_stack_is_updated_as_its_layers_are(name: str) -> None:
    """The optimizer moves stacked and separate layers alike, in numbers and as far as its program shows."""
    assert_layerwise(OPTIMIZERS[name], draw(0))
    assert check_layerwise(OPTIMIZERS[name], draw(0)) == []


@pytest.mark.parametrize("name", RAW)
def test_control_a_stack_is_not_its_layers(name: str) -> None:
    """Control: an optimizer that looks at whole arrays, ranks or keys is found by both checks, on a stack only."""
    with pytest.raises(AssertionError, match=r"layers/\d/"):
        assert_layerwise(RAW[name], draw(0))
    problems = check_layerwise(RAW[name], draw(0))
    assert problems
    assert all(problem.where.startswith("layers/") for problem in problems)
    without = {path: leaf for path, leaf in draw(0).items() if path != "layers"}
    assert check_layerwise(RAW[name], without) == []


def test_control_state_that_is_whole_is_found() -> None:
    """Control: state that was created replicated has other bytes on a device than planned, leaf by leaf."""
    plan, (params, _), _ = on_the_mesh("adamw", 3)
    whole = jax.device_put(plan.optimizer.init(params), NamedSharding(plan.mesh, P()))
    assert len(wrong_shards(plan.optimizer_state, whole)) == 2 * 3


def test_control_another_update_is_found() -> None:
    """Control: gradients off by a percent are a thousand times over the tolerance."""
    scaled = jax.tree.map(lambda x: x * 1.01, on_the_mesh("sgd", 3).after)
    assert max(ratios(scaled, *on_one_device("sgd")).values()) > 1000 * FACTOR


def test_noise_on_other_parameters_is_no_problem() -> None:
    """A random key is refused for the stack it draws for, and for no other parameter."""
    noise = optax.add_noise(0.1, 0.55, key=0)
    beside = optax.masked(
        noise, lambda params: map_with_path(lambda path, _: not path.startswith("layers"), params)
    )
    assert check_layerwise(beside, draw(0)) == []
    assert {problem.what for problem in check_layerwise(noise, draw(0))} == {
        "the optimizer draws random numbers for the stack as a whole"
    }


@pytest.mark.compat
def test_every_leaf_of_unknown_structure_is_listed() -> None:
    """One error names all the leaves that cannot be told apart, each with its shape."""

    def init(params: Any) -> Any:
        return {
            "matrix": jnp.zeros((300, 500)),
            "flat": jnp.zeros(sum(p.size for p in jax.tree.leaves(params))),
        }

    odd = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    with pytest.raises(RuleError) as caught:
        plan_of(optax.chain(optax.adam(0.1), odd))
    assert [problem.where for problem in caught.value.problems] == [
        "optimizer state 1/flat",
        "optimizer state 1/matrix",
    ]
    assert "(300, 500)" in str(caught.value)
