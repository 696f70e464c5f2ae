"""Files as people have them: JSON rows under any name, compressed text, ids of the Hub."""

import dataclasses
import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import spmd.data.sources as sources_module
import spmd.data.streaming as streaming_module
import spmd.data.token_cache as blocks_module
from spmd.data import json_array
from spmd.data.cache_folder import CacheFolder
from spmd.data.chat import ChatConfig, ChatTemplate
from spmd.data.chat_corpus import make_chat_corpus
from spmd.data.documents import Documents
from spmd.data.file_formats import FileFormat, detect_format
from spmd.data.hub import download_fix
from spmd.data.loader import DataConfig, load_corpus
from spmd.data.sources import find_files
from spmd.data.streaming import Streamed
from spmd.data.text_dataset import open_text
from spmd.data.tokenizer import ByteTokenizer
from spmd.errors import ConfigError, DataError
from spmd.models.llama import PRESETS
from spmd.partition_rules.llama import LLAMA
from spmd.run.config import EvaluationConfig, TrainConfig
from spmd.run.open_text import read_source

ROWS = [{"text": f"Row {number} of the set. " * 4, "id": number} for number in range(30)]
TEXTS = [row["text"] for row in ROWS]
CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]}
    for n in range(4)
]
LINES = "\n".join(map(json.dumps, ROWS))


def zstd(text: str) -> bytes:
    with pa.BufferOutputStream() as sink:
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(text.encode())
        return sink.getvalue().to_pybytes()


def gzipped(text: str) -> bytes:
    return gzip.compress(text.encode())


def plain(text: str) -> bytes:
    return text.encode()


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(*paths: Path) -> list[str]:
    documents = Documents(find_files(list(map(str, paths))), "text")
    found = [text for _, text in documents]
    documents.check()
    return found


def as_lines(rows: list) -> str:
    return "\ufeff\n" + "\n".join(map(json.dumps, rows)) + "\n"


def as_array(rows: list) -> str:
    return json.dumps(rows, ensure_ascii=False)


def as_indented_array(rows: list) -> str:
    return json.dumps(rows, indent=2)


@pytest.mark.parametrize("name", ["a.json", "a.ndjson", "a.jsonl", "a.json.gz", "a.ndjson.zst"])
@pytest.mark.parametrize("form", [as_lines, as_array, as_indented_array])
def test_rows_of_json_are_documents_under_every_name(
    tmp_path: Path, name: str, form: Callable
) -> None:
    """Lines and arrays, compressed or not: the texts of the rows, for pretraining and for conversations."""
    compress = {".gz": gzipped, ".zst": zstd}.get(Path(name).suffix, plain)
    path = write(tmp_path / name, compress(form(ROWS)))
    assert texts(path) == TEXTS
    chats = write(tmp_path / "chats" / name, compress(form(CHATS)))
    found = conversations(tmp_path, chats)
    assert found.documents == len(CHATS)


def conversations(tmp_path: Path, path: Path):
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}",
        "a template",
    )
    return make_chat_corpus(
        [str(path)],
        ByteTokenizer(),
        template,
        config=ChatConfig(),
        sequence=32,
        validation=0.3,
        cache=CacheFolder(tmp_path / "cache"),
    )


def test_without_the_decision_json_lines_are_one_document(tmp_path, monkeypatch) -> None:
    """The control: taken for text, as before, the file is one document of raw JSON."""
    path = write(tmp_path / "a.json", LINES)
    monkeypatch.setattr(sources_module, "detect_format", lambda path: FileFormat.TEXT)
    assert texts(path) == [LINES]


