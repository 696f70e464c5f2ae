"""Text to ids and back: bytes, tokenizer files, and files that are no tokenizer."""

from pathlib import Path

import pytest
import tokenizers

from spmd.corpus import END_TOKENS, load_tokenizer
from spmd.errors import DataError

WORDS = "the quick brown fox jumps over the lazy dog and the dog sleeps; naïve café, 東京 🦊\n"


def bpe(path: Path, *, special: tuple[str, ...] = ("<|endoftext|>",), truncate: bool = False) -> Path:
    """A byte-level BPE tokenizer trained here on a few words and written to `path`."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([WORDS] * 4, trainer)
    if truncate:
        model.enable_truncation(4)
        model.enable_padding(length=64)
    model.save(str(path))
    return path


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_text_survives_encoding_and_decoding(kind: str, tmp_path: Path) -> None:
    """Any Unicode text is the same after a round trip, and every id is below the vocabulary's size."""
    tokenizer = load_tokenizer(kind if kind == "bytes" else str(bpe(tmp_path / "tokenizer.json")))
    text = WORDS + "\r\n\ttabs, combining e\u0301, 𝔘𝔫𝔦𝔠𝔬𝔡𝔢, \u2028, \U0010ffff"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert 0 <= ids.min() <= ids.max() < tokenizer.vocab
    assert 0 <= tokenizer.eos < tokenizer.vocab


def test_half_a_character_decodes_to_a_replacement() -> None:
    """Bytes cut in the middle of a character decode to U+FFFD instead of failing."""
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


def test_bpe_compresses_and_ignores_what_the_file_asks_of_lengths(tmp_path: Path) -> None:
    """Truncation and padding stored in a tokenizer file neither shorten nor lengthen a document."""
    plain = load_tokenizer(str(bpe(tmp_path / "plain.json")))
    cut = load_tokenizer(str(bpe(tmp_path / "cut.json", truncate=True)))
    assert cut.encode(WORDS).tolist() == plain.encode(WORDS).tolist()
    assert len(cut.encode("x")) == 1
    assert 4 < len(cut.encode(WORDS)) < len(WORDS.encode())


def test_an_end_token_spelled_in_a_document_is_text(tmp_path: Path) -> None:
    """A document that contains the letters of the end token does not end early."""
    tokenizer = load_tokenizer(str(bpe(tmp_path / "tokenizer.json")))
    text = "before <|endoftext|> after"
    assert tokenizer.eos not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tokenizer.eos]) == "<|endoftext|>"


@pytest.mark.parametrize("end", END_TOKENS)
def test_every_known_end_token_is_found(end: str, tmp_path: Path) -> None:
    """The id of whichever known end token a file has becomes `eos`."""
    path = bpe(tmp_path / "tokenizer.json", special=("<pad>", end))
    assert load_tokenizer(str(path)).eos == tokenizers.Tokenizer.from_file(str(path)).token_to_id(end) == 1


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    """Without an end token the error lists all names that were looked for."""
    path = bpe(tmp_path / "tokenizer.json", special=("<pad>",))
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(path))
    assert all(name in str(caught.value) for name in END_TOKENS)


@pytest.mark.parametrize("content", [b"{", b"{}", b"\xff\xfe", b"[1]"])
def test_a_file_that_is_no_tokenizer_is_refused(content: bytes, tmp_path: Path) -> None:
    """Broken JSON, JSON of another kind and bytes that are not text are all named as no tokenizer."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json: is not a tokenizer\.json"):
        load_tokenizer(str(path))


def test_a_misspelled_tokenizer_gets_a_suggestion(tmp_path: Path) -> None:
    """A wrong word suggests "bytes" and a wrong path suggests the file next to it."""
    with pytest.raises(DataError, match='did you mean "bytes"'):
        load_tokenizer("byte")
    bpe(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r'did you mean "tokenizer\.json"'):
        load_tokenizer(str(tmp_path / "tokeniser.json"))
