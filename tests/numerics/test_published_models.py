"""Families that differ from Llama in few options, the options, and the reading of kinds of layers."""

import dataclasses
import functools
import importlib
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd import tree
from spmd.errors import ConfigError
from spmd.gradients.base import value_and_grad
from spmd.gradients.losses import next_token_loss
from spmd.hf.family import GROUP, families
from spmd.hf.fields import Fields
from spmd.models import internlm, llama, mistral, olmo, qwen
from spmd.models.decoder import (
    AttentionSpec,
    DecoderConfig,
    LayerSpec,
    NormSpec,
    ParallelMixerSpec,
    Rotary,
    decoder_rules,
)
from spmd.models.published.layer_types import (
    FULL,
    SLIDING,
    attention_table,
    every,
    layer_types,
    read_layer_types,
    read_rotary_by_kind,
    read_window_of,
    rotary_where,
)
from spmd.plan.context import use_plan
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import AXES, MeshShape, abstract_mesh
from spmd.testing import token_batches
from tests.one_device import SGD, Job
from tests.published_models import cases
from tests.tiers import soak_but

ELSEWHERE = ("gemma", "gpt2", "llama", "mistral", "mixtral", "qwen")
"""Modules of families with tests of their own (test_families.py, test_llama.py, test_mixtral.py)."""
PUBLISHED = cases("PUBLISHED")
REFUSED = cases("REFUSED")


def found_families():
    """Module of `spmd.models` → entry points of its families."""
    found = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        package, _, module = entry.module.rpartition(".")
        if package == "spmd.models" and module not in ELSEWHERE:
            found.setdefault(module, []).append(entry.name)
    return found


FAMILIES = found_families()


def module_of(name):
    """The module of families."""
    return importlib.import_module(f"spmd.models.{name}")


def families_of(name):
    """The families of a module."""
    return [families()[entry] for entry in FAMILIES[name]]


PRESETS = {
    preset: config for name in FAMILIES for preset, config in module_of(name).PRESETS.items()
}
SMALL = {
    name.removeprefix("test-"): config
    for name, config in PRESETS.items()
    if name.startswith("test-")
}
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12), dtype=np.int32)
BATCHES = token_batches((8, 16), 64, steps=2)


@functools.cache
def model(config):
    """The model of a config."""
    return from_nnx(config.build)


@functools.cache
def params(config):
    """Initial parameters, with biases and norms that are not what they start as."""

    def moved(path, leaf):
        if not path.endswith(("bias", "scale")):
            return leaf
        noise = np.random.default_rng(len(path)).standard_normal(leaf.shape)
        return leaf + 0.3 * jnp.asarray(noise, jnp.float32)

    return tree.map_with_path(moved, model(config).init(jax.random.key(0)))


def logits(config, given=None):
    """Logits of a config, with the parameters of another one or its own."""
    return np.asarray(model(config).apply(params(given or config), TOKENS))


def test_presets_have_the_published_parameter_counts():
    """By the counts that a config gives; those of the shapes are compared below."""
    published = {name: config for name, config in PRESETS.items() if not name.startswith("test")}
    assert {name: config.total_params for name, config in published.items()} == PUBLISHED


def active(config, path, size):
    """Elements of a kernel in the matmuls of one token: of experts, those of the chosen ones."""
    if "experts/" not in path:
        return size
    return size * config.router.top_k // config.router.experts


@pytest.mark.parametrize("name", soak_but(SMALL, "olmo", "olmo2", "starcoder2"))
def test_a_config_counts_its_parameters(name):
    """All of them, and those of matmuls with the head and the chosen experts."""
    config = SMALL[name]
    shapes = jax.eval_shape(model(config).init, jax.random.key(0))
    sizes = {path: int(np.prod(leaf.shape)) for path, leaf in tree.flatten(shapes).items()}
    assert config.total_params == sum(sizes.values())
    kernels = sum(active(config, *item) for item in sizes.items() if item[0].endswith("kernel"))
    if config.tied:
        kernels += config.vocab * config.d_model
    assert config.matmul_params == kernels


