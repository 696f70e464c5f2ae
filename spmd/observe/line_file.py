"""Files of lines with a buffer in memory for the time of a full disk.

A run of a month must not end because a file of metrics could not be written for a minute. Only the
file's first opening is an error; checkpoints are another matter.
"""

import contextlib
import errno
import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from spmd.tree import human_bytes

MOST_BYTES = 16 << 20
"""Bytes that wait in memory; later lines are lost, and counted."""


def say_on_stderr(sentence: str) -> None:
    """Print a sentence on standard error, if it can be written."""
    with contextlib.suppress(OSError, ValueError):
        print(f"spmd: {sentence}", file=sys.stderr, flush=True)


class LineFile:
    """File of lines, each appended at once.

    A line that cannot be written waits, with all later ones, and each further line tries again. A
    line that was written in part is completed, so the file has whole lines afterwards.

    Args:
        path: An OSError if it cannot be opened, or is a pipe or a socket.
        say: Gets a sentence when writing fails for the first time, and when it works again.
    """

    def __init__(
        self, path: Path, say: Callable[[str], None] = say_on_stderr, most_bytes: int = MOST_BYTES
    ) -> None:
        self._path = path
        self._say = say
        self._most_bytes = most_bytes
        self._waiting = bytearray()
        self._lost = 0
        self._failed = False
        self._lock = threading.RLock()
        self._descriptor = self._open()
        if _is_cut(path):  # a killed process leaves a part of a line
            self._waiting += b"\n"

    def _open(self) -> int:
        # Opening a pipe would wait for a reader, and a write to it would wait for that one to read.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self._path, flags, 0o666)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is a pipe, not a file", str(self._path))
        return descriptor

    def fileno(self) -> int:
        """Return the descriptor; it never changes."""
        return self._descriptor

    def write(self, line: str) -> None:
        """Append a line with its newline, after all waiting ones; nothing after `close`."""
        self.append(line.encode("utf-8", errors="replace"))

    def append(self, data: bytes) -> None:
        """Append the bytes of one entry, as `write` does."""
        with self._lock:
            if self._descriptor < 0:
                return
            if self._waiting:
                self._write_waiting()
            if self._waiting and len(self._waiting) + len(data) > self._most_bytes:
                self._lost += 1
                return
            self._waiting += data
            self._write_waiting()

    def close(self) -> None:
        """Try once more to write waiting lines, and close the file; may be called again."""
        with self._lock:
            if self._descriptor < 0:
                return
            self._write_waiting()
            if self._waiting:
                size = human_bytes(len(self._waiting))
                self._say(f"{self._path} lacks its last {size}, because it cannot be written")
            os.close(self._descriptor)
            self._descriptor = -1

    def _write_waiting(self) -> None:
        try:
            if self._failed:
                self._open_again()
            while self._waiting:  # a full disk takes a part of the bytes first
                written = os.write(self._descriptor, self._waiting)
                del self._waiting[:written]
        except OSError as error:
            if not self._failed:
                self._failed = True
                reason = error.strerror or str(error)
                what = "the run continues, and what belongs there waits in memory"
                self._say(f"{self._path} cannot be written ({reason}): {what}")
            return
        if self._failed:
            self._failed = False
            lost = ""
            if self._lost:
                lost = f"; {self._lost} entries were lost in the meantime"
            self._say(f"{self._path} can be written again{lost}")
            self._lost = 0

    def _open_again(self) -> None:
        """Open the file anew, since a server may have forgotten the descriptor."""
        opened = self._open()
        os.dup2(opened, self._descriptor, inheritable=False)
        os.close(opened)


def _is_cut(path: Path) -> bool:
    """Return true for a file without a newline at its end; false for an unreadable one."""
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                return file.read(1) != b"\n"
    return False
