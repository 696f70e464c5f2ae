"""Weights of messages are those of their tokens' losses, in training and in evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chats import CHATML
from tests.command_line import run
from tests.train_runs import write_tiny

CHATS = 40


def write_chats(path: Path, weight: float) -> Path:
    lines = []
    for number in range(CHATS):
        asked = {"role": "user", "content": f"a {number}"}
        said = {"role": "assistant", "content": "b " * (number % 5 + 1), "weight": weight}
        lines.append(json.dumps({"messages": [asked, said]}))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.soak
def test_equal_weights_change_no_mean(tmp_path: Path, capsys: Any) -> None:
    """Losses of training and evaluation and bits of a byte are those without weights; the sum of weights is not."""
    path = write_tiny(tmp_path)
    (tmp_path / "chat.jinja").write_text(CHATML)
    found = {}
    for weight in (1, 0.5):
        folder = tmp_path / str(weight)
        folder.mkdir()
        chats = write_chats(folder / "chats.jsonl", weight)  # its name decides what is held out
        out = tmp_path / f"run-{weight}"
        given = ["--task", "sft", "--data.source", chats, "--data.sequence", 96]
        given += ["--chat.template", tmp_path / "chat.jinja", "--steps", 3]
        assert run("train", path, *given, "--out", out) == 0
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        losses = [line["loss"] for line in lines if "loss" in line]
        capsys.readouterr()
        assert run("eval", out, "--json", "--data", f"own={chats}") == 0
        (own,) = map(json.loads, capsys.readouterr().out.splitlines())
        found[weight] = losses, own
    (plain, evaluated), (weighted, of_half) = found[1], found[0.5]
    assert weighted == pytest.approx(plain, rel=1e-6)
    for name in ("loss", "bits_per_byte", "accuracy", "perplexity"):
        assert of_half[name] == pytest.approx(evaluated[name], rel=1e-5)
    assert of_half["tokens"] == evaluated["tokens"] / 2
    assert of_half["bytes"] == evaluated["bytes"] / 2
