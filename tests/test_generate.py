"""Generation draws what it says from the model's own distribution, alike on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.errors import ConfigError
from spmd.generate import generate, sample_token
from spmd.state import init_state
from tests import tiny

PROMPTS = np.random.default_rng(0).integers(0, tiny.CONFIG.vocab, (4, 3), dtype=np.int32)
TOKENS, WINDOW = 6, 12


@functools.cache
def params(**sizes):
    return init_state(tiny.plan(**sizes)).params


def text(sizes=(), **options):
    """What the tiny model writes; greedily unless options say otherwise."""
    options = {"tokens": TOKENS, "window": WINDOW, "temperature": 0.0, **options}
    return generate(tiny.plan(**dict(sizes)), tiny.model().apply, params(**dict(sizes)), PROMPTS, **options)


@functools.cache
def sampled(seed=0, sizes=(), temperature=1.0, top_k=0):
    return text(sizes, temperature=temperature, top_k=top_k, seed=seed)


@functools.cache
def greedy():
    return text()


def test_greedy_is_the_likeliest_token_each_time():
    """It equals running the plain model on the growing text, with no padding, and taking the argmax by hand."""
    expected, apply = PROMPTS, jax.jit(tiny.model().apply)
    for _ in range(TOKENS):
        logits = np.asarray(apply(params(), jnp.asarray(expected)))
        expected = np.concatenate([expected, logits[:, -1].argmax(axis=-1)[:, None]], axis=1)
    assert greedy().dtype == np.int32
    np.testing.assert_array_equal(greedy(), expected)
    assert len(np.unique(greedy()[:, 3:])) > 3  # the text is not one token over and over


def test_the_prompt_is_kept_and_no_more_is_written_than_asked():
    """The output is the prompt and `tokens` more, also when they fill the window exactly."""
    full = text(tokens=WINDOW - 3)
    assert full.shape == (4, WINDOW)
    np.testing.assert_array_equal(full[:, :3], PROMPTS)
    np.testing.assert_array_equal(full[:, : 3 + TOKENS], greedy())


def test_the_window_changes_no_token():
    """Padding behind the text is not seen."""
    np.testing.assert_array_equal(text(window=16), greedy())


def test_temperature_zero_ignores_the_seed():
    """Greedy text is the same for every seed, and sampled text is not."""
    np.testing.assert_array_equal(text(seed=1), greedy())
    assert (sampled(seed=1) != sampled(seed=0)).any()


def test_one_seed_gives_one_text():
    """Sampling is deterministic."""
    np.testing.assert_array_equal(text(temperature=1.0, top_k=0, seed=0), sampled(seed=0))


def test_top_1_is_greedy_at_any_temperature():
    """Among one token there is nothing to draw."""
    np.testing.assert_array_equal(sampled(top_k=1, temperature=5.0), greedy())
    assert (sampled(top_k=0, temperature=5.0) != greedy()).any()


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 8, "seed": 3}], ids=str)
def test_a_mesh_writes_the_same_text(options):
    """fsdp=4, tensor=2 and one device give the same tokens, greedy and sampled."""
    np.testing.assert_array_equal(text((("fsdp", 4), ("tensor", 2)), **options), text(**options))


def test_top_k_draws_from_the_k_likeliest_and_from_all_of_them():
    """At a high temperature thousands of draws reach each of the k tokens, and none outside; with 0 they reach all."""
    logits = jnp.asarray(np.random.default_rng(1).permutation(12), jnp.float32)
    rows = jnp.broadcast_to(logits, (4000, 12))
    best = np.argsort(-np.asarray(logits))
    for k in (1, 3, 12, 50):
        drawn = sample_token(rows, jax.random.key(0), temperature=20.0, top_k=k)
        assert set(np.asarray(drawn)) == set(best[:k])
    assert set(np.asarray(sample_token(rows, jax.random.key(0), temperature=20.0, top_k=0))) == set(range(12))


def test_tokens_that_tie_are_not_more_than_k():
    """Of equally likely tokens top-k still allows only k, and top-1 the one that greedy takes."""
    rows = jnp.zeros((2000, 12)).at[:, :4].set(1.0)
    for k in (1, 2, 3):
        assert len(set(np.asarray(sample_token(rows, jax.random.key(0), temperature=1.0, top_k=k)))) == k
    drawn = sample_token(rows, jax.random.key(0), temperature=1.0, top_k=1)
    np.testing.assert_array_equal(drawn, sample_token(rows, jax.random.key(0), temperature=0.0, top_k=0))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature):
    """Frequencies of 20,000 draws are softmax(logits / temperature), to four standard deviations."""
    logits = jnp.asarray([0.0, 1.0, 2.0, 0.5])
    rows = jnp.broadcast_to(logits, (20_000, 4))
    drawn = np.asarray(sample_token(rows, jax.random.key(0), temperature, top_k=0))
    expected = np.asarray(jax.nn.softmax(logits / temperature))
    deviation = np.sqrt(expected * (1 - expected) / 20_000)
    assert (np.abs(np.bincount(drawn, minlength=4) / 20_000 - expected) < 4 * deviation).all()


def test_every_draw_has_randomness_of_its_own():
    """A model that finds all tokens equally likely writes neither one token over and over nor one text in all rows."""
    written = generate(
        tiny.plan(), lambda params, tokens: jnp.zeros((*tokens.shape, 64)), None, PROMPTS, tokens=9, window=12, top_k=0
    )[:, 3:]
    assert all(len(set(row)) > 3 for row in written)
    assert len({tuple(row) for row in written}) == 4


def test_bfloat16_logits_are_sampled_in_float32():
    """Near ties of a large vocabulary survive division by the temperature."""
    logits = jnp.asarray([[1.0, 1.0078125]], jnp.bfloat16)  # neighbours in bfloat16
    drawn = sample_token(jnp.broadcast_to(logits, (20_000, 2)), jax.random.key(0), temperature=1e-3, top_k=0)
    assert np.asarray(drawn).mean() > 0.99


@pytest.mark.parametrize(
    ("prompts", "options", "complaint"),
    [
        (PROMPTS[:, :0], {}, "is empty"),
        (PROMPTS, {"tokens": 10}, r"3 prompt tokens \+ 10 new ones = 13 > 12"),
        (PROMPTS, {"tokens": -1}, "tokens: is -1"),
        (PROMPTS, {"temperature": -0.5}, r"temperature: is -0\.5"),
        (PROMPTS, {"top_k": -1}, "top_k: is -1"),
    ],
)
def test_what_cannot_be_generated_is_an_error(prompts, options, complaint):
    """Before anything is compiled."""
    with pytest.raises(ConfigError, match=complaint):
        generate(tiny.plan(), _never, None, prompts, **{"tokens": TOKENS, "window": WINDOW, **options})


def test_all_that_is_wrong_is_said_at_once():
    """Three bad arguments are three problems."""
    with pytest.raises(ConfigError) as caught:
        generate(tiny.plan(), _never, None, PROMPTS, tokens=20, window=WINDOW, temperature=-1.0, top_k=-1)
    assert [problem.where for problem in caught.value.problems] == ["temperature", "tokens", "top_k"]


def _never(*_):
    raise AssertionError("the model was run")