@pytest.mark.parametrize("name", FAMILIES)
def test_a_preset_is_read_as_it_is_written(name):
    """Each belongs to a family of its module, and its config.json gives the same decoder again."""
    theirs = families_of(name)
    for preset, config in module_of(name).PRESETS.items():
        fitting = [family for family in theirs if family.fits(config)]
        assert fitting, preset
        for family in fitting:
            written = family.write_config(config)
            again = family.read_config(written)
            assert again.pattern.kinds == config.pattern.kinds or family.secondary
            assert family.write_config(again) == written


def test_families_with_a_feature_of_their_own_are_told_apart():
    """A model with one is no Llama, and a Llama belongs to no family with one."""
    plain = llama.PRESETS["test"]
    for name in FAMILIES:
        for family in families_of(name):
            assert family.secondary or not family.fits(plain)
    for preset in ("granite", "olmo", "olmo2", "cohere", "helium", "nemotron", "hunyuan", "arcee"):
        assert not llama.FAMILY.fits(SMALL[preset])


def test_secondary_families_leave_other_models_to_the_first():
    """Llama, Mistral and Qwen 2 are exported as such, though others have the same decoder."""
    for family, config in (
        (llama.FAMILY, llama.PRESETS["test"]),
        (mistral.FAMILY, mistral.PRESETS["test"]),
        (qwen.QWEN2_FAMILY, qwen.PRESETS["test-qwen2"]),
    ):
        assert family.fits(config)
        assert not family.secondary
    assert mistral.MINISTRAL_FAMILY.fits(mistral.PRESETS["test"])
    assert mistral.MINISTRAL_FAMILY.secondary


def test_biases_of_internlm_are_those_of_llama():
    """By its names of the fields and by Llama's; queries may have biases alone, here only."""
    family, config = internlm.FAMILY, SMALL["internlm3"]
    values = family.write_config(config)
    del values["qkv_bias"], values["bias"]
    of_llama = values | {"attention_bias": True, "mlp_bias": True}
    expected = llama.FAMILY.read_config(of_llama).pattern.kinds
    assert family.read_config(of_llama).pattern.kinds == expected
    both = values | {"qkv_bias": True, "bias": True}
    assert family.read_config(both).pattern.kinds == expected
    queries = family.read_config(values | {"qkv_bias": True})
    mixer = queries.pattern.kinds[0].mixer
    assert (mixer.qkv_bias, mixer.out_bias) == (True, False)
    assert family.fits(queries)
    with pytest.raises(ConfigError, match="qkv_bias"):
        family.read_config(values | {"qkv_bias": True, "attention_bias": False})


def test_iquest_coder_is_a_llama_with_other_defaults():
    """Absent fields differ, and a file with all of them is read alike."""
    config = llama.PRESETS["test"]
    values = llama.IQUESTCODER_FAMILY.write_config(config)
    assert llama.IQUESTCODER_FAMILY.read_config(values) == llama.FAMILY.read_config(values)
    del values["head_dim"], values["num_key_value_heads"], values["rms_norm_eps"]
    absent = llama.IQUESTCODER_FAMILY.read_config(values | {"num_attention_heads": 8})
    assert (absent.head_width, absent.kv_heads, absent.norm_eps) == (128, 8, 1e-5)


def test_one_table_of_rotary_positions_is_of_both_kinds_in_olmo_3():
    """Without a scaling only, which would be of full attention in a later version."""
    config = SMALL["olmo3"]
    values = olmo.OLMO3_FAMILY.write_config(config)
    assert values.pop("rope_theta") == 5e5
    table = {"rope_type": "default", "rope_theta": 7e3}
    again = olmo.OLMO3_FAMILY.read_config(values | {"rope_parameters": table})
    assert {spec.attention.rotary.theta for spec in again.pattern.kinds} == {7e3}
    assert olmo.OLMO3_FAMILY.fits(again)
    scaled = {**table, "rope_type": "linear", "factor": 2.0}
    with pytest.raises(ConfigError, match="rope_parameters"):
        olmo.OLMO3_FAMILY.read_config(values | {"rope_parameters": scaled})


