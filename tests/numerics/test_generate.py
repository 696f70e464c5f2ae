"""Generation writes what the model says, with keys and values kept or not, alike on every mesh."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from spmd.errors import ConfigError
from spmd.generate.generator import ENDED, Generator
from spmd.generate.sampling import Sampling
from spmd.layers.attention import attend
from spmd.model_interface.model import Model
from spmd.models import gemma, mixtral
from spmd.models.decoder import decoder_rules, replicated_kv
from spmd.partition_rules.layouts import sequence_parallel
from spmd.partition_rules.llama import LLAMA
from spmd.partition_rules.mixtral import MIXTRAL
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.rules import Rules, replicate
from spmd.training.state import init_state
from tests import tiny
from tests.tiers import soak_but

GEMMA2 = decoder_rules(gemma.PRESETS["test-gemma2"])
GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=1.0, top_k=12, top_p=0.9)
WINDOW, TOKENS = 24, 8
PROMPTS = [[5, 6, 7, 8, 9], [1, 2, 3], [4]]
MODELS = {
    "llama": (tiny.CONFIG, LLAMA),
    "sequence-parallel": (tiny.CONFIG, sequence_parallel(LLAMA)),
    "replicated-kv": (tiny.CONFIG, replicated_kv(LLAMA)),
    "mixtral": (mixtral.PRESETS["test"], MIXTRAL),
    "gemma2": (gemma.PRESETS["test-gemma2"], GEMMA2),
}
ROWS = [
    (name, P("tensor", "fsdp") if name == "tied_columns" else spec)
    for name, spec in GEMMA2.activations
]
MODELS["columns"] = (gemma.PRESETS["test-gemma2"], dataclasses.replace(GEMMA2, activations=ROWS))
SGD = optax.sgd(0.1)


@functools.cache
def plan(name="llama", **sizes):
    config, rules = MODELS[name]
    return make_plan(tiny.mesh(**sizes), rules, from_nnx(config.build), SGD)


@functools.cache
def state(name="llama", **sizes):
    return init_state(plan(name, **sizes))


@functools.cache
def generator(name="llama", sampling=GREEDY, cached=True, ends=(), **sizes):
    return Generator(plan(name, **sizes), WINDOW, sampling, ends, cached)


def write(
    prompts, name="llama", tokens=TOKENS, seed=0, sampling=GREEDY, cached=True, ends=(), **sizes
):
    where = state(name, **sizes)
    made = generator(name, sampling, cached, ends, **sizes)
    return [
        row.tolist()
        for row in made.write(where.params, where.variables, prompts, tokens=tokens, seed=seed)
    ]


@functools.cache
def by_hand(name="llama"):
    """The plain model on each growing text, with no padding and no batch, and the argmax of its last logits."""
    params, model = state(name).params, plan(name).model
    texts = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(TOKENS):
            padded = np.zeros((1, len(prompt) + TOKENS), np.int32)
            padded[0, : len(text)] = text
            returned = _forward(model, params, padded)
            text.append(int(np.asarray(returned)[0, len(text) - 1].argmax()))
        texts.append(text[len(prompt) :])
    return texts


@functools.partial(jax.jit, static_argnums=0)
def _forward(model, params, ids):
    returned = model.forward(params, {}, None, ids, train=False)[0]
    return getattr(returned, "logits", returned)


@pytest.mark.parametrize("name", soak_but(("llama", "mixtral", "gemma2"), "llama"))
def test_greedy_is_the_likeliest_token_each_time(name):
    """Kept or not, prompts of three lengths in one batch go on as each does by itself in the plain model."""
    assert write(PROMPTS, name) == by_hand(name)
    assert write(PROMPTS, name, cached=False) == by_hand(name)
    # not one token over and over
    assert len({token for text in by_hand(name) for token in text}) > 3
    assert not generator(name).whole_window
    assert generator(name, cached=False).whole_window


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("llama", {"data": 2}, marks=pytest.mark.soak),
        pytest.param("llama", {"fsdp": 2}, marks=pytest.mark.soak),
        ("llama", {"tensor": 2}),
        pytest.param("llama", {"sequence": 2}, marks=pytest.mark.soak),
        ("llama", {"pipe": 2}),
        # More devices than key/value heads.
        pytest.param("replicated-kv", {"tensor": 4}, marks=pytest.mark.soak),
        pytest.param("llama", {"pipe": 2, "sequence": 2, "tensor": 2}, marks=pytest.mark.soak),
        pytest.param("sequence-parallel", {"tensor": 2}, marks=pytest.mark.soak),
        pytest.param("mixtral", {"expert": 2}, marks=pytest.mark.soak),
        pytest.param("mixtral", {"sequence": 2, "expert": 2, "fsdp": 2}, marks=pytest.mark.soak),
        pytest.param("gemma2", {"pipe": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_every_mesh_writes_the_same_text(name, sizes):
    """Keys and values are split as attention is, and no token is another one."""
    assert write(PROMPTS, name, **sizes) == by_hand(name)


@pytest.mark.soak
def test_every_mesh_draws_the_same_tokens():
    """A seed means the same on one device and on four; another one means something else."""
    alone = write(PROMPTS, sampling=SAMPLED)
    assert write(PROMPTS, sampling=SAMPLED, fsdp=2, tensor=2) == alone
    assert write(PROMPTS, sampling=SAMPLED, cached=False) == alone
    assert write(PROMPTS, sampling=SAMPLED, seed=1) != alone


def test_prompts_beside_it_change_no_text():
    """A prompt alone, and with others behind it, goes on alike: greedily, and drawn in the same row."""
    assert [write([prompt])[0] for prompt in PROMPTS] == by_hand()
    assert write(PROMPTS[:1], sampling=SAMPLED) == write(PROMPTS, sampling=SAMPLED)[:1]


def test_rows_draw_for_themselves():
    """The same prompt in two rows is sampled to two texts."""
    first, second = write([PROMPTS[0]] * 2, sampling=SAMPLED)
    assert first != second


def test_a_text_ends_with_its_end_token():
    """A row stops behind it, the others go on, and when all have ended nothing more is computed."""
    whole = by_hand()
    end = whole[0][2]
    expected = [text[: text.index(end) + 1] if end in text else text for text in whole]
    assert write(PROMPTS, ends=(end,)) == expected
    assert {len(text) for text in expected} != {TOKENS}
    where = state()
    steps = list(
        generator(ends=tuple(range(64))).stream(
            where.params, where.variables, PROMPTS, tokens=TOKENS
        )
    )
    assert [step.tolist() for step in steps] == [[text[0] for text in whole]]


def test_tokens_come_one_by_one():
    """Each step has a token of every row, or says that it has ended; as many as are asked for, and none for 0."""
    where, whole = state(), by_hand()
    made = generator(ends=(whole[0][2],))
    steps = list(made.stream(where.params, where.variables, PROMPTS, tokens=TOKENS))
    assert [len(step) for step in steps] == [3] * len(steps)
    assert steps[3][0] == ENDED
    assert list(made.stream(where.params, where.variables, PROMPTS, tokens=0)) == []
    assert write(PROMPTS, tokens=0) == [[], [], []]


def test_the_whole_window_can_be_written():
    """The last token has a place."""
    texts = write([PROMPTS[0]], tokens=WINDOW - 5)
    assert texts[0][:TOKENS] == by_hand()[0]
    assert len(texts[0]) == WINDOW - 5
    assert write([PROMPTS[0]], tokens=WINDOW - 5, cached=False) == texts


def test_two_programs_are_compiled_once():
    """Other prompts, of other lengths, and other seeds compile nothing more."""
    made, where = Generator(plan(), WINDOW, GREEDY), state()
    with _Compilations() as compilations:
        made.write(where.params, where.variables, PROMPTS, tokens=TOKENS)
        assert compilations.of("run") == 2
        made.write(where.params, where.variables, [[9, 8], [7] * 6, [1]], tokens=TOKENS - 3, seed=3)
        assert compilations.of("run") == 2
        made.write(where.params, where.variables, [[3]], tokens=TOKENS)
        assert compilations.of("run") == 4  # the control: another batch


@pytest.mark.parametrize("name", soak_but(("llama", "gemma2", "columns"), "llama"))
def test_stages_pass_on_the_stream_and_nothing_else(name):
    """A decoding step over `pipe` gathers no parameters and no part of the cache, at most the logits of a tied head.

    The control: a tied table that does not split the head's rows over `pipe`.
    """
    made, where = generator(name, pipe=2), state(name, pipe=2)
    ids, lengths = made._batch(PROMPTS)
    key = jax.random.key(0)
    model = made.load(where.params, where.variables).arrays
    token, position, kept = made._prefill(model, ids, lengths, key, room=made._room(5, TOKENS))
    assert all(array.sharding.spec[0] == "pipe" for array in jax.tree.leaves(kept.entries))
    text = made._decode.lower(model, kept, token, position, key).compile().as_text()
    assert "collective-permute" in text
    gathered = [
        math.prod(map(int, dims.split(",")))
        for dims in re.findall(r"\[([\d,]+)\]\S* all-gather\(", text)
    ]
    assert (
        max(gathered, default=0)
        == {
            "llama": 0,
            "gemma2": len(PROMPTS) * tiny.CONFIG.vocab,
            "columns": tiny.CONFIG.vocab * tiny.CONFIG.d_model,
        }[name]
    )


class _Compilations:
    """Counts compilations by the name of what is compiled."""

    def __enter__(self):
        self._names = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event, duration, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            self._names.append(details.get("fun_name", ""))

    def of(self, name):
        return sum(name in found for found in self._names)


class Mixer(nnx.Module):
    """A model that is told how to mix tokens, and says that it takes one at a time."""

    supports_kv_cache = True

    def __init__(self, mix, rngs):
        self.mix = mix
        self.embed = nnx.Embed(64, 8, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.mix(self.embed(tokens)))


def _attended(x):
    heads = x.reshape(*x.shape[:2], 2, 4)
    return attend(heads, heads, heads).reshape(x.shape)


class Silent(Mixer):
    supports_kv_cache = False


@pytest.mark.parametrize(
    ("kind", "mix", "why"),
    [
        (Mixer, lambda x: x + jnp.cumsum(x, axis=1), "never calls"),
        (
            Mixer,
            lambda x: jax.lax.scan(lambda x, _: (_attended(x), None), x, None, 2)[0],
            "attend is called inside of a transformation",
        ),
        (Silent, _attended, "sets neither supports_kv_cache"),
    ],
    ids=["no-attention", "own-scan", "silent"],
)
def test_a_model_whose_keys_cannot_be_kept_takes_the_whole_window(kind, mix, why):
    """It says why, and its text is that of the plain model."""
    model = from_nnx(lambda rngs: kind(mix, rngs))
    own = make_plan(tiny.mesh(), Rules([("embed/embedding", replicate("small"))]), model, SGD)
    params = init_state(own).params
    made = Generator(own, WINDOW, GREEDY)
    assert why in made.whole_window
    texts = [row.tolist() for row in made.write(params, {}, PROMPTS, tokens=3)]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text[0] == int(np.asarray(model.apply(params, np.array([prompt])))[0, -1].argmax())


def test_a_model_whose_keys_are_kept_control():
    """The control: the same model with a call that can be followed is cached, and writes the same."""
    model = from_nnx(lambda rngs: Mixer(_attended, rngs))
    own = make_plan(tiny.mesh(), Rules([("embed/embedding", replicate("small"))]), model, SGD)
    params = init_state(own).params
    texts = [
        Generator(own, WINDOW, GREEDY, cached=kept).write(params, {}, PROMPTS, tokens=5)
        for kept in (True, False)
    ]
    assert not Generator(own, WINDOW, GREEDY).whole_window
    np.testing.assert_array_equal(*texts)


def test_a_model_of_functions_takes_the_whole_window():
    """`Model(init, apply)` says nothing of itself; one that finds all tokens alike draws other ones in every place."""
    model = Model(
        lambda key: {"w": jnp.ones(8)},
        lambda params, ids: jnp.zeros((*ids.shape, 64)) * params["w"][0],
    )
    own = make_plan(tiny.mesh(), Rules([("w", P("fsdp"))]), model, SGD)
    texts = Generator(own, WINDOW, Sampling(1.0, 0)).write(
        {"w": jnp.ones(8)}, {}, [[1]] * 4, tokens=9
    )
    assert all(len(set(text.tolist())) > 3 for text in texts)
    assert len({tuple(text) for text in texts}) == 4


def test_capacities_are_of_the_token_alone():
    """Where experts have room for so many tokens, a decoded one always finds a place, in a window it may not."""
    config = dataclasses.replace(
        mixtral.PRESETS["test"],
        router=dataclasses.replace(mixtral.PRESETS["test"].router, dispatch="capacity"),
    )
    assert from_nnx(config.build).info().supports_kv_cache
    assert not from_nnx(config.build).info().position_aware
    choosing = dataclasses.replace(config.router, choice="expert", balance=0, z_loss=0)
    assert not from_nnx(dataclasses.replace(config, router=choosing).build).info().supports_kv_cache


@pytest.mark.parametrize(
    ("prompts", "tokens", "complaints"),
    [
        ([], 3, ["there is none"]),
        ([[]], 3, ["prompt: is empty"]),
        ([[1, 2, 3]], -1, ["tokens: is -1"]),
        (
            [[1], [1] * 9, []],
            20,
            ["prompt 1: ", r"9 prompt tokens \+ 20 new ones = 29 > 24", "prompt 2: is empty"],
        ),
    ],
    ids=str,
)
def test_what_cannot_be_written_is_an_error(prompts, tokens, complaints):
    """All of it at once, before anything is compiled, and before the first token is asked for."""
    with pytest.raises(ConfigError) as caught:
        generator().stream(None, None, prompts, tokens=tokens)
    for complaint in complaints:
        assert caught.match(complaint)
