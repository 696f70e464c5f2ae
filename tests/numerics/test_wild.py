"""Twelve models of others take the steps of a plain loop of Flax and optax on one device."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd import tree
from tests import tiny
from tests.tiers import soak_but
from tests.wild import language, several, structured, vision

EXAMPLES = {
    "resnet": vision.RESNET,
    "vq-vae": vision.VQ_VAE,
    "clip": vision.CLIP_TOWERS,
    "bert": language.BERT,
    "scanned": language.SCANNED,
    "gemma": language.GEMMA,
    "mamba": language.MAMBA,
    "graph network": structured.GRAPH_NETWORK,
    "several inputs": structured.CLINIC,
}
TURNS = {"gan": several.GAN, "ddpg": several.DDPG}
HYBRID = {"data": 2, "fsdp": 2, "tensor": 2}
MESHES = [
    pytest.param(HYBRID, id="hybrid"),
    pytest.param({"data": 2, "fsdp": 4}, id="fsdp", marks=pytest.mark.soak),
    pytest.param({"data": 2, "tensor": 4}, id="tensor", marks=pytest.mark.soak),
    pytest.param({"fsdp": 2, "tensor": 4}, id="both", marks=pytest.mark.soak),
]


@pytest.fixture(autouse=True)
def promotion():
    """Strangers add vectors to matrices."""
    with jax.numpy_rank_promotion("allow"):
        yield


def compare(found, plain):
    """Fails unless all losses agree to 1e-5."""
    np.testing.assert_allclose(found, plain, rtol=1e-5)


def check_split(plan):
    """Fails unless some parameter is split over each axis of the mesh that rules name."""
    axes = {
        axis
        for entry in plan.params
        for part in entry.spec
        for axis in ((part,) if isinstance(part, str) else part or ())
    }
    assert {axis for axis in ("fsdp", "tensor") if plan.mesh.shape[axis] > 1} <= axes


def own_losses(example, model, sizes):
    """Losses of the steps on a mesh, and the state before them."""

    def loss_fn(params, variables, batch, key):
        outputs, variables = model.forward(
            params, variables, key, *example.inputs(batch), train=True
        )
        loss, weight = example.loss(outputs, batch)
        return {"loss": loss, "weight": jnp.float32(weight)}, variables

    plan = spmd.make_plan(tiny.mesh(**sizes), example.rules, model, example.optimizer)
    check_split(plan)
    state, step = spmd.init_state(plan), spmd.make_train_step(plan, loss_fn)
    before, losses = jax.device_get((state.params, state.variables)), []
    for batch in example.batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, *before


def linen_step(example):
    """The step of a Linen module, as it is written by hand."""

    @jax.jit
    def step(params, variables, optimizer_state, batch):
        def mean_loss(params):
            everything = {"params": params, **variables}
            keywords = {"mutable": list(variables), **example.train}
            outputs, after = example.network.apply(everything, *example.inputs(batch), **keywords)
            loss, weight = example.loss(outputs, batch)
            return loss / weight, after

        (loss, after), gradients = jax.value_and_grad(mean_loss, has_aux=True)(params)
        updates, optimizer_state = example.optimizer.update(gradients, optimizer_state, params)
        return optax.apply_updates(params, updates), after, optimizer_state, loss

    return step


def nnx_step(example):
    """The step of an NNX module, as it is written by hand."""
    graph, state = nnx.split(example.network(nnx.Rngs(0)), nnx.Param)

    @jax.jit
    def step(params, variables, optimizer_state, batch):
        def mean_loss(params):
            nnx.replace_by_pure_dict(state, params)
            loss, weight = example.loss(nnx.merge(graph, state)(*example.inputs(batch)), batch)
            return loss / weight

        loss, gradients = jax.value_and_grad(mean_loss)(params)
        updates, optimizer_state = example.optimizer.update(gradients, optimizer_state, params)
        return optax.apply_updates(params, updates), variables, optimizer_state, loss

    return step


def numbered(params):
    """Nested dictionaries with numbers where NNX has those of a list."""
    flat = {
        tuple(int(p) if p.isdecimal() else p for p in path.split("/")): x
        for path, x in tree.flatten(params).items()
    }
    return nnx.traversals.unflatten_mapping(flat)


def plain_losses(example, params, variables):
    """Losses of the steps on one device, without this package."""
    is_linen = isinstance(example.network, nn.Module)
    step = linen_step(example) if is_linen else nnx_step(example)
    params = params if is_linen else numbered(params)
    optimizer_state, losses = example.optimizer.init(params), []
    for batch in example.batches:
        params, variables, optimizer_state, loss = step(params, variables, optimizer_state, batch)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("name", soak_but(EXAMPLES, "resnet", "bert"))
def test_losses_are_those_of_a_plain_loop(name, sizes):
    """Five steps of one network, to 1e-5."""
    example = EXAMPLES[name]
    found, params, variables = own_losses(example, example.model(), sizes)
    compare(found, plain_losses(example, params, variables))


def test_control_other_parameters_have_other_losses():
    """One bias of one layer that is not the same is found by the comparison."""
    example = EXAMPLES["graph network"]
    found, params, variables = own_losses(example, example.model(), HYBRID)
    params["readout"]["bias"] = params["readout"]["bias"] + 1e-3
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare(found, plain_losses(example, params, variables))


class OwnTurns:
    """Train steps of this package, one for each network."""

    def __init__(self, turns, sizes):
        self.states, self.steps = {}, {}
        for number, (name, part) in enumerate(turns.parts.items()):
            model = spmd.Model(
                part.init, lambda params, x, part=part: part.network.apply({"params": params}, x)
            )
            plan = spmd.make_plan(tiny.mesh(**sizes), several.TABLE, model, part.optimizer)
            check_split(plan)

            def loss_fn(params, variables, batch, key, part=part):
                loss, weight = part.loss({"params": params}, batch)
                return {"loss": loss, "weight": jnp.float32(weight)}, variables

            self.states[name] = spmd.init_state(plan, seed=number)
            self.steps[name] = spmd.make_train_step(plan, loss_fn)

    def params(self):
        """Parameters of all networks, on the host: a batch holds them."""
        return {name: jax.device_get(state.params) for name, state in self.states.items()}

    def take(self, name, batch):
        """Take one network's step and return its loss."""
        self.states[name], metrics = self.steps[name](self.states[name], batch)
        return float(metrics["loss"])


