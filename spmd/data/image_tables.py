"""Images of Parquet files as the Hub has them: a column of encoded images, and one of labels.

A row group is the least that is read, so groups are to be small: 100 images, as the `datasets`
library writes them. The last ones are kept, since a batch is read in the order of the files.
"""

import collections
import dataclasses
import io
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from spmd.errors import DataError, Problem, did_you_mean

_GROUPS_KEPT = 4
_ERRORS = (pa.ArrowException, OSError, ValueError)


class ImageTable:
    """One Parquet file, with its labels in memory; images are read from any thread.

    Args:
        image_field: Column of the images: of bytes, or of structs with `bytes`.
        label_field: Column of the labels: numbers or names.

    Raises:
        DataError: It is no whole Parquet file, or has no such columns.
    """

    def __init__(self, path: Path, image_field: str, label_field: str) -> None:
        self.path = path
        self._column = image_field
        self._label_field = label_field
        self._lock = threading.Lock()
        self._groups: collections.OrderedDict[int, pa.Array] = collections.OrderedDict()
        try:
            self._file = parquet.ParquetFile(path, page_checksum_verification=True)
            self._check_columns()
            column = self._file.read([label_field]).column(label_field)
            self.labels: list[Any] = column.to_pylist()
        except _ERRORS as error:
            if isinstance(error, DataError):
                raise
            problem = Problem(str(path), "is not a whole Parquet file", str(error))
            raise DataError("invalid images:", [problem]) from error
        metadata = self._file.metadata
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = np.cumsum([0, *counts])

    def _check_columns(self) -> None:
        """Raise a `DataError` for a missing column, or one of another type."""
        schema = self._file.schema_arrow
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
        metadata = self._file.schema_arrow.metadata or {}
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
        with self._lock:
            value = self._group(group)[row - int(self._starts[group])].as_py()
        if isinstance(value, dict):
            value = value["bytes"]
        if value is None:
            raise ValueError("has no bytes of an image, at most the path of one")
        content: bytes = value
        return content

    def _group(self, group: int) -> pa.Array:
        """Return the images of a row group; the lock is held."""
        if group not in self._groups:
            try:
                table = self._file.read_row_group(group, [self._column], use_threads=False)
                column = table.column(self._column).combine_chunks()
                column.validate(full=True)
            except _ERRORS as error:
                raise OSError(f"row group {group}: {error}") from error
            self._groups[group] = column
        self._groups.move_to_end(group)
        while len(self._groups) > _GROUPS_KEPT:
            self._groups.popitem(last=False)
        return self._groups[group]


@dataclasses.dataclass(frozen=True)
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
        return self.table.path.name, self.table.path.stat().st_size, self.row

    def open(self) -> io.BytesIO:
        """Return the encoded image."""
        return io.BytesIO(self.table.content(self.row))


def _holds_bytes(kind: pa.DataType) -> bool:
    """Return whether a column of this type has encoded images."""
    if pa.types.is_struct(kind):
        names: Sequence[str] = [field.name for field in kind]
        return "bytes" in names and _holds_bytes(kind.field("bytes").type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
