"""`spmd data show` prints what is trained of a conversation, token by token, and of a pair."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from spmd.data.chat import ChatTemplate
from spmd.data.chat_corpus import PAIRS
from spmd.data.examples import first_examples
from spmd.data.tokenizer import ByteTokenizer
from spmd.errors import DataError
from tests.command_line import run

SOURCE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TEMPLATE = ChatTemplate(SOURCE, "a template")
CHAT = {
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho", "weight": 0},
        {"role": "user", "content": "é?"},
        {"role": "assistant", "content": "yes 😀"},
    ]
}
PAIR = {"prompt": "hi", "chosen": "ho", "rejected": "no"}


def write(folder: Path, *rows: Any) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_pieces_are_the_text_and_what_is_trained_of_it(tmp_path: Path) -> None:
    source = write(tmp_path, CHAT, {"text": "x"})
    (found,) = first_examples([source], ByteTokenizer(), TEMPLATE, None, 1)
    assert found.pieces == (("u:hi\na:ho\nu:é?\na:", 0.0), ("yes 😀\n", 1.0))
    assert found.where == f"{source}:1"
    assert (found.tokens, found.trained) == (27, 9)


def test_weights_and_each_turn_are_shown(tmp_path: Path, capsys: Any) -> None:
    """A weight behind its text; with each turn by itself, as often as there are trained turns."""
    messages = [*CHAT["messages"][:3], {**CHAT["messages"][3], "weight": 0.25}]
    messages[1] = {**messages[1], "weight": 1}
    source = write(tmp_path, {"messages": messages})
    (tmp_path / "t.jinja").write_text(SOURCE)
    given = ["data", "show", source, "--template", tmp_path / "t.jinja"]
    assert run(*given) == 0
    shown = capsys.readouterr().out
    assert "a:«ho\n»u:é?\na:«yes 😀\n»[weight 0.25]" in shown
    assert run(*given, "--turns", "each") == 0
    shown = capsys.readouterr().out
    assert shown.count("tokens,") == 2
    assert "u:hi\na:ho\nu:é?\na:«yes" in shown


def test_pairs_are_told_by_the_first_row(tmp_path: Path) -> None:
    """Both answers are shown; a row of another form is an error with its line."""
    source = write(tmp_path, PAIR, CHAT)
    found = first_examples([source], ByteTokenizer(), TEMPLATE, None, 1)
    assert [(each.side, each.pieces[-1]) for each in found] == [
        ("chosen", ("ho\n", 1.0)),
        ("rejected", ("no\n", 1.0)),
    ]
    with pytest.raises(DataError, match=r"rows.jsonl:2: cannot be used"):
        first_examples([source], ByteTokenizer(), TEMPLATE, None, 2)
    with pytest.raises(DataError, match='no "chosen" answer'):
        first_examples([write(tmp_path, CHAT)], ByteTokenizer(), TEMPLATE, PAIRS, 1)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f"garbage\n{json.dumps(CHAT)}")
    with pytest.raises(DataError, match=r"bad.jsonl:1: cannot be read"):
        first_examples([str(bad)], ByteTokenizer(), TEMPLATE, None, 1)
    packed = tmp_path / "cut.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(CHAT).encode() * 50)[:-20])
    with pytest.raises(DataError, match=r"cut.jsonl.gz"):
        first_examples([str(packed)], ByteTokenizer(), TEMPLATE, None, 1)
    with pytest.raises(DataError, match="hold no rows"):
        first_examples([write(tmp_path)], ByteTokenizer(), TEMPLATE, None, 1)


def test_the_command_prints_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal trained text is between marks; errors name the command's own flags."""
    (tmp_path / "t.jinja").write_text(SOURCE)
    source = write(tmp_path, CHAT)
    assert run("data", "show", source, "--template", tmp_path / "t.jinja") == 0
    out = capsys.readouterr().out
    assert "27 tokens, 9 of them trained" in out
    assert "a:«yes 😀\n»" in out
    assert run("data", "show", source) == 2
    assert "--template FILE, or --tokenizer DIR/tokenizer.json" in capsys.readouterr().err
    assert run("data", "sho", source) == 2
    assert "fix: spmd data show FILE" in capsys.readouterr().err
    assert run("data", "--help") == 0
    assert "usage: spmd data show" in capsys.readouterr().out
    assert run("data", "show", tmp_path / "t.jinja", "--template", tmp_path / "t.jinja") == 2
    assert "data.source" not in capsys.readouterr().err
    assert run("data", "show", source, "--template", tmp_path / "t.jinja", "--examples", 0) == 2
    assert "examples" in capsys.readouterr().err
