"""Losses of pairs of answers: DPO, IPO and SimPO (`spmd.settings.dpo`).

A row of a batch holds one pair or several, as documents of its segments. `pairs` says which tokens
are of which: n for the preferred answer of pair n, from 1, −n for the other one, 0 for padding.
`reference` is the log-probability of each target under the reference model. The sums are over
pairs: a pair has the weight 1.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spmd.gradients.losses import (
    ModelLoss,
    Sums,
    check_answers,
    microbatch_losses,
    take_arrays,
    token_inputs,
    token_losses,
)
from spmd.layers.lm_head import CHUNK
from spmd.model_interface.model import Model, Outputs
from spmd.settings.dpo import DPOConfig, most_pairs


def preference_loss(
    model: Model, config: DPOConfig, *, train: bool = True, chunk: int = CHUNK
) -> ModelLoss:
    """Return the loss of a language model on batches of pairs.

    A batch has `tokens`, `targets`, `weights` (1 for the tokens of answers), `segments`, `pairs`
    and, unless the loss is without a reference model, `reference`; each is `[batch, sequence]`.
    """
    sums = functools.partial(preference_sums, config=config, train=train, chunk=chunk)
    return ModelLoss(model, token_inputs, sums, train, weighted=True)


def preference_sums(
    outputs: Outputs, batch: Any, *, config: DPOConfig, train: bool, chunk: int = CHUNK
) -> Sums:
    """Return loss and metrics as sums over pairs.

    Metrics are how often the preferred answer has the higher reward (`reward_accuracy`), the rewards
    of both answers, their difference, and the log-probabilities of both.
    """
    check_answers(outputs, chunk)
    targets, weights, numbers = take_arrays(batch, "targets", "weights", "pairs")
    losses_of_tokens, _ = token_losses(outputs.logits, targets, chunk=chunk)
    log_probs = -losses_of_tokens
    pairs = _Pairs.of(numbers, weights)
    preferred = pairs.answer(log_probs, 1)
    other = pairs.answer(log_probs, -1)
    scored = (preferred, other)
    if config.needs_reference:
        (reference,) = take_arrays(batch, "reference")
        ratios = log_probs - reference
        scored = (pairs.answer(ratios, 1), pairs.answer(ratios, -1))
    losses, rewards = _losses(*scored, config)
    if config.nll:
        losses = losses - config.nll * preferred.mean
    found = {
        "loss": losses,
        "reward_accuracy": (rewards[0] > rewards[1]).astype(jnp.float32),
        "reward_margin": rewards[0] - rewards[1],
        "chosen_reward": rewards[0],
        "rejected_reward": rewards[1],
        "chosen_log_prob": preferred.total,
        "rejected_log_prob": other.total,
    }
    sums: Sums = {name: pairs.sum(values) for name, values in found.items()}
    sums["weight"] = pairs.weights.sum()
    return microbatch_losses(outputs, sums, train=train)


@dataclasses.dataclass(frozen=True)
class _Answer:
    """Sum of a value over the tokens of each pair's answer, and their number, `[batch, pair]`."""

    total: Float[Array, "batch pair"]
    tokens: Float[Array, "batch pair"]

    @property
    def mean(self) -> Float[Array, "batch pair"]:
        """Mean over the tokens."""
        return self.total / jnp.maximum(self.tokens, 1.0)


@dataclasses.dataclass(frozen=True)
class _Pairs:
    """Pairs in the rows of a batch.

    Attributes:
        numbers: Of each token's pair, negative in the other answer.
        is_answer: Whether a token is in an answer, not in a prompt.
        weights: Weight of each pair, 0 where a row has fewer.
    """

    numbers: Int[Array, "batch seq"]
    is_answer: Array
    weights: Float[Array, "batch pair"]

    @classmethod
    def of(cls, numbers: Int[Array, "batch seq"], weights: Float[Array, "batch seq"]) -> "_Pairs":
        """Return the pairs of a batch; a pair has the weight of its tokens."""
        each = _numbers_from_one(numbers.shape[1])
        is_own = jnp.abs(numbers)[..., None] == each
        of_pairs = jnp.where(is_own, weights[..., None], 0.0).max(axis=1)
        return cls(numbers, weights > 0, of_pairs)

    def answer(self, values: Float[Array, "batch seq"], sign: int) -> _Answer:
        """Return the sums of values over preferred answers, sign 1, or the others, sign −1."""
        each = sign * _numbers_from_one(self.numbers.shape[1])
        is_own = (self.numbers[..., None] == each) & self.is_answer[..., None]
        # A masked sum, which XLA fuses: a matrix product would round the values on TPUs.
        total = jnp.where(is_own, values[..., None], 0.0).sum(axis=1)
        return _Answer(total, is_own.sum(axis=1, dtype=jnp.float32))

    def sum(self, values: Float[Array, "batch pair"]) -> Float[Array, ""]:
        """Return the weighted sum over pairs."""
        return (values * self.weights).sum()


def _numbers_from_one(sequence: int) -> Int[Array, "1 1 pair"]:
    """Return the numbers of the pairs that a row may have."""
    return jnp.arange(1, most_pairs(sequence) + 1)[None, None]


def _losses(
    preferred: _Answer, other: _Answer, config: DPOConfig
) -> tuple[Array, tuple[Array, Array]]:
    """Return the loss of each pair, and the rewards of its answers, `[batch, pair]`.

    The answers have log-probabilities or, with a reference model, their differences from its own.
    """
    beta = config.scale
    rewards = (beta * preferred.total, beta * other.total)
    if config.loss == "ipo":
        difference = preferred.mean - other.mean
        return (difference - 1 / (2 * beta)) ** 2, rewards
    if config.loss == "simpo":
        rewards = (beta * preferred.mean, beta * other.mean)
    margin = rewards[0] - rewards[1] - config.target_margin
    losses = -jax.nn.log_sigmoid(margin)
    smoothing = config.label_smoothing
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing * jax.nn.log_sigmoid(-margin)
    return losses, rewards
