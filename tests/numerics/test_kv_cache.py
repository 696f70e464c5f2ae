"""A token that is decoded with keys and values kept has the logits that it has in the whole sequence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spmd.errors import CacheError
from spmd.gradients.losses import next_token_loss
from spmd.jaxpr.equations import equations
from spmd.layers.attention import attend
from spmd.layers.kv_cache import KVCache, decode, prefill
from spmd.layers.router import RouterConfig
from spmd.layers.zigzag import positions
from spmd.models import gemma, gpt2, llama, mistral, mixtral, qwen
from spmd.models.decoder.layer_stack import make_layers, run_layers
from spmd.models.decoder.linear import Dense, dense
from spmd.plan.context import use_plan
from spmd.plan.nnx_model import from_nnx
from spmd.training.state import init_state
from tests import tiny
from tests.rounding import FACTOR, assert_close, noise_of, ratios
from tests.tiers import soak_but

LLAMA = dataclasses.replace(llama.PRESETS["test"], layers=3)
CONFIGS = {
    "llama": LLAMA,
    "unstacked": dataclasses.replace(LLAMA, stacked=False),
    "tied-window": dataclasses.replace(LLAMA, tied=True, window=5, unroll=2),
    "mixtral": mixtral.PRESETS["test"],
    "mixtral-dense-layer": mixtral.mixtral(
        *(64, 32, 3, 4, 2, 16),
        dense_layers=1,
        dense_d_ff=32,
        router=RouterConfig(experts=8, z_loss=1e-3),
    ),
    "mistral": mistral.PRESETS["test"],
    "qwen2": qwen.PRESETS["test-qwen2"],
    "qwen3": qwen.PRESETS["test-qwen3"],
    "gemma": gemma.PRESETS["test-gemma"],
    "gemma2": gemma.PRESETS["test-gemma2"],
    "gpt2": gpt2.PRESETS["test"],
}
SEQ, ROOM = 12, 17
LENGTHS = np.array([3, 7], np.int32)
STEPS = int(SEQ - LENGTHS.max())
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, SEQ), dtype=np.int32))


@functools.cache
def made(config):
    """The model's functions, and parameters that are not as small as initial ones, so that tokens differ."""
    model = from_nnx(config.build)
    params = jax.jit(model.init)(jax.random.key(0))
    return model, jax.tree.map(lambda w: w * 3 if w.ndim > 1 else w, params)


def logits_of(model, params, variables, ids):
    returned = model.forward(params, variables, None, ids, train=False)[0]
    return getattr(returned, "logits", returned)


plain = jax.jit(logits_of, static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="in_int8")
def step_by_step(model, shift, params, variables, tokens, in_int8=False):
    """Logits of each row's last prompt token and of the tokens that follow; `shift` puts them in the wrong place."""
    padded = jnp.where(jnp.arange(SEQ)[None] < LENGTHS[:, None], tokens, 0)[:, : LENGTHS.max()]
    run = functools.partial(logits_of, model, params, variables, padded)
    logits, cache = prefill(run, ROOM, jnp.asarray(LENGTHS), in_int8=in_int8)
    rows = jnp.arange(len(LENGTHS))

    def one(cache, at):
        token = tokens[rows, at][:, None]
        logits, cache = decode(
            functools.partial(logits_of, model, params, variables, token), cache, at + shift
        )
        return cache, logits[:, 0]

    _, found = jax.lax.scan(one, cache, LENGTHS[None] + jnp.arange(STEPS)[:, None])
    return jnp.concatenate([logits[rows, LENGTHS - 1][:, None], found.swapaxes(0, 1)], axis=1)


def whole(model, params, variables, tokens):
    """The same of the plain model, on each sequence as a whole."""
    return at_steps(plain(model, params, variables, tokens))


def at_steps(logits):
    """Of logits of all tokens, those of each row's last prompt token and of the tokens that follow."""
    return by_token(logits[row, n - 1 : n + STEPS] for row, n in enumerate(LENGTHS))


def by_token(rows):
    """A leaf for each token: one that attends to two others alike loses far more of its logits than the rest."""
    return [list(np.asarray(row)) for row in rows]


@functools.cache
def lost(name):
    """What float32 loses of the plain model's logits."""
    model, params = made(CONFIGS[name])
    return noise_of(
        functools.partial(whole, model), params, model.init_variables(jax.random.key(1)), TOKENS
    )


@pytest.mark.parametrize(
    "name", soak_but(CONFIGS, "llama", "tied-window", "mixtral-dense-layer", "gemma2", "gpt2")
)
def test_decoded_logits_are_those_of_the_whole_sequence(name):
    """Every family: rows of different lengths, padding behind the shorter one, up to rounding."""
    model, params = made(CONFIGS[name])
    assert model.info().supports_kv_cache
    variables = model.init_variables(jax.random.key(1))
    expected = whole(model, params, variables, TOKENS)
    found = step_by_step(model, 0, params, variables, TOKENS)
    assert_close(by_token(found), expected, lost(name))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_a_cache_that_is_one_position_off_is_seen(name):
    """The control: tokens that are taken to be one place further have other logits, all but those of the prompt."""
    model, params = made(CONFIGS[name])
    expected = whole(model, params, {}, TOKENS)
    found = step_by_step(model, 1, params, {}, TOKENS)
    for path, ratio in ratios(by_token(found), expected, lost(name)).items():
        assert ratio < FACTOR if path.endswith("/0") else ratio > 100 * FACTOR


