"""Text to ids and back: bytes, tokenizer files, and files that are no tokenizer."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from spmd.data.tokenizer import END_TOKENS, load_tokenizer
from spmd.errors import DataError

WORDS = "the quick brown fox jumps over the lazy dog and the dog sleeps; naïve café, 東京 🦊\n"


def bpe(
    path: Path, *, special: tuple[str, ...] = ("<|endoftext|>",), truncate: bool = False
) -> Path:
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


def begin_with(path: Path, *tokens: tuple[str, int], end: tuple[str, int] | None = None) -> None:
    """Gives a tokenizer a post-processor that puts tokens before a text, and one behind it."""
    model = tokenizers.Tokenizer.from_file(str(path))
    behind = [end] if end else []
    single = [*(f"{name}:0" for name, _ in tokens), "$A:0", *(f"{name}:0" for name, _ in behind)]
    template = tokenizers.processors.TemplateProcessing(
        single=single, special_tokens=[*tokens, *behind]
    )
    byte_level = tokenizers.processors.ByteLevel(trim_offsets=False)
    # as Llama 3 has it
    model.post_processor = tokenizers.processors.Sequence([byte_level, template])
    model.save(str(path))


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


def test_ids_that_are_no_bytes_decode_to_replacements() -> None:
    """A model may have more tokens than there are bytes; each of these others is one U+FFFD."""
    assert (
        load_tokenizer("bytes").decode(np.array([104, 256, 50_000, -1, 105]))
        == "h\ufffd\ufffd\ufffdi"
    )


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


def test_a_prompt_of_a_tokenizer_that_begins_with_nothing(tmp_path: Path) -> None:
    """Bytes and a tokenizer without a post-processor put nothing before a prompt."""
    for name in ("bytes", str(bpe(tmp_path / "tokenizer.json"))):
        tokenizer = load_tokenizer(name)
        assert tokenizer.starts == ()
        assert tokenizer.encode_prompt(WORDS).tolist() == tokenizer.encode(WORDS).tolist()


def test_a_first_token_that_is_none_is_refused(tmp_path: Path) -> None:
    """A post-processor may name any id; one beyond the vocabulary is an error, with all else that is wrong."""
    begin_with(bpe(tmp_path / "tokenizer.json", special=("<pad>",)), ("<s>", 99_999))
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert "adds [99999], and it has 300 tokens" in str(caught.value)
    assert "has no token that ends a document" in str(caught.value)


def test_a_file_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tokenizer is read that is larger than any."""
    path = bpe(tmp_path / "tokenizer.json")
    monkeypatch.setattr("spmd.data.tokenizer._MAX_BYTES", path.stat().st_size - 1)
    with pytest.raises(DataError, match="is too large"):
        load_tokenizer(str(path))


@pytest.mark.parametrize("end", END_TOKENS)
def test_every_known_end_token_is_found(end: str, tmp_path: Path) -> None:
    """The id of whichever known end token a file has becomes `eos`."""
    path = bpe(tmp_path / "tokenizer.json", special=("<pad>", end))
    assert (
        load_tokenizer(str(path)).eos
        == tokenizers.Tokenizer.from_file(str(path)).token_to_id(end)
        == 1
    )


