"""What goes along with a model, from a Hugging Face folder through runs and back, and what is not mixed on the way."""

import dataclasses
import json
import types

import pytest

from spmd.commands.export_hf import _values
from spmd.data.loader import DataConfig
from spmd.data.tokenizer import TOKENIZER
from spmd.errors import CheckpointError
from spmd.hf.family import family_for
from spmd.hf.save import save_params
from spmd.hf.sidecar_files import ORIGINAL, sidecar_files, tokenizer_problems
from spmd.models.gpt2 import PRESETS as GPT2_PRESETS
from spmd.run.load_config import load_config
from spmd.run.run_dir import RunDir
from spmd.training.state import init_state
from tests import tiny
from tests.command_line import run, write_config
from tests.tiers import soak_but
from tests.unit.test_tokenizer import begin_with, bpe


def of(config):
    """What a run's config says of the tokenizer and the model."""
    return config.data.tokenizer, config.model


def published(folder, config):
    """A Hugging Face folder of a Llama, without a tokenizer."""
    save_params(folder, init_state(tiny.plan(config)).params, family_for(config), config)
    return folder


@pytest.mark.parametrize("vocab", [pytest.param(64, marks=pytest.mark.soak), 300])
@pytest.mark.soak
def test_text_of_an_import_without_a_tokenizer(vocab, tmp_path, capsys):
    """Bytes cannot be read by a model of 64 tokens, which is said; one of 300 writes tokens that are no text."""
    out = tmp_path / "run"
    assert (
        run(
            "import",
            published(tmp_path / "hf", tiny.replaced(vocab=vocab)),
            "--out",
            out,
            "--devices",
            "8",
        )
        == 0
    )
    capsys.readouterr()
    if vocab < 256:
        assert run("generate", out, "--prompt", "the", "--seed", "-1") == 2
        error = capsys.readouterr().err
        for part in (
            "data.tokenizer: bytes has more tokens than the model",
            "256 > model.vocab = 64",
            "seed: is -1",
        ):
            assert part in error
    else:
        assert (
            run(
                "generate",
                out,
                "--prompt",
                "the",
                "--tokens",
                "60",
                "--temperature",
                "1",
                "--top-k",
                "0",
            )
            == 0
        )
        assert "\ufffd" in capsys.readouterr().out


@pytest.fixture
def config(tmp_path):
    """A tiny Llama's config whose tokenizer lies in a folder with the files of another imported Llama."""
    (tmp_path / "imported").mkdir()
    (tmp_path / "run").mkdir()
    tokenizer = bpe(tmp_path / "imported" / TOKENIZER)
    values = {"architectures": ["LlamaForCausalLM"], "use_cache": False}
    (tmp_path / "imported" / ORIGINAL).write_text(json.dumps(values))
    (tmp_path / "imported" / "chat_template.jinja").write_text("")
    return dataclasses.replace(
        load_config(str(write_config(tmp_path))), data=DataConfig(tokenizer=str(tokenizer))
    )


def test_the_files_beside_a_tokenizer_go_along(config, tmp_path):
    """With the values of the model that it belongs to, where the run's is of that family; else without them."""
    files, values = sidecar_files(tmp_path / "run", *of(config))
    assert set(files) == {TOKENIZER, "chat_template.jinja"}
    assert values["use_cache"] is False
    other = dataclasses.replace(
        config, model=dataclasses.replace(GPT2_PRESETS["test"], positions=256)
    )
    assert sidecar_files(tmp_path / "run", *of(other)) == (files, {})
    (tmp_path / "run" / ORIGINAL).write_text(
        '{"architectures": ["GPT2LMHeadModel"], "use_cache": true}'
    )
    assert sidecar_files(tmp_path / "run", *of(other))[1]["use_cache"] is True
    assert sidecar_files(tmp_path / "run", *of(config))[1] == values


def test_a_tokenizer_of_another_name_goes_along(config, tmp_path):
    """As tokenizer.json, and alone: what is beside it is not about it."""
    path = (tmp_path / "imported" / TOKENIZER).rename(tmp_path / "words.json")
    config = dataclasses.replace(config, data=DataConfig(tokenizer=str(path)))
    assert sidecar_files(tmp_path / "run", *of(config)) == ({TOKENIZER: path}, {})


