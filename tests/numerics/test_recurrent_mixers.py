"""Recurrent mixers are their formulas, with and without a cache, alike on every mesh."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd import tree
from spmd.errors import CacheError, ConfigError
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.layers.kv_cache import decode, prefill
from spmd.models.decoder import (
    DecoderConfig,
    GatedConvolutionSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    ParallelMixerSpec,
    StateSpaceSpec,
    decoder_rules,
    gated_delta_net,
    short_convolution,
    state_space,
)
from spmd.optim.config import OptimizerConfig, make_optimizer
from spmd.plan.context import use_plan
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import MeshShape, abstract_mesh
from spmd.testing import token_batches
from tests import decoders
from tests.one_device import SGD, Job
from tests.tiers import soak_but

DELTA = GatedDeltaNetSpec(heads=4, key_heads=2, key_dim=8, value_dim=6)
CONVOLUTION = GatedConvolutionSpec()
STATE_SPACE = StateSpaceSpec(heads=8, head_dim=4, groups=2, state_dim=8)
FACTORS = (0.5, 2.0, 0.7, 1.5, 0.8)
MIXERS = {
    "delta": DELTA,
    "delta-negative": dataclasses.replace(DELTA, key_heads=0, negative_eigenvalues=True),
    "convolution": CONVOLUTION,
    "convolution-biased": GatedConvolutionSpec(width=5, bias=True),
    "state-space": STATE_SPACE,
    "state-space-biased": dataclasses.replace(STATE_SPACE, groups=1, bias=True, conv_width=3),
    "state-space-plain": dataclasses.replace(STATE_SPACE, norm=False, conv_bias=False),
    "state-space-limits": dataclasses.replace(
        STATE_SPACE, gate_first=False, dt_min=0.3, dt_max=0.8, multipliers=FACTORS
    ),
    "parallel": ParallelMixerSpec(state_space=STATE_SPACE, key_scale=0.5, attention_scale=0.7),
}
ALONE = [name for name in MIXERS if name != "parallel"]
BATCHES = token_batches((8, 16), 64, steps=2)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 24), dtype=np.int32)


@functools.cache
def decoder(name):
    """Two layers with the mixer of a name, each before one with attention."""
    group = (LayerSpec(MIXERS[name]), LayerSpec())
    return DecoderConfig(64, 32, 4, 4, 2, 64, group=group)


def model(name):
    return decoders.model(decoder(name))


def params(name):
    return decoders.params(decoder(name))


@pytest.mark.parametrize("name", MIXERS)
def test_the_counted_parameters_are_those_of_the_model(name):
    """Kernels are in matmuls; all others are convolutions, vectors of heads, norms and biases."""
    config = decoder(name)
    shapes = tree.flatten(jax.eval_shape(model(name).init, jax.random.key(0)))
    sizes = {path: int(np.prod(leaf.shape)) for path, leaf in shapes.items()}
    assert config.total_params == sum(sizes.values())
    kernels = {path: size for path, size in sizes.items() if path.endswith("kernel")}
    assert config.matmul_params == sum(kernels.values())


def convolved(x, weight, bias=0.0):
    """A causal depthwise convolution in NumPy: x `[seq, channels]`."""
    out = np.zeros_like(x)
    for at in range(len(x)):
        for tap in range(len(weight)):
            before = at - len(weight) + 1 + tap
            if before >= 0:
                out[at] += weight[tap] * x[before]
    return out + bias


def silu(x):
    return x / (1 + np.exp(-x))


def delta_by_hand(spec, layer, x):
    """Section 3.4 of arXiv:2412.06464, token by token and head by head: x `[seq, d]`."""

    def projected(name):
        return x @ layer[f"{name}_proj"]["kernel"]

    def heads(name, dim):
        mixed = silu(convolved(projected(name), layer[f"{name}_conv"]["weight"]))
        return mixed.reshape(len(x), -1, dim)

    def normalised(y):
        return y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6)

    query, key = normalised(heads("q", spec.key_dim)), normalised(heads("k", spec.key_dim))
    value = heads("v", spec.value_dim)
    steps = np.log1p(np.exp(projected("a") + layer["dt_bias"]))
    decay = np.exp(-np.exp(layer["A_log"]) * steps)
    beta = (1 + spec.negative_eigenvalues) / (1 + np.exp(-projected("b")))
    gate = silu(projected("gate")).reshape(value.shape)
    out = np.zeros_like(value)
    for head in range(spec.heads):
        of_keys = head // (spec.heads // spec.key_heads)
        state = np.zeros((spec.key_dim, spec.value_dim))
        for at in range(len(x)):
            k = key[at, of_keys]
            state = decay[at, head] * state
            error = value[at, head] - state.T @ k
            state = state + beta[at, head] * np.outer(k, error)
            out[at, head] = state.T @ query[at, of_keys] / np.sqrt(spec.key_dim)
    root = np.sqrt((out**2).mean(-1, keepdims=True) + spec.norm_eps)
    out = out / root * layer["out_norm"]["scale"] * gate
    return out.reshape(len(x), -1) @ layer["o_proj"]["kernel"]


def convolution_by_hand(spec, layer, x):
    """The gates and the convolution of LFM 2."""

    def projected(name, y):
        return y @ layer[name]["kernel"] + layer[name].get("bias", 0.0)

    gated = projected("in_gate_proj", x) * projected("value_proj", x)
    weights = layer["convolution"]
    mixed = convolved(gated, weights["weight"], weights.get("bias", 0.0))
    return projected("out_proj", projected("out_gate_proj", x) * mixed)


def state_space_by_hand(spec, layer, x):
    """Section 7 of arXiv:2405.21060, token by token and head by head: x `[seq, d]`."""
    factors = dict(zip(("gate", "x", "b", "c", "dt"), spec.multipliers, strict=True))

    def projected(name):
        projection = layer[f"{name}_proj"]
        return (x @ projection["kernel"] + projection.get("bias", 0.0)) * factors[name]

    def mixed(name, *dims):
        weights = layer[f"{name}_conv"]
        out = convolved(projected(name), weights["weight"], weights.get("bias", 0.0))
        return silu(out).reshape(len(x), *dims)

    inner = mixed("x", spec.heads, spec.head_dim)
    b, c = (mixed(name, spec.groups, spec.state_dim) for name in ("b", "c"))
    steps = np.log1p(np.exp(projected("dt") + layer["dt_bias"]))
    steps = np.clip(steps, spec.dt_min, spec.dt_max)
    out = np.zeros_like(inner)
    for head in range(spec.heads):
        group = head // (spec.heads // spec.groups)
        state = np.zeros((spec.head_dim, spec.state_dim))
        for at in range(len(x)):
            step = steps[at, head]
            decay = np.exp(-step * np.exp(layer["A_log"][head]))
            state = decay * state + step * np.outer(inner[at, head], b[at, group])
            out[at, head] = state @ c[at, group] + layer["D"][head] * inner[at, head]
    out, gate = out.reshape(len(x), -1), silu(projected("gate"))
    if spec.gate_first:
        out = out * gate
    if spec.norm:
        grouped = out.reshape(len(x), spec.groups, -1)
        grouped = grouped / np.sqrt((grouped**2).mean(-1, keepdims=True) + 1e-5)
        out = grouped.reshape(len(x), -1) * layer["gated_norm"]["scale"]
    if not spec.gate_first:
        out = out * gate
    return out @ layer["out_proj"]["kernel"] + layer["out_proj"].get("bias", 0.0)


BY_HAND = {
    GatedConvolutionSpec: convolution_by_hand,
    GatedDeltaNetSpec: delta_by_hand,
    StateSpaceSpec: state_space_by_hand,
}


@pytest.mark.parametrize("name", soak_but(ALONE, "delta", "convolution-biased", "state-space"))
def test_a_mixer_is_that_of_the_formulas(name):
    """In NumPy, token by token."""
    spec = decoder(name).pattern.group[0].mixer
    x = np.random.default_rng(1).standard_normal((1, 9, 32)).astype(np.float32)

    def first_layer(model, x):
        inputs = model._inputs(9, None, None)
        layer = jax.tree.map(lambda w: w[0], model.layers.block_0)
        return getattr(layer, spec.name)(x, inputs)

    ours = model(name).apply(params(name), x, method=first_layer)
    arrays = params(name)["layers"]["block_0"][spec.name]
    layer = jax.tree.map(lambda w: np.asarray(w[0], np.float64), arrays)
    theirs = BY_HAND[type(spec)](spec, layer, x[0])
    assert np.abs(theirs).max() > 0.5
    np.testing.assert_allclose(ours[0], theirs, rtol=1e-3, atol=1e-4)


def forced(name):
    """The largest difference of forced tokens with a cache from logits without one."""
    arrays = params(name)
    whole = np.asarray(jax.jit(model(name).apply)(arrays, TOKENS))
    lengths = jnp.array([3, 9])
    _, cache = prefill(lambda: model(name).apply(arrays, TOKENS[:, :9]), 24, lengths)

    @jax.jit
    def step(cache, at):
        own = jnp.take_along_axis(TOKENS, at[:, None], axis=1)
        return decode(lambda: model(name).apply(arrays, own), cache, at)

    worst = 0.0
    for at in range(12):
        logits, cache = step(cache, lengths + at)
        expected = whole[np.arange(2), np.asarray(lengths) + at]
        worst = max(worst, np.abs(logits[:, 0] - expected).max())
    return worst


@pytest.mark.parametrize("name", soak_but(MIXERS, "delta", "convolution-biased", "state-space"))
def test_decoding_gives_the_logits_without_a_cache(name):
    """At each of the forced tokens, after prompts of unequal length."""
    assert forced(name) < 1e-4


@pytest.mark.parametrize(
    "name", soak_but(["delta", "convolution", "state-space"], "delta", "state-space")
)
def test_padding_that_changes_a_state_is_seen(name, monkeypatch):
    """A control: without the mask of tokens, the state after a shorter prompt is another."""
    for module in (gated_delta_net, short_convolution, state_space):
        monkeypatch.setattr(module, "token_mask", lambda seq: None)
    assert forced(name) > 1e-2


def test_a_cache_has_no_axis_of_tokens():
    """Its size does not depend on its length: states, and the last inputs of the convolutions."""
    shapes = []
    for length in (12, 24):

        def fill(params, length=length):
            run = functools.partial(model("delta").apply, params, TOKENS[:, :9])
            return prefill(run, length)

        _, cache = jax.eval_shape(fill, params("delta"))
        (entry,), _ = cache.entries[0]
        shapes.append({name: array.shape for name, array in vars(entry).items()})
    assert shapes[0] == shapes[1]
    assert shapes[0]["state"] == (2, 2, 4, 8, 6)
    assert shapes[0]["v"] == (2, 2, 3, 24)


@pytest.mark.parametrize(
    "name", soak_but(["delta", "convolution", "state-space"], "delta", "state-space")
)
def test_packed_documents_are_documents_alone(name):
    """No state and no input passes from one to the next; without segments, logits differ."""
    arrays = params(name)
    apply = jax.jit(model(name).apply)
    row, starts = TOKENS[:1], (0, 8, 16, 24)
    segments = np.zeros((1, 24), np.int32)
    alone = []
    for start, stop in itertools.pairwise(starts):
        segments[:, start:stop] = start
        alone.append(np.asarray(apply(arrays, row[:, start:stop])))
    expected = np.concatenate(alone, axis=1)
    np.testing.assert_allclose(apply(arrays, row, segments), expected, atol=1e-4)
    assert np.abs(apply(arrays, row) - expected).max() > 1e-2


def test_documents_have_no_cache():
    """A row of the cache is one document."""
    tokens = jnp.zeros((1, 4), jnp.int32)
    for name in ("delta", "convolution", "state-space"):
        with pytest.raises(CacheError, match="segments: are given"):
            prefill(functools.partial(model(name).apply, params(name), tokens, tokens), 8)


@functools.cache
def job(name):
    grad_fn = value_and_grad(next_token_loss(model(name), chunk=7))
    return Job(model(name), decoder_rules(decoder(name)), grad_fn, BATCHES)


@pytest.mark.soak
@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_trains_as_on_one_device(name):
    """On three axes, in a pipeline, and with layers that are computed again."""
    job(name).assert_parity(data=2, fsdp=2, tensor=2)
    job(name).assert_parity(pipe=2, tensor=2)
    job(name).assert_parity(fsdp=2, options=(("remat", "full"),))


@pytest.mark.soak
@pytest.mark.parametrize("name", ["state-space", "state-space-biased"])
def test_groups_may_be_fewer_than_devices(name):
    """Two groups or one, on four devices of `tensor`: each has all b and c."""
    config = DecoderConfig(64, 32, 2, 4, 4, 64, layer=LayerSpec(MIXERS[name], mlp=None))
    alone = from_nnx(config.build)
    grad_fn = value_and_grad(next_token_loss(alone, chunk=7))
    Job(alone, decoder_rules(config), grad_fn, BATCHES).assert_parity(tensor=4)


@pytest.mark.parametrize("name", ["delta", "convolution", "state-space", "parallel"])
def test_a_split_of_sequences_is_refused_before_anything_is_compiled(name):
    """By the mixer's name, with the axis and a fix."""
    mesh = abstract_mesh(MeshShape(sequence=2))
    plan = make_plan(mesh, decoder_rules(decoder(name)), model(name), SGD)
    with use_plan(plan), pytest.raises(ConfigError, match="needs whole sequences on each device"):
        jax.eval_shape(model(name).apply, params(name), TOKENS)