CHAT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ENDS = {
    "a model's": ({"config.json": {"eos_token_id": 2}}, (2,)),
    "a list": ({"generation_config.json": {"eos_token_id": [2, 0]}}, (2, 0)),
    "the first file": (
        {"hf_config.json": {"eos_token_id": 0}, "generation_config.json": {"eos_token_id": 2}},
        (2,),
    ),
    "a tokenizer's": ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, (2,)),
    "a tokenizer's, as a table": (
        {"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}}},
        (2,),
    ),
    "both": (
        {"config.json": {"eos_token_id": 0}, "tokenizer_config.json": {"eos_token": "<|im_end|>"}},
        (0, 2),
    ),
    "none": (
        {"config.json": {"eos_token_id": None}, "tokenizer_config.json": {"eos_token": None}},
        (0,),
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_files_beside_say_what_ends_a_text(case: str, tmp_path: Path) -> None:
    """All of it ends a text, the first of it a document, and corpora that end otherwise have other names."""
    files, ends = ENDS[case]
    path = bpe(tmp_path / "tokenizer.json", special=CHAT)
    plain = load_tokenizer(str(path))
    assert (plain.ends, plain.eos) == ((0,), 0)
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.ends, tokenizer.eos) == (ends, ends[0])
    assert (tokenizer.name == plain.name) == (ends[0] == 0)
    # A file of another name is not the one that they are about.
    assert load_tokenizer(str(path.rename(tmp_path / "mine.json"))).ends == (0,)


def test_a_tokenizer_without_a_known_end_token_is_told_of_one(tmp_path: Path) -> None:
    """What the files beside it say is enough."""
    path = bpe(tmp_path / "tokenizer.json", special=("<pad>", "<|im_end|>"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    assert load_tokenizer(str(path)).ends == (1,)


def test_what_is_wrong_with_the_files_beside_is_said_at_once(tmp_path: Path) -> None:
    """Ids that are no tokens, words that are none, files that are no objects, and all reads are bounded."""
    path = bpe(tmp_path / "tokenizer.json", special=CHAT)
    (tmp_path / "generation_config.json").write_text(
        '{"eos_token_id": [0, true, "2", -1, 999, 2.0]}'
    )
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eot>"}')
    (tmp_path / "hf_config.json").write_text("[1]")
    (tmp_path / "config.json").write_text(" " * (2**24 + 1))
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(path))
    text = str(caught.value)
    assert len(caught.value.problems) == 8
    for part in (
        "True, which",
        "'2', which",
        "-1, which",
        "999, which",
        "2.0, which",
        "'<eot>'",
        "not a JSON object",
    ):
        assert part in text
    assert "above the limit of" in text


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


def settings_of(folder: Path, **fields: object) -> None:
    """Write a tokenizer_config.json."""
    known = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**known, **fields}))


def added(content: str, **flags: bool) -> dict[str, object]:
    """A token as tokenizer_config.json has it."""
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": content, **off, **flags}


SETTINGS: dict[str, dict[str, object]] = {
    "nothing": {},
    "a first token": {"add_bos_token": True},
    "no first token": {"add_bos_token": False},
    "a last token": {"add_eos_token": True},
    "special tokens": {"added_tokens_decoder": {"300": added("<x>", special=True)}},
    "words": {
        "added_tokens_decoder": {"301": added("fox", lstrip=True), "300": added("dog", rstrip=True)}
    },
    "other flags of a token": {
        "added_tokens_decoder": {"0": added("<s>", special=True, lstrip=True, rstrip=True)}
    },
}
PROMPT = "the dog <x> and <s> the fox"


@pytest.mark.soak
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_prompt_has_the_ids_that_transformers_gives_it(
    name: str, starts: bool, tmp_path: Path
) -> None:
    """With a tokenizer_config.json that has other tokens, and says otherwise of the first and last."""
    transformers = pytest.importorskip("transformers")
    path = bpe(tmp_path / "tokenizer.json", special=("<s>", "</s>"))
    if starts:
        begin_with(path, ("<s>", 0))
    settings_of(tmp_path, **SETTINGS[name])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(str(path))
    assert ours.encode_prompt(PROMPT).tolist() == theirs(PROMPT).input_ids
    assert ours.vocab == len(theirs)


def test_tokens_of_the_settings_are_added(tmp_path: Path) -> None:
    """Under their ids, in prompts; a control without them has other ids and another name."""
    path = bpe(tmp_path / "tokenizer.json", special=("<s>", "</s>"))
    settings_of(tmp_path, **SETTINGS["nothing"])
    without = load_tokenizer(str(path))
    settings_of(tmp_path, **SETTINGS["special tokens"])
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.vocab == without.vocab + 1 == 301
    assert 300 in tokenizer.encode_prompt(PROMPT)
    assert 300 not in tokenizer.encode(PROMPT), "a document has no special tokens"
    assert tokenizer.decode([300]) == "<x>"
    assert without.encode_prompt(PROMPT).max() < 300
    assert tokenizer.name != without.name


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ({"400": added("<x>")}, "id 400 there, 300 in tokenizer.json"),
        ({"x": added("<x>")}, "not an id and a token"),
        ({"300": "<x>"}, "not an id and a token"),
        ({"300": added("")}, "not an id and a token"),
        (["<x>"], "is ['<x>'], not an object"),
    ],
)
def test_added_tokens_that_mean_nothing_are_refused(
    table: object, what: str, tmp_path: Path
) -> None:
    """A token under another id than its row of the embedding, and what is no token."""
    path = bpe(tmp_path / "tokenizer.json", special=("<s>", "</s>"))
    settings_of(tmp_path, added_tokens_decoder=table)
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(path))
    assert what in str(caught.value)
