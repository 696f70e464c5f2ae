"""Tokenize conversations into ids with a mask of the assistant's turns.

As `spmd.data.corpus` does for text, the result is cached under a hash of everything that it depends
on.
"""

import collections
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from spmd.checkpoint.manifest import read_object
from spmd.data.array_record import check_array, check_vocab, describe_array
from spmd.data.cache_folder import CacheFolder
from spmd.data.chat import (
    LINE_FIELDS,
    BadConversationError,
    ChatConfig,
    ChatTemplate,
    read_conversation,
)
from spmd.data.corpus import (
    SPLITS,
    CacheErrors,
    Corpus,
    read_count,
    rebuilt_line,
    score,
    validation_cut,
)
from spmd.data.documents import FileProblems
from spmd.data.file_formats import JSON_FORMATS
from spmd.data.message_fields import FLAGS, READ_HERE, is_turned_off
from spmd.data.sources import SourceFile, find_files
from spmd.data.text_files import JsonRows
from spmd.data.tokenizer import Tokenizer, id_dtype
from spmd.errors import DataError, Problem

_LAYOUT = 2  # version of the cached files
_NAMES = [f"{split}{part}" for part in ("", "_ends", "_mask") for split in SPLITS]
_ABOUT = "conversations.json"
_MAX_ABOUT_BYTES = 64 << 20
_ARRAYS = "arrays"
"""Key of the records of the arrays, beside the counts."""
_FIELDS = {"message": "message field ", "line": "line field "}
"""What has fields → the start of the names under which fields that nobody reads are counted."""
_FIELDS_SHOWN = 10
_TITLE = "invalid conversations:"


def make_chat_corpus(
    source: Iterable[str],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    config: ChatConfig,
    sequence: int,
    validation: float,
    cache: CacheFolder,
) -> Corpus:
    """Return the corpus of all conversations in `source`, each a row of JSON.

    See `read_conversation`.

    A conversation is for training or for validation by a hash of its file's name and its line; a
    single one is for training. One of more than `sequence + 1` tokens is refused, dropped or
    truncated, as `config.longer` says.

    Raises:
        DataError: All conversations that cannot be used, up to ten of a file.
    """
    files = _find_rows(source)
    settings = {
        "layout": _LAYOUT,
        "tokenizer": tokenizer.name,
        "template": [template.source, template.tokens, str(template.now)],
        "longer": [config.longer, sequence],
        "validation": validation,
        "files": [(file.key, *file.content_key) for file in files],
    }
    fingerprint = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    rebuilt: list[str] = []
    folder = cache.local / fingerprint
    cached = _open_cached(folder, tokenizer.vocab, rebuilt)
    if cached is None:
        texts = _Texts(tokenizer, template, config.longer, sequence)
        cache.make(
            fingerprint,
            lambda built: _write(*texts.split(files, validation), built),
            lambda built: _open_cached(built, tokenizer.vocab) is not None,
        )
        cached = _read_cached(folder, tokenizer.vocab)
    arrays, about = cached
    return Corpus(
        tokenizer,
        arrays["train"],
        arrays["validation"],
        arrays["train_ends"],
        arrays["validation_ends"],
        fingerprint,
        about["conversations"],
        0,
        arrays["train_mask"],
        arrays["validation_mask"],
        (*rebuilt, *_notes(about, config, sequence)),
    )


def _find_rows(source: Iterable[str]) -> list[SourceFile]:
    """Return the files of all sources, and refuse those without rows of JSON."""
    files = find_files(source)
    others = [str(file.path) for file in files if file.format not in JSON_FORMATS]
    if not others:
        return files
    what = "has no rows of JSON"
    if len(others) > 1:
        what += f", nor have {len(others) - 1} more"
    fix = "--data.source chats.jsonl, or a glob such as 'chats/*.jsonl'"
    raise DataError(_TITLE, [Problem(f"data.source: {others[0]}", what, fix=fix)])


