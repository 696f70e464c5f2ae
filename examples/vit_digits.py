"""A small vision transformer on the 1,797 handwritten digits that ship with scikit-learn.

    pip install scikit-learn
    python examples/vit_digits.py --steps 400

Eight simulated devices share the batch, the matrices and the heads. Expect about 90 % of the
held-out digits right after 400 steps, in half a minute on two cores.
"""

import argparse
from collections.abc import Iterator

import jax
import numpy as np
from sklearn.datasets import load_digits

import spmd
from spmd.models.vit import ViTConfig
from spmd.partition_rules.vit import VIT

CONFIG = ViTConfig(
    image=8, patch=2, channels=1, d_model=64, layers=4, heads=4, d_ff=128, classes=10
)
HELD_OUT = 297


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images `[count, 8, 8, 1]` around zero, and what they are, in an order that mixes the writers."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    return found.images[order, :, :, None].astype(np.float32) / 8 - 1, found.target[order].astype(
        np.int32
    )


def batches(plan: spmd.ShardingPlan, steps: int, batch: int = 64) -> Iterator[dict[str, jax.Array]]:
    """Random digits of those that are not held out."""
    images, labels = digits()
    draws = np.random.default_rng(1)
    for _ in range(steps):
        rows = draws.integers(HELD_OUT, len(images), batch)
        yield place(plan, images[rows], labels[rows])


def place(plan: spmd.ShardingPlan, images: np.ndarray, labels: np.ndarray) -> dict[str, jax.Array]:
    """Return a batch on the mesh, every image of weight 1."""
    arrays = {"images": images, "labels": labels, "weights": np.ones(len(labels), np.float32)}
    return spmd.place_batch(plan, arrays)


class Show(spmd.Hook):
    """Prints every fiftieth loss."""

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Print metrics."""
        if step % 50 == 0:
            print(
                f"step {step}   loss {metrics['loss']:.3f}   accuracy {metrics['accuracy']:.3f}",
                flush=True,
            )


def main() -> None:
    """Trains, and prints the plan, the metrics and how many held-out digits are right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    spmd.simulate_devices(8)
    mesh = spmd.make_mesh(data=2, fsdp=2, tensor=2)
    model = spmd.from_nnx(CONFIG.build)
    optimizer = spmd.OptimizerConfig(
        learning_rate=1e-3, weight_decay=0.3, warmup_steps=min(20, steps // 2), schedule="cosine"
    )
    plan = spmd.make_plan(mesh, VIT, model, spmd.make_optimizer(optimizer, steps=steps))
    print(plan)
    step = spmd.make_train_step(plan, spmd.classification_loss(model))
    state = spmd.fit(
        spmd.init_state(plan, seed=0), step, batches(plan, steps), steps=steps, hooks=[Show()]
    )

    images, labels = (x[:HELD_OUT] for x in digits())
    scores = jax.jit(model.apply)(state.params, images)
    print(f"held out: {np.mean(np.argmax(scores, axis=-1) == labels):.1%} of {HELD_OUT} right")


if __name__ == "__main__":
    main()