def test_a_cache_of_raw_json_is_not_found_again(tmp_path, monkeypatch) -> None:
    """Tokens that an earlier version made of the same bytes are others; those of `.jsonl` are found."""
    source = (str(write(tmp_path / "a.json", LINES)),)
    config = DataConfig(source=source, sequence=64, cache=str(tmp_path / "c"))
    with monkeypatch.context() as before:
        before.setattr(sources_module, "detect_format", lambda path: FileFormat.TEXT)
        old = load_corpus(config)
    assert (old.documents, load_corpus(config).documents) == (1, len(ROWS))
    (file,) = find_files([str(write(tmp_path / "a.jsonl", LINES))])
    assert file.content_key == (file.digest,)


def test_an_object_is_a_row_or_refused_with_the_command(tmp_path: Path) -> None:
    """One with the field is a document; another is refused, with where its rows are."""
    assert texts(write(tmp_path / "a.json", json.dumps(ROWS[0], indent=1))) == TEXTS[:1]
    for indent in (None, 2):
        path = write(tmp_path / "b.json", json.dumps({"version": 1, "data": ROWS}, indent=indent))
        with pytest.raises(DataError, match="is one JSON object, which is no row") as caught:
            texts(path)
        assert f"""jq -c '.["data"][]' {path} > rows.jsonl""" in str(caught.value)
    path = write(tmp_path / "c.json", json.dumps({"version": 1}))
    with pytest.raises(DataError, match=r"name it c.txt"):
        texts(path)
    assert texts(path.rename(tmp_path / "c.txt")) == ['{"version": 1}']
    with pytest.raises(DataError, match="is one JSON object"):
        conversations(tmp_path, write(tmp_path / "d.json", '{"version": 1}'))


@pytest.mark.parametrize(
    ("content", "where", "detail"),
    [
        (json.dumps(ROWS)[:-9], "[29]", "cut off"),
        (json.dumps(ROWS)[:-1], "[30]", "ends within"),
        (json.dumps(ROWS) + "[]", "[30]", "after the end"),
        (json.dumps(ROWS).replace("}, {", "} {", 1), "[1]", "in place of"),
        ('[{"text": "a"}, {"text": 1}, 5]', "[1]", "no string"),
        ('[{"text": "a"}, ' + '{"a":' * 20000, "[1]", "recursion"),
        ('"text"', "", "not an object"),
        ('{"a": 1}\n{"a": 2', ":1", "no string"),
    ],
)
def test_damaged_json_is_named(tmp_path: Path, content: str, where: str, detail: str) -> None:
    """With the file, the item, and the reason; nothing is read silently short."""
    path = write(tmp_path / "a.json", content)
    with pytest.raises(DataError) as caught:
        texts(path)
    problem = caught.value.problems[0]
    assert (problem.where, detail in problem.detail.lower()) == (f"{path}{where}", True), problem


@pytest.mark.parametrize("piece", [1, 2, 7, 64])
def test_an_array_does_not_depend_on_the_pieces(tmp_path, monkeypatch, piece: int) -> None:
    """Items that are cut anywhere between reads, numbers among them."""
    monkeypatch.setattr(json_array, "_PIECE", piece)
    items = [*ROWS[:2], 123456, -1.5e3, [], {}, "a]b", None, True]
    path = write(tmp_path / "a.json", f" [ {json.dumps(items)[1:-1]} ]\n ")
    with path.open() as text:
        assert list(json_array.array_items(text, 2**20)) == items


def test_text_that_holds_rows_is_refused(tmp_path: Path) -> None:
    """With the name to give it; all at once. Other text that begins with a brace is text."""
    named = [write(tmp_path / name, LINES) for name in ("a.txt", "b")]
    named.append(write(tmp_path / "c.txt.gz", gzipped(LINES)))
    with pytest.raises(DataError) as caught:
        find_files(list(map(str, named)))
    assert [problem.fix for problem in caught.value.problems] == [
        "rename it to a.jsonl",
        "rename it to b.jsonl",
        "rename it to c.jsonl.gz",
    ]
    for other in ('{"a": 1}', '{"a": 1}\nand text', "{ a: 1 }\n{ b: 2 }", "", "[1]\n[2]"):
        path = write(tmp_path / "d.txt", other)
        assert detect_format(path) is FileFormat.TEXT


