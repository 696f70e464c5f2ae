"""Log-probabilities of a split's tokens under a reference model: computed once, kept in a file."""

import zipfile
from pathlib import Path

import numpy as np

from spmd.errors import DataError, Problem

_ARRAY = "log_probs"
_DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
_FIX = "restore the file, or start a new run"


class LogProbs:
    """A float32 for each token of a split: its log-probability after the tokens before it.

    Rows of pairs read it. A run fills it before its first step, and one that is resumed reads the
    file in its folder. Tokens that are no targets have no number in it.

    Args:
        name: Of the file.
        length: Number of tokens.
    """

    def __init__(self, name: str, length: int) -> None:
        self.name = name
        self.length = length
        self._folder: Path | None = None
        self._values: np.ndarray | None = None

    def keep_in(self, folder: Path) -> None:
        """Set the folder of the file; it need not exist yet."""
        self._folder = folder

    @property
    def path(self) -> Path:
        """The file."""
        assert self._folder is not None, "a run has set the folder"
        return self._folder / f"{self.name}.npz"

    def fill(self, positions: np.ndarray, values: np.ndarray | float) -> None:
        """Set the numbers of the tokens at some positions."""
        if self._values is None:
            self._values = np.full(self.length, np.nan, np.float32)
        self._values[positions] = values

    def save(self) -> None:
        """Write the file; an interruption leaves the one from before."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(f"{self.path.name}.tmp")
        with unfinished.open("wb") as file:
            np.savez(file, **{_ARRAY: self.values})
        unfinished.replace(self.path)

    @property
    def values(self) -> np.ndarray:
        """All numbers, float32 `[tokens]`, read from the file if they were not computed here.

        Raises:
            DataError: There is no file, or it is damaged.
        """
        if self._values is None:
            self._values = self._read()
        return self._values

    def _read(self) -> np.ndarray:
        if self._folder is None:
            what = "were not computed: a run does so before its first step"
            problem = Problem("log-probabilities of the reference model", what)
            raise DataError("No reference model:", [problem])
        try:
            with np.load(self.path) as arrays:  # which compares checksums
                values: np.ndarray = arrays[_ARRAY]
        except _DAMAGE as error:
            what = "cannot be read: it has the log-probabilities of the reference model"
            problem = Problem(str(self.path), what, str(error), _FIX)
            raise DataError("No reference model:", [problem]) from error
        if values.shape != (self.length,) or values.dtype != np.float32:
            detail = f"it has {values.dtype} {list(values.shape)}, not float32 [{self.length}]"
            problem = Problem(str(self.path), "is of other data", detail, _FIX)
            raise DataError("No reference model:", [problem])
        return values
