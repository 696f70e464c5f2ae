"""DiLoCo: exact where it must be, replicas alike after a synchronization, and few bytes between them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd
from spmd import tree
from spmd.analysis.collective_audit import audit_collectives
from spmd.checkpoint.manager import CheckpointManager
from spmd.checkpoint.tree import OptionalState
from spmd.diloco.transform import DiLoCo
from spmd.errors import CheckpointError, ConfigError, MeshError
from spmd.training.state import TrainState, as_stored, from_stored
from spmd.training.step import TrainStep
from tests import tiny

LAYERS, WIDTH, EXAMPLES = 2, 64, 16
PLAIN = optax.sgd(1.0)
"""The outer optimizer that makes the mean of the replicas the new parameters."""
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
SGD, ADAM = optax.sgd(0.1), optax.adamw(1e-2)
RULES = spmd.Rules(
    params=[
        ("up", P("fsdp", "tensor")),
        ("down", P("tensor", "fsdp")),
        ("bias", spmd.replicate("few")),
    ],
    stacked={"tower": None},
)
KERNEL = "tower/up"


def init(key: jax.Array) -> Any:
    draw = functools.partial(jax.random.normal, shape=(LAYERS, WIDTH, WIDTH))
    up, down = jax.random.split(key)
    return {"tower": {"up": draw(up) / 8, "down": draw(down) / 8}, "bias": jnp.ones((WIDTH,))}


def apply(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

    x, _ = jax.lax.scan(layer, x, params["tower"])
    return x + params["bias"][None]


MODEL = spmd.Model(init, apply)


def loss_fn(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
    errors = (MODEL.apply(params, batch["x"]) - batch["y"]) ** 2
    return {"loss": errors.mean(axis=-1).sum(), "weight": jnp.float32(len(errors))}, variables


def plan_of(mesh, optimizer, **options) -> spmd.ShardingPlan:
    return spmd.make_plan(mesh, RULES, MODEL, optimizer, **options)


@functools.cache
def make(
    inner=ADAM, outer=NESTEROV, sizes: tuple = (("data", 2), ("fsdp", 2)), every: int = 4, **options
) -> TrainStep:
    mesh = tiny.mesh(**dict(sizes))
    one = spmd.make_train_step(plan_of(spmd.replica_mesh(mesh), inner), loss_fn)
    plan = plan_of(mesh, outer, transforms=[DiLoCo(one, every, **options)])
    return spmd.make_train_step(plan, loss_fn)


@functools.cache
def data(steps: int = 8, examples: int = EXAMPLES) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, steps, examples, WIDTH)).astype(np.float32)
    return [{"x": x[step], "y": y[step]} for step in range(steps)]


def train(step: TrainStep, batches: Any, state: TrainState | None = None) -> TrainState:
    if state is None:
        state = step.init_state(0)
    for batch in batches:
        state, _ = step(state, batch)
    return state


def host(arrays: Any) -> dict[str, np.ndarray]:
    return tree.flatten(jax.device_get(arrays))


def replicas(state: TrainState) -> dict[str, np.ndarray]:
    """The parameters of the replicas, `[replica, …]`."""
    return host(state.transforms["diloco"]["params"])


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[path] - other[path]).max()) for path in one)


@pytest.mark.parametrize("rate", [0.1, 0.2], ids=["equal", "control: another rate"])
def test_one_inner_step_of_sgd_is_data_parallelism(rate):
    """H = 1: the mean of the replicas' steps is the step by the mean gradient."""
    step = make(optax.sgd(rate), PLAIN, every=1)
    whole = spmd.make_train_step(plan_of(tiny.mesh(data=2, fsdp=2), SGD), loss_fn)
    state, expected = step.init_state(0), whole.init_state(0)
    for batch in data(3):
        state, metrics = step(state, batch)
        expected, wanted = whole(expected, batch)
    error = largest_difference(host(state.params), host(expected.params))
    assert metrics["tokens"] == wanted["tokens"] == EXAMPLES
    if rate == 0.1:
        assert error < 1e-6
        assert float(metrics["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-6)
    else:
        assert error > 1e-3


def test_replicas_with_the_same_examples_train_as_one():
    """Plain training of one replica, to one rounding of the larger value after a period."""
    step = make(outer=PLAIN)
    alone = spmd.make_train_step(plan_of(tiny.mesh(fsdp=2), ADAM), loss_fn)
    twice = [jax.tree.map(lambda x: np.concatenate([x, x]), batch) for batch in data(4)]
    state, expected = step.init_state(0), alone.init_state(0)
    before = host(state.params)
    state, expected = train(step, twice, state), train(alone, data(4), expected)
    wanted = host(expected.params)
    for path, x in host(state.params).items():
        larger = np.maximum(np.abs(before[path]), np.abs(wanted[path]))
        assert (np.abs(x - wanted[path]) <= np.spacing(larger)).all(), path
        assert not np.array_equal(wanted[path], before[path]), path


@pytest.mark.parametrize("codec", ["float32", "int8", "int4"])
def test_replicas_are_bitwise_equal_after_a_synchronization_alone(codec):
    step = make(codec=codec)
    state = train(step, data()[:3])
    before = host(step.init_state(0).params)
    assert host(state.params).keys() == before.keys()
    for path, x in replicas(state).items():
        assert not np.array_equal(x[0], x[1]), path  # the control
        np.testing.assert_array_equal(host(state.params)[path], before[path])
    state = train(step, data()[3:4], state)
    for path, x in replicas(state).items():
        np.testing.assert_array_equal(x[0], x[1], path)
        np.testing.assert_array_equal(x[0], host(state.params)[path], path)
        assert not np.array_equal(x[0], before[path]), path


def outer_step(before: np.ndarray, own: np.ndarray) -> np.ndarray:
    """θ after the first outer step of `NESTEROV`, by hand."""
    difference = (before - own).mean(axis=0)
    return before - 0.7 * (difference + 0.9 * difference)


def test_fragments_are_synchronized_in_turn():
    """Layer 1 and a bias after two steps, layer 0 after four; a replica keeps a share of its own."""
    fragments = make(fragments=2, keep=0.25)
    undisturbed = make(every=100)
    state = fragments.init_state(0)
    start = host(state.params)
    alone = replicas(train(undisturbed, data()[:2]))[KERNEL]
    state = train(fragments, data()[:2], state)
    halfway, own = host(state.params), replicas(state)[KERNEL]
    expected = outer_step(start[KERNEL], alone)
    np.testing.assert_array_equal(halfway[KERNEL][0], start[KERNEL][0])
    np.testing.assert_array_equal(own[:, 0], alone[:, 0])
    near = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    near(halfway[KERNEL][1], expected[1])
    near(own[:, 1], 0.25 * alone[:, 1] + 0.75 * expected[1])
    end = host(train(fragments, data()[2:4], state).params)
    np.testing.assert_array_equal(end[KERNEL][1], halfway[KERNEL][1])
    assert not np.array_equal(end[KERNEL][0], start[KERNEL][0])
    times = [
        not np.array_equal(end["bias"], halfway["bias"]),
        not np.array_equal(halfway["bias"], start["bias"]),
    ]
    assert sum(times) == 1


def save_and_restore(folder, state: TrainState, step: TrainStep) -> TrainState:
    (diloco,) = step.plan.transforms
    optional = [OptionalState("variables/diloco", diloco.targets, diloco.adapt)]
    with CheckpointManager(folder) as manager:
        manager.save(int(state.step), as_stored(state))
        target = as_stored(step.abstract_state())
        restored, _ = manager.restore(int(state.step), target, optional=optional)
        return from_stored(restored, step.plan)


def test_resumed_inside_a_period_bitwise(tmp_path):
    step = make()
    expected = host(train(step, data()[:6]))
    state = save_and_restore(tmp_path, train(step, data()[:2]), step)
    for path, x in host(train(step, data()[2:6], state)).items():
        np.testing.assert_array_equal(x, expected[path], path)


def test_more_replicas_begin_at_the_mean(tmp_path):
    state = train(make(), data()[:2])
    expected = replicas(state)
    four = make(sizes=(("data", 4), ("fsdp", 2)))
    restored = save_and_restore(tmp_path, state, four)
    for path, x in replicas(restored).items():
        assert x.shape[0] == 4
        np.testing.assert_allclose(x[3], expected[path].mean(axis=0), rtol=1e-6, atol=1e-8)
    count = host(restored.transforms["diloco"]["optimizer"])["0/count"]
    np.testing.assert_array_equal(count, [2, 2, 2, 2])
    train(four, data()[2:4], restored)


def test_a_checkpoint_without_replicas_is_no_start(tmp_path):
    state = spmd.init_state(plan_of(tiny.mesh(data=2, fsdp=2), NESTEROV))
    with pytest.raises(CheckpointError, match="has no replicas of this model"):
        save_and_restore(tmp_path, state, make())


@pytest.mark.parametrize("codec", ["float32", "int8", "int4"])
def test_bytes_between_replicas_are_those_of_the_formula(codec):
    """Nothing but outer gradients and metrics is sent over `data`."""
    step = make(codec=codec)
    audit = audit_collectives(step.compile(data()[0]), step.mesh, plan=step.plan)
    between = [record for record in audit.records if record.axes == ("data",)]
    outer = [record for record in between if "outer gradients" in record.op_name]
    others = sum(record.bytes for record in between if record not in outer)
    promised = sum(sizes["data"][0] for sizes in step.plan.transforms[0].sent(step.plan).values())
    sent = sum(record.bytes for record in outer)
    kernels, bias = 2 * LAYERS * WIDTH * WIDTH // 2, WIDTH  # elements of a device
    bits = {"float32": (32, 32), "int8": (9, 8.5), "int4": (5, 4.5)}[
        codec
    ]  # blocks of 32 and of 64
    term = (kernels * bits[0] + bias * bits[1]) / 8
    assert sent == 2 * term  # a sum is a gather as well, and a gather is of two terms
    assert promised == pytest.approx(term / 4, rel=1e-3)  # once in 4 steps
    assert others <= 100


class Noisy(nnx.Module):
    """A network with a statistic and dropout."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, use_scale=False, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


NOISY = spmd.from_nnx(Noisy)


def noisy_loss(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
    found, variables = NOISY.forward(params, variables, key, batch["x"], train=True)
    errors = ((found - batch["y"]) ** 2).mean(axis=-1)
    return {"loss": errors.sum(), "weight": jnp.float32(len(errors))}, variables


def test_variables_are_of_each_replica_until_they_are_averaged():
    """They begin at given ones; dropout differs between replicas, also for the same examples."""
    rules = spmd.Rules(
        params=[
            ("linear/kernel", P("fsdp")),
            ("norm/.*|dropout/.*", spmd.replicate("small")),
        ]
    )
    mesh = tiny.mesh(data=2, fsdp=2)
    one = spmd.make_plan(spmd.replica_mesh(mesh), rules, NOISY, SGD)
    diloco = DiLoCo(spmd.make_train_step(one, noisy_loss), every=2)
    plan = spmd.make_plan(mesh, rules, NOISY, PLAIN, transforms=[diloco])
    step = spmd.make_train_step(plan, noisy_loss)
    given = {"norm": {"mean": jnp.full((WIDTH,), 100.0), "var": jnp.ones((WIDTH,))}}
    state = spmd.init_state(plan, 0, variables=given)
    batch = jax.tree.map(lambda x: np.concatenate([x[:8], x[:8]]), data()[0])
    state, _ = step(state, batch)
    own = host(state.transforms["diloco"])
    mean = own["variables/norm/mean"]
    assert mean.min() > 90
    np.testing.assert_array_equal(host(state.variables)["norm/mean"], 100.0)
    assert not np.array_equal(*own["params/linear/kernel"])
    state, _ = step(state, batch)
    own = host(state.transforms["diloco"])
    np.testing.assert_array_equal(*own["params/linear/kernel"])
    np.testing.assert_array_equal(own["variables/norm/mean"][0], host(state.variables)["norm/mean"])
    assert not np.array_equal(*own["variables/dropout/rngs/key"])


def one_replica(**options) -> TrainStep:
    return spmd.make_train_step(
        plan_of(spmd.replica_mesh(tiny.mesh(data=2)), ADAM, **options), loss_fn
    )


def test_codes_of_moments_are_those_of_one_replica(tmp_path):
    """A mean of scales with the codes of one replica would be the moments of none."""
    config = spmd.OptimizerConfig(moments="8bit", moments_block=32, schedule="constant")
    inner = spmd.make_optimizer(config, 8, stacked={"tower": None})
    state = train(make(inner), data()[:2])
    restored = save_and_restore(tmp_path, state, make(inner, sizes=(("data", 4), ("fsdp", 2))))
    before = host(state.transforms["diloco"]["optimizer"])
    after = host(restored.transforms["diloco"]["optimizer"])
    for path, x in after.items():
        np.testing.assert_array_equal(x[2], before[path][0], path)


def wrong(pattern: str, inner: TrainStep, every: int = 4, outer=NESTEROV, **options: Any):
    """A plan on two devices that is refused."""
    sizes = options.pop("sizes", {"data": 2})
    with pytest.raises(ConfigError, match=pattern):
        plan_of(tiny.mesh(**sizes), outer, transforms=[DiLoCo(inner, every, **options)])


def test_what_cannot_be_synchronized_is_an_error():
    inner = one_replica()
    wrong("every: is 0 steps", inner, 0)
    with pytest.raises(
        ConfigError, match="keep_gradients: is true, and diloco takes the gradients"
    ):
        spmd.make_train_step(make().plan, loss_fn, keep_gradients=True)
    wrong("keep: is 1.0", inner, keep=1.0)
    wrong("(?s)codec: is 'int3'.*fix: float32, int8 or int4", inner, codec="int3")
    wrong("(?s)fragments: are 3.*3 fragments in 2 steps.*fix: at most 2", inner, 2, fragments=3)
    wrong("fragments: are 4, and 1 of them are empty", inner, fragments=4)
    wrong("(?s)no replicas along data.*mesh.data = 1", inner, sizes={"fsdp": 2})
    wrong("(?s)is not for pipelines.*mesh.pipe = 2", inner, sizes={"data": 2, "pipe": 2})
    wrong(
        "(?s)is of a step on the mesh.*a replica has .*'fsdp': 2",
        inner,
        sizes={"data": 2, "fsdp": 2},
    )
    wrong("has 0/count in the outer optimizer's state", inner, outer=optax.adam(0.1), fragments=2)
    wrong("master weights in the inner optimizer", one_replica(precision="bf16-params"))
    rules = dataclasses.replace(RULES, params=(("up|down|bias", P("data")),))
    with pytest.raises(ConfigError, match="has bias split over data"):
        spmd.make_plan(tiny.mesh(data=2), rules, MODEL, NESTEROV, transforms=[DiLoCo(inner, 4)])
    with pytest.raises(MeshError, match=r"mesh\.data: is 1: there are no replicas"):
        spmd.replica_mesh(tiny.mesh(fsdp=2))