def test_a_folder_is_searched_for_compressed_text_and_for_json_alone(tmp_path: Path) -> None:
    """`.json` beside other text describes it; alone it is the text, but for what `datasets` writes."""
    write(tmp_path / "one" / "a.txt.gz", gzipped("one"))
    write(tmp_path / "one" / "package.json", '{"name": "x"}')
    assert texts(tmp_path / "one") == ["one"]
    write(tmp_path / "c4" / "README.md", "a card")
    write(tmp_path / "c4" / "dataset_infos.json", "{}")
    write(tmp_path / "c4" / "en" / "c4-train.00000-of-01024.json.gz", gzipped(LINES))
    assert texts(tmp_path / "c4") == TEXTS
    write(tmp_path / "c4" / "en" / "c4-validation.00000-of-00008.json.gz", gzipped(LINES))
    with pytest.raises(DataError, match="splits for training and for evaluation") as caught:
        texts(tmp_path / "c4")
    named = tmp_path / "c4" / "en" / "c4-train*.gz"
    assert f"--data.source '{named}'" in str(caught.value)
    assert texts(named) == TEXTS


@pytest.mark.parametrize("rows", [LINES, as_array(ROWS)])
def test_rows_of_json_beside_text_are_refused(tmp_path: Path, rows: str) -> None:
    """They are not dropped; named, they are read. The control: an object or no JSON describes the text."""
    for name, content in (("LICENSE.txt", "a licence"), ("a.json", "{}"), ("b.json", "")):
        write(tmp_path / name, content)
    write(tmp_path / "c.json.gz", b"damaged")
    assert texts(tmp_path) == ["a licence"]
    path = write(tmp_path / "train.json", rows)
    with pytest.raises(DataError, match="holds rows of JSON beside other text") as caught:
        texts(tmp_path)
    (problem,) = caught.value.problems
    assert problem.detail == "train.json beside LICENSE.txt"
    assert str(path) in problem.fix
    assert texts(path) == TEXTS


def test_text_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """Plain and compressed in one folder; the control: in two folders, or with another name."""
    write(tmp_path / "a.txt", "a")
    write(tmp_path / "b.txt.gz", gzipped("b"))
    write(tmp_path / "c" / "a.txt.gz", gzipped("a"))
    assert len(texts(tmp_path)) == 3
    write(tmp_path / "a.txt.zst", zstd("a"))
    for source in (tmp_path, tmp_path / "*.*"):
        with pytest.raises(DataError, match="is there twice, also compressed") as caught:
            texts(source)
        (problem,) = caught.value.problems
        assert problem.where == str(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz", "a.txt", "a.txt.gz"])
def test_an_archive_is_refused(tmp_path: Path, name: str) -> None:
    """By its suffix or its zero bytes; it would be one document with the headers of its members."""
    with io.BytesIO() as archive:
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("text.txt"))
        content = archive.getvalue()
    if name.endswith("gz"):
        content = gzip.compress(content)
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match="unpack it"):
        detect_format(path)


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzipped), (".zst", zstd)])
def test_compressed_text_is_its_content(tmp_path, suffix: str, compress: Callable) -> None:
    """Also of several members; the digest is that of the file's bytes."""
    path = write(tmp_path / f"a.txt{suffix}", compress("ab") + compress("c\u00e9"))
    assert texts(path) == ["abc\u00e9"]
    (file,) = find_files([str(path)])
    write(path, compress("abc\u00e9"))
    assert texts(path) == ["abc\u00e9"]
    assert find_files([str(path)])[0].digest != file.digest


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzipped), (".zst", zstd)])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_damaged_compressed_files_are_named(tmp_path, name, suffix, compress) -> None:
    """Truncated anywhere, damaged, empty, or not compressed at all: a problem, never a part of the text."""
    rng = np.random.default_rng(0)
    rows = [{"text": rng.bytes(3000).hex()} for _ in range(100)]
    whole = compress("\n".join(map(json.dumps, rows)).replace("{", " ", name == "a.txt"))
    middle = len(whole) // 2
    contents = [whole[:-3], whole[:middle], b"", b"not compressed"]
    if suffix == ".gz":  # frames of zstd have a checksum only where their writer made one
        contents.append(whole[:middle] + bytes(9) + whole[middle + 9 :])
    for content in contents:
        path = write(tmp_path / f"{name}{suffix}", content)
        with pytest.raises(DataError) as caught:
            texts(path)
        named = {problem.where for problem in caught.value.problems}
        assert str(path) in named
        assert all(where.startswith(str(path)) for where in named)
    assert len(texts(write(path, whole))) == (1 if name == "a.txt" else 100)


