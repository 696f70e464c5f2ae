"""Text to token files: what is found, what is refused, what is cached."""

import dataclasses
import json
import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from spmd.data import corpus as corpus_module
from spmd.data import tokenizer as tokenizer_module
from spmd.data.array_record import _pieces as pieces_of
from spmd.data.array_record import check_array, describe_array
from spmd.data.cache_folder import CacheFolder
from spmd.data.corpus import Corpus, make_corpus
from spmd.data.documents import Documents
from spmd.data.loader import DataConfig, split_rows
from spmd.data.sources import find_files
from spmd.data.tokenizer import load_tokenizer
from spmd.errors import DataError
from tests.unit.test_tokenizer import WORDS, begin_with, bpe


def make(
    *source: Path | str, cache: Path, tokenizer: str = "bytes", validation: float = 0.3
) -> Corpus:
    return make_corpus(
        [str(s) for s in source],
        load_tokenizer(tokenizer),
        text_field="text",
        validation=validation,
        cache=CacheFolder(cache),
    )


def texts(ids: np.ndarray) -> list[str]:
    """The documents in a row of byte ids."""
    whole = load_tokenizer("bytes").decode(ids)
    assert whole.endswith("\0")
    return whole[:-1].split("\0")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 20 text files in two levels, and things that are not text."""
    root = tmp_path / "books"
    for i in range(20):
        path = root / f"part{i % 3}" / f"{i:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"document {i}. {WORDS}", encoding="utf-8")
    (root / "picture.png").write_bytes(b"\xff\xd8")
    (root / ".hidden").mkdir()
    (root / ".hidden" / "secret.txt").write_text("hidden")
    (root / "part0" / "empty.txt").write_text("")
    return root


def test_a_folder_is_every_text_file_in_it_once(folder: Path, cache: Path) -> None:
    """Both halves together hold each visible, non-empty text file exactly once, whole, in the order of paths."""
    corpus = make(folder, cache=cache)
    train, validation = texts(corpus.train), texts(corpus.validation)
    ordered = [p.read_text("utf-8") for p in sorted(folder.glob("part*/*.txt")) if p.stat().st_size]
    assert corpus.documents == len(ordered) == 20
    assert corpus.skipped == 0, "an empty file is no row without text"
    assert train == [text for text in ordered if text in train]
    assert validation == [text for text in ordered if text in validation]
    assert sorted(train + validation) == sorted(ordered)
    assert train
    assert validation
    assert corpus.train.dtype == np.uint16
    assert isinstance(corpus.train, np.memmap)
    assert not corpus.train.flags.writeable


def test_a_glob_a_folder_and_a_file_mean_the_same_documents(folder: Path, cache: Path) -> None:
    """The same files found three ways, or named twice, are the same corpus."""
    by_folder = make(folder, cache=cache)
    by_glob = make(folder / "**" / "*.txt", cache=cache)
    twice = make(folder, folder / "part1" / "01.txt", cache=cache)
    assert by_folder.fingerprint == by_glob.fingerprint == twice.fingerprint
    indirect = make(folder, folder / "part0" / ".." / "part1" / "01.txt", cache=cache)
    assert by_folder.fingerprint == indirect.fingerprint
    assert make(folder / "part1" / "*.txt", cache=cache).documents == 7
    assert make(folder / "part1", cache=cache).documents == 7


def test_a_glob_relative_to_the_working_folder(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pattern whose first part is already a wildcard searches the working folder."""
    monkeypatch.chdir(folder)
    assert make("*/*.txt", cache=cache).fingerprint == make(folder, cache=cache).fingerprint


def test_the_fingerprint_does_not_depend_on_where_the_folder_is(
    folder: Path, cache: Path, tmp_path: Path
) -> None:
    """A copy of a folder elsewhere is the same corpus."""
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    assert make(copy, cache=cache).fingerprint == make(folder, cache=cache).fingerprint


