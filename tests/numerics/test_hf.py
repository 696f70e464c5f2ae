"""A Hugging Face folder becomes a run folder and goes back; one that cannot is one error, and nothing is written."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from spmd.errors import CheckpointError
from spmd.hf import load
from spmd.hf.family import Ignored, TensorMapping, TensorSource, family_for
from spmd.hf.layout import TRANSPOSED, part
from spmd.hf.load import load_params
from spmd.hf.safetensors import write_safetensors
from spmd.hf.save import save_params
from spmd.hf.stored_bytes import LocalBytes
from spmd.models.gpt2 import PRESETS as GPT2_PRESETS
from spmd.models.vit import PRESETS as VIT_PRESETS
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.run.load_config import load_config
from spmd.run.load_params import read_params
from spmd.run.run_dir import RunDir
from spmd.training.state import init_state
from tests import tiny
from tests.command_line import run

LAYERS = 4
CONFIG = tiny.replaced(layers=LAYERS)
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1, "b": 2}, "unk_token": "</s>"},
}


@pytest.fixture(scope="module")
def params():
    """Parameters of which no two are alike."""
    return init_state(tiny.plan(CONFIG), seed=3).params


@pytest.fixture(scope="module")
def original(params, tmp_path_factory):
    """A folder of them, in several files, with a tokenizer."""
    folder = tmp_path_factory.mktemp("hf") / "original"
    save_params(folder, params, family_for(CONFIG), CONFIG, shard_size=30_000)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def folder(original, tmp_path):
    """A copy, to be spoilt."""
    return Path(shutil.copytree(original, tmp_path / "folder"))


def equal(ours, theirs):
    """Whether two trees have the same bits."""
    return all(
        np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True)
    )


def tensors(folder):
    """Every tensor of a folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def rewrite(folder, change, **metadata):
    """The folder with other tensors, in one file."""
    table = change(tensors(folder))
    for path in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        path.unlink(missing_ok=True)
    kinds = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in table.items()}
    write_safetensors(
        folder / "model.safetensors", kinds, iter(table.values()), {"format": "pt", **metadata}
    )


def edit(path, **fields):
    """A JSON file with other fields; None takes one away."""
    values = {**json.loads(path.read_text()), **fields}
    path.write_text(
        json.dumps({name: value for name, value in values.items() if value is not None})
    )


MESHES = [{}, {"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}, {"pipe": 2}]


@pytest.mark.parametrize("at_once", [LocalBytes.at_once, 1000, 1])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_shards_are_read_where_they_belong(sizes, at_once, original, params, monkeypatch):
    """On every mesh, and however few rows are read at once, the parameters are the ones that were written."""
    monkeypatch.setattr(LocalBytes, "at_once", at_once)
    abstract = tiny.plan(CONFIG, **sizes).abstract_params
    loaded = load_params(original, abstract)
    assert jax.tree.all(jax.tree.map(lambda x, leaf: x.sharding == leaf.sharding, loaded, abstract))
    assert equal(loaded, params)


def test_a_tensor_is_the_transpose_of_a_layer(original, params):
    """A control of the round trip: what the files hold is PyTorch's layout, not ours."""
    kernel = np.asarray(params["layers"]["attention"]["k_proj"]["kernel"])
    found = tensors(original)
    for layer in range(LAYERS):
        np.testing.assert_array_equal(
            found[f"model.layers.{layer}.self_attn.k_proj.weight"], kernel[layer].T
        )


@pytest.mark.parametrize("sizes", MESHES[:2], ids=str)
def test_shards_of_accelerators_are_written_in_place(sizes, original, params, monkeypatch):
    """What is done for devices with memory of their own gives the same bits."""
    monkeypatch.setattr(load, "_HostShards", load._DeviceShards)
    monkeypatch.setattr(LocalBytes, "at_once", 3000)
    assert equal(load_params(original, tiny.plan(CONFIG, **sizes).abstract_params), params)


def test_layers_that_are_not_stacked_go_by_the_same_lines(original, params):
    """`layers/1/…` is what lies at 1 in the stack."""
    config = dataclasses.replace(CONFIG, stacked=False)
    loaded = load_params(original, tiny.plan(config, fsdp=2).abstract_params)
    for layer, own in loaded["layers"].items():
        assert equal(own, jax.tree.map(lambda x: x[int(layer)], params["layers"]))  # noqa: B023


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float64, "mixed"])
def test_other_floats_are_cast(dtype, folder, params):
    """16 and 64 bits in the files, and several dtypes in one stack, are the plan's dtype in the end."""
    kinds = [np.float32, jnp.bfloat16, np.float64] if dtype == "mixed" else [dtype]
    rewrite(
        folder,
        lambda t: {name: a.astype(kinds[i % len(kinds)]) for i, (name, a) in enumerate(t.items())},
    )
    loaded = load_params(folder, tiny.plan(CONFIG, fsdp=2, tensor=2).abstract_params)
    for ours, theirs in zip(*map(jax.tree.leaves, (loaded, params)), strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=2**-8, atol=1e-6)