def test_a_compressed_table_is_refused(tmp_path: Path) -> None:
    """Tables have a compression of their own, and are read from any row."""
    path = write(tmp_path / "a.parquet.gz", gzipped("x"))
    with pytest.raises(DataError, match=r"decompress it to a\.parquet"):
        texts(path)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(blocks_module, "LEAST_BYTES", 300)
    monkeypatch.setattr(streaming_module, "WINDOW", 3)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.zst", "a.json"])
def test_streamed_json_lines_are_cut_and_resumed_whatever_their_name(tmp_path, name) -> None:
    """The rows and their order are those of the plain file, and from any position on the same."""
    rng = np.random.default_rng(0)
    lines = "\n".join(json.dumps({"text": rng.bytes(60).hex()}) for _ in range(60))
    compress = {".gz": gzipped, ".zst": zstd}.get(Path(name).suffix, plain)
    write(tmp_path / "a" / name, compress(lines))

    def opened(cache: str, **fields) -> Streamed:
        source = (str(tmp_path / "a" / name),)
        data = DataConfig(
            source=source, streaming=True, sequence=32, cache=str(tmp_path / cache), **fields
        )
        text = open_text(data).sets[0].text
        assert len(text.blocks) > 5
        return Streamed(text, 0)

    whole = opened("one").read(np.arange(300))["tokens"]
    resumed = opened("two", threads=0).read(np.arange(200, 300))["tokens"]
    np.testing.assert_array_equal(resumed, whole[200:])
    assert not np.array_equal(resumed, whole[:100])


@pytest.mark.usefixtures("small_blocks")
def test_damage_of_a_streamed_file_is_named_at_the_scan(tmp_path: Path) -> None:
    """All truncated files at once, before anything is tokenized."""
    rng = np.random.default_rng(0)
    lines = "\n".join(json.dumps({"text": rng.bytes(60).hex()}) for _ in range(60))
    for name in ("a", "b"):
        write(tmp_path / "set" / f"{name}.jsonl.gz", gzipped(lines)[:-4])
    config = DataConfig(source=(str(tmp_path / "set"),), streaming=True, cache=str(tmp_path / "c"))
    with pytest.raises(DataError) as caught:
        open_text(config)
    assert sorted(Path(problem.where).name for problem in caught.value.problems) == [
        "a.jsonl.gz",
        "b.jsonl.gz",
    ]


def test_a_compressed_file_that_became_shorter_has_changed(tmp_path: Path) -> None:
    """A block beyond its new end is a problem, and reading comes to an end."""
    path = write(tmp_path / "a.jsonl.gz", gzipped(LINES))
    (file,) = find_files([str(path)])
    last = list(blocks_module._line_ranges(file, 300))[-1]
    block = blocks_module.TextBlock((last,), last.size)
    ids, _ = blocks_module.tokenize(block, ByteTokenizer(), "text")
    assert len(ids)
    write(path, gzipped(LINES[:300]))
    with pytest.raises(DataError, match="changed while it was read"):
        blocks_module.tokenize(block, ByteTokenizer(), "text")


