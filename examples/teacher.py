"""A student and a teacher that is an average of it (Tarvainen and Valpola, arXiv:1703.01780).

    python examples/teacher.py --steps 300

One network takes all turns. Its teacher is the average that its optimizer keeps, `spmd.with_ema(…,
debias=False)`, and comes to it as a part of its batch. Each sees the same inputs with noise of its
own, and an eighth of them have a label. The run evaluates the teacher: expect it right 87 times of
100, in a quarter of a minute on two cores.
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

FEATURES, WIDTH, CLASSES, EXAMPLES = 16, 64, 8, 64
DECAY = 0.99


class Classifier(nn.Module):
    """Scores `[batch, CLASSES]` of inputs `[batch, FEATURES]`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the scores."""
        hidden = nn.relu(nn.Dense(WIDTH, name="hidden")(x))
        return nn.Dense(CLASSES, name="out")(hidden)


RULES = spmd.Rules(
    params=[
        ("hidden/kernel", P("fsdp", "tensor")),  # [16, 64]
        ("out/kernel", P("tensor", "fsdp")),  # [64, 8]
        ("(hidden|out)/bias", spmd.replicate("at most 256 bytes")),
    ]
)
MODEL = spmd.from_linen(Classifier(), jax.ShapeDtypeStruct((EXAMPLES, FEATURES), jnp.float32))


def loss_fn(params: Any, variables: Any, batch: Any, key: jax.Array) -> Any:
    """Return the cross-entropy of labelled inputs, and the distance from the teacher of all."""
    mine = MODEL.apply(params, batch["view"])
    theirs = MODEL.apply(batch["teacher"].value, batch["other_view"])
    entropies = optax.softmax_cross_entropy_with_integer_labels(mine, batch["label"])
    distances = jnp.square(nn.softmax(mine) - nn.softmax(theirs)).sum(axis=-1)
    loss = (entropies * batch["is_labelled"]).sum() + distances.sum()
    return {"loss": loss, "weight": jnp.float32(len(mine))}, variables


def evaluation_loss(params: Any, variables: Any, batch: Any, key: jax.Array) -> Any:
    """Return the cross-entropy and the accuracy; the parameters are the teacher's."""
    scores = MODEL.apply(params, batch["view"])
    entropies = optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"])
    is_right = jnp.argmax(scores, axis=-1) == batch["label"]
    sums = {"loss": entropies.sum(), "accuracy": is_right.astype(jnp.float32).sum()}
    return {**sums, "weight": jnp.float32(len(scores))}, variables


def with_teacher(states: Mapping[str, spmd.TrainState], batch: Any) -> Any:
    """Return a batch with the average of the student's parameters."""
    teacher = spmd.ema_params(states["student"].optimizer_state)
    return {**batch, "teacher": spmd.whole(teacher)}


def make_step(mesh: jax.sharding.Mesh) -> spmd.AlternatingStep:
    """Return the step of the student."""
    optimizer = spmd.with_ema(optax.adam(3e-3), DECAY, debias=False)
    plan = spmd.make_plan(mesh, RULES, MODEL, optimizer)
    steps = {"student": spmd.make_train_step(plan, loss_fn)}
    return spmd.AlternatingStep(steps, [("student", with_teacher)])


def batches(start: int, steps: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the batches of the steps `start + 1 … steps`, each drawn from its own step."""
    centers = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    for step in range(start, steps):
        draws = np.random.default_rng((1, step))
        label = draws.integers(0, CLASSES, EXAMPLES)
        inputs = centers[label] + 0.7 * draws.normal(size=(EXAMPLES, FEATURES))
        view, other_view = inputs + 0.3 * draws.normal(size=(2, EXAMPLES, FEATURES))
        yield {
            "view": view.astype(np.float32),
            "other_view": other_view.astype(np.float32),
            "label": label.astype(np.int32),
            "is_labelled": (np.arange(EXAMPLES) % 8 == 0).astype(np.float32),
        }


def main() -> None:
    """Train in a run folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="runs/teacher")
    parser.add_argument("--resume", choices=("never", "auto", "always"), default="never")
    options = parser.parse_args()
    spmd.simulate_devices(8)
    step = make_step(spmd.make_mesh(data=2, fsdp=2, tensor=2))
    config = spmd.RunConfig(steps=options.steps, checkpoint_every=20, log_every=20)
    held_out = {"val": lambda: batches(10**6, 10**6 + 8)}
    run = spmd.Run(
        options.out,
        step,
        batches,
        config=config,
        evaluation=held_out,
        evaluation_loss=evaluation_loss,
    )
    sys.exit(run.train(options.resume).exit_code)


if __name__ == "__main__":
    main()
