"""Output of C++ libraries on the process's standard output and error, past Python."""

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import TextIO


def separate_stdout(*, keep: bool = False) -> None:
    """Give `sys.stdout` a descriptor of its own, and drop the output of C++ on descriptor 1.

    Gloo reports its connections there. With `keep` that output goes to standard error.
    """
    if _stdout_descriptor() != 1:
        return
    sys.stdout.flush()
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding=encoding, errors=errors)
    target = 2
    if not keep:
        target = os.open(os.devnull, os.O_WRONLY)
    os.dup2(target, 1)


def redirect_native_stdout(file: TextIO) -> None:
    """Append the output of C++ on descriptor 1 to a file, if `separate_stdout` has been called."""
    if _stdout_descriptor() not in (None, 1):
        os.dup2(file.fileno(), 1)


def _stdout_descriptor() -> int | None:
    """Return the descriptor of `sys.stdout`; None where it has none, as in a notebook."""
    with contextlib.suppress(io.UnsupportedOperation):
        return sys.stdout.fileno()
    return None


REMATERIALIZATION = "Involuntary full rematerialization"
"""Words of XLA's line about an array that is copied whole to every device to change its sharding."""


@contextlib.contextmanager
def compiler_log(*, pass_on: bool = True, without: str = "") -> Iterator[list[str]]:
    """Hold back XLA's lines on the process's standard error until the end of the block.

    When the block ends, the lines are in the list, and are written to standard error. With
    `pass_on=False` they are written only if the block fails, and so are lines that contain
    `without`, such as `REMATERIALIZATION`.

    The partitioner reports an involuntary full rematerialization only there. JAX 0.10 prints such
    lines; JAX 0.12 has not been seen to do so for the same programs, and the copies then show as
    gathered activations. A program from JAX's compilation cache is not compiled, so nothing is
    printed.

    Example:
        >>> with compiler_log() as log:
        ...     _ = os.write(2, b"W0000 from C++\\n")
        >>> log
        ['W0000 from C++']
    """
    log: list[str] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile() as caught:
        before = os.dup(2)
        os.dup2(caught.fileno(), 2)
        failed = True
        try:
            yield log
            failed = False
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            caught.seek(0)
            lines = caught.read().splitlines(keepends=True)
            for line in lines:
                text = line.decode(errors="replace")
                log.append(text.rstrip("\r\n"))
                is_passed_on = pass_on and not (without and without in text)
                if failed or is_passed_on:
                    _write_all(line)


def _write_all(data: bytes) -> None:
    """Write to standard error, or drop what cannot be written."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]
