"""Options of softmax attention are their formulas in NumPy, with a cache too, and every mesh has equal numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.errors import ConfigError
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.layers.kv_cache import decode, prefill
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    LayerSpec,
    NormSpec,
    Rotary,
    Temperature,
    decoder_rules,
)
from spmd.models.decoder.rotary import rotary_angles
from spmd.testing import token_batches
from tests.decoders import model, params
from tests.one_device import Job
from tests.tiers import soak_but

SEQ = 24
MIXERS = {
    "gate of channels": AttentionSpec(gate="channel", gate_bias=True),
    "gate of heads": AttentionSpec(gate="head", gate_activation="softplus"),
    "sinks": AttentionSpec(sinks=True),
    "chunk": AttentionSpec(chunk=5),
    "narrow values": AttentionSpec(value_dim=4, value_scale=0.7, gate="channel"),
    "temperature": AttentionSpec(temperature=Temperature(0.5, interval=4, offset=1)),
    "negative rotation": AttentionSpec(rotary=Rotary(negative=True)),
    "norms after rotation": AttentionSpec(
        qk_norm="head", qk_norm_kind=NormSpec(scale=False), qk_norm_after=True
    ),
    "norms of heads": AttentionSpec(qk_norm="heads", qk_norm_kind=NormSpec("layer")),
}
OFF = {
    "gate of channels": {"gate": "none"},
    "gate of heads": {"gate_activation": "sigmoid"},
    "sinks": {"sinks": False},
    "chunk": {"chunk": 6},
    "narrow values": {"value_scale": 1.0},
    "temperature": {"temperature": Temperature(0.5, interval=4)},
    "negative rotation": {"rotary": Rotary()},
    "norms after rotation": {"qk_norm": "none"},
    "norms of heads": {"qk_norm_kind": NormSpec("rms")},
}
"""A control for each: another value of the option, with the same parameters."""
BATCHES = token_batches((8, 16), 64, steps=2)


def decoder(mixer, **fields):
    return DecoderConfig(64, 32, 2, 4, 2, 64, layer=LayerSpec(mixer), **fields)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def normed(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def standardized(x):
    return normed(x - x.mean(-1, keepdims=True))


GATES = {"sigmoid": sigmoid, "softplus": lambda x: np.log1p(np.exp(x))}


def of_head(spec, x, layer, norm, head):
    """One head of queries or keys, normalised with its own scale, if it has one."""
    if spec.qk_norm != "heads":
        return x[:, head]
    normalise = {"layer": standardized, "rms": normed}[spec.qk_norm_kind.kind]
    return normalise(x[:, head]) * layer[norm]["scale"][head]


def by_hand(spec, layer, x):
    """Attention of a resolved spec in NumPy, head by head: x `[seq, d]`."""
    seq = len(x)
    cos, sin = (a[0] for a in rotary_angles(np.arange(seq)[None], spec.head_dim, 1e4))
    if spec.rotary.negative:
        sin = -sin

    def projected(name, count):
        y = x @ layer[name]["kernel"] + layer[name].get("bias", 0)
        return y.reshape(seq, count, -1)

    def turned(head):
        first, second = np.split(head, 2, -1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    query = projected("q_proj", spec.heads)
    key = projected("k_proj", spec.kv_heads)
    value = projected("v_proj", spec.kv_heads) * spec.value_scale
    at = np.arange(seq)
    mask = at[:, None] >= at
    if spec.chunk:
        mask &= at[:, None] // spec.chunk == at // spec.chunk
    outs = []
    for head in range(spec.heads):
        shared = head * spec.kv_heads // spec.heads
        queries = turned(of_head(spec, query, layer, "q_norm", head))
        keys = turned(of_head(spec, key, layer, "k_norm", shared))
        if spec.qk_norm == "head":
            queries, keys = normed(queries), normed(keys)
        if spec.temperature is not None:
            steps = (at + spec.temperature.offset) // spec.temperature.interval
            queries *= 1 + spec.temperature.strength * np.log(1 + steps)[:, None]
        scores = queries @ keys.T / np.sqrt(spec.head_dim)
        weights = np.where(mask, np.exp(scores), 0)
        total = weights.sum(-1, keepdims=True)
        if spec.sinks:
            total += np.exp(layer["sinks"][head])
        out = weights / total @ value[:, shared]
        if spec.gate != "none":
            gate = projected("g_proj", spec.heads)[:, head]
            out = out * GATES[spec.gate_activation](gate)
        outs.append(out)
    return np.concatenate(outs, -1) @ layer["o_proj"]["kernel"]


def of_first_layer(config, arrays, x):
    """The output of the first layer's attention: x `[seq, d]`."""

    def first_layer(model, x):
        inputs = model._inputs(x.shape[1], None, None)
        layer = jax.tree.map(lambda w: w[0], model.layers)
        return layer.attention(x, inputs)

    return np.asarray(model(config).apply(arrays, x[None], method=first_layer)[0])


