"""The step is compiled once, donates its state, and nothing is ever whole on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import ConfigError
from spmd.gradients.losses import cross_entropy
from spmd.models.decoder import DecoderConfig
from spmd.optim.skip_updates import skip_bad_updates
from spmd.partition_rules.llama import LLAMA
from spmd.plan.plan import make_plan
from spmd.testing import token_batches
from spmd.training.batch import place_batch
from spmd.training.state import abstract_state, init_program, init_state
from spmd.training.step import make_train_step
from tests import tiny
from tests.rounding import assert_close, noise_of

BATCHES = token_batches((8, 16), tiny.CONFIG.vocab, steps=3)


def placed(plan, batch):
    return place_batch(plan, batch)


def test_initial_parameters_are_bitwise_equal_on_every_mesh():
    """One seed, one set of parameters, on 1, 2, 4 and 8 devices; another seed gives another."""
    reference = init_state(tiny.plan(), seed=7)
    for sizes in (
        {"tensor": 2},
        {"fsdp": 4},
        {"data": 8},
        {"data": 2, "fsdp": 2, "tensor": 2},
    ):
        state = init_state(tiny.plan(**sizes), seed=7)
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(a, b), state.params, reference.params
        )
    other = init_state(tiny.plan(), seed=8)
    assert not np.array_equal(
        other.params["lm_head"]["kernel"], reference.params["lm_head"]["kernel"]
    )


def test_no_leaf_is_whole_on_one_device_while_it_is_created():
    """On fsdp=8 the init program's outputs are an eighth, and it never holds the largest leaf besides."""
    config = DecoderConfig(vocab=1024, d_model=128, layers=2, heads=4, kv_heads=4, d_ff=256)
    plan = make_plan(tiny.mesh(fsdp=8), LLAMA, tiny.model(config), optax.adamw(1e-3))
    memory = (
        init_program(plan).lower(abstract_state(plan).key, None, {}).compile().memory_analysis()
    )
    planned = sum(plan.bytes_per_device()[k] for k in ("params", "optimizer_state"))
    largest = 1024 * 128 * 4
    assert planned <= memory.output_size_in_bytes <= planned * 1.05
    assert memory.temp_size_in_bytes < largest

    # The control: the same parameters created whole do hold that leaf.
    whole = jax.jit(plan.model.init).lower(jax.random.key(0)).compile().memory_analysis()
    assert whole.output_size_in_bytes > largest


@pytest.mark.compat
def test_the_state_is_donated():
    """The step writes into the state's own memory, and the old state is gone."""
    plan = tiny.plan(fsdp=8)
    step = make_train_step(plan, tiny.loss_fn())
    memory = step.compile(placed(plan, BATCHES[0])).memory_analysis()
    held = sum(plan.bytes_per_device()[k] for k in ("params", "optimizer_state"))
    assert memory.alias_size_in_bytes >= held
    state = init_state(plan)
    after, _ = step(state, placed(plan, BATCHES[0]))
    assert state.params["lm_head"]["kernel"].is_deleted()
    assert not after.params["lm_head"]["kernel"].is_deleted()


@pytest.mark.compat
def test_the_second_step_compiles_nothing():
    """One compilation for a step and a batch shape, and one of the initial state for equal plans."""
    plan = make_plan(tiny.mesh(fsdp=4), LLAMA, tiny.model(), tiny.OPTIMIZER)
    again = make_plan(tiny.mesh(fsdp=4), LLAMA, tiny.model(), tiny.OPTIMIZER)
    assert plan is not again
    step = make_train_step(plan, tiny.loss_fn())
    state, _ = step(init_state(plan), placed(plan, BATCHES[0]))
    with _count_compilations() as compiled:
        state, _ = step(state, placed(plan, BATCHES[1]))
        init_state(again)
    assert compiled == []
    with _count_compilations() as compiled:  # the control: the counter counts
        jax.jit(lambda x: x + 41)(jnp.ones(3))
    assert compiled


class _count_compilations:
    def __enter__(self):
        self.seen = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self.seen

    def _listen(self, event, duration, **_):
        if event.endswith("backend_compile_duration"):
            self.seen.append(event)

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)


