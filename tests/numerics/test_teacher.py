"""A run beside a teacher: its parameters, its tokens, the same ones after a restart."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import spmd
from spmd import tree
from spmd.data.tokenizer import ByteTokenizer, load_tokenizer, token_difference
from spmd.diloco.config import DiLoCoConfig
from spmd.errors import ConfigError
from spmd.gradients.distillation_loss import TEACHER
from spmd.partition_rules.llama import LLAMA
from spmd.run.build import evaluation_config, make_setup
from spmd.run.load_config import load_config
from spmd.run.load_params import read_params
from spmd.run.teacher import open_teacher
from spmd.sharding.batch import WholeArrays
from spmd.storage.address import locate
from tests import tiny
from tests.chats import words
from tests.command_line import run
from tests.train_runs import write_tiny

GIVEN = ("--distillation.weight", 0.7, "--distillation.temperature", 2)
LARGER = ("--model.d-model", 64, "--model.heads", 8, "--model.kv-heads", 4)

MORE_WORDS = """
model = dataclasses.replace(config.model, vocab=320)
config = dataclasses.replace(config, model=model)
"""


def config(**fields: Any) -> spmd.TrainConfig[Any]:
    model = tiny.replaced(vocab=256)
    return spmd.TrainConfig(model=model, rules=LLAMA, mesh=spmd.MeshShape(data=2), **fields)


def test_what_a_teacher_does_not_go_with() -> None:
    """All at once; settings without a teacher are an error, too."""
    with pytest.raises(ConfigError) as raised:
        config(
            teacher="big",
            task="dpo",
            logit_z_loss=0.1,
            diloco=DiLoCoConfig(every=2),
        )
    where = {problem.where for problem in raised.value.problems if "teacher" in problem.what}
    assert where == {"task", "logit_z_loss", "diloco.every"}
    with pytest.raises(ConfigError, match="stages are of one model"):
        dataclasses.replace(config(), teacher="big", mesh=spmd.MeshShape(pipe=2))
    with pytest.raises(ConfigError, match="there is no teacher"):
        config(distillation=spmd.DistillationConfig(weight=0.2))
    with pytest.raises(ConfigError, match=r"distillation\.temperature"):
        spmd.DistillationConfig(temperature=0.0)
    beside = config(teacher="big", distillation=spmd.DistillationConfig(weight=0.2))
    assert evaluation_config(beside) == config()


@pytest.mark.soak
def test_a_run_is_taught_by_another_run(tmp_path: Path, capsys: Any) -> None:
    """Sharded by a plan of its own; resumed with the same parameters or not at all."""
    path = write_tiny(tmp_path, MORE_WORDS)
    constant = ["--optimizer.schedule", "constant"]
    capsys.readouterr()
    run("train", path, *LARGER, "--out", tmp_path / "big", "--steps", 6)
    taught = ["--teacher", tmp_path / "big", *GIVEN, *constant]
    assert run("train", path, *taught, "--out", tmp_path / "whole", "--steps", 8) == 0
    assert "frozen parameters" in capsys.readouterr().out
    assert run("train", path, *taught, "--out", tmp_path / "parts", "--steps", 5) == 0
    resumed = ["--out", tmp_path / "parts", "--steps", 8, "--resume", "always"]
    assert run("train", path, *taught, *resumed) == 0
    lines = {}
    for name in ("whole", "parts"):
        text = (tmp_path / name / "metrics.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        lines[name] = [row["divergence"] for row in rows if "divergence" in row]
    assert lines["whole"][-1] < lines["whole"][0]
    assert lines["parts"] == lines["whole"]

    setup = make_setup(
        dataclasses.replace(load_config(str(path)), teacher=str(tmp_path / "big")),
        tiny.mesh(fsdp=2),
    )
    teacher = open_teacher(setup)
    assert teacher is not None
    assert isinstance(setup.batch[TEACHER], WholeArrays)
    held = tree.flatten(teacher.arrays.value)
    assert any("fsdp" in str(x.sharding.spec) for x in held.values())
    own = tree.flatten(read_params(locate(str(tmp_path / "big")), teacher.plan.abstract_params))
    for name, x in held.items():
        np.testing.assert_array_equal(jax.device_get(x), jax.device_get(own[name]))

    capsys.readouterr()
    words().save(str(tmp_path / "tokenizer.json"))
    other = ["--data.tokenizer", tmp_path / "tokenizer.json"]
    assert run("train", path, *taught, *other, "--out", tmp_path / "x") == 2
    assert "knows other tokens" in capsys.readouterr().err
    padded = ["--model.vocab", 384, "--out", tmp_path / "padded", "--steps", 2]
    assert run("train", path, *taught, *padded) == 0
    assert "heads of 320 and 384 outputs, compared in 320" in capsys.readouterr().out
    more = ["--out", tmp_path / "big", "--steps", 7, "--resume", "always"]
    assert run("train", path, *LARGER, *more) == 0
    capsys.readouterr()
    assert run("train", path, *taught, *resumed, "--steps", 9) == 2
    said = capsys.readouterr().err
    assert "teacher: is not that with which the run was started" in said
    assert "data.source" not in said


def test_tokens_are_compared_by_name(tmp_path: Path) -> None:
    """Another tokenizer is described by its first token that differs."""
    words().save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert found.tokens()["</s>"] == found.eos
    assert token_difference(found, load_tokenizer(str(tmp_path / "tokenizer.json"))) == ""
    assert "'<0x00>' is token 0 of the one" in token_difference(ByteTokenizer(), found)