def test_sets_of_a_mixture_are_decided_alike(tmp_path: Path) -> None:
    """A set of `.json` lines is rows; a problem of another names the set."""
    good = write(tmp_path / "a.json", "\n".join([LINES] * 3))
    config = DataConfig(
        mixture=(f"one=1:{good}", f"two=1:{good}"), sequence=8, cache=str(tmp_path / "c")
    )
    assert [each.text.documents for each in open_text(config).sets] == [90, 90]
    bad = write(tmp_path / "b.txt", LINES)
    config = DataConfig(mixture=(f"one=1:{good}", f"two=1:{bad}"), sequence=8)
    with pytest.raises(DataError, match=r"two: .*b\.txt: holds JSON lines"):
        open_text(config)


def test_evaluation_sets_are_decided_alike(tmp_path: Path) -> None:
    """Rows of `.json`, text that holds rows, and an address of the Hub, in a set for evaluation."""
    rows = write(tmp_path / "a.json", LINES)
    data = DataConfig(cache=str(tmp_path / "c"))
    config = TrainConfig(model=PRESETS["test"], rules=LLAMA, data=data)
    assert read_source(config, [str(rows)], ByteTokenizer()).documents == len(ROWS)
    with pytest.raises(DataError, match=r"rename it to b\.jsonl"):
        read_source(config, [str(write(tmp_path / "b.txt", LINES))], ByteTokenizer())
    with pytest.raises(ConfigError, match="hf download a/b"):
        dataclasses.replace(config, evaluate=EvaluationConfig(sets=("web=hf://datasets/a/b",)))


@pytest.mark.parametrize(
    ("entry", "command"),
    [
        ("HuggingFaceFW/fineweb", "HuggingFaceFW/fineweb --repo-type dataset --local-dir fineweb"),
        ("hf://datasets/a/b", "a/b --repo-type dataset --local-dir b, and give b"),
        (
            "hf://datasets/a/b@v1/data/*.parquet",
            "a/b --repo-type dataset --revision v1 --include 'data/*.parquet' --local-dir b, "
            "and give 'b/data/*.parquet'",
        ),
        ("https://huggingface.co/datasets/a/b/tree/main/en", "--include 'en/*' --local-dir b"),
        (
            "https://huggingface.co/datasets/wikitext/tree/main/x",
            "wikitext --repo-type dataset --include 'x/*' --local-dir wikitext",
        ),
        ("https://huggingface.co/datasets/a/treebank", "a/treebank --repo-type dataset"),
    ],
)
def test_an_id_of_the_hub_is_refused_with_its_download(entry, command, tmp_path, monkeypatch):
    """As a source, in a mixture; never taken for a path that was mistyped."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, DataError)) as caught:
        open_text(DataConfig(source=(entry,)))
    assert "hf download " in str(caught.value)
    assert command in str(caught.value)
    with pytest.raises((ConfigError, DataError), match="hf download"):
        open_text(DataConfig(mixture=(f"web=1:{entry}",)))


def test_paths_are_not_taken_for_ids_of_the_hub(tmp_path: Path, monkeypatch) -> None:
    """The control: below a folder that exists a name is mistyped, and other forms are paths."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "books" / "train.txt", "a")
    assert download_fix("HuggingFaceFW/fineweb")
    for entry in ("books/trian", "./a/b", "/a/b", "a/b/c", "a/*.txt", "books", "~/a"):
        assert download_fix(entry) == ""
    for entry in ("data/train.txt", "train/corpus.jsonl", "train/a.json.gz"):
        with pytest.raises(DataError, match="does not exist") as caught:
            find_files([entry])
        assert "hf download" not in str(caught.value)
    with pytest.raises(DataError, match=r"did you mean .train\.txt"):
        find_files(["books/trian.txt"])