def test_the_fingerprint_depends_on_content_tokenizer_and_split(
    folder: Path, cache: Path, tmp_path: Path
) -> None:
    """A changed letter, a renamed file, another tokenizer or another split is another corpus."""
    prints = [
        make(folder, cache=cache).fingerprint,
        make(folder, cache=cache, validation=0.31).fingerprint,
    ]
    prints.append(
        make(folder, cache=cache, tokenizer=str(bpe(tmp_path / "tokenizer.json"))).fingerprint
    )
    (folder / "part0" / "00.txt").write_text("Document 0.")
    prints.append(make(folder, cache=cache).fingerprint)
    (folder / "part0" / "00.txt").rename(folder / "part0" / "0000.txt")
    prints.append(make(folder, cache=cache).fingerprint)
    assert len(set(prints)) == 5


def test_adding_a_file_moves_no_other(folder: Path, cache: Path) -> None:
    """Documents that were kept for validation stay there when the folder grows."""
    before = make(folder, cache=cache)
    (folder / "part0" / "000.txt").write_text("a new first document")
    after = make(folder, cache=cache)
    assert set(texts(before.validation)) <= set(texts(after.validation))
    assert set(texts(before.train)) <= set(texts(after.train))


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_neither_half_is_ever_empty(fraction: float, folder: Path, cache: Path) -> None:
    """However extreme the fraction, the half that would be empty holds exactly one document."""
    corpus = make(folder, cache=cache, validation=fraction)
    assert len(texts(corpus.validation if fraction < 0.5 else corpus.train)) == 1


def test_files_of_one_name_in_two_folders_are_two_documents(tmp_path: Path, cache: Path) -> None:
    """Two sources with one file of the same name each still give two halves."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.txt").write_text(f"text of {name}")
    corpus = make(tmp_path / "a", tmp_path / "b", cache=cache)
    assert sorted(texts(corpus.train) + texts(corpus.validation)) == ["text of a", "text of b"]


def test_a_single_document_gives_its_tail(tmp_path: Path, cache: Path) -> None:
    """One file is split into its beginning and, by the fraction, its end."""
    path = tmp_path / "one.txt"
    path.write_text("x" * 70 + "é" * 30, encoding="utf-8")
    corpus = make(path, cache=cache)
    assert texts(corpus.train) == ["x" * 70]
    assert texts(corpus.validation) == ["é" * 30]
    assert corpus.documents == 1


def test_lines_of_jsonl_are_documents(tmp_path: Path, cache: Path) -> None:
    """Each line is one document, split by its number; blank lines, a byte order mark and U+2028 do no harm."""
    path = tmp_path / "lines.jsonl"
    documents = [f"line {i} \u2028 {WORDS}" for i in range(40)]
    lines = [
        json.dumps({"id": i, "text": text}, ensure_ascii=False) for i, text in enumerate(documents)
    ]
    path.write_text("\ufeff" + "\n\n".join(lines) + "\n", encoding="utf-8")
    corpus = make(path, cache=cache)
    train, validation = texts(corpus.train), texts(corpus.validation)
    assert corpus.documents == 40
    assert sorted(train + validation) == sorted(documents)
    assert 4 <= len(validation) <= 20


def test_another_field_of_the_same_lines_is_another_corpus(tmp_path: Path, cache: Path) -> None:
    """The same file read by another field is not answered from the cache of the first."""
    path = tmp_path / "lines.jsonl"
    path.write_text(
        "".join(json.dumps({"en": f"word {i}", "fr": f"mot {i}"}) + "\n" for i in range(9))
    )
    by_field = {}
    for field in ("en", "fr"):
        corpus = make_corpus(
            [str(path)],
            load_tokenizer("bytes"),
            text_field=field,
            validation=0.3,
            cache=CacheFolder(cache),
        )
        by_field[field] = sorted(texts(corpus.train) + texts(corpus.validation))
    assert by_field == {"en": [f"word {i}" for i in range(9)], "fr": [f"mot {i}" for i in range(9)]}


def test_every_bad_line_is_named(tmp_path: Path, cache: Path) -> None:
    """Broken JSON, a missing or wrong field, half a surrogate and bad UTF-8 are reported at once by file:line."""
    path = tmp_path / "bad.jsonl"
    lines = [
        b'{"text": "fine"}',
        b"{",
        b'{"txt": "a"}',
        b'{"text": 3}',
        b"[1]",
        b'{"text": "\\ud800"}',
        b"\xff",
    ]
    lines.append(b"[" * 100_000)
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError) as caught:
        make(path, cache=cache)
    assert [p.where for p in caught.value.problems] == [f"{path}:{n}" for n in range(2, 9)]
    message = str(caught.value)
    assert 'did you mean "txt"' in message
    assert "not an object" in message
    assert message.count("is not UTF-8") == 2
    assert not list(cache.glob("*"))


def test_no_line_is_read_without_a_bound(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is longer than any document is named; at the bound, it is a document."""
    path = tmp_path / "long.jsonl"
    line = json.dumps({"text": "x" * 80}) + "\n"
    path.write_text(line * 2)
    monkeypatch.setattr("spmd.data.text_files.MAX_LINE_BYTES", len(line))
    assert make(path, cache=cache).documents == 2
    monkeypatch.setattr("spmd.data.text_files.MAX_LINE_BYTES", len(line) - 1)
    with pytest.raises(DataError, match=rf"long.jsonl:1: .*\n.*longer than {len(line) - 1} bytes"):
        make(path, cache=tmp_path / "another")


