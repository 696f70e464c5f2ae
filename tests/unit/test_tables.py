"""Text columns of Parquet and Arrow files: what is read, what is refused and named, and how little is in memory."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from packaging.version import Version
from pyarrow import feather, ipc, parquet

from spmd.data.cache_folder import CacheFolder
from spmd.data.corpus import make_corpus
from spmd.data.documents import Documents
from spmd.data.sources import find_files
from spmd.data.tables import read_arrow, read_parquet
from spmd.data.tokenizer import load_tokenizer
from spmd.errors import DataError, Problem
from tests.unit.test_corpus import cache, make, texts  # noqa: F401

TEXTS = [f"text {i} é" if i % 7 else None for i in range(100)]
TYPES = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
}

COMPRESSED = ("file.arrow", "v2.feather")
# Until release 24 pyarrow dies of a segmentation fault when it compresses views of strings.
OLD_PYARROW = Version(pa.__version__) < Version("25")


def write_stream(table: pa.Table, path: Path, rows: int) -> None:
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


WRITERS: dict[str, Callable[[pa.Table, Path, int], object]] = {
    "rows.parquet": lambda table, path, rows: parquet.write_table(table, path, row_group_size=rows),
    "file.arrow": lambda table, path, rows: feather.write_feather(
        table, path, chunksize=rows, compression="lz4"
    ),
    "stream.arrow": write_stream,
    "v2.feather": lambda table, path, rows: feather.write_feather(table, path, chunksize=rows),
}


def write(folder: Path, name: str, columns: dict[str, object], rows: int = 30) -> Path:
    """A file of these columns in the format of its name, in row groups or record batches of so many rows."""
    WRITERS[name](pa.table(columns), folder / name, rows)
    return folder / name


def read(
    path: Path, text_field: str = "text"
) -> tuple[list[tuple[str, str | None]], list[Problem]]:
    problems: list[Problem] = []
    reader = read_parquet if path.suffix == ".parquet" else read_arrow
    return list(reader(path, text_field, problems.append)), problems


def refusal(*source: Path, text_field: str = "text") -> str:
    """The error of documents that cannot be read."""
    documents = Documents(find_files(map(str, source)), text_field)
    list(documents)
    with pytest.raises(DataError) as caught:
        documents.check()
    return str(caught.value)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", WRITERS)
def test_each_row_is_a_document(name: str, kind: str, tmp_path: Path) -> None:
    """All rows come in order, numbered in the whole file, whatever the type of strings; nulls have no text."""
    column = pa.array(TEXTS)
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(TYPES[kind])
    if kind == "string_view" and name in COMPRESSED and OLD_PYARROW:
        name = "stream.arrow"
    path = write(tmp_path, name, {"id": range(100), "text": column, "a.b": ["other"] * 100})
    assert read(path) == ([(f":{i}", text) for i, text in enumerate(TEXTS)], [])
    assert read(path, "a.b")[0][99] == (":99", "other")


def test_formats_hold_the_same_documents(tmp_path: Path, cache: Path) -> None:  # noqa: F811
    """A corpus of each format has the same documents, and counts the rows without text."""
    found = set()
    for name in WRITERS:
        corpus = make(write(tmp_path, name, {"text": [*TEXTS, "", " \n"]}), cache=cache)
        found.add(
            (
                tuple(sorted(texts(corpus.train) + texts(corpus.validation))),
                corpus.documents,
                corpus.skipped,
            )
        )
    assert found == {(tuple(sorted(filter(None, TEXTS))), 85, 17)}


def test_a_folder_of_all_formats(tmp_path: Path, cache: Path) -> None:  # noqa: F811
    """Files of tables, lines and text in one folder make one corpus, split by names alone, as a copy of it does."""
    (tmp_path / "all").mkdir()
    for name in WRITERS:
        write(tmp_path / "all", name, {"text": [f"{name} {i}" for i in range(20)]}, rows=7)
    (tmp_path / "all" / "lines.jsonl").write_text('{"text": "a line"}\n')
    (tmp_path / "all" / "book.txt").write_text("a book")
    corpus = make(tmp_path / "all", cache=cache)
    assert corpus.documents == 4 * 20 + 2
    held_out = texts(corpus.validation)
    # In other row groups the documents are the same, and so is the split; the bytes are not.
    for name in WRITERS:
        write(
            tmp_path / "all",
            name,
            {"text": [f"{name} {i}" for i in range(20)], "id": range(20)},
            rows=20,
        )
    again = make(tmp_path / "all", cache=cache)
    assert texts(again.validation) == held_out
    assert again.fingerprint != corpus.fingerprint


def test_a_missing_column_names_those_that_are_there(tmp_path: Path) -> None:
    """Files of other schemas in one folder are all named, with their columns and the flag; one that fits is not."""
    write(tmp_path, "rows.parquet", {"id": [1], "txt": ["a"]})
    write(tmp_path, "file.arrow", {"text": ["a"], "more": [None]})
    write(tmp_path, "stream.arrow", {"text": [3], "body": ["a"]})
    write(tmp_path, "v2.feather", {"n": [1.5]})
    parquet.write_table(
        pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "twice.parquet"
    )
    parquet.write_table(pa.table({"text": [{"text": "a"}]}), tmp_path / "nested.parquet")
    (tmp_path / "lines.jsonl").write_text('{"txt": "a"}\n')
    message = refusal(tmp_path)
    assert (
        f'{tmp_path}/rows.parquet: has no column "text"\n'
        "      columns: id (int64), txt (string)\n"
        '      fix: --data.text-field: did you mean "txt"?\n'
    ) in message
    assert (
        f'{tmp_path}/stream.arrow: has no strings in the column "text"\n'
        "      its type is int64\n"
        "      fix: --data.text-field: one of: body\n"
    ) in message
    assert f'{tmp_path}/v2.feather: has no column "text"\n      columns: n (double)' in message
    assert f'{tmp_path}/nested.parquet: has no strings in the column "text"' in message
    assert f'{tmp_path}/twice.parquet: has 2 columns "text"' in message
    assert f"{tmp_path}/lines.jsonl:1: is not a document" in message
    assert message.count(str(tmp_path)) == 6


@pytest.mark.parametrize("name", WRITERS)
def test_a_truncated_file_is_named(name: str, tmp_path: Path) -> None:
    """A file cut anywhere is a problem, also where a record batch ends; whole, it has none."""
    path = write(tmp_path, name, {"text": TEXTS})
    whole = path.read_bytes()
    ends = [i for i in range(len(whole)) if whole.startswith(b"\xff\xff\xff\xff", i)]  # of messages
    assert not read(path)[1]
    for cut in {
        *range(0, len(whole), 97),
        *range(12),
        *ends,
        *(len(whole) - n for n in range(1, 12)),
    }:
        path.write_bytes(whole[:cut])
        found = read(path)[1]
        assert [problem for problem in found if problem.where.startswith(str(path))], cut


def test_two_streams_in_one_file_are_refused(tmp_path: Path) -> None:
    """The second one is not dropped in silence."""
    path = write(tmp_path, "stream.arrow", {"text": ["a", "b"]})
    path.write_bytes(path.read_bytes() * 2)
    assert "stream.arrow: has bytes after its end\n      2 rows before it" in refusal(path)


@pytest.mark.parametrize("name", ["rows.parquet", "file.arrow", "stream.arrow"])
def test_a_row_that_is_not_utf8_is_named(name: str, tmp_path: Path) -> None:
    """By row group or record batch, and by its number in the file; the rows around it are read."""
    column = pa.array([b"a", b"b", b"\xff", b"c"]).view(pa.string())
    rows, (problem,) = read(write(tmp_path, name, {"text": column}, rows=2))
    assert [text for _, text in rows] == ["a", "b", "c"]
    piece = "row group" if name == "rows.parquet" else "record batch"
    assert (problem.where, problem.what) == (f"{tmp_path / name}, {piece} 1, row 2", "is not UTF-8")


@pytest.mark.parametrize("name", WRITERS)
def test_damage_never_raises(name: str, tmp_path: Path) -> None:
    """Of files with other bytes at random places, all that cannot be read is a problem of the file."""
    path, generator, damaged = write(tmp_path, name, {"text": TEXTS}), random.Random(0), 0
    whole = path.read_bytes()
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(5):
            content[generator.randrange(len(content))] = generator.randrange(256)
        path.write_bytes(content)
        damaged += bool(read(path)[1])
    assert damaged > 10


def test_a_dictionary_is_checked_before_it_is_used(tmp_path: Path) -> None:
    """An index or an offset out of bounds is a problem of its record batch, not a text from other memory."""
    wild = pa.DictionaryArray.from_arrays(
        pa.array([0, 1_000_000], pa.int32()), pa.array(["a"]), safe=False
    )
    assert "record batch 0: cannot be read" in refusal(
        write(tmp_path, "stream.arrow", {"text": wild})
    )
    path = write(
        tmp_path, "stream.arrow", {"text": pa.array(["abcdefgh", "zzzz"]).dictionary_encode()}
    )
    content, offsets = path.read_bytes(), struct.pack("<3i", 0, 8, 12)
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, struct.pack("<3i", 0, 8, 2**14)))
    assert "record batch 0: cannot be read" in refusal(path)


def test_each_damaged_row_group_is_named(tmp_path: Path) -> None:
    """Two of four row groups with wrong bytes are two problems, and the others are read."""
    path = tmp_path / "rows.parquet"
    table = pa.table({"text": [f"{i:06}" * 20 for i in range(400)]})
    parquet.write_table(
        table, path, row_group_size=100, compression="none", write_page_checksum=True
    )
    content = bytearray(path.read_bytes())
    for row in (150, 350):
        at = content.index(f"{row:06}".encode() * 20)
        content[at] ^= 1
    path.write_bytes(content)
    rows, problems = read(path)
    assert [problem.where for problem in problems] == [f"{path}, row group {n}" for n in (1, 3)]
    assert {"000050" * 20, "000250" * 20} <= {text for _, text in rows}


def test_feather_version_1_and_other_files_are_refused(tmp_path: Path) -> None:
    """What only has the name of a table is named, each with a reason."""
    (tmp_path / "old.feather").write_bytes(b"FEA1" + bytes(100) + b"FEA1")
    (tmp_path / "pointer.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "empty.arrow").write_bytes(b"")
    message = refusal(tmp_path)
    assert "old.feather: is not a whole Arrow file or stream" in message
    assert "pointer.parquet: is not a whole Parquet file" in message
    assert "empty.arrow: is not a whole Arrow file or stream" in message


def test_tables_without_rows_are_no_corpus(tmp_path: Path, cache: Path) -> None:  # noqa: F811
    """Columns without rows, or of nulls alone, hold no text."""
    write(tmp_path, "rows.parquet", {"text": pa.array([], pa.string())})
    write(tmp_path, "stream.arrow", {"text": pa.nulls(3)})
    with pytest.raises(DataError, match="2 files, all empty"):
        make(tmp_path, cache=cache)


@pytest.mark.parametrize("name", ["rows.parquet", "stream.arrow"])
def test_a_file_is_never_whole_in_memory(name: str, tmp_path: Path) -> None:
    """Of 16 MiB of text, in one row group of Parquet, less than 4 MiB are in memory, and no other column."""
    columns = {"text": [f"{i:08}" * 128 for i in range(16384)], "other": ["x" * 128] * 16384}
    path = write(tmp_path, name, columns, rows=100)
    if name == "rows.parquet":
        parquet.write_table(
            pa.table(columns), path, row_group_size=16384, compression="none", use_dictionary=False
        )
    del columns
    base, most, problems = pa.total_allocated_bytes(), 0, list[Problem]()
    for row, _ in enumerate(
        (read_parquet if name == "rows.parquet" else read_arrow)(path, "text", problems.append)
    ):
        if row % 1000 == 0:
            most = max(most, pa.total_allocated_bytes() - base)
    assert row == 16383
    assert not problems
    assert 0 < most < 4 * 2**20


def saved(folder: Path, names: dict[str, list[str]], listed: list[str]) -> Path:
    """A folder as `datasets` saves one: streams, of which state.json lists some."""
    folder.mkdir(parents=True)
    for name, found in names.items():
        write_stream(pa.table({"text": found}), folder / name, 2)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in listed]})
    )
    return folder


def documents_of(*source: Path) -> list[str]:
    documents = Documents(find_files(map(str, source)), "text")
    found = [text for _, text in documents]
    documents.check()
    return found


SHARDS = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]


def test_a_saved_dataset_is_what_its_state_lists(tmp_path: Path) -> None:
    """Shards come in order; caches of `map` beside them are not read, here and in sub-folders."""
    names = {SHARDS[1]: ["c"], SHARDS[0]: ["a", "b"], "cache-0123.arrow": ["mapped"]}
    saved(tmp_path / "one", names, SHARDS)
    saved(tmp_path / "dict" / "en", names, SHARDS)
    saved(tmp_path / "dict" / "fr", {SHARDS[0]: ["d"]}, SHARDS[:1])
    assert documents_of(tmp_path / "one") == ["a", "b", "c"]
    assert documents_of(tmp_path / "dict") == ["a", "b", "c", "d"]
    (tmp_path / "one" / "state.json").unlink()  # control: an ordinary folder
    assert documents_of(tmp_path / "one") == ["mapped", "a", "b", "c"]


def test_an_incomplete_saved_dataset_is_refused(tmp_path: Path) -> None:
    """Each shard that is listed and not there is named, and so is a state that lists nothing."""
    saved(tmp_path / "half", {SHARDS[0]: ["a"]}, SHARDS)
    for name, state in {"cut": '{"_data_fi', "other": "[1]"}.items():
        (saved(tmp_path / name, {SHARDS[0]: ["a"]}, SHARDS) / "state.json").write_text(state)
    with pytest.raises(DataError) as caught:
        find_files([str(tmp_path)])
    where = [problem.where for problem in caught.value.problems]
    assert where == [
        f"{tmp_path}/{name}" for name in ("cut/state.json", f"half/{SHARDS[1]}", "other/state.json")
    ]


def test_the_card_of_a_dataset_is_no_document(tmp_path: Path) -> None:
    """README.md beside rows is not read, unless it is named; without rows, or in a sub-folder, it is a text."""
    for name in ("README.md", "sub/README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents_of(tmp_path) == ["README.md", "sub/README.md"]
    write(tmp_path, "rows.parquet", {"text": ["row"]})
    assert documents_of(tmp_path) == ["row", "sub/README.md"]
    assert documents_of(tmp_path / "README.md", tmp_path) == ["README.md", "row", "sub/README.md"]


@pytest.mark.parametrize(
    ("names", "fix"),
    [
        (
            ["data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet"],
            "data/train*.parquet",
        ),
        (["train/data-00000-of-00001.arrow", "validation/data-00000-of-00001.arrow"], "train"),
        (["train_sft.jsonl", "eval.jsonl"], "train_sft.jsonl"),
        (["en/0.parquet", "valid.parquet"], "en"),
        (["test-0.parquet", "test-1.parquet"], None),
        (["a/testing.parquet", "a/development.parquet", "b/tests.jsonl"], None),
        (["src/a.py", "test/a.py"], None),
    ],
)
def test_splits_for_evaluation_are_not_trained_on(
    names: list[str], fix: str | None, tmp_path: Path
) -> None:
    """A folder of rows with a test split beside others is refused, with what to name; other folders are not."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    if fix is None:
        assert len(find_files([str(tmp_path)])) == len(names)
        return
    with pytest.raises(DataError, match="holds splits for training and for evaluation") as caught:
        find_files([str(tmp_path)])
    named = caught.value.problems[0].fix.partition("'")[2].removesuffix("'")
    assert named == str(tmp_path / fix)
    assert [str(file.path) for file in find_files([named])] == [str(tmp_path / names[0])]


def test_another_column_is_another_corpus(tmp_path: Path, cache: Path) -> None:  # noqa: F811
    """The same file read by another column is not answered from the cache of the first."""
    path = write(tmp_path, "rows.parquet", {"en": ["one", "two"], "fr": ["un", "deux"]})
    for field, expected in (("en", ["one", "two"]), ("fr", ["deux", "un"])):
        corpus = make_corpus(
            [str(path)],
            load_tokenizer("bytes"),
            text_field=field,
            validation=0.3,
            cache=CacheFolder(cache),
        )
        assert sorted(texts(corpus.train) + texts(corpus.validation)) == expected
