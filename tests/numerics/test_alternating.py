"""Networks that take turns: the numbers of plain Flax and optax, in a loop and in a run folder."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import spmd
from spmd import tree
from spmd.errors import ConfigError, NonFiniteError
from spmd.examples import actor_critic, gan, teacher
from spmd.run.check import StepCheck
from spmd.run.step_source import StepFile
from tests import tiny

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
ROUNDS = 4


@pytest.fixture(autouse=True)
def promotion():
    """Models of others add vectors to matrices."""
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def step_of(example):
    """The step of an example on eight devices, compiled once."""
    return example.make_step(tiny.mesh(**SIZES))


class Losses(spmd.Hook):
    """Losses of each network, one row for each step."""

    def __init__(self, names):
        self.names, self.rows = names, []

    def on_metrics(self, step, metrics):
        """Keep them."""
        self.rows.append([metrics[f"{name}/loss"] for name in self.names])


def own_training(example):
    """Losses of some steps on a mesh, parameters before and after, and programs compiled."""
    step = step_of(example)
    state = step.init_state(seed=0)
    before = {name: jax.device_get(each.params) for name, each in state.states.items()}
    losses = Losses(list(step.steps))
    batches = example.batches(0, ROUNDS)
    state = spmd.fit(state, step, batches, steps=ROUNDS, hooks=[losses])
    after = {name: jax.device_get(each.params) for name, each in state.states.items()}
    return losses.rows, before, after


def plain_update(loss, optimizer):
    """A step of Flax and optax on one device, `(params, optimizer state, *others)`."""

    @jax.jit
    def update(params, state, *others):
        value, gradients = jax.value_and_grad(loss)(params, *others)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return update


def applied(module):
    return lambda params, *inputs: module.apply({"params": params}, *inputs)


def plain_gan(params):
    """The discriminator twice, then the generator."""
    sample, score = applied(gan.MLP(gan.POINT)), applied(gan.MLP(1))

    def of_d(d, g, points, z):
        on_true, on_samples = score(d, points), score(d, sample(g, z))
        return (nn.softplus(-on_true) + nn.softplus(on_samples)).mean()

    def of_g(g, d, z):
        return nn.softplus(-score(d, sample(g, z))).mean()

    adam = optax.adam(1e-3, b1=0.5)
    d, g = params["discriminator"], params["generator"]
    d_state, g_state = adam.init(d), adam.init(g)
    update_d, update_g = plain_update(of_d, adam), plain_update(of_g, adam)
    losses = []
    for batch in gan.batches(0, ROUNDS):
        for turn in batch["turns"]:
            d, d_state, d_loss = update_d(d, d_state, g, turn["points"], turn["z"])
        g, g_state, g_loss = update_g(g, g_state, d, batch["z"])
        losses.append([d_loss, g_loss])
    return losses, {"discriminator": d, "generator": g}


def follow(slow, fast, decay):
    """Move a target network or a teacher towards the network that it follows."""
    return optax.incremental_update(fast, slow, 1 - decay)


def plain_actor_critic(params):
    """The critic with both target networks, then the actor; each target follows its network."""
    act, judge = applied(actor_critic.Actor()), applied(actor_critic.Critic())

    def of_critic(critic, target_critic, target_actor, batch):
        following = judge(
            target_critic, batch["next_state"], act(target_actor, batch["next_state"])
        )
        wanted = batch["reward"] + actor_critic.DISCOUNT * following
        return jnp.square(judge(critic, batch["state"], batch["action"]) - wanted).mean()

    def of_actor(actor, critic, batch):
        return -judge(critic, batch["state"], act(actor, batch["state"])).mean()

    slow, fast = optax.adam(1e-3), optax.adam(3e-3)
    actor, critic = params["actor"], params["critic"]
    target_actor, target_critic = actor, critic
    actor_state, critic_state = slow.init(actor), fast.init(critic)
    update_critic, update_actor = plain_update(of_critic, fast), plain_update(of_actor, slow)
    losses = []
    for batch in actor_critic.batches(0, ROUNDS):
        critic, critic_state, critic_loss = update_critic(
            critic, critic_state, target_critic, target_actor, batch
        )
        target_critic = follow(target_critic, critic, actor_critic.DECAY)
        actor, actor_state, actor_loss = update_actor(actor, actor_state, critic, batch)
        target_actor = follow(target_actor, actor, actor_critic.DECAY)
        losses.append([critic_loss, actor_loss])
    return losses, {"critic": critic, "actor": actor}


def plain_teacher(params):
    """A student, and the teacher that follows it."""
    classify, adam = applied(teacher.Classifier()), optax.adam(3e-3)

    def of_student(student, slow, batch):
        mine, theirs = classify(student, batch["view"]), classify(slow, batch["other_view"])
        entropies = optax.softmax_cross_entropy_with_integer_labels(mine, batch["label"])
        distances = jnp.square(nn.softmax(mine) - nn.softmax(theirs)).sum(axis=-1)
        return (entropies * batch["is_labelled"] + distances).mean()

    student = slow = params["student"]
    state, update, losses = adam.init(student), plain_update(of_student, adam), []
    for batch in teacher.batches(0, ROUNDS):
        student, state, loss = update(student, state, slow, batch)
        slow = follow(slow, student, teacher.DECAY)
        losses.append([loss])
    return losses, {"student": student}


PLAIN = {gan: plain_gan, actor_critic: plain_actor_critic, teacher: plain_teacher}


@pytest.mark.parametrize("example", PLAIN, ids=lambda example: example.__name__.split(".")[-1])
def test_an_example_is_a_plain_loop(example):
    """Losses and parameters to 1e-5; nothing is compiled twice, and other parameters are found."""
    losses, before, after = own_training(example)
    step = step_of(example)
    assert len(step.programs) == len(step.steps)
    plain_losses, plain_after = PLAIN[example](before)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5, atol=1e-6)
    expected = tree.flatten(plain_after)
    for path, x in tree.flatten(after).items():
        np.testing.assert_allclose(x, expected[path], rtol=1e-4, atol=1e-5, err_msg=path)
    first = next(iter(before))
    bias = before[first]["out"]["bias"]
    before[first]["out"]["bias"] = np.append(bias[:1] + np.float32(1e-2), bias[1:])
    other_losses, _ = PLAIN[example](before)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        np.testing.assert_allclose(losses, other_losses, rtol=1e-5, atol=1e-6)


def test_another_network_keeps_its_sharding():
    """The critic's step takes the target networks as they are split."""
    step = step_of(actor_critic)
    batch = next(actor_critic.batches(0, 1))
    _, selected = step.part_inputs("critic/", step.abstract_state(), batch)
    program = step.steps["critic"].compile(selected)
    (_, given), _ = program.input_shardings
    kernel = given["targets"].value["actor"]["hidden"]["kernel"]
    assert kernel.spec == actor_critic.RULES.params[0][1]


