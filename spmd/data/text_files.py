"""Read documents of text files, and rows of JSON: of lines, of one array, or of one object.

Lines are not read by pyarrow: it was at most 1.5 times as fast (600 against 400 MiB/s, of which a
tokenizer takes tens), stops at the first bad line, numbers it within a block, and takes a line
without the field for a null.
"""

import dataclasses
import functools
import io
import json
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, TextIO, TypeVar

from spmd.data.compression import is_compressed, open_content
from spmd.data.file_formats import JSON_FORMATS, MAX_LINE_BYTES, FileFormat
from spmd.data.json_array import array_items
from spmd.errors import Problem, did_you_mean

Report = Callable[[Problem], None]
T = TypeVar("T")


def read_text(path: Path, text_field: str, report: Report) -> Iterator[tuple[str, str | None]]:
    """Yield the whole file as one document."""
    del text_field
    try:
        with open_content(path) as content:
            yield "", content.read().decode("utf-8-sig")
    except UnicodeError as error:
        report(Problem(str(path), "is not UTF-8", str(error)))


def read_json(
    path: Path, text_field: str, report: Report, *, form: FileFormat
) -> Iterator[tuple[str, str | None]]:
    """Yield one field of each row of JSON; blank lines are no documents."""
    yield from text_rows(path, text_field, report).read(form)


def text_rows(path: Path, text_field: str, report: Report) -> "JsonRows[str | None]":
    """Return the rows of a file as texts."""
    convert = functools.partial(_text_of, text_field)
    return JsonRows(path, convert, "is not a document", report)


@dataclasses.dataclass(frozen=True)
class JsonRows(Generic[T]):
    """Rows of a JSON file, each converted to a value.

    Args:
        convert: Row → value; it raises a ValueError for a row that it cannot use.
        unusable: Sentence about such a row.
        report: Receives the problems; reading goes on where the format allows.
    """

    path: Path
    convert: Callable[[Any], T]
    unusable: str
    report: Report

    def read(self, form: FileFormat) -> Iterator[tuple[str, T]]:
        """Yield the name of each row within the file, and its value."""
        assert form in JSON_FORMATS
        if form is FileFormat.JSON_LINES:
            with open_content(self.path) as content:
                lines = iter(lambda: content.readline(MAX_LINE_BYTES + 1), b"")
                yield from self.read_lines(enumerate(lines, start=1))
        elif form is FileFormat.JSON_ARRAY:
            with io.TextIOWrapper(open_content(self.path), encoding="utf-8-sig") as text:
                yield from self._read_array(text)
        else:
            with open_content(self.path) as content:
                yield from self._read_object(content)

    def read_lines(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[str, T]]:
        """Yield the rows of some numbered lines of the file."""
        for number, raw in lines:
            try:
                if len(raw) > MAX_LINE_BYTES:
                    raise ValueError(f"longer than {MAX_LINE_BYTES:,} bytes")
                line = raw.decode("utf-8-sig")
                if not line.strip():
                    continue
                value = self.convert(json.loads(line))
            # Bad UTF-8, bad JSON and a missing field are ValueErrors; deeply nested JSON is a
            # RecursionError.
            except (ValueError, RecursionError) as error:
                self._report(f":{number}", self.unusable, error)
            else:
                yield f":{number}", value

    def _read_array(self, text: TextIO) -> Iterator[tuple[str, T]]:
        """Yield the rows of an array; the first bad character ends it."""
        items = array_items(text, MAX_LINE_BYTES)
        number = 0
        while True:
            part = f"[{number}]"
            try:
                row = next(items)
            except StopIteration:
                return
            except (ValueError, RecursionError) as error:
                self._report(part, "cannot be read: the array is damaged or cut off", error)
                return
            try:
                value = self.convert(row)
            except (ValueError, RecursionError) as error:
                self._report(part, self.unusable, error)
            else:
                yield part, value
            number += 1

    def _read_object(self, content: BinaryIO) -> Iterator[tuple[str, T]]:
        """Yield the single row of a file with one object."""
        found: Any = None
        what = "is neither JSON lines, nor an array of objects, nor one object"
        try:
            raw = content.read(MAX_LINE_BYTES + 1)
            if len(raw) > MAX_LINE_BYTES:
                raise ValueError(f"one value, longer than {MAX_LINE_BYTES:,} bytes")
            found = json.loads(raw.decode("utf-8-sig"))
            if isinstance(found, dict):
                what = "is one JSON object, which is no row"
            value = self.convert(found)
        except (ValueError, RecursionError) as error:
            self._report("", what, error, _how_to_make_rows(self.path, found))
        else:
            yield "", value

    def _report(self, part: str, what: str, error: Exception, fix: str = "") -> None:
        if isinstance(error, UnicodeError):
            what = "is not UTF-8"
        fix = fix or getattr(error, "fix", "")
        self.report(Problem(f"{self.path}{part}", what, str(error), fix))


def _text_of(text_field: str, row: Any) -> str | None:
    """Return a field of a row; None if it is null."""
    if not isinstance(row, dict):
        raise ValueError(f'no string under "{text_field}": the row is not an object')
    text = row.get(text_field, 0)
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError(f'no string under "{text_field}": {did_you_mean(text_field, row)}')
    text.encode("utf-8")  # JSON can contain half of a surrogate pair, which tokenizers reject
    return text


def _how_to_make_rows(path: Path, found: Any) -> str:
    """Return the fix of a file without rows."""
    as_text = f"to train on its text as it is, name it {path.stem}.txt"
    if not isinstance(found, dict):
        return f"JSON lines, or one array of objects; {as_text}"
    for name, value in found.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = f".[{json.dumps(name)}][]"
            command = f"jq -c {shlex.quote(rows)} {shlex.quote(str(path))} > rows.jsonl"
            if is_compressed(path):
                command = f"decompress it, and {command.replace(path.name, path.stem)}"
            return f"its {len(value):,} rows are under {name!r}: {command}"
    return f"JSON lines, or one array of objects; {as_text}"
