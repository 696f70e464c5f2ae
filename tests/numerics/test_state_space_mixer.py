"""State-space mixers beside attention, layers without a mixer, and fields of state-space mixers."""

import dataclasses

import jax
import numpy as np
import pytest

from spmd import tree
from spmd.errors import ConfigError
from spmd.hf.fields import Fields
from spmd.models import granite_hybrid
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    LayerSpec,
    MLPSpec,
    NoMixerSpec,
    ParallelMixerSpec,
    StateSpaceSpec,
)
from spmd.models.published.state_space import StateSpaceFields
from tests.decoders import model, params

MIXER = StateSpaceSpec(heads=8, head_dim=4, groups=2, state_dim=8)


def decoder(mixer=MIXER, **fields):
    sizes = {"vocab": 64, "d_model": 32, "layers": 2, "heads": 4, "kv_heads": 4, "d_ff": 48}
    return DecoderConfig(**sizes | {"layer": LayerSpec(mixer, None)} | fields)


PARALLEL = ParallelMixerSpec(
    state_space=MIXER, key_scale=0.5, attention_scale=0.7, state_space_scale=1.5
)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_mixers_side_by_side_are_added():
    """Each with its factor; the factor of keys is one of the scores, as the control shows."""
    config = decoder(PARALLEL)
    x = np.random.default_rng(1).standard_normal((1, 7, 32)).astype(np.float32)

    def outputs(model, x):
        inputs = model._inputs(7, None, None)
        mixer = jax.tree.map(lambda w: w[0], model.layers).parallel_mixer
        return mixer(x, inputs), mixer.attention(x, inputs), mixer.state_space(x, inputs)

    both, attended, recurrent = model(config).apply(params(config), x, method=outputs)
    np.testing.assert_allclose(both, 0.7 * attended + 1.5 * recurrent, rtol=1e-4, atol=1e-5)
    plain = dataclasses.replace(PARALLEL, key_scale=1.0)
    scaled = dataclasses.replace(plain, attention=AttentionSpec(scale=0.5 * 8**-0.5))
    others = []
    for mixer in (scaled, plain):
        found, *_ = model(decoder(mixer)).apply(params(config), x, method=outputs)
        others.append(np.abs(both - found).max())
    assert others[0] < 1e-5 < 1e-3 < others[1]


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