CONFIG = spmd.RunConfig(steps=6, log_every=1, checkpoint_every=2, keep_best=0)


def same(a, b):
    """Whether two states have the same bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in jax.device_get(list(pairs)))


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    """After its data failed, with both networks in one checkpoint; the control had other data."""

    def cut_off(start, steps):
        yield from actor_critic.batches(start, min(steps, 5))
        raise OSError("the disk is gone")

    step = step_of(actor_critic)
    config = dataclasses.replace(CONFIG, sdc_checks=spmd.SDCConfig(6, 6))
    whole = spmd.Run(tmp_path / "whole", step, actor_critic.batches, config=config)
    expected = whole.train()
    cut = spmd.Run(tmp_path / "cut", step, cut_off, config=CONFIG)
    with pytest.raises(OSError, match="the disk is gone"):
        cut.train()
    again = dataclasses.replace(cut, batches=actor_critic.batches)
    result = again.train("auto")
    assert (result.steps, int(result.state.step)) == (2, 6)
    assert same(result.state, expected.state)
    lines = [json.loads(line) for line in whole.run_dir.metrics.read_text().splitlines()]
    names = {"critic/loss", "actor/loss", "critic/examples", "actor/gradient_norm", "loss"}
    assert names <= set(lines[0])
    assert lines[0]["loss"] == lines[0]["actor/loss"]
    plan = (tmp_path / "whole" / "plan.txt").read_text()
    assert plan.startswith("critic\nmesh data=2 fsdp=2 tensor=2")
    assert "\n\nactor\nmesh" in plan
    other = spmd.Run(
        tmp_path / "other", step, lambda a, b: actor_critic.batches(a + 1, b + 1), config=CONFIG
    )
    assert not same(other.train().state, expected.state)


def test_a_run_evaluates_the_teacher_and_names_the_network_that_diverges(tmp_path):
    """The average is evaluated; a loss that is not finite is named."""
    step = step_of(teacher)
    sets = {"val": lambda: teacher.batches(50, 51)}
    evaluated = {"evaluation": sets, "evaluation_loss": teacher.evaluation_loss}
    run = spmd.Run(tmp_path / "run", step, teacher.batches, config=CONFIG, **evaluated)
    result = run.train()
    state = result.state.states["student"]
    (batch,) = sets["val"]()
    average = spmd.ema_params(state.optimizer_state)
    sums, _ = teacher.evaluation_loss(average, {}, batch, None)
    np.testing.assert_allclose(result.evaluation["val_loss"], sums["loss"] / 64, rtol=1e-5)

    def broken(start, steps):
        for batch in teacher.batches(start, steps):
            yield {**batch, "view": batch["view"] * np.float32(np.nan)}

    with pytest.raises(NonFiniteError, match="student/loss is nan"):
        spmd.Run(tmp_path / "nan", step, broken, config=CONFIG).train()
    skip = dataclasses.replace(CONFIG, on_nan="skip")
    with pytest.raises(ConfigError, match="the optimizer of student skips no update"):
        spmd.Run(tmp_path / "skip", step, broken, config=skip)


def test_each_network_is_compared_with_one_device():
    """`spmd check` takes the step of one network; a gradient that is not summed is found."""

    def critic(mesh):
        batches = list(actor_critic.batches(0, 1))
        return actor_critic.make_step(mesh).isolate("critic", batches)

    mesh = tiny.mesh(**SIZES)
    check = StepCheck(StepFile(Path(__file__), critic).make_on)
    assert check.compare(mesh).ok
    assert not check.compare(mesh, "reduction").ok
    both = StepFile(Path(__file__), lambda mesh: (step_of(actor_critic), []))
    with pytest.raises(ConfigError, match=r"is of several networks\n.*step.isolate"):
        both.make_on(mesh)


def test_wrong_turns_are_one_error():
    """Unknown and missing turns, and what is no step, no name or no turn."""
    step = step_of(teacher).steps["student"]
    select = teacher.with_teacher
    turns = [("studnet", select), "student", ("idle", lambda states: states)]
    with pytest.raises(ConfigError) as caught:
        spmd.AlternatingStep({"student": step, "idle": step, "a/b": step, "no": 3}, turns)
    text = str(caught.value)
    for words in (
        "steps 'a/b': is no name of a network",
        "steps 'no': is 3",
        "turn 0: is of 'studnet', which has no step",
        "turn 1: is 'student'",
        "turn 2, of idle",
        "steps 'student': has no turn",
    ):
        assert words in text
    one = spmd.AlternatingStep({"student": step}, [("student", select)])
    with pytest.raises(ConfigError, match="The step cannot take this state"):
        one(step.init_state(), next(teacher.batches(0, 1)))


def test_a_turn_that_fails_costs_no_state():
    """The state is not donated before all turns have selected their batches."""
    step = step_of(actor_critic)
    names = [name for name, _ in step.turns]

    def fails(states, batch):
        raise KeyError("y")

    wrong = spmd.AlternatingStep(step.steps, [*step.turns, (names[-1], fails)])
    state = wrong.init_state()
    batch = next(iter(actor_critic.batches(0, 1)))
    with pytest.raises(KeyError):
        wrong(state, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
