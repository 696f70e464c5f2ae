"""The form in which a network and its training are given to both loops."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import nnx

from spmd.model_interface.model import Model
from spmd.plan.linen_model import from_linen
from spmd.plan.nnx_model import from_nnx
from spmd.sharding.rules import Rules, replicate

BATCH, STEPS = 8, 5
SMALL = replicate("a few bytes")


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """A network with its training.

    Attributes:
        network: A Linen module, or a function of `nnx.Rngs` that makes one of NNX.
        rules: Its table.
        batches: One batch for each step.
        inputs: Batch → inputs of the network.
        loss: `(outputs, batch)` → the summed loss and its weight.
        optimizer: Any optax transformation.
        train: Keyword arguments of a Linen module's call in training.
    """

    network: nn.Module | Callable[[nnx.Rngs], nnx.Module]
    rules: Rules
    batches: list[dict[str, np.ndarray]]
    inputs: Callable[[Any], tuple[Any, ...]]
    loss: Callable[[Any, Any], tuple[Any, Any]]
    optimizer: optax.GradientTransformation = dataclasses.field(
        default_factory=lambda: optax.adamw(3e-3)
    )
    train: dict[str, Any] = dataclasses.field(default_factory=dict)

    def model(self) -> Model:
        """The network as this package takes it."""
        if not isinstance(self.network, nn.Module):
            return from_nnx(self.network)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.inputs(self.batches[0])]
        return from_linen(self.network, *shapes, train=self.train)


def draw_batches(
    **arrays: Callable[[np.random.Generator], np.ndarray],
) -> list[dict[str, np.ndarray]]:
    """One batch for each step; `arrays` make each of its arrays from a random generator."""
    rng = np.random.default_rng(0)
    return [{name: make(rng) for name, make in arrays.items()} for _ in range(STEPS)]


def normal(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    """Standard normal numbers, in float32."""
    return lambda rng: rng.standard_normal(shape, np.float32)


def integers(high: int, *shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    """Numbers below `high`, in int32."""
    return lambda rng: rng.integers(0, high, shape).astype(np.int32)


def mean_of(losses: jax.Array) -> tuple[jax.Array, int]:
    """The sum and the number of losses."""
    return losses.sum(), losses.size
