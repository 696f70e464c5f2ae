"""A mixer that declares its own cache decodes the tokens of the whole window, alike on every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from spmd.errors import CacheError, ConfigError
from spmd.generate.generator import Generator
from spmd.generate.sampling import Sampling
from spmd.layers.attention import attend
from spmd.layers.cache_entry import CacheEntry, cached_array, split_entry
from spmd.layers.kv_cache import (
    KVCache,
    cache_length,
    cache_slot,
    decode,
    prefill,
    token_mask,
)
from spmd.layers.zigzag import positions
from spmd.models.decoder.layer_stack import LayerGroup, make_layers, run_layers
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.batch import TOKENS as TOKENS_ROWS
from spmd.sharding.rules import Rules, replicate
from spmd.training.state import init_state
from tests import tiny
from tests.rounding import assert_close, noise_of
from tests.tiers import soak_but

VOCAB, WIDTH, HEADS, DIM, TAPS = 64, 16, 2, 4, 3
WINDOW, TOKENS = 24, 8
PROMPTS = [[5, 6, 7, 8, 9], [1, 2, 3], [4], [3, 1]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScanCache(CacheEntry):
    state: Array = cached_array("batch heads _ _")
    inputs: Array = cached_array("batch _ _")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentCache(CacheEntry):
    latent: Array = cached_array("batch length _")
    place: Array = cached_array("batch length _")


def normal(rngs, *shape):
    return nnx.Param(jax.random.normal(rngs.params(), shape) * shape[0] ** -0.5)


class Scan(nnx.Module):
    """A short causal convolution, then `state = gate · state + key ⊗ value`, read by a query."""

    def __init__(self, masked, rngs):
        self.masked = masked
        self.taps = normal(rngs, TAPS, WIDTH)
        self.kernel = normal(rngs, WIDTH, HEADS, 3 * DIM + 1)
        self.out = normal(rngs, HEADS, DIM, WIDTH)

    def __call__(self, x):
        slot = cache_slot("scan", ScanCache)
        batch, seq, _ = x.shape
        mask = token_mask(seq)
        if mask is None or not self.masked:
            mask = jnp.ones((batch, seq), bool)
        past = slot.past
        if past is None:
            zeros = jnp.zeros((batch, HEADS, DIM, DIM), jnp.float32)
            past = ScanCache(zeros, jnp.zeros((batch, TAPS - 1, WIDTH), x.dtype))
        joined = jnp.concatenate([past.inputs, x], axis=1)
        mixed = sum(joined[:, tap : tap + seq] * self.taps[tap][None, None] for tap in range(TAPS))
        heads = jnp.einsum("bsd,dhk->sbhk", mixed, self.kernel[...])
        query, key, value, gate = jnp.split(heads, [DIM, 2 * DIM, 3 * DIM], axis=-1)

        def step(state, token):
            query, key, value, gate, real = token
            new = jax.nn.sigmoid(gate)[..., None] * state + key[..., None] * value[..., None, :]
            state = jnp.where(real[:, None, None, None], new, state)
            return state, jnp.einsum("bhk,bhkv->bhv", query, state)

        state, read = jax.lax.scan(step, past.state, (query, key, value, gate, mask.T))
        last = mask.sum(axis=1)[:, None] + jnp.arange(TAPS - 1)[None]
        slot.save(ScanCache(state, jnp.take_along_axis(joined, last[..., None], axis=1)))
        return x + jnp.einsum("sbhv,hvd->bsd", read, self.out[...])


class Latent(nnx.Module):
    """Attention of one head to latents; a second array says where each token is."""

    def __init__(self, rngs):
        self.query = normal(rngs, WIDTH, DIM)
        self.down = normal(rngs, WIDTH, DIM)
        self.up = normal(rngs, DIM, WIDTH)

    def __call__(self, x):
        slot = cache_slot("latent attention", LatentCache)
        seq = x.shape[1]
        at = jnp.broadcast_to(jnp.asarray(positions(seq), jnp.float32), x.shape[:2])
        place = jnp.stack([jnp.cos(at), jnp.sin(at)], axis=-1)
        own = LatentCache(x @ self.down[...], place)
        slot.save(own)
        seen = own
        mask = jnp.tril(jnp.ones((seq, seq), bool))[None]
        if slot.past is not None:
            seen = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), slot.past, own)
            before = slot.past_positions() < slot.positions[:, None]
            mask = jnp.pad(before, ((0, 0), (0, 1)), constant_values=True)[:, None]
        scores = jnp.einsum("bqk,blk->bql", x @ self.query[...], seen.latent)
        scores = scores + jnp.einsum("bqk,blk->bql", place, seen.place)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
        return x + jnp.einsum("bql,blk->bqk", weights, seen.latent) @ self.up[...]


class Attention(nnx.Module):
    """Attention whose values have other heads than its keys."""

    def __init__(self, rngs):
        self.kernel = normal(rngs, WIDTH, HEADS, 3 * DIM)
        self.out = normal(rngs, HEADS, DIM, WIDTH)

    def __call__(self, x):
        heads = jnp.einsum("bsd,dhk->bshk", x, self.kernel[...])
        read = attend(*jnp.split(heads, 3, axis=-1))
        return x + jnp.einsum("bshv,hvd->bsd", read, self.out[...])


class Toy(nnx.Module):
    """Stacked layers of one mixer, behind mixers in a loop of the model's own."""

    supports_kv_cache = True

    def __init__(self, first, stacked, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.first = nnx.List([make(rngs) for make in first])
        self.layers = make_layers(stacked, 2, rngs.params(), stacked=True)
        self.head = normal(rngs, WIDTH, VOCAB)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.first:
            x = layer(x)
        return run_layers(self.layers, x) @ self.head[...]


class Groups(nnx.Module):
    """Groups of two unlike layers in a scan."""

    def __init__(self, rngs):
        def make(rngs):
            return LayerGroup({"scan": MASKED(rngs), "latent": Latent(rngs)})

        self.layers = make_layers(make, 2, rngs.params(), stacked=True)

    def __call__(self, x):
        return run_layers(self.layers, x)


MASKED, UNMASKED = functools.partial(Scan, True), functools.partial(Scan, False)
ENDS = (("embed/embedding", replicate("small")), ("head", replicate("small")))
HEADS_ROWS = (("kernel", P(None, "tensor")), ("out", P("tensor")))
SCAN = (("taps", replicate("small")), *HEADS_ROWS)
LATENT = (("(query|down|up)", replicate("small")),)
MODELS = {
    "recurrent": ((), MASKED, SCAN),
    "unmasked": ((), UNMASKED, SCAN),
    "latent": ((), Latent, LATENT),
    "groups": ((Groups,), Latent, (*SCAN, *LATENT)),
    "hybrid": ((Latent, Attention), MASKED, (*SCAN, *LATENT)),
}


@functools.cache
def model(name):
    first, stacked, _ = MODELS[name]
    return from_nnx(functools.partial(Toy, first, stacked))


@functools.cache
def plan(name, **sizes):
    rules = Rules([*ENDS, *MODELS[name][2]], stacked={"layers": "pipe"}, batch=TOKENS_ROWS)
    return make_plan(tiny.mesh(**sizes), rules, model(name), optax.sgd(0.1))


@functools.cache
def params(name):
    return jax.jit(model(name).init)(jax.random.key(0))


def write(name, cached=True, **sizes):
    greedy = Sampling(temperature=0.0)
    made = Generator(plan(name, **sizes), WINDOW, greedy, cached=cached)
    assert bool(made.whole_window) is not cached
    own = init_state(plan(name, **sizes)).params
    texts = made.write(own, {}, PROMPTS, tokens=TOKENS)
    return [text.tolist() for text in texts]


LENGTHS = np.array([3, 7], np.int32)
SEQ, STEPS = 12, 5
IDS = np.random.default_rng(0).integers(0, VOCAB, (2, SEQ), dtype=np.int32)


@functools.partial(jax.jit, static_argnums=0)
def whole(name, params):
    """Logits of each row's last prompt token and of the tokens that follow."""
    logits = model(name).apply(params, IDS)
    return [logits[row, n - 1 : n + STEPS] for row, n in enumerate(LENGTHS)]


@functools.partial(jax.jit, static_argnums=0)
def step_by_step(name, params):
    """The same, of padded prompts and tokens decoded one after the other."""
    padded = jnp.where(jnp.arange(SEQ)[None] < LENGTHS[:, None], IDS, 0)
    logits, cache = prefill(lambda: model(name).apply(params, padded), WINDOW, LENGTHS)
    rows = jnp.arange(len(LENGTHS))

    def one(cache, at):
        token = jnp.asarray(IDS)[rows, at][:, None]
        logits, cache = decode(functools.partial(model(name).apply, params, token), cache, at)
        return cache, logits[:, 0]

    _, found = jax.lax.scan(one, cache, LENGTHS[None] + jnp.arange(STEPS)[:, None])
    first = logits[rows, LENGTHS - 1][None]
    return list(jnp.concatenate([first, found]).swapaxes(0, 1))


@pytest.mark.parametrize(
    "name", soak_but(("recurrent", "latent", "groups", "hybrid"), "groups", "hybrid")
)
def test_decoded_logits_are_those_of_the_whole_sequence(name):
    """States, convolutions, latents and keys, of rows of other lengths, up to rounding."""
    rounding = noise_of(functools.partial(whole, name), params(name))
    assert_close(step_by_step(name, params(name)), whole(name, params(name)), rounding)


def test_padding_that_enters_a_state_is_seen():
    """The control: a mixer that ignores the mask has other logits, but those of the prompt."""
    found, expected = (np.stack(f("unmasked", params("unmasked"))) for f in (step_by_step, whole))
    np.testing.assert_allclose(found[:, 0], expected[:, 0], rtol=1e-4, atol=1e-5)
    assert (np.abs(found - expected)[:, 1:].max(axis=-1) > 1e-2).all()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("recurrent", {"data": 2, "tensor": 2}),
        ("latent", {}),
        pytest.param("hybrid", {"data": 2, "tensor": 2}, marks=pytest.mark.soak),
        pytest.param("hybrid", {"sequence": 2, "pipe": 2}, marks=pytest.mark.soak),
        pytest.param("recurrent", {"pipe": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_cached_tokens_are_those_of_the_whole_window(name, sizes):
    """Greedy texts of prompts of other lengths, padded, in one batch; split or not."""
    texts = write(name, cached=False)
    assert write(name, **sizes) == texts
    assert len({token for text in texts for token in text}) > 3


def test_tokens_of_a_mixer_that_ignores_padding_are_others():
    """The control: the first token is that of the prompt, and texts part behind it."""
    texts = write("unmasked", cached=False)
    found = write("unmasked")
    assert [text[0] for text in found] == [text[0] for text in texts]
    assert all(text != other for text, other in zip(found, texts, strict=True))


def test_arrays_are_split_by_their_axes():
    """Layers over `pipe`, rows, tokens and heads over their axes, all else and what does not divide whole."""
    state, inputs = jnp.zeros((2, 4, HEADS, DIM, DIM)), jnp.zeros((3, 4, TAPS - 1, WIDTH))
    key, latent = jnp.zeros((4, 6, 3, DIM)), jnp.zeros((2, 3, 4, 6, DIM))
    assert specs(ScanCache(state, inputs), data=2, tensor=2, pipe=2) == [
        P("pipe", "data", "tensor"),
        P(None, "data"),
    ]
    assert specs(KVCache(key, key), fsdp=2, sequence=2, tensor=2)[0] == P("fsdp", "sequence")
    assert specs(LatentCache(latent, latent), data=2, sequence=2, pipe=2)[0] == P(
        "pipe", None, "data", "sequence"
    )


def specs(entry, **sizes):
    split = jax.jit(functools.partial(split_entry, mesh=tiny.mesh(**sizes)))(entry)
    return [x.sharding.spec for x in jax.tree.leaves(split)]


def save(entry, kind=None):
    cache_slot("mixer", kind or type(entry)).save(entry)


def test_the_length_of_a_cache_of_states_is_known():
    """Where nothing has an axis of tokens, a model with positions of its own still knows how long a text may be."""
    x = jnp.ones((1, 2, 4))
    lengths = []

    def run():
        lengths.append(cache_length())
        save(ScanCache(x[..., None], x))

    _, cache = prefill(run, 9)
    decode(run, cache, jnp.array([3]))
    assert lengths == [9, 9]


def test_an_axis_of_rows_may_be_anywhere():
    """A token is written behind the prompts, on whichever side of the rows the tokens are; then the next one."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Turned(CacheEntry):
        x: Array = cached_array("_ length batch")

    lengths = jnp.array([1, 3])
    prompts = Turned(jnp.zeros((2, 3, 2)))
    _, cache = prefill(lambda: save(prompts), 5, lengths, new_tokens=3)
    for number in (1, 2):
        token = Turned(jnp.full((2, 1, 2), number))
        _, cache = decode(functools.partial(save, token), cache, lengths + number)
    expected = np.zeros((2, 6, 2))
    expected[:, 3], expected[:, 4] = 1, 2
    np.testing.assert_array_equal(cache.entries[0].x, expected)


def test_a_token_without_a_place_is_an_error():
    """Outside of a trace, which does not know how many tokens there are."""
    entry = KVCache(jnp.ones((1, 1, 1, 4)), jnp.ones((1, 1, 1, 4)))
    _, cache = prefill(lambda: save(entry), 4, new_tokens=1)
    _, cache = decode(lambda: save(entry), cache, jnp.array([1]))
    with pytest.raises(ConfigError, match="room for 1 new tokens"):
        decode(lambda: save(entry), cache, jnp.array([2]))


def test_the_mask_is_that_of_prompts_alone():
    """Outside of prefill, and where lengths are not given, there is none."""
    masks = []

    def run():
        masks.append(token_mask(3))
        save(ScanCache(jnp.ones((2, 1, 1, 1)), jnp.ones((2, 1, 1))))

    _, cache = prefill(run, 5, jnp.array([3, 1]))
    decode(run, cache, jnp.array([3, 1]))
    prefill(run, 5)
    run()
    assert masks[0].tolist() == [[True, True, True], [True, False, False]]
    assert masks[1:] == [None] * 3


SMALL, LARGE = ScanCache(*[jnp.ones((1,) * n) for n in (4, 3)]), jnp.ones((1, 1, 2))


@pytest.mark.parametrize(
    ("first", "then", "complaint"),
    [
        (lambda: cache_slot("mixer", ScanCache), None, "takes a slot and saves nothing"),
        (lambda: save(ScanCache(LARGE, LARGE)), None, r"ScanCache.state: has other dimensions"),
        (
            lambda: save(SMALL),
            lambda: save(dataclasses.replace(SMALL, inputs=LARGE)),
            r"ScanCache.inputs: is not the same array",
        ),
        (
            lambda: save(SMALL),
            lambda: save(dataclasses.replace(SMALL, state=SMALL.state.astype(jnp.bfloat16))),
            r"float32\(1, 1, 1, 1\), then bfloat16",
        ),
        (lambda: save(SMALL), lambda: save(LatentCache(LARGE, LARGE)), "in another order"),
        (lambda: save(SMALL), lambda: [save(SMALL), save(SMALL)], "in another order"),
        (lambda: [save(SMALL), save(SMALL)], lambda: save(SMALL), "are fewer in decoding"),
    ],
    ids=["unsaved", "dimensions", "shape", "dtype", "kind", "more", "fewer"],
)
def test_a_wrong_use_of_the_cache_is_an_error(first, then, complaint):
    """Of a slot in prefill, and of one in decoding that does not fit it."""

    def both():
        _, cache = prefill(first, 4)
        decode(then, cache, jnp.array([1]))

    with pytest.raises(ConfigError, match=complaint):
        both()


def test_a_state_inside_of_a_loop_of_its_own_is_an_error():
    """An array cannot leave a transformation that `run_layers` does not control."""
    with pytest.raises(CacheError, match="mixer: is called inside of a transformation"):
        prefill(lambda: jax.lax.scan(lambda c, _: (c, save(SMALL)), 0, None, 2), 4)


@pytest.mark.parametrize(
    ("axes", "complaint"),
    [
        ("batch lenght _", "lenght: is an unknown axis"),
        ("length _", "batch: is missing"),
        ("batch heads heads", "heads: is repeated"),
    ],
)
def test_unknown_axes_are_an_error(axes, complaint):
    """When the class is made."""
    with pytest.raises(ConfigError, match=complaint):
        cached_array(axes)


def test_an_array_without_axes_is_an_error():
    """A field of another kind has no axes."""

    @dataclasses.dataclass(frozen=True)
    class Bare(CacheEntry):
        x: Array

    with pytest.raises(ConfigError, match=r"Bare.x: declares no axes"):
        Bare.axes()
