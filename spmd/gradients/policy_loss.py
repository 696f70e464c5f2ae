"""Loss of answers with rewards: policy gradients with clipped ratios, GRPO and its relatives.

Of a token with the probability ratio r to the model that wrote it, and the advantage A of its answer:
−min(r A, clip(r, 1 − ε, 1 + ε′) A) + β k, with k = q − log q − 1 and q the ratio of the reference model's
probability to the model's (Shao et al., arXiv:2402.03300, equations 3 and 4). Means are over the
tokens of an answer and then over answers, or over all tokens (Yu et al., arXiv:2503.14476, equation 8).
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from spmd.errors import ConfigError, check_fields
from spmd.gradients.losses import (
    ModelLoss,
    Sums,
    check_answers,
    microbatch_losses,
    take_arrays,
    token_inputs,
    token_losses,
)
from spmd.layers.lm_head import CHUNK, at_temperature
from spmd.model_interface.model import Model, Outputs

Mean = Literal["answers", "tokens"]
_LEAST_DEVIATION = 1e-4


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Loss of answers with rewards.

    Attributes:
        clip: ε: a ratio counts down to 1 − ε.
        clip_high: ε′: a ratio counts up to 1 + ε′; 0 for ε.
        kl: β: weight of the divergence from the reference model.
        mean: `"answers"`: over the tokens of each answer, then over answers; `"tokens"`: over all.
        temperature: Of the probabilities, also of those in a batch: that of the sampling.

    Raises:
        ConfigError: A value is out of range.
    """

    clip: float = 0.2
    clip_high: float = 0.0
    kl: float = 0.0
    mean: Mean = "answers"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        rules: dict[str, str | tuple[str, ...]] = {
            "clip": "above 0 and below 1",
            "clip_high": "at least 0",
            "kl": "at least 0",
            "mean": ("answers", "tokens"),
            "temperature": "above 0",
        }
        problems = check_fields(self, rules)
        if problems:
            raise ConfigError("Invalid policy loss:", problems)


def group_advantages(rewards: np.ndarray) -> np.ndarray:
    """Return advantages relative to the other answers of a prompt, float32 `[prompt, answer]`.

    They are rewards less their mean, divided by their standard deviation.

    Example:
        >>> found = group_advantages(np.array([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]]))
        >>> [round(float(advantage), 2) for advantage in found.ravel()[:5]]
        [0.87, -0.87, -0.87, 0.87, 0.0]
    """
    wide = rewards.astype(np.float64)
    centered = wide - wide.mean(axis=1, keepdims=True)
    deviation = wide.std(axis=1, ddof=1, keepdims=True)
    return (centered / (deviation + _LEAST_DEVIATION)).astype(np.float32)


def policy_loss(
    model: Model, config: PolicyConfig | None = None, *, chunk: int = CHUNK
) -> ModelLoss:
    """Return the loss of a language model on answers with advantages.

    A batch has `tokens`, `targets` and `weights` (1 for the tokens of answers), each
    `[batch, sequence]`, and `advantages`, `[batch]`. `old_log_probs` `[batch, sequence]` are the
    log-probabilities when the answers were written; without them the model is the one that wrote
    them, and all ratios are 1. With `kl`, `reference` has those of the reference model.
    """
    config = config or PolicyConfig()
    sums = functools.partial(_policy_sums, config=config, chunk=chunk)
    return ModelLoss(model, token_inputs, sums, train=True, weighted=True)


def _policy_sums(outputs: Outputs, batch: Any, *, config: PolicyConfig, chunk: int) -> Sums:
    """Return loss and metrics as weighted sums, over answers or over tokens."""
    check_answers(outputs, chunk)
    targets, weights, advantages = take_arrays(batch, "targets", "weights", "advantages")
    logits = at_temperature(outputs.logits, config.temperature)
    losses, _ = token_losses(logits, targets, chunk=chunk)
    log_probs = -losses
    old = jax.lax.stop_gradient(log_probs)
    if "old_log_probs" in batch:
        (old,) = take_arrays(batch, "old_log_probs")
    ratios = jnp.exp(log_probs - old)
    lowest, highest = 1 - config.clip, 1 + (config.clip_high or config.clip)
    clipped = jnp.clip(ratios, lowest, highest)
    gains = advantages[:, None]
    values = {
        "loss": -jnp.minimum(ratios * gains, clipped * gains),
        "clipped": (clipped * gains < ratios * gains).astype(jnp.float32),
    }
    if config.kl:
        (reference,) = take_arrays(batch, "reference")
        log_ratio = reference - log_probs
        values["kl"] = jnp.exp(log_ratio) - log_ratio - 1
        values["loss"] = values["loss"] + config.kl * values["kl"]
    shares = weights
    if config.mean == "answers":
        shares = weights / jnp.maximum(weights.sum(axis=1, keepdims=True), 1.0)
    sums: Sums = {name: (value * shares).sum() for name, value in values.items()}
    sums["weight"] = shares.sum()
    return microbatch_losses(outputs, sums, train=True)
