"""Tokenize conversations, or pairs of them, into ids with a mask of the trained turns.

As `spmd.data.corpus` does for text, the result is cached under a hash of everything that it depends
on.
"""

import collections
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    ChatText,
    Conversation,
    each_turn,
    read_conversation,
)
from spmd.data.corpus import (
    SPLITS,
    Corpus,
    read_count,
    score,
    unless_damaged,
    validation_cut,
)
from spmd.data.documents import FileProblems
from spmd.data.file_formats import JSON_FORMATS
from spmd.data.log_probs import LogProbs
from spmd.data.message_fields import FLAGS, READ_HERE, is_turned_off, weight_of
from spmd.data.preferences import PAIR_FIELDS, read_pair
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
_Document = tuple[np.ndarray, np.ndarray]
"""Ids of a conversation, and the mask of those that are trained, or their weights."""


def _one_conversation(line: Any, roles: Callable[[str], bool]) -> tuple[Conversation, ...]:
    return (read_conversation(line, roles),)


@dataclasses.dataclass(frozen=True)
class RowForm:
    """Form of the rows of JSON files.

    Attributes:
        name: What a row is.
        trained: What of it is trained.
        read: A row and the roles that there are → its conversations.
        fields: Names of the fields that are read.
    """

    name: str
    trained: str
    read: Callable[[Any, Callable[[str], bool]], tuple[Conversation, ...]]
    fields: tuple[str, ...]


CONVERSATIONS = RowForm("conversation", "what the assistant says", _one_conversation, LINE_FIELDS)
"""See `read_conversation`."""
PAIRS = RowForm("pair of answers", "both answers", read_pair, PAIR_FIELDS)
"""See `spmd.data.preferences`."""


def make_chat_corpus(
    source: Iterable[str],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    config: ChatConfig,
    sequence: int,
    validation: float,
    cache: CacheFolder,
    form: RowForm = CONVERSATIONS,
    with_reference: bool = False,
) -> Corpus:
    """Return the corpus of all conversations in `source`, each a row of JSON, or of all pairs.

    A conversation is for training or for validation by a hash of its file's name and its line; a
    single one is for training. One of more than `sequence + 1` tokens is refused, dropped or
    truncated, as `config.longer` says; so is a pair with more than `sequence` targets.

    Args:
        with_reference: Give the corpus places for the log-probabilities of a reference model.

    Raises:
        DataError: All conversations that cannot be used, up to ten of a file.
    """
    files = find_rows(source)
    settings = {
        "layout": _LAYOUT,
        "tokenizer": tokenizer.name,
        "template": [template.source, template.tokens, str(template.now)],
        "longer": [config.longer, sequence],
        "validation": validation,
        "files": [(file.key, *file.content_key) for file in files],
    }
    if form is not CONVERSATIONS:
        settings["form"] = form.name
    if config.turns != ChatConfig.turns:
        settings["turns"] = config.turns
    fingerprint = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    rebuilt: list[str] = []
    folder = cache.local / fingerprint
    cached = _open_cached(folder, tokenizer.vocab, rebuilt)
    if cached is None:
        texts = _Texts(tokenizer, template, config, sequence, form)
        cache.make(
            fingerprint,
            lambda built: _write(*texts.split(files, validation), built),
            lambda built: _open_cached(built, tokenizer.vocab) is not None,
        )
        cached = _read_cached(folder, tokenizer.vocab)
    arrays, about = cached
    references = None
    if with_reference:
        train, held_out = (
            LogProbs(f"{fingerprint[:16]}-{split}", len(arrays[split])) for split in SPLITS
        )
        references = train, held_out
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
        (*rebuilt, *_notes(about, config, sequence, form)),
        form is PAIRS,
        references,
    )


