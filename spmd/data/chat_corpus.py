"""Tokenize conversations into ids with a mask of what is trained: the assistant's turns.

As `spmd.data.corpus` does for text, the result is cached under a hash of everything that it depends on.
"""

import collections
import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from spmd.data.chat import LINE_FIELDS, BadConversationError, ChatConfig, ChatTemplate, read_conversation
from spmd.data.corpus import Corpus, install, score, validation_cut
from spmd.data.message_fields import FLAGS, READ_HERE, is_turned_off
from spmd.data.sources import SourceFile, find_files
from spmd.data.tokenizer import Tokenizer
from spmd.errors import DataError, Problem

_LAYOUT = 2  # version of the cached files
_PROBLEMS_SHOWN = 10
_SPLITS = ("train", "validation")
_NAMES = [f"{split}{part}" for part in ("", "_ends", "_mask") for split in _SPLITS]
_ABOUT = "conversations.json"
_FIELDS = {"message": "message field ", "line": "line field "}
"""What has fields → the start of the names under which fields that nobody reads are counted."""
_FIELDS_SHOWN = 10
_TITLE = "the conversations cannot be used:"


def make_chat_corpus(
    source: Iterable[str],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    config: ChatConfig,
    sequence: int,
    validation: float,
    cache: Path,
) -> Corpus:
    """Return the corpus of all conversations in `source`, each a line of a `.jsonl` file; see `read_conversation`.

    A conversation is for training or for validation by a hash of its file's name and its line; a single one is for
    training. One of more than `sequence + 1` tokens is refused, dropped or truncated, as `config.longer` says.

    Raises:
        DataError: All conversations that cannot be used, up to ten of a file.
    """
    files = _find_lines(source)
    settings = {
        "layout": _LAYOUT,
        "tokenizer": tokenizer.name,
        "template": [template.source, template.tokens, str(template.now)],
        "longer": [config.longer, sequence],
        "validation": validation,
        "files": [(file.key, file.digest) for file in files],
    }
    fingerprint = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    cached = _open_cached(cache / fingerprint)
    if cached is None:
        texts = _Texts(tokenizer, template, config.longer, sequence)
        arrays, about = texts.split(files, validation)
        try:
            _write(arrays, about, cache / fingerprint)
        except OSError as error:
            fix = "choose another folder: --data.cache DIR"
            problem = Problem(str(cache), "cannot hold the tokens", str(error), fix)
            raise DataError("the conversations cannot be cached:", [problem]) from error
        cached = _open_cached(cache / fingerprint) or (arrays, about)
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
        tuple(_notes(about, config, sequence)),
    )


def _find_lines(source: Iterable[str]) -> list[SourceFile]:
    """Return the files of all sources, which must be of lines."""
    files = find_files(source)
    if others := [str(file.path) for file in files if file.path.suffix.lower() != ".jsonl"]:
        more = f", nor are {len(others) - 1} more" if len(others) > 1 else ""
        fix = "--data.source chats.jsonl, or a glob such as 'chats/*.jsonl'"
        raise DataError(_TITLE, [Problem(f"data.source: {others[0]}", f"is not a .jsonl file{more}", fix=fix)])
    return files


