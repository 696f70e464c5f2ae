"""Draws follow the model's own distribution, cut as it is asked, and depend on nothing but key, row and position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.errors import ConfigError
from spmd.generate.sampling import Sampling, draw

LOGITS = np.random.default_rng(1).permutation(12).astype(np.float32) / 3
DRAWS = 20_000


def drawn(logits=LOGITS, rows=DRAWS, key=0, **options):
    """A token for each of many rows with the same logits."""
    sampling = Sampling(**{"temperature": 1.0, "top_k": 0, **options})
    logits = jnp.broadcast_to(jnp.asarray(logits), (rows, len(logits)))
    return np.asarray(draw(logits, sampling, jax.random.key(key), jnp.zeros(rows, jnp.int32)))


def expected(temperature=1.0, top_k=0, top_p=1.0):
    """The distribution by NumPy: temperature, then top-k, then top-p."""
    scores = LOGITS.astype(np.float64) / temperature
    order = np.argsort(-scores)
    scores[order[top_k or len(order) :]] = -np.inf
    chances = np.exp(scores - scores.max())
    chances /= chances.sum()
    nucleus = 1 + np.searchsorted(np.cumsum(chances[order]), top_p, side="left")
    chances[order[nucleus:]] = 0
    return chances / chances.sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.7},
        {"top_p": 1e-6},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.8},
    ],
    ids=str,
)
def test_frequencies_are_those_of_the_cut_distribution(options):
    """Of 20,000 draws, to four standard deviations; a token that is cut off is never drawn."""
    chances = expected(**options)
    found = np.bincount(drawn(**options), minlength=12) / DRAWS
    assert (np.abs(found - chances) <= 4 * np.sqrt(chances * (1 - chances) / DRAWS)).all()


def test_cuts_are_made_in_their_order():
    """Top-p is of what top-k and the temperature leave: in another order others are left."""
    together = expected(temperature=2.0, top_k=4, top_p=0.6)
    of_all = expected(temperature=2.0, top_p=0.6)
    untempered = expected(top_k=4, top_p=0.6)
    assert (of_all > 0).sum() > 4 > (together > 0).sum() > (untempered > 0).sum()
    assert set(drawn(temperature=2.0, top_k=4, top_p=0.6)) == set(np.flatnonzero(together))


def test_temperature_zero_is_the_likeliest_token_whatever_else():
    """And so is top-1, and a nucleus that holds one token, at any temperature."""
    best = LOGITS.argmax()
    assert set(drawn(temperature=0.0, top_k=5, top_p=0.5)) == {best}
    assert set(drawn(temperature=9.0, top_k=1)) == {best}
    assert set(drawn(temperature=0.1, top_p=1e-9)) == {best}


@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e-6])
@pytest.mark.parametrize("top_k", [0, 2])
def test_a_tiny_temperature_is_the_likeliest_token(temperature, top_k):
    """Nothing overflows on the way."""
    logits, at = jnp.array([[1.0, 3.0, 2.0]]), jnp.array([0])
    assert draw(logits, Sampling(temperature, top_k), jax.random.key(0), at).tolist() == [1]


def test_tokens_that_tie_are_not_more_than_k():
    """Of equally likely tokens top-k still allows only k, and top-1 the one that greedy takes."""
    logits = np.repeat([1.0, 0.0], [4, 8])
    for k in (1, 2, 3):
        assert set(drawn(logits, top_k=k)) == set(range(k))
    assert drawn(logits, rows=1, top_k=1) == drawn(logits, rows=1, temperature=0.0)


def test_a_draw_depends_on_key_row_and_position_alone():
    """More rows change no draw; another row, position or key does."""
    few, many = drawn(rows=50), drawn(rows=100)
    np.testing.assert_array_equal(few, many[:50])
    assert (drawn(rows=50, key=1) != few).any()
    assert len(set(many)) > 3
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (50, 12))
    later = draw(
        logits, Sampling(temperature=1.0, top_k=0), jax.random.key(0), jnp.ones(50, jnp.int32)
    )
    assert (np.asarray(later) != few).any()


def test_bfloat16_logits_are_sampled_in_float32():
    """Near ties of a large vocabulary survive division by the temperature."""
    neighbours = jnp.asarray([1.0, 1.0078125], jnp.bfloat16)
    assert drawn(neighbours, temperature=1e-3).mean() > 0.99


@pytest.mark.soak
def test_all_that_is_wrong_is_said_at_once():
    """Three bad settings are three problems; a number that is none is not let through."""
    with pytest.raises(ConfigError) as caught:
        Sampling(temperature=-1.0, top_k=-1, top_p=1.5)
    assert [problem.where for problem in caught.value.problems] == ["temperature", "top_k", "top_p"]
    for options in ({"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": float("nan")}):
        with pytest.raises(ConfigError):
            Sampling(**options)
