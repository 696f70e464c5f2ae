"""Items of one JSON array, such as a file of 10 GB, with a piece of its text in memory."""

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

_PIECE = 2**20  # characters
_BLANKS = re.compile(r"[ \t\r\n]*")


def array_items(text: TextIO, longest: int) -> Iterator[Any]:
    """Yield the items of an array.

    Args:
        longest: Characters after which an item without an end is given up.

    Raises:
        ValueError: The text is no array, is cut off, or has text after it.

    Example:
        >>> import io
        >>> list(array_items(io.StringIO('[{"text": "a"}, 2]'), longest=100))
        [{'text': 'a'}, 2]
    """
    reader = _ValueReader(text, longest)
    reader.skip("[")
    separator = ","
    if reader.next_character() == "]":
        separator = reader.skip("]")
    while separator == ",":
        yield reader.value()
        separator = reader.skip(",]")
    if reader.next_character():
        raise ValueError("text after the end of the array")


class _ValueReader:
    """JSON values and characters of a text, in order."""

    def __init__(self, text: TextIO, longest: int) -> None:
        self._text = text
        self._longest = longest
        self._buffer = ""
        self._at = 0
        self._decoder = json.JSONDecoder()

    def next_character(self) -> str:
        """Skip blanks, and return the next character without passing it; empty at the end."""
        self._skip_blanks()
        return self._buffer[self._at : self._at + 1]

    def skip(self, expected: str) -> str:
        """Pass the next character, one of those expected, and return it."""
        found = self.next_character()
        if not found:
            raise ValueError("the file ends within the array")
        if found not in expected:
            raise ValueError(f"{found!r} in place of {' or '.join(expected)}")
        self._at += 1
        return found

    def value(self) -> Any:
        """Pass the next value, and return it."""
        self._skip_blanks()
        size = _PIECE
        while True:
            value = None
            end = len(self._buffer)
            problem = ""
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                problem = error.msg
            # At the end of the piece a number may go on, and anything else may be cut.
            if end < len(self._buffer) or not self._read_more(size):
                break
            size *= 2
            if len(self._buffer) - self._at > self._longest:
                raise ValueError(f"an item is longer than {self._longest:,} characters")
        if problem:
            raise ValueError(f"an item is no JSON, or cut off: {problem}")
        self._at = end
        return value

    def _skip_blanks(self) -> None:
        while True:
            found = _BLANKS.match(self._buffer, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._buffer) or not self._read_more(_PIECE):
                return

    def _read_more(self, size: int) -> bool:
        """Add text to the buffer, and drop what was passed; return whether there was any."""
        piece = self._text.read(size)
        if piece:
            self._buffer = self._buffer[self._at :] + piece
            self._at = 0
        return bool(piece)
