"""A family's name map has a line for every parameter, and reads back every shape that it writes."""

import dataclasses
import functools
import re

import jax
import pytest

from spmd import tree
from spmd.errors import ConfigError
from spmd.hf.family import tensor_sources
from spmd.models import gemma, gpt2, llama, mistral, mixtral, qwen, vit
from spmd.models.decoder.rotary import Llama3Scaling
from spmd.name_maps import vit as vit_names
from spmd.plan.nnx_model import from_nnx

SCALED = dataclasses.replace(
    llama.PRESETS["test"], rope_scaling=Llama3Scaling(factor=8.0, original_context=16)
)
FAMILIES = {
    "llama3.1": (llama.FAMILY, SCALED),
    "mistral": (mistral.FAMILY, mistral.PRESETS["test"]),
    "qwen2": (qwen.QWEN2_FAMILY, qwen.PRESETS["test-qwen2"]),
    "qwen3": (qwen.QWEN3_FAMILY, qwen.PRESETS["test-qwen3"]),
    "gemma": (gemma.GEMMA_FAMILY, gemma.PRESETS["test-gemma"]),
    "gemma2": (gemma.GEMMA2_FAMILY, gemma.PRESETS["test-gemma2"]),
    "gpt2": (gpt2.FAMILY, gpt2.PRESETS["test"]),
    "vit": (vit_names.FAMILY, vit.PRESETS["test"]),
}
PUBLISHED = [
    *((mistral.FAMILY, name, c) for name, c in mistral.PRESETS.items()),
    *((gemma.GEMMA_FAMILY, name, c) for name, c in gemma.PRESETS.items() if "gemma2" not in name),
    *((gemma.GEMMA2_FAMILY, name, c) for name, c in gemma.PRESETS.items() if "gemma2" in name),
    *((qwen.QWEN2_FAMILY, name, c) for name, c in qwen.PRESETS.items() if c.layer == qwen.QWEN2),
    *((qwen.QWEN3_FAMILY, name, c) for name, c in qwen.PRESETS.items() if c.layer == qwen.QWEN3),
    *((gpt2.FAMILY, name, c) for name, c in gpt2.PRESETS.items()),
    *((vit_names.FAMILY, f"vit-{name}", c) for name, c in vit.PRESETS.items()),
    *((llama.FAMILY, name, c) for name, c in llama.PRESETS.items() if name.startswith("llama")),
]


@functools.cache
def shapes(config):
    """Path → shape of every parameter, without making any."""
    made = jax.eval_shape(from_nnx(config.build).init, jax.random.key(0))
    return {path: leaf.shape for path, leaf in tree.flatten(made).items()}


def resolved(config):
    """The shape with the width of its heads written out, where it may be left to follow from others."""
    return (
        dataclasses.replace(config, head_dim=config.head_width)
        if hasattr(config, "head_dim")
        else config
    )


@pytest.mark.parametrize(
    ("family", "name", "config"), PUBLISHED, ids=[name for _, name, _ in PUBLISHED]
)
def test_a_shape_is_read_as_it_was_written(family, name, config):
    """config.json and back, for every preset; and the family says that it fits."""
    written = {"architectures": list(family.architectures), **family.write_config(config)}
    assert resolved(family.read_config(written)) == resolved(dataclasses.replace(config, unroll=1))
    assert family.fits(config)