@pytest.mark.soak
def test_parts_of_a_tensor_are_parameters(tmp_path):
    """GPT-2's queries, keys and values are in one tensor, side by side, kernels and biases alike."""
    config = GPT2_PRESETS["test"]
    family = family_for(config)
    mesh = tiny.mesh(fsdp=2, tensor=2)
    plan = make_plan(mesh, family.rules(config), from_nnx(config.build), tiny.OPTIMIZER)
    start = jax.tree.map(
        lambda x: x + 0.01 * jnp.arange(x.size).reshape(x.shape), init_state(plan).params
    )
    save_params(tmp_path / "out", start, family, config)
    found, attention = tensors(tmp_path / "out"), start["layers"]["attention"]
    for ours, theirs in (("kernel", "weight"), ("bias", "bias")):
        joined = np.concatenate(
            [np.asarray(attention[f"{x}_proj"][ours][1]) for x in "qkv"], axis=-1
        )
        np.testing.assert_array_equal(found[f"transformer.h.1.attn.c_attn.{theirs}"], joined)
    assert equal(load_params(tmp_path / "out", plan.abstract_params), start)
    command = ("import", tmp_path / "out", "--out", tmp_path / "run", "--devices", 8)
    assert run(*command, "--sequence", 49) == 2
    assert run(*command) == 0
    assert load_config(str(tmp_path / "run" / "config.py")).data.sequence == 48, (
        "as many as there are positions"
    )


def test_a_stack_may_be_every_other_layer():
    """Numbers of tensors step, and parts of a turned tensor lie along its rows."""
    source = TensorSource(
        "local/w",
        (2, 4, 6),
        TensorMapping("local/w", "h.{layer}.w", part(1, 3, layout=TRANSPOSED), first=1, step=2),
    )
    assert [name for _, name in source.tensors()] == ["h.1.w", "h.3.w"]
    assert source.tensor_shape == (18, 4)
    assert source.region((slice(0, 2), slice(2, 5))) == (slice(8, 11), slice(0, 2))


