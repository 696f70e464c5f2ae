"""Tokenizers: text to ids and back, and the special tokens around a document."""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

from spmd.checkpoint.manifest import read_object
from spmd.errors import DataError, Problem, StorageError, nearest_file, shorten
from spmd.storage.address import is_address, parse_address
from spmd.storage.download import download, is_side_file

END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")
"""End-of-document tokens, if no file beside the tokenizer defines one; the first in the
vocabulary is used."""
TOKENIZER = "tokenizer.json"
MODEL_FILES = ("generation_config.json", "hf_config.json", "config.json")
"""Files that may define `eos_token_id`; the first that does is used."""
SETTINGS = "tokenizer_config.json"
"""File that may define `eos_token` and tokens beyond those of the tokenizer."""

_MAX_BYTES = 2**28
_MAX_BYTES_BESIDE = 2**24
_INVALID_BYTE = 0xFF  # never occurs in UTF-8
_ADDED = "added_tokens_decoder"
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_TITLE = "the tokenizer cannot be loaded:"


class Tokenizer(Protocol):
    """Tokenizer interface.

    `starts` precede every document and prompt, `eos` follows every document.
    """

    @property
    def name(self) -> str:
        """Identity of the tokenizer; part of a corpus' fingerprint."""

    @property
    def vocab(self) -> int:
        """Vocabulary size: one more than the largest id."""

    @property
    def eos(self) -> int:
        """Id at the end of a document."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids at the end of a generated text, including `eos`."""

    @property
    def starts(self) -> tuple[int, ...]:
        """Ids at the start of a document and a prompt; usually one or none."""

    @property
    def bos(self) -> int | None:
        """Id of a token for the beginning of a text, added or not; None without one."""

    @property
    def specials(self) -> frozenset[int]:
        """Ids of special tokens: they are no text."""

    def tokens(self) -> dict[str, int]:
        """Return the id of each token, by its name."""

    def encode(self, text: str) -> np.ndarray:
        """Encode a document, 1-D, without `starts` and `eos`.

        Special tokens in the text are encoded as plain text.
        """

    def encode_prompt(self, text: str) -> np.ndarray:
        """Encode a prompt, 1-D: `starts`, then `text` with special tokens recognized."""

    def encode_chat(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode a template's output: ids `[n]`, and the first character and end of each id.

        The latter are int64 `[n, 2]`.
        """

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
    bos: int | None = None
    specials: frozenset[int] = frozenset()

    @property
    def ends(self) -> tuple[int, ...]:
        """Only `eos`."""
        return (self.eos,)

    def tokens(self) -> dict[str, int]:
        """Return the id of each byte, by its name in other tokenizers."""
        return {f"<0x{byte:02X}>": byte for byte in range(256)}

    def encode(self, text: str) -> np.ndarray:
        """Encode `text` as uint8 `[bytes]`."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_prompt(self, text: str) -> np.ndarray:
        """Encode `text` as `encode` does: `starts` is empty."""
        return self.encode(text)

    def encode_chat(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode `text` as `encode` does; the bytes of a character are all of this character."""
        lengths = [len(character.encode("utf-8")) for character in text]
        characters = np.repeat(np.arange(len(text)), lengths)
        return self.encode(text), np.stack([characters, characters + 1], axis=1)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode `ids`; invalid UTF-8 and ids other than bytes become U+FFFD."""
        decoded = bytearray()
        for each in map(int, ids):
            is_byte = 0 <= each <= 0xFF
            decoded.append(each if is_byte else _INVALID_BYTE)
        return decoded.decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True)
class JsonTokenizer:
    """Tokenizer of the Hugging Face `tokenizers` library; see `load_tokenizer`."""

    name: str
    vocab: int
    eos: int
    ends: tuple[int, ...]
    starts: tuple[int, ...]
    model: tokenizers.Tokenizer = dataclasses.field(repr=False, compare=False)
    bos: int | None = None

    @functools.cached_property
    def specials(self) -> frozenset[int]:
        """Ids of special tokens."""
        added = self.model.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def tokens(self) -> dict[str, int]:
        """Return the id of each token, added ones included, by its text in the vocabulary."""
        return dict(self.model.get_vocab(with_added_tokens=True))

    def encode(self, text: str) -> np.ndarray:
        """Encode `text` as uint32 `[tokens]`, without added tokens."""
        # Of one text, as other threads go on meanwhile; they would wait for `encode`.
        (encoding,) = self.model.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, np.uint32)

    def encode_prompt(self, text: str) -> np.ndarray:
        """Encode a prompt as `transformers` does, uint32 `[tokens]`, without an end token.

        `starts` are not added again to a prompt that has them, such as the output of a chat
        template.
        """
        ids = self._with_special_tokens(text)[0]
        starts = np.asarray(self.starts, np.uint32)
        if np.array_equal(ids[: len(starts)], starts):
            return ids
        return np.concatenate([starts, ids])

    def encode_chat(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode a template's output as `transformers` does: recognize special tokens, add none.

        Characters that no token covers are of the next one: a tokenizer may leave spaces before a
        word out.
        """
        ids, offsets = self._with_special_tokens(text)
        first, end = offsets.reshape(-1, 2).T
        reached = np.maximum.accumulate(np.concatenate([[0], end]))[:-1]
        return ids, np.stack([np.minimum(first, reached), end], axis=1)

    def _with_special_tokens(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a text, with special tokens recognized, and the characters of each."""
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
    starts = np.array(tokenizer.starts, np.int64)
    return np.concatenate([starts, tokenizer.encode(text), np.array([tokenizer.eos])])


def id_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the dtype of stored ids, uint16 or uint32."""
    if tokenizer.vocab <= 2**16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32)


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer "bytes", or a `tokenizer.json` of Hugging Face `tokenizers`.

    End tokens are those of the files beside a `tokenizer.json`, or the first of `END_TOKENS` if
    they define none. The file's truncation and padding are disabled, and special tokens inside a
    document are encoded as plain text.

    As in `transformers`, `added_tokens_decoder` of the tokenizer_config.json beside it adds tokens,
    and its `add_bos_token` and `add_eos_token` change nothing: `tokenizer.json` decides.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = _local_file(name)
    content = _content(path, name)
    model = _parse(content, name)
    problems: list[Problem] = []
    added: list[str] = []
    if path.name == TOKENIZER:
        added = _add_tokens(model, path.parent / SETTINGS, problems)
    ids: dict[str, int] = model.get_vocab(with_added_tokens=True)
    vocab = max(ids.values(), default=-1) + 1
    starts = _starts(model)
    guess = next((ids[token] for token in END_TOKENS if token in ids), None)
    ends: tuple[int, ...] = ()
    if path.name == TOKENIZER:
        ends = _ends(path.parent, ids, problems)
    if guess is None and not ends and not problems:
        looked = f"looked for {', '.join(END_TOKENS)}"
        fix = f"add one of them, or a {SETTINGS} with eos_token beside it"
        problems.append(Problem(name, "has no token that ends a document", looked, fix))
    unknown = [token for token in starts if token >= vocab]
    if unknown:
        what = "begins a text with a token outside its vocabulary"
        detail = f"its post_processor adds {unknown}, and it has {vocab} tokens"
        problems.append(Problem(name, what, detail))
    if problems:
        raise DataError(_TITLE, problems)
    if guess is not None:
        ends = ends or (guess,)
    parts = [f"{path.name}:{hashlib.sha256(content).hexdigest()[:16]}"]
    parts += [f"starts {token}" for token in starts]
    if added:
        digest = hashlib.sha256("\n".join(added).encode()).hexdigest()
        parts.append(f"adds {digest[:16]}")
    if ends[0] != guess:  # a guessed end follows from the content
        parts.append(f"ends {ends[0]}")
    bos = _bos(path, ids) if path.name == TOKENIZER else None
    return JsonTokenizer(":".join(parts), vocab, ends[0], ends, starts, model, bos)


def token_difference(ours: Tokenizer, theirs: Tokenizer) -> str:
    """Return the first token with unlike numbers in two tokenizers; empty without any.

    A special token that one of them lacks is none: models of one family reserve others.

    Example:
        >>> token_difference(ByteTokenizer(), ByteTokenizer())
        ''
    """
    own = ours.tokens()
    other = theirs.tokens()
    for token, number in own.items():
        if token in other and other[token] != number:
            return f"{token!r} is token {number} of the one, and {other[token]} of the other"
        if token not in other and number not in ours.specials:
            return f"{token!r} is token {number} of the one, and none of the other"
    for token, number in other.items():
        if token not in own and number not in theirs.specials:
            return f"{token!r} is token {number} of the other, and none of the one"
    return ""


def _local_file(name: str) -> Path:
    """Return the path of a tokenizer; the files beside it that describe it are there, too."""
    if not is_address(name):
        return Path(name).expanduser()
    address = parse_address(name)
    try:
        return download(address.parent, is_side_file) / address.name
    except StorageError as error:
        raise DataError(_TITLE, error.problems) from error


def _content(path: Path, name: str) -> bytes:
    """Return the bytes of a tokenizer's file."""
    if not path.is_file():
        fix = nearest_file(path, ("bytes",))
        raise DataError(_TITLE, [Problem(name, 'is neither a file nor "bytes"', fix=fix)])
    if path.stat().st_size > _MAX_BYTES:
        problem = Problem(name, "is too large", f"more than {_MAX_BYTES:,} bytes")
        raise DataError(_TITLE, [problem])
    return path.read_bytes()


def _parse(content: bytes, name: str) -> tokenizers.Tokenizer:
    """Parse a tokenizer; disable its truncation and padding, and special tokens in texts."""
    try:
        model = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # what the library raises for a file that is not a tokenizer
        raise DataError(_TITLE, [Problem(name, "is not a tokenizer.json", str(error))]) from error
    model.no_truncation()
    model.no_padding()
    model.encode_special_tokens = True
    return model


def _add_tokens(model: tokenizers.Tokenizer, path: Path, problems: list[Problem]) -> list[str]:
    """Add the tokens of a tokenizer_config.json that a tokenizer lacks or has otherwise.

    Returns:
        A line about each of them.
    """
    settings = _read(path, problems)
    table = settings.get(_ADDED) or {}
    where = f"{path}: {_ADDED}"
    if not isinstance(table, dict):
        problems.append(Problem(where, f"is {shorten(table)}, not an object"))
        return []
    known = set(map(repr, model.get_added_tokens_decoder().values()))
    named = _named_tokens(settings)
    wanted: dict[int, tokenizers.AddedToken] = {}
    for number, entry in table.items():
        token = _parse_added(entry, named)
        if token is None or not re.fullmatch("[0-9]{1,9}", number):
            what = f"has {shorten({number: entry})}, not an id and a token"
            problems.append(Problem(where, what))
        elif repr(token) not in known:
            wanted[int(number)] = token
    lines: list[str] = []
    for number in sorted(wanted):
        token = wanted[number]
        model.add_tokens([token])
        found = model.token_to_id(token.content)
        if found != number:
            detail = f"id {number} there, {found} in {TOKENIZER}"
            problems.append(Problem(where, f"has {token.content!r} under another id", detail))
        lines.append(f"{number} {token!r}")
    return lines


def _parse_added(entry: Any, named: Collection[str]) -> tokenizers.AddedToken | None:
    """Return a token of tokenizer_config.json; None if it is none."""
    if not isinstance(entry, dict):
        return None
    content = entry.get("content")
    if not isinstance(content, str) or not content:
        return None
    flags: dict[str, bool] = {}
    for name in _TOKEN_FLAGS:
        if name in entry:
            flags[name] = entry[name] is True
    if content in named:
        flags["special"] = True
    return tokenizers.AddedToken(content, **flags)


def _named_tokens(settings: dict[str, Any]) -> set[str]:
    """Return the texts of `bos_token`, `eos_token` and others; they are special."""
    texts: set[str] = set()
    for name, token in settings.items():
        text = _content_of(token)
        if name.endswith("_token") and isinstance(text, str):
            texts.add(text)
    return texts


def _content_of(token: Any) -> Any:
    """Return the text of a token that is a text, or an object with one."""
    if isinstance(token, dict):
        return token.get("content")
    return token


def _ends(folder: Path, ids: dict[str, int], problems: list[Problem]) -> tuple[int, ...]:
    """Return the end tokens in the files beside a tokenizer, the document's first.

    Empty if they define none.
    """
    ends: list[int] = []
    found = {name: _read(folder / name, problems) for name in (*MODEL_FILES, SETTINGS)}
    known = set(ids.values())
    for name in MODEL_FILES:
        listed = _listed_ends(found[name])
        for token in listed:
            if type(token) is not int or token not in known:
                where = f"{folder / name}: eos_token_id"
                what = f"has {token!r}, which is not in the vocabulary"
                problems.append(Problem(where, what, f"it has {len(known)} tokens"))
        if listed:
            ends += listed
            break
    token = found[SETTINGS].get("eos_token")
    text = _content_of(token)
    if isinstance(text, str) and text in ids:
        ends.append(ids[text])
    elif token is not None:
        where = f"{folder / SETTINGS}: eos_token"
        problems.append(Problem(where, f"is {text!r}, which is not in the vocabulary"))
    if problems:
        return ()
    return tuple(dict.fromkeys(ends))


def _bos(path: Path, ids: dict[str, int]) -> int | None:
    """Return the `bos_token` of the settings beside a tokenizer; None without one."""
    text = _content_of(_read(path.parent / SETTINGS, []).get("bos_token"))
    if not isinstance(text, str):
        return None
    return ids.get(text)


def _listed_ends(found: dict[str, Any]) -> list[Any]:
    """Return `eos_token_id` of a file as a list, unchecked."""
    listed = found.get("eos_token_id")
    if listed is None:
        return []
    if isinstance(listed, list):
        return listed
    return [listed]


def _read(path: Path, problems: list[Problem]) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file does not exist."""
    if not path.exists():
        return {}
    try:
        return read_object(path.resolve(), _MAX_BYTES_BESIDE)
    except (OSError, ValueError) as error:
        what = "cannot be read, and may define tokens"
        fix = f"repair it, or move {TOKENIZER} to a separate folder"
        problems.append(Problem(str(path), what, str(error), fix))
        return {}


def _starts(model: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return the tokens added before a text by the post-processor."""
    if model.post_processor is None:
        return ()
    # Probe with one word that is a token for any vocabulary.
    probe = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    probe.post_processor = model.post_processor
    found = probe.encode("a")
    before = (*found.special_tokens_mask, 0).index(0)
    return tuple(found.ids[:before])
