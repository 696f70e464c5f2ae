"""Documents of files, each with a name of its own, whatever the format of the file.

    documents = Documents(find_files(["books/"]), text_field="text")
    for name, text in documents: ...
    documents.check()

A reader of one format is a function `(path, text_field, report)` that yields pairs: what names a
document within its file (nothing where the file is one document), and its text, None where it has
none. It hands each problem to `report` and continues after it, so that all are found.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from spmd.data.sources import SourceFile, file_digest
from spmd.data.tables import read_arrow, read_parquet
from spmd.data.text_files import read_json_lines, read_text
from spmd.errors import DataError, Problem, first_of

_SHOWN = 10  # problems of one file


Reader = Callable[[Path, str, Callable[[Problem], None]], Iterator[tuple[str, str | None]]]

READERS: dict[str, Reader] = {
    ".jsonl": read_json_lines,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
}
"""Readers by suffix; any other file is one document."""


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
        count = 0

        def report(problem: Problem) -> None:
            nonlocal count
            count += 1
            if count <= _SHOWN:
                self.problems.append(problem)

        read = READERS.get(file.path.suffix.lower(), read_text)
        try:
            for part, text in read(file.path, self.text_field, report):
                if text is not None and text.strip():
                    yield f"{file.key}{part}", text
                elif part:
                    self.skipped += 1
            is_same = file_digest(file.path) == file.digest
        except OSError as error:
            report(Problem(str(file.path), "cannot be read", str(error)))
        else:
            if not is_same:
                self.problems.append(
                    Problem(str(file.path), "changed while it was read", fix="run again")
                )
        if count > _SHOWN:
            self.problems.append(
                Problem(str(file.path), f"has {count - _SHOWN:,} more problems like these")
            )