def test_unused_positions_are_skipped():
    """The first token has the position after them; none of them changes anything."""
    config = SMALL["opt"]
    arrays = params(config)

    def logits_of(config, positions):
        return np.asarray(model(config).apply({**arrays, "positions": positions}, TOKENS))

    table = arrays["positions"]
    plain = dataclasses.replace(config, unused_positions=0)
    expected = logits_of(plain, table[2:])
    np.testing.assert_array_equal(logits_of(config, table.at[:2].set(jnp.nan)), expected)
    assert np.abs(logits_of(plain, table[:-2]) - expected).max() > 1e-3
    with pytest.raises(ConfigError, match=r"model\.unused_positions"):
        DecoderConfig(unused_positions=2)


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_value_is_refused_by_name(name):
    """The field is named, and the same file without it is read."""
    family = families()[name]
    (module,) = (module for module, entries in FAMILIES.items() if name in entries)
    config = next(c for c in module_of(module).PRESETS.values() if family.fits(c))
    values = family.write_config(config)
    family.read_config(values)
    changes = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        family.read_config(values | changes)
    wheres = {
        problem.where.partition("[")[0].rpartition(".")[2] for problem in caught.value.problems
    }
    assert wheres & {*changes, "rotary fraction", "fraction"}


def problems_of(values, read):
    """The places of the problems of a reading."""
    fields = Fields(values)
    read(fields)
    return [problem.where for problem in fields.problems()]


def test_a_wrong_list_of_kinds_is_named():
    """Its length, each unknown word, and what is no list."""

    def read(fields):
        return read_layer_types(fields, 3, [FULL] * 3)

    for wrong, where in (
        ([FULL] * 2, ["layer_types"]),
        ([FULL, "full", SLIDING], ["layer_types[1]"]),
        ([FULL, 7, [SLIDING]], ["layer_types[1]", "layer_types[2]"]),
        (FULL, ["layer_types"]),
        ({}, ["layer_types"]),
    ):
        assert problems_of({"layer_types": wrong}, read) == where
    assert not problems_of({"layer_types": [FULL, SLIDING, FULL]}, read)
    assert not problems_of({"layer_types": None}, read)


def test_a_window_is_needed_where_layers_have_one():
    """Null and 0 are refused then, and have no effect otherwise."""
    for value in (None, 0, -1, "4"):
        values = {"sliding_window": value}
        assert problems_of(values, lambda fields: read_window_of(fields, [SLIDING], 4096))
        assert not problems_of(values, lambda fields: read_window_of(fields, [FULL], 4096))
    assert read_window_of(Fields({}), [SLIDING], 4096) == 4096


def test_a_table_of_layers_has_the_kinds_in_order():
    """For any order of kinds, with the shortest group, and positions where layers have them."""
    for kinds in (
        every(4, 10),
        [FULL, *every(3, 8)],
        [SLIDING] * 5,
        [FULL, SLIDING, SLIDING, FULL, FULL],
        [FULL],
    ):
        rotary = rotary_where([kind == SLIDING for kind in kinds], Rotary())
        table = attention_table(LayerSpec(), 7, kinds, rotary=rotary)
        config = DecoderConfig(layers=len(kinds), **table)
        assert layer_types(config) == kinds
        assert [spec.mixer.rotary is None for spec in config.pattern.kinds] == [
            kind == FULL for kind in kinds
        ]
    config = DecoderConfig(layers=10, **attention_table(LayerSpec(), 7, every(4, 10)))
    assert (len(config.group), len(config.last)) == (4, 2)


def test_rotary_positions_of_both_kinds_are_read_from_both_forms():
    """The table for each kind of layer, and the fields before it, whose scaling is of full attention."""
    linear = {"rope_type": "linear", "factor": 8.0}
    earlier = {"rope_theta": 5e5, "rope_scaling": linear, "rope_local_base_freq": 7e3}
    tables = {
        FULL: {**linear, "rope_theta": 5e5},
        SLIDING: {"rope_type": "default", "rope_theta": 7e3},
    }
    later = {"rope_parameters": tables}
    found = [read_rotary_by_kind(Fields(values), 1e6, 1e4) for values in (earlier, later)]
    assert found[0] == found[1]
    assert (found[0][FULL].theta, found[0][SLIDING].theta) == (5e5, 7e3)
    flat = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert problems_of(flat, lambda fields: read_rotary_by_kind(fields, 1e6, 1e4)) == [
        "rope_parameters"
    ]


