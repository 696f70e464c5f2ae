"""TensorBoard's event files."""

import contextlib
import os
import sys
from collections.abc import Iterator

from spmd.observe.metrics import Values, Writer


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Inside, a package that has not been imported seems not to be installed."""
    is_new = package not in sys.modules
    if is_new:
        sys.modules[package] = None  # type: ignore[assignment]  # which `import` takes for missing
    try:
        yield
    finally:
        if is_new:
            del sys.modules[package]


class TensorBoard(Writer):
    """Event files in `folder` that TensorBoard shows: numbers as curves, texts as texts.

    With `keep_through`, as for `JsonLines`, it hides what an earlier process wrote of later steps.
    """

    def __init__(self, folder: str | os.PathLike[str], keep_through: int | None = None) -> None:
        # Here, because it sets a variable of the environment, which importing spmd must not; and it would import
        # PyTorch where that is installed, for which the start of a run would wait seconds, and in vain.
        with _hidden("torch"):
            import tensorboardX

        first = None if keep_through is None else keep_through + 1
        # The name of an event file has only seconds in it: without a suffix a quick resume would overwrite it.
        self._writer = tensorboardX.SummaryWriter(str(folder), purge_step=first, filename_suffix=f".from_{first or 0}")

    def write(self, step: int, values: Values) -> None:
        """Adds one point for each number and one text for each text."""
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, step)
            elif value is not None:
                self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        """Writes out what is waiting and closes the file."""
        self._writer.close()
