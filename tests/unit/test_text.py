"""Incremental detokenization: no piece has an incomplete character, and together they are the decoded tokens."""

import json

import pytest

from spmd.data.tokenizer import ByteTokenizer, load_tokenizer
from spmd.generate.sampling import Sampling
from spmd.generate.text import IncrementalDetokenizer, make_generator
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
