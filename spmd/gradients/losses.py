"""Losses as global sums, so that every mesh and every accumulation setting gives the same mean.

A `LossFn` returns *sums* over the tokens of its batch. They are divided by the sum of weights once, at the end of
the step: sum(losses) / sum(weights), never a mean of means, which would differ with padding between meshes.
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
"""`(params, variables, batch, key) -> (Sums, variables afterwards)`; the sum `loss` is what is differentiated. A model
without variables passes them on."""


def cross_entropy(
    logits: Float[Array, "batch seq vocab"] | LazyLogits,
    targets: Int[Array, "batch seq"],
    weights: Float[Array, "batch seq"],
    *,
    chunk: int = CHUNK,
) -> Sums:
    """Next-token cross-entropy in nats, and how many tokens are predicted exactly, as weighted sums.

    A target whose logit ties with the largest counts as predicted.

    Args:
        logits: Scores, in any float dtype; computed on in float32. The vocabulary may be split over devices: the
            target's logit is picked by a masked sum, which needs no gather. Or a head that is not multiplied out, whose
            logits are then never all there.
        targets: The token that follows each position.
        weights: 0 for padding, 1 for a token that counts.
        chunk: Of a head that is not multiplied out, how many tokens of a device there are logits of at once.

    Returns:
        Sums `loss`, `weight` and `accuracy`.
    """
    if isinstance(logits, LazyLogits):
        loss, correct = chunked_cross_entropy(logits, targets, weights, chunk)
        return {"loss": loss, "weight": weights.sum(), "accuracy": correct}
    logits = logits.astype(jnp.float32)
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[-1]), 2)
    target = jnp.where(vocabulary == targets[..., None], logits, 0.0).sum(axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - target
    # The maximum is one that logsumexp takes anyway; telling ties apart would need a second copy of the logits.
    correct = (target >= logits.max(axis=-1)).astype(jnp.float32)
    return {
        "loss": (losses * weights).sum(),
        "weight": weights.sum(),
        "accuracy": (correct * weights).sum(),
    }


@dataclasses.dataclass(frozen=True)
class ModelLoss:
    """A loss of a model's outputs: a `LossFn`, and the parts of which a pipeline composes another.

    Attributes:
        model: The model.
        inputs: A batch → what the model is called on.
        sums: `(Outputs, batch)` → `Sums`.
        train: Whether the model runs as in training (dropout drops, batch statistics are updated) or in evaluation.
    """

    model: Model
    inputs: Callable[[Any], tuple[Any, ...]]
    sums: Callable[[Outputs, Any], Sums]
    train: bool = True

    def __call__(self, params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[Sums, Any]:
        """Return the sums of a batch, and the variables afterwards."""
        with zigzag_batch(batch, position_aware=self.model.info().position_aware) as batch, lazy_logits():
            inputs = self.inputs(batch)
            returned, variables = self.model.forward(params, variables, key, *inputs, train=self.train)
            return self.sums(as_outputs(returned), batch), variables


def next_token_loss(model: Model, *, train: bool = True, chunk: int = CHUNK) -> ModelLoss:
    """Return the loss of a language model on batches of `tokens`, `targets` and `weights`, each `[batch, sequence]`.

    A batch may have `segments` too, the document of each token, which the model then takes after the tokens.

    Args:
        model: Tokens in, logits `[batch, sequence, vocab]` or `spmd.model_api.model.Outputs` out.
        train: Whether the model runs as in training, and auxiliary losses are a part of the loss.
        chunk: Tokens of a device whose logits exist at once, if the model returns `spmd.layers.lm_head.LazyLogits`.
    """
    return ModelLoss(model, _tokens, functools.partial(next_token_sums, train=train, chunk=chunk), train)


def next_token_sums(outputs: Outputs, batch: Any, *, train: bool, chunk: int = CHUNK) -> Sums:
    """Return the cross-entropy of the next token, and each auxiliary loss and metric, as weighted sums."""
    sums = cross_entropy(outputs.logits, batch["targets"], batch["weights"], chunk=chunk)
    # The step divides by the weight, so a batch's value enters with its weight, and zero where all is padding.
    others = {name: value * sums["weight"] for name, value in {**outputs.losses, **outputs.metrics}.items()}
    loss = sum((others[name] for name in outputs.losses if train), start=sums["loss"])
    return {**sums, **others, "loss": loss}


def _tokens(batch: Any) -> tuple[Any, ...]:
    return tuple(batch[name] for name in ("tokens", "segments") if name in batch)


def classification_loss(model: Model, *, train: bool = True) -> ModelLoss:
    """Return the loss of a classifier on batches of `images`, `labels` and `weights`: cross-entropy over classes.

    `labels` and `weights` are `[batch]`; the step's `tokens` are then images.

    Args:
        model: Images in, logits `[batch, classes]` out.
        train: Whether the model runs as in training or in evaluation.
    """
    return ModelLoss(model, lambda batch: (batch["images"],), _class_sums, train)


def _class_sums(outputs: Outputs, batch: Any) -> Sums:
    return cross_entropy(outputs.logits[:, None], batch["labels"][:, None], batch["weights"][:, None])
