"""Sampling of the next token: temperature, top-k, top-p."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spmd.errors import ConfigError, check_fields


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options of sampling: temperature first, then top-k, then top-p."""

    temperature: float = 0.8
    """0 is greedy; 1 samples from the model's own distribution."""
    top_k: int = 40
    """Sample from the k most probable tokens; 0 for all."""
    top_p: float = 1.0
    """Sample from the most probable tokens whose probabilities add up to this, at least one
    (nucleus sampling, Holtzman et al., arXiv:1904.09751, equation 2); 1 for all."""

    def __post_init__(self) -> None:
        rules = {
            "temperature": "at least 0",
            "top_k": "at least 0",
            "top_p": "above 0 and at most 1",
        }
        problems = check_fields(self, rules)
        if problems:
            raise ConfigError("Invalid sampling options:", problems)

    def __str__(self) -> str:
        if self.temperature == 0:
            return "temperature 0"
        text = f"temperature {self.temperature}, top-k {self.top_k}"
        if self.top_p < 1:
            text += f", top-p {self.top_p}"
        return text


def draw(
    logits: Float[Array, "batch vocab"],
    sampling: Sampling,
    key: jax.Array,
    positions: Int[Array, "batch"],
) -> Int[Array, "batch"]:
    """Return one token for each row, int32.

    A draw depends on the key, the row's number and the position of its next token alone, not on the
    mesh.

    Example:
        >>> logits = jnp.array([[0.0, 2.0, 1.0]])
        >>> greedy = Sampling(temperature=0)
        >>> draw(logits, greedy, jax.random.key(0), positions=jnp.array([0])).tolist()
        [1]
    """
    if sampling.temperature < jnp.finfo(jnp.float32).tiny:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def key_of(row: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, row), position)

    rows = jnp.arange(logits.shape[0])
    keys = jax.vmap(key_of)(rows, positions)
    logits = logits.astype(jnp.float32)
    logits = (logits - logits.max(axis=-1, keepdims=True)) / sampling.temperature
    vocab = logits.shape[-1]
    count = min(sampling.top_k or vocab, vocab)
    if count == vocab and sampling.top_p == 1:
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    top, ids = jax.lax.top_k(logits, count)
    if sampling.top_p < 1:
        probabilities = jax.nn.softmax(top)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # `before` is 0 for the first, so one always remains.
        top = jnp.where(before < sampling.top_p, top, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, top)
    return jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0]
