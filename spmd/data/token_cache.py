"""Blocks of documents: parts of a text, tokenized once for all runs with the same cache.

A scan of bytes cuts the files into blocks without parsing them. Small files are put together in the
order of hashes of their names, so that a block is a sample of the text; JSON lines are cut between
lines; any other file is one block.
"""

import dataclasses
import functools
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from spmd.data.cache_folder import CacheFolder
from spmd.data.compression import open_content
from spmd.data.documents import Documents
from spmd.data.file_formats import MAX_LINE_BYTES, FileFormat
from spmd.data.sources import SourceFile
from spmd.data.text_files import text_rows
from spmd.data.tokenizer import Tokenizer, document_ids, id_dtype
from spmd.errors import DataError, Problem, first_of

MOST_BYTES = 2**23
LEAST_BYTES = 2**16
_BLOCKS = 256
"""Blocks that a text is cut into, as far as the limits of their bytes allow."""
_SKIPPED_AT_ONCE = 2**20
_LAYOUT = 2  # version of the cached files
_IDS = "ids.npy"
_ENDS = "ends.npy"


@dataclasses.dataclass(frozen=True)
class LineRange:
    """Part of a file of JSON lines: first byte, size, number of the first line, and SHA-256.

    Bytes are those of the decompressed content.
    """

    file: SourceFile
    begin: int
    size: int
    line: int
    digest: str


@dataclasses.dataclass(frozen=True)
class TextBlock:
    """Whole files, or a range of the lines of one."""

    parts: tuple[SourceFile, ...] | tuple[LineRange]
    size: int

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the content and the kinds of its files."""
        suffixes = []
        digests = []
        for part in self.parts:
            if isinstance(part, LineRange):
                suffixes.append(".jsonl")
                digests.append(part.digest)
            else:
                suffixes.append(part.path.suffix.lower())
                digests += part.content_key
        return _hash(suffixes + digests)


def cut_blocks(files: Sequence[SourceFile]) -> list[TextBlock]:
    """Return the blocks of files, each document in one.

    The order depends on names and bytes alone.

    Raises:
        DataError: Compressed files are damaged or truncated.
    """
    sizes = {file.key: file.path.stat().st_size for file in files}
    size = min(max(sum(sizes.values()) // _BLOCKS, LEAST_BYTES), MOST_BYTES)
    blocks: list[TextBlock] = []
    problems: list[Problem] = []
    group: list[SourceFile] = []
    held = 0  # bytes of the group
    for file in sorted(files, key=lambda file: _hash(file.key)):
        if sizes[file.key] > size and file.format is FileFormat.JSON_LINES:
            try:
                blocks += [TextBlock((each,), each.size) for each in _line_ranges(file, size)]
            except OSError as error:
                problems.append(Problem(str(file.path), "cannot be read", str(error)))
            continue
        group.append(file)
        held += sizes[file.key]
        if held >= size:
            blocks.append(TextBlock(tuple(group), held))
            group = []
            held = 0
    if held:
        blocks.append(TextBlock(tuple(group), held))
    if problems:
        raise DataError("invalid text:", first_of(problems))
    return blocks


def _line_ranges(file: SourceFile, size: int) -> Iterator[LineRange]:
    """Cut a file at the first end of a line, `size` bytes or more after the last cut."""
    with open_content(file.path) as content:
        begin = 0
        line = 1
        while piece := content.read(size):
            if not piece.endswith(b"\n"):
                piece += content.readline(MAX_LINE_BYTES)
            yield LineRange(file, begin, len(piece), line, hashlib.sha256(piece).hexdigest())
            begin += len(piece)
            line += piece.count(b"\n")


@dataclasses.dataclass(frozen=True)
class TokenCache:
    """Tokenized blocks, for several runs at once; each is a folder of the cache."""

    cache: CacheFolder
    tokenizer: Tokenizer
    text_field: str

    def path(self, block: TextBlock) -> Path:
        """Return the local folder of a block."""
        return self.cache.local / self._name(block)

    def _name(self, block: TextBlock) -> str:
        name = _hash([_LAYOUT, self.tokenizer.name, self.text_field, block.digest])
        return f"blocks/{name[:2]}/{name}"

    def open(self, block: TextBlock) -> tuple[np.ndarray, np.ndarray] | None:
        """Return ids `[tokens]`, memory-mapped, and where documents end.

        None if missing or damaged: cut, of another length, or with ids that the tokenizer lacks.
        """
        return self._read(self.path(block))

    def _read(self, folder: Path) -> tuple[np.ndarray, np.ndarray] | None:
        """Return ids and ends of a folder; see `open`."""
        try:
            ids = np.load(folder / _IDS, mmap_mode="r")
            ends = np.load(folder / _ENDS)
        except (OSError, EOFError, ValueError):
            return None
        if ids.ndim != 1 or ends.ndim != 1 or ends.dtype != np.int64:
            return None
        if (np.diff(ends, prepend=0) < 0).any():
            return None
        expected = 0
        if len(ends):
            expected = ends[-1]
        if len(ids) != expected or ids.dtype != id_dtype(self.tokenizer):
            return None
        if len(ids) and int(ids.max()) >= self.tokenizer.vocab:
            return None
        return ids, ends

    def get(self, block: TextBlock) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and ends as `open` does, after tokenizing the block if need be."""
        opened = self.open(block)
        if opened is None:
            self.make(block, wait=True)
            opened = self.open(block)
        if opened is None:  # it was damaged since
            problem = Problem(str(self.path(block)), "cannot be read", fix="another --data.cache")
            raise DataError("the text cannot be cached:", [problem])
        return opened

    def make(self, block: TextBlock, *, wait: bool) -> bool:
        """Tokenize a block unless it is there.

        Return False if another thread, process or host does and `wait` is false.
        """
        return self.cache.make(
            self._name(block),
            lambda folder: self._build(block, folder),
            lambda folder: self._read(folder) is not None,
            wait,
        )

    def _build(self, block: TextBlock, folder: Path) -> None:
        """Tokenize a block into a folder."""
        ids, ends = tokenize(block, self.tokenizer, self.text_field)
        np.save(folder / _IDS, ids)
        np.save(folder / _ENDS, ends)


