"""Text from a trained model, on the mesh it was trained on: one compiled program for the whole sample."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from spmd.errors import ConfigError, Problem
from spmd.mesh import batch_sharding
from spmd.plan import ShardingPlan
from spmd.scope import within
from spmd.weights import as_taken


def sample_token(
    logits: Float[Array, "batch vocab"], key: jax.Array, temperature: float, top_k: int
) -> Int[Array, "batch"]:
    """Draws one token for each row.

    Args:
        logits: Scores of the next token.
        key: Randomness; not used at temperature 0.
        temperature: 0 takes the likeliest token, 1 samples the model's own distribution.
        top_k: Only the `top_k` likeliest tokens can be drawn; 0 allows all.
    """
    if temperature == 0:
        return jnp.argmax(logits, axis=-1)
    logits = logits.astype(jnp.float32) / temperature
    if top_k:
        likeliest, ids = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))
        drawn = jax.random.categorical(key, likeliest)
        return jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0]
    return jax.random.categorical(key, logits)


def generate(
    plan: ShardingPlan,
    apply: Callable[[Any, Int[Array, "batch seq"]], Float[Array, "batch seq vocab"]],
    params: Any,
    prompts: Int[np.ndarray, "batch prompt"],
    *,
    tokens: int,
    window: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> np.ndarray:
    """Continues each prompt by `tokens` tokens.

    Args:
        plan: The plan that `params` are sharded by.
        apply: The model.
        params: The parameters on the plan's mesh.
        prompts: Token ids; the batch is a multiple of the mesh's batch shards, and no prompt is empty.
        tokens: How many tokens to add.
        window: The longest sequence that the model was trained on.
        temperature: See `sample_token`.
        top_k: See `sample_token`.
        seed: Of the random draws.

    Returns:
        int32 `[batch, prompt + tokens]`.

    Raises:
        ConfigError: An empty prompt, more tokens than the window holds, a negative number; all at once.
    """
    batch, prompt = prompts.shape
    problems = [
        Problem(name, f"is {value}", fix="0 or more")
        for name, value in (("tokens", tokens), ("temperature", temperature), ("top_k", top_k))
        if value < 0
    ]
    problems += _window_problems(prompt, tokens, window)
    if problems:
        raise ConfigError("Nothing can be generated:", problems)

    def run(params: Any, buffer: Array, key: Array) -> Array:
        def step(position: Array, buffer: Array) -> Array:
            logits = jax.lax.dynamic_index_in_dim(apply(params, buffer), position - 1, axis=1, keepdims=False)
            token = sample_token(logits, jax.random.fold_in(key, position), temperature, top_k)
            return jax.lax.dynamic_update_index_in_dim(buffer, token.astype(buffer.dtype), position, axis=1)

        with within(plan):
            params = as_taken(params)
            return jax.lax.fori_loop(prompt, prompt + tokens, step, buffer)

    buffer = np.zeros((batch, window), np.int32)
    buffer[:, :prompt] = prompts
    sharding = batch_sharding(plan.mesh)
    whole = NamedSharding(plan.mesh, P())
    done = jax.jit(run, out_shardings=whole)(params, jax.device_put(buffer, sharding), jax.random.key(seed))
    return np.asarray(jax.device_get(done))[:, : prompt + tokens]


def check_window(prompt: int, tokens: int, window: int) -> None:
    """Whether a sample fits the sequences that a model is trained on.

    Args:
        prompt: Tokens to go on from.
        tokens: Tokens to add.
        window: The longest sequence.

    Raises:
        ConfigError: It does not, or the prompt is empty.
    """
    problems = _window_problems(prompt, tokens, window)
    if problems:
        raise ConfigError("The sample cannot be generated:", problems)


def _window_problems(prompt: int, tokens: int, window: int) -> list[Problem]:
    problems = [Problem("prompt", "is empty", fix="give at least one token")] if prompt == 0 else []
    if prompt + tokens > window:
        arithmetic = f"{prompt} prompt tokens + {tokens} new ones = {prompt + tokens} > {window}"
        problems.append(Problem("tokens", "is more than the model was trained on", arithmetic, "ask for fewer tokens"))
    return problems
