"""Writer of TensorBoard's event files."""

import contextlib
import math
import os
import sys
from collections.abc import Iterator

import numpy as np

from spmd.observe.metrics import Values, Writer


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Make a package that is not imported yet look as if it were not installed."""
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

    `keep_through` hides later steps of an earlier process, as in `JsonLines`.
    """

    def __init__(self, folder: str | os.PathLike[str], keep_through: int | None = None) -> None:
        # Imported here, because it sets an environment variable, which importing spmd must not. It would also import
        # PyTorch if that is installed, which takes seconds and is not needed.
        with _hidden("torch"):
            import tensorboardX

        first = None if keep_through is None else keep_through + 1
        # An event file's name has seconds only: without a suffix a quick resume would overwrite it.
        self._writer = tensorboardX.SummaryWriter(str(folder), purge_step=first, filename_suffix=f".from_{first or 0}")

    def write(self, step: int, values: Values) -> None:
        """Add a scalar for each finite number, a text for each text, and a histogram for each array."""
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, step)
            elif isinstance(value, np.ndarray):
                self._writer.add_histogram(name, value[np.isfinite(value)], step)
            elif value is not None and math.isfinite(value):
                self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()