def tokenize(
    block: TextBlock, tokenizer: Tokenizer, text_field: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a block's documents, and where each ends.

    Raises:
        DataError: A document cannot be read, or a file is not as it was when it was cut.
    """
    problems: list[Problem] = []
    if isinstance(block.parts[0], LineRange):
        texts = _texts_of_range(block.parts[0], text_field, problems)
    else:
        files = [part for part in block.parts if isinstance(part, SourceFile)]
        texts = _texts_of_files(files, text_field, problems)
    found = [document_ids(tokenizer, text) for text in texts]
    if problems:
        raise DataError("invalid text:", first_of(problems))
    ids = np.zeros(0, id_dtype(tokenizer))
    if found:
        ids = np.concatenate(found).astype(ids.dtype)
    return ids, np.cumsum([len(each) for each in found], dtype=np.int64)


def _texts_of_files(
    files: list[SourceFile], text_field: str, problems: list[Problem]
) -> Iterator[str]:
    """Yield the documents of whole files, and add problems at the end."""
    documents = Documents(files, text_field)
    for _, text in documents:
        yield text
    problems += documents.problems


def _texts_of_range(part: LineRange, text_field: str, problems: list[Problem]) -> Iterator[str]:
    path = part.file.path
    try:
        with open_content(path) as content:
            _go_to(content, part.begin)
            raw = content.read(part.size)
    except OSError as error:
        problems.append(Problem(str(path), "cannot be read", str(error)))
        return
    if hashlib.sha256(raw).hexdigest() != part.digest:
        fix = "restore it, or start another run"
        problems.append(Problem(str(path), "changed while it was read", fix=fix))
        return
    numbered = enumerate(io.BytesIO(raw), start=part.line)
    for _, text in text_rows(path, text_field, problems.append).read_lines(numbered):
        if text is not None and text.strip():
            yield text


def _go_to(content: BinaryIO, begin: int) -> None:
    """Go to a byte; of a compressed file all before it is decompressed, as it has no index."""
    if content.seekable():
        content.seek(begin)
        return
    while begin:
        skipped = len(content.read(min(begin, _SKIPPED_AT_ONCE)))
        if not skipped:  # the file is shorter than it was at the scan
            return
        begin -= skipped


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
