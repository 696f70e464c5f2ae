"""A recommender with large embedding tables, each split by rows over all devices that hold parameters (DLRM).

    python examples/recommender.py --steps 300

Clicks are drawn from hidden tastes of 200,000 users for 50,000 items; each example has a user, the
items that he saw last, the item that is offered, and dense features (Naumov et al.,
arXiv:1906.00091). The tables have 99 % of the
parameters: a device looks up the ids that fall into its rows, and only rows of 16 numbers are sent.
Expect a loss around 0.55 (0.69 is a guess) after 300 steps, in a minute on two cores.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmd

USERS, ITEMS, SEEN, DENSE, WIDTH = 200_000, 50_000, 8, 13, 16
BATCH = ("data", "fsdp", "expert")
ROWS = ("data", "fsdp", "tensor")


class Table(nnx.Module):
    """Embedding table `[count, WIDTH]`.

    The module looks up without gathering it, so its rows may stay split.
    """

    def __init__(self, count: int, rngs: nnx.Rngs) -> None:
        values = jax.random.normal(rngs.params(), (count, WIDTH)) * WIDTH**-0.5
        self.rows = nnx.Param(values, gathered_by_layer=True)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Return rows `[…, WIDTH]` of ids `[…]`."""
        return jnp.take(self.rows[...], ids, axis=0, mode="clip")


class MLP(nnx.Module):
    """Linear layers with ReLUs between them."""

    def __init__(self, first: int, hidden: int, last: int, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(first, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, last, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return `[batch, last]`."""
        return self.down(spmd.annotate(nnx.relu(self.up(x)), "hidden"))


class Recommender(nnx.Module):
    """Logit of a click `[batch]`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.user, self.item = Table(USERS, rngs), Table(ITEMS, rngs)
        self.dense = MLP(DENSE, 64, WIDTH, rngs)
        self.top = MLP(WIDTH + 6, 64, 1, rngs)

    def __call__(
        self, user: jax.Array, item: jax.Array, seen: jax.Array, dense: jax.Array
    ) -> jax.Array:
        """Combine the embeddings by their products.

        `seen` is `[batch, SEEN]`, `dense` `[batch, DENSE]`.
        """
        features = self.dense(dense)
        vectors = [features, self.user(user), self.item(item), self.item(seen).mean(axis=1)]
        stacked = spmd.annotate(jnp.stack(vectors, axis=1), "embeddings")
        products = jnp.einsum("bie,bje->bij", stacked, stacked)[:, *np.tril_indices(4, -1)]
        return self.top(jnp.concatenate([features, products], axis=1))[:, 0]


RULES = spmd.Rules(
    params=[
        ("(user|item)/rows", P(ROWS)),  # [count, WIDTH]
        ("up/kernel", P(None, "tensor")),  # [first, 64]
        ("up/bias", P("tensor")),
        ("down/kernel", P("tensor", None)),  # [64, last]
        ("down/bias", spmd.replicate("at most 64 bytes")),
    ],
    # [batch, 64], [batch, 4, WIDTH]
    activations=[("hidden", P(BATCH, "tensor")), ("embeddings", P(BATCH))],
)
MODEL = spmd.from_nnx(lambda rngs: Recommender(rngs))
OPTIMIZER = optax.adam(3e-3)


def losses(
    network: Callable[..., jax.Array], batch: dict[str, jax.Array], key: jax.Array
) -> tuple[jax.Array, Any]:
    """Return the loss of each example, and its weight."""
    scores = network(batch["user"], batch["item"], batch["seen"], batch["dense"])
    return optax.sigmoid_binary_cross_entropy(scores, batch["clicked"]), jnp.ones_like(scores)


def loss_fn(
    params: Any, variables: Any, batch: dict[str, jax.Array], key: jax.Array
) -> tuple[dict[str, Any], Any]:
    """Return the sums over the batch, which the step divides by the weight."""
    values, weights = losses(lambda *inputs: MODEL.apply(params, *inputs), batch, key)
    return {"loss": (values * weights).sum(), "weight": weights.sum()}, variables


def batches(start: int, steps: int, batch: int = 256) -> Iterator[dict[str, np.ndarray]]:
    """Yield the batches of the steps `start + 1 … steps`: each is drawn from its own step, so any may be the first."""
    tastes = np.random.default_rng(0)
    users, items = (tastes.normal(size=(n, 4)).astype(np.float32) for n in (USERS, ITEMS))
    for step in range(start, steps):
        draws = np.random.default_rng((1, step))
        user, item = (draws.zipf(1.3, batch) % n for n in (USERS, ITEMS))  # a few are popular
        dense = draws.normal(size=(batch, DENSE)).astype(np.float32)
        liked = 1.5 * (users[user] * items[item]).sum(axis=1) + dense[:, 0]
        yield {
            "user": user.astype(np.int32),
            "item": item.astype(np.int32),
            "seen": draws.integers(0, ITEMS, (batch, SEEN)).astype(np.int32),
            "dense": dense,
            "clicked": (draws.logistic(size=batch) < liked).astype(np.float32),
        }


def main() -> None:
    """Train in a run folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="runs/recommender")
    parser.add_argument("--resume", choices=("never", "auto", "always"), default="never")
    options = parser.parse_args()
    spmd.simulate_devices(8)
    mesh = spmd.make_mesh(data=2, fsdp=2, tensor=2)
    step = spmd.make_train_step(spmd.make_plan(mesh, RULES, MODEL, OPTIMIZER), loss_fn)
    config = spmd.RunConfig(steps=options.steps, checkpoint_every=20, log_every=20)
    held_out = {"val": lambda: batches(10**6, 10**6 + 8)}
    run = spmd.Run(
        options.out, step, batches, config=config, evaluation=held_out, evaluation_loss=loss_fn
    )
    sys.exit(run.train(options.resume).exit_code)


if __name__ == "__main__":
    main()