@pytest.mark.parametrize(
    ("mixer", "wrong"),
    [
        (dataclasses.replace(DELTA, key_heads=3), ["key_heads"]),
        (dataclasses.replace(DELTA, key_dim=-1, conv_width=0), ["key_dim", "conv_width"]),
        (GatedConvolutionSpec(width=0), ["width"]),
        (dataclasses.replace(STATE_SPACE, groups=3), ["groups"]),
        (dataclasses.replace(STATE_SPACE, groups=0, state_dim=-1), ["groups", "state_dim"]),
        (dataclasses.replace(STATE_SPACE, dt_min=0.2, dt_max=0.1), ["dt_max"]),
        (dataclasses.replace(STATE_SPACE, norm=False, gate_first=False), ["gate_first"]),
        (dataclasses.replace(STATE_SPACE, multipliers=(1.0, 0.0)), ["multipliers"]),
    ],
    ids=str,
)
def test_a_shape_that_cannot_be_built_lists_every_reason(mixer, wrong):
    """Heads and groups that do not divide, widths, empty limits, and options without effect."""
    with pytest.raises(ConfigError) as caught:
        DecoderConfig(64, 32, 2, 4, 2, 64, layer=LayerSpec(mixer))
    wheres = {problem.where for problem in caught.value.problems}
    assert wheres == {f"model.layer.mixer.{field}" for field in wrong}


@pytest.mark.parametrize("name", ["delta", "state-space"])
def test_factors_of_channels_and_heads_are_no_matrices(name):
    """Muon updates kernels alone; convolutions, decays and norms have no weight decay."""
    config = OptimizerConfig(name="muon")
    shapes = jax.eval_shape(model(name).init, jax.random.key(0))
    described = make_optimizer(config, 10, model=model(name).info()).treatment.describe(
        {path: leaf.shape for path, leaf in tree.flatten(shapes).items()}
    )
    vectors = ("conv/weight", "conv/bias", "A_log", "D", "dt_bias", "norm/scale")
    for path, words in described.items():
        if path.endswith(vectors):
            assert "muon" not in words
            assert "no decay" in words
        elif f"/{MIXERS[name].name}/" in path:
            assert "muon" in words
