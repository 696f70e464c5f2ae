"""The technique that CONTRIBUTING explains works as it says, and no other file names it.

The model's gradient is known: the sum of the outer products of its examples' `x` and `y`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import ConfigError
from spmd.examples.threshold_exchange import ThresholdExchange
from spmd.training.step import TrainStep
from tests import tiny
from tests.architecture.test_no_traces import ROOT, repository_files

DEVICES, EXAMPLES, N, M = 4, 16, 16, 12
RULES = spmd.Rules([("kernel", P("fsdp"))])
MODEL = spmd.Model(
    lambda key: {"kernel": jnp.zeros((N, M))}, lambda params, x, y: x @ params["kernel"] * y
)
NEAR = 1e-6
"""Of the largest gradient: float32 sums in another order."""


def loss_fn(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
    loss = MODEL.apply(params, batch["x"], batch["y"]).sum()
    return {"loss": loss, "weight": jnp.float32(batch["x"].shape[0])}, variables


def batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(EXAMPLES, N)).astype("f4"),
        "y": rng.normal(size=(EXAMPLES, M)).astype("f4"),
    }


def true_gradient(seed: int) -> np.ndarray:
    return batch(seed)["x"].T @ batch(seed)["y"]


@pytest.fixture(scope="module")
def step() -> TrainStep:
    """The step of one device's sum for each of four replicas, whose gradients two devices share."""
    mesh = tiny.mesh(data=DEVICES, fsdp=2)
    plan = spmd.make_plan(mesh, RULES, MODEL, optax.sgd(0.1), transforms=[ThresholdExchange()])
    return spmd.make_train_step(plan, loss_fn, keep_gradients=True)


def applied(
    step: TrainStep, seeds: Sequence[int], *, forget: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of the gradients of steps, and what each device has not sent."""
    state, total = spmd.init_state(step.plan), np.zeros((N, M))
    for seed in seeds:
        state, metrics = step(state, batch(seed))
        total += EXAMPLES * np.asarray(metrics["gradients"]["kernel"])
        if forget:
            state = dataclasses.replace(
                state, transforms=jax.tree.map(jnp.zeros_like, state.transforms)
            )
    return total, np.asarray(state.transforms["threshold_exchange"]["kernel"])


def test_nothing_is_lost(step: TrainStep) -> None:
    """What was applied in three steps and what is left add up to the true gradients."""
    seeds = range(3)
    total, left = applied(step, seeds)
    expected = sum(true_gradient(seed) for seed in seeds)
    assert left.any()
    assert np.abs(total + left.sum(axis=0) - expected).max() <= NEAR * np.abs(expected).max()


def test_control_what_is_forgotten_is_seen(step: TrainStep) -> None:
    """If devices forget what they have not sent, the sum is another one."""
    total, left = applied(step, range(3), forget=True)
    expected = sum(true_gradient(seed) for seed in range(3))
    assert np.abs(total + left.sum(axis=0) - expected).max() > 0.01 * np.abs(expected).max()


def test_few_elements_are_sent(step: TrainStep) -> None:
    """What is left is zero where a device has sent: about a third of normal numbers are above the threshold."""
    _, left = applied(step, [0])
    assert 0.1 < (left == 0).mean() < 0.5


def test_a_mesh_without_replicas_is_refused() -> None:
    """With the arithmetic, when the plan is made."""
    with pytest.raises(ConfigError, match=r"threshold_exchange: sends nothing\n +mesh.data = 1"):
        spmd.make_plan(
            tiny.mesh(fsdp=2), RULES, MODEL, optax.sgd(0.1), transforms=[ThresholdExchange()]
        )


def test_no_file_of_the_package_names_it() -> None:
    """The technique changed none; the control is another one, which is a part of the package."""

    def naming(word: str) -> list[str]:
        files = (path for path in repository_files() if path.suffix == ".py")
        texts = {
            path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files
        }
        return [name for name, text in texts.items() if name.startswith("spmd/") and word in text]

    assert not [
        name
        for name in naming("ThresholdExchange") + naming("threshold_exchange")
        if "examples" not in name
    ]
    assert naming("PowerSGD")
