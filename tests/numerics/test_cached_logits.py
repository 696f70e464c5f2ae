"""Logits with a cache equal those without, at each of 64 forced tokens, for each installed family."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd import tree
from spmd.layers.kv_cache import decode, prefill
from spmd.model_interface.model import Model, as_outputs
from spmd.plan.nnx_model import from_nnx
from tests.installed_families import small_decoders
from tests.tiers import soak_but

LENGTHS = np.array([5, 9], np.int32)
"""Tokens of the prompts; the shorter one is padded."""
STEPS = 64
TOKENS = np.random.default_rng(0).integers(1, 64, (2, LENGTHS.max() + STEPS), dtype=np.int32)
WINDOW = 80
TOLERANCE = 1e-4


@functools.cache
def model_of(name: str) -> Model:
    """The small decoder of a family, with learned positions for all tokens if it has any.

    With an epsilon of 1e-6 in norms of 8 channels, a last bit of the parameters of Qwen 3.5 changes a logit by 2e-4.
    """
    config = dataclasses.replace(small_decoders()[name], norm_eps=1e-3)
    if config.positions:
        config = dataclasses.replace(config, positions=WINDOW)
    return from_nnx(config.build)


@functools.cache
def arrays_of(name: str):
    """Parameters and variables, with norms and biases that are not what they start as."""
    model = model_of(name)
    rng = np.random.default_rng(0)

    def moved(path, leaf):
        if path.endswith("kernel"):
            return leaf
        return leaf + 0.3 * rng.standard_normal(leaf.shape).astype(leaf.dtype)

    key = jax.random.key(0)
    return tree.map_with_path(moved, (model.init(key), model.init_variables(key)))


def logits_of(name, arrays, tokens):
    """The logits of evaluation."""
    outputs, _ = model_of(name).forward(*arrays, None, tokens, train=False)
    return as_outputs(outputs).logits


@functools.partial(jax.jit, static_argnums=0)
def without_cache(name, arrays):
    """Logits `[row, token, vocab]` of the last token of each prompt, and of those that follow."""
    at = LENGTHS[:, None] - 1 + np.arange(STEPS + 1)[None]
    logits = logits_of(name, arrays, jnp.asarray(TOKENS))
    return jnp.take_along_axis(logits, at[..., None], axis=1)


@functools.partial(jax.jit, static_argnums=0)
def with_cache(name, arrays, lengths):
    """The same of padded prompts, and of tokens decoded one after the other.

    `lengths` are the prompts' lengths as the cache is told.
    """
    rows = np.arange(len(LENGTHS))
    is_prompt = np.arange(LENGTHS.max())[None] < LENGTHS[:, None]
    prompts = jnp.asarray(np.where(is_prompt, TOKENS[:, : LENGTHS.max()], 0))
    logits, cache = prefill(lambda: logits_of(name, arrays, prompts), WINDOW, lengths)

    def step(cache, number):
        token = jnp.asarray(TOKENS)[rows, LENGTHS + number][:, None]
        run = functools.partial(logits_of, name, arrays, token)
        logits, cache = decode(run, cache, lengths + number)
        return cache, logits[:, 0]

    _, decoded = jax.lax.scan(step, cache, jnp.arange(STEPS))
    first = logits[rows, LENGTHS - 1]
    return jnp.concatenate([first[:, None], jnp.moveaxis(decoded, 0, 1)], axis=1)


def differences(name, lengths):
    """The largest difference of a logit, for each row and token."""
    expected = without_cache(name, arrays_of(name))
    assert np.abs(expected).max() > 0.5
    found = with_cache(name, arrays_of(name), jnp.asarray(lengths))
    return np.abs(found - expected).max(axis=-1)


@pytest.mark.parametrize("name", soak_but(small_decoders(), "starcoder2", "deepseek", "mamba2"))
def test_logits_with_a_cache_are_those_without(name):
    """After prompts of unequal lengths, at each token; the control: positions that are one too small."""
    apart = differences(name, LENGTHS)
    assert apart.shape == (2, STEPS + 1)
    assert apart.max() < TOLERANCE
    wrong = differences(name, LENGTHS - 1)
    assert (wrong[:, 1:].max(axis=1) > 30 * TOLERANCE).all()
