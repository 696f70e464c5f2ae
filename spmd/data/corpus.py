"""Tokenize text into two memory-mapped arrays of ids, one for training and one for validation.

The result is cached under a hash of everything that it depends on: the bytes of all files, the tokenizer, the split.
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

# Folders of a Python installation that hold tests or differ between machines.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_BAD_LINES_SHOWN = 10
_MAX_LINE_BYTES = 2**28
_SPLITS = ("train", "validation")
_LAYOUT = 1  # version of the cached files


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenized text; each document is preceded by the tokenizer's `starts` and followed by its `eos`.

    Both splits are ids, uint16 or uint32 `[tokens]`, memory-mapped and read-only; `…_ends` are where their documents
    end. `fingerprint` is the SHA-256 of the files, the tokenizer and the split, in hex. `documents` counts both splits.
    """

    tokenizer: Tokenizer
    train: np.memmap
    validation: np.memmap
    train_ends: np.memmap
    validation_ends: np.memmap
    fingerprint: str
    documents: int


def make_corpus(
    source: Iterable[str], tokenizer: Tokenizer, *, text_field: str, validation: float, cache: Path
) -> Corpus:
    """Return the corpus of all text in `source`, tokenizing it unless it is in the folder `cache`.

    A document is a text file or a line of a `.jsonl` file. The split of a document depends only on a hash of its name
    (path inside the source, and line). A split that would be empty gets one document; a single document is divided.
    Several processes may call this at once: each writes its own folder and renames it into place.

    Args:
        source: Text files, folders, globs, `.jsonl` files or "stdlib" (Python's own source). A folder is searched for
            visible files with `TEXT_SUFFIXES`; files with other suffixes must be named or matched by a glob.
        validation: Fraction of documents used for validation, in (0, 1); approximate, since it is by hash.
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
            problem = Problem(str(cache), "cannot hold the tokenized text", str(error), "choose another folder")
            raise DataError("the corpus cannot be cached:", [problem]) from error
    (train, validation_ids, train_ends, validation_ends), documents = cached
    return Corpus(tokenizer, train, validation_ids, train_ends, validation_ends, fingerprint, documents)


@dataclasses.dataclass(frozen=True)
class _File:
    """A file to read: its path, the name that determines its split, and the SHA-256 of its bytes."""

    path: Path
    key: str
    digest: str


def _find_files(source: Iterable[str]) -> list[_File]:
    """Return each file of all sources once, in the order of the sources and of the paths within each."""
    problems: list[Problem] = []
    paths: dict[Path, tuple[Path, str]] = {}
    for number, entry in enumerate(source):
        for name, path in sorted(_files_of(entry, problems)):
            # The source's number distinguishes files with the same name in two folders.
            paths.setdefault(path.resolve(), (path, f"{number}/{name}"))
    files = []
    for path, key in paths.values():
        try:
            with path.open("rb") as content:
                files.append(_File(path, key, hashlib.file_digest(content, "sha256").hexdigest()))
        except OSError as error:
            problems.append(Problem(str(path), "cannot be read", str(error)))
    if problems:
        raise DataError("the text cannot be found:", problems)
    return files


def _files_of(entry: str, problems: list[Problem]) -> list[tuple[str, Path]]:
    """Return the files of one source, each with its path inside the source."""
    path = Path(entry).expanduser()
    if entry == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        found = [p for p in root.rglob("*.py") if _is_stdlib(p.relative_to(root).parts)]
    elif path.is_file():
        root, found = path.parent, [path]
    elif path.is_dir():
        root = path
        texts = (p for p in root.rglob("*") if p.suffix.lower() in TEXT_SUFFIXES.split())
        found = [p for p in texts if "/." not in f"/{p.relative_to(root).as_posix()}"]
    elif glob.has_magic(entry):
        root = path
        while glob.has_magic(str(root)):
            root = root.parent
        found = [Path(p) for p in glob.glob(str(path), recursive=True)]
    else:
        problems.append(Problem(entry, "does not exist", fix=nearest_file(path)))
        return []
    named = [(p.relative_to(root).as_posix(), p) for p in found if p.is_file()]
    if not named:
        problems.append(Problem(entry, "holds no text files", f"looked for {TEXT_SUFFIXES}" if path.is_dir() else ""))
    return named


def _is_stdlib(parts: tuple[str, ...]) -> bool:
    """Return whether a file is part of Python's own source, and the same on every machine with this Python."""
    built_here = parts[0].startswith("config-") or parts[-1].startswith(("_sysconfigdata", "sitecustomize"))
    return not built_here and not _NOT_STDLIB.intersection(parts)