@pytest.mark.soak
def test_a_run_folder_and_back(original, params, tmp_path, capsys):
    """`import` makes a run that can be read and generated from; `export` gives back every tensor and file."""
    out = tmp_path / "run"
    flags = ("--mesh.fsdp", "2", "--mesh.tensor", "2", "--mesh.data", "2", "--devices", "8")
    assert run("import", original, "--out", out, *flags) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    config = RunDir(out).config()
    assert config == load_config(str(out / "config.py"))
    assert config.model == CONFIG
    assert config.data.tokenizer == str(out / "tokenizer.json")
    assert (config.mesh.fsdp, config.mesh.tensor, config.data.sequence) == (2, 2, 2048)
    assert equal(read_params(out, tiny.plan(CONFIG, fsdp=8).abstract_params), params)
    assert run("generate", out, "--prompt", "a", "--tokens", "2") == 0
    assert run("export", out, "--out", tmp_path / "back", "--shard-size", "30KB") == 0
    before, after = tensors(original), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    index = "model.safetensors.index.json"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", index):
        assert (original / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    assert run("export", out, "--out", tmp_path / "narrow", "--dtype", "bf16") == 0
    assert {a.dtype for a in tensors(tmp_path / "narrow").values()} == {np.dtype(jnp.bfloat16)}
    assert (
        json.loads((tmp_path / "narrow" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    )
    assert run("train", out / "config.py", "--out", out, "--resume", "always") == 2
    assert "--init" in capsys.readouterr().err


def test_what_changes_nothing_is_given_back(folder, tmp_path):
    """Fields of config.json that the model does not have come back as they were; the shape is the model's own."""
    edit(folder / "config.json", max_position_embeddings=99, bos_token_id=7, use_cache=True)
    assert run("import", folder, "--out", tmp_path / "run", "--devices", "8") == 0
    assert run("export", tmp_path / "run", "--out", tmp_path / "back") == 0
    values = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (values["max_position_embeddings"], values["bos_token_id"], values["use_cache"]) == (
        99,
        7,
        True,
    )
    assert values["hidden_size"] == CONFIG.d_model
    assert RunDir(tmp_path / "run").config().data.sequence == 99


def drop(name):
    return lambda folder: rewrite(folder, lambda t: {key: a for key, a in t.items() if key != name})


def put(name, array):
    return lambda folder: rewrite(folder, lambda t: {**t, name: array})


def cut(folder):
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-7])


def lead_out(folder):
    path = min(folder.glob("*.safetensors"))
    path.rename(folder.parent / "elsewhere.safetensors")
    path.symlink_to("../elsewhere.safetensors")


def only_pickles(folder):
    for path in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def index(**files):
    return lambda folder: edit(
        folder / "model.safetensors.index.json",
        weight_map={
            **json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"],
            **files,
        },
    )


def config(**fields):
    return lambda folder: edit(folder / "config.json", **fields)


def tokenizer(words):
    vocab = {"</s>": 0, **{f"word{i}": i + 1 for i in range(words)}}
    return lambda folder: edit(
        folder / "tokenizer.json", model={**TOKENIZER["model"], "vocab": vocab}
    )


def other_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\n\x0e")


Q = "model.layers.1.self_attn.q_proj.weight"
BAD = {
    "missing": (drop(Q), f"{Q}: is missing"),
    "extra": (
        put("model.layers.1.self_attn.q_proj.bias", np.ones(32, np.float32)),
        "q_proj.bias: is extra",
    ),
    "renamed": (
        lambda folder: rewrite(
            folder, lambda t: {k.replace("q_proj", "query"): a for k, a in t.items()}
        ),
        "was it",
    ),
    "another shape": (put(Q, np.ones((32, 31), np.float32)), "it is [32, 31], expected [32, 32]"),
    "integers": (put(Q, np.ones((32, 32), np.int8)), "it is int8"),
    "truncated": (cut, "file not fully covered"),
    "an index that leads out": (index(extra="../elsewhere.safetensors"), "is a path"),
    "an index of a file that is not there": (
        index(extra="none.safetensors"),
        "none.safetensors: cannot be read",
    ),
    "an index that is wrong": (
        index(extra="model-00001-of-00006.safetensors"),
        "extra: is not in model-00001",
    ),
    "an index that has it elsewhere": (
        index(**{Q: "model-00001-of-00006.safetensors"}),
        f"{Q}: is in model-00004",
    ),
    "an index of pickles": (index(extra="pytorch_model.bin"), "is not a safetensors file"),
    "a link that leads out": (lead_out, "leaves the folder"),
    "pickles": (only_pickles, "pytorch_model.bin: is a pickle"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: is missing"),
    "no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        "config.json: cannot be read",
    ),
    "an unknown architecture": (
        config(architectures=["LlamaForCausalLN"]),
        'did you mean "LlamaForCausalLM"?',
    ),
    "a family that no name is near": (
        config(architectures=["XGLMForCausalLM"]),
        "fix: a family for it",
    ),
    "no architecture": (config(architectures=None), "names no architecture"),
    "a feature": (
        config(quantization_config={"bits": 4}),
        "quantization_config.quant_method: is missing",
    ),
    "an activation": (
        config(hidden_act="gelu"),
        "hidden_act: is 'gelu', and this model supports only silu",
    ),
    "a scaling": (config(rope_scaling={"rope_type": "yarm"}), "rope_scaling: is of type 'yarm'"),
    "no width": (config(hidden_size=None), "hidden_size: is missing"),
    "a word for a number": (config(num_hidden_layers="two"), "num_hidden_layers: is 'two'"),
    "too many tokens": (tokenizer(64), "65 tokens > 64 rows of the embedding"),
    "no tokenizer of ours": (
        other_tokenizer,
        "tokenizer.model: is an unsupported tokenizer format",
    ),
    "a tokenizer that is none": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "is not a tokenizer.json",
    ),
}