def test_a_line_without_text_is_skipped_and_counted(tmp_path: Path, cache: Path) -> None:
    """A null, an empty string and blanks are no documents, and not an error; the count survives in the cache."""
    path = tmp_path / "some.jsonl"
    found = ["one", None, "two", "", " \n", "three"]
    path.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in found))
    for _ in range(2):
        corpus = make(path, cache=cache)
        assert (corpus.documents, corpus.skipped) == (3, 3)
        assert sorted(texts(corpus.train) + texts(corpus.validation)) == ["one", "three", "two"]


def test_a_file_of_bad_lines_is_cut_short(tmp_path: Path, cache: Path) -> None:
    """A thousand bad lines are ten lines and a count."""
    path = tmp_path / "bad.jsonl"
    path.write_text("{\n" * 1000)
    with pytest.raises(DataError, match="has 990 more problems like these") as caught:
        make(path, cache=cache)
    assert len(caught.value.problems) == 11


def test_every_file_that_is_not_utf8_is_named(folder: Path, cache: Path) -> None:
    """Two files in another encoding are two problems, each with the byte that shows it."""
    for name in ("01", "04"):
        (folder / "part1" / f"{name}.txt").write_bytes("schön".encode("latin-1"))
    with pytest.raises(DataError, match="is not UTF-8") as caught:
        make(folder, cache=cache)
    assert [Path(p.where).name for p in caught.value.problems] == ["01.txt", "04.txt"]
    assert all("0xf6" in p.detail for p in caught.value.problems)


def test_every_missing_source_is_named_with_its_nearest_sibling(folder: Path, cache: Path) -> None:
    """A misspelled folder, a glob without matches and a folder without text are reported together."""
    (folder / "pictures").mkdir()
    with pytest.raises(DataError) as caught:
        make(
            folder / "part9", folder / "*.none", folder / "pictures", folder / "zzzzzz", cache=cache
        )
    problems = {Path(p.where).name: p for p in caught.value.problems}
    assert problems["part9"].what == problems["zzzzzz"].what == "does not exist"
    assert problems["part9"].fix.startswith('did you mean "part')
    assert problems["zzzzzz"].fix == f"look in {folder}"
    assert problems["*.none"].what == problems["pictures"].what == "holds no text files"
    assert ".txt" in problems["pictures"].detail


def test_a_corpus_of_empty_files_is_refused(tmp_path: Path, cache: Path) -> None:
    """Files that hold only blanks are no corpus."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(" \n")
    with pytest.raises(DataError, match="2 files, all empty"):
        make(tmp_path / "*.txt", cache=cache)


def count_encodings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that the byte tokenizer encodes from now on."""
    seen: list[str] = []
    encode = tokenizer_module.ByteTokenizer.encode
    monkeypatch.setattr(
        tokenizer_module.ByteTokenizer,
        "encode",
        lambda self, text: seen.append(text) or encode(self, text),
    )
    return seen


