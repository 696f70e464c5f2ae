"""Rotary embeddings of every type are those of `transformers`, and of config.json and back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.errors import ConfigError
from spmd.hf.fields import Fields
from spmd.layers.kv_cache import prefill
from spmd.model_interface.model import as_outputs
from spmd.models.decoder import DecoderConfig
from spmd.models.decoder import rotary as rope
from spmd.models.decoder.rotary import (
    SCALINGS,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    YarnScaling,
    rotary_angles,
    rotate,
)
from spmd.models.published.rotary import (
    ENTRIES,
    PLAIN,
    Rotary,
    read_rotary,
    read_rotary_by_layer,
    write_rotary,
    write_rotary_by_layer,
)
from spmd.plan.nnx_model import from_nnx
from tests.numerics.test_transformers import TOKENS, difference, logits_here
from tests.numerics.test_transformers import read as read_model
from tests.published_models.common import LLAMA
from tests.tiers import soak_but

SHORT = [1.0 + 0.1 * n for n in range(16)]
LONG = [2.0 + 0.5 * n for n in range(16)]
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {
    **{"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64},
    **{"short_factor": SHORT, "long_factor": LONG},
}
TABLES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn, gpt-oss": {**YARN, "beta_fast": 16.0, "beta_slow": 0.5, "truncate": False},
    "yarn, DeepSeek": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
    "yarn, attention factor": {**YARN, "attention_factor": 0.75},
    "yarn, ratio of contexts": {**YARN, "factor": None},
    "yarn, one step": {**YARN, "beta_fast": 1.001, "beta_slow": 1.0, "truncate": False},
    "longrope": LONGROPE,
    "longrope, attention factor": {**LONGROPE, "attention_factor": 1.25},
    "longrope, ratio of contexts": {**LONGROPE, "factor": None},
    "llama3": {
        **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
}
LONGEST = 256
BASE = 1000.0


def config(**more):
    """Heads of 32 dimensions, of which tables rotate all or a part."""
    return {"max_position_embeddings": LONGEST, "rope_theta": BASE, **more}


def read(values, **options):
    """The rotary embeddings of a config, without a problem."""
    fields = Fields(values)
    rotary = read_rotary(fields, **options)
    assert [str(problem) for problem in fields.problems()] == []
    return rotary


def problems(values, **options):
    """The places that reading names."""
    fields = Fields(values)
    read_rotary(fields, **options)
    return {problem.where for problem in fields.problems()}


def expected(table, length, head_dim=32):
    """Frequencies and factor of `transformers` for a length."""
    llama = pytest.importorskip("transformers.models.llama.configuration_llama")
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    theirs = llama.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=LONGEST,
        rope_parameters={**table, "rope_theta": BASE},
    )
    function = utils.ROPE_INIT_FUNCTIONS[table["rope_type"]]
    frequencies, factor = function(theirs, seq_len=length)
    return frequencies.numpy(), factor


# the oldest transformers has no proportional frequencies
@pytest.mark.parametrize("name", soak_but(TABLES, *(n for n in TABLES if n != "proportional")))
def test_frequencies_are_those_of_transformers(name):
    """To 1e-6, for short and long texts; control: those without scaling are not."""
    table = TABLES[name]
    for length in (64, 65, 300):
        frequencies, factor = expected(table, length)
        rotary = read(config(rope_scaling=table))
        found = rotary.scaling.frequencies(32, rotary.theta, length)
        np.testing.assert_allclose(found, frequencies, rtol=1e-6)
        assert rotary.scaling.attention_scaling == pytest.approx(factor, rel=1e-6)
        plain = RopeScaling().frequencies(32, BASE, length)
        is_scaled = np.abs(found / plain - 1).max() > 0.05
        assert is_scaled or (name == "dynamic" and length < LONGEST)


@pytest.mark.parametrize("name", ["linear", "yarn", "llama3"])
def test_a_part_of_a_head_has_the_frequencies_of_a_smaller_one(name):
    """`partial_rotary_factor` in the table or beside it; 24 of 48 dimensions turn."""
    table = {**TABLES[name], "partial_rotary_factor": 0.5}
    rotary = read(config(rope_scaling=table))
    beside = read(config(rope_scaling=TABLES[name], partial_rotary_factor=0.5))
    assert rotary == beside
    assert rotary.fraction == 0.5
    frequencies, factor = expected(table, 64, head_dim=48)
    cos, sin = rotary.angles(np.arange(3)[None], 48)
    angles = np.arange(3)[:, None] * frequencies
    np.testing.assert_allclose(cos[0], factor * np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin[0], factor * np.sin(angles), atol=1e-6)


@pytest.mark.soak  # the oldest transformers names the function otherwise
def test_latent_attention_has_the_scores_of_deepseek():
    """Multiplied by the square of the factor of `mscale_all_dim`; control: 1 without it."""
    theirs = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    table = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    scaling = read(config(rope_scaling=table)).scaling
    assert scaling.score_scaling == pytest.approx(theirs.yarn_apply_mscale(table, 1.0))
    assert scaling.score_scaling > 1.4
    assert YarnScaling(8.0, 64).score_scaling == 1.0


def heads(dim=16, seq=5):
    key = jax.random.key(0)
    return jax.random.normal(key, (1, seq, 2, dim))


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_are_rotated_as_in_transformers(interleaved):
    """GLM's interleaved pairs and Phi's halves, of the first half of a head; the rest is unchanged."""
    torch = pytest.importorskip("torch")
    family = "glm" if interleaved else "phi"
    theirs = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    x = heads()
    angles = rotary_angles(np.arange(5)[None], 16, 100.0, fraction=0.5)
    found = np.asarray(rotate(x, angles, interleaved))
    cos, sin = (torch.from_numpy(np.concatenate([a, a], axis=-1)) for a in angles)
    if interleaved:
        q = torch.from_numpy(np.array(x)).transpose(1, 2)
        rotated, _ = theirs.apply_rotary_pos_emb(q, q, cos, sin)
    else:  # Phi's attention splits the head before
        q = torch.from_numpy(np.array(x[..., :8])).transpose(1, 2)
        rotated, _ = theirs.apply_rotary_pos_emb(q, q, cos, sin)
    rotated = rotated.transpose(1, 2).numpy()
    np.testing.assert_allclose(found[..., :8], rotated[..., :8], atol=1e-6)
    np.testing.assert_array_equal(found[..., 8:], x[..., 8:])
    other = np.asarray(rotate(x, angles, not interleaved))
    assert np.abs(found - other).max() > 0.1


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_matmul_of_a_tpu_is_the_same_rotation(interleaved, fraction):
    """To rounding; control: the rotation back is not."""
    x = heads()
    angles = rotary_angles(np.arange(5)[None], 16, 100.0, fraction=fraction)
    cos, sin = (jnp.asarray(a)[:, :, None] for a in angles)
    expected = rotate(x, angles, interleaved)
    found = rope._by_matmul(x, cos, sin, interleaved)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert np.abs(rope._by_matmul(x, cos, -sin, interleaved) - expected).max() > 0.1


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_derivative_is_that_of_the_rotation(interleaved):
    """With a factor of cosines and sines, and dimensions that are not rotated."""
    x = heads(dim=8)
    angles = rotary_angles(np.arange(5)[None], 8, 100.0, YarnScaling(4.0, 16), fraction=0.5)
    dy = heads(dim=8)[:, ::-1]
    _, back = jax.vjp(lambda x: rotate(x, angles, interleaved), x)
    (found,) = back(dy)
    # linear: ⟨rotate(x), dy⟩ = ⟨x, back(dy)⟩ for each x
    units = jnp.eye(8)[:, None, None, None]
    parts = [
        (rotate(jnp.broadcast_to(u, x.shape), angles, interleaved) * dy).sum(-1) for u in units
    ]
    np.testing.assert_allclose(found, jnp.stack(parts, axis=-1), atol=1e-5)


@pytest.mark.parametrize(
    "scaling", [DynamicScaling(4.0, 8), LongRopeScaling(4.0, 8, (1.0,) * 4, (3.0,) * 4)]
)
def test_a_prompt_has_the_frequencies_of_its_cache(scaling):
    """So keys of prefill and decoding fit; control: outside, those of the prompt's length."""
    at = np.arange(6)[None]
    table, _ = prefill(lambda: rotary_angles(at, 8, 100.0, scaling), length=32)
    long = rotary_angles(np.arange(32)[None], 8, 100.0, scaling)
    np.testing.assert_array_equal(table[1][0], long[1][0, :6])
    short = rotary_angles(at, 8, 100.0, scaling)
    assert np.abs(short[1] - table[1]).max() > 0.1