class _Texts:
    """Conversations as tokens, and counts of them."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, longer: str, sequence: int) -> None:
        self.tokenizer, self.template, self.longer, self.sequence = tokenizer, template, longer, sequence
        self.about = dict.fromkeys(("conversations", "longer", "dropped", "tokens", "trained", "turned off"), 0)
        self.fields = {of: collections.Counter[str]() for of in _FIELDS}
        self.read = {"message": {*READ_HERE}, "line": {*LINE_FIELDS}}

    def split(self, files: Iterable[SourceFile], fraction: float) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Return the arrays of both splits, and the counts."""
        problems: list[Problem] = []
        found = list(self._read(files, problems))
        if not found and not problems:
            what, fix = "holds no conversation", ""
            if self.about["dropped"]:
                what, fix = "holds none that is short enough", "longer sequences: --data.sequence N"
            problems.append(Problem("data.source", what, fix=fix))
        if problems:
            raise DataError(_TITLE, problems)
        scores = np.array([score(key) for key, _, _ in found], np.uint64)
        held_out = scores < validation_cut(scores, fraction) if len(found) > 1 else np.zeros(1, bool)
        dtype = np.uint16 if self.tokenizer.vocab <= 2**16 else np.uint32
        arrays: dict[str, np.ndarray] = {}
        for split, wanted in zip(_SPLITS, (~held_out, held_out), strict=True):
            kept = [found[i] for i in np.flatnonzero(wanted)]
            arrays[split] = np.concatenate([np.zeros(0, dtype), *(ids for _, ids, _ in kept)]).astype(dtype)
            arrays[f"{split}_mask"] = np.concatenate([np.zeros(0, bool), *(mask for _, _, mask in kept)])
            arrays[f"{split}_ends"] = np.cumsum([len(ids) for _, ids, _ in kept], dtype=np.int64)
        self.about["conversations"] = len(found)
        self.about["tokens"] = sum(len(ids) for _, ids, _ in found)
        self.about["trained"] = sum(int(mask[1:].sum()) for _, _, mask in found)
        for of, counts in self.fields.items():
            unread = {name: count for name, count in counts.most_common() if name not in self.read[of]}
            self.about |= {f"{_FIELDS[of]}{name}": count for name, count in unread.items()}
        return arrays, self.about

    def _read(
        self, files: Iterable[SourceFile], problems: list[Problem]
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yield name, ids and mask of each conversation that is kept; add what is wrong with others to `problems`."""
        for file in files:
            digest, bad = hashlib.sha256(), 0
            with file.path.open("rb") as content:
                for number, raw in enumerate(content, 1):
                    digest.update(raw)
                    try:
                        text = raw.decode("utf-8-sig")
                        encoded = self._encode(json.loads(text)) if text.strip() else None
                    except (ValueError, RecursionError) as error:
                        bad += 1
                        if bad <= _PROBLEMS_SHOWN:
                            fix = error.fix if isinstance(error, BadConversationError) else ""
                            problems.append(Problem(f"{file.path}:{number}", "cannot be used", str(error), fix))
                        continue
                    if encoded:
                        yield f"{file.key}:{number}", *encoded
            if (more := bad - _PROBLEMS_SHOWN) > 0:
                problems.append(Problem(str(file.path), f"has {more} more lines like these"))
            if digest.hexdigest() != file.digest:
                problems.append(Problem(str(file.path), "changed while it was read", fix="run again"))

    def _encode(self, line: Any) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the ids and the mask of a line; None if it is dropped, and counted, for its length."""
        conversation = read_conversation(line, self.template.knows)
        written = self.template.write(conversation)
        self.fields["line"].update(name for name, value in line.items() if value is not None)
        for message in conversation.messages:
            self.fields["message"].update(message.keys())
        self.read["message"] |= written.read
        self.about["turned off"] += sum(map(is_turned_off, conversation.messages))
        written.text.encode("utf-8")  # JSON can contain half of a surrogate pair, which tokenizers reject
        ids, characters = self.tokenizer.encode_chat(written.text)
        mask = np.zeros(len(ids), bool)
        for begin, end in written.spans:
            mask |= (characters[:, 0] < end) & (characters[:, 1] > begin)
        if not mask[1:].any():
            marks = "{% generation %} blocks" if self.template.marks_turns else "turns of the assistant"
            raise BadConversationError(f"nothing of it is trained: its {marks} have no tokens")
        if len(ids) > self.sequence + 1:
            self.about["longer"] += 1
            if self.longer == "refuse":
                fix = f"--data.sequence {len(ids) - 1}, or --chat.longer drop or truncate"
                detail = f"it has {len(ids):,} tokens > data.sequence + 1 = {self.sequence + 1:,}"
                raise BadConversationError(detail, fix)
            ids, mask = ids[: self.sequence + 1], mask[: self.sequence + 1]
            if self.longer == "drop" or not mask[1:].any():
                self.about["dropped"] += 1
                return None
        return ids, mask


def _notes(about: dict[str, int], config: ChatConfig, sequence: int) -> Iterator[str]:
    share = about["trained"] / max(about["tokens"], 1)
    yield f"trained are {about['trained']:,} of {about['tokens']:,} tokens ({share:.1%}): what the assistant says"
    if off := about["turned off"]:
        yield f"{off:,} messages are marked not to be trained ({', '.join(FLAGS)})"
    for of, prefix in _FIELDS.items():
        counts = {name.removeprefix(prefix): n for name, n in about.items() if name.startswith(prefix)}
        named = [f"{name} ({n:,} {of}s)" for name, n in itertools.islice(counts.items(), _FIELDS_SHOWN)]
        named += [f"{len(counts) - _FIELDS_SHOWN} more"] * (len(counts) > _FIELDS_SHOWN)
        if named:
            reader = "the chat template" if of == "message" else "spmd"
            yield f"fields that {reader} does not read: {', '.join(named)}"
    if about["longer"]:
        cut, out = about["longer"] - about["dropped"], about["dropped"]
        why = "" if config.longer == "drop" else " since the assistant says nothing in what is left of them"
        parts = [f"{cut:,} were truncated"] * bool(cut) + [f"{out:,} were dropped{why}"] * bool(out)
        yield f"longer than {sequence} tokens: {' and '.join(parts)}"


def _write(arrays: dict[str, np.ndarray], about: dict[str, int], folder: Path) -> None:
    """Write the arrays into `folder`, which appears complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name[:16]}-") as temporary:
        built = Path(temporary, "built")
        built.mkdir()
        for name, array in arrays.items():
            np.save(built / f"{name}.npy", array)
        (built / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
        install(built, folder, is_whole=_open_cached(folder) is not None)


def _open_cached(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, int]] | None:
    """Return the arrays of both splits, memory-mapped, and the counts; None if a cache is missing or damaged."""
    try:
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _NAMES}
        return arrays, {name: int(n) for name, n in json.loads((folder / _ABOUT).read_text()).items()}
    except (OSError, EOFError, ValueError, AttributeError, TypeError):
        return None
