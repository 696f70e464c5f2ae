"""What a stranger's folder says is believed only where it is so: nothing is lost in silence, and nothing is a bomb."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from spmd.errors import CheckpointError, ConfigError, Problem, SpmdError
from spmd.hf.family import family_for
from spmd.hf.folder import open_folder
from spmd.hf.load import check_published
from spmd.hf.safetensors import write_safetensors
from spmd.hf.save import save_params
from spmd.hf.stored_bytes import LocalBytes
from spmd.models import gemma, gpt2, llama, mixtral, qwen, vit
from spmd.plan.nnx_model import from_nnx
from tests.command_line import run

EMBEDDING = "model.embed_tokens.weight"
TIED = {
    "llama": (dataclasses.replace(llama.PRESETS["test"], tied=True), EMBEDDING),
    "gemma": (gemma.PRESETS["test-gemma"], EMBEDDING),
    "gemma2": (gemma.PRESETS["test-gemma2"], EMBEDDING),
    "gpt2": (gpt2.PRESETS["test"], "transformer.wte.weight"),
    "gpt2 without a prefix": (gpt2.PRESETS["test"], "wte.weight"),
}


def initial(config):
    """Parameters of a shape."""
    return from_nnx(config.build).init(jax.random.key(0))


def write(folder, config, change=lambda tensors: tensors, **fields):
    """A folder of a shape, with other tensors and other fields."""
    save_params(folder, initial(config), family_for(config), config)
    path = folder / "model.safetensors"
    table = change(load_file(path))
    path.unlink()
    kinds = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in table.items()}
    write_safetensors(path, kinds, iter(table.values()), {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **fields}))
    return folder


def problems(folder, config):
    """What keeps a folder from being a model of that shape: where and what."""
    abstract = jax.eval_shape(lambda: initial(config))
    try:
        with open_folder(folder) as found:
            check_published(found, abstract)
    except CheckpointError as error:
        return error.problems
    return ()


def last_bit(head):
    """Another last element."""
    other = head.copy()
    other[-1, -1] += 1
    return other


HEADS = {
    "the same": (lambda head: head, None),
    "another last element": (last_bit, ""),
    "another shape": (lambda head: head[:-1], "[63, 32]"),
    "another dtype": (lambda head: head.astype(np.float16), "it is float16"),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", TIED)
def test_a_head_of_its_own_is_not_lost(name, head, tmp_path, monkeypatch):
    """Where config.json says that the head is the embedding, one that differs from it is refused."""
    monkeypatch.setattr(LocalBytes, "at_once", 2000)
    (config, embedding), (change, arithmetic) = TIED[name], HEADS[head]

    def changed(tensors):
        if "without" in name:
            tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        return {**tensors, "lm_head.weight": change(tensors[embedding])}

    found = problems(write(tmp_path / "a", config, changed), config)
    if arithmetic is None:
        assert found == ()
        return
    (problem,) = found
    assert problem.where == "tensor lm_head.weight"
    assert (
        problem.what == f"differs from {embedding}, and this model ties its head to the embedding"
    )
    assert arithmetic in problem.detail
    assert "tie_word_embeddings=false" in problem.fix


SHAPES = {
    **{name: config for name, (config, _) in TIED.items()},
    **{"mixtral": mixtral.PRESETS["test"], "vit": vit.PRESETS["test"]},
    **{name: qwen.PRESETS[f"test-{name}"] for name in ("qwen2", "qwen3")},
}
MORE = {
    "layer_types": [],
    "rope_parameters": {},
    "rope_scaling": {},
    "id2label": {},
    "head_dim": 1,
    "rope_theta": 1,
}
SCALING = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
SCALING["original_max_position_embeddings"] = 16
NUMBERS = [
    10**400,
    -(10**400),
    2**31 - 1,
    -1,
    0,
    0.5,
    float("nan"),
    float("inf"),
    -float("inf"),
    True,
]
VALUES = [
    *NUMBERS,
    None,
    5,
    "x",
    "\ud800",
    [],
    [5],
    [[]],
    {},
    {"rope_type": []},
    {"rope_theta": {}},
]


@pytest.mark.parametrize("name", SHAPES)
def test_no_value_of_a_field_is_a_traceback(name):
    """Any value of any field is read or refused, at once and in few words."""
    family = family_for(SHAPES[name])
    values = family.write_config(SHAPES[name])
    changes = [{field: value} for field in (*values, *MORE) for value in VALUES]
    changes += [
        {"rope_scaling": {**SCALING, field: value}} for field in SCALING for value in VALUES
    ]
    refused = 0
    for change in changes:
        try:
            family.read_config({**values, **change})
        except ConfigError as error:
            refused += 1
            assert len(str(error)) < 1500  # noqa: PT017
    assert refused > len(changes) / 3


WRONG = [
    ("llama", "rms_norm_eps", [10**400, float("nan"), float("inf"), -1e-6]),
    ("gpt2", "layer_norm_epsilon", [float("nan"), -1]),
    ("vit", "layer_norm_eps", [float("nan"), -1]),
    ("llama", "rope_theta", [0, -1.0, float("inf"), 10**400]),
    ("llama", "num_hidden_layers", [10**400, 2**31]),
    (
        "llama",
        "rope_scaling",
        [{**SCALING, "factor": float("inf")}, {**SCALING, "low_freq_factor": float("nan")}],
    ),
    ("qwen2", "layer_types", [5, ["full_attention"] * 3, ["full_attention", 5]]),
    ("gemma2", "layer_types", [5, ["sliding_attention", "full_attention"]]),
    ("gemma2", "attn_logit_softcapping", [float("nan"), float("inf"), 10**400]),
]


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [(n, f, v) for n, f, values in WRONG for v in values],
    ids="{!s:.30}".format,
)
def test_a_value_that_means_nothing_is_refused(name, field, value):
    """And what is wrong is that field alone."""
    family = family_for(SHAPES[name])
    with pytest.raises(ConfigError) as caught:
        family.read_config({**family.write_config(SHAPES[name]), field: value})
    assert {problem.where.split(".")[0] for problem in caught.value.problems} == {field}


BOMBS = {
    "llama": ({"num_hidden_layers": 1000}, "1000 layers"),
    "gemma2": ({"num_hidden_layers": 998}, "998 layers"),
    "gpt2": ({"n_layer": 1000}, "1000 layers"),
    "mixtral": ({"num_local_experts": 2**31 - 1}, "2 layers × 2147483647 experts"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_no_layer_and_no_expert_is_made_for_a_bomb(name, tmp_path):
    """What config.json counts is compared with the tensors that are there before anything of that size is made."""
    fields, arithmetic = BOMBS[name]
    folder = write(tmp_path / "a", SHAPES[name], **fields)
    (problem,) = problems(folder, SHAPES[name])
    assert problem.what == "has more layers and experts than the files have tensors"
    assert arithmetic in problem.detail


@pytest.mark.parametrize(("name", "field"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer")])
def test_more_layers_than_any_model_has_are_refused(name, field, tmp_path):
    """By config.json alone."""
    folder = write(tmp_path / "a", SHAPES[name], **{field: 2**31 - 1})
    (problem,) = problems(folder, SHAPES[name])
    assert problem.where == field
    assert problem.what == "is 2147483647, and at most 1000 are supported"


def test_an_error_has_no_more_problems_than_anyone_reads(tmp_path):
    """Of tensors that are extra, of headers that are wrong, and of an index that is."""
    config, one = TIED["llama"][0], np.ones(1, np.float32)
    folder = write(
        tmp_path / "a", config, lambda tensors: {**tensors, **{f"x{i}": one for i in range(1000)}}
    )
    found = problems(folder, config)
    assert (len(found), found[-1].where, found[-1].what) == (101, "…", "and 900 more")
    tensors = load_file(folder / "model.safetensors")
    index = {name: "b.safetensors" for name in tensors if not name.startswith("x")}
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert len(problems(folder, config)) == 101
    entry = {"dtype": "F8_E4M3", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"x{i}": entry for i in range(1000)}).encode()
    (folder / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert len(problems(folder, config)) == 101


@pytest.mark.parametrize(
    "name", ["a\0.safetensors", "\ud800.safetensors"], ids=["a zero byte", "half a character"]
)
def test_a_name_that_no_file_can_have_is_a_problem(name, tmp_path):
    """In the index of a folder."""
    config = TIED["llama"][0]
    folder = write(tmp_path / "a", config)
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    (problem,) = problems(folder, config)
    assert (problem.where, problem.what) == (name, "is not a valid file name")


OF_TRAINING = {
    "gpt2": {
        "attn_pdrop": 0.2,
        "embd_pdrop": 0.3,
        "resid_pdrop": 0.4,
        "reorder_and_upcast_attn": True,
    },
    "vit": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3, "encoder_stride": 4},
}


@pytest.mark.parametrize("name", OF_TRAINING)
def test_fields_of_training_come_back(name, tmp_path):
    """A family's own, which change nothing in a trained model; they are read, and what else it was is its shape's."""
    config, fields = SHAPES[name], OF_TRAINING[name]
    folder = write(tmp_path / "a", config, **fields, attention_dropout=0.5)
    with open_folder(folder) as found:
        values = {**found.values, "unheard_of": 5}
    save_params(tmp_path / "b", initial(config), family_for(config), config, values=values)
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert {field: written[field] for field in (*fields, "attention_dropout")} == {
        **fields,
        "attention_dropout": 0.5,
    }
    assert "unheard_of" not in written
    assert family_for(config).read_config(written) == family_for(config).read_config(found.values)


EVIL = "\x1b]0;owned\x07\x1b[2J\r\x9b\u202e\ud800"


@pytest.mark.parametrize("part", ["where", "what", "detail", "fix"])
def test_a_name_does_not_steer_a_terminal(part):
    """What is not printable is escaped in every part of a problem, and what is long is cut."""
    fields = {"where": "a", "what": "b", "detail": "c", "fix": "d"}
    text = str(SpmdError("title", [Problem(**{**fields, part: f"x{EVIL}y"})]))
    assert all(line.isprintable() for line in text.split("\n"))
    assert r"x\x1b]0;owned\x07\x1b[2J\r\x9b\u202e\ud800y" in text
    long = str(Problem(**{**fields, part: "x" * 10**6}))
    assert len(long) < 2100
    assert "x…" in long


def test_a_name_does_not_look_like_a_problem():
    """Lines of a part are further in than the parts are; a name has one line."""
    text = str(Problem("a\nb: is fine", "is bad\n    fix: rm -r", "1\n2", "none"))
    assert text.split("\n")[0] == r"a\nb: is fine: is bad"
    assert text.split("\n")[1:] == ["            fix: rm -r", "    1", "        2", "    fix: none"]


def test_a_stranger_s_names_are_printed_as_text(tmp_path, capsys):
    """Of tensors, of fields of config.json, and of architectures."""
    config, name = TIED["llama"][0], EVIL[:-1]
    evil = {"architectures": [name, "LlamaForCausalLM"], name: 5}
    folder = write(
        tmp_path / "a", config, lambda tensors: {**tensors, name: np.ones(1, np.float32)}, **evil
    )
    for fields in (evil, {"architectures": evil["architectures"], name: None}):
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, **fields}))
        assert run("import", folder, "--out", tmp_path / "run", "--devices", "8") == 2
        error = capsys.readouterr().err
        assert r"\x1b]0;owned" in error
        assert "\x1b" not in error
    clean = write(tmp_path / "b", config, architectures=evil["architectures"])
    assert run("import", clean, "--out", tmp_path / "run", "--devices", "8") == 0
    assert "\x1b" not in capsys.readouterr().out
