"""Standard output and standard error of a run, without errors after a lost reader.

The reader of a pipe exits (`spmd train … | head -1`), a terminal is closed, or the disk that output
is redirected to is full. An exception of a `print` would then end a run between two checkpoints.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast

_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)
"""Errors of a pipe without a reader, and of a terminal that was closed: they do not pass."""


class LastingStream:
    """Text stream without errors: lost output is dropped, and reported once.

    It equals the stream that it writes to: logging handlers close a stream unless it is standard
    output or standard error.

    Attributes:
        listeners: Functions that get the sentence about lost output, such as of a log.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self.listeners: list[Callable[[str], None]] = []
        self._stream = stream
        self._name = name
        self._lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._stream

    def __hash__(self) -> int:
        return hash(self._stream)

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts, or drop them."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream, or drop its contents."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def finish(self) -> None:
        """Flush the stream; discard its contents after an error, since Python flushes at exit."""
        if self._stream.closed:
            return
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)
            self._discard()

    def _lose(self, error: OSError) -> None:
        if error.errno in _GONE:
            self._discard()
        if self._lost:
            return
        self._lost = True
        reason = error.strerror or str(error)
        sentence = f"{self._name} cannot be written ({reason}): the run continues without it"
        for say in self.listeners:
            say(sentence)

    def _discard(self) -> None:
        """Redirect the stream, with its contents, to the null device."""
        with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Let standard output and standard error of a block be `LastingStream`s."""
    is_lasting = isinstance(sys.stdout, LastingStream)
    if is_lasting or sys.stdout is None or sys.stderr is None:
        yield
        return
    before = sys.stdout, sys.stderr
    output = LastingStream(sys.stdout, "standard output")
    error = LastingStream(sys.stderr, "standard error")
    output.listeners.append(lambda line: print(f"spmd: {line}", file=error, flush=True))
    sys.stdout = cast(TextIO, output)
    sys.stderr = cast(TextIO, error)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        output.finish()
        error.finish()


@contextlib.contextmanager
def also_said_by(say: Callable[[str], None]) -> Iterator[None]:
    """Let `say` have the sentences about output that a block of `lasting_output` loses."""
    streams = [each for each in (sys.stdout, sys.stderr) if isinstance(each, LastingStream)]
    for stream in streams:
        stream.listeners.append(say)
    try:
        yield
    finally:
        for stream in streams:
            stream.listeners.remove(say)
