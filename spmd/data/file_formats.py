"""Formats of data files, by the name, and by the content where the name leaves it open.

`spmd.data.sources.find_files` decides once for each file; whatever reads text or conversations acts
on that. A `.json` file may hold JSON lines, one array of rows, or one object. A file with a name of
text that holds JSON lines is refused: it would be one document of raw JSON.
"""

import enum
import json
from pathlib import Path
from typing import BinaryIO

from spmd.data.compression import content_suffix, is_compressed, open_content
from spmd.errors import DataError, Problem

MAX_LINE_BYTES = 2**28
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class FileFormat(enum.Enum):
    """Format of a file; the values are in the names of caches."""

    TEXT = "text"
    JSON_LINES = "json lines"
    JSON_ARRAY = "json array"
    JSON_OBJECT = "json object"
    PARQUET = "parquet"
    ARROW = "arrow"


TABLES = {
    ".parquet": FileFormat.PARQUET,
    ".arrow": FileFormat.ARROW,
    ".feather": FileFormat.ARROW,
}
JSON_FORMATS = frozenset(
    {FileFormat.JSON_LINES, FileFormat.JSON_ARRAY, FileFormat.JSON_OBJECT},
)
JSON_LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})
ROW_SUFFIXES = JSON_LINES_SUFFIXES | TABLES.keys() | {".json"}
"""Suffixes of files with rows."""


def detect_format(path: Path) -> FileFormat:
    """Return the format of a file by its name and its beginning.

    Raises:
        DataError: The name contradicts the content, or the file is a compressed table, an archive
            or no text.
        OSError: The file cannot be read.
    """
    suffix = content_suffix(path)
    if suffix == ".tar":
        what = "is an archive of files, and would be one document"
        raise DataError("invalid text:", [Problem(str(path), what, fix="unpack it")])
    if suffix in TABLES:
        _check_table(path)
        return TABLES[suffix]
    with open_content(path) as content:
        first = _first_character(content)
        if suffix in JSON_LINES_SUFFIXES or suffix == ".json":
            return _json_format(suffix, first, content)
        if b"\0" in _beginning(content):
            what = "holds zero bytes, which are no text"
            fix = "unpack it if it is an archive, or write it as UTF-8"
            raise DataError("invalid text:", [Problem(str(path), what, fix=fix)])
        if first == b"{" and _has_json_lines(content):
            what = "holds JSON lines, and by its name would be one document of raw JSON"
            raise DataError("invalid text:", [Problem(str(path), what, fix=_renamed(path))])
    return FileFormat.TEXT


def _json_format(suffix: str, first: bytes, content: BinaryIO) -> FileFormat:
    """Return the format of a file of JSON, opened at its beginning."""
    if first == b"[":
        return FileFormat.JSON_ARRAY
    if suffix in JSON_LINES_SUFFIXES or not first or _has_json_lines(content):
        return FileFormat.JSON_LINES
    return FileFormat.JSON_OBJECT


def _check_table(path: Path) -> None:
    """Raise a `DataError` for a table inside of a compressed file."""
    if not is_compressed(path):
        return
    what = "is a compressed table, which is not read: tables are compressed inside"
    fix = f"decompress it to {path.with_suffix('').name}"
    raise DataError("invalid text:", [Problem(str(path), what, fix=fix)])


def _renamed(path: Path) -> str:
    """Return the fix: a name for rows."""
    if is_compressed(path):
        name = path.with_suffix("").with_suffix(f".jsonl{path.suffix}").name
    else:
        name = path.with_suffix(".jsonl").name
    return f"rename it to {name}"


def _beginning(content: BinaryIO) -> bytes:
    """Return some of the next bytes without passing them; empty at the end."""
    beginning: bytes = content.peek(1)  # type: ignore[attr-defined]
    return beginning


def _first_character(content: BinaryIO) -> bytes:
    """Return the first byte after blanks, and pass a byte order mark; empty at the end."""
    beginning = _beginning(content)
    if beginning.startswith(_BYTE_ORDER_MARK):
        content.read(len(_BYTE_ORDER_MARK))
    return beginning.removeprefix(_BYTE_ORDER_MARK).lstrip()[:1]


def _has_json_lines(content: BinaryIO) -> bool:
    """Return whether the first line is a JSON object, and another begins below it."""
    try:
        is_object = isinstance(json.loads(_next_line(content)), dict)
    except (ValueError, RecursionError):
        return False
    return is_object and _next_line(content).lstrip().startswith(b"{")


def _next_line(content: BinaryIO) -> bytes:
    """Skip blank lines, and return the next; empty at the end."""
    while line := content.readline(MAX_LINE_BYTES):
        if line.strip():
            return line
    return b""
