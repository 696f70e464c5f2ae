"""Read the text column of Parquet files, and of Arrow IPC files and streams.

Of each row group or record batch in turn, the column is read and no other. Rows are counted from 0
in the whole file. Files may come from anyone: offsets and indices are checked before they are used.
"""

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import ipc, parquet

from spmd.errors import Problem, did_you_mean

_ROWS_AT_ONCE = 256  # as Python strings
_BUFFER_BYTES = 2**20
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_AS_BYTES = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}
# Of pyarrow; a column's name that is not UTF-8 is a ValueError.
_ERRORS = (pa.ArrowException, OSError, ValueError)

Report = Callable[[Problem], None]


def read_parquet(path: Path, text_field: str, report: Report) -> Iterator[tuple[str, str | None]]:
    """Yield the text column of a Parquet file."""
    try:
        # So the column is read page by page; by default all of it at once, for each row group.
        by_page = {
            "buffer_size": _BUFFER_BYTES,
            "pre_buffer": False,
            "page_checksum_verification": True,
        }
        with parquet.ParquetFile(path, **by_page) as file:
            if _find_column(path, file.schema_arrow, text_field, report) is None:
                return
            row = 0
            for group in range(file.num_row_groups):
                where = f"{path}, row group {group}"
                batches = file.iter_batches(_ROWS_AT_ONCE, [group], [text_field], use_threads=False)
                columns = (batch.column(text_field) for batch in batches)
                yield from _texts(where, row, columns, report)
                row += file.metadata.row_group(group).num_rows
    except _ERRORS as error:
        report(Problem(str(path), "is not a whole Parquet file", str(error)))


def read_arrow(path: Path, text_field: str, report: Report) -> Iterator[tuple[str, str | None]]:
    """Yield the text column of an Arrow IPC file (Feather version 2) or stream."""
    try:
        # Not memory-mapped: a mapped file that is truncated meanwhile kills the process.
        with pa.OSFile(str(path)) as source:
            read = _read_ipc_stream
            if source.read(6) == b"ARROW1":
                read = _read_ipc_file
            source.seek(0)
            yield from read(path, source, text_field, report)
    except _ERRORS as error:
        report(Problem(str(path), "is not a whole Arrow file or stream", str(error)))


def _read_ipc_file(
    path: Path, source: pa.NativeFile, text_field: str, report: Report
) -> Iterator[tuple[str, str | None]]:
    number = _find_column(path, ipc.open_file(source).schema, text_field, report)
    if number is None:
        return
    reader = ipc.open_file(source, options=ipc.IpcReadOptions(included_fields=[number]))
    row = 0
    for batch in range(reader.num_record_batches):
        # A generator, so that it is read in `_texts`, which reports errors.
        columns = (reader.get_batch(each).column(0) for each in (batch,))
        row = yield from _texts(f"{path}, record batch {batch}", row, columns, report)


def _read_ipc_stream(
    path: Path, source: pa.NativeFile, text_field: str, report: Report
) -> Iterator[tuple[str, str | None]]:
    number = _find_column(path, ipc.open_stream(source).schema, text_field, report)
    if number is None:
        return
    source.seek(0)
    reader = ipc.open_stream(source, options=ipc.IpcReadOptions(included_fields=[number]))
    where = ""
    row = 0
    try:
        for batch in itertools.count():
            where = f"{path}, record batch {batch}"
            columns = [found.column(0) for found in itertools.islice(reader, 1)]
            if not columns:
                break
            row = yield from _texts(where, row, columns, report)
    except _ERRORS as error:
        report(Problem(where, "cannot be read", f"{error} (truncated?)"))
        return
    # A stream may end without its marker by the format's specification; all writers of files write
    # it.
    source.seek(source.tell() - len(_END_OF_STREAM))
    end = source.read()
    if end != _END_OF_STREAM:
        what = "has bytes after its end"
        if len(end) == len(_END_OF_STREAM):
            what = "ends without the marker of its end"
        detail = f"{row:,} rows before it; truncated, or two streams in one file?"
        report(Problem(str(path), what, detail))


def _find_column(path: Path, schema: pa.Schema, text_field: str, report: Report) -> int | None:
    """Return the number of the text column, or report why there is none."""
    texts = [field.name for field in schema if _is_text(field.type)]
    fix = "it has no column of strings"
    if texts:
        fix = f"--data.text-field: {did_you_mean(text_field, texts)}"
    found = schema.get_all_field_indices(text_field)
    if len(found) == 1 and _is_text(schema.field(found[0]).type):
        return found[0]
    if not found:
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        what = f'has no column "{text_field}"'
        report(Problem(str(path), what, f"columns: {columns or 'none'}", fix))
    elif len(found) > 1:
        report(Problem(str(path), f'has {len(found)} columns "{text_field}"'))
    else:
        detail = f"its type is {schema.field(found[0]).type}"
        report(Problem(str(path), f'has no strings in the column "{text_field}"', detail, fix))
    return None


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    elif pa.types.is_null(kind):
        return True
    return kind in _AS_BYTES


def _texts(
    where: str, row: int, columns: Iterable[pa.Array], report: Report
) -> Generator[tuple[str, str | None], None, int]:
    """Yield the texts of one row group or record batch, from `row` on.

    Return the row after it.
    """
    try:
        for column in columns:
            for raw in _as_bytes(column):
                text = None
                try:
                    if raw is not None:
                        text = raw.decode("utf-8")
                    yield f":{row}", text
                except UnicodeDecodeError as error:
                    report(Problem(f"{where}, row {row}", "is not UTF-8", str(error)))
                row += 1
    except _ERRORS as error:
        report(Problem(where, "cannot be read", str(error)))
    return row


def _as_bytes(column: pa.Array) -> Iterator[bytes | None]:
    if pa.types.is_dictionary(column.type):
        column.validate(full=True)
        column = column.dictionary_decode()
    if column.type in _AS_BYTES:
        # Validated as bytes, an array with bad UTF-8 in one row still yields the others.
        column = column.view(_AS_BYTES[column.type])
    column.validate(full=True)
    for first in range(0, len(column), _ROWS_AT_ONCE):
        yield from column.slice(first, _ROWS_AT_ONCE).to_pylist()
