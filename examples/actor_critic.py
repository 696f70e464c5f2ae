"""An actor and a critic with target networks, on recorded transitions (DDPG, arXiv:1509.02971).

    python examples/actor_critic.py --steps 600

A target network is an average of a network's parameters that its optimizer keeps,
`spmd.with_ema(…, debias=False)`: it is sharded, saved and resumed with it. An action has the
largest reward, 1, at a product of the state that the actor has to find. Its loss is the negative
value of its actions, and perfect ones have -10: expect -8 after 600 steps, in a quarter of a minute
on two cores.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import spmd

STATE, ACTION, WIDTH, EXAMPLES = 8, 4, 64, 64
DISCOUNT, DECAY = 0.9, 0.95


class Actor(nn.Module):
    """Actions `[batch, ACTION]` between -1 and 1, of states `[batch, STATE]`."""

    @nn.compact
    def __call__(self, state: jax.Array) -> jax.Array:
        """Return the actions."""
        hidden = nn.relu(nn.Dense(WIDTH, name="hidden")(state))
        return jnp.tanh(nn.Dense(ACTION, name="out")(hidden))


class Critic(nn.Module):
    """Values `[batch]` of actions in states."""

    @nn.compact
    def __call__(self, state: jax.Array, action: jax.Array) -> jax.Array:
        """Return the values."""
        both = jnp.concatenate([state, action], axis=-1)
        hidden = nn.relu(nn.Dense(WIDTH, name="hidden")(both))
        return nn.Dense(1, name="out")(hidden)[:, 0]


RULES = spmd.Rules(
    params=[
        ("hidden/kernel", P("fsdp", "tensor")),  # [8 or 12, 64]
        ("out/kernel", P("tensor")),  # [64, 4 or 1]
        ("(hidden|out)/bias", spmd.replicate("at most 256 bytes")),
    ]
)
STATES = jax.ShapeDtypeStruct((EXAMPLES, STATE), jnp.float32)
ACTOR = spmd.from_linen(Actor(), STATES)
CRITIC = spmd.from_linen(Critic(), STATES, jax.ShapeDtypeStruct((EXAMPLES, ACTION), jnp.float32))


def critic_loss(params: Any, variables: Any, batch: Any, key: jax.Array) -> Any:
    """Return the squared distance of values from what the target networks say of the next state."""
    targets = batch["targets"].value
    next_action = ACTOR.apply(targets["actor"], batch["next_state"])
    next_value = CRITIC.apply(targets["critic"], batch["next_state"], next_action)
    wanted = batch["reward"] + DISCOUNT * next_value
    errors = jnp.square(CRITIC.apply(params, batch["state"], batch["action"]) - wanted)
    return {"loss": errors.sum(), "weight": jnp.float32(len(errors))}, variables


def actor_loss(params: Any, variables: Any, batch: Any, key: jax.Array) -> Any:
    """Return the negative values of the actor's own actions."""
    action = ACTOR.apply(params, batch["state"])
    values = CRITIC.apply(batch["critic"].value, batch["state"], action)
    return {"loss": -values.sum(), "weight": jnp.float32(len(values))}, variables


def for_critic(states: Mapping[str, spmd.TrainState], batch: Any) -> Any:
    """Return the batch of the critic's turn: both target networks are averages of parameters."""
    targets = {name: spmd.ema_params(state.optimizer_state) for name, state in states.items()}
    return {**batch, "targets": spmd.whole(targets)}


def for_actor(states: Mapping[str, spmd.TrainState], batch: Any) -> Any:
    """Return the batch of the actor's turn."""
    return {"state": batch["state"], "critic": spmd.whole(states["critic"].params)}


def make_step(mesh: jax.sharding.Mesh) -> spmd.AlternatingStep:
    """Return the step of both networks."""
    actor_optimizer = spmd.with_ema(optax.adam(1e-3), DECAY, debias=False)
    critic_optimizer = spmd.with_ema(optax.adam(3e-3), DECAY, debias=False)
    actor = spmd.make_plan(mesh, RULES, ACTOR, actor_optimizer)
    critic = spmd.make_plan(mesh, RULES, CRITIC, critic_optimizer)
    steps = {
        "critic": spmd.make_train_step(critic, critic_loss),
        "actor": spmd.make_train_step(actor, actor_loss),
    }
    return spmd.AlternatingStep(steps, [("critic", for_critic), ("actor", for_actor)])


def batches(start: int, steps: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the transitions of the steps `start + 1 … steps`, each drawn from its own step."""
    best = np.random.default_rng(0).normal(size=(STATE, ACTION)) / STATE
    for step in range(start, steps):
        draws = np.random.default_rng((1, step))
        state, next_state = draws.normal(size=(2, EXAMPLES, STATE))
        action = draws.uniform(-1, 1, (EXAMPLES, ACTION))
        reward = 1 - np.square(action - state @ best).sum(axis=1)
        arrays = {"state": state, "action": action, "reward": reward, "next_state": next_state}
        yield {name: x.astype(np.float32) for name, x in arrays.items()}


def main() -> None:
    """Train in a run folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", default="runs/actor-critic")
    parser.add_argument("--resume", choices=("never", "auto", "always"), default="never")
    options = parser.parse_args()
    spmd.simulate_devices(8)
    step = make_step(spmd.make_mesh(data=2, fsdp=2, tensor=2))
    config = spmd.RunConfig(steps=options.steps, checkpoint_every=20, log_every=20)
    run = spmd.Run(options.out, step, batches, config=config)
    sys.exit(run.train(options.resume).exit_code)


if __name__ == "__main__":
    main()