VARIANTS = [
    Rotary(500.0, RopeScaling()),
    Rotary(10_000.0, RopeScaling(), 0.5),
    Rotary(1e4, LinearScaling(2.0)),
    Rotary(1e4, DynamicScaling(2.0, 77), 0.5),
    Rotary(1e6, YarnScaling(4.0, 64, truncate=False, attention_factor=0.5)),
    Rotary(1e6, YarnScaling(4.0, 64, 16.0, 2.0, None, 1.0, 1.0)),
    Rotary(1e6, LongRopeScaling(4.0, 64, (1.0, 2.0), (3.0, 4.0))),
    Rotary(5e5, Llama3Scaling(8.0)),
    Rotary(1e6, ProportionalScaling(2.0, 0.25)),
]


@pytest.mark.parametrize("rotary", VARIANTS, ids=lambda rotary: rotary.scaling.kind)
def test_what_is_written_is_read(rotary):
    """In one table for all layers, and in one for each type of layer."""
    assert read(write_rotary(rotary)) == rotary
    kinds = {"full_attention": rotary, "sliding_attention": Rotary(10.0, RopeScaling())}
    fields = Fields(write_rotary_by_layer(kinds))
    assert read_rotary_by_layer(fields, dict.fromkeys(kinds, PLAIN)) == kinds
    assert fields.problems() == []