def test_a_tokenizer_that_is_missing_is_said(config, tmp_path):
    """With all else that is wrong."""
    path = tmp_path / "imported" / TOKENIZER
    path.unlink()
    (tmp_path / "imported" / ORIGINAL).write_text("[]")
    with pytest.raises(CheckpointError) as caught:
        sidecar_files(tmp_path / "run", *of(config))
    assert "not a JSON object" in str(caught.value)
    assert f"data.tokenizer: {path} is missing" in str(caught.value)


def test_an_imported_run_that_was_moved_has_its_tokenizer_with_it(config, tmp_path):
    """Unlike one whose tokenizer lies elsewhere: that is named as it was, and missed where it is needed."""
    before, after = RunDir(tmp_path / "imported"), RunDir(tmp_path / "moved")
    before.describe(config, tmp_path / "tiny.py", "")
    assert before.config() == config
    before.path.rename(after.path)
    assert after.config().data.tokenizer == str(after.path / TOKENIZER)
    assert sidecar_files(after.path, *of(after.config()))[0][TOKENIZER] == after.path / TOKENIZER
    (after.path / TOKENIZER).unlink()
    assert after.config() == config


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", ORIGINAL])
def test_no_file_beside_a_tokenizer_is_read_through_a_link_that_leads_out(name, tmp_path):
    """Not even to say what is wrong with it."""
    (tmp_path / "hf").mkdir()
    bpe(tmp_path / "hf" / TOKENIZER)
    (tmp_path / "secret").write_text('{"eos_token_id": "secret"}')
    (tmp_path / "hf" / name).symlink_to(tmp_path / "secret")
    where = [problem.where for problem in tokenizer_problems(tmp_path / "hf", 300)]
    # the model's own is named where it is read
    assert where == ([] if name == "config.json" else [name])


@pytest.mark.parametrize("start", soak_but(("hf", "imported")))
def test_a_run_keeps_what_its_start_had(start, tmp_path):
    """Tuned from a folder or its import, a run gives back its config.json's values, after the start is gone, too."""
    path = write_config(tmp_path)
    folder = published(tmp_path / "hf", load_config(str(path)).model)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "initializer_range": 0.125}))
    (folder / "generation_config.json").write_text("{}")
    assert run("import", folder, "--out", tmp_path / "imported", "--devices", 8) == 0
    tuned = tmp_path / "tuned"
    assert (
        run("train", path, "--init", tmp_path / start, "--out", tuned, "--steps", 1, "--devices", 8)
        == 0
    )
    (tmp_path / start).rename(tmp_path / "gone")
    assert run("export", tuned, "--out", tmp_path / "back") == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["initializer_range"] == 0.125
    assert (tmp_path / "back" / "generation_config.json").read_text() == "{}"


@pytest.mark.soak
@pytest.mark.parametrize("words", [False, True], ids=["bytes", "bpe"])
def test_what_was_trained_here_says_how_it_ends(words, tmp_path):
    """Without it, `transformers` makes up the tokens that begin and end a text, and how long one may be."""
    config, flags, (bos, eos) = write_config(tmp_path), [], (None, 0)
    if words:
        path = bpe(tmp_path / TOKENIZER, special=("<|endoftext|>", "<s>", "<|im_end|>"))
        begin_with(path, ("<s>", 1))
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
        flags, bos, eos = ["--data.tokenizer", path, "--model.vocab", 300], 1, [0, 2]
    assert (
        run("train", config, "--out", tmp_path / "run", *flags, "--steps", 1, "--devices", 8) == 0
    )
    assert run("export", tmp_path / "run", "--out", tmp_path / "hf") == 0
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {
        "bos_token_id": bos,
        "eos_token_id": eos,
        "max_position_embeddings": 16,
    }.items() <= values.items()


def test_positions_that_are_learned_say_how_long_a_text_may_be():
    """GPT-2 has as many as it has; only rotary positions need a word."""
    model = GPT2_PRESETS["test"]
    config = types.SimpleNamespace(model=model, data=DataConfig(sequence=8))
    values = _values(config, family_for(model))
    assert values == {"bos_token_id": None, "eos_token_id": 0}
