"""Tokenizers: text to ids and back, and the special tokens that begin and end a document."""

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

from spmd.checkpoint.manifest import read_object
from spmd.errors import DataError, Problem, nearest_file

END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")
"""End-of-document tokens, if no file beside the tokenizer defines one; the first in the vocabulary is used."""
TOKENIZER = "tokenizer.json"
MODEL_FILES = ("generation_config.json", "hf_config.json", "config.json")
"""Files that may define `eos_token_id`; the first that does is used."""
SETTINGS = "tokenizer_config.json"
"""File that may define `eos_token`."""

_MAX_BYTES = 2**28
_MAX_BYTES_BESIDE = 2**24
_INVALID_BYTE = 0xFF  # never occurs in UTF-8
_TITLE = "the tokenizer cannot be loaded:"


class Tokenizer(Protocol):
    """Tokenizer interface: `starts` precede every document and prompt, `eos` follows every document."""

    @property
    def name(self) -> str:
        """Identity of the tokenizer; part of a corpus' fingerprint."""

    @property
    def vocab(self) -> int:
        """Vocabulary size: one more than the largest id."""

    @property
    def eos(self) -> int:
        """Id that ends a document."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a generated text, including `eos`."""

    @property
    def starts(self) -> tuple[int, ...]:
        """Ids that begin a document and a prompt; usually one or none."""

    def encode(self, text: str) -> np.ndarray:
        """Encode a document, 1-D, without `starts` and `eos`; special tokens in the text are encoded as plain text."""

    def encode_prompt(self, text: str) -> np.ndarray:
        """Encode a prompt, 1-D: `starts`, then `text`, in which special tokens are recognized."""

    def encode_chat(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode the output of a chat template: ids `[n]`, and first character and end of each, int64 `[n, 2]`."""

    def decode(self, ids: Iterable[int]) -> str:
        """Decode `ids`."""


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as tokens; NUL ends a document.

    Example:
        >>> ByteTokenizer().encode("hé").tolist()
        [104, 195, 169]
        >>> ByteTokenizer().decode([104, 195, 169])
        'hé'
    """

    name: str = "bytes"
    vocab: int = 256
    eos: int = 0
    starts: tuple[int, ...] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        """Only `eos`."""
        return (self.eos,)

    def encode(self, text: str) -> np.ndarray:
        """Encode `text` as uint8 `[bytes]`."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_prompt(self, text: str) -> np.ndarray:
        """Encode `text` as `encode` does: `starts` is empty."""
        return self.encode(text)

    def encode_chat(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode `text` as `encode` does; the bytes of a character are all of this character."""
        characters = np.repeat(np.arange(len(text)), [len(character.encode("utf-8")) for character in text])
        return self.encode(text), np.stack([characters, characters + 1], axis=1)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode `ids`; invalid UTF-8 and ids that are not bytes become U+FFFD."""
        return bytes(i if 0 <= i <= 0xFF else _INVALID_BYTE for i in map(int, ids)).decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True)
class JsonTokenizer:
    """Tokenizer of the Hugging Face `tokenizers` library; see `load_tokenizer`."""

    name: str
    vocab: int
    eos: int
    ends: tuple[int, ...]
    starts: tuple[int, ...]
    model: tokenizers.Tokenizer = dataclasses.field(repr=False, compare=False)

    def encode(self, text: str) -> np.ndarray:
        """Encode `text` as uint32 `[tokens]`, without added tokens."""
        # Of one text, as other threads go on meanwhile; they would wait for `encode`.
        (encoding,) = self.model.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, np.uint32)

    def encode_prompt(self, text: str) -> np.ndarray:
        """Encode a prompt as `transformers` does, uint32 `[tokens]`, without an end token.

        `starts` are not added again to a prompt that has them, such as the output of a chat template.
        """
        ids = self._with_special_tokens(text)[0]
        starts = np.asarray(self.starts, np.uint32)
        return ids if np.array_equal(ids[: len(starts)], starts) else np.concatenate([starts, ids])

    def encode_chat(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode what a chat template wrote, as `transformers` does: special tokens are recognized, none is added.

        Characters that no token covers are of the next one: a tokenizer may leave spaces before a word out.
        """
        ids, offsets = self._with_special_tokens(text)
        first, end = offsets.reshape(-1, 2).T
        reached = np.maximum.accumulate(np.concatenate([[0], end]))[:-1]
        return ids, np.stack([np.minimum(first, reached), end], axis=1)

    def _with_special_tokens(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a text in which special tokens are recognized, and the characters of each."""
        self.model.encode_special_tokens = False
        try:
            found = self.model.encode(text, add_special_tokens=False)
        finally:
            self.model.encode_special_tokens = True
        return np.asarray(found.ids, np.uint32), np.asarray(found.offsets, np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode `ids`, including end tokens."""
        return str(self.model.decode([int(i) for i in ids], skip_special_tokens=False))


def document_ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return the ids of a document with its `starts` and `eos`, 1-D."""
    return np.concatenate([np.array(tokenizer.starts, np.int64), tokenizer.encode(text), np.array([tokenizer.eos])])


def id_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the dtype in which ids are stored, uint16 or uint32."""
    return np.dtype(np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer "bytes", or a `tokenizer.json` of Hugging Face `tokenizers`.

    End tokens are those of the files beside a `tokenizer.json`, or the first of `END_TOKENS` if they define none. The
    file's truncation and padding are disabled, and special tokens inside a document are encoded as plain text.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(_TITLE, [Problem(name, 'is neither a file nor "bytes"', fix=nearest_file(path, ("bytes",)))])
    if path.stat().st_size > _MAX_BYTES:
        raise DataError(_TITLE, [Problem(name, "is too large", f"more than {_MAX_BYTES:,} bytes")])
    content = path.read_bytes()
    try:
        model = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # what the library raises for a file that is not a tokenizer
        raise DataError(_TITLE, [Problem(name, "is not a tokenizer.json", str(error))]) from error
    model.no_truncation()
    model.no_padding()
    model.encode_special_tokens = True
    problems: list[Problem] = []
    ids: dict[str, int] = model.get_vocab(with_added_tokens=True)
    vocab, starts = max(ids.values(), default=-1) + 1, _starts(model)
    guess = next((ids[token] for token in END_TOKENS if token in ids), None)
    ends = _ends(path.parent, ids, problems) if path.name == TOKENIZER else ()
    if guess is None and not ends and not problems:
        looked = f"looked for {', '.join(END_TOKENS)}"
        fix = f"add one of them, or a {SETTINGS} with eos_token beside it"
        problems.append(Problem(name, "has no token that ends a document", looked, fix))
    if unknown := [token for token in starts if token >= vocab]:
        what = "begins a text with a token outside its vocabulary"
        problems.append(Problem(name, what, f"its post_processor adds {unknown}, and it has {vocab} tokens"))
    if problems:
        raise DataError(_TITLE, problems)
    ends = ends or tuple(token for token in (guess,) if token is not None)
    parts = [f"{path.name}:{hashlib.sha256(content).hexdigest()[:16]}", *(f"starts {token}" for token in starts)]
    parts += [f"ends {ends[0]}"] if ends[0] != guess else []  # a guessed end follows from the content
    return JsonTokenizer(":".join(parts), vocab, ends[0], ends, starts, model)


def _ends(folder: Path, ids: dict[str, int], problems: list[Problem]) -> tuple[int, ...]:
    """Return the end tokens in the files beside a tokenizer, that of a document first; empty if they define none."""
    ends: list[int] = []
    found = {name: _read(folder / name, problems) for name in (*MODEL_FILES, SETTINGS)}
    known = set(ids.values())
    for name in MODEL_FILES:
        value = found[name].get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for token in listed:
            if type(token) is not int or token not in known:
                where, what = f"{folder / name}: eos_token_id", f"has {token!r}, which is not in the vocabulary"
                problems.append(Problem(where, what, f"it has {len(known)} tokens"))
        if listed:
            ends += listed
            break
    token = found[SETTINGS].get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str) and text in ids:
        ends.append(ids[text])
    elif text is not None or isinstance(token, dict):
        problems.append(Problem(f"{folder / SETTINGS}: eos_token", f"is {text!r}, which is not in the vocabulary"))
    return () if problems else tuple(dict.fromkeys(ends))


def _read(path: Path, problems: list[Problem]) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file does not exist."""
    try:
        return read_object(path.resolve(), _MAX_BYTES_BESIDE) if path.exists() else {}
    except (OSError, ValueError) as error:
        fix = f"repair it, or move {TOKENIZER} to a separate folder"
        problems.append(Problem(str(path), "cannot be read, and may define end tokens", str(error), fix))
        return {}


def _starts(model: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return the tokens that the post-processor adds before a text."""
    if model.post_processor is None:
        return ()
    # Probe with one word that is a token for any vocabulary.
    probe = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    probe.post_processor = model.post_processor
    found = probe.encode("a")
    before = (*found.special_tokens_mask, 0).index(0)
    return tuple(found.ids[:before])
