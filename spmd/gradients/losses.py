"""Losses as global sums, so that every mesh and every accumulation setting gives the same mean.

A `LossFn` returns *sums* over the tokens of its batch. The step divides once by the sum of weights: a mean of means
would depend on how padding is distributed over the mesh.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spmd.layers.lm_head import CHUNK, LazyLogits, chunked_cross_entropy, lazy_logits
from spmd.layers.zigzag import zigzag_batch
from spmd.model_api.model import Model, Outputs, as_outputs

Sums = dict[str, jax.Array]
"""Weighted sums over tokens, float32 scalars: `loss`, `weight`, and any other metric by its name."""

LossFn = Callable[[Any, Any, Any, jax.Array], tuple[Sums, Any]]
"""`(params, variables, batch, key) -> (Sums, updated variables)`; the sum `loss` is differentiated."""


def cross_entropy(
    logits: Float[Array, "batch seq vocab"] | LazyLogits,
    targets: Int[Array, "batch seq"],
    weights: Float[Array, "batch seq"],
    *,
    chunk: int = CHUNK,
) -> Sums:
    """Return the next-token cross-entropy in nats, the weight and the accuracy, as weighted sums.

    A target whose logit ties with the largest counts as predicted.

    Args:
        logits: Logits in any float dtype, cast to float32. The vocabulary may be split over devices: a masked sum
            selects the target's logit without a gather. With `LazyLogits`, never all logits exist at once.
        weights: 0 for padding, otherwise 1.
        chunk: Tokens of a device whose logits exist at once, for `LazyLogits`.
    """
    if isinstance(logits, LazyLogits):
        loss, correct = chunked_cross_entropy(logits, targets, weights, chunk)
        return {"loss": loss, "weight": weights.sum(), "accuracy": correct}
    logits = logits.astype(jnp.float32)
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[-1]), 2)
    target = jnp.where(vocabulary == targets[..., None], logits, 0.0).sum(axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - target
    # logsumexp computes the maximum anyway; an argmax, which breaks ties, would need a second copy of the logits.
    correct = (target >= logits.max(axis=-1)).astype(jnp.float32)
    return {"loss": (losses * weights).sum(), "weight": weights.sum(), "accuracy": (correct * weights).sum()}


@dataclasses.dataclass(frozen=True)
class ModelLoss:
    """A `LossFn` of a model's outputs, in parts that a pipeline recomposes.

    Attributes:
        inputs: Batch → the model's inputs.
        sums: `(Outputs, batch)` → `Sums`.
        train: Whether the model runs in training mode (dropout, updates of batch statistics) or in evaluation mode.
    """

    model: Model
    inputs: Callable[[Any], tuple[Any, ...]]
    sums: Callable[[Outputs, Any], Sums]
    train: bool = True

    def __call__(self, params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Sums, Any]:
        """Return the sums of a batch, and the updated variables."""
        with zigzag_batch(batch, position_aware=self.model.info().position_aware) as batch, lazy_logits():
            inputs = self.inputs(batch)
            returned, variables = self.model.forward(params, variables, key, *inputs, train=self.train)
            return self.sums(as_outputs(returned), batch), variables


def next_token_loss(model: Model, *, train: bool = True, chunk: int = CHUNK) -> ModelLoss:
    """Return the loss of a language model on batches of `tokens`, `targets` and `weights`, each `[batch, sequence]`.

    A batch may also have `segments`, the document of each token: the second input of the model. The model returns
    logits `[batch, sequence, vocab]` or `spmd.model_api.model.Outputs`, whose losses are added in training.
    """
    return ModelLoss(model, _tokens, functools.partial(next_token_sums, train=train, chunk=chunk), train)


def next_token_sums(outputs: Outputs, batch: Any, *, train: bool, chunk: int = CHUNK) -> Sums:
    """Return the cross-entropy of the next token, and each auxiliary loss and metric, as weighted sums."""
    sums = cross_entropy(outputs.logits, batch["targets"], batch["weights"], chunk=chunk)
    # The step divides by the weight, so a value of the batch is multiplied by it: zero if all tokens are padding.
    others = {name: value * sums["weight"] for name, value in {**outputs.losses, **outputs.metrics}.items()}
    loss = sum((others[name] for name in outputs.losses if train), start=sums["loss"])
    return {**sums, **others, "loss": loss}


def _tokens(batch: Any) -> tuple[Any, ...]:
    return tuple(batch[name] for name in ("tokens", "segments") if name in batch)


def classification_loss(model: Model, *, train: bool = True) -> ModelLoss:
    """Return the loss of a classifier on batches of `images`, `labels` and `weights`: cross-entropy over classes.

    `labels` and `weights` are `[batch]`, logits `[batch, classes]`; the step counts images as `tokens`.
    """
    return ModelLoss(model, lambda batch: (batch["images"],), _class_sums, train)


def _class_sums(outputs: Outputs, batch: Any) -> Sums:
    return cross_entropy(outputs.logits[:, None], batch["labels"][:, None], batch["weights"][:, None])
