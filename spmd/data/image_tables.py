"""Images of Parquet files as the Hub has them: a column of encoded images, and one of labels.

A row group is the least that is read, so groups are to be small: 100 images, as the `datasets`
library writes them. The last ones are kept, since a batch is read in the order of the files.
"""

import collections
import dataclasses
import io
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from spmd.errors import DataError, Problem, did_you_mean

_GROUPS_KEPT = 8
_ERRORS = (pa.ArrowException, OSError, ValueError)


class RowGroups:
    """The groups of rows that were read last, of all files; used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: collections.OrderedDict[tuple[Path, int], pa.Array] = (
            collections.OrderedDict()
        )

    def get(self, path: Path, group: int, read: Callable[[], pa.Array]) -> pa.Array:
        """Return a group, reading it unless it is there."""
        key = (path, group)
        with self._lock:
            found = self._groups.get(key)
        if found is None:
            found = read()
        with self._lock:
            self._groups[key] = found
            self._groups.move_to_end(key)
            while len(self._groups) > _GROUPS_KEPT:
                self._groups.popitem(last=False)
        return found


class ImageTable:
    """One Parquet file, with its labels in memory; images are read from any thread.

    The file is open while it is read: data sets have more files than a process may open.

    Args:
        image_field: Column of the images: of bytes, or of structs with `bytes`.
        label_field: Column of the labels: numbers or names.

    Raises:
        DataError: It is no whole Parquet file, or has no such columns.
    """

    def __init__(self, path: Path, image_field: str, label_field: str, groups: RowGroups) -> None:
        self.path = path
        self._column = image_field
        self._label_field = label_field
        self._groups = groups
        try:
            self.bytes = path.stat().st_size
            with parquet.ParquetFile(path, page_checksum_verification=True) as file:
                self._metadata = file.metadata
                self._schema = file.schema_arrow
                self._check_columns()
                column = file.read([label_field], use_threads=False).column(label_field)
                self.labels: list[Any] = column.to_pylist()
        except DataError:
            raise
        except _ERRORS as error:
            problem = Problem(str(path), "is not a whole Parquet file", str(error))
            raise DataError("invalid images:", [problem]) from error
        counts = []
        for group in range(self._metadata.num_row_groups):
            counts.append(self._metadata.row_group(group).num_rows)
        self._starts = np.cumsum([0, *counts])

    def _check_columns(self) -> None:
        """Raise a `DataError` for a missing column, or one of another type."""
        schema = self._schema
        problems = []
        for argument, name in (("image_field", self._column), ("label_field", self._label_field)):
            if name not in schema.names:
                fix = f"{argument}: {did_you_mean(name, schema.names)}"
                problems.append(Problem(str(self.path), f'has no column "{name}"', fix=fix))
        if not problems and not _holds_bytes(schema.field(self._column).type):
            detail = f"its type is {schema.field(self._column).type}"
            what = f'has no images in the column "{self._column}"'
            fix = "image_field: a column of bytes, or of structs with bytes"
            problems.append(Problem(str(self.path), what, detail, fix))
        if problems:
            raise DataError("invalid images:", problems)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes by number, as the `datasets` library writes them; or none."""
        metadata = self._schema.metadata or {}
        try:
            features = json.loads(metadata[b"huggingface"])["info"]["features"]
            names = features[self._label_field]["names"]
        except (KeyError, TypeError, ValueError):
            return ()
        return tuple(map(str, names))

    def content(self, row: int) -> bytes:
        """Return the encoded image of a row.

        Raises:
            OSError: The file cannot be read.
            ValueError: The row has no image.
        """
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        images = self._groups.get(self.path, group, lambda: self._read_group(group))
        value = images[row - int(self._starts[group])].as_py()
        if isinstance(value, dict):
            value = value["bytes"]
        if value is None:
            raise ValueError("has no bytes of an image, at most the path of one")
        content: bytes = value
        return content

    def _read_group(self, group: int) -> pa.Array:
        """Return the images of a row group."""
        options = {"metadata": self._metadata, "page_checksum_verification": True}
        try:
            with parquet.ParquetFile(self.path, **options) as file:
                table = file.read_row_group(group, [self._column], use_threads=False)
            column = table.column(self._column).combine_chunks()
            column.validate(full=True)
        except _ERRORS as error:
            raise OSError(f"row group {group}: {error}") from error
        return column


@dataclasses.dataclass(frozen=True, slots=True)
class TableImage:
    """Image in a row of a table."""

    table: ImageTable
    row: int
    label: int

    @property
    def where(self) -> str:
        """Name in messages."""
        return f"{self.table.path}, row {self.row}"

    @property
    def key(self) -> tuple[str | int, ...]:
        """Name and size of the file, and the row."""
        return self.table.path.name, self.table.bytes, self.row

    def open(self) -> io.BytesIO:
        """Return the encoded image."""
        return io.BytesIO(self.table.content(self.row))


def _holds_bytes(kind: pa.DataType) -> bool:
    """Return whether a column of this type has encoded images."""
    if pa.types.is_struct(kind):
        names: Sequence[str] = [field.name for field in kind]
        return "bytes" in names and _holds_bytes(kind.field("bytes").type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