def test_a_cached_corpus_is_not_tokenised_again(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second load encodes nothing and holds the same ids; the cache is one folder with three files."""
    seen = count_encodings(monkeypatch)
    first = make(folder, cache=cache)
    assert len(seen) == 20
    second = make(folder, cache=cache)
    assert len(seen) == 20
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.validation, second.validation)
    assert first.fingerprint == second.fingerprint
    assert [p.name for p in cache.iterdir()] == [first.fingerprint]
    assert len(list(cache.glob("*/*"))) == 5


@pytest.mark.parametrize(
    "damage", ["truncate", "empty", "missing", "garbage", "no folder", "no count"]
)
def test_a_damaged_cache_is_made_again(damage: str, folder: Path, cache: Path) -> None:
    """Half a file, no file or other bytes in the cache are noticed and replaced by the right ids."""
    first = make(folder, cache=cache)
    expected = np.array(first.train)
    place = cache / first.fingerprint
    path = place / "train.npy"
    content = path.read_bytes()
    # Written beside and renamed: overwriting a file that is mapped would break the mapping of
    # `first`.
    other = cache / "other"
    other.write_bytes({"truncate": content[:-7], "garbage": b"garbage" * 100}.get(damage, b""))
    if damage in ("truncate", "empty", "garbage"):
        other.rename(path)
    else:
        other.unlink()
    if damage == "missing":
        path.unlink()
    if damage == "no folder":
        shutil.rmtree(place)
    if damage == "no count":
        (place / "corpus.json").write_text("{}")
    again = make(folder, cache=cache)
    np.testing.assert_array_equal(again.train, expected)
    assert again.documents == 20
    np.testing.assert_array_equal(np.load(path, mmap_mode="r"), expected)
    assert [p.name for p in cache.iterdir()] == [first.fingerprint]


def changed_ids(ids: np.ndarray, damage: str) -> np.ndarray:
    """Ids as damage leaves them in a file that NumPy reads without an error."""
    other = np.array(ids)
    if damage == "shorter":
        return other[: len(other) // 2]
    if damage == "longer":
        return np.concatenate([other, other])
    if damage == "beyond the vocabulary":
        other[len(other) // 2] = 60_000
    elif damage == "another id":
        other[-2] += 1
    elif damage == "wider":
        other = other.astype(np.uint32)
    elif damage == "two dimensions":
        other = other[:, None]
    return other


@pytest.mark.parametrize("name", ["train", "validation", "train_ends"])
@pytest.mark.parametrize(
    "damage",
    ["shorter", "longer", "beyond the vocabulary", "another id", "wider", "two dimensions"],
)
def test_a_cache_of_other_ids_is_made_again(
    damage: str, name: str, folder: Path, cache: Path
) -> None:
    """Of another length, type or content than was written: tokenized again, and a line says so.

    Control: an intact cache is used without a line.
    """
    first = make(folder, cache=cache)
    expected = np.array(getattr(first, name))
    path = cache / first.fingerprint / f"{name}.npy"
    path.unlink()
    np.save(path, changed_ids(expected, damage))
    again = make(folder, cache=cache)
    np.testing.assert_array_equal(getattr(again, name), expected)
    (line,) = again.notes
    assert line.startswith(f"the cached tokens in {path.parent} were damaged ({name} ")
    assert line.endswith("the text was tokenized again")
    assert make(folder, cache=cache).notes == () == first.notes


def test_a_record_with_an_id_beyond_the_vocabulary_is_not_used(folder: Path, cache: Path) -> None:
    """Even if ids and record agree, as in a cache that another tokenizer wrote."""
    first = make(folder, cache=cache)
    place = cache / first.fingerprint
    ids = np.array(first.train)
    ids[3] = 999
    (place / "train.npy").unlink()
    np.save(place / "train.npy", ids)
    about = json.loads((place / "corpus.json").read_text())
    about["arrays"]["train"] = describe_array(ids)
    (place / "corpus.json").write_text(json.dumps(about))
    again = make(folder, cache=cache)
    assert "train has the id 999, of a vocabulary of 256" in again.notes[0]
    assert int(again.train.max()) < 256


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "{}",
        "[]",
        "null",
        '{"documents": 1e400}',
        '{"arrays": 7, "documents": 20, "skipped": 0}',
        '{"arrays": {"train": []}}',
        '{"documents": ' + "9" * 400 + "}",
        '{"documents": ' + "9" * 5000 + "}",
        "\0",
    ],
)
def test_a_damaged_record_of_a_cache_is_made_again(text: str, folder: Path, cache: Path) -> None:
    """JSON that is nested too deeply, of the wrong kind or with a number that is none."""
    first = make(folder, cache=cache)
    (cache / first.fingerprint / "corpus.json").write_text(text)
    again = make(folder, cache=cache)
    assert again.documents == 20
    assert "were damaged" in again.notes[0]


def test_counts_that_are_no_numbers_are_damage(folder: Path, cache: Path) -> None:
    """A record whose arrays fit, and whose numbers of documents do not."""
    first = make(folder, cache=cache)
    place = cache / first.fingerprint / "corpus.json"
    intact = json.loads(place.read_text())
    for documents in ("20", -1, 10**400, None, 2.5, True):
        place.write_text(json.dumps({**intact, "documents": documents}))
        again = make(folder, cache=cache)
        assert again.documents == 20
        assert "no number of documents" in again.notes[0]


def test_ids_beyond_the_vocabulary_are_an_error_where_rows_are_made(
    folder: Path, cache: Path
) -> None:
    """In pieces of a large cache that opening it does not read; control: the last id that there is."""
    corpus = make(folder, cache=cache)
    for packing in ("windows", "documents"):
        config = DataConfig(source=("x",), sequence=16, packing=packing)
        for largest, fails in ((255, False), (256, True), (70_000, True)):
            ids = corpus.train.astype(np.uint32)
            ids[40:60] = largest
            bad = dataclasses.replace(corpus, train=ids)
            rows, _ = split_rows(config, bad)
            every = np.arange(len(rows))
            if not fails:
                rows.rows(every)
                continue
            with pytest.raises(DataError, match=f"the id {largest}, and the tokenizer's"):
                rows.rows(every)


def test_the_checksum_of_a_large_array_reads_pieces_of_it() -> None:
    """4 MiB of 32: a change in the first piece, in the last and in one between them is seen.

    Control: one between two pieces is not, so rows are compared with the vocabulary.
    """
    ids = np.arange(2**23, dtype=np.uint32)
    record = describe_array(ids)
    check_array("ids", ids, record)
    pieces = list(pieces_of(ids))
    assert sum(piece.nbytes for piece in pieces) == 2**22
    between = int(pieces[30][-1]) + 1
    for at in (0, int(pieces[30][0]), 2**23 - 1, between):
        ids[at] += 1
        if at == between:
            check_array("ids", ids, record)
        else:
            with pytest.raises(ValueError, match="other elements"):
                check_array("ids", ids, record)
        ids[at] -= 1


def test_a_failure_in_the_middle_leaves_nothing(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When tokenising stops half way, no folder is left and the next load is whole."""
    with monkeypatch.context() as patched:
        seen = count_encodings(patched)
        counted = tokenizer_module.ByteTokenizer.encode

        def stop(self: tokenizer_module.ByteTokenizer, text: str) -> np.ndarray:
            if len(seen) == 10:
                raise KeyboardInterrupt
            return counted(self, text)

        patched.setattr(tokenizer_module.ByteTokenizer, "encode", stop)
        with pytest.raises(KeyboardInterrupt):
            make(folder, cache=cache)
        assert len(seen) == 10
    assert not list(cache.iterdir())
    assert len(texts(make(folder, cache=cache).train)) > 10


def test_a_leftover_of_a_killed_process_is_not_trusted(folder: Path, cache: Path) -> None:
    """A temporary folder that a killed process left behind is neither used nor in the way."""
    fingerprint = make(folder, cache=cache).fingerprint
    (cache / fingerprint).rename(cache / f".{fingerprint[:16]}-killed")
    (cache / f".{fingerprint[:16]}-killed" / "train.npy").write_bytes(b"half")
    corpus = make(folder, cache=cache)
    assert corpus.documents == len(texts(corpus.train)) + len(texts(corpus.validation)) == 20


def test_many_loads_at_once_agree(folder: Path, cache: Path) -> None:
    """Eight simultaneous first loads all succeed, hold the same ids and leave one folder."""
    with ThreadPoolExecutor(8) as pool:
        loads = list(pool.map(lambda _: make(folder, cache=cache), range(8)))
    for load in loads:
        np.testing.assert_array_equal(load.train, loads[0].train)
    assert [p.name for p in cache.iterdir()] == [loads[0].fingerprint]


def test_a_file_that_changes_meanwhile_is_noticed(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text written between hashing and tokenising is refused, not stored under the old hash."""
    scan = corpus_module._scan

    def scan_then_change(documents: Documents) -> np.ndarray:
        scores = scan(documents)
        documents.files[3].path.write_text("other text")
        return scores

    monkeypatch.setattr(corpus_module, "_scan", scan_then_change)
    with pytest.raises(DataError, match="changed while it was read"):
        make(folder, cache=cache)
    assert not list(cache.iterdir())


def test_a_cache_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    """A cache below a file is an error that names it and says what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot hold the tokenized text") as caught:
        make(folder, cache=tmp_path / "file" / "cache")
    assert caught.value.problems[0].where == str(tmp_path / "file" / "cache")


def test_bpe_documents_end_with_its_end_token(folder: Path, cache: Path, tmp_path: Path) -> None:
    """With a trained BPE the ids decode to the documents, one end token after each."""
    path = bpe(tmp_path / "tokenizer.json")
    corpus = make(folder, cache=cache, tokenizer=str(path))
    ends = np.flatnonzero(corpus.train == corpus.tokenizer.eos)
    decoded = [corpus.tokenizer.decode(part[:-1]) for part in np.split(corpus.train, ends + 1)[:-1]]
    assert decoded == texts(make(folder, cache=cache).train)
    assert ends[-1] == len(corpus.train) - 1
    assert len(corpus.train) < len(make(folder, cache=cache).train)


def test_documents_begin_as_prompts_do(folder: Path, cache: Path, tmp_path: Path) -> None:
    """What a tokenizer puts before a text is before every document, in a corpus of its own; text injects none."""
    special = ("<|endoftext|>", "<s>")
    (folder / "injects.txt").write_text("a <s> b<|endoftext|>" * 9)
    path = bpe(tmp_path / "tokenizer.json", special=special)
    plain = make(folder, cache=cache, tokenizer=str(path))
    begin_with(path, ("<s>", 1))
    corpus = make(folder, cache=cache, tokenizer=str(path))
    for ids, before in ((corpus.train, plain.train), (corpus.validation, plain.validation)):
        assert ids[0] == 1
        np.testing.assert_array_equal(
            np.flatnonzero(ids == 1)[1:], np.flatnonzero(ids == 0)[:-1] + 1
        )
        np.testing.assert_array_equal(ids[ids != 1], before)
    assert (corpus.train == 1).sum() + (corpus.validation == 1).sum() == corpus.documents
    digest = corpus.tokenizer.name.split(":")[1]
    assert (corpus.tokenizer.name, plain.tokenizer.name.count(":")) == (
        f"tokenizer.json:{digest}:starts 1",
        1,
    )


def test_a_large_vocabulary_takes_four_bytes_an_id(folder: Path, cache: Path) -> None:
    """A vocabulary above 65,536 is stored as uint32."""
    wide = tokenizer_module.ByteTokenizer(name="wide", vocab=2**16 + 1, eos=2**16)
    corpus = make_corpus(
        [str(folder)], wide, text_field="text", validation=0.3, cache=CacheFolder(cache)
    )
    assert corpus.train.dtype == np.uint32
    assert corpus.train[-1] == 2**16


def test_stdlib_is_the_source_of_this_python(cache: Path) -> None:
    """The word stdlib gives more than 400 modules, `dataclasses` whole among them, and no test or package."""
    files = find_files(["stdlib"])
    names = {file.key for file in files}
    assert len(names) > 400
    assert {"0/dataclasses.py", "0/json/decoder.py"} <= names
    assert not [n for n in names if "site-packages" in n or "/test/" in n or "_sysconfigdata" in n]
    root = Path(sysconfig.get_paths()["stdlib"])
    assert all((root / name.removeprefix("0/")).is_file() for name in names)
    corpus = make("stdlib", cache=cache, validation=0.05)
    held_out = len(corpus.validation) / (len(corpus.train) + len(corpus.validation))
    assert 0.01 < held_out < 0.15
    source = (root / "dataclasses.py").read_bytes() + b"\0"
    assert any(
        source in ids.astype(np.uint8).tobytes() for ids in (corpus.train, corpus.validation)
    )