@pytest.mark.parametrize(
    ("mixer", "where"),
    [
        ({"qk_norm_after": True}, "qk_norm_after"),
        ({"qk_norm_after": True, "qk_norm": "head", "rotary": None}, "qk_norm_after"),
        ({"qk_norm_kind": NormSpec()}, "qk_norm_kind"),
        ({"qk_norm": "rows"}, "qk_norm"),
        ({"clip_qkv": -1.0}, "clip_qkv"),
    ],
)
def test_an_option_of_attention_without_effect_is_refused(mixer, where):
    """It is named, with a fix."""
    with pytest.raises(ConfigError) as caught:
        DecoderConfig(layer=LayerSpec(AttentionSpec(**mixer)))
    (problem,) = caught.value.problems
    assert problem.where == f"model.layer.mixer.{where}"
    assert problem.fix


def test_an_impossible_norm_is_refused():
    """Kinds of norms and their places, a bias of a norm without one, an offset without a scale."""
    for fields in ({"kind": "batch"}, {"bias": True}, {"offset": 1.0, "scale": False}):
        with pytest.raises(ConfigError, match="Invalid norm"):
            NormSpec(**fields)
    with pytest.raises(ConfigError, match=r"model\.layer\.norms"):
        DecoderConfig(layer=LayerSpec(norms="around"))
    with pytest.raises(ConfigError, match=r"model\.layer\.norms: is parallel, and .* no MLP"):
        DecoderConfig(layer=LayerSpec(mlp=None, norms="parallel"))


OPTIONS = {
    "olmo": {"clip_qkv": 0.0},
    "hunyuan": {"qk_norm_after": False},
    "olmo2": {"qk_norm_kind": NormSpec("layer")},
}


@pytest.mark.soak
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_attention_changes_the_logits(name):
    """A control for the comparisons with other libraries: without it they would differ."""
    config = SMALL[name]
    mixer = dataclasses.replace(config.layer.mixer, **OPTIONS[name])
    other = dataclasses.replace(config, layer=dataclasses.replace(config.layer, mixer=mixer))
    assert np.abs(logits(other, config) - logits(config)).max() > 1e-3


@pytest.mark.parametrize("name", soak_but(SMALL, "olmo"))
def test_a_table_fits_every_axis(name):
    """Every parameter has a rule and every rule a parameter, and no mark is unknown."""
    config = SMALL[name]
    shapes = jax.eval_shape(model(config).init, jax.random.key(0))
    batch = {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in BATCHES[0].items()}
    loss = next_token_loss(model(config))
    excluded = {"expert"}
    if config.pattern.repeats % 2:
        excluded.add("pipe")
    mixers = [spec.mixer for spec in config.pattern.distinct]
    splits = [
        mixer.attention_width and not isinstance(mixer, ParallelMixerSpec) for mixer in mixers
    ]
    if not all(splits):
        excluded.add("sequence")  # a recurrence is not split
    for axis in set(AXES) - excluded:
        mesh = abstract_mesh(MeshShape(**{axis: 2}))
        plan = make_plan(mesh, decoder_rules(config), model(config), SGD)
        assert all(leaf.rule for leaf in plan.params)
        with use_plan(plan):
            jax.eval_shape(lambda p, b: loss(p, {}, b, jax.random.key(0))[0], shapes, batch)


def assert_parity(config, **sizes):
    """The initial state, and of two steps the loss, gradients and updates, are those of one device."""
    grad_fn = value_and_grad(next_token_loss(model(config), chunk=7))
    job = Job(model(config), decoder_rules(config), grad_fn, BATCHES)
    job.assert_parity(**sizes)


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", ["olmo", "olmo2", "hunyuan", "cohere2", "nemotron", "phi", "stablelm"]
)
def test_a_family_trains_as_on_one_device(name):
    """On a mesh of three axes."""
    assert_parity(SMALL[name], data=2, fsdp=2, tensor=2)


@pytest.mark.soak
@pytest.mark.parametrize("vocab", [64, 67])
def test_a_bias_of_logits_trains_as_on_one_device(vocab):
    """With a head that is the embedding, whose words tensor splits or does not."""
    config = dataclasses.replace(SMALL["phi"], tied=True, vocab=vocab)
    assert_parity(config, data=2, sequence=2, tensor=2)
