"""Writer of TensorBoard's event files."""

import contextlib
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from spmd.observe.line_file import LineFile, say_on_stderr
from spmd.observe.metrics import Values, Writer


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Let a package look as if it were not installed, unless it is imported already."""
    is_new = package not in sys.modules
    if is_new:
        sys.modules[package] = None  # type: ignore[assignment]  # `import` then raises ImportError
    try:
        yield
    finally:
        if is_new:
            del sys.modules[package]


def import_tensorboard() -> Any:
    """Import the package, ahead of its first use."""
    # Imported here, because it sets an environment variable, which importing spmd must not. It
    # would also import PyTorch if that is installed, which takes seconds and is not needed.
    with _hidden("torch"):
        import tensorboardX
    return tensorboardX


class TensorBoard(Writer):
    """Event files in `folder`: finite numbers as scalars, texts as texts, arrays as histograms.

    `keep_through` hides later steps of an earlier process, as in `JsonLines`. Events are written by
    the caller's thread: tensorboardX's own `SummaryWriter` waits forever at its end if Ctrl-C has
    come while its queue was started. On a full disk they wait in memory, as `LineFile` says.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep_through: int | None = None,
        say: Callable[[str], None] = say_on_stderr,
    ) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._keep_through = keep_through
        self._say = say
        self._file: LineFile | None = None
        self._events = bytearray()  # of one call

    def _open(self) -> LineFile:
        """Open the file: at the first values, since the import takes a good part of a start."""
        tensorboardX = import_tensorboard()
        self._summary = tensorboardX.summary
        self._proto = tensorboardX.proto.event_pb2
        self._checksum = tensorboardX.record_writer.masked_crc32c
        first = 0
        if self._keep_through is not None:
            first = self._keep_through + 1
        # Without a suffix a quick resume would have the file of the process before.
        now = int(time.time())
        name = f"events.out.tfevents.{now:010}.{socket.gethostname()}.from_{first}"
        self._file = LineFile(self._folder / name, self._say)
        self._add(file_version="brain.Event:2")
        if self._keep_through is not None:
            start = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._add(step=first, file_version="brain.Event:2")
            self._add(step=first, session_log=start)
        return self._file

    def _add(self, **fields: Any) -> None:
        """Add an event as a record: its length, its bytes, and checksums of both."""
        event = self._proto.Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(event))
        self._events += length + struct.pack("<I", self._checksum(length))
        self._events += event + struct.pack("<I", self._checksum(event))

    def write(self, step: int, values: Values) -> None:
        """Add a scalar for each finite number, a text for each text, and a histogram for each
        array."""
        file = self._file or self._open()
        for name, value in values.items():
            if isinstance(value, str):
                self._add(step=step, summary=self._summary.text(name, value))
            elif isinstance(value, np.ndarray):
                finite = value[np.isfinite(value)]
                self._add(step=step, summary=self._summary.histogram(name, finite, "auto"))
            elif value is not None and math.isfinite(value):
                self._add(step=step, summary=self._summary.scalar(name, float(value)))
        file.append(bytes(self._events))
        self._events.clear()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
