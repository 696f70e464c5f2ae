"""Latent attention is the formulas of DeepSeek-V2, its cache has latents alone, and every mesh has equal numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.errors import CacheError, ConfigError
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.layers.kv_cache import decode, prefill
from spmd.models import deepseek
from spmd.models.decoder import (
    DecoderConfig,
    LatentAttentionSpec,
    LayerSpec,
    Rotary,
    YarnScaling,
    decoder_rules,
)
from spmd.models.decoder.rotary import rotary_angles
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.testing import token_batches
from tests.decoders import model, params
from tests.one_device import SGD, Job

MIXER = LatentAttentionSpec(q_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6)
SCALED = YarnScaling(4.0, 16, mscale=0.7, mscale_all_dim=0.7)


def decoder(mixer=MIXER, **fields):
    return DecoderConfig(64, 32, 2, 4, 4, 64, layer=LayerSpec(mixer), **fields)


CONFIGS = {
    "v3": decoder(),
    "v2-lite": decoder(dataclasses.replace(MIXER, q_rank=0)),
    "yarn": decoder(rope_scaling=SCALED),
    "biased": decoder(dataclasses.replace(MIXER, bias=True, rotary=Rotary(interleaved=False))),
}
BATCHES = token_batches((8, 16), 64, steps=2)
# Active ones of arXiv:2405.04434, arXiv:2412.19437 and arXiv:2507.20534, rounded.
ACTIVE = {"deepseek-v2-lite": 2.4e9, "deepseek-v2": 21e9, "deepseek-v3": 37e9, "kimi-k2": 32e9}


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_the_published_ones(name):
    """To 3 % of a rounded number, with the embedding or without."""
    config = deepseek.PRESETS[name]
    embedding = config.vocab * config.d_model
    near = [config.active_params - embedding, config.active_params]
    assert min(abs(found / ACTIVE[name] - 1) for found in near) < 0.03


@pytest.mark.parametrize("name", CONFIGS)
def test_the_counted_parameters_are_those_of_the_model(name):
    """Kernels are in matmuls, all others are norms, biases and the embedding."""
    config = CONFIGS[name]
    shapes = jax.eval_shape(model(config).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == config.total_params


def by_hand(config, arrays, x):
    """Equations 37 to 47 of DeepSeek-V2 in NumPy, of the first layer: x `[seq, d]`."""
    spec = config.pattern.group[0].mixer
    layer = jax.tree.map(lambda w: np.asarray(w[0], np.float64), arrays["layers"]["attention"])
    cos, sin = (a[0] for a in rotary_angles(np.arange(len(x))[None], spec.rope_dim, 1e4))

    def normed(latent, name):
        mean = (latent**2).mean(-1, keepdims=True)
        return latent / np.sqrt(mean + 1e-6) * layer[name]["scale"]

    def turned(part):  # [seq, rope]
        even, odd = part[:, ::2], part[:, 1::2]
        return np.concatenate([even * cos - odd * sin, odd * cos + even * sin], -1)

    query = normed(x @ layer["q_a_proj"]["kernel"], "q_a_norm") @ layer["q_b_proj"]["kernel"]
    compressed = x @ layer["kv_a_proj"]["kernel"]
    latent = normed(compressed[:, : spec.kv_rank], "kv_a_norm")
    shared_key = turned(compressed[:, spec.kv_rank :])
    both = (latent @ layer["kv_b_proj"]["kernel"]).reshape(len(x), spec.heads, -1)
    heads = []
    for head in range(spec.heads):
        own = query.reshape(len(x), spec.heads, -1)[:, head]
        scores = own[:, : spec.nope_dim] @ both[:, head, : spec.nope_dim].T
        scores = scores + turned(own[:, spec.nope_dim :]) @ shared_key.T
        scores = np.where(np.tri(len(x)), scores / np.sqrt(spec.key_dim), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ both[:, head, spec.nope_dim :])
    return np.concatenate(heads, -1) @ layer["o_proj"]["kernel"]


def test_attention_is_that_of_the_formulas():
    """In NumPy, head by head."""
    config = CONFIGS["v3"]
    x = np.random.default_rng(1).standard_normal((1, 7, 32)).astype(np.float32)

    def first_layer(model, x):
        inputs = model._inputs(7, None, None)
        layer = jax.tree.map(lambda w: w[0], model.layers)
        return layer.attention(x, inputs)

    ours = model(config).apply(params(config), x, method=first_layer)
    theirs = by_hand(config, params(config), x[0])
    assert np.abs(theirs).max() > 0.5
    np.testing.assert_allclose(ours[0], theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_with_latents_gives_the_logits_without_a_cache(name):
    """At each of the forced tokens, after prompts of unequal length; latents and one key a token are kept."""
    config = CONFIGS[name]
    arrays = params(config)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 24), dtype=np.int32)
    whole = np.asarray(jax.jit(model(config).apply)(arrays, tokens))
    lengths = jnp.array([5, 9])
    prompts = tokens[:, :9]
    _, cache = prefill(lambda: model(config).apply(arrays, prompts), 24, lengths, new_tokens=15)
    ((entry,),) = cache.entries[0]
    assert (entry.latent.shape, entry.key.shape) == ((2, 2, 24, 16), (2, 2, 24, 4))

    @jax.jit
    def step(cache, at):
        own = jnp.take_along_axis(tokens, at[:, None], axis=1)
        return decode(lambda: model(config).apply(arrays, own), cache, at)

    for at in range(15):
        logits, cache = step(cache, lengths + at)
        expected = whole[np.arange(2), np.asarray(lengths) + at]
        np.testing.assert_allclose(logits[:, 0], expected, rtol=0, atol=1e-4)


def test_a_wrong_position_is_seen():
    """A control: a cache read one position off gives other logits."""
    config = CONFIGS["v3"]
    tokens = np.random.default_rng(0).integers(0, 64, (2, 12), dtype=np.int32)
    whole = model(config).apply(params(config), tokens)
    _, cache = prefill(lambda: model(config).apply(params(config), tokens[:, :8]), 12)
    step = functools.partial(model(config).apply, params(config), tokens[:, 8:9])
    logits, _ = decode(step, cache, jnp.array([7, 7]))
    assert np.abs(logits[:, 0] - whole[:, 8]).max() > 1e-3


def test_documents_have_no_cache():
    """A row of the cache is one document."""
    config = CONFIGS["v3"]
    tokens = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(CacheError, match="segments: are given"):
        prefill(lambda: model(config).apply(params(config), tokens, tokens), 8)


@functools.cache
def job(name):
    config = CONFIGS[name]
    grad_fn = value_and_grad(next_token_loss(model(config), chunk=7))
    return Job(model(config), decoder_rules(config), grad_fn, BATCHES)


def test_heads_are_split_and_latents_are_not():
    """Two steps on two axes equal those on one device."""
    job("v2-lite").assert_parity(fsdp=2, tensor=2)


@pytest.mark.soak
@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_trains_as_on_one_device(name):
    """Low rank or not, with biases and with scaled positions."""
    job(name).assert_parity(data=2, fsdp=2, tensor=2)
    job(name).assert_parity(sequence=2, tensor=2)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"kv_rank": 0, "value_dim": -1}, ["layer.mixer.kv_rank", "layer.mixer.value_dim"]),
        ({"rope_dim": 5}, ["layer.mixer.rope_dim"]),
        ({"rotary": Rotary(fraction=0.5)}, ["layer.mixer.rotary.fraction"]),
    ],
    ids=str,
)
def test_a_shape_that_cannot_be_built_lists_every_reason(fields, wrong):
    """Widths, an odd rotated part, and a fraction where rope_dim says which part is rotated."""
    with pytest.raises(ConfigError) as caught:
        decoder(dataclasses.replace(MIXER, **fields))
    assert [problem.where for problem in caught.value.problems] == [f"model.{w}" for w in wrong]


def test_layers_of_both_kinds_have_one_table():
    """With latents of queries and without; no rule is shadowed by another."""
    kinds = (LayerSpec(MIXER), LayerSpec(dataclasses.replace(MIXER, q_rank=0, bias=True)))
    config = DecoderConfig(64, 32, 2, 4, 4, 64, group=kinds)
    mesh = abstract_mesh(MeshShape(fsdp=2, tensor=2))
    plan = make_plan(mesh, decoder_rules(config), model(config), SGD)
    assert all(leaf.rule for leaf in plan.params)


def test_a_window_of_the_network_is_refused():
    """It would act on nothing."""
    with pytest.raises(ConfigError, match=r"model\.window: acts on no layer"):
        decoder(window=4)