@pytest.mark.soak
def test_metrics_are_token_weighted_means():
    """The loss is sum over sum, whatever the padding; the weight is the number of tokens."""
    plan = tiny.plan(data=4, fsdp=2)
    _, metrics = make_train_step(plan, tiny.loss_fn())(init_state(plan), placed(plan, BATCHES[0]))
    params = init_state(tiny.plan()).params
    means = jax.jit(lambda params: {name: _mean(params, name) for name in ("loss", "accuracy")})
    assert float(metrics["tokens"]) == BATCHES[0]["weights"].sum()
    assert_close(
        {name: metrics[name] for name in ("loss", "accuracy")},
        means(params),
        noise_of(means, params),
    )


@pytest.mark.compat
def test_a_watched_function_of_the_state_is_reported():
    """`watch` adds a metric; it sees the states before and after the step."""
    plan = tiny.plan()
    step = make_train_step(plan, tiny.loss_fn(), watch={"twice": _twice})
    state = init_state(plan)
    seen = []
    for batch in BATCHES:
        state, metrics = step(state, placed(plan, batch))
        seen.append(float(metrics["twice"]))
    assert seen == [0.0, 2.0, 4.0]
    assert int(state.step) == 3


def _twice(before, after):
    return 1.0 * before.step + after.step - 1


def test_gradients_are_kept_as_the_optimizer_gets_them():
    """Kept gradients are what plain SGD moves the parameters by, and those of the mean loss; else none are."""
    plan = tiny.plan(optimizer=optax.sgd(1.0), data=4, fsdp=2)
    state = init_state(plan)
    before = jax.tree.map(np.array, state.params)
    state, metrics = make_train_step(plan, tiny.loss_fn(), keep_gradients=True)(
        state, placed(plan, BATCHES[0])
    )
    moved = jax.tree.map(lambda a, b: a - b, before, state.params)

    @jax.jit
    def exact(params):
        gradients = jax.grad(_mean)(params)
        movement = jax.tree.map(lambda p, g: p - (p - g), params, gradients)
        return gradients, movement, optax.tree.norm(gradients)

    found = metrics["gradients"], moved, metrics["gradient_norm"]
    assert_close(found, exact(before), noise_of(exact, before))
    assert float(metrics["gradient_norm"]) > 1e-2
    _, metrics = make_train_step(plan, tiny.loss_fn())(state, placed(plan, BATCHES[1]))
    assert "gradients" not in metrics


def _mean(params, name="loss"):
    sums, _ = tiny.loss_fn()(params, {}, jax.tree.map(jnp.asarray, BATCHES[0]), jax.random.key(0))
    return sums[name] / sums["weight"]


def test_a_step_that_is_not_finite_can_be_left_out():
    """NaN gradients change no parameter, no moment, and not the optimizer's step count."""
    optimizer = skip_bad_updates(tiny.OPTIMIZER)
    plan = tiny.plan(optimizer=optimizer, fsdp=2)
    step = make_train_step(plan, tiny.loss_fn())
    state = init_state(plan)
    before = jax.tree.map(np.asarray, (state.params, state.optimizer_state.inner))
    spoilt = {**BATCHES[0], "weights": BATCHES[0]["weights"] * np.nan}
    state, _ = step(state, placed(plan, spoilt))
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.optimizer_state.inner))
    assert int(state.optimizer_state.skipped) == 1
    state, metrics = step(state, placed(plan, BATCHES[0]))  # and a good step is taken
    assert np.isfinite(float(metrics["gradient_norm"]))
    assert not np.array_equal(before[0]["norm"]["scale"], state.params["norm"]["scale"])


@pytest.mark.compat
def test_finite_gradients_whose_norm_overflows_are_left_out():
    """Each element is finite, the sum of squares is not: Adam's second moment would stay infinite for good."""
    optimizer = skip_bad_updates(optax.adam(1.0))
    params = {"w": jnp.ones(4)}
    state = optimizer.init(params)
    updates, state = optimizer.update({"w": jnp.full(4, 1e25)}, state, params)
    assert float(jnp.abs(updates["w"]).max()) == 0.0
    assert int(state.skipped) == 1
    assert int(state.inner[0].count) == 0
    updates, state = optimizer.update({"w": jnp.ones(4)}, state, params)
    assert float(updates["w"][0]) == pytest.approx(-1.0, rel=1e-3)


