"""Text to token ids and back, and the tokens that stand for no text: what begins a document, what ends one."""

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
"""What ends a document where no file beside the tokenizer says it; the first that there is."""
TOKENIZER = "tokenizer.json"
"""What the file is called that has others of its model beside it."""
MODEL_FILES = ("generation_config.json", "hf_config.json", "config.json")
"""Those that may have `eos_token_id`; the first one that has it is believed."""
SETTINGS = "tokenizer_config.json"
"""The one that may have `eos_token`."""

_LONGEST = 2**28  # bytes of a tokenizer
_LONGEST_BESIDE = 2**24  # bytes of a file beside it
_NO_TEXT = 0xFF  # a byte that UTF-8 never has
_TITLE = "the tokenizer cannot be loaded:"


class Tokenizer(Protocol):
    """Text to token ids and back; `starts` come before every document and prompt, `eos` follows every document."""

    @property
    def name(self) -> str:
        """What makes two tokenizers the same; part of a corpus' fingerprint."""

    @property
    def vocab(self) -> int:
        """One more than the largest id."""

    @property
    def eos(self) -> int:
        """The id that ends a document."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a generated text, `eos` among them."""

    @property
    def starts(self) -> tuple[int, ...]:
        """The ids that begin a document and a prompt; most tokenizers have one or none."""

    def encode(self, text: str) -> np.ndarray:
        """The ids of a document's `text`, 1-D, without `starts` and `eos`; what is spelled like a token is text."""

    def encode_prompt(self, text: str) -> np.ndarray:
        """The ids of a prompt, 1-D: `starts`, and `text` in which special tokens may be spelled out."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`."""


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Every byte of UTF-8 is a token; NUL, which text does not hold, ends a document.

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
        """`eos` alone."""
        return (self.eos,)

    def encode(self, text: str) -> np.ndarray:
        """The bytes of `text`, uint8 `[bytes]`."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_prompt(self, text: str) -> np.ndarray:
        """The bytes of `text`: no byte begins a prompt."""
        return self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; what is not UTF-8, such as half a character, or no byte at all becomes U+FFFD."""
        return bytes(i if 0 <= i <= _NO_TEXT else _NO_TEXT for i in map(int, ids)).decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True)
class JsonTokenizer:
    """A tokenizer of the Hugging Face `tokenizers` library; made by `load_tokenizer`."""

    name: str
    vocab: int
    eos: int
    ends: tuple[int, ...]
    starts: tuple[int, ...]
    model: tokenizers.Tokenizer = dataclasses.field(repr=False, compare=False)

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, uint32 `[tokens]`, with no token added to it."""
        return np.asarray(self.model.encode(text, add_special_tokens=False).ids, np.uint32)

    def encode_prompt(self, text: str) -> np.ndarray:
        """As `transformers` encodes it, uint32 `[tokens]`, without an end. A prompt that begins with `starts` as it
        is, such as one that a chat template made, gets no others."""
        self.model.encode_special_tokens = False
        try:
            ids = self.encode(text)
        finally:
            self.model.encode_special_tokens = True
        begins = tuple(ids[: len(self.starts)].tolist()) == self.starts
        return ids if begins else np.concatenate([np.asarray(self.starts, np.uint32), ids])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, end tokens included."""
        return str(self.model.decode([int(i) for i in ids], skip_special_tokens=False))


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called "bytes", or the one in a `tokenizer.json` of Hugging Face `tokenizers`.

    Returns:
        The tokenizer. What ends a text is what the files beside a `tokenizer.json` say, and the first of `END_TOKENS`
        where they say nothing. The truncation and padding that the file asks for are off, and an end token spelled out
        inside a document is text, not an end.

    Raises:
        DataError: There is no such file, it is not a tokenizer, nothing says what ends a document, or what begins or
            ends one is no token of it.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(_TITLE, [Problem(name, 'is neither a file nor "bytes"', fix=nearest_file(path, ("bytes",)))])
    if path.stat().st_size > _LONGEST:
        raise DataError(_TITLE, [Problem(name, "is larger than any tokenizer", f"more than {_LONGEST:,} bytes")])
    content = path.read_bytes()
    try:
        model = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    # The library raises plain `Exception` for a file that is not a tokenizer.
    except Exception as error:
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
        what = "begins a text with a token that it does not have"
        problems.append(Problem(name, what, f"its post_processor adds {unknown}, and it has {vocab} tokens"))
    if problems:
        raise DataError(_TITLE, problems)
    ends = ends or tuple(token for token in (guess,) if token is not None)
    parts = [f"{path.name}:{hashlib.sha256(content).hexdigest()[:16]}", *(f"starts {token}" for token in starts)]
    parts += [f"ends {ends[0]}"] if ends[0] != guess else []  # a guess follows from the file's contents
    return JsonTokenizer(":".join(parts), vocab, ends[0], ends, starts, model)


def _ends(folder: Path, ids: dict[str, int], problems: list[Problem]) -> tuple[int, ...]:
    """What ends a text by the files beside a tokenizer: first what ends a document; nothing where they say nothing."""
    ends: list[int] = []
    found = {name: _read(folder / name, problems) for name in (*MODEL_FILES, SETTINGS)}
    known = set(ids.values())
    for name in MODEL_FILES:
        said = found[name].get("eos_token_id")
        listed = said if isinstance(said, list) else [] if said is None else [said]
        for token in listed:
            if type(token) is not int or token not in known:
                where, what = f"{folder / name}: eos_token_id", f"has {token!r}, which is no token of the tokenizer"
                problems.append(Problem(where, what, f"it has {len(known)} tokens"))
        if listed:
            ends += listed
            break
    token = found[SETTINGS].get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str) and text in ids:
        ends.append(ids[text])
    elif text is not None or isinstance(token, dict):
        problems.append(Problem(f"{folder / SETTINGS}: eos_token", f"is {text!r}, which is no token of the tokenizer"))
    return () if problems else tuple(dict.fromkeys(ends))


def _read(path: Path, problems: list[Problem]) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no file."""
    try:
        return read_object(path.resolve(), _LONGEST_BESIDE) if path.exists() else {}
    except (OSError, ValueError) as error:
        fix = f"put it right, or the {TOKENIZER} into a folder of its own"
        problems.append(Problem(str(path), "cannot be read, and may say what ends a text", str(error), fix))
        return {}


def _starts(model: tokenizers.Tokenizer) -> tuple[int, ...]:
    """What the post-processor puts before a text; what it puts behind one is left out."""
    if model.post_processor is None:
        return ()
    # A text of one word, which is a token whatever the vocabulary is.
    probe = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    probe.post_processor = model.post_processor
    found = probe.encode("a")
    before = (*found.special_tokens_mask, 0).index(0)
    return tuple(found.ids[:before])