class _Texts:
    """Conversations as tokens, and counts of them."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, longer: str, sequence: int
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.longer = longer
        self.sequence = sequence
        counted = ("conversations", "longer", "dropped", "tokens", "trained", "turned off")
        self.about = dict.fromkeys(counted, 0)
        self.fields = {of: collections.Counter[str]() for of in _FIELDS}
        self.read = {"message": {*READ_HERE}, "line": {*LINE_FIELDS}}

    def split(
        self, files: Iterable[SourceFile], fraction: float
    ) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Return the arrays of both splits, and the counts."""
        problems: list[Problem] = []
        found = list(self._read(files, problems))
        if not found and not problems:
            if self.about["dropped"]:
                what = "holds none that is short enough"
                problem = Problem("data.source", what, fix="longer sequences: --data.sequence N")
            else:
                problem = Problem("data.source", "holds no conversation")
            problems.append(problem)
        if problems:
            raise DataError(_TITLE, problems)
        scores = np.array([score(key) for key, _, _ in found], np.uint64)
        held_out = np.zeros(1, bool)  # a single conversation is for training
        if len(found) > 1:
            held_out = scores < validation_cut(scores, fraction)
        arrays: dict[str, np.ndarray] = {}
        for split, wanted in zip(SPLITS, (~held_out, held_out), strict=True):
            kept = [found[i] for i in np.flatnonzero(wanted)]
            arrays |= self._joined(split, kept)
        self.about["conversations"] = len(found)
        for _, ids, mask in found:
            self.about["tokens"] += len(ids)
            self.about["trained"] += int(mask[1:].sum())
        self._count_unread_fields()
        return arrays, self.about

    def _joined(
        self, split: str, found: list[tuple[str, np.ndarray, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """Return the ids, the mask and the ends of all conversations of a split, by cached name."""
        dtype = id_dtype(self.tokenizer)
        all_ids = [np.zeros(0, dtype)]
        masks = [np.zeros(0, bool)]
        lengths = []
        for _, ids, mask in found:
            all_ids.append(ids)
            masks.append(mask)
            lengths.append(len(ids))
        return {
            split: np.concatenate(all_ids).astype(dtype),
            f"{split}_mask": np.concatenate(masks),
            f"{split}_ends": np.cumsum(lengths, dtype=np.int64),
        }

    def _count_unread_fields(self) -> None:
        """Add the counts of fields without a reader, the most frequent first."""
        for of, counts in self.fields.items():
            for name, count in counts.most_common():
                if name not in self.read[of]:
                    self.about[f"{_FIELDS[of]}{name}"] = count

    def _read(
        self, files: Iterable[SourceFile], problems: list[Problem]
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yield name, ids and mask of each kept conversation.

        Add what is wrong with others to `problems`.
        """
        for file in files:
            found = FileProblems(file)
            rows = JsonRows(file.path, self._encode, "cannot be used", found.report)
            with found.of_reading():
                for part, encoded in rows.read(file.format):
                    if encoded:
                        yield f"{file.key}{part}", *encoded
            problems += found.all()

    def _encode(self, line: Any) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the ids and the mask of a line.

        None if it is dropped, and counted, for its length.
        """
        conversation = read_conversation(line, self.template.knows)
        written = self.template.write(conversation)
        self.fields["line"].update(name for name, value in line.items() if value is not None)
        for message in conversation.messages:
            self.fields["message"].update(message.keys())
        self.read["message"] |= written.read
        self.about["turned off"] += sum(map(is_turned_off, conversation.messages))
        # JSON can contain half of a surrogate pair, which tokenizers reject
        written.text.encode("utf-8")
        ids, characters = self.tokenizer.encode_chat(written.text)
        mask = np.zeros(len(ids), bool)
        for begin, end in written.spans:
            mask |= (characters[:, 0] < end) & (characters[:, 1] > begin)
        if not mask[1:].any():
            marks = "turns of the assistant"
            if self.template.marks_turns:
                marks = "{% generation %} blocks"
            raise BadConversationError(f"nothing of it is trained: its {marks} have no tokens")
        if len(ids) > self.sequence + 1:
            self.about["longer"] += 1
            if self.longer == "refuse":
                fix = f"--data.sequence {len(ids) - 1}, or --chat.longer drop or truncate"
                detail = f"it has {len(ids):,} tokens > data.sequence + 1 = {self.sequence + 1:,}"
                raise BadConversationError(detail, fix)
            ids = ids[: self.sequence + 1]
            mask = mask[: self.sequence + 1]
            if self.longer == "drop" or not mask[1:].any():
                self.about["dropped"] += 1
                return None
        return ids, mask


def _notes(about: dict[str, int], config: ChatConfig, sequence: int) -> Iterator[str]:
    share = about["trained"] / max(about["tokens"], 1)
    of_all = f"{about['trained']:,} of {about['tokens']:,} tokens ({share:.1%})"
    yield f"trained are {of_all}: what the assistant says"
    off = about["turned off"]
    if off:
        yield f"{off:,} messages are marked not to be trained ({', '.join(FLAGS)})"
    readers = {"message": "the chat template", "line": "spmd"}
    for of, reader in readers.items():
        unread = _unread_fields(about, of)
        if unread:
            yield f"fields that {reader} does not read: {', '.join(unread)}"
    if about["longer"]:
        yield f"longer than {sequence} tokens: {_shortened(about, config)}"


def _unread_fields(about: dict[str, int], of: str) -> list[str]:
    """Return the most frequent fields of messages or lines without a reader, with counts."""
    prefix = _FIELDS[of]
    named = []
    for name, count in about.items():
        if name.startswith(prefix):
            named.append(f"{name.removeprefix(prefix)} ({count:,} {of}s)")
    more = len(named) - _FIELDS_SHOWN
    if more > 0:
        return [*named[:_FIELDS_SHOWN], f"{more} more"]
    return named


def _shortened(about: dict[str, int], config: ChatConfig) -> str:
    """Return how many long conversations were truncated and dropped."""
    truncated = about["longer"] - about["dropped"]
    dropped = about["dropped"]
    parts = []
    if truncated:
        parts.append(f"{truncated:,} were truncated")
    if dropped:
        part = f"{dropped:,} were dropped"
        if config.longer != "drop":
            part += " since the assistant says nothing in what is left of them"
        parts.append(part)
    return " and ".join(parts)


def _write(arrays: dict[str, np.ndarray], about: dict[str, int], built: Path) -> None:
    """Write the arrays and the counts into a folder."""
    for name, array in arrays.items():
        np.save(built / f"{name}.npy", array)
    records = {name: describe_array(array) for name, array in arrays.items()}
    text = json.dumps({**about, _ARRAYS: records})
    (built / _ABOUT).write_text(text, encoding="utf-8")


def _open_cached(
    folder: Path, vocab: int, notes: list[str] | None = None
) -> tuple[dict[str, np.ndarray], dict[str, int]] | None:
    """Return the arrays of both splits, memory-mapped, and the counts.

    None if a cache is missing or damaged; a line about a damaged one is added to `notes`.
    """
    try:
        return _read_cached(folder, vocab)
    except CacheErrors as error:
        if notes is not None and folder.exists():
            notes.append(rebuilt_line(folder, error))
        return None


def _read_cached(folder: Path, vocab: int) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Return the result of `_open_cached`, or raise one of `CacheErrors`."""
    about = read_object(folder / _ABOUT, _MAX_ABOUT_BYTES)
    records = about.pop(_ARRAYS)
    arrays = {}
    for name in _NAMES:
        arrays[name] = np.load(folder / f"{name}.npy", mmap_mode="r")
        check_array(name, arrays[name], records[name])
    for split in SPLITS:
        check_vocab(split, records[split], vocab)
    return arrays, {name: read_count(about, name) for name in about}
