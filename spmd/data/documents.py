"""Documents of files, each with a name of its own, whatever the format of the file.

    documents = Documents(find_files(["books/"]), text_field="text")
    for name, text in documents: ...
    documents.check()

A reader of one format is a function `(path, text_field, report)` that yields pairs: what names a
document within its file (nothing where the file is one document), and its text, None where it has
none. It hands each problem to `report` and continues after it, so that all are found.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from spmd.data.file_formats import FileFormat
from spmd.data.sources import SourceFile, file_digest
from spmd.data.tables import read_arrow, read_parquet
from spmd.data.text_files import read_json, read_text
from spmd.errors import DataError, Problem, first_of

_SHOWN = 10  # problems of one file


Reader = Callable[[Path, str, Callable[[Problem], None]], Iterator[tuple[str, str | None]]]

READERS: dict[FileFormat, Reader] = {
    FileFormat.TEXT: read_text,
    FileFormat.PARQUET: read_parquet,
    FileFormat.ARROW: read_arrow,
    FileFormat.JSON_LINES: functools.partial(read_json, form=FileFormat.JSON_LINES),
    FileFormat.JSON_ARRAY: functools.partial(read_json, form=FileFormat.JSON_ARRAY),
    FileFormat.JSON_OBJECT: functools.partial(read_json, form=FileFormat.JSON_OBJECT),
}


@dataclasses.dataclass(eq=False)
class Documents:
    """Names and texts of all documents of files, in order.

    Those without text, or with blanks only, are skipped.

    The name of a document is the file's key, and what names it within the file.

    Attributes:
        problems: What could not be read in the last iteration.
        skipped: Rows and lines without text in the last iteration; an empty file is none of them.
    """

    files: Sequence[SourceFile]
    text_field: str
    problems: list[Problem] = dataclasses.field(default_factory=list, init=False)
    skipped: int = dataclasses.field(default=0, init=False)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        self.problems, self.skipped = [], 0
        for file in self.files:
            yield from self._read(file)

    def check(self) -> None:
        """Raise all problems of the last iteration."""
        if self.problems:
            raise DataError("invalid text:", first_of(self.problems))

    def _read(self, file: SourceFile) -> Iterator[tuple[str, str]]:
        problems = FileProblems(file)
        read = READERS[file.format]
        with problems.of_reading():
            for part, text in read(file.path, self.text_field, problems.report):
                if text is not None and text.strip():
                    yield f"{file.key}{part}", text
                elif part:
                    self.skipped += 1
        self.problems += problems.all()


class FileProblems:
    """Problems of one file: the first ones, and the number of the others."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._shown: list[Problem] = []
        self._count = 0

    def report(self, problem: Problem) -> None:
        """Add a problem."""
        self._count += 1
        if self._count <= _SHOWN:
            self._shown.append(problem)

    @contextlib.contextmanager
    def of_reading(self) -> Iterator[None]:
        """Read the file in the block; add a problem if it cannot be read or has changed."""
        path = self._file.path
        try:
            yield
            is_same = file_digest(path) == self._file.digest
        except OSError as error:
            # Of a compressed file: it is damaged or truncated.
            self.report(Problem(str(path), "cannot be read", str(error)))
            return
        if not is_same:
            self._shown.append(Problem(str(path), "changed while it was read", fix="run again"))

    def all(self) -> list[Problem]:
        """Return the problems."""
        more = self._count - _SHOWN
        if more <= 0:
            return self._shown
        rest = Problem(str(self._file.path), f"has {more:,} more problems like these")
        return [*self._shown, rest]