@pytest.mark.parametrize("spoil", BAD)
def test_what_is_wrong_with_a_folder_is_said(spoil, folder, tmp_path, capsys):
    """An error that names it, exit code 2, and nothing written."""
    change, complaint = BAD[spoil]
    change(folder)
    assert run("import", folder, "--out", tmp_path / "run", "--devices", "8") == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("run")) == []


def test_everything_that_is_wrong_is_said_at_once(folder, tmp_path, capsys):
    """Tensors, the tokenizer and the folder to be written, in one error."""
    drop(Q)(folder)
    put("lm_head.weight", np.ones((1, 1), np.float32))(folder)
    tokenizer(99)(folder)
    (tmp_path / "run").mkdir()
    assert run("import", folder, "--out", tmp_path / "run", "--devices", "8") == 2
    error = capsys.readouterr().err
    for complaint in (
        f"{Q}: is missing",
        "lm_head.weight: has the wrong shape",
        "100 tokens",
        "run: exists",
    ):
        assert complaint in error
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, jnp.bfloat16], ids=["float32", "float16", "bfloat16"]
)
@pytest.mark.parametrize("value", [np.nan, -np.inf], ids=str)
def test_values_that_are_not_finite_are_named(value, dtype, folder, tmp_path, capsys):
    """One bad value in one layer of a stack names parameter and tensor; the largest finite value is none."""
    name, largest = "model.layers.1.mlp.up_proj.weight", jnp.finfo(dtype).max

    def spoil(table):
        table = {name: a.astype(dtype) for name, a in table.items()}
        table["model.norm.weight"][0] = largest
        table[name][5, 7] = value
        return table

    rewrite(folder, spoil)
    assert run("import", folder, "--out", tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert "layers/mlp/up_proj/kernel: has values that are NaN or infinite" in said
    assert f"in the tensor {name}" in said
    assert said.count("NaN") == 1
    assert not (tmp_path / "run").exists()


def test_what_is_no_folder_is_said(tmp_path, capsys):
    """The name of a model on the hub is not fetched."""
    assert run("import", "meta-llama/Llama-3", "--out", tmp_path / "run") == 2
    assert "nothing is downloaded" in capsys.readouterr().err


def test_what_is_no_language_model_is_refused(tmp_path, capsys):
    """A run folder is that of a language model; nothing is written for another."""
    config = VIT_PRESETS["test"]
    save_params(
        tmp_path / "vit",
        from_nnx(config.build).init(jax.random.key(0)),
        family_for(config),
        config,
    )
    assert run("import", tmp_path / "vit", "--out", tmp_path / "run", "--devices", "8") == 2
    error = capsys.readouterr().err
    assert "ViTConfig has no vocab: TrainConfig is for language models" in error
    assert not (tmp_path / "run").exists()


def test_a_snapshot_of_the_hub_is_read(original, params, tmp_path):
    """Its files are links to the cache's blobs, and they alone are followed."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(original.iterdir()):
        shutil.copyfile(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert equal(load_params(snapshot, tiny.plan(CONFIG).abstract_params), params)


def test_a_shared_tensor_is_read_under_the_name_that_its_file_gives(folder, params):
    """The metadata of a file name a tensor that it has once; without them the name is missing."""
    abstract, name = tiny.plan(CONFIG, fsdp=2).abstract_params, "model.embed_tokens.weight"
    rewrite(
        folder,
        lambda table: {k: x for k, x in table.items() if k != name},
        **{name: "lm_head.weight"},
    )
    loaded = load_params(folder, abstract)
    np.testing.assert_array_equal(loaded["embed"]["embedding"], params["lm_head"]["kernel"].T)
    rewrite(folder, lambda table: table)
    with pytest.raises(CheckpointError, match=f"{name}: is missing"):
        load_params(folder, abstract)


def test_known_extras_are_named(folder, params):
    """A buffer that follows from the shape is left alone; the table says why."""
    put("model.layers.0.self_attn.rotary_emb.inv_freq", np.ones(4, np.float32))(folder)
    assert equal(load_params(folder, tiny.plan(CONFIG).abstract_params), params)
    line = Ignored("h.{layer}.attn.bias", "is a mask")
    assert (
        line.covers("h.12.attn.bias"),
        line.covers("h.x.attn.bias"),
        line.covers("h.1.attnxbias"),
    ) == (1, 0, 0)


def test_an_export_that_fails_leaves_nothing(params, tmp_path, monkeypatch):
    """Neither the folder nor what it is called while it is written."""
    monkeypatch.setattr(
        "spmd.hf.save.write_json", lambda *_: (_ for _ in ()).throw(OSError("disk"))
    )
    with pytest.raises(CheckpointError, match="disk"):
        save_params(tmp_path / "out", params, family_for(CONFIG), CONFIG)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Not a directory"):
        save_params(tmp_path / "file" / "out", params, family_for(CONFIG), CONFIG)
    (tmp_path / "out.unfinished").mkdir()
    with pytest.raises(
        CheckpointError, match="another process writes it, or an interrupted one left it"
    ):
        save_params(tmp_path / "out", params, family_for(CONFIG), CONFIG)
    assert (tmp_path / "out.unfinished").is_dir()
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        save_params(tmp_path / "out", params, family_for(CONFIG), CONFIG)


def test_a_rename_is_offered_where_it_would_help(folder, params):
    """A name of the same layer and shape, as many missing as extra; else there is no remedy."""
    abstract = tiny.plan(CONFIG).abstract_params
    name, other = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.query.weight"
    rewrite(folder, lambda t: {other if key == name else key: a for key, a in t.items()})
    hint = f'fix: there is "{other}" of the same shape: was it renamed?'
    with pytest.raises(CheckpointError, match=re.escape(hint)):
        load_params(folder, abstract)
    for change in (
        lambda t: {key: a[:-1] if key == other else a for key, a in t.items()},
        lambda t: {**t, other.replace("query", "query2"): t[other]},
        lambda t: {
            key.replace("1.self_attn.query", "9.self_attn.query"): a for key, a in t.items()
        },
    ):
        copy = Path(shutil.copytree(folder, folder.parent / "copy", dirs_exist_ok=True))
        rewrite(copy, change)
        with pytest.raises(CheckpointError) as caught:
            load_params(copy, abstract)
        assert "was it renamed" not in str(caught.value)


def test_a_tensor_is_no_flag(folder, tmp_path, capsys):
    """`model.norm.weight` is not offered as `--model.norm.weight`."""
    drop("model.norm.weight")(folder)
    assert run("import", folder, "--out", tmp_path / "run", "--devices", "8") == 2
    error = capsys.readouterr().err
    assert "tensor model.norm.weight: is missing" in error
    assert "--model" not in error


def test_a_long_list_of_a_config_loses_whole_items(folder, tmp_path, capsys):
    """No word is cut; the number of the others is said."""
    edit(folder / "config.json", layer_kinds=["full_attention", "sliding_attention"] * 24)
    assert run("import", folder, "--out", tmp_path / "run", "--devices", "8") == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "'full_attention', 'sliding_attention', … 44 more]" in error