def _documents(files: Iterable[_File], text_field: str, problems: list[Problem]) -> Iterator[tuple[str, str]]:
    """Yield the name and text of every non-empty document; unreadable ones are added to `problems`."""
    for file in files:
        digest = hashlib.sha256()
        bad_lines = 0
        with file.path.open("rb") as content:
            is_lines = file.path.suffix.lower() == ".jsonl"
            parts = iter(lambda: content.readline(_MAX_LINE_BYTES + 1), b"") if is_lines else [content.read()]
            for number, raw in enumerate(parts, start=1):
                digest.update(raw)
                where = f"{file.path}:{number}" if is_lines else str(file.path)
                try:
                    if is_lines and len(raw) > _MAX_LINE_BYTES:
                        raise ValueError(f"longer than {_MAX_LINE_BYTES:,} bytes")
                    text = raw.decode("utf-8-sig")
                    if is_lines and text.strip():
                        text = _text_of(json.loads(text), text_field)
                # Bad UTF-8, bad JSON and a missing field are ValueErrors; deeply nested JSON is a RecursionError.
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
    text = line.get(text_field) if isinstance(line, dict) else None
    if not isinstance(text, str):
        hint = did_you_mean(text_field, line) if isinstance(line, dict) else "the line is not an object"
        raise ValueError(f'no string under "{text_field}": {hint}')
    text.encode("utf-8")  # JSON can contain half of a surrogate pair, which tokenizers reject
    return text


def _score(key: str) -> int:
    """Hash a document's name to a number below 2⁶⁴."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def _split(documents: Iterable[tuple[str, str]], scores: np.ndarray, fraction: float) -> Iterator[tuple[bool, str]]:
    """Yield (is validation, text) of every document; neither split is empty."""
    if len(scores) == 1:
        ((_, text),) = documents
        tail = max(1, round(len(text) * fraction))
        yield from ((False, text[:-tail]), (True, text[-tail:]))
        return
    cut = min(max(int(fraction * 2**64), int(scores.min()) + 1), int(scores.max()))
    yield from ((_score(key) < cut, text) for key, text in documents)


def _scan(files: list[_File], text_field: str) -> np.ndarray:
    """Return the score of every document, uint64 `[documents]`, after reading all of them without a problem."""
    problems: list[Problem] = []
    scores = np.fromiter((_score(key) for key, _ in _documents(files, text_field, problems)), np.uint64)
    if not problems and not len(scores):
        problems.append(Problem(str(files[0].path), "holds no text", f"{len(files)} files, all empty"))
    if problems:
        raise DataError("the text cannot be used:", problems)
    return scores


def _build(
    files: list[_File], text_field: str, tokenizer: Tokenizer, fraction: float, folder: Path
) -> tuple[list[np.memmap], int]:
    """Tokenize all documents into `folder`, which appears complete or not at all."""
    scores = _scan(files, text_field)
    problems: list[Problem] = []
    dtype = np.dtype(np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name[:16]}-") as temporary:
        built = Path(temporary, "built")
        built.mkdir()
        train_file, validation_file = (_token_file(built / f"{split}.npy", dtype) for split in _SPLITS)
        lengths: tuple[list[int], list[int]] = ([], [])
        with train_file as train, validation_file as held_out:
            for is_validation, text in _split(_documents(files, text_field, problems), scores, fraction):
                ids = (np.array(tokenizer.starts, np.int64), tokenizer.encode(text), np.array([tokenizer.eos]))
                (held_out if is_validation else train)(document := np.concatenate(ids))
                lengths[is_validation].append(len(document))
        if problems:
            raise DataError("the text cannot be used:", problems)
        for split, sizes in zip(_SPLITS, lengths, strict=True):
            np.save(built / f"{split}_ends.npy", np.cumsum(sizes, dtype=np.int64))
        (built / "corpus.json").write_text(json.dumps({"documents": len(scores)}))
        mine = _open_cached(built)
        assert mine is not None
        if _open_cached(folder) is None:
            # Another process may move the damaged folder, or create a valid one, at the same time.
            with contextlib.suppress(FileNotFoundError):
                folder.rename(Path(temporary, "damaged"))
        try:
            built.rename(folder)
        except OSError:
            if not folder.exists():
                raise
        return _open_cached(folder) or mine


@contextlib.contextmanager
def _token_file(path: Path, dtype: np.dtype) -> Iterator[Callable[[np.ndarray], object]]:
    """Yield a function that appends ids to a new 1-D .npy file; the header's length is written last."""
    with path.open("wb") as file:

        def write_header(length: int) -> int:
            file.seek(0)
            header = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
            np.lib.format.write_array_header_1_0(file, header)
            return file.tell()

        start = write_header(0)
        yield lambda ids: file.write(ids.astype(dtype).tobytes())
        length = (file.tell() - start) // dtype.itemsize
        end = write_header(length)
        assert end == start, "NumPy reserves space in the header for the first dimension to grow"
        file.flush()
        os.fsync(file.fileno())


def _open_cached(folder: Path) -> tuple[list[np.memmap], int] | None:
    """Return the splits, their documents' ends, and the number of documents; None if a cache is missing or damaged."""
    try:
        names = (*_SPLITS, *(f"{split}_ends" for split in _SPLITS))
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in names]
        return arrays, int(json.loads((folder / "corpus.json").read_text())["documents"])
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None