def test_a_batch_of_padding_alone_changes_nothing_but_moments():
    """No token counts, so the loss and the gradients are 0, not NaN."""
    plan = tiny.plan(fsdp=2)
    empty = {**BATCHES[0], "weights": np.zeros_like(BATCHES[0]["weights"])}
    _, metrics = make_train_step(plan, tiny.loss_fn())(init_state(plan), placed(plan, empty))
    assert (
        float(metrics["loss"]) == float(metrics["gradient_norm"]) == float(metrics["tokens"]) == 0.0
    )


@pytest.mark.compat
def test_accuracy_counts_the_tokens_with_the_largest_logit():
    """Two of three targets have the largest logit of their position."""
    ones = jnp.ones((1, 3))
    sums = cross_entropy(jax.nn.one_hot(jnp.array([[0, 2, 3]]), 5), jnp.array([[0, 2, 4]]), ones)
    assert float(sums["accuracy"]) == 2.0


@pytest.mark.compat
def test_a_state_is_used_once_and_a_batch_may_be_of_the_host():
    """A donated state is an error and does not end the process, whichever call took it; NumPy batches train alike."""
    model = spmd.Model(lambda key: {"w": jnp.ones(4)}, lambda params, x: x)
    plan = make_plan(tiny.mesh(fsdp=2), spmd.Rules([("w", P("fsdp"))]), model, optax.adam(0.1))
    host = {"x": np.arange(8, dtype=np.float32)}

    def loss(params, variables, batch, key):
        x = batch["x"] if isinstance(batch, dict) else batch
        return {"loss": (params["w"].sum() * x).sum(), "weight": jnp.float32(8)}, variables

    step, other = make_train_step(plan, loss), make_train_step(plan, loss)
    placed = place_batch(plan, host)
    first = init_state(plan)
    trained = [
        spmd.fit(init_state(plan), step, [batch] * 2, steps=2)
        for batch in (host, placed, jnp.asarray(host["x"]))
    ]
    assert len({float(state.params["w"][0]) for state in trained}) == 1
    step(init_state(plan), placed["x"])
    assert len(step.programs) == 2, "a batch of another structure is another program"

    step(first, placed)
    with pytest.raises(ConfigError, match="state: was donated to another call: 6 of its 6 arrays"):
        step(first, placed)
    after, _ = step(init_state(plan), placed)
    other(after, placed)
    with pytest.raises(ConfigError, match="was donated"):
        step(after, placed)  # the newest of this step, taken by another one
    mixed = dataclasses.replace(init_state(plan), params=first.params)
    with pytest.raises(ConfigError, match=r"1 of its 6 arrays are gone\n *such as params/w"):
        step(mixed, placed)


@pytest.mark.compat
def test_the_state_is_a_frozen_value():
    """Nothing writes into a state by accident."""
    state = init_state(tiny.plan())
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.step = 3


@pytest.mark.compat
def test_bytes_per_device_are_those_of_the_shards():
    """What the plan says each device holds is what the arrays hold."""
    plan = tiny.plan(data=2, fsdp=2, tensor=2)
    state = init_state(plan)
    for tree, category in ((state.params, "params"), (state.optimizer_state, "optimizer_state")):
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
        assert plan.bytes_per_device()[category] == held


@pytest.mark.compat
def test_every_step_has_a_key_of_its_own():
    """A loss that reports what it draws reports another number in each step and for each seed, and else the same."""
    model = spmd.Model(lambda key: {"w": jnp.ones(4)}, lambda params, x: x)
    plan = make_plan(
        tiny.mesh(), spmd.Rules([("w", spmd.replicate("16 bytes"))]), model, optax.sgd(0.1)
    )

    def loss(params, variables, batch, key):
        return {
            "loss": params["w"].sum(),
            "drawn": jax.random.uniform(key),
            "weight": jnp.float32(1),
        }, variables

    def drawn(seed):
        state, step = init_state(plan, seed), make_train_step(plan, loss)
        for _ in range(3):
            state, metrics = step(state, jnp.zeros(8))
            yield float(metrics["drawn"])

    first, again, other = (list(drawn(seed)) for seed in (0, 0, 1))
    assert first == again
    assert len({*first, *other}) == 6
