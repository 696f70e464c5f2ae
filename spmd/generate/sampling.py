"""Which token comes next: the likeliest, or a draw from some of the likeliest."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spmd.errors import ConfigError, Problem


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn from a model's distribution: temperature first, then top-k, then top-p."""

    temperature: float = 0.8
    """0 takes the likeliest token each time, 1 samples the model's own distribution."""
    top_k: int = 40
    """Draw among the k likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this probability, and at least one (nucleus sampling,
    Holtzman et al., arXiv:1904.09751, equation 2); 1 for all."""

    def __post_init__(self) -> None:
        problems = [
            Problem(name, f"is {getattr(self, name)}", fix="0 or more")
            for name in ("temperature", "top_k")
            if not getattr(self, name) >= 0
        ]
        if not 0 < self.top_p <= 1:
            problems.append(Problem("top_p", f"is {self.top_p}", fix="above 0, and at most 1"))
        if problems:
            raise ConfigError("Nothing can be drawn:", problems)

    def __str__(self) -> str:
        """As it is told beside a text."""
        if self.temperature == 0:
            return "temperature 0"
        top_p = f", top-p {self.top_p}" if self.top_p < 1 else ""
        return f"temperature {self.temperature}, top-k {self.top_k}{top_p}"


def draw(
    logits: Float[Array, "batch vocab"], sampling: Sampling, key: jax.Array, positions: Int[Array, "batch"]
) -> Int[Array, "batch"]:
    """One token for each row, int32.

    A draw depends on the key, the row's number and its position alone, not on the mesh, nor on what else is drawn.

    Args:
        logits: Scores of the next token.
        sampling: How to draw.
        key: Randomness; not used at temperature 0.
        positions: The place of each row's next token.

    Example:
        >>> draw(jnp.array([[0.0, 2.0, 1.0]]), Sampling(temperature=0), jax.random.key(0), jnp.array([0])).tolist()
        [1]
    """
    if sampling.temperature < jnp.finfo(jnp.float32).tiny:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    rows = jnp.arange(logits.shape[0])
    keys = jax.vmap(lambda row, at: jax.random.fold_in(jax.random.fold_in(key, row), at))(rows, positions)
    logits = logits.astype(jnp.float32)
    logits = (logits - logits.max(axis=-1, keepdims=True)) / sampling.temperature
    words = logits.shape[-1]
    count = min(sampling.top_k or words, words)
    if count == words and sampling.top_p == 1:
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    likeliest, ids = jax.lax.top_k(logits, count)
    if sampling.top_p < 1:
        probabilities = jax.nn.softmax(likeliest)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The first one has nothing before it, so there is always one.
        likeliest = jnp.where(before < sampling.top_p, likeliest, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, likeliest)
    return jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0]
