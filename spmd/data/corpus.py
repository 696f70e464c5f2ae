"""Tokenize text into two memory-mapped arrays of ids, one for training and one for validation.

The result is cached under a hash of everything that it depends on: the bytes of all files, the
tokenizer, the split.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from spmd.checkpoint.manifest import read_object
from spmd.data.array_record import check_array, check_vocab, describe_array
from spmd.data.cache_folder import CacheFolder
from spmd.data.documents import Documents
from spmd.data.log_probs import LogProbs
from spmd.data.sources import find_files
from spmd.data.tokenizer import Tokenizer, document_ids, id_dtype
from spmd.errors import DataError, Problem

SPLITS = ("train", "validation")
"""Parts of a text, and names of their files."""
_LAYOUT = 1  # version of the cached files
_ABOUT = "corpus.json"
_MAX_ABOUT_BYTES = 2**20
_MAX_COUNT = 2**62
_NAMES = (*SPLITS, *(f"{split}_ends" for split in SPLITS))

T = TypeVar("T")

CacheErrors = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""Errors of a missing or damaged cache."""


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenized text.

    Each document is preceded by the tokenizer's `starts` and followed by its `eos`.

    Both splits are ids, uint16 or uint32 `[tokens]`, memory-mapped and read-only; `…_ends` are
    where their documents end. `fingerprint` is the SHA-256 of the files, the tokenizer and the
    split, in hex. `documents` counts both splits; `skipped` rows and lines without text, which are
    in neither. `…_mask`, where there is one, is true for the tokens that are trained. `notes` are
    lines about the corpus.

    With `pairs`, documents 2i and 2i + 1 are the preferred and the other answer to one prompt, and
    `documents` counts pairs; `references` are the log-probabilities of both splits under a
    reference model, if the loss needs them.
    """

    tokenizer: Tokenizer
    train: np.ndarray
    validation: np.ndarray
    train_ends: np.ndarray
    validation_ends: np.ndarray
    fingerprint: str
    documents: int
    skipped: int
    train_mask: np.ndarray | None = None
    validation_mask: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    pairs: bool = False
    references: tuple[LogProbs, LogProbs] | None = None


def make_corpus(
    source: Iterable[str],
    tokenizer: Tokenizer,
    *,
    text_field: str,
    validation: float,
    cache: CacheFolder,
) -> Corpus:
    """Return the corpus of all text in `source`, tokenizing it unless it is in the cache.

    The split of a document depends only on a hash of its name (path inside the source, and line). A
    split that would be empty gets one document; a single document is divided. Several processes may
    call this at once.

    Args:
        source: As for `spmd.data.sources.find_files`.
        validation: Fraction of documents used for validation, in (0, 1); approximate, since it is
            by hash.
    """
    files = find_files(source)
    settings = {
        "layout": _LAYOUT,
        "tokenizer": tokenizer.name,
        "validation": validation,
        "text_field": text_field,
        "files": [(file.key, *file.content_key) for file in files],
    }
    fingerprint = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    notes: list[str] = []
    folder = cache.local / fingerprint
    cached = _open_cached(folder, tokenizer.vocab, notes)
    if cached is None:
        documents = Documents(files, text_field)
        cache.make(
            fingerprint,
            lambda built: _build(documents, tokenizer, validation, built),
            lambda built: _open_cached(built, tokenizer.vocab) is not None,
        )
        cached = _read_cached(folder, tokenizer.vocab)
    (train, validation_ids, train_ends, validation_ends), counts = cached
    return Corpus(
        tokenizer,
        train,
        validation_ids,
        train_ends,
        validation_ends,
        fingerprint,
        *counts,
        notes=tuple(notes),
    )


def score(key: str) -> int:
    """Hash a document's name to a number below 2⁶⁴."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def _split(
    documents: Iterable[tuple[str, str]], scores: np.ndarray, fraction: float
) -> Iterator[tuple[bool, str]]:
    """Yield (is validation, text) of every document; neither split is empty."""
    if len(scores) == 1:
        ((_, text),) = documents
        tail = max(1, round(len(text) * fraction))
        yield from ((False, text[:-tail]), (True, text[-tail:]))
        return
    cut = validation_cut(scores, fraction)
    for key, text in documents:
        yield score(key) < cut, text