# config.json in the form of the published checkpoints: their shapes, and the fields that not every
# file has.
FILES = {
    "gpt2-medium": (
        {
            **{
                "activation_function": "gelu_new",
                "attn_pdrop": 0.1,
                "embd_pdrop": 0.1,
                "resid_pdrop": 0.1,
            },
            **{
                "layer_norm_epsilon": 1e-05,
                "n_ctx": 1024,
                "n_embd": 1024,
                "n_head": 16,
                "n_layer": 24,
            },
            **{
                "n_positions": 1024,
                "n_special": 0,
                "predict_special_tokens": True,
                "vocab_size": 50257,
            },
            **{
                "summary_activation": None,
                "summary_first_dropout": 0.1,
                "summary_proj_to_labels": True,
            },
            **{"summary_type": "cls_index", "summary_use_proj": True},
        },
        gpt2.FAMILY,
        gpt2.PRESETS["gpt2-medium"],
    ),
    "gemma-2b": (
        {
            **{
                "attention_bias": False,
                "head_dim": 256,
                "hidden_act": "gelu",
                "hidden_activation": None,
            },
            **{"hidden_size": 2048, "intermediate_size": 16384, "max_position_embeddings": 8192},
            **{
                "num_attention_heads": 8,
                "num_hidden_layers": 18,
                "num_key_value_heads": 1,
                "rms_norm_eps": 1e-06,
            },
            **{"rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000},
        },
        gemma.GEMMA_FAMILY,
        gemma.PRESETS["gemma-2b"],
    ),
    "gemma2-9b": (
        {
            **{
                "attention_bias": False,
                "attn_logit_softcapping": 50.0,
                "cache_implementation": "hybrid",
            },
            **{"final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"},
            **{
                "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size": 3584,
                "intermediate_size": 14336,
            },
            **{
                "num_attention_heads": 16,
                "num_hidden_layers": 42,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-06,
            },
            **{"query_pre_attn_scalar": 256, "rope_theta": 10000.0, "sliding_window": 4096},
            **{"sliding_window_size": 4096, "vocab_size": 256000},
        },
        gemma.GEMMA2_FAMILY,
        gemma.PRESETS["gemma2-9b"],
    ),
    "qwen2.5-0.5b": (
        {
            **{
                "hidden_act": "silu",
                "hidden_size": 896,
                "intermediate_size": 4864,
                "max_window_layers": 24,
            },
            **{
                "num_attention_heads": 14,
                "num_hidden_layers": 24,
                "num_key_value_heads": 2,
                "rms_norm_eps": 1e-06,
            },
            **{
                "rope_theta": 1000000.0,
                "sliding_window": 32768,
                "tie_word_embeddings": True,
                "use_mrope": False,
            },
            **{"use_sliding_window": False, "vocab_size": 151936},
        },
        qwen.QWEN2_FAMILY,
        qwen.PRESETS["qwen2.5-0.5b"],
    ),
    "qwen3-0.6b": (
        {
            **{"attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024},
            **{
                "intermediate_size": 3072,
                "max_window_layers": 28,
                "num_attention_heads": 16,
                "num_hidden_layers": 28,
            },
            **{
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-06,
                "rope_scaling": None,
                "rope_theta": 1000000,
            },
            **{
                "sliding_window": None,
                "tie_word_embeddings": True,
                "use_sliding_window": False,
                "vocab_size": 151936,
            },
        },
        qwen.QWEN3_FAMILY,
        qwen.PRESETS["qwen3-0.6b"],
    ),
    "llama3.2-1b": (
        {
            **{
                "attention_bias": False,
                "head_dim": 64,
                "hidden_act": "silu",
                "hidden_size": 2048,
                "mlp_bias": False,
            },
            **{
                "intermediate_size": 8192,
                "num_attention_heads": 32,
                "num_hidden_layers": 16,
                "pretraining_tp": 1,
            },
            **{
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05,
                "rope_theta": 500000.0,
                "tie_word_embeddings": True,
            },
            "rope_scaling": {
                **{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
                **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
            },
            "vocab_size": 128256,
        },
        llama.FAMILY,
        llama.PRESETS["llama3.2-1b"],
    ),
    "mistral-nemo-12b": (
        {
            **{
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 5120,
                "intermediate_size": 14336,
            },
            **{
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05,
            },
            **{
                "rope_theta": 1000000.0,
                "sliding_window": None,
                "tie_word_embeddings": False,
                "vocab_size": 131072,
            },
        },
        mistral.FAMILY,
        mistral.PRESETS["mistral-nemo-12b"],
    ),
    "vit-l16": (
        {
            **{
                "attention_probs_dropout_prob": 0.0,
                "hidden_act": "gelu",
                "hidden_dropout_prob": 0.0,
            },
            **{
                "hidden_size": 1024,
                "id2label": {str(n): f"class {n}" for n in range(1000)},
                "image_size": 224,
            },
            **{
                "intermediate_size": 4096,
                "layer_norm_eps": 1e-06,
                "num_attention_heads": 16,
                "num_channels": 3,
            },
            **{"num_hidden_layers": 24, "patch_size": 16, "qkv_bias": True},
        },
        vit_names.FAMILY,
        vit.PRESETS["vit-l16"],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_published_config_is_a_preset(name):
    """The shapes in `models` are those of the checkpoints that they are named for."""
    values, family, preset = FILES[name]
    assert resolved(family.read_config(values)) == resolved(preset)


def test_a_shape_fits_one_family():
    """But for what is the same model: a Llama with no window is a Mistral too."""
    for name, (family, config) in FAMILIES.items():
        others = {other for other, (o, _) in FAMILIES.items() if o is not family and o.fits(config)}
        assert others == ({"mistral"} if name == "llama3.1" else set())


@pytest.mark.parametrize(
    ("name", "fitting"),
    [
        ("llama3.1", {"mistral"}),
        ("gemma", {"gemma"}),
        ("gemma2", set()),
        ("qwen2", {"qwen2"}),
        ("qwen3", {"qwen3"}),
    ],
)
def test_a_family_fits_no_shape_that_its_class_refuses(name, fitting):
    """Transformers' Llama and Gemma 2 want heads that divide the width; the others do not."""
    config = dataclasses.replace(FAMILIES[name][1], heads=6, head_dim=8)
    assert {other for other, (family, _) in FAMILIES.items() if family.fits(config)} == fitting


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_belongs_to_one_parameter(name, stacked):
    """Every parameter has a line and every line a parameter; tensors have the parameters' elements, none twice."""
    family, config = FAMILIES[name]
    config = dataclasses.replace(config, stacked=stacked)
    table = tensor_sources(family.names(config), shapes(config))
    assert set(table) == set(shapes(config))
    parts = [(tensor, s.mapping.layout.index) for s in table.values() for _, tensor in s.tensors()]
    assert len(parts) == len(set(parts))
    layers = {
        int(re.search(r"\d+", tensor)[0])
        for tensor, _ in parts
        if re.search(r"\.(layers|h|layer)\.\d", tensor)
    }
    assert layers == set(range(config.layers))


def test_layers_of_gemma_2_take_turns():
    """Tensors of layers 0 and 2 are local, of 1 and 3 global."""
    family, config = FAMILIES["gemma2"]
    table = tensor_sources(family.names(config), shapes(config))
    for block, numbers in (("local_block", ["0", "2"]), ("global_block", ["1", "3"])):
        tensors = [tensor for _, tensor in table[f"layers/{block}/mlp/up_proj/kernel"].tensors()]
        assert [tensor.split(".")[2] for tensor in tensors] == numbers


def test_queries_keys_and_values_of_gpt_2_are_thirds_of_a_tensor():
    """Columns 0 to 31, 32 to 63 and 64 to 95 of 96, neither turned nor overlapping."""
    family, config = FAMILIES["gpt2"]
    table = tensor_sources(family.names(config), shapes(config))
    for number, x in enumerate("qkv"):
        source = table[f"layers/attention/{x}_proj/kernel"]
        assert source.tensor_shape == (32, 96)
        assert source.region((slice(0, 32), slice(0, 32))) == (
            slice(0, 32),
            slice(32 * number, 32 * number + 32),
        )


def test_the_published_gpt_2_has_no_prefix():
    """Where no tensor has the family's prefix, no line has; where one has, all keep it."""
    family, config = FAMILIES["gpt2"]
    full, _ = family.tables(config, ["transformer.wte.weight"])
    short, ignored = family.tables(config, ["wte.weight", "h.0.attn.bias"])
    assert full == family.names(config)
    assert [f"transformer.{line.tensor}" for line in short] == [line.tensor for line in full]
    assert any(line.covers("h.0.attn.bias") for line in ignored)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tied_head_may_be_stored_under_either_name(name):
    """A file that has the head alone gives it to the embedding; one with both, or without a tied head, is as it was."""
    family, config = FAMILIES[name]
    config = dataclasses.replace(config, tied=True) if hasattr(config, "tied") else config
    names, ignored = family.names(config), family.ignored(config)
    copies = [entry for entry in ignored if entry.same_as]
    assert bool(copies) == (name != "vit")
    for copy in copies:
        both = {line.tensor for line in names} | {copy.tensor}
        assert family.tables(config, both) == (names, ignored)
        table, others = family.tables(config, both - {copy.same_as})
        moved = [
            (ours, theirs.tensor)
            for ours, theirs in zip(names, table, strict=True)
            if ours != theirs
        ]
        assert [(ours.tensor, theirs) for ours, theirs in moved] == [(copy.same_as, copy.tensor)]
        assert copy not in others


def test_the_published_gpt_2_has_a_table_that_splits_no_vocabulary():
    """Its 50,257 words divide over no `tensor`; an even vocabulary is split."""
    rules = gpt2.FAMILY.rules
    whole, split = (dict(rules(gpt2.PRESETS[name]).activations) for name in ("gpt2", "test"))
    assert "tensor" not in whole["logits"]
    assert "tensor" in split["logits"]


ROPE = llama.FAMILY.write_config(SCALED)["rope_scaling"]
DECODERS = [name for name in FAMILIES if name != "vit"]
REFUSED = [
    (
        "llama3.1",
        {"attention_bias": "yes", "rope_scaling": {"rope_type": "yarm"}},
        {"attention_bias", "rope_scaling"},
    ),
    (
        "llama3.1",
        {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "yarn", "truncate": 1}},
        {
            "partial_rotary_factor",
            "rope_scaling.factor",
            "rope_scaling.original_max_position_embeddings",
            "rope_scaling.truncate",
        },
    ),
    (
        "llama3.1",
        {"rope_scaling": {"rope_type": "llama3", "factor": "8", "low_freq_factor": 1.0, "beta": 2}},
        {
            "rope_scaling.beta",
            "rope_scaling.factor",
            "rope_scaling.high_freq_factor",
            "rope_scaling.original_max_position_embeddings",
        },
    ),
    (
        "qwen2",
        {"use_sliding_window": True, "layer_types": ["sliding_attention"]},
        {"use_sliding_window", "layer_types"},
    ),
    ("gemma", {"hidden_act": "silu", "attention_bias": True}, {"hidden_act", "attention_bias"}),
    (
        "gemma2",
        {"layer_types": ["full_attention"] * 4, "attn_logit_softcapping": -1.0},
        {"layer_types", "attn_logit_softcapping"},
    ),
    (
        "gpt2",
        {
            "activation_function": "tanh",
            "scale_attn_by_inverse_layer_idx": True,
            "n_head": 5,
            "alibi": True,
        },
        {"activation_function", "scale_attn_by_inverse_layer_idx", "n_head", "alibi"},
    ),
    (
        "vit",
        {
            "hidden_act": "relu",
            "qkv_bias": False,
            "image_size": [8, 4],
            "use_swiglu": True,
            "num_labels": 0,
        },
        {"hidden_act", "qkv_bias", "image_size", "use_swiglu", "num_labels", "model.patch"},
    ),
    (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": None},
        {"attn_logit_softcapping", "final_logit_softcapping", "sliding_window"},
    ),
    *(
        ("mistral", {"sliding_window": window}, {"sliding_window"})
        for window in (True, False, 0, -4, 4.0, "4")
    ),
    *(
        ("llama3.1", {"rope_parameters": table}, {"rope_scaling"})
        for table in ({**ROPE, "factor": 9.0}, {**ROPE, "rope_theta": 7.0}, {"rope_theta": 5e5})
    ),
    *(
        (name, {"is_causal": False, "use_alibi": False}, {"is_causal", "use_alibi"})
        for name in DECODERS
    ),
]


@pytest.mark.parametrize(
    ("name", "changes", "wrong"), REFUSED, ids=[name for name, _, _ in REFUSED]
)
def test_a_feature_that_a_model_does_not_have_is_named(name, changes, wrong):
    """One error with all of them."""
    family, config = FAMILIES[name]
    with pytest.raises(ConfigError) as caught:
        family.read_config({**family.write_config(config), **changes})
    assert {problem.where for problem in caught.value.problems} == wrong


OFF = {
    **{
        "chunk_size_feed_forward": 0,
        "use_mrope": False,
        "torchscript": False,
        "problem_type": None,
    },
    # What other tools leave behind in a config.json.
    **{
        "rope_interleaved": False,
        "is_llama_config": True,
        "unsloth_fixed": True,
        "_num_labels": 1,
        "max_length": 4096,
    },
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_off_is_no_feature(name):
    """Fields that say that something is not there, and what is so anyway, change nothing."""
    family, config = FAMILIES[name]
    more = OFF if name == "vit" else {**OFF, "is_causal": True}
    assert resolved(family.read_config({**family.write_config(config), **more})) == resolved(config)


@pytest.mark.parametrize(
    ("family", "config", "absent"),
    [
        (mistral.FAMILY, mistral.PRESETS["test"], 4096),
        (mixtral.FAMILY, mixtral.PRESETS["test"], 0),
    ],
    ids=["mistral", "mixtral"],
)
def test_no_window_and_a_window_that_is_not_said_differ(family, config, absent):
    """Null means none; what an absent field means, each family has for itself."""
    values = {
        name: v for name, v in family.write_config(config).items() if name != "sliding_window"
    }
    assert family.read_config(values).window == absent
    assert family.read_config({**values, "sliding_window": None}).window == 0
    assert family.read_config({**values, "sliding_window": 7}).window == 7


def test_positions_may_be_said_twice():
    """In both forms, where they say the same."""
    values = llama.FAMILY.write_config(SCALED)
    both = {**values, "rope_parameters": {**ROPE, "rope_theta": values["rope_theta"]}}
    assert resolved(llama.FAMILY.read_config(both)) == resolved(SCALED)
