"""Training of two networks: a GAN in turns, DDPG with target networks, and a student with a teacher that follows it.

The other network's parameters are part of the batch, whole on every device. So are the targets of
DDPG. The teacher is a variable of the student's model, which each step moves towards the student.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from spmd.model_interface.model import Model
from spmd.sharding.batch import whole
from spmd.sharding.rules import Rules
from tests.wild.example import BATCH, SMALL, draw_batches, normal

NOISE, DATA, STATE, ACTION = 4, 8, 8, 4
DISCOUNT, DECAY = 0.9, 0.95
OTHERS = [("others/.*", whole("parameters of the other networks"))]
MATRICES = [
    ("hidden/kernel", P("fsdp", "tensor")),
    ("out/kernel", P("tensor")),
    ("(hidden|out)/bias", SMALL),
]

TABLE = Rules(MATRICES, batch=OTHERS)
"""Table of each network that trains in turns."""


class MLP(nn.Module):
    """One hidden layer."""

    outputs: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.outputs, name="out")(nn.relu(nn.Dense(16, name="hidden")(x)))


GENERATOR, DISCRIMINATOR, ACTOR, CRITIC = MLP(DATA), MLP(1), MLP(ACTION), MLP(1)


def generator_loss(params, batch):
    scores = DISCRIMINATOR.apply(batch["others"], GENERATOR.apply(params, batch["noise"]))
    return nn.softplus(-scores).sum(), scores.size


def discriminator_loss(params, batch):
    fakes = GENERATOR.apply(batch["others"], batch["noise"])
    on_reals, on_fakes = (
        DISCRIMINATOR.apply(params, batch["reals"]),
        DISCRIMINATOR.apply(params, fakes),
    )
    return nn.softplus(-on_reals).sum() + nn.softplus(on_fakes).sum(), on_reals.size


def value(params, state, action):
    return CRITIC.apply(params, jnp.concatenate([state, action], axis=-1))[:, 0]


def critic_loss(params, batch):
    target_actor, target_critic = batch["others"]["actor"], batch["others"]["critic"]
    action = jnp.tanh(ACTOR.apply(target_actor, batch["next_state"]))
    target = batch["reward"] + DISCOUNT * value(target_critic, batch["next_state"], action)
    errors = jnp.square(
        value(params, batch["state"], batch["action"]) - jax.lax.stop_gradient(target)
    )
    return errors.sum(), errors.size


def actor_loss(params, batch):
    values = value(batch["others"], batch["state"], jnp.tanh(ACTOR.apply(params, batch["state"])))
    return -values.sum(), values.size


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A network and the loss of its own turn.

    Attributes:
        loss: `(variables of Linen, batch)` → the summed loss and its weight.
    """

    network: nn.Module
    features: int
    loss: Callable[[Any, Any], tuple[Any, Any]]
    optimizer: optax.GradientTransformation = dataclasses.field(
        default_factory=lambda: optax.adam(1e-2)
    )

    def init(self, key: jax.Array) -> Any:
        """Parameters of Linen, without their collection."""
        return self.network.init(key, jnp.zeros((1, self.features)))["params"]


@dataclasses.dataclass(frozen=True, eq=False)
class Turns:
    """Networks that train in turns on each batch.

    Attributes:
        parts: Name → network.
        others: `(name, parameters by name, targets by name)` → what the network's loss sees of the
            others.
        targets: Whether each network has a target network, which follows it slowly.
    """

    parts: dict[str, Part]
    others: Callable[[str, dict[str, Any], dict[str, Any]], Any]
    batches: list[dict[str, np.ndarray]]
    targets: bool = False


def _as_linen(params):
    return {"params": params}


GAN = Turns(
    parts={
        "discriminator": Part(DISCRIMINATOR, DATA, discriminator_loss),
        "generator": Part(GENERATOR, NOISE, generator_loss),
    },
    others=lambda name, params, _: _as_linen(
        params["generator" if name == "discriminator" else "discriminator"]
    ),
    batches=draw_batches(reals=normal(BATCH, DATA), noise=normal(BATCH, NOISE)),
)


def _others_of_ddpg(name, params, targets):
    if name == "actor":
        return _as_linen(params["critic"])
    return {network: _as_linen(target) for network, target in targets.items()}


DDPG = Turns(
    parts={
        "critic": Part(CRITIC, STATE + ACTION, critic_loss),
        "actor": Part(ACTOR, STATE, actor_loss),
    },
    others=_others_of_ddpg,
    batches=draw_batches(
        state=normal(BATCH, STATE),
        action=normal(BATCH, ACTION),
        reward=normal(BATCH),
        next_state=normal(BATCH, STATE),
    ),
    targets=True,
)


def follow(slow, fast):
    """Move a target or a teacher towards the network that it follows."""
    return jax.tree.map(lambda old, new: DECAY * old + (1 - DECAY) * new, slow, fast)


STUDENT = MLP(DATA)


def agreement(student, teacher, batch):
    """Disagreement of a student with a teacher that sees another view of the same data (arXiv:2006.07733)."""
    mine = STUDENT.apply({"params": student}, batch["view"])
    theirs = jax.lax.stop_gradient(STUDENT.apply({"params": teacher}, batch["other_view"]))
    mine, theirs = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (mine, theirs))
    losses = 2 - 2 * (mine * theirs).sum(axis=-1)
    return losses.sum(), losses.size


def init_student(key):
    return STUDENT.init(key, jnp.zeros((1, DATA)))["params"]


def forward_student(params, variables, key, batch, *, train):
    """Return the disagreement, and the teacher after it has followed the student."""
    del key
    after = {"teacher": follow(variables["teacher"], params)} if train else variables
    return agreement(params, variables["teacher"], batch), after


BYOL = Model(
    init_student,
    lambda params, batch: STUDENT.apply({"params": params}, batch["view"]),
    init_variables=lambda key: {"teacher": init_student(jax.random.fold_in(key, 1))},
    forward=forward_student,
)
BYOL_RULES = Rules([(f"(teacher/)?({pattern})", value) for pattern, value in MATRICES])
BYOL_OPTIMIZER = optax.adam(1e-2)
BYOL_BATCHES = draw_batches(view=normal(BATCH, DATA), other_view=normal(BATCH, DATA))
