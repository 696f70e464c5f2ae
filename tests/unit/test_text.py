"""Incremental detokenization: no piece has an incomplete character, and together they are the decoded tokens."""

import json

import pytest

from spmd.data.tokenizer import ByteTokenizer, load_tokenizer
from spmd.errors import ConfigError
from spmd.generate.sampling import Sampling
from spmd.generate.text import IncrementalDetokenizer, TextUpToStop, make_generator, stop_problems
from tests.unit.test_tokenizer import bpe

TEXT = "naïve café, 東京 🦊 the fox\n"


def streamed(tokenizer, ids, before=()):
    pieces = IncrementalDetokenizer(tokenizer, before)
    return [*(pieces.add(token) for token in ids), pieces.finish()]


def llama_like(path):
    """A tokenizer whose words begin with ▁ and whose other characters are byte tokens, as of Llama 2."""
    vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    for piece in ("▁", "▁the", "▁fox", "caf", "na"):
        vocab[piece] = len(vocab)
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    model = {
        "type": "BPE",
        "vocab": vocab,
        "merges": [],
        "unk_token": "<unk>",
        "byte_fallback": True,
        "fuse_unk": True,
    }
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "model": model,
                "decoder": {"type": "Sequence", "decoders": decoders},
            }
        )
    )
    return vocab


def test_every_end_of_the_tokenizer_ends_a_text(tmp_path):
    """The generator stops at each of them, and not at the end of a document alone."""
    path = bpe(tmp_path / "tokenizer.json", special=("<|endoftext|>", "<|im_end|>"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')
    assert make_generator(None, load_tokenizer(str(path)), 8, Sampling()).ends == (1, 0)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_pieces_are_the_text(kind, tmp_path):
    """Together they are the whole text, and no piece has a part of a character, whatever the tokens are cut like."""
    tokenizer = (
        ByteTokenizer()
        if kind == "bytes"
        else load_tokenizer(str(bpe(tmp_path / "tokenizer.json")))
    )
    ids = [int(token) for token in tokenizer.encode(TEXT)]
    for split in (0, 1, 7):
        before = tokenizer.decode(ids[:split])
        if "\ufffd" in before:
            continue
        pieces = streamed(tokenizer, ids[split:], ids[:split])
        assert before + "".join(pieces) == TEXT
        assert "\ufffd" not in "".join(pieces)
        assert sum(map(bool, pieces)) > 10  # piece by piece, not all at the end


def test_spaces_between_words_are_kept(tmp_path):
    """A decoder that strips the space before the first word strips it before no other."""
    vocab = llama_like(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    fox = [vocab[f"<0x{byte:02X}>"] for byte in "🦊é".encode()]
    ids = [vocab["▁the"], vocab["▁fox"], vocab["▁"], *fox, vocab["▁the"]]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == "the fox 🦊é the"
    assert "".join(streamed(tokenizer, ids[1:], ids[:1])) == " fox 🦊é the"


def test_bytes_that_are_no_text_hold_nothing_back_for_long():
    """Of bytes that never become a character, no more than three are held back, and none at the end."""
    ids = [0xFF] * 9 + list(b"ok") + [0xE2, 0x82]
    pieces = streamed(ByteTokenizer(), ids)
    assert "".join(pieces) == ByteTokenizer().decode(ids)
    assert "".join(pieces[:9]) == "\ufffd" * 6
    assert pieces[-1] == "\ufffd"


@pytest.mark.parametrize(
    ("stops", "pieces"),
    [
        ([], ["a", "\n", "b", "\n", "\n", "c"]),
        (["\n\n"], ["a", "", "\nb", "", ""]),  # the first newline is held back
        (["\nb", "\n\n"], ["a", "", ""]),  # the first of them that comes
        (["c"], ["a", "\n", "b", "\n", "\n", ""]),
        (["\n\nd", "nothing"], ["a", "", "\nb", "", "", "\n\nc"]),  # a beginning that was none
    ],
)
def test_a_text_ends_before_a_stop_string(stops, pieces):
    """No part of it is returned, and a beginning of it only when it is known to be none."""
    text = TextUpToStop(ByteTokenizer(), [], stops=stops)
    found = []
    for token in b"a\nb\n\nc":
        if not text.has_ended:
            found.append(text.add(token))
    assert found == pieces
    assert text.has_ended == (stops not in ([], ["\n\nd", "nothing"]))
    assert text.add(ord("x")) == ("" if text.has_ended else "x")


def test_the_end_releases_what_was_held_back():
    """At an end token, at the end of a row, and where no token is left; a skipped token has no text."""
    for last in ([0], [-1], []):
        text = TextUpToStop(ByteTokenizer(), [], ends=(0,), stops=["--"], skipped=(7,))
        pieces = [text.add(token) for token in [*b"a-", 7, *last]]
        pieces.append(text.finish())
        assert "".join(pieces) == "a-"
        assert text.has_ended
        assert text.finish() == ""


def test_an_empty_stop_string_is_a_problem():
    """The others are none."""
    assert stop_problems(["a", "\n"]) == []
    (problem,) = stop_problems(["a", ""])
    assert "is empty" in problem.what
    with pytest.raises(ConfigError, match="one string"):
        TextUpToStop(ByteTokenizer(), [], stops="fox")
