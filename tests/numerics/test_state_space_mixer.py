"""The mixer of Mamba 2 is its recurrence, its cache has no tokens, and every mesh has equal numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd import tree
from spmd.errors import CacheError, ConfigError
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.hf.fields import Fields
from spmd.layers.kv_cache import decode, prefill
from spmd.models import granite_hybrid
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    LayerSpec,
    MLPSpec,
    NoMixerSpec,
    ParallelMixerSpec,
    StateSpaceSpec,
    decoder_rules,
)
from spmd.models.decoder.published_state_space import StateSpaceFields
from spmd.plan import flax
from spmd.testing import token_batches
from tests.one_device import Job
from tests.tiers import soak_but

MIXER = StateSpaceSpec(heads=8, head_dim=4, groups=2, state_dim=8)


def decoder(mixer=MIXER, **fields):
    sizes = {"vocab": 64, "d_model": 32, "layers": 2, "heads": 4, "kv_heads": 4, "d_ff": 48}
    return DecoderConfig(**sizes | {"layer": LayerSpec(mixer, None)} | fields)


CONFIGS = {
    "mamba2": decoder(),
    "one group": decoder(dataclasses.replace(MIXER, groups=1, bias=True, conv_width=3)),
    "without norm": decoder(dataclasses.replace(MIXER, norm=False, conv_bias=False)),
    "limits": decoder(
        dataclasses.replace(
            MIXER, gate_first=False, dt_min=0.3, dt_max=0.8, multipliers=(0.5, 2.0, 0.7, 1.5, 0.8)
        )
    ),
    "parallel": decoder(
        ParallelMixerSpec(
            state_space=MIXER, key_scale=0.5, attention_scale=0.7, state_space_scale=1.5
        ),
    ),
    "hybrid": decoder(
        layers=4, group=(LayerSpec(MIXER), LayerSpec(AttentionSpec(rotary=None))), layer=LayerSpec()
    ),
}
BATCHES = token_batches((8, 16), 64, steps=2)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 24), dtype=np.int32)


@functools.cache
def model(config):
    return flax.from_nnx(config.build)


@functools.cache
def params(config):
    """Initial parameters, with vectors that are not what they start as."""
    rng = np.random.default_rng(0)

    def moved(x):
        return x + 0.3 * rng.standard_normal(x.shape).astype(np.float32)

    return jax.tree.map(moved, model(config).init(jax.random.key(0)))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_counted_parameters_are_those_of_the_model(name):
    """Kernels and the head are in matmuls, all others are not."""
    config = CONFIGS[name]
    shapes = jax.eval_shape(model(config).init, jax.random.key(0))
    sizes = {path: leaf.size for path, leaf in tree.flatten(shapes).items()}
    assert sum(sizes.values()) == config.total_params
    kernels = sum(size for path, size in sizes.items() if path.endswith("kernel"))
    assert kernels == config.matmul_params


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_hand(spec, layer, x):
    """The recurrence of section 7 in NumPy, token by token: x `[seq, d]`."""
    seq = len(x)
    factors = dict(zip(("gate", "x", "b", "c", "dt"), spec.multipliers, strict=True))

    def projected(name):
        y = x @ layer[f"{name}_proj"]["kernel"]
        return (y + layer[f"{name}_proj"].get("bias", 0)) * factors[name]

    def convolved(name):
        weight = layer[f"{name}_conv"]["weight"]
        rows = np.concatenate([np.zeros((len(weight) - 1, weight.shape[1])), projected(name)])
        out = [(rows[t : t + len(weight)] * weight).sum(0) for t in range(seq)]
        y = np.stack(out) + layer[f"{name}_conv"].get("bias", 0)
        return y * sigmoid(y)

    inner = convolved("x").reshape(seq, spec.heads, spec.head_dim)
    by_group = (seq, spec.groups, spec.state_dim)
    b, c = (convolved(name).reshape(by_group) for name in ("b", "c"))
    dt = np.log1p(np.exp(projected("dt") + layer["dt_bias"]))
    dt = np.clip(dt, spec.dt_min, spec.dt_max)
    out = np.zeros_like(inner)
    for head in range(spec.heads):
        group = head // (spec.heads // spec.groups)
        state = np.zeros((spec.head_dim, spec.state_dim))
        for t in range(seq):
            decay = np.exp(-dt[t, head] * np.exp(layer["A_log"][head]))
            state = decay * state + dt[t, head] * np.outer(inner[t, head], b[t, group])
            out[t, head] = state @ c[t, group] + layer["D"][head] * inner[t, head]
    gate = projected("gate")
    gate = gate * sigmoid(gate)
    y = out.reshape(seq, -1)
    if spec.gate_first:
        y = y * gate
    if spec.norm:
        groups = y.reshape(seq, spec.groups, -1)
        groups = groups / np.sqrt((groups**2).mean(-1, keepdims=True) + 1e-5)
        y = groups.reshape(seq, -1) * layer["gated_norm"]["scale"]
    if not spec.gate_first:
        y = y * gate
    return y @ layer["out_proj"]["kernel"] + layer["out_proj"].get("bias", 0)


@pytest.mark.parametrize("name", ["mamba2", "one group", "without norm", "limits"])
def test_the_mixer_is_the_recurrence(name):
    """In NumPy, head by head; the control has other limits of step sizes."""
    config = CONFIGS[name]
    x = np.random.default_rng(1).standard_normal((1, 7, 32)).astype(np.float32)

    def first_layer(model, x):
        inputs = model._inputs(7, None, None)
        layer = jax.tree.map(lambda w: w[0], model.layers)
        return layer.state_space(x, inputs)

    ours = model(config).apply(params(config), x, method=first_layer)
    arrays = params(config)["layers"]["state_space"]
    layer = jax.tree.map(lambda w: np.asarray(w[0], np.float64), arrays)
    spec = config.pattern.group[0].mixer
    theirs = by_hand(spec, layer, x[0])
    assert np.abs(theirs).max() > 0.5
    np.testing.assert_allclose(ours[0], theirs, rtol=1e-3, atol=1e-4)
    control = by_hand(dataclasses.replace(spec, dt_min=0.9, dt_max=1.0), layer, x[0])
    assert np.abs(ours[0] - control).max() > 1e-2


def test_mixers_side_by_side_are_added():
    """Each with its factor; the factor of keys is one of the scores, as the control shows."""
    config = CONFIGS["parallel"]
    x = np.random.default_rng(1).standard_normal((1, 7, 32)).astype(np.float32)

    def outputs(model, x):
        inputs = model._inputs(7, None, None)
        mixer = jax.tree.map(lambda w: w[0], model.layers).parallel_mixer
        return mixer(x, inputs), mixer.attention(x, inputs), mixer.state_space(x, inputs)

    both, attended, recurrent = model(config).apply(params(config), x, method=outputs)
    np.testing.assert_allclose(both, 0.7 * attended + 1.5 * recurrent, rtol=1e-4, atol=1e-5)
    own = config.layer.mixer
    plain = decoder(dataclasses.replace(own, key_scale=1.0))
    scaled = decoder(
        dataclasses.replace(own, key_scale=1.0, attention=AttentionSpec(scale=0.5 * 8**-0.5))
    )
    found = {
        name: model(other).apply(params(config), x, method=outputs)[0]
        for name, other in {"plain": plain, "scaled": scaled}.items()
    }
    np.testing.assert_allclose(both, found["scaled"], rtol=1e-5, atol=1e-6)
    assert np.abs(both - found["plain"]).max() > 1e-3


def test_an_mlp_may_have_factors():
    """Of the gate before its activation, and of the output."""
    config = decoder(layer=LayerSpec(NoMixerSpec(), MLPSpec(8, gate_scale=0.5, out_scale=1.5)))
    x = np.random.default_rng(1).standard_normal((1, 7, 32)).astype(np.float32)

    def first_mlp(model, x):
        return jax.tree.map(lambda w: w[0], model.layers).mlp(x)

    kernels = params(config)["layers"]["mlp"]
    gate, up, down = (
        np.asarray(kernels[f"{name}_proj"]["kernel"][0]) for name in ("gate", "up", "down")
    )
    opened = x @ gate * 0.5
    expected = (opened * sigmoid(opened) * (x @ up)) @ down * 1.5
    found = model(config).apply(params(config), x, method=first_mlp)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match=r"mlp\.gate_scale: acts on nothing"):
        decoder(layer=LayerSpec(mlp=MLPSpec(gated=False, activation="relu2", gate_scale=2.0)))


LENGTHS = jnp.array([5, 9])


def prefilled(config, tokens, lengths=LENGTHS):
    """The cache after prompts of unequal length, padded."""
    run = functools.partial(model(config).apply, params(config), tokens[:, :9])
    return prefill(run, 24, lengths)[1]


@pytest.mark.parametrize("name", soak_but(CONFIGS, "mamba2"))
def test_decoding_gives_the_logits_without_a_cache(name):
    """At each of the forced tokens, after prompts of unequal length."""
    config = CONFIGS[name]
    whole = np.asarray(jax.jit(model(config).apply)(params(config), TOKENS))
    cache = prefilled(config, TOKENS)

    @jax.jit
    def step(cache, at):
        own = jnp.take_along_axis(TOKENS, at[:, None], axis=1)
        return decode(lambda: model(config).apply(params(config), own), cache, at)

    for at in range(15):
        logits, cache = step(cache, LENGTHS + at)
        expected = whole[np.arange(2), np.asarray(LENGTHS) + at]
        np.testing.assert_allclose(logits[:, 0], expected, rtol=0, atol=1e-4)


def test_padding_changes_no_state():
    """Whatever tokens are behind a prompt; the control counts them as tokens of it."""
    config = CONFIGS["mamba2"]
    ((entry,),) = prefilled(config, TOKENS).entries[0]
    shapes = {field.name: getattr(entry, field.name).shape for field in dataclasses.fields(entry)}
    assert shapes == {
        "state": (2, 2, 8, 4, 8),
        "x": (2, 2, 3, 32),
        "b": (2, 2, 3, 16),
        "c": (2, 2, 3, 16),
    }
    assert entry.state.dtype == jnp.float32
    others = TOKENS.copy()
    others[0, 5:] = 63 - others[0, 5:]
    ((again,),) = prefilled(config, others).entries[0]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, entry, again)))
    ((control,),) = prefilled(config, others, LENGTHS + 1).entries[0]
    for field in shapes:
        change = np.abs(getattr(control, field) - getattr(entry, field)).max(axis=(0, 2, 3))
        assert change[..., 0].max() > 1e-3, field


def test_packed_documents_equal_each_alone():
    """States and convolutions begin anew; without the boundaries the control differs."""
    config = CONFIGS["mamba2"]
    tokens = TOKENS[:1, :12]
    segments = jnp.asarray([[0] * 2 + [1] * 7 + [0] * 3])
    apply = jax.jit(model(config).apply)
    found = np.asarray(apply(params(config), tokens, segments))
    start = 0
    for length in (2, 7, 3):
        alone = apply(params(config), tokens[:, start : start + length])
        np.testing.assert_allclose(found[:, start : start + length], alone, rtol=0, atol=1e-4)
        start += length
    assert np.abs(found - apply(params(config), tokens)).max() > 1e-2


def test_documents_have_no_cache():
    """A row of the cache is one document."""
    config = CONFIGS["mamba2"]
    tokens = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(CacheError, match="segments: are given"):
        prefill(lambda: model(config).apply(params(config), tokens, tokens), 8)


@functools.cache
def job(name):
    config = CONFIGS[name]
    grad_fn = value_and_grad(next_token_loss(model(config), chunk=7))
    return Job(model(config), decoder_rules(config), grad_fn, BATCHES)


def test_heads_and_groups_are_split():
    """Two steps on two axes equal those on one device."""
    job("mamba2").assert_parity(fsdp=2, tensor=2)


@pytest.mark.soak
@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_trains_as_on_one_device(name):
    """Groups fewer than devices of tensor too; with recomputation, and over stages."""
    job(name).assert_parity(data=2, fsdp=2, tensor=2)
    job(name).assert_parity(tensor=4, options=(("remat", "full"),))
    job(name).assert_parity(pipe=2, tensor=2)


def test_a_split_sequence_is_refused():
    """By name, before anything compiles."""
    with pytest.raises(ConfigError, match="state-space mixer: a recurrent mixer needs whole"):
        job("mamba2").parity(sequence=2)


def test_vectors_of_heads_and_convolutions_are_no_matrices():
    """An optimizer of matrices has the projections alone, stacked or not."""
    for stacked in (True, False):
        config = dataclasses.replace(CONFIGS["one group"], stacked=stacked)
        info = model(config).info()
        of_mixer = {path for path in info.matrices if "state_space" in path}
        assert of_mixer
        assert all(path.endswith("kernel") for path in of_mixer)
        others = ("A_log", "D", "dt_bias", "x_conv/weight")
        for name in others:
            assert any(path.endswith(f"state_space/{name}") for path in info.added), name


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"groups": 3}, ["groups"]),
        ({"groups": 0, "state_dim": -1}, ["groups", "state_dim"]),
        ({"dt_min": 0.2, "dt_max": 0.1}, ["dt_max"]),
        ({"norm": False, "gate_first": False}, ["gate_first"]),
        ({"multipliers": (1.0, 1.0, 0.0, 1.0, 1.0)}, ["multipliers"]),
    ],
    ids=str,
)
def test_a_shape_that_cannot_be_built_lists_every_reason(fields, wrong):
    """Widths, groups that do not divide, empty limits, and an order without effect."""
    with pytest.raises(ConfigError) as caught:
        decoder(dataclasses.replace(MIXER, **fields))
    wheres = [problem.where for problem in caught.value.problems]
    assert wheres == [f"model.layer.mixer.{name}" for name in wrong]


def test_heads_are_those_of_the_network_by_default():
    """Their number and width."""
    spec = decoder(StateSpaceSpec(state_dim=6)).pattern.group[0].mixer
    assert (spec.heads, spec.head_dim, spec.inner) == (4, 8, 32)
    hybrid = LayerSpec(MIXER, MLPSpec())
    assert decoder(layer=hybrid).attention_width == 0


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        (None, (0.0, None)),
        ([0.1, 0.2], (0.1, 0.2)),
        ([0.1, float("inf")], (0.1, None)),
        ([0.1, {"__float__": "Infinity"}], (0.1, None)),
    ],
    ids=str,
)
def test_limits_of_step_sizes_are_read_in_each_form(value, limits):
    """Infinity is the number of Python's JSON, or the object that transformers writes."""
    values = {"mamba_n_heads": 8, "time_step_limit": value}
    fields = Fields(values)
    spec = StateSpaceFields().read(fields, width=32)
    assert not fields.problems()
    assert (spec.dt_min, spec.dt_max) == limits
    for wrong in ([0.1], "0", [-1.0, 1.0], [0.1, "1"]):
        fields = Fields(values | {"time_step_limit": wrong})
        StateSpaceFields().read(fields, width=32)
        assert [problem.where for problem in fields.problems()] == ["time_step_limit"]


