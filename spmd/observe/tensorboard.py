"""Writer of TensorBoard's event files."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from spmd.observe.metrics import Values, Writer

_FLUSH_SECONDS = 30


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


class TensorBoard(Writer):
    """Event files in `folder`: finite numbers as scalars, texts as texts, arrays as histograms.

    `keep_through` hides later steps of an earlier process, as in `JsonLines`. Events are written by
    the caller's thread: tensorboardX's own `SummaryWriter` waits forever at its end if Ctrl-C has
    come while its queue was started.
    """

    def __init__(self, folder: str | os.PathLike[str], keep_through: int | None = None) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._keep_through = keep_through
        self._file: Any = None
        self._flushed = time.monotonic()

    def _open(self) -> None:
        """Open the file: at the first values, since the import takes a good part of a start."""
        # Imported here, because it sets an environment variable, which importing spmd must not. It
        # would also import PyTorch if that is installed, which takes seconds and is not needed.
        with _hidden("torch"):
            import tensorboardX

        self._summary = tensorboardX.summary
        self._proto = tensorboardX.proto.event_pb2
        first = 0
        if self._keep_through is not None:
            first = self._keep_through + 1
        # An event file's name has seconds only: without a suffix a quick resume would overwrite it.
        self._file = tensorboardX.event_file_writer.EventsWriter(
            str(self._folder / "events"), f".from_{first}"
        )
        if self._keep_through is not None:
            start = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._add(step=first, file_version="brain.Event:2")
            self._add(step=first, session_log=start)

    def _add(self, **fields: Any) -> None:
        self._file.write_event(self._proto.Event(wall_time=time.time(), **fields))

    def write(self, step: int, values: Values) -> None:
        """Add a scalar for each finite number, a text for each text, and a histogram for each
        array."""
        if self._file is None:
            self._open()
        for name, value in values.items():
            if isinstance(value, str):
                self._add(step=step, summary=self._summary.text(name, value))
            elif isinstance(value, np.ndarray):
                finite = value[np.isfinite(value)]
                self._add(step=step, summary=self._summary.histogram(name, finite, "auto"))
            elif value is not None and math.isfinite(value):
                self._add(step=step, summary=self._summary.scalar(name, float(value)))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Flush and close the file."""
        if self._file is not None:
            self._file.close()
