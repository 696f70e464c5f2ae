"""Decompress files while reading them: `x.jsonl.gz`, `x.txt.zst`.

pyarrow decompresses files of several gzip members or Zstandard frames, checks their checksums, and
raises an OSError for what is damaged or truncated.
"""

import io
from pathlib import Path, PurePath
from typing import BinaryIO

import pyarrow as pa

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Last suffix of a file → its compression."""
_BUFFER_BYTES = 2**18


def is_compressed(path: PurePath) -> bool:
    """Return whether a file is decompressed when it is read."""
    return path.suffix.lower() in COMPRESSIONS


def content_suffix(path: PurePath) -> str:
    """Return the suffix before that of a compression, in lower case.

    Example:
        >>> content_suffix(Path("a.jsonl.gz")), content_suffix(Path("b.TXT")), content_suffix(Path("c.zst"))
        ('.jsonl', '.txt', '')
    """
    if is_compressed(path):
        path = path.with_suffix("")
    return path.suffix.lower()


def open_content(path: Path) -> BinaryIO:
    """Open a file for reading its content in order, decompressed by its last suffix.

    Raises:
        OSError: The file cannot be opened. Reading raises one where the file is damaged.
    """
    codec = COMPRESSIONS.get(path.suffix.lower())
    if codec is None:
        return path.open("rb")
    source = pa.OSFile(str(path))
    if not source.size():  # which pyarrow reads as no content
        source.close()
        raise OSError(f"is empty, without the header of {codec}")
    stream: io.RawIOBase = pa.CompressedInputStream(source, codec)
    return io.BufferedReader(stream, _BUFFER_BYTES)