def find_rows(source: Iterable[str]) -> list[SourceFile]:
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
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        config: ChatConfig,
        sequence: int,
        form: RowForm,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.longer = config.longer
        self.turns = config.turns
        self.sequence = sequence
        self.form = form
        of_rows = ("conversations", "longer", "dropped", "equal", "turns")
        of_tokens = ("tokens", "trained")
        of_messages = ("turned off", "weighted")
        self.about = dict.fromkeys((*of_rows, *of_tokens, *of_messages), 0)
        self.fields = {of: collections.Counter[str]() for of in _FIELDS}
        self.read = {"message": {*READ_HERE}, "line": {*form.fields}}

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
                problem = Problem("data.source", f"holds no {self.form.name}")
            problems.append(problem)
        if problems:
            raise DataError(_TITLE, problems)
        scores = np.array([score(key) for key, _ in found], np.uint64)
        held_out = np.zeros(1, bool)  # a single conversation is for training
        if len(found) > 1:
            held_out = scores < validation_cut(scores, fraction)
        arrays: dict[str, np.ndarray] = {}
        for split, wanted in zip(SPLITS, (~held_out, held_out), strict=True):
            documents = list[_Document]()
            for index in np.flatnonzero(wanted):
                documents += found[index][1]
            arrays |= self._joined(split, documents)
        self.about["conversations"] = len(found)
        for _, documents in found:
            for ids, mask in documents:
                self.about["tokens"] += len(ids)
                self.about["trained"] += int(np.count_nonzero(mask[1:]))
        self._count_unread_fields()
        return arrays, self.about

    def _joined(self, split: str, found: Sequence[_Document]) -> dict[str, np.ndarray]:
        """Return the ids, the mask and the ends of all conversations of a split, by cached name."""
        dtype = id_dtype(self.tokenizer)
        all_ids = [np.zeros(0, dtype)]
        masks = [np.zeros(0, bool)]
        lengths = []
        for ids, mask in found:
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
    ) -> Iterator[tuple[str, list[_Document]]]:
        """Yield the name and the documents of each kept row.

        Add what is wrong with others to `problems`.
        """
        for file in files:
            found = FileProblems(file)
            rows = JsonRows(file.path, self._encode, "cannot be used", found.report)
            with found.of_reading():
                for part, documents in rows.read(file.format):
                    if documents:
                        yield f"{file.key}{part}", documents
            problems += found.all()

    def _encode(self, line: Any) -> list[_Document]:
        """Return the documents of a line; none if it is dropped, and counted."""
        conversations = self.form.read(line, self.template.knows)
        self._count_fields(line, conversations)
        if self.form is PAIRS:
            documents = list(map(self._document, conversations))
            if all(np.array_equal(ids, documents[0][0]) for ids, _ in documents):
                self.about["equal"] += 1
                return []
            return self._fitting(documents)
        if self.turns == "each":
            (conversation,) = conversations
            conversations = tuple(each_turn(conversation))
            self.about["turns"] += len(conversations)
        kept = []
        for conversation in conversations:
            kept += self._fitting([self._document(conversation)])
        return kept

    def _count_fields(self, line: Any, conversations: Iterable[Conversation]) -> None:
        """Count the fields of a line and its messages, and the weights of these."""
        self.fields["line"].update(name for name, value in line.items() if value is not None)
        for conversation in conversations:
            for message in conversation.messages:
                self.fields["message"].update(message.keys())
                if self.form is CONVERSATIONS:  # others mark their prompts
                    self.about["turned off"] += is_turned_off(message)
                    self.about["weighted"] += weight_of(message) not in (0.0, 1.0)

    def _fitting(self, documents: list[_Document]) -> list[_Document]:
        """Return documents for one sequence, shortened if need be; none if they are dropped."""
        if sum(map(_count_targets, documents)) <= self.sequence:
            return documents
        self.about["longer"] += 1
        if self.longer == "refuse":
            raise self._too_long(documents)
        kept = self._truncated(documents)
        if self.longer == "drop" or not all(mask[1:].any() for _, mask in kept):
            self.about["dropped"] += 1
            return []
        return kept

    def _document(self, conversation: Conversation) -> _Document:
        """Return the ids and the mask of a conversation."""
        written = self.template.write(conversation)
        self.read["message"] |= written.read
        # JSON can contain half of a surrogate pair, which tokenizers reject
        written.text.encode("utf-8")
        ids, _, mask = trained_tokens(self.tokenizer, written)
        if not mask[1:].any():
            marks = "turns of the assistant"
            if self.template.marks_turns:
                marks = "{% generation %} blocks"
            raise BadConversationError(f"nothing of it is trained: its {marks} have no tokens")
        return ids, mask

    def _too_long(self, documents: Sequence[_Document]) -> BadConversationError:
        """Return the error of a row longer than a sequence."""
        targets = list(map(_count_targets, documents))
        needed = sum(targets)
        fix = f"--data.sequence {needed}, or --chat.longer drop or truncate"
        if len(targets) == 1:
            limit = f"data.sequence + 1 = {self.sequence + 1:,}"
            return BadConversationError(f"it has {needed + 1:,} tokens > {limit}", fix)
        parts = " + ".join(f"{count:,}" for count in targets)
        detail = f"its answers have {parts} = {needed:,} targets > data.sequence = "
        return BadConversationError(f"{detail}{self.sequence:,}", fix)

    def _truncated(self, documents: Sequence[_Document]) -> list[_Document]:
        """Return the beginnings of documents: the longest lose most, so that all fit together."""
        left = self.sequence
        kept = list(documents)
        by_length = sorted(range(len(documents)), key=lambda index: len(documents[index][0]))
        for place, index in enumerate(by_length):
            ids, mask = documents[index]
            share = left // (len(documents) - place)
            targets = min(len(ids) - 1, share)
            kept[index] = (ids[: targets + 1], mask[: targets + 1])
            left -= targets
        return kept


def _count_targets(document: _Document) -> int:
    """Return the number of tokens after the first one."""
    ids, _ = document
    return len(ids) - 1


def trained_tokens(
    tokenizer: Tokenizer, written: ChatText
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the ids of a conversation, their characters `[n, 2]`, and the mask of trained ones.

    Where a weight is neither 0 nor 1, the mask has the weights, float32.
    """
    ids, characters = tokenizer.encode_chat(written.text)
    weights = np.zeros(len(ids), np.float32)
    for part in written.parts:
        is_inside = (characters[:, 0] < part.end) & (characters[:, 1] > part.begin)
        weights[is_inside] = np.maximum(weights[is_inside], part.weight)
    if all(part.weight == 1 for part in written.parts):
        return ids, characters, weights > 0
    return ids, characters, weights


def _notes(
    about: dict[str, int], config: ChatConfig, sequence: int, form: RowForm
) -> Iterator[str]:
    share = about["trained"] / max(about["tokens"], 1)
    of_all = f"{about['trained']:,} of {about['tokens']:,} tokens ({share:.1%})"
    yield f"trained are {of_all}: {form.trained}"
    equal = about.get("equal", 0)
    if equal:
        yield f"dropped, since both answers are equal: {equal:,}"
    off = about["turned off"]
    if off:
        yield f"{off:,} messages are marked not to be trained ({', '.join(FLAGS)})"
    weighted = about.get("weighted", 0)
    if weighted:
        yield f"{weighted:,} messages have weights other than 0 and 1"
    turns = about.get("turns", 0)
    if turns:
        yield f"each of {turns:,} turns of the assistant is a text by itself"
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
    return unless_damaged(folder, functools.partial(_read_cached, folder, vocab), notes)


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
