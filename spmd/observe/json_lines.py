"""Records in lines of JSON: read without damaged ones, and kept up to a step.

A line is damaged if it is not JSON, or not a record of this program: an object with a `step`, whose
values are texts, null, and numbers that a float can hold, also in lists and objects inside each
other to a depth of `_DEEPEST`. (The depth that `json` reads differs between releases of Python.)
"""

import contextlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

DAMAGED = ".damaged"
"""Suffix of the file beside another one that damaged lines are moved to."""
_MAX_STEP = 2**62
_DEEPEST = 32


def read_json_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of a file without damaged lines; none if there is no file."""
    path = Path(path)
    records: list[dict[str, Any]] = []
    if not path.is_file():
        return records
    for line in path.read_bytes().split(b"\n"):
        record = _record(line)
        if record is not None:
            records.append(record)
    return records


def count_lines(path: str | os.PathLike[str]) -> int:
    """Count the lines of a file, damaged ones too, without empty ones; 0 if there is no file."""
    path = Path(path)
    if not path.is_file():
        return 0
    return sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))


def drop_later_lines(path: Path, keep_through: int | None, say: Callable[[str], None]) -> None:
    """Drop the cut last line of a file, and lines of steps after `keep_through`, atomically.

    Other damaged lines are appended to the file with `DAMAGED` beside it, and `say` gets their
    number.

    Raises:
        OSError: A file cannot be written; its name is in the error.
    """
    content = path.read_bytes()
    *lines, last = content.split(b"\n")
    kept = []
    damaged = []
    for line in lines:
        record = _record(line)
        if record is None and line.strip():
            damaged.append(line)
        elif record is not None and (keep_through is None or record["step"] <= keep_through):
            kept.append(line)
    last_record = _record(last)
    if last_record is not None and (keep_through is None or last_record["step"] <= keep_through):
        kept.append(last)
    if damaged:
        aside = path.with_name(path.name + DAMAGED)
        _write(aside, damaged, "ab")
        say(f"{path}: {_count(damaged)}, moved to {aside.name}")
    if _joined(kept) == content:
        return
    rest = path.with_name(f"{path.name}.tmp")
    _write(rest, kept, "wb")
    rest.replace(path)


def _joined(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _count(damaged: list[bytes]) -> str:
    if len(damaged) == 1:
        return "1 line was damaged"
    return f"{len(damaged)} lines were damaged"


def _write(path: Path, lines: list[bytes], mode: str) -> None:
    try:
        with path.open(mode) as file:
            file.write(_joined(lines))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)
        raise


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None if the line is empty or damaged."""
    # A ValueError is of JSON, of UTF-8 or of an integer of thousands of digits.
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and _is_step(record.get("step")) and _is_plain(record):
            return record
    return None


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_STEP


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether a value at a depth is plain: its numbers finite as floats, not too deep."""
    if depth > _DEEPEST:
        return False
    if isinstance(value, dict):
        return all(_is_plain(inner, depth + 1) for inner in value.values())
    if isinstance(value, list):
        return all(_is_plain(inner, depth + 1) for inner in value)
    if not isinstance(value, int | float):
        return True
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