class PlainTurns:
    """Steps written by hand on one device."""

    def __init__(self, turns, params):
        self._params, self._turns = params, turns
        self._optimizer_states = {
            name: part.optimizer.init(params[name]) for name, part in turns.parts.items()
        }
        self._steps = {name: self._step(part) for name, part in turns.parts.items()}

    @staticmethod
    def _step(part):
        @jax.jit
        def step(params, optimizer_state, batch):
            def mean_loss(params):
                loss, weight = part.loss({"params": params}, batch)
                return loss / weight

            loss, gradients = jax.value_and_grad(mean_loss)(params)
            updates, optimizer_state = part.optimizer.update(gradients, optimizer_state, params)
            return optax.apply_updates(params, updates), optimizer_state, loss

        return step

    def params(self):
        return self._params

    def take(self, name, batch):
        after = self._steps[name](self._params[name], self._optimizer_states[name], batch)
        self._params[name], self._optimizer_states[name], loss = after
        return float(loss)


def losses_of_turns(turns, trainer):
    """Losses of all turns of all batches."""
    targets, losses = jax.tree.map(np.asarray, trainer.params()), []
    for batch in turns.batches:
        for name in turns.parts:
            others = turns.others(name, trainer.params(), targets)
            losses.append(trainer.take(name, {**batch, "others": others}))
        if turns.targets:
            targets = several.follow(targets, trainer.params())
    return losses


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("name", TURNS)
def test_networks_in_turns_are_those_of_a_plain_loop(name, sizes):
    """Both losses of five turns of a GAN, and of an actor and a critic with targets, to 1e-5."""
    turns = TURNS[name]
    own = OwnTurns(turns, sizes)
    plain = PlainTurns(turns, own.params())
    compare(losses_of_turns(turns, own), losses_of_turns(turns, plain))


@pytest.mark.parametrize("sizes", MESHES)
def test_a_teacher_follows_its_student(sizes):
    """Five steps with a teacher that is a moving average of the student and has no gradient, to 1e-5."""
    optimizer = several.BYOL_OPTIMIZER

    def loss_fn(params, variables, batch, key):
        (loss, weight), variables = several.BYOL.forward(params, variables, key, batch, train=True)
        return {"loss": loss, "weight": jnp.float32(weight)}, variables

    @jax.jit
    def plain_step(student, teacher, optimizer_state, batch):
        def mean_loss(student):
            loss, weight = several.agreement(student, teacher, batch)
            return loss / weight

        loss, gradients = jax.value_and_grad(mean_loss)(student)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, student)
        return (
            optax.apply_updates(student, updates),
            several.follow(teacher, student),
            optimizer_state,
            loss,
        )

    plan = spmd.make_plan(tiny.mesh(**sizes), several.BYOL_RULES, several.BYOL, optimizer)
    check_split(plan)
    state, step = spmd.init_state(plan), spmd.make_train_step(plan, loss_fn)
    student, teacher = jax.device_get((state.params, state.variables["teacher"]))
    optimizer_state, found, plain = optimizer.init(student), [], []
    for batch in several.BYOL_BATCHES:
        state, metrics = step(state, batch)
        student, teacher, optimizer_state, loss = plain_step(
            student, teacher, optimizer_state, batch
        )
        found.append(float(metrics["loss"]))
        plain.append(float(loss))
    compare(found, plain)
