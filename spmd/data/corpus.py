"""From text to two memory-mapped rows of token ids: one to train on, one to validate with.

Text is tokenised once. The result is kept under the hash of everything that it depends on (the bytes of every
file, the tokenizer, the split), so a changed file is a new corpus and an unchanged one costs one read.
"""

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from spmd.data.tokenizer import Tokenizer
from spmd.errors import DataError, Problem, did_you_mean, nearest_file

TEXT_SUFFIXES = ".txt .md .rst .tex .html .jsonl .py .c .h .cpp .cu .rs .go .java .js .ts .jl .r .sh"

# Folders and files of an installation that differ between machines, or that are tests.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_BAD_LINES_SHOWN = 10
_LONGEST = 2**28  # bytes of a line of JSON
_HALVES = ("train", "validation")
_LAYOUT = 1  # raised when the meaning of the cached files changes


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised text, every document with the tokenizer's `starts` before it and its `eos` behind it.

    Args:
        tokenizer: What made the ids.
        train: Ids to train on, uint16 or uint32 `[tokens]`, memory-mapped and read-only.
        validation: Ids of the other documents, the same.
        fingerprint: SHA-256, in hex, of the files, the tokenizer and the split: equal ones hold equal ids.
        documents: How many documents both hold together.
    """

    tokenizer: Tokenizer
    train: np.memmap
    validation: np.memmap
    fingerprint: str
    documents: int


def make_corpus(
    source: Iterable[str], tokenizer: Tokenizer, *, text_field: str, validation: float, cache: Path
) -> Corpus:
    """The corpus of all text in `source`, tokenised now unless `cache` holds it.

    A document is a text file or a line of a `.jsonl` file. A hash of its name (path inside the source, and
    line) alone decides whether it is kept for validation; only a half that would be empty is given one
    document more, and a single document gives its tail.

    Any number of processes may call this at once: each writes a folder of its own and renames it into place.

    Args:
        source: Text files, folders, globs, `.jsonl` files or the word "stdlib" (Python's own source). A
            folder is searched for `TEXT_SUFFIXES`, hidden files left out; a file of another kind is read when
            it is named itself or matched by a glob.
        tokenizer: What makes the ids.
        text_field: The field of a `.jsonl` line that holds its text.
        validation: The fraction of documents kept for validation, in (0, 1); approximate, being by hash.
        cache: The folder that holds tokenised text.

    Raises:
        DataError: A source is missing, unreadable, not UTF-8 or empty, or the cache cannot be written.
    """
    files = _find_files(source)
    settings = {
        "layout": _LAYOUT,
        "tokenizer": tokenizer.name,
        "validation": validation,
        "text_field": text_field,
        "files": [(file.key, file.digest) for file in files],
    }
    fingerprint = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    cached = _open_cached(cache / fingerprint)
    if cached is None:
        try:
            cached = _build(files, text_field, tokenizer, validation, cache / fingerprint)
        except OSError as error:
            problem = Problem(str(cache), "cannot hold the tokenised text", str(error), "name another folder")
            raise DataError("the corpus cannot be cached:", [problem]) from error
    train, held_out, documents = cached
    return Corpus(tokenizer, train, held_out, fingerprint, documents)


@dataclasses.dataclass(frozen=True)
class _File:
    """A file to read: where it is, the name that decides its half, and the SHA-256 of its bytes."""

    path: Path
    key: str
    digest: str = ""


def _find_files(source: Iterable[str]) -> list[_File]:
    """Every file of every source once, in the order of the sources and of the paths within each."""
    problems: list[Problem] = []
    files: dict[Path, _File] = {}
    for number, entry in enumerate(source):
        for name, path in sorted(_files_of(entry, problems)):
            # Two folders may hold files of one name; the source's number keeps them apart.
            files.setdefault(path.resolve(), _File(path, f"{number}/{name}"))
    for resolved, file in files.items():
        try:
            with file.path.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            files[resolved] = dataclasses.replace(file, digest=digest)
        except OSError as error:
            problems.append(Problem(str(file.path), "cannot be read", str(error)))
    if problems:
        raise DataError("the text cannot be found:", problems)
    return list(files.values())


def _files_of(entry: str, problems: list[Problem]) -> list[tuple[str, Path]]:
    """The files that one source names, each with its path inside that source."""
    path = Path(entry).expanduser()
    if entry == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        found = [p for p in root.rglob("*.py") if _is_stdlib(p.relative_to(root).parts)]
    elif path.is_file():
        root, found = path.parent, [path]
    elif path.is_dir():
        root = path
        found = [
            p
            for p in root.rglob("*")
            if p.suffix.lower() in TEXT_SUFFIXES.split() and "/." not in f"/{p.relative_to(root).as_posix()}"
        ]
    elif glob.has_magic(entry):
        fixed = [*path.parts]
        while glob.has_magic("/".join(fixed)):
            fixed.pop()
        root = Path(*fixed)
        found = [Path(p) for p in glob.glob(str(path), recursive=True)]
    else:
        problems.append(Problem(entry, "does not exist", fix=nearest_file(path)))
        return []
    named = [(p.relative_to(root).as_posix(), p) for p in found if p.is_file()]
    if not named:
        looked = f"looked for {TEXT_SUFFIXES}" if path.is_dir() else ""
        problems.append(Problem(entry, "holds no text files", looked))
    return named


def _is_stdlib(parts: tuple[str, ...]) -> bool:
    """Whether a file is part of Python's own source, and the same on every machine with this Python."""
    built_here = parts[0].startswith("config-") or parts[-1].startswith(("_sysconfigdata", "sitecustomize"))
    return not built_here and not _NOT_STDLIB.intersection(parts)


def _documents(files: Iterable[_File], text_field: str, problems: list[Problem]) -> Iterator[tuple[str, str]]:
    """The name and text of every document that is not empty; what cannot be read is added to `problems`."""
    for file in files:
        digest = hashlib.sha256()
        bad_lines = 0
        with file.path.open("rb") as content:
            is_lines = file.path.suffix.lower() == ".jsonl"
            parts = iter(lambda: content.readline(_LONGEST + 1), b"") if is_lines else [content.read()]
            for number, raw in enumerate(parts, start=1):
                digest.update(raw)
                where = f"{file.path}:{number}" if is_lines else str(file.path)
                try:
                    if is_lines and len(raw) > _LONGEST:
                        raise ValueError(f"longer than {_LONGEST:,} bytes")
                    text = raw.decode("utf-8-sig")
                    if is_lines and text.strip():
                        text = _text_of(json.loads(text), text_field)
                # Bad UTF-8, bad JSON and a missing field are all ValueErrors; JSON may also be nested too deep.
                except (ValueError, RecursionError) as error:
                    bad_lines += 1
                    if bad_lines <= _BAD_LINES_SHOWN:
                        what = "is not UTF-8" if isinstance(error, UnicodeError) else "is not a document"
                        problems.append(Problem(where, what, str(error)))
                    continue
                if text.strip():
                    yield (f"{file.key}:{number}" if is_lines else file.key), text
        if (more := bad_lines - _BAD_LINES_SHOWN) > 0:
            problems.append(Problem(str(file.path), f"has {more} more lines like these"))
        if digest.hexdigest() != file.digest:
            problems.append(Problem(str(file.path), "changed while it was read", fix="run again"))


def _text_of(line: Any, text_field: str) -> str:
    """The text in one decoded line of a `.jsonl` file."""
    text = line.get(text_field) if isinstance(line, dict) else None
    if not isinstance(text, str):
        there = did_you_mean(text_field, line) if isinstance(line, dict) else "the line is not an object"
        raise ValueError(f'no string under "{text_field}": {there}')
    text.encode("utf-8")  # JSON can spell half of a surrogate pair, which no tokenizer takes
    return text


def _score(key: str) -> int:
    """A document's name as an evenly spread number below 2⁶⁴, the same in every run."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def _halves(documents: Iterable[tuple[str, str]], scores: np.ndarray, fraction: float) -> Iterator[tuple[bool, str]]:
    """Every document with whether it is for validation; neither half is empty."""
    if len(scores) == 1:
        ((_, text),) = documents
        tail = max(1, round(len(text) * fraction))
        yield from ((False, text[:-tail]), (True, text[-tail:]))
        return
    cut = min(max(int(fraction * 2**64), int(scores.min()) + 1), int(scores.max()))
    yield from ((_score(key) < cut, text) for key, text in documents)


def _scan(files: list[_File], text_field: str) -> np.ndarray:
    """The score of every document, uint64 `[documents]`, once all of them were read without a problem."""
    problems: list[Problem] = []
    scores = np.fromiter((_score(key) for key, _ in _documents(files, text_field, problems)), np.uint64)
    if not problems and not len(scores):
        problems.append(Problem(str(files[0].path), "holds no text", f"{len(files)} files, all empty"))
    if problems:
        raise DataError("the text cannot be used:", problems)
    return scores


def _build(
    files: list[_File], text_field: str, tokenizer: Tokenizer, fraction: float, folder: Path
) -> tuple[np.memmap, np.memmap, int]:
    """Tokenises all documents into `folder`, which appears whole or not at all."""
    scores = _scan(files, text_field)
    problems: list[Problem] = []
    dtype = np.dtype(np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name[:16]}-") as temporary:
        built = Path(temporary, "built")
        built.mkdir()
        files_of_ids = [_token_file(built / f"{half}.npy", dtype) for half in _HALVES]
        with files_of_ids[0] as train, files_of_ids[1] as held_out:
            for is_validation, text in _halves(_documents(files, text_field, problems), scores, fraction):
                ids = (np.array(tokenizer.starts, np.int64), tokenizer.encode(text), np.array([tokenizer.eos]))
                (held_out if is_validation else train)(np.concatenate(ids))
        if problems:
            raise DataError("the text cannot be used:", problems)
        (built / "corpus.json").write_text(json.dumps({"documents": len(scores)}))
        mine = _open_cached(built)
        assert mine is not None
        if _open_cached(folder) is None:
            # At this moment another process may move the same damaged folder aside, or put a whole one there.
            with contextlib.suppress(FileNotFoundError):
                folder.rename(Path(temporary, "damaged"))
        try:
            built.rename(folder)
        except OSError:
            if not folder.exists():
                raise
        return _open_cached(folder) or mine


@contextlib.contextmanager
def _token_file(path: Path, dtype: np.dtype) -> Iterator[Callable[[np.ndarray], None]]:
    """A function that appends ids to a new 1-D .npy file, whose length is written last."""
    with path.open("wb") as file:

        def write_header(length: int) -> int:
            file.seek(0)
            header = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
            np.lib.format.write_array_header_1_0(file, header)
            return file.tell()

        def append(ids: np.ndarray) -> None:
            file.write(ids.astype(dtype).tobytes())

        start = write_header(0)
        yield append
        length = (file.tell() - start) // dtype.itemsize
        end = write_header(length)
        assert end == start, "NumPy pads the header so that the first dimension can grow in place"
        file.flush()
        os.fsync(file.fileno())


def _open_cached(folder: Path) -> tuple[np.memmap, np.memmap, int] | None:
    """The halves and the number of documents in a cache folder; None where it is missing or damaged."""
    try:
        halves = [np.load(folder / f"{half}.npy", mmap_mode="r") for half in _HALVES]
        return halves[0], halves[1], int(json.loads((folder / "corpus.json").read_text())["documents"])
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None