def test_every_type_is_read_and_written():
    """The table of scalings and that of their entries have the same types, and each field has an entry."""
    assert SCALINGS.keys() == ENTRIES.keys()
    for kind, scaling in SCALINGS.items():
        ours = {entry.ours for entry in ENTRIES[kind]}
        missing = {field.name for field in dataclasses.fields(scaling)} - ours
        assert missing == ({"original_context"} if kind == "dynamic" else set())


def test_equal_bounds_of_llama3_are_a_step():
    """Of Llama 4: each frequency is divided or unchanged, none is between."""
    plain = np.geomspace(1.0, 1e-5, 40)
    step = Llama3Scaling(16.0, 1.0, 1.0, 64).scaled(plain)
    turns = 64 * plain / (2 * np.pi)
    np.testing.assert_allclose(step, np.where(turns < 1, plain / 16, plain))
    assert {*np.round(plain / step)} == {1.0, 16.0}


def test_earlier_spellings_are_read():
    """`type` for `rope_type`, Phi-3's `su`, and its original context beside the table."""
    table = {key: value for key, value in LONGROPE.items() if key != "rope_type"}
    earlier = {**table, "type": "su", "original_max_position_embeddings": 1}
    values = config(rope_scaling=earlier, original_max_position_embeddings=64)
    assert read(values) == read(config(rope_scaling=LONGROPE))


REFUSED = [
    ({"rope_type": "yarm"}, {"rope_scaling"}),
    ({"rope_type": "linear"}, {"rope_scaling.factor"}),
    ({"rope_type": "linear", "factor": 0.5}, {"rope_scaling.factor"}),
    ({**YARN, "factor": None, "original_max_position_embeddings": None}, {"factor", "original"}),
    ({**YARN, "mscale": 1.0}, {"rope_scaling.mscale"}),
    ({**YARN, "beta_fast": 0.5}, {"rope_scaling.beta_fast"}),
    ({**YARN, "truncate": 1, "beta": 3}, {"rope_scaling.truncate", "rope_scaling.beta"}),
    ({**LONGROPE, "long_factor": [1.0]}, {"rope_scaling.long_factor"}),
    ({**LONGROPE, "long_factor": [0.0] * 16}, {"rope_scaling.long_factor"}),
    ({**LONGROPE, "short_factor": 3}, {"rope_scaling.short_factor"}),
    ({"rope_type": "proportional", "partial_rotary_factor": 2}, {"rope_scaling.rotary_fraction"}),
    ({"rope_type": "default", "partial_rotary_factor": 0}, {"rope_scaling.partial_rotary_factor"}),
    ({"rope_type": "default", "mrope_section": [1]}, {"rope_scaling.mrope_section"}),
]


@pytest.mark.parametrize(("table", "wrong"), REFUSED)
def test_a_table_that_cannot_be_read_names_each_entry(table, wrong):
    """Unknown types, missing entries, and values that no model has."""
    found = problems(config(rope_scaling=table))
    assert len(found) == len(wrong)
    for name in found:
        assert any(part in name for part in wrong)