def validation_cut(scores: np.ndarray, fraction: float) -> int:
    """Return the bound of the scores: documents below it are for validation.

    Neither split of two or more documents is empty.
    """
    return min(max(int(fraction * 2**64), int(scores.min()) + 1), int(scores.max()))


def _scan(documents: Documents) -> np.ndarray:
    """Return the score of every document, uint64 `[documents]`; raise the problems of all."""
    scores = np.fromiter((score(key) for key, _ in documents), np.uint64)
    documents.check()
    if not len(scores):
        files = documents.files
        problem = Problem(str(files[0].path), "holds no text", f"{len(files)} files, all empty")
        raise DataError("invalid text:", [problem])
    return scores


def _build(documents: Documents, tokenizer: Tokenizer, fraction: float, built: Path) -> None:
    """Tokenize all documents into a folder."""
    scores = _scan(documents)
    dtype = id_dtype(tokenizer)
    files = [_token_file(built / f"{split}.npy", dtype) for split in SPLITS]
    lengths: tuple[list[int], list[int]] = ([], [])
    with files[0] as append_train, files[1] as append_validation:
        append = (append_train, append_validation)
        for is_validation, text in _split(documents, scores, fraction):
            document = document_ids(tokenizer, text)
            append[is_validation](document)
            lengths[is_validation].append(len(document))
    documents.check()
    for split, sizes in zip(SPLITS, lengths, strict=True):
        np.save(built / f"{split}_ends.npy", np.cumsum(sizes, dtype=np.int64))
    arrays = {name: np.load(built / f"{name}.npy", mmap_mode="r") for name in _NAMES}
    about = {
        "documents": len(scores),
        "skipped": documents.skipped,
        "arrays": {name: describe_array(array) for name, array in arrays.items()},
    }
    (built / _ABOUT).write_text(json.dumps(about))


@contextlib.contextmanager
def _token_file(path: Path, dtype: np.dtype) -> Iterator[Callable[[np.ndarray], object]]:
    """Yield a function to append ids to a new 1-D .npy file.

    The header's length is written last.
    """
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


def _open_cached(
    folder: Path, vocab: int, notes: list[str] | None = None
) -> tuple[list[np.ndarray], tuple[int, int]] | None:
    """Return the result of `_read_cached`, or None if a cache is missing or damaged.

    A line about a damaged one is added to `notes`.
    """
    return unless_damaged(folder, functools.partial(_read_cached, folder, vocab), notes)


def unless_damaged(folder: Path, read: Callable[[], T], notes: list[str] | None) -> T | None:
    """Return the content of a cache; None if it is missing or damaged.

    Args:
        read: Reads it, or raises one of `CacheErrors`.
        notes: A line about a damaged one is added to them.
    """
    try:
        return read()
    except CacheErrors as error:
        if notes is not None and folder.exists():
            notes.append(_rebuilt_line(folder, error))
        return None


def _rebuilt_line(folder: Path, error: Exception) -> str:
    """Return a line about a damaged cache and its error."""
    reason = str(error)
    if isinstance(error, KeyError):
        reason = f"their record has no {reason}"
    return f"the cached tokens in {folder} were damaged ({reason}): the text was tokenized again"


def _read_cached(folder: Path, vocab: int) -> tuple[list[np.ndarray], tuple[int, int]]:
    """Return the splits, their documents' ends, and numbers of documents.

    Raises:
        ValueError: An array is not as it was written, by its size or by pieces of it; other
            `CacheErrors` for a cache that is missing or cannot be read.
    """
    about = read_object(folder / _ABOUT, _MAX_ABOUT_BYTES)
    arrays = []
    for name in _NAMES:
        array = np.load(folder / f"{name}.npy", mmap_mode="r")
        check_array(name, array, about["arrays"][name])
        arrays.append(array)
    for split in SPLITS:
        check_vocab(split, about["arrays"][split], vocab)
    return arrays, (read_count(about, "documents"), read_count(about, "skipped"))


def read_count(about: Mapping[str, Any], name: str) -> int:
    """Return a count of a record; a `ValueError` if it is none."""
    count = about[name]
    if type(count) is not int or not 0 <= count < _MAX_COUNT:
        raise ValueError(f"their record has no number of {name}")
    return count