@pytest.mark.parametrize("name", MIXERS)
def test_attention_is_that_of_the_formulas(name):
    """And with another value of the option it would not be."""
    config = decoder(MIXERS[name])
    spec = config.pattern.group[0].mixer
    x = np.random.default_rng(1).standard_normal((SEQ, 32)).astype(np.float32)
    layer = jax.tree.map(
        lambda w: np.asarray(w[0], np.float64), params(config)["layers"]["attention"]
    )
    found = of_first_layer(config, params(config), x)
    np.testing.assert_allclose(found, by_hand(spec, layer, x), rtol=1e-3, atol=1e-4)
    other = dataclasses.replace(spec, **OFF[name])
    assert np.abs(by_hand(other, layer, x) - found).max() > 1e-2


@pytest.mark.parametrize("name", MIXERS)
def test_the_counted_parameters_are_those_of_the_model(name):
    """Kernels are in matmuls, all others are biases, norms and the embedding."""
    config = decoder(MIXERS[name])
    shapes = jax.eval_shape(model(config).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == config.total_params


@pytest.mark.parametrize("name", soak_but(MIXERS, "gate of channels"))
def test_decoding_gives_the_logits_without_a_cache(name):
    """At each of the forced tokens, after prompts of unequal length."""
    config = decoder(MIXERS[name])
    arrays = params(config)
    tokens = np.random.default_rng(0).integers(0, 64, (2, SEQ), dtype=np.int32)
    whole = np.asarray(jax.jit(model(config).apply)(arrays, tokens))
    lengths = jnp.array([5, 9])
    _, cache = prefill(lambda: model(config).apply(arrays, tokens[:, :9]), SEQ, lengths)

    @jax.jit
    def step(cache, at):
        own = jnp.take_along_axis(tokens, at[:, None], axis=1)
        return decode(lambda: model(config).apply(arrays, own), cache, at)

    for at in range(15):
        logits, cache = step(cache, lengths + at)
        expected = whole[np.arange(2), np.asarray(lengths) + at]
        np.testing.assert_allclose(logits[:, 0], expected, rtol=0, atol=1e-4)


def test_positions_of_temperature_are_those_in_a_document():
    """Two documents in a row have the logits of each alone."""
    config = decoder(MIXERS["temperature"])
    tokens = np.random.default_rng(0).integers(0, 64, (1, SEQ), dtype=np.int32)
    starts = np.where(np.arange(SEQ) < 10, 0, 10)[None]
    run = jax.jit(model(config).apply)
    packed = run(params(config), tokens, starts)
    alone = run(params(config), tokens[:, 10:])
    np.testing.assert_allclose(packed[:, 10:], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scale", [True, False])
def test_normalised_embeddings_are_those_of_a_normalised_table(scale):
    """The logits of a model without the norm, and with its rows normalised by hand."""
    plain = decoder(AttentionSpec(), norm=NormSpec(scale=scale))
    config = dataclasses.replace(plain, embed_norm=True, embed_scale=3.0)
    arrays = params(config)
    table = normed(3.0 * arrays["embed"]["embedding"])
    if scale:
        table = table * arrays["embed_norm"]["scale"][None]
    assert sum(leaf.size for leaf in jax.tree.leaves(arrays)) == config.total_params
    others = {name: arrays[name] for name in arrays if name != "embed_norm"}
    tokens = np.random.default_rng(0).integers(0, 64, (2, SEQ), dtype=np.int32)
    found = jax.jit(model(config).apply)(arrays, tokens)
    run = jax.jit(model(plain).apply)
    expected = run(others | {"embed": {"embedding": table}}, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert np.abs(run(others, tokens) - found).max() > 1e-2


@pytest.mark.soak
@pytest.mark.parametrize("name", MIXERS)
def test_every_option_trains_as_on_one_device(name):
    """Two steps on three axes, and with a split sequence."""
    config = decoder(MIXERS[name])
    grad_fn = value_and_grad(next_token_loss(model(config), chunk=7))
    job = Job(model(config), decoder_rules(config), grad_fn, BATCHES)
    job.assert_parity(data=2, fsdp=2, tensor=2)
    job.assert_parity(sequence=2, tensor=2)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"gate": "heads"}, "gate"),
        ({"gate_bias": True}, "gate_bias"),
        ({"gate_activation": "softplus"}, "gate_activation"),
        ({"chunk": 4, "window": 4}, "chunk"),
        ({"value_scale": 0.0}, "value_scale"),
        ({"temperature": Temperature(0.0)}, "temperature.strength"),
    ],
    ids=str,
)
def test_an_impossible_option_is_refused(fields, wrong):
    """It is named, with a fix."""
    with pytest.raises(ConfigError) as caught:
        decoder(AttentionSpec(**fields))
    (problem,) = caught.value.problems
    assert problem.where == f"model.layer.mixer.{wrong}"
    assert problem.fix