def test_entries_that_the_family_reads_are_left_to_it():
    """Ministral 3's temperature is none of the embeddings'; control: it is refused without the word."""
    table = {**YARN, "llama_4_scaling_beta": 0.1}
    assert problems(config(rope_parameters=table), also=["llama_4_scaling_beta"]) == set()
    assert problems(config(rope_parameters=table)) == {"rope_parameters.llama_4_scaling_beta"}


def test_tables_by_layer_name_what_is_wrong():
    """Something else than a table, an unknown type, and an entry of one."""
    tables = {"full_attention": {"rope_type": "linear"}, "sliding_attention": 3, "other": {}}
    defaults = dict.fromkeys(("full_attention", "sliding_attention"), PLAIN)
    fields = Fields({"rope_parameters": tables})
    read_rotary_by_layer(fields, defaults)
    assert {problem.where for problem in fields.problems()} == {
        "rope_parameters.full_attention.factor",
        "rope_parameters.sliding_attention",
        "rope_parameters.other",
    }


def test_a_table_without_a_base_has_that_of_its_type():
    """Outside of tables, each type of layer may have a field of its own; one table for all is refused."""
    tables = {key: {"rope_type": "default"} for key in ("full_attention", "sliding_attention")}
    defaults = dict.fromkeys(tables, PLAIN)
    values = {"rope_parameters": tables, "rope_theta": 1e6, "rope_local_base_freq": 10.0}
    local = {"sliding_attention": "rope_local_base_freq"}
    found = read_rotary_by_layer(Fields(values), defaults, theta_fields=local)
    assert [rotary.theta for rotary in found.values()] == [1e6, 10.0]
    flat = Fields({"rope_parameters": {"rope_type": "default"}})
    read_rotary_by_layer(flat, defaults)
    assert [problem.where for problem in flat.problems()] == ["rope_parameters"]


@pytest.mark.parametrize(
    ("scaling", "fraction", "text"),
    [
        (LongRopeScaling(4.0, 8, (1.0,), (1.0,)), 1.0, "1 divisors, 8 / 2 = 4 pairs"),
        ({"factor": 8.0}, 1.0, r"model\.rope_scaling: is"),
        (RopeScaling(), 0.4, "0.4 · head_dim 8 = 3.2"),
        (RopeScaling(), 1.5, "1.5 · head_dim 8 = 12"),
        (DynamicScaling(2.0, 4), 0.25, "2 / 0"),
    ],
)
def test_a_scaling_that_does_not_fit_the_head_is_refused(scaling, fraction, text):
    """With the numbers; in a model's config, too."""
    if fraction == 1:
        with pytest.raises(ConfigError, match=text):
            DecoderConfig(head_dim=8, rope_scaling=scaling)
    with pytest.raises(ConfigError, match=text):
        rotary_angles(np.arange(5)[None], 8, 100.0, scaling, fraction)


WHOLE = {
    **{name: TABLES[name] for name in ("linear", "dynamic", "yarn", "yarn, DeepSeek", "llama3")},
    "longrope": {**LONGROPE, "short_factor": SHORT[:4], "long_factor": LONG[:4]},
}


@pytest.mark.parametrize("longest", [8, 16])
@pytest.mark.parametrize("name", soak_but(WHOLE, "longrope"))
def test_a_model_with_a_scaling_is_that_of_transformers(name, longest, tmp_path):
    """12 tokens, beyond the original context and within it; control: the plain positions differ."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    table = dict(WHOLE[name])
    if "original_max_position_embeddings" in table:
        table["original_max_position_embeddings"] = longest
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{**LLAMA, "num_hidden_layers": 1, "max_position_embeddings": longest},
        rope_parameters={"rope_theta": 30.0, **table},
        initializer_range=0.3,
    )
    there = transformers.LlamaForCausalLM(config).eval()
    there.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = there(torch.tensor(TOKENS.astype(np.int64))).logits.numpy()
    _, ours, plan, state = read_model(tmp_path)
    assert difference(logits_here(plan, state), expected) < 1e-4
    plain = dataclasses.replace(ours, rope_scaling=RopeScaling())
    other = jax.jit(from_nnx(plain.build).apply)(state.params, jnp.asarray(TOKENS))
    is_scaled = np.abs(as_outputs(other).logits - expected).max() > 0.05
    assert is_scaled or (name, longest) == ("dynamic", 16)
