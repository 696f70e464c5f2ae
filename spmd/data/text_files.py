"""Read documents of text files and of JSON lines.

Lines are not read by pyarrow: it was at most 1.5 times as fast (600 against 400 MiB/s, of which a
tokenizer takes tens), stops at the first bad line, numbers it within a block, and takes a line
without the field for a null.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from spmd.errors import Problem, did_you_mean

MAX_LINE_BYTES = 2**28


def read_text(
    path: Path, text_field: str, report: Callable[[Problem], None]
) -> Iterator[tuple[str, str | None]]:
    """Yield the whole file as one document."""
    del text_field
    try:
        yield "", path.read_bytes().decode("utf-8-sig")
    except UnicodeError as error:
        report(Problem(str(path), "is not UTF-8", str(error)))


def read_json_lines(
    path: Path, text_field: str, report: Callable[[Problem], None]
) -> Iterator[tuple[str, str | None]]:
    """Yield one field of each line; blank lines are no documents."""
    with path.open("rb") as content:
        lines = enumerate(iter(lambda: content.readline(MAX_LINE_BYTES + 1), b""), start=1)
        yield from parse_json_lines(lines, path, text_field, report)


def parse_json_lines(
    lines: Iterable[tuple[int, bytes]],
    path: Path,
    text_field: str,
    report: Callable[[Problem], None],
) -> Iterator[tuple[str, str | None]]:
    """Yield one field of each of some numbered lines of a file."""
    for number, raw in lines:
        try:
            if len(raw) > MAX_LINE_BYTES:
                raise ValueError(f"longer than {MAX_LINE_BYTES:,} bytes")
            line = raw.decode("utf-8-sig")
            if not line.strip():
                continue
            text = _text_of(json.loads(line), text_field)
        # Bad UTF-8, bad JSON and a missing field are ValueErrors; deeply nested JSON is a
        # RecursionError.
        except (ValueError, RecursionError) as error:
            what = "is not a document"
            if isinstance(error, UnicodeError):
                what = "is not UTF-8"
            report(Problem(f"{path}:{number}", what, str(error)))
        else:
            yield f":{number}", text


def _text_of(line: Any, text_field: str) -> str | None:
    """Return a field of a line; None if it is null."""
    if not isinstance(line, dict):
        raise ValueError(f'no string under "{text_field}": the line is not an object')
    text = line.get(text_field, 0)
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError(f'no string under "{text_field}": {did_you_mean(text_field, line)}')
    text.encode("utf-8")  # JSON can contain half of a surrogate pair, which tokenizers reject
    return text