REMAT, INTERVAL, BF16 = (("remat", "full"),), (("remat", "full/2"),), (("precision", "bf16"),)


@pytest.mark.parametrize("options", soak_but((REMAT, INTERVAL, BF16), REMAT), ids=str)
def test_remat_and_bfloat16_change_nothing_else(options):
    """Under a plan with layers in groups, checkpointed, logits are the same; in bfloat16, to its precision."""
    plan = tiny.plan(LLAMA, options=options)
    params = init_state(plan).params

    @jax.jit
    def both(params):
        with use_plan(plan):
            found = step_by_step.__wrapped__(plan.model, 0, params, {}, TOKENS)
            return found, logits_of(plan.model, params, {}, TOKENS)

    found, logits = both(params)
    expected = at_steps(logits)
    if "bf16" in str(options):
        np.testing.assert_allclose(by_token(found), expected, atol=2e-2 * np.abs(expected).max())
    else:
        assert_close(
            by_token(found), expected, noise_of(lambda params: at_steps(both(params)[1]), params)
        )


class Pair(nnx.Module):
    """A layer that calls `attend` twice, with values that tell the calls apart."""

    def __init__(self, rngs):
        self.first, self.second = Dense(8, 8, rngs=rngs), Dense(8, 8, rngs=rngs)

    def __call__(self, x):
        for kernel in (self.first.kernel, self.second.kernel):
            heads = dense(x, kernel).reshape(*x.shape[:2], 2, 4)
            x = x + attend(heads, heads, jnp.sin(heads)).reshape(x.shape)
        return x


class Own(nnx.Module):
    """A model with a loop of its own around layers, and stacked layers besides."""

    supports_kv_cache = True

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 8, rngs=rngs)
        self.own = nnx.List([Pair(rngs), Pair(rngs)])
        self.layers = make_layers(Pair, 2, rngs.params(), stacked=True)

    def __call__(self, tokens):
        x = self.embed(tokens) + jnp.asarray(positions(tokens.shape[1]), jnp.float32)[..., None]
        for layer in self.own:
            x = layer(x)
        return self.embed.attend(run_layers(self.layers, x))


@pytest.mark.soak
def test_calls_are_kept_in_their_order_in_and_out_of_a_scan():
    """Two calls in each layer, layers in the model's own loop, and a stack behind them."""
    model = from_nnx(lambda rngs: Own(rngs))
    params = model.init(jax.random.key(0))
    rounding = noise_of(functools.partial(whole, model), params, {}, TOKENS)
    found = by_token(step_by_step(model, 0, params, {}, TOKENS))
    assert_close(found, whole(model, params, {}, TOKENS), rounding)
    _, cache = prefill(lambda: model.apply(params, TOKENS), ROOM)
    assert [type(kept) for kept in cache.entries] == [KVCache] * 4 + [tuple]
    # a scanned group of one kind of layers, two calls, two layers
    (calls,) = cache.entries[4]
    assert [kept.key.shape for kept in calls] == [(2, 2, ROOM, 2, 4)] * 2


def test_a_decoded_token_is_multiplied_alone():
    """No product of a decoding step has the sequence's length but those with the cache, which it reads in place."""
    model, params = made(LLAMA)
    _, cache = jax.eval_shape(lambda: prefill(lambda: model.apply(params, TOKENS), ROOM))

    def step(cache, token, at):
        return decode(lambda: model.apply(params, token), cache, at)

    jaxpr = jax.make_jaxpr(step)(cache, jnp.zeros((2, 1), jnp.int32), jnp.array([4, 5]))
    products = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    # keys, values and the weights of values
    assert sum(ROOM in v.aval.shape for e in products for v in e.invars) == 3
    carried = [
        v.aval.shape for e in equations(jaxpr) if e.primitive.name == "scan" for v in e.outvars
    ]
    assert all(ROOM not in shape for shape in carried)  # layers hand back one token each


def test_training_knows_nothing_of_it():
    """The gradient of a loss is the same program as without anything kept: no call is recorded, no argument added."""
    model, params = made(LLAMA)
    batch = {"tokens": TOKENS, "targets": TOKENS, "weights": np.ones(TOKENS.shape, np.float32)}

    def loss(params):
        return next_token_loss(model)(params, {}, batch, jax.random.key(0))[0]["loss"]

    scans = [e for e in equations(jax.make_jaxpr(loss)(params)) if e.primitive.name == "scan"]
    # the stream, and nothing of each layer; the sums of the loss
    assert [len(e.outvars) for e in scans] == [1, 2]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"causal": False}, "causal: is False"),
        ({"segments": jnp.zeros((1, 4), int)}, "segments: are given"),
    ],
    ids=["causal", "segments"],
)
def test_what_cannot_be_kept_is_an_error(options, complaint):
    """Attention to what comes behind, and documents that share a row."""
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(CacheError, match=complaint):
        prefill(lambda: attend(x, x, x, **options), 8)