def test_a_hybrid_may_have_no_attention():
    """As `layer_types` says; transformers 5.24 cannot run such a Granite."""
    family = granite_hybrid.FAMILY
    values = family.write_config(granite_hybrid.PRESETS["test-granite-hybrid"])
    config = family.read_config(values | {"layer_types": ["mamba"] * 4})
    assert family.fits(config)
    assert {spec.mixer.name for spec in config.pattern.kinds} == {"state_space"}


def test_a_layer_may_have_an_mlp_alone():
    """With one norm; a layer with nothing, or with an MLP beside nothing, is refused."""
    alone = LayerSpec(NoMixerSpec(), MLPSpec(8))
    config = decoder(layer=alone)
    shapes = tree.flatten(jax.eval_shape(model(config).init, jax.random.key(0)))
    assert [path for path in shapes if "norm" in path] == ["layers/mlp_norm/scale", "norm/scale"]
    assert sum(leaf.size for leaf in shapes.values()) == config.total_params
    wrong = {"mlp": LayerSpec(NoMixerSpec(), None)}
    wrong["norms"] = dataclasses.replace(alone, norms="parallel")
    for field, layer in wrong.items():
        with pytest.raises(ConfigError, match=rf"model\.layer\.{field}"):
            decoder(layer=layer)
